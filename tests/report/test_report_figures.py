"""Pictures as data: means, deviations, critical periods, heat maps, and what is left out."""

import base64
import json
import math

import fake
import numpy as np
import pytest

from kairosfl.report import grids
from kairosfl.report.draw import band
from kairosfl.report.figures import critical_periods, figures
from kairosfl.report.payload import numbers, pack, payload
from kairosfl.report.pictures import letter
from kairosfl.report.read import read_groups
from kairosfl.report.sweep import parameters
from kairosfl.report.tables import results


def drawn(folder):
    pictures, left = figures(read_groups([folder]))
    return {each.key: each for each in pictures}, {each.title: each.why for each in left}


def test_a_curve_is_the_mean_over_the_seeds_that_have_the_round(tmp_path):
    for seed, (curve, rounds) in enumerate([([0.1, None, 0.3, 0.4], 4), ([0.3, None, 0.5], 3)]):
        run = fake.write_run(tmp_path / str(seed), seed=seed, rounds=rounds, planned=4)
        fake.edit(run, accuracy=curve, bytes_down=1e6 * (1 + seed), bytes_up=0)
    pictures, _ = drawn(tmp_path)
    (series,) = pictures["accuracy"].series
    assert series.x.tolist() == [1, 3, 4]
    np.testing.assert_allclose(series.mean, [0.2, 0.4, 0.4])
    np.testing.assert_allclose(series.deviation, [math.sqrt(0.02), math.sqrt(0.02), math.nan])
    assert series.count.tolist() == [2, 2, 1]


def test_against_cost_the_seeds_are_compared_at_equal_cost(tmp_path):
    for seed, (curve, down) in enumerate([([0.1, 0.2, 0.4], 1e6), ([0.3, 0.5, 0.9], 2e6)]):
        run = fake.write_run(tmp_path / str(seed), seed=seed, rounds=3)
        fake.edit(run, accuracy=curve, bytes_down=down, bytes_up=0)
    (series,) = drawn(tmp_path)[0]["accuracy-bytes"].series
    assert series.x.tolist() == [
        2,
        3,
    ]  # where both have been: a mean of fewer would not be that of the table
    np.testing.assert_allclose(series.seeds, [[0.2, 0.4], [0.3, 0.4]])
    np.testing.assert_allclose(series.mean, [0.25, 0.4])
    assert series.count.tolist() == [2, 2]


def test_critical_periods_are_stretches_with_the_share_of_seeds(tmp_path):
    for seed, critical in enumerate([[True, True, False, True], [True, False, False, True]]):
        fake.edit(fake.write_run(tmp_path / str(seed), seed=seed, rounds=4), critical=critical)
    (group,) = read_groups([tmp_path])
    assert critical_periods(group) == [(0.5, 1.5, 1.0), (1.5, 2.5, 0.5), (3.5, 4.5, 1.0)]


def test_everything_is_drawn_that_is_there(tmp_path):
    fake.write_run(tmp_path / "a", algorithm="fedcl + alt + fedaware", rounds=5)
    fake.edit(tmp_path / "a", fedfim=[1, 2, 3, 4, 5], lr=[5, 4, 3, 2, 1], rejected=[0, 1, 0, 0, 0])
    fake.edit(tmp_path / "a", lud=[1, 2, 3, 4, 5], chi_square=[0, 1, 2, 3, 4])
    pictures, left = drawn(tmp_path)
    curves = (
        "accuracy accuracy-bytes accuracy-epochs loss train-loss client-accuracy client-quantiles"
    )
    curves += " fgn fedfim elud coherence lud chi-square"
    heats = "partition-0 weights-0 lambda-0 epochs-0 similarity-0"
    assert set(pictures) == {
        *curves.split(),
        "cohort",
        "epochs",
        "lr",
        "rejected",
        *heats.split(),
    } - {"cohort"}
    assert left == {
        "PA3Fed's score": "only PA3Fed measures it",
        "Cohort size": "20 in every round of every run",
        "Cosines between updates": "no round was requested; set run.cosines = [1, 10]",
    }


def test_what_is_missing_is_left_out_with_the_reason(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3)
    fake.edit(
        run,
        accuracy=None,
        loss=None,
        client_accuracy_mean=None,
        client_accuracy_worst=None,
        fgn=None,
    )
    (run / "clients.jsonl").unlink()
    (run / "partition.json").unlink()
    pictures, left = drawn(tmp_path)
    assert set(pictures) == {"train-loss", "elud", "coherence"}
    assert left["Test accuracy"] == "no round was evaluated"
    assert left["Accuracy per client"] == "it was not requested; set run.client_accuracy = true"
    assert left["Final accuracy of every client"] == left["Accuracy per client"]
    assert (
        left["Federated gradient norm"] == "the FGN detector did not run; add fgn to run.detector"
    )
    assert left["Client × class"] == "partition.json is missing"
    assert left["Aggregation weights"] == "clients.jsonl says nothing of them"
    assert left["Diversity under FedAWARE's weights (LUD)"] == "only FedAWARE records it"


def test_the_clients_of_the_last_evaluation_are_drawn_from_the_worst_served_on(tmp_path):
    for seed, scale in ((0, 1.0), (1, 0.5)):
        run = fake.write_run(tmp_path / str(seed), seed=seed, rounds=3)
        rows = [
            {"round": r, "ids": [], "accuracy_quantiles": [0.1 * r, 0.2 * r * scale]}
            for r in (1, 2)
        ]
        (run / "clients.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in [*rows, {"round": 3, "ids": []}])
        )
    (series,) = drawn(tmp_path)[0]["client-quantiles"].series
    assert series.x.tolist() == [0, 100]
    assert series.mean.tolist() == pytest.approx([0.2, 0.3])
    assert series.seeds.tolist() == [[0.2, 0.4], [0.2, 0.2]]


def test_a_heat_map_has_a_cell_for_each_client_and_round(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=2, clients=3)
    rows = [
        {"round": 1, "ids": [0, 2], "weights": [0.25, 0.75], "epochs": [1, 2], "lambda": None},
        {
            "round": 2,
            "ids": [1],
            "weights": [1.0],
            "epochs": [None],
            "lambda": {"2": 0.5, "0": 0.5},
        },
    ]
    (run / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pictures, _ = drawn(tmp_path)
    nan = math.nan
    np.testing.assert_array_equal(
        pictures["weights-0"].grid, [[0.25, nan], [nan, 1.0], [0.75, nan]]
    )
    np.testing.assert_array_equal(pictures["epochs-0"].grid, [[1, nan], [nan, nan], [2, nan]])
    np.testing.assert_array_equal(pictures["lambda-0"].grid, [[nan, 0.5], [nan, nan], [nan, 0.5]])
    assert pictures["weights-0"].x_range == (0.5, 2.5)
    assert pictures["weights-0"].y_range == (-0.5, 2.5)


def test_cosines_are_drawn_for_the_first_the_last_and_a_round_between(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "MOST_MATRICES", 3)
    run = fake.write_run(tmp_path / "a", rounds=5, clients=4)
    rows = [
        {"round": number, "ids": [3, 1], "cosines": [[1.0, number / 10], [number / 10, 1.0]]}
        for number in range(1, 5)
    ]
    rows.append({"round": 5, "ids": [2], "cosines": [[1.0]]})  # nobody to compare with
    (run / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pictures, left = drawn(tmp_path)
    drawn_maps = [pictures[f"cosines-{number}-0"] for number in (1, 3, 4)]
    assert [key for key in pictures if key.startswith("cosines")] == [
        each.key for each in drawn_maps
    ]
    assert {each.span for each in drawn_maps} == {
        (0.1, 0.4)
    }  # one scale, or they could not be compared
    assert "These are 3 of the 4 recorded rounds" in drawn_maps[0].note
    assert "Cosines between updates" not in left
    np.testing.assert_array_equal(pictures["cosines-3-0"].grid, [[math.nan, 0.3], [0.3, math.nan]])
    assert pictures["cosines-3-0"].x_label == "place in the cohort"


def test_cosines_of_everyone_stand_in_the_order_of_the_clients(tmp_path, monkeypatch):
    run = fake.write_run(tmp_path / "a", rounds=1, clients=3)
    cosines = [[1, 0.1, 0.2], [0.1, 1, 0.3], [0.2, 0.3, 1]]
    (run / "clients.jsonl").write_text(
        json.dumps({"round": 1, "ids": [2, 0, 1], "cosines": cosines}) + "\n"
    )
    heat = drawn(tmp_path)[0]["cosines-1-0"]
    nan = math.nan
    np.testing.assert_array_equal(heat.grid, [[nan, 0.3, 0.1], [0.3, nan, 0.2], [0.1, 0.2, nan]])
    assert (heat.x_label, heat.x_range) == ("client", (-0.5, 2.5))
    monkeypatch.setattr(grids, "MOST_ROWS", 2)
    heat = drawn(tmp_path)[0]["cosines-1-0"]
    np.testing.assert_allclose(heat.grid, [[0.3, 0.15], [0.15, nan]])
    assert "2 by 2 clients" in heat.note


def test_cosines_come_from_the_first_run_that_has_any(tmp_path):
    for seed, cosines in ((0, [[None, None], [None, None]]), (1, [[1, 0.5], [0.5, 1]])):
        run = fake.write_run(tmp_path / str(seed), seed=seed, rounds=1, clients=2)
        (run / "clients.jsonl").write_text(
            json.dumps({"round": 1, "ids": [0, 1], "cosines": cosines}) + "\n"
        )
    assert "The run with seed 1." in drawn(tmp_path)[0]["cosines-1-0"].note


def test_cosines_that_have_not_come_yet_are_said_to(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=1)
    config = run / "config.toml"
    config.write_text(config.read_text().replace("[run]", "[run]\ncosines = [9]"))
    assert drawn(tmp_path)[1]["Cosines between updates"].startswith(
        "no round in run.cosines has been reached yet"
    )


def test_many_clients_and_rounds_are_averaged_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(grids, "MOST_ROWS", 2)
    monkeypatch.setattr(grids, "MOST_COLUMNS", 2)
    run = fake.write_run(tmp_path / "a", rounds=3, clients=3, classes=3)
    rows = [
        {"round": number, "ids": [0, 1, 2], "weights": weights}
        for number, weights in enumerate([[1, 2, 3], [3, 6, 5], [7, 9, 8]], start=1)
    ]
    (run / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    counts = [[4, 0, 1], [2, 6, 3], [8, 2, 0]]
    (run / "partition.json").write_text(json.dumps({"clients": 3, "classes": 3, "counts": counts}))
    pictures, _ = drawn(tmp_path)
    np.testing.assert_array_equal(pictures["weights-0"].grid, [[3, 8], [4, 8]])
    assert pictures["weights-0"].x_range == (0.5, 4.5)
    assert "the mean over 2 clients and 2 rounds" in pictures["weights-0"].note
    np.testing.assert_array_equal(pictures["partition-0"].grid, [[3, 5], [2, math.nan]])


def test_a_packed_grid_comes_back_to_a_part_in_65534():
    grid = np.array([[0.0, 1.0], [np.nan, 0.3]])
    steps = np.frombuffer(base64.b64decode(pack(grid, 0.0, 1.0)), dtype="<u2")
    assert steps.tolist() == [1, 65535, 0, 1 + round(0.3 * 65534)]


def test_numbers_are_short_and_null_where_there_is_none():
    assert numbers(np.array([1.0, 0.123456789, math.nan, math.inf, 1234567.0])) == [
        1,
        0.12346,
        None,
        None,
        1234600,
    ]


def test_the_data_of_a_page_is_json_without_nan(tmp_path):
    fake.write_sweep(tmp_path, seeds=2, rounds=4)
    groups = read_groups([tmp_path])
    rows = results(groups, math.nan)
    data = payload(
        groups, rows, figures(groups)[0], math.nan, given=False, varied=parameters(groups)
    )
    assert json.loads(json.dumps(data, allow_nan=False))["target"] is None


@pytest.mark.parametrize(("number", "text"), [(0, "A"), (25, "Z"), (26, "AA"), (52, "BA")])
def test_letters(number, text):
    assert letter(number) == text


def test_a_band_ends_at_nothing_and_at_all(tmp_path):
    for seed, accuracy in enumerate(([0.02, 0.5], [0.3, 1.0])):
        fake.edit(fake.write_run(tmp_path / str(seed), seed=seed, rounds=2), accuracy=accuracy)
    picture = drawn(tmp_path)[0]["accuracy"]
    low, high = band(picture.series[0], percent=True)
    spread = [0.28 / math.sqrt(2), 0.5 / math.sqrt(2)]
    np.testing.assert_allclose(low, [0, 0.75 - spread[1]])
    np.testing.assert_allclose(high, [0.16 + spread[0], 1])
    for seed, values in enumerate(([0.1, 0.2], [-0.1, 0.1])):  # a cosine may be negative
        fake.edit(tmp_path / str(seed), coherence=values)
    (series,) = drawn(tmp_path)[0]["coherence"].series
    np.testing.assert_allclose(
        band(series, percent=False)[0], [-0.2 / math.sqrt(2), 0.15 - 0.1 / math.sqrt(2)]
    )
