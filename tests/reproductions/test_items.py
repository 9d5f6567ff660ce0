"""The papers' items: valid configurations, printed values as in print, and cells that a filter
finds.
"""

from __future__ import annotations

import dataclasses
import json

import pytest

from kairosfl.errors import UserError
from kairosfl_reproductions import catalogue
from kairosfl_reproductions.catalogue import find
from kairosfl_reproductions.item import choose, members
from kairosfl_reproductions.measures import MEASURES, RecordedRun
from kairosfl_reproductions.results import identity


@pytest.mark.parametrize("item", catalogue.ITEMS.values(), ids=lambda item: item.key)
def test_every_cell_is_a_run_of_its_own(item):
    seen = {}
    for name, cell in item.cells.items():
        key = json.dumps(identity(cell.config()), sort_keys=True)
        assert key not in seen, f"{name} is {seen.get(key)}"
        seen[key] = name
        assert cell.baseline == "" or cell.baseline in item.cells
        assert cell.baseline != name
        assert set(cell.printed) <= set(item.measures) <= set(MEASURES)
        assert name == name.strip("-")
        assert "/" not in name


def test_every_table_and_figure_that_was_asked_for_is_there():
    asked = {
        "pa3fed": "table1 table2 figure3 figure4 figure5 figure6 figure7 figure8",
        "fedcl": "accuracy communication delta alpha epochs weight_decay clients participation detection seeds random "
        "resnet18 fedopt cifar100 shakespeare",
        "alt": "figure2",
        "fedaware": "table2 figure1 figure2 figure3 figure4 figure6 figure7",
    }
    wanted = {f"{paper}/{name}" for paper, names in asked.items() for name in names.split()}
    assert wanted <= catalogue.ITEMS.keys()
    assert [name for name, _ in catalogue.list_items()] == list(catalogue.ITEMS)


def printed(item, name, measure):
    return find(item).cells[name].printed[measure]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cifar10-h0.1-printed-fedavg", 38.66),
        ("cifar10-h0.1-printed-fedavg-pa3fed", 53.99),
        ("cifar10-h0.1-slow-vrlsgd-pa3fed-letter", 57.75),
        ("cifar10-h0.2-slow-fedmut", 45.44),
        ("cifar10-h0.3-printed-fedprox-pa3fed-nolr", 58.66),
        ("cifar100-h0.1-slow-fedmut-pa3fed", 38.27),
        ("cifar100-h0.3-printed-vrlsgd", 39.01),
        ("fashion_mnist-h0.1-printed-fednova-pa3fed", 80.11),
        ("fashion_mnist-h0.3-slow-fedavg", 77.30),
        ("fashion_mnist-h0.3-slow-fedmut-pa3fed", 81.98),
    ],
)
def test_pa3feds_table_2(name, value):
    assert printed("pa3fed/table2", name, "final") == value


def test_pa3feds_table_1():
    fedavg, pa3fed = (
        find("pa3fed/table1").cells[f"cifar10-before-slow-{name}"].printed
        for name in ("fedavg", "pa3fed")
    )
    assert list(fedavg.values()) == [0.089, 0.019, 0.069, 0.307, 0.270]
    assert list(pa3fed.values()) == [0.066, 0.014, 0.058, 0.189, 0.170]


# The paper prints what ×AWARE adds in red, beside both values.
GAINS = {
    "cifar10": {"fedavg": (6.47, 0.50), "fedavgm": (9.51, 0.75), "fedcm": (1.29, 0.10)}
    | {"fedprox": (3.07, 0.06), "fedyogi": (0.30, 0.19), "fedams": (1.36, 0.21)},
    "cifar100": {
        "fedavg": (4.03, 0.67),
        "fedavgm": (9.62, 0.65),
        "fedcm": (2.47, 0.69),
    }  # printed +2.04: its own slip
    | {"fedprox": (5.48, 0.67), "fedyogi": (6.90, 0.66), "fedams": (7.01, 0.71)},
    "agnews": {"fedavg": (0.94, 0.73), "fedavgm": (1.30, 0.47), "fedcm": (-0.55, 0.50)}
    | {
        "fedprox": (3.32, 0.68),
        "fedyogi": (2.74, 0.58),
        "fedams": (2.75, 0.58),
    },  # fedprox printed +3.33
}


@pytest.mark.parametrize("data", GAINS)
def test_fedawares_table_2_agrees_with_the_gains_that_it_prints(data):
    for base, (accuracy, elud) in GAINS[data].items():
        for measure, value in (("last_tenth", accuracy), ("elud", elud)):
            added = printed("fedaware/table2", f"{data}-{base}-aware", measure) - printed(
                "fedaware/table2", f"{data}-{base}", measure
            )
            assert added == pytest.approx(value, abs=1e-9), (base, measure)


def test_fedawares_table_2_other_values():
    value = {name: dict(cell.printed) for name, cell in find("fedaware/table2").cells.items()}
    assert (
        value["cifar10-fedaware"]
        == value["cifar10-fedaware-raw"]
        == {"last_tenth": 59.78, "elud": 2.90}
    )
    assert value["cifar10-fedavg"] == {"last_tenth": 42.78, "elud": 2.58}
    assert value["cifar10-feddyn"] == {"last_tenth": 54.87}
    assert value["cifar100-fedaware"] == {"last_tenth": 38.77, "elud": 2.75}
    assert value["agnews-fedams-aware"] == {"last_tenth": 86.08, "elud": 1.92}
    assert "cifar10-feddyn-aware" not in value


def test_text_and_released_code_are_cells_of_the_same_item():
    cells = find("fedaware/table2").cells
    assert str(cells["cifar10-fedaware-raw"].config().algorithm) == "fedaware(normalise=False)"
    assert str(cells["cifar10-fedavg-aware"].config().algorithm) == "fedaware(project=True)"
    released = cells["cifar10-fedavgm-aware-released"].config()
    assert (
        str(released.algorithm)
        == "fedavgm(beta=0.7) + fedaware(explore=True, project=True, solver='frank_wolfe')"
    )
    assert released.data.balance
    assert cells["cifar10-fedaware-released"].config().data == released.data
    stored = cells["cifar10-fedaware-stored"].config()
    assert stored.algorithm == cells["cifar10-fedaware-swapped"].config().algorithm
    assert stored.data.options == {"fedlab": True}
    redrawn = cells["cifar10-fedaware-redrawn"].config()
    assert redrawn.algorithm == stored.algorithm
    assert redrawn.data == dataclasses.replace(
        cells["cifar10-fedaware-swapped"].config().data, partition_seed=-1
    )
    shorter = str(cells["cifar10-fedams-aware-shorter"].config().algorithm)
    assert shorter == str(cells["cifar10-fedams-aware-swapped"].config().algorithm).replace(
        "lr=0.01", "lr=0.005"
    )
    only_cifar10 = ("stored", "redrawn", "shorter")
    assert not any(name.endswith(only_cifar10) for name in cells if not name.startswith("cifar10-"))
    released = find("fedcl/accuracy").cells["cifar10-alexnet-a0.1-fedavg-cl-released"].config()
    assert released.run.detector == "fgn.released()"
    assert str(released.algorithm) == "fedcl(cap=0.75, floor=1.0, once=True, every=2)"
    cells = find("fedcl/accuracy").cells
    assert (
        str(cells["cifar10-alexnet-a0.1-fednova-convex-cl"].config().algorithm)
        == "fednova(convex=True) + fedcl"
    )
    assert (
        cells["fashion_mnist-vgg11-a0.3-vrlsgd-rate-cl-released"].reading
        == "released base; released rule and detector"
    )
    lineage = find("pa3fed/table2").cells["cifar10-h0.1-printed-fednova-convex-pa3fed"]
    assert (lineage.printed, lineage.baseline) == (
        {"final": 54.74},
        "cifar10-h0.1-printed-fednova-convex",
    )
    assert {"cifar10-fedavg-alt", "cifar10-fedavg-alt-min", "cifar10-moon-alt-previous"} <= find(
        "alt/figure2"
    ).cells.keys()
    printed, slow = (
        find("pa3fed/table2").cells[f"cifar10-h0.1-{name}-fedavg"].config().train
        for name in ("printed", "slow")
    )
    assert (printed.rounds, slow.rounds) == (40, 250)
    assert slow.lr_at(249) == pytest.approx(0.01 * 0.8**24)


def test_a_filter_fits_whole_words():
    item = find("fedaware/table2")
    assert all(name.startswith("cifar10-") for name in choose(item, ["cifar10"]))
    assert len(choose(item, ["cifar10"])) == 66
    assert list(choose(item, ["agnews fedavgm"])) == [
        "agnews-fedavgm",
        "agnews-fedavgm-aware",
        "agnews-fedavgm-aware-raw",
        "agnews-fedavgm-aware-solver",
        "agnews-fedavgm-released",
        "agnews-fedavgm-aware-released",
        "agnews-fedavgm-swapped",
        "agnews-fedavgm-aware-swapped",
    ]
    assert list(choose(item, ["cifar10-fedyogi", "cifar10 feddyn"])) == [
        "cifar10-feddyn",
        "cifar10-fedyogi",
    ]
    assert len(choose(item, ["cifar10 fedyogi"])) == 12
    assert len(choose(item, ["cifar*"])) == 112
    assert choose(item, ["CIFAR10 FedYogi"]) == choose(item, ["cifar10 fedyogi"])
    assert list(choose(item, ["CIFAR10-FedAvg"])) == ["cifar10-fedavg"]
    assert choose(item) == dict(item.cells)


def test_a_filter_that_fits_nothing_is_answered_with_a_word_that_does():
    with pytest.raises(
        UserError, match="No cell of fedaware/table2 matches 'cifar11'; did you mean 'cifar10'"
    ):
        choose(find("fedaware/table2"), ["cifar11"])
    with pytest.raises(UserError, match="did you mean 'fedaware/table2'"):
        find("fedaware/tabel2")
    with pytest.raises(UserError, match=r"choose one of public/niid-bench-10$"):  # by its title
        find("public/flower")


def test_members_are_one_seed_of_everything_before_the_second_of_anything():
    runs = members(
        find("fedaware/table2"), ["cifar10 fedcm"], seeds=2, rounds=20, changes=["run.device=cpu"]
    )
    assert [run.name for run in runs][:4] == [
        "cifar10-fedcm-seed0-rounds20",
        "cifar10-fedcm-aware-seed0-rounds20",
        "cifar10-fedcm-aware-raw-seed0-rounds20",
        "cifar10-fedcm-seed1-rounds20",
    ]
    assert [run.config.seed for run in runs] == [0, 0, 0, 1, 1, 1]
    assert all(run.config.train.rounds == 20 and run.config.run.device == "cpu" for run in runs)
    assert len(members(find("fedaware/table2"), ["cifar10 fedavg"])) == 12 * 3
    with pytest.raises(UserError, match="seeds = 0 must be 1 or more"):
        members(find("fedaware/table2"), seeds=0)


def test_plain_models_are_scored_over_the_same_rounds_as_averaged_ones(tmp_path):
    rows = [{"round": n, "accuracy": n / 100} for n in range(1, 19)] + [
        {"round": 19, "accuracy": None}
    ]
    rows += [{"round": n, "accuracy": 0.9, "plain_accuracy": n / 100} for n in range(20, 22)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RecordedRun(tmp_path)
    assert MEASURES["last_tenth"].of(run) == pytest.approx(90.0)
    assert MEASURES["plain_tenth"].of(run) == pytest.approx(20.5)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:-1]))
    assert MEASURES["plain_tenth"].of(RecordedRun(tmp_path)) == pytest.approx(20.0)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[:18]))
    assert MEASURES["plain_tenth"].of(RecordedRun(tmp_path)) == pytest.approx(18.0)
