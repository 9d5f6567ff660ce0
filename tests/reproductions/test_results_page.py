"""Results files and the page made of them: worked by hand, merged, and the same when made twice."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny import ITEM

from kairosfl.errors import UserError
from kairosfl.models import options
from kairosfl.report.draw import _steady
from kairosfl.runs.config import dump, tables
from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.curves import curves, draw_curves, panels
from kairosfl_reproductions.details import section
from kairosfl_reproductions.measures import MEASURES, RecordedRun
from kairosfl_reproductions.page import write_results_page
from kairosfl_reproductions.results import collect, gain, read, save, table
from kairosfl_reproductions.verdicts import agreement, claim_holds, gains
from kairosfl_reproductions.words import words

ROOT = Path(__file__).parents[2]


def write_run(folder, name, seed, accuracies, *, rounds=None):
    """A run folder with these accuracies, as a run of the cell would leave it."""
    path = folder / f"{name}-{seed}"
    path.mkdir(parents=True)
    config = ITEM.cells[name].config(seed=seed, rounds=rounds)
    (path / "config.toml").write_text(dump(tables(config)))
    (path / "run.json").write_text(
        json.dumps(
            {"version": "0.1.0", "device": "x86_64", "engine": "loop", "precision": "float32"}
        )
    )
    with (path / "metrics.jsonl").open("w") as lines:
        for number, accuracy in enumerate(accuracies, 1):
            row = {
                "round": number,
                "accuracy": accuracy,
                "cohort": 3,
                "seconds": 0.5,
                "critical": number < 3,
            }
            row["epochs_total"] = 3
            row |= {"samples": 150, "steps": 15, "passes": 347 + number}
            row |= {"bytes_down": 8000, "bytes_up": 4000}
            lines.write(json.dumps(row) + "\n")
    return path


@pytest.fixture
def folder(tmp_path):
    for seed, last in ((0, 0.38), (1, 0.44)):
        write_run(tmp_path / "runs", "digits-fedavg", seed, [0.1, 0.2, 0.3, 0.3, 0.3, last])
    for seed, last in ((0, 0.40), (1, 0.43)):
        write_run(tmp_path / "runs", "digits-fedavgm", seed, [0.1, 0.2, 0.39, 0.3, 0.3, last])
    return tmp_path


def test_runs_are_found_by_their_configuration(folder):
    results = collect([folder / "runs"], ITEM)
    first = results["cells"]["digits-fedavg"]
    assert [run["values"] for run in first["runs"]] == [
        {"last_tenth": 38.0, "rounds_to": 6, "cohort": 3.0},
        {"last_tenth": 44.0, "rounds_to": 6, "cohort": 3.0},
    ]
    assert [run["values"]["rounds_to"] for run in results["cells"]["digits-fedavgm"]["runs"]] == [
        3,
        None,
    ]
    parts = collect(
        [folder / "runs"], replace(ITEM, measures=("rounds_to_half", "rounds_to_most"))
    )["cells"]
    found = [tuple(run["values"].values()) for run in parts["digits-fedavgm"]["runs"]]
    assert found == [(2, 3), (3, 6)]  # of 0.38: 0.19 and 0.342; of 0.44: 0.22 and 0.396
    assert first["runs"][0]["curves"]["accuracy"] == {
        "round": [1, 2, 3, 4, 5, 6],
        "value": [0.1, 0.2, 0.3, 0.3, 0.3, 0.38],
    }
    assert first["runs"][0]["seconds"] == 3.0
    assert first["runs"][0]["a_round"] == {
        "samples": 150.0,
        "steps": 15.0,
        "passes": 350.5,  # 348 to 353
        "bytes_down": 8000.0,
        "bytes_up": 4000.0,
    }
    assert first["config"]["algorithm"] == "fedavg"
    assert "seed" not in first["config"]


def test_what_a_round_took_is_not_known_of_runs_that_recorded_it_in_some_rounds(tmp_path):
    path = write_run(tmp_path, "digits-fedavg", 0, [0.1, 0.2])
    lines = (path / "metrics.jsonl").read_text().splitlines(keepends=True)
    before = json.loads(lines[0])
    del before["passes"]
    (path / "metrics.jsonl").write_text(json.dumps(before) + "\n" + lines[1])
    (run,) = collect([tmp_path], ITEM)["cells"]["digits-fedavg"]["runs"]
    assert run["a_round"]["passes"] is None
    assert run["a_round"]["steps"] == 15.0


def test_results_of_earlier_versions_give_the_same_pages(folder):
    new = collect([folder / "runs"], ITEM)
    old = json.loads(json.dumps(new))
    for cell in old["cells"].values():
        for run in cell["runs"]:
            del run["a_round"]
    pages = []
    for version, results in (("new", new), ("old", old)):
        save(results, folder / version / "results")
        page = write_results_page(folder / version / "results", folder / version / "results.md")
        details = folder / version / "results" / "tiny.md"
        pages.append((page.read_text(), details.read_text()))
    assert pages[0] == pages[1]


def test_curves_of_earlier_versions_are_read_by_their_names_of_today(folder):
    results = collect([folder / "runs"], ITEM)
    for cell in results["cells"].values():
        for run in cell["runs"]:
            run["curves"]["fisher"] = {"round": [1, 2], "value": [3.0, 4.0]}
    (run, _) = read(save(results, folder / "results"))["cells"]["digits-fedavg"]["runs"]
    assert run["curves"]["fedfim"] == {"round": [1, 2], "value": [3.0, 4.0]}
    assert list(run["curves"]) == ["accuracy", "fedfim"]


def test_the_table_and_the_gain_by_hand(folder):
    results = collect([folder / "runs"], ITEM)
    row = table(results)[0]
    assert row["accuracy, final 10 %"] == "41.00 ± 4.24"
    assert row["accuracy, final 10 %: difference"] == "+1.00"
    assert gain(results, "digits-fedavg", "last_tenth") is None
    ours, printed = gain(results, "digits-fedavgm", "last_tenth")
    assert ours == pytest.approx([2.0, -1.0])
    assert printed == pytest.approx(5.0)


def test_agreement_needs_all_rounds_allows_two_points_and_leaves_open_what_seeds_do_not_tell(
    folder,
):
    cells = collect([folder / "runs"], ITEM)["cells"]
    assert agreement(cells["digits-fedavg"], "last_tenth") == "reproduced"  # 1 off
    assert (
        agreement(cells["digits-fedavgm"], "last_tenth") == "open"
    )  # 3.5 off, the deviation is 2.12
    cells["digits-fedavgm"]["runs"][1]["rounds"] = 5  # the shorter run no longer counts
    assert agreement(cells["digits-fedavgm"], "last_tenth") == "not reproduced"  # 5 off, one seed
    assert (
        agreement({**cells["digits-fedavgm"], "comparable": False}, "last_tenth") is None
    )  # not the paper's setting
    cells["digits-fedavgm"]["runs"][0]["rounds"] = 5
    assert agreement(cells["digits-fedavgm"], "last_tenth") is None


def test_the_page_is_the_same_when_made_twice_and_says_what_did_not_reproduce(folder):
    results = collect([folder / "runs"], ITEM)
    results["cells"]["digits-fedavgm"]["runs"].pop()
    save(results, folder / "results")
    (folder / "results" / "tiny-table1.md").write_text("Likely reason: it is tiny.\n")
    page = write_results_page(folder / "results", folder / "results.md")
    details = folder / "results" / "tiny.md"
    first = page.read_bytes(), details.read_bytes()
    save(read(folder / "results" / "tiny-table1.json"), folder / "results")
    write_results_page(folder / "results", page)
    assert (page.read_bytes(), details.read_bytes()) == first
    summary, text = (each.decode() for each in first)
    assert (
        "- **Papers.** In 2 comparisons with 2 published values, 1 came within 2 points." in summary
    )
    assert (
        "| [tiny](results/tiny.md#tinytable1) | Momentum helps. | 1 of 2 values within 2 points; "
        "mean gain +2.0 points, published +5.0, in 1 pair of cells | 1 to 2 | **holds in part** |"
        in summary
    )
    assert "| [tiny/table1](results/tiny.md#tinytable1) | 2 | 2 | 1 to 2 | 1 | 0 | 1 |" in summary
    assert summary.startswith("---\nhide:\n  - toc\n---\n\n# Results\n\n- **Papers.**")
    assert text.startswith("---\nhide:\n  - toc\n---\n\n# tiny")
    assert (
        "![Ours against the published accuracy, one point per comparison](assets/results/overview.svg)"
        in summary
    )
    assert "- digits, FedAvgM; half the momentum: ours 40.00, published 45.00, −5.00" in text
    assert "| digits, FedAvgM | digits, FedAvg | +2.00 | +5.00 | 6 | 1 | in part |" in text
    assert "The paper says: Momentum helps." in text
    assert "Likely reason: it is tiny." in text
    assert (
        "Run with version 0.1.0 (commit not recorded), loop engine, float32, CPU (x86_64)." in text
    )


def test_readings_are_told_apart_by_their_mean_distance_from_the_published_values(folder):
    results = collect([folder / "runs"], ITEM)
    assert "Mean distance" not in section(results)  # a cell for each reading: there is no mean
    for name, reading, shift in (
        ("a", "text", 0),
        ("b", "text", 3),
        ("c", "code", -2),
        ("d", "code", 1),
        ("e", "x", 0),
    ):
        cell = json.loads(json.dumps(results["cells"]["digits-fedavg"])) | {"reading": reading}
        for run in cell["runs"]:
            run["values"]["last_tenth"] += shift
        results["cells"][name] = cell
    del results["cells"]["digits-fedavg"], results["cells"]["digits-fedavgm"]
    text = section(results)  # ours is 41 where 40 is published
    assert (
        "| reading | cells | accuracy, final 10 % |\n| --- | ---: | ---: |\n| text | 2 | 2.50 |"
        in text
    )
    assert "| code | 2 | 1.50 |" in text
    assert "| x | 1 |" not in text


def test_the_verdict_on_a_claim_takes_the_closest_reading_or_what_the_remarks_say(folder):
    results = collect([folder / "runs"], ITEM)
    assert [(each.ours, each.printed, each.holds) for each in gains(results)] == [
        (pytest.approx(0.5), pytest.approx(5.0), "in part")
    ]
    assert claim_holds(results) == "holds in part"
    other = json.loads(json.dumps(results["cells"]["digits-fedavgm"]))
    for run in other["runs"]:
        run["values"]["last_tenth"] += 4
    results["cells"]["digits-fedavgm-released"] = other
    assert [each.holds for each in gains(results)] == ["yes"]
    assert claim_holds(results) == "holds"
    save(results, folder / "results")
    (folder / "results" / "tiny-table1.md").write_text("Verdict: holds on Sundays\n\nMore.\n")
    page = write_results_page(folder / "results", folder / "results.md")
    assert page.read_text().count("| **holds on Sundays** |") == 1
    assert "**Verdict: holds on Sundays**\n\nMore." in (folder / "results" / "tiny.md").read_text()


def test_cells_have_names_that_a_reader_of_the_papers_knows():
    assert words("cifar10-fedavgm-aware-solver") == "CIFAR-10, FedAvgM ×AWARE (released solver)"
    assert (
        words("cifar10-h0.1-slow-fedavg-pa3fed")
        == "CIFAR-10, h = 0.1, slow schedule, FedAvg + PA3Fed"
    )
    assert words("labels2-scaffold") == "two labels per party, SCAFFOLD"
    assert words("dir0.1-mofedsam") == "Dir(0.1), MoFedSAM"
    assert words("alt") == "ALT"


def test_a_run_that_was_cut_counts_as_far_as_it_got(tmp_path):
    write_run(tmp_path, "digits-fedavg", 0, [0.1, 0.2])
    results = collect([tmp_path], ITEM)
    assert table(results)[0]["rounds"] == "2 of 6"
    assert "reproduced" not in section(results)


def test_results_are_filled_in_several_goes_and_the_longer_run_stays(folder, tmp_path):
    kept = save(collect([folder / "runs"], ITEM), tmp_path / "results")
    write_run(tmp_path / "more", "digits-fedavg", 1, [0.1, 0.2, 0.9])
    write_run(tmp_path / "more", "digits-fedavg", 2, [0.1, 0.2, 0.3, 0.3, 0.3, 0.5])
    save(collect([tmp_path / "more"], ITEM), tmp_path / "results")
    cells = read(kept)["cells"]
    assert [run["values"]["last_tenth"] for run in cells["digits-fedavg"]["runs"]] == [
        38.0,
        44.0,
        50.0,
    ]
    cells["digits-fedavg"]["runs"][1]["rounds"] = 3  # as if it had diverged
    assert table(read(kept) | {"cells": cells})[0]["seeds"] == "2 of 3"
    assert len(cells["digits-fedavgm"]["runs"]) == 2


def test_cells_added_later_stand_where_the_item_has_them(tmp_path):
    order = list(ITEMS["fedaware/solver"].cells)
    for name in reversed(order):
        path = tmp_path / name
        path.mkdir()
        (path / "config.toml").write_text(
            dump(tables(ITEMS["fedaware/solver"].cells[name].config()))
        )
        (path / "metrics.jsonl").write_text(
            json.dumps({"round": 1, "accuracy": 0.1, "elud": 1.0, "seconds": 1}) + "\n"
        )
        kept = save(collect([path], ITEMS["fedaware/solver"]), tmp_path)
    assert list(read(kept)["cells"]) == order


def test_a_baseline_may_have_been_run_before(folder):
    runs, one = folder / "runs", [folder / "runs" / "digits-fedavgm-0"]
    alone = collect(one, ITEM)["cells"]
    assert (
        alone["digits-fedavgm"]["runs"][0]["values"]["rounds_to"] is None
    )  # not the rounds to its own
    compared = collect(one, ITEM, baselines=[runs])["cells"]
    assert list(compared) == ["digits-fedavgm"]
    assert compared["digits-fedavgm"]["runs"][0]["values"]["rounds_to"] == 3


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_run_that_was_cut_has_no_baseline_of_another_length(rounds, tmp_path):
    write_run(tmp_path, "digits-fedavg", 0, [0.1, 0.3])
    write_run(tmp_path, "digits-fedavgm", 0, [0.3, 0.3, 0.3][:rounds])
    cell = collect([tmp_path], ITEM)["cells"]["digits-fedavgm"]
    assert cell["runs"][0]["values"]["rounds_to"] == (1 if rounds == 2 else None)


def test_a_value_that_some_seeds_lack_says_how_many_have_it(folder):
    rows = table(collect([folder / "runs"], ITEM))
    assert [row["rounds to the baseline's final accuracy"] for row in rows] == [
        "6 ± 0",
        "3 (1 of 2)",
    ]


def test_runs_of_another_configuration_replace_those_of_a_cell(folder, tmp_path):
    kept = save(collect([folder / "runs"], ITEM), tmp_path / "results")
    path = write_run(tmp_path / "other", "digits-fedavg", 5, [0.6])
    (path / "config.toml").write_text(
        (path / "config.toml").read_text().replace("lr = 0.1", "lr = 0.2")
    )
    assert collect([tmp_path / "other"], ITEM)["cells"] == {}
    save(collect([tmp_path / "other"], ITEM, ["train.lr=0.2"]), tmp_path / "results")
    cells = read(kept)["cells"]
    assert [run["seed"] for run in cells["digits-fedavg"]["runs"]] == [5]
    assert len(cells["digits-fedavgm"]["runs"]) == 2


def test_curves_are_thinned_to_a_hundred_points_with_both_ends(tmp_path):
    write_run(tmp_path, "digits-fedavg", 0, [i / 1234 for i in range(1000)], rounds=1000)
    path = save(collect([tmp_path], ITEM), tmp_path)
    curve = read(path)["cells"]["digits-fedavg"]["runs"][0]["curves"]["accuracy"]
    assert len(curve["round"]) == len(curve["value"]) == 100
    assert (curve["round"][0], curve["round"][-1], curve["value"][-1]) == (1, 1000, 0.8096)
    assert max(map(len, path.read_text().splitlines())) > 500  # a curve is one line
    assert path.stat().st_size < 5000


def test_stability_measures_by_hand(tmp_path):
    losses = [1.0, 3.0, 1.0, 3.0, 1.0, 3.0]
    with (tmp_path / "clients.jsonl").open("w") as lines:
        for number, loss in enumerate(losses, 1):
            lines.write(
                json.dumps({"round": number, "ids": [7], "loss": [9.9], "score": [loss]}) + "\n"
            )
    with (tmp_path / "metrics.jsonl").open("w") as lines:
        for number in range(1, 7):
            lines.write(
                json.dumps({"round": number, "accuracy": None, "critical": number <= 2}) + "\n"
            )
    value = {
        name: MEASURES[name].of(RecordedRun(tmp_path))
        for name in MEASURES
        if name.startswith("loss")
    }
    assert value["loss_std"] == pytest.approx(1.0)
    assert value["loss_moving"] == pytest.approx(0.2)  # 1.8 and 2.2
    assert value["loss_mad"] == pytest.approx(1.0)
    assert value["loss_range"] == pytest.approx(2.0)
    assert value["loss_change"] == pytest.approx(2.0)
    assert value["loss_critical"] == pytest.approx(1.0)
    assert value["loss_rest"] == pytest.approx(1.0)


def test_wrong_input_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match="contains no results"):
        write_results_page(tmp_path, tmp_path / "page.md")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(UserError, match=r"broken\.json does not contain results; delete it"):
        write_results_page(tmp_path, tmp_path / "page.md")
    with pytest.raises(UserError, match="None of these runs is a cell of tiny/table1"):
        save(collect([tmp_path], ITEM), tmp_path)
    with pytest.raises(UserError, match="nowhere is not a folder; give run folders"):
        collect([tmp_path / "nowhere"], ITEM)


def test_curves_are_means_over_the_seeds_that_all_of_a_panel_have(folder):
    write_run(folder / "runs", "digits-fedavg", 2, [0.9] * 6)
    cells = collect([folder / "runs"], ITEM)["cells"]
    cells["digits-fedavgm"]["runs"][1]["curves"]["accuracy"] = {
        "round": [1, 3, 6],
        "value": [0.1, 0.3, 0.6],
    }
    (shown,) = panels(cells).values()
    assert list(shown) == ["digits-fedavg", "digits-fedavgm"]
    found = curves(shown)
    rounds, mean, deviation = found["digits-fedavg"]
    assert rounds.tolist() == [1, 2, 3, 4, 5, 6]
    assert mean.tolist() == pytest.approx([10, 20, 30, 30, 30, 41])  # without the third seed
    assert deviation.tolist() == pytest.approx([0, 0, 0, 0, 0, 18**0.5])
    assert found["digits-fedavgm"][1].tolist() == pytest.approx([10, 20, 34.5, 35, 40, 50])


def test_the_picture_has_every_curve_and_is_the_same_when_drawn_twice(folder):
    results = collect([folder / "runs"], ITEM)
    first, second = (
        draw_curves(results, folder / name).read_bytes() for name in ("a.svg", "b.svg")
    )
    assert first == second
    results["cells"]["digits-fedavg"]["runs"][1]["curves"]["accuracy"] = {
        "round": [],
        "value": [],
    }  # cut before an evaluation
    assert b">digits, FedAvgM<" in draw_curves(results, folder / "c.svg").read_bytes()
    del results["cells"]["digits-fedavgm"]
    assert draw_curves(results, folder / "d.svg") is None
    for text in (b">digits, FedAvg<", b">FedAvg<", b">FedAvgM<", "round (◂ published)".encode()):
        assert text in first


def test_a_picture_does_not_depend_on_the_last_digits_of_a_processor():
    drawn = '<path id="m0123456789" d="M 10.123456 0.015625"/><use xlink:href="#m0123456789" x="251.339687"/>1.234567'
    other = '<path id="mfedcba9876" d="M 10.123457 0.015625"/><use xlink:href="#mfedcba9876" x="251.339688"/>1.234567'
    steady = '<path id="m1" d="M 10.1235 0.015625"/><use xlink:href="#m1" x="251.3397"/>1.234567'
    assert [_steady(text) for text in (drawn, other)] == [steady] * 2


@pytest.mark.parametrize("drawn", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_page_in_the_repository_is_what_its_results_give(drawn, tmp_path, monkeypatch):
    if not drawn:  # only the overview is
        (tmp_path / "assets" / "results").mkdir(parents=True)
        monkeypatch.setattr(
            "kairosfl_reproductions.curves.save", lambda figure, path, kind: path.touch()
        )
    page = write_results_page(ROOT / "results", tmp_path / "results.md")
    assert page.read_text() == (ROOT / "docs" / "results.md").read_text()
    made, kept = (
        {path.name: path.read_text() for path in (at / "results").iterdir()}
        for at in (tmp_path, ROOT / "docs")
    )
    assert made == kept
    ours, theirs = (
        {path.name: path.read_text() for path in (folder / "assets" / "results").iterdir()}
        for folder in (tmp_path, ROOT / "docs")
    )
    assert ours.keys() == theirs.keys()
    for name in ours if drawn else ["overview.svg"]:
        numbers = [
            np.array(re.findall(r"-?\d+\.\d+", text), dtype=float)
            for text in (ours[name], theirs[name])
        ]
        np.testing.assert_allclose(
            *numbers, atol=0.5, err_msg=name
        )  # where a font differs, by a hair


def test_the_curves_of_a_figure_stand_beside_those_of_accuracy(folder):
    item = replace(ITEM, traces=("epochs", "epochs_so_far", "fedfim"))
    results = collect([folder / "runs"], item)
    seen = results["cells"]["digits-fedavg"]["runs"][0]["curves"]
    assert seen["epochs"] == {"round": [1, 2, 3, 4, 5, 6], "value": [3.0] * 6}
    assert seen["epochs_so_far"]["value"] == [3.0, 6.0, 9.0, 12.0, 15.0, 18.0]
    assert seen["fedfim"] == {"round": [], "value": []}  # not measured: its panel stays empty
    drawn = draw_curves(results, folder / "a.svg").read_text()
    assert all(
        f">{title}<" in drawn
        for title in ("test accuracy (%)", "epochs per round", "epochs so far")
    )
    assert "Fisher" not in drawn


def test_a_figure_with_many_curves_is_no_wider_than_three_panels(folder):
    results = collect(
        [folder / "runs"], replace(ITEM, traces=("train_loss", "cohort", "epochs", "epochs_so_far"))
    )
    width, height = (
        float(
            re.search(rf'{side}="([\d.]+)pt"', draw_curves(results, folder / "a.svg").read_text())[
                1
            ]
        )
        for side in ("width", "height")
    )
    assert (round(width / 72, 1), round(height / 72, 1)) == (
        10.2,
        2 * 2.5 * len(panels(results["cells"])),
    )


def test_no_stored_run_compared_features_of_a_model_with_dropout():
    """Up to version 0.2 ALT and MOON compared them with features without dropout; such runs would
    need a note.
    """
    compared = []
    for path in sorted((ROOT / "results").glob("*.json")):
        for name, cell in json.loads(path.read_text())["cells"].items():
            config = cell["config"]
            if re.search(r"\b(alt|moon)\b", config["algorithm"]):
                compared.append((f"{path.stem}: {name}", config["model"]["name"]))
    assert compared
    assert not [where for where, model in compared if "dropout" in options(model)]
