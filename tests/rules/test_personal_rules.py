"""FedRep, FedBABU, Ditto and APFL against numpy: unequal clients, momentum, weight decay, clients
that fail or come late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from problems import Cohorts, Flaky, course, recipe, task
from reference import COHORTS, Network, Setting, shares, train

from kairosfl.core.round import drive, models, rounds
from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.testing import check_rule

PROBLEM, SETTING = Network(), Setting()
EVERYONE = range(len(PROBLEM.n))
BODY = 24  # numbers of the network's first layer
ENGINES = {"loop": Loop, "batched": Batched}
engines = pytest.mark.parametrize("engine", ENGINES)
CLOSE = {"rtol": 0, "atol": 1e-12}


@dataclass
class Ends:
    """After every round: x, and the whole model of every client."""

    x: list[np.ndarray]
    models: list[np.ndarray]


def follow(text: str, engine: str, own: Sequence[str] = ()) -> Ends:
    job = replace(task(PROBLEM), own=own)
    algorithm = Algorithm(
        (Cohorts(ids=tuple(cohort.asked for cohort in COHORTS)), *parse(text).rules)
    )
    plan = recipe(SETTING, COHORTS)
    setup = Setup(algorithm, plan, len(PROBLEM.n), job.layout, own=job.own_start())
    runner = Flaky(ENGINES[engine](job), [cohort.lost for cohort in COHORTS])
    start = Run.start(job.start(), setup, seed=SETTING.seed)
    ends = Ends([], [])
    for run in drive(rounds(start, setup), runner):
        ends.x.append(run.x.numpy().copy())
        ends.models.append(models(run, setup, torch.tensor(EVERYONE)).numpy().copy())
    return ends


def phase(t: int, i: int, start: np.ndarray, epochs: int, moving: slice, purpose: str):
    """Momentum SGD of a part of the network, the rest still."""
    rng, w = stream(SETTING.seed, purpose, t, i), start.copy()
    velocity = np.zeros_like(w[moving])
    for _ in range(epochs):
        order = rng.permutation(PROBLEM.n[i])
        for k in range(0, len(order), SETTING.batch):
            g = PROBLEM.gradient(i, order[k : k + SETTING.batch], w)[moving]
            velocity = SETTING.momentum * velocity + g + SETTING.decay * w[moving]
            w[moving] = w[moving] - SETTING.lr_at(t) * velocity
    return w


def split(own_epochs: int) -> Ends:
    """FedRep; without epochs of the head it is FedBABU."""
    x, heads = PROBLEM.x[:BODY], np.tile(PROBLEM.x[BODY:], (len(PROBLEM.n), 1))
    ends = Ends([], [])
    for t, cohort in enumerate(COHORTS):
        bodies = []
        for i in cohort.reported:
            w = np.concatenate([x, heads[i]])
            w = phase(t, i, w, own_epochs, slice(BODY, None), "own batches")
            w = phase(t, i, w, SETTING.epochs, slice(BODY), "batches")
            heads[i] = w[BODY:]
            bodies.append(w[:BODY])
        if bodies:
            x = shares(PROBLEM, cohort.reported, "samples") @ np.array(bodies)
        ends.x.append(x)
        ends.models.append(np.array([np.concatenate([x, head]) for head in heads]))
    return ends


def beside(lam: float, lr: float, *, mixed: bool = False) -> Ends:
    """Ditto, or APFL: a second model on the batches of the first."""
    x, seconds = PROBLEM.x, {}
    mixes = np.full(len(PROBLEM.n), 0.5)
    ends = Ends([], [])
    for t, cohort in enumerate(COHORTS):
        rate, trained = lr or SETTING.lr_at(t), []
        for i in cohort.reported:
            seconds.setdefault(i, x)

            def slope(rows: np.ndarray, w: np.ndarray, i=i, x=x, rate=rate) -> np.ndarray:
                v, a = seconds[i], mixes[i]
                if mixed:
                    g = PROBLEM.gradient(i, rows, a * v + (1 - a) * w)
                    seconds[i] = v - rate * a * g
                    mixes[i] = np.clip(a - rate * g @ (v - w), 0, 1)
                else:
                    seconds[i] = v - rate * (PROBLEM.gradient(i, rows, v) + lam * (v - x))
                return PROBLEM.gradient(i, rows, w)

            trained.append(train(PROBLEM, SETTING, t, i, x, gradient=slope).w)
        if trained:
            x = shares(PROBLEM, cohort.reported, "samples") @ np.array(trained)
        ends.x.append(x)
        share = mixes if mixed else np.ones(len(PROBLEM.n))
        whole = [share[i] * seconds.get(i, x) + (1 - share[i]) * x for i in EVERYONE]
        ends.models.append(np.array(whole))
    return ends


def compare(ends: Ends, expected: Ends) -> None:
    np.testing.assert_allclose(ends.x, expected.x, **CLOSE)
    np.testing.assert_allclose(ends.models, expected.models, **CLOSE)


@engines
@pytest.mark.parametrize("own_epochs", [1, 3])
def test_fedrep(engine: str, own_epochs: int) -> None:
    ends = follow(f"fedrep(own_epochs={own_epochs})", engine, ["2.*"])
    compare(ends, split(own_epochs))


@engines
def test_fedbabu(engine: str) -> None:
    ends = follow("fedbabu", engine, ["2.*"])
    compare(ends, split(0))
    for whole in ends.models:
        assert np.array_equal(whole[:, BODY:], np.tile(PROBLEM.x[BODY:], (len(PROBLEM.n), 1)))


@engines
@pytest.mark.parametrize(("lam", "lr"), [(0.7, 0.0), (2.0, 0.1), (0.0, 0.1)])
def test_ditto(engine: str, lam: float, lr: float) -> None:
    compare(follow(f"ditto(lam={lam}, lr={lr})", engine), beside(lam, lr))


@engines
@pytest.mark.parametrize("lr", [0.0, 0.3])
def test_apfl(engine: str, lr: float) -> None:
    compare(follow(f"apfl(lr={lr})", engine), beside(0.0, lr, mixed=True))


@pytest.mark.parametrize("when", ["batch", "before", "after"])
def test_ditto_without_a_pull_is_local_training_alone(when: str) -> None:
    """Whatever the others do: client 3 trains in rounds 3 and 6 alone."""
    ends = follow(f"ditto(lam=0, lr=0.1, when={when!r})", "loop")
    purpose = "batches" if when == "batch" else "second batches"
    alone = {}
    for t, cohort in enumerate(COHORTS):
        for i in cohort.reported:
            w = alone.get(i, ends.x[t - 1] if t else PROBLEM.x)
            rng = stream(SETTING.seed, purpose, t, i)
            for _ in range(SETTING.epochs):
                order = rng.permutation(PROBLEM.n[i])
                for k in range(0, len(order), SETTING.batch):
                    w = w - 0.1 * PROBLEM.gradient(i, order[k : k + SETTING.batch], w)
            alone[i] = w
        for i, w in alone.items():
            np.testing.assert_allclose(ends.models[t][i], w, **CLOSE)


@pytest.mark.parametrize("text", ["ditto", "ditto(when='before')", "ditto(when='after')", "apfl"])
def test_the_shared_model_is_fedavgs_to_the_bit(text: str) -> None:
    assert np.array_equal(follow(text, "loop").x, course(PROBLEM, SETTING, COHORTS, "fedavg"))


@pytest.mark.parametrize("text", ["fedrep", "fedbabu", "ditto", "apfl"])
def test_they_keep_the_contract(text: str) -> None:
    check_rule(parse(text).rules[0])


@pytest.mark.parametrize("text", ["fedrep", "fedbabu"])
def test_what_needs_an_own_part_says_so(text: str) -> None:
    with pytest.raises(UserError, match=rf"^{text} needs parameters that stay with the clients"):
        follow(text, "loop")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedrep(own_epochs=0)", "own_epochs = 0 is not allowed; use 1 or more"),
        ("ditto(lam=-1)", "lam = -1 is not allowed; use 0 or more"),
        ("ditto(when='never')", "when = 'never' is not allowed; use 'batch', 'before' or 'after'"),
        ("apfl(lr=-1)", "lr = -1 is not allowed; use a number above 0, or 0 for the clients'"),
    ],
)
def test_other_options_are_refused(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse(text)
