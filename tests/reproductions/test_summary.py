"""The page that is read in a minute: its counts, verdicts, times and headline by hand, and those in
the README.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.headline import headline
from kairosfl_reproductions.item import TEXT
from kairosfl_reproductions.public import pfl
from kairosfl_reproductions.results import read, worded
from kairosfl_reproductions.speed import beside_pfl, speed
from kairosfl_reproductions.summary import chapter, counts, mean_gain, summary
from kairosfl_reproductions.verdicts import published, tally
from kairosfl_reproductions.words import METHODS, setting, words

ROOT = Path(__file__).parents[2]
PAPERS = ["fedaware", "pa3fed", "fedcl", "alt"]
NOWHERE = Path("there/is/no/such/file.json")


def cell(values, printed=None, *, baseline="", rounds=10, planned=10, measure="final"):
    """A cell whose seeds ended with these values of the measure."""
    runs = [
        {
            "seed": seed,
            "rounds": rounds,
            "device": "NVIDIA H200",
            "values": {measure: value, "total_seconds": 30.0},
        }
        for seed, value in enumerate(values)
    ]
    return {
        "baseline": baseline,
        "printed": printed or {},
        "comparable": True,
        "rounds": planned,
        "runs": runs,
    }


def results(item, cells, *, claim="", measure="final", **more):
    return {
        "item": item,
        "title": item,
        "claim": claim,
        "note": "",
        "measures": [measure],
        "cells": cells,
        **more,
    }


def stored():
    """Every file of results in this repository, in the order of the page."""
    found = {path.stem: path for path in (ROOT / "results").glob("*.json")}
    return [
        worded(read(found[stem])) for item in ITEMS if (stem := item.replace("/", "-")) in found
    ]


def split(everything):
    """The items of papers, and those of public benchmarks."""
    return (
        [each for each in everything if chapter(each) not in ("public", "beyond", "searches")],
        [each for each in everything if chapter(each) == "public"],
    )


def rows(everything, remarks=None):
    lines = summary(everything, remarks or {}, "results", "", NOWHERE)
    return [
        line.strip("| ").split(" | ") for line in lines if line.startswith("| [") and "**" in line
    ]


def test_readings_of_one_published_value_are_several_comparisons_with_one_value():
    table = results(
        "tiny/table",
        {
            "dir0.1-fedavg": cell([50.0], {"final": 60.0}),
            "dir0.1-fedavg-released": cell([59.0], {"final": 60.0}),
            "dir0.1-scaffold": cell([10.0], {"final": 10.0}),
            "iid-scaffold": cell([20.0], {"final": 10.0}),  # another value, though the same number
            "iid-fedavg": cell([60.0, 70.0], {"final": 75.0}),
            "iid-fedprox": cell([60.0], {"final": 60.0}, rounds=5),  # not finished
        },
    )
    readings = results("tiny/table-readings", {"iid-scaffold-steps": cell([11.0], {"final": 10.0})})
    found = tally([table, readings])
    assert (found.reproduced, found.open, found.comparisons, found.met, found.values) == (
        3,
        1,
        6,
        3,
        4,
    )
    assert counts([table, readings]) == (
        "In 6 comparisons with 4 published values (an unclear paper has several readings of one value), 3 came within "
        "2 points and 1 is open because our seeds differ widely; 3 of the 4 values were reproduced by at least one "
        "reading."
    )


def test_a_gain_names_its_measure_and_the_rounds_of_what_is_compared():
    cells = {
        "cifar10-fedavg": cell([28.0], rounds=6, measure="critical"),  # not compared with anything
        "mnist-fedavg": cell([83.0], measure="critical"),
        "mnist-fedavg-cl": cell([74.0], baseline="mnist-fedavg", measure="critical"),
    }
    assert mean_gain(results("tiny/a", cells, measure="critical")) == (
        "mean difference −9.0 in critical rounds in 1 pair of cells"
    )
    cells = {
        "a-fedavg": cell([30.0], rounds=6),
        "a-fedavg-cl": cell([31.5], baseline="a-fedavg", rounds=6),
    }
    assert (
        mean_gain(results("tiny/b", cells))
        == "mean gain +1.5 points in 1 pair of cells after 6 of 10 rounds"
    )
    cells |= {"b-fedavg": cell([30.0]), "b-fedavg-cl": cell([30.5], baseline="b-fedavg")}
    assert (
        mean_gain(results("tiny/b", cells))
        == "mean gain +1.0 points in 2 pairs of cells after 6 or 10 of 10 rounds"
    )
    assert mean_gain(results("tiny/c", {"a-fedavg": cell([30.0])})) == ""


def test_every_paper_and_public_source_has_one_row_with_its_verdict():
    value = {"iid-fedavg": cell([60.0], {"final": 61.0})}
    other = {"iid-fedavg-released": cell([50.0], {"final": 61.0})}
    everything = [
        results("tiny/appendix", {"a-fedavg": cell([1.0])}),
        results("tiny/table", value, claim="It helps."),
        results("public/one", value),
        results("public/one-readings", other),
        results("public/two", value),
        results("public/clock", {"iid-fedavg": cell([1.0], {"total_seconds": 3.0})}),
        results("beyond/tiny", value, claim="Not of a paper."),
    ]
    said = {
        each: f"Verdict: {each}: in words"
        for each in ("tiny/appendix", "public/one", "public/one-readings")
    }
    assert [(row[0], row[1], row[-1]) for row in rows(everything, said)] == [
        (
            "[tiny](results/tiny.md#tinytable)",
            "It helps.",
            "**no published numbers to compare**",
        ),
        (
            "[public/one](results/public.md#publicone)",
            "1 published value",
            "**public/one**: in words",
        ),
        ("[public/two](results/public.md#publictwo)", "1 published value", "**1 of 1 reproduced**"),
    ]
    assert (
        rows(everything)[1][2]
        == "1 of 1 value within 2 points with at least one reading (1 of 2 comparisons)"
    )


def test_each_paper_has_one_row_and_every_verdict_that_the_remarks_state_is_in_the_table():
    everything = stored()
    remarks = {
        each["item"]: path.read_text()
        for each in everything
        if (path := ROOT / "results" / f"{each['item'].replace('/', '-')}.md").is_file()
    }
    table = rows(everything, remarks)
    papers = [row[0] for row in table if "public.md" not in row[0]]
    assert [re.search(r"results/(\w+)\.md", paper)[1] for paper in papers] == PAPERS
    verdicts = [
        text.partition("\n")[0].partition(": ")[2]
        for text in remarks.values()
        if text.startswith("Verdict: ")
    ]
    assert len(verdicts) > len(table)
    lines = summary(everything, remarks, "results", "", NOWHERE)
    items = lines[lines.index("## All items") :]
    assert all(any(line.endswith(f"| {verdict} |") for line in items) for verdict in verdicts)


def test_what_was_not_run_is_counted_and_named():
    everything = [
        each for each in stored() if each["item"] in ("fedaware/table2", "public/fl-simulator")
    ]
    table, simulator = ({*ITEMS[each["item"]].cells} for each in everything)
    assert published(everything[1:]) == len(simulator) == 24
    # 7 methods with and without ×AWARE on CIFAR-10 and CIFAR-100; AG News is not compared.
    assert published(everything[:1]) == 28
    left = 28 - tally(everything[:1]).values
    assert 0 < left < 28
    assert counts(everything[:1]).endswith(
        f"Another {left} comparable values of the same tables were not run, or not to the end."
    )
    assert "(another 19 were not run)" in headline(everything[1:])
    text = "\n".join(summary(everything, {}, "results", "", NOWHERE))
    run = len(everything[0]["cells"])
    assert (
        f"[fedaware/table2](results/fedaware.md#fedawaretable2) | {run} of {len(table)} |" in text
    )
    assert "Not run yet: `fedaware/solver`, " in text


def test_the_readme_has_the_numbers_of_the_results():
    readme, index = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/index.md")
    )
    ours, theirs = map(tally, split(stored()))
    assert (
        f"{ours.met} of {ours.values} of FedAWARE and PA3Fed ({ours.reproduced} of {ours.comparisons} compar"
        in readme
    )
    assert (
        f"{ours.open} more are open) and {theirs.met} of {theirs.values} of NIID-Bench and FL-Simulator"
        in readme
    )
    assert (
        f"**{ours.met} of {ours.values}** published values within 2 points with at least one reading"
        in index
    )
    assert (
        f"of {ours.comparisons} comparisons, {ours.reproduced}, and {ours.open} are open" in index
    )
    assert (
        f"Of {theirs.values} published values of NIID-Bench and FL-Simulator, {theirs.met} "
        in index
    )
    for text in (readme, index):
        assert (
            f"With at least one reading of each we reproduced {ours.met} of {ours.values} published values of two "
            f"papers and {theirs.met} of {theirs.values} of public benchmarks" in text
        )


def test_the_headline_has_what_was_run():
    hundred = {
        "dir0.5-fedavg": cell([60.0], {"final": 59.4}),
        "dir0.5-scaffold": cell([10.0, 66.0, 65.0], {"final": 10.0}),
    }
    clipped = {"dir0.5-scaffold-clipped": cell([64.0, 61.0])}
    simulator = {"dir0.1-fedavg": cell([77.0], {"final": 77.3, "total_seconds": 7200.0})}
    public = [
        results("public/niid-bench-100", hundred),
        results("public/niid-bench-100-readings", clipped),
        results("public/fl-simulator", simulator, hardware="one abacus"),
    ]
    said = headline(public)
    assert (
        "SCAFFOLD trains where NIID-Bench prints 10.0 (2 of 3 seeds end above the published FedAvg, 59.4; 2 of 2 if"
        in said
    )
    assert (
        "takes 0 minutes on one NVIDIA H200 where its authors report 2.0 hours on one abacus, and 2 of 3"
        in said
    )
    assert headline(public[2:]).startswith("FL-Simulator's FedAvg takes")
    assert headline([]) == ""


def test_times_are_shown_with_the_hardware_of_both():
    timed = {"iid-fedavg": cell([1.0], {"total_seconds": 1234.0})}
    everything = [
        results("public/a", timed, hardware="one abacus"),
        results("public/b", timed),
        results("public/c", {"iid-fedavg": cell([1.0])}),
    ]
    lines = speed(everything, NOWHERE, lambda each: each["title"])
    assert (
        lines[0]
        == "| benchmark | run | seconds, theirs | their hardware | seconds, ours | our hardware |"
    )
    assert lines[2:4] == [
        "| [public/a](public/a) | IID, FedAvg | 1,234 | one abacus | 30 | NVIDIA H200 |",
        "| [public/b](public/b) | IID, FedAvg | 1,234 | not stated | 30 | NVIDIA H200 |",
    ]
    assert lines[4] == ""
    printed = [
        item
        for item in ITEMS.values()
        if any("total_seconds" in each.printed for each in item.cells.values())
    ]
    assert len(printed) >= 3
    assert all(item.hardware for item in printed)


def test_the_time_of_pfl_is_from_the_run_beside_it_or_says_that_it_is_not(tmp_path):
    path = tmp_path / "against-pfl.json"
    found = beside_pfl(path, 1500)
    assert found.theirs == pytest.approx(1500 * pfl.SECONDS)
    assert found.hardware == "NVIDIA H200, 521.5 ms a round in an earlier run of ours"
    assert found.ours is None
    curve = {
        "pfl": {"curve": [[10, 0.1, 6.0], [40, 0.2, 21.0]]},
        "kairos": {"curve": [[10, 0.1, 1.0], [1500, 0.7, 9.5]]},
    }
    path.write_text(json.dumps({"setting": "iid", "rounds": 1500, **curve}))
    found = beside_pfl(path, 1500)
    assert (found.theirs, found.ours) == (pytest.approx(750.0), 9.5)
    assert found.hardware == "the same GPU, in the same process, from rounds 10 to 40"
    assert beside_pfl(path, 10).ours is None  # not as many rounds
    item = results(
        "public/pfl-cifar10-iid", {"iid-fedavg": cell([70.0], rounds=1500, planned=1500)}
    )
    row = speed([item], path, lambda each: "x")[2]
    assert (
        row
        == f"| [{item['title']}](x) | IID, FedAvg | 750 | {found.hardware} | 9.5 | NVIDIA H200 |"
    )
    path.write_text(
        json.dumps({"setting": "iid", **curve, "pfl": {"missing": "No module named 'pfl'"}})
    )
    assert beside_pfl(path, 1500).ours is None


def test_stored_results_are_shown_with_the_words_of_their_item_today():
    old = results(
        "public/pfl-cifar10-iid",
        {"iid-fedavg": cell([70.0], {"total_seconds": 699.0}), "gone": cell([1.0])},
    )
    new = worded(old)
    assert new["note"] == ITEMS["public/pfl-cifar10-iid"].note
    assert new["cells"]["iid-fedavg"]["printed"] == {}
    assert new["cells"]["iid-fedavg"]["runs"] == old["cells"]["iid-fedavg"]["runs"]
    assert new["cells"]["gone"] == old["cells"]["gone"]
    unknown = results("tiny/table", {})
    assert worded(unknown) == unknown


def test_public_cells_are_named_in_words_and_a_reading_does_not_repeat_them():
    for item in ITEMS.values():
        if item.paper == "public":
            for name, each in item.cells.items():
                assert all(setting(part) or part in METHODS for part in name.split("-")), name
                assert each.reading == TEXT or not any(
                    part in each.reading for part in words(name).split(", ")
                )
