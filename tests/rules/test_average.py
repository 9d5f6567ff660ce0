"""Averages of global models against numpy: the window, the weights, idle rounds, and that training
is untouched.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from problems import course, follow, recipe, task
from reference import COHORTS, Network, Quadratic, Setting

import kairosfl
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, result, rounds
from kairosfl.core.rule import Memory
from kairosfl.core.run import Run, Setup
from kairosfl.core.table import Table
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import Average, parse
from kairosfl.rules.average import opening
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import Checkpoints, model
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.prepare import build_task
from kairosfl.tasks import vector

problems = pytest.mark.parametrize(
    "problem", [Quadratic(), Network()], ids=["quadratic", "network"]
)


def results(problem: reference.Problem, text: str) -> np.ndarray:
    """The result after every round; the fifth has no reports."""
    setup = Setup(
        parse(f"fedavg + {text}"),
        recipe(Setting(), COHORTS),
        len(problem.n),
        task(problem).layout,
        detectors=(),
    )
    found = []
    for run in follow(problem, Setting(), COHORTS, text):
        alone = Run(
            seed=0, round=run.round, x=run.x, states=run.states[1:2], tables=run.tables[1:2]
        )
        found.append(result(alone, setup).numpy())
    return np.array(found)


@problems
@pytest.mark.parametrize("decay", [1.0, 0.6])
def test_a_window_of_four_of_six_rounds(problem: reference.Problem, decay: float) -> None:
    """Before round 3 the model itself, then the weighted mean of the models since; the idle round
    counts again.
    """
    xs = np.array(reference.fedavg(problem, Setting(), COHORTS))
    expected = xs.copy()
    for last in range(2, 6):
        weights = decay ** np.arange(last - 2, -1, -1)
        expected[last] = weights @ xs[2 : last + 1] / weights.sum()
    found = results(problem, f"average(share=0.67, of='rounds', decay={decay})")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)
    assert not np.array_equal(found[4], found[3])  # the idle round's model counts a second time


def test_an_exponential_average_is_bias_corrected() -> None:
    xs = np.array(reference.fedavg(Network(), Setting(), COHORTS))
    biased, expected = np.zeros_like(xs[0]), []
    for t, x in enumerate(xs, 1):
        biased = 0.95 * biased + 0.05 * x
        expected.append(biased / (1 - 0.95**t))
    np.testing.assert_allclose(
        results(Network(), "average.exponential()"), expected, rtol=0, atol=1e-13
    )


def test_where_the_window_opens() -> None:
    """By the rounds, and by the learning rates that are left; for a constant rate they are the
    same.
    """
    for share, first in ((0.15, 86), (0.29, 72), (1.0, 1), (1e-6, 100)):
        for of in ("lr", "rounds"):
            assert opening(Recipe(rounds=100), share, of) == first
    decayed = Recipe(rounds=240, lr=0.05, schedule="exponential", gamma=0.98)
    rates = 0.05 * 0.98 ** np.arange(240)
    left = rates[::-1].cumsum()[::-1] / rates.sum()
    assert opening(decayed, 0.15) == int(np.argmax(left <= 0.15)) + 1 == 93
    assert opening(decayed, 0.15, "rounds") == 205
    cosine = Recipe(rounds=120, schedule="cosine")
    rates = np.array([(1 + math.cos(math.pi * t / 120)) / 2 for t in range(120)])
    left = rates[::-1].cumsum()[::-1] / rates.sum()
    assert opening(cosine, 0.15) == int(np.argmax(left <= 0.15)) + 1
    assert opening(Recipe(rounds=1), 0.15) == 1


@problems
def test_training_is_the_same_to_the_bit(problem: reference.Problem) -> None:
    for text in ("fedavg", "fedavgm", "scaffold"):
        averaged = course(problem, Setting(), COHORTS, f"{text} + average(share=1)")
        assert np.array_equal(averaged, course(problem, Setting(), COHORTS, text))


def test_a_decay_near_zero_is_the_model_itself() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    np.testing.assert_allclose(
        results(Network(), "average(share=1, decay=1e-20)"), plain, rtol=0, atol=1e-15
    )


def test_a_thousand_float32_models_are_summed_in_float64() -> None:
    rule, how = Average(share=1.0), Recipe(rounds=1000)
    rng = np.random.Generator(np.random.Philox(key=1))
    xs = (1000 + rng.standard_normal((1000, 7))).astype(np.float32)
    now = SimpleNamespace(x=torch.zeros(7), recipe=how, number=0)
    memory = Memory(rule.server(now), {}, Table({}))  # type: ignore[arg-type]
    for t in range(1, 1000):
        now = SimpleNamespace(x=torch.from_numpy(xs[t - 1]), recipe=how, number=t)
        memory = rule.observe(memory, now)  # type: ignore[arg-type]
    found = rule.result(torch.from_numpy(xs[-1]), memory, now)  # type: ignore[arg-type]
    assert found.dtype == torch.float32
    assert np.array_equal(found.numpy(), xs.astype(np.float64).mean(0).astype(np.float32))


def test_a_resumed_run_has_the_same_result_on_both_engines(tmp_path: Path) -> None:
    job = task(Network())
    setup = Setup(
        parse("fedavgm + average(share=0.8)"),
        Recipe(rounds=8, cohort=3, lr=0.1),
        5,
        job.layout,
        detectors=(FGN(),),
    )
    found = []
    for name, engine in (("loop", Loop(job)), ("batched", Batched(job, deterministic=True))):
        checkpoints = Checkpoints(tmp_path / name)
        checkpoints.folder.mkdir()
        for run in drive(rounds(Run.start(job.start(), setup, seed=3), setup), engine):
            if run.round == 5:
                checkpoints.save(run, {})
        found.append(result(run, setup))
        loaded, _ = checkpoints.load(Run.start(job.start(), setup, seed=3))
        *_, resumed = drive(rounds(loaded, setup), engine)
        assert torch.equal(result(resumed, setup), found[-1])
        assert not torch.equal(found[-1], run.x)
    assert torch.allclose(*found, rtol=1e-10)


TABLES = {
    "algorithm": "fedavg + average(share=0.5)",
    "data": {"clients": 6},
    "model": {"hidden": [8]},
    "train": {"rounds": 6, "cohort": 2},
    "run": {"engine": "loop", "checkpoint_every": 4},
}


def test_the_run_folder_scores_both_models_and_gives_the_average_away(tmp_path: Path) -> None:
    summary = experiment.start(resolve(TABLES), tmp_path / "run")
    plain = experiment.start(resolve({**TABLES, "algorithm": "fedavg"}), tmp_path / "plain")
    rows, others = (
        list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("run", "plain")
    )
    assert ["plain_accuracy" in row for row in rows] == [False] * 4 + [
        True
    ] * 2  # in round 4 the mean is of one model
    assert [row.get("plain_accuracy", row["accuracy"]) for row in rows] == [
        row["accuracy"] for row in others
    ]
    assert all("plain_accuracy" not in row for row in others)
    assert summary["plain_accuracy"] == plain["accuracy"]
    assert summary["plain_last_tenth_accuracy"] == plain["last_tenth_accuracy"]
    assert "plain_accuracy" not in plain
    assert (
        sum(row["bytes_up"] + row["bytes_down"] for row in rows)
        == plain["bytes_up"] + plain["bytes_down"]
    )
    averaged = vector.flatten(kairosfl.load(tmp_path / "run"))
    assert not torch.equal(averaged, model(tmp_path / "run")[0])
    scored = Loop(build_task(resolve(TABLES))).evaluate(averaged).accuracy
    assert scored == rows[-1]["accuracy"] == summary["accuracy"]


def test_more_rounds_are_not_added_to_a_window_that_was_counted_from_the_end(
    tmp_path: Path,
) -> None:
    experiment.start(resolve(TABLES), tmp_path / "run")
    file = tmp_path / "run" / "config.toml"
    file.write_text(file.read_text().replace("rounds = 6", "rounds = 8"))
    with pytest.raises(UserError, match=r"train\.rounds"):
        Folder(tmp_path / "run").config()


def test_simulate_returns_the_average() -> None:
    rng = np.random.Generator(np.random.Philox(key=0))
    data = (rng.standard_normal((60, 4)).astype(np.float32), rng.integers(0, 2, 60))
    ends = {}
    for text in ("fedavg", "average(share=1)"):
        seen: list[torch.Tensor] = []
        net = torch.nn.Linear(4, 2)
        torch.nn.init.zeros_(net.weight), torch.nn.init.zeros_(net.bias)
        history = kairosfl.simulate(
            net,
            data,
            data,
            clients=4,
            cohort=2,
            rounds=4,
            algorithm=text,
            engine="loop",
            progress=False,
            on_round=lambda history, seen=seen: seen.append(history.x.clone()) or None,
        )
        ends[text] = torch.stack(seen).double(), vector.flatten(history.model)
    plain, (_, averaged) = ends["fedavg"][0], ends["average(share=1)"]
    torch.testing.assert_close(averaged.double(), plain.mean(0), rtol=0, atol=1e-7)


def test_a_window_of_one_model_says_so(tmp_path: Path) -> None:
    experiment.start(resolve({**TABLES, "algorithm": "average(share=0.01)"}), tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["verdicts"] == [
        "average(share=0.01) averaged nothing: fewer than two models fell into its window; use a larger share"
    ]


def test_nonsense_is_refused() -> None:
    for text, why in (
        ("average(share=0)", "share = 0 is not allowed; use a number above 0"),
        ("average(share=1.5)", r"share = 1\.5"),
        ("average(of='epochs')", "use 'lr' or 'rounds'"),
        ("average(decay=0)", "decay = 0"),
    ):
        with pytest.raises(UserError, match=why):
            parse(text)
