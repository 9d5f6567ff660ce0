"""FGN in both readings and FedFIM: values against numpy, and the schedules that they give FedCL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from kairosfl.core.fields import Briefs, Reports, column
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import Run, rounds
from kairosfl.detectors import FGN, Detector, FedFIM, parse_detectors
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.tasks.vector import Entry, Layout

N = np.array([10, 30, 60])
LR = np.array([0.1, 0.1, 0.2])
EPOCHS = np.array([2.0, 1.5, 4.0])
GRAD_SQ = np.array([3.0, 5.0, 11.0])
FISHER = np.array([7.0, 2.0, 1.0])


def asked(m: int, lr: np.ndarray | float = 0.1, round: int = 0) -> Briefs:
    return Briefs(
        seed=0,
        round=round,
        ids=torch.arange(m),
        start=torch.zeros(1),
        lr=column(torch.as_tensor(lr), m),
        momentum=column(0.0, m),
        weight_decay=column(0.0, m),
        clip=column(float("inf"), m),
        batch_size=column(8, m, torch.int64),
        epochs=column(1, m, torch.int64),
        scale=column(1.0, m),
        pull=column(0.0, m),
    )


def answered(
    ids: torch.Tensor, n: np.ndarray, epochs: np.ndarray, grad_sq: np.ndarray, fisher: np.ndarray | None = None
) -> Reports:
    ones = torch.ones(len(ids), dtype=torch.float64)
    return Reports(
        ids=ids,
        n=torch.as_tensor(n),
        steps=torch.ones(len(ids), dtype=torch.int64),
        epochs=torch.as_tensor(epochs),
        delta=torch.ones(len(ids), 1),
        loss=ones,
        grad_sq=torch.as_tensor(grad_sq),
        seconds=ones,
        fisher=None if fisher is None else torch.as_tensor(fisher),
    )


REPORTS = answered(torch.arange(3), N, EPOCHS, GRAD_SQ, FISHER)


@pytest.mark.parametrize(
    ("detector", "expected"),
    [
        (FGN(), (10 * 0.1 * 1.5 + 30 * 0.1 * 5 / 1.5 + 60 * 0.2 * 2.75) / 100),
        (FGN(include_lr=False), (10 * 1.5 + 30 * 5 / 1.5 + 60 * 2.75) / 100),
        (FGN(weighted=False), (0.1 * 1.5 + 0.1 * 5 / 1.5 + 0.2 * 2.75) / 3),
        (FGN.released(), (0.1 * 1.5 + 0.1 * 5 / 1.5 + 0.2 * 2.75) / 3),
        (FedFIM(), (10 * 7 + 30 * 2 + 60 * 1) / 100),
    ],
)
def test_values(detector: Detector, expected: float) -> None:
    assert detector.value(asked(3, LR), REPORTS) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("detector", [FGN(), FGN(delta=0.5), FedFIM()])
def test_consecutive_rounds_are_compared(detector: FGN | FedFIM) -> None:
    """Eq. 2 on given values: the first round is critical, then (v_t − v_{t−1}) / v_{t−1} ≥ delta."""
    values = np.array([1.0, 1.0, 1.02, 1.025, 2.0, 1.9, 3.8, 3.838])
    state = detector.start()
    found = []
    for t, value in enumerate(values):
        critical, state = detector.decide(state, float(value), t)
        found.append(critical)
    rises = np.append(np.inf, np.diff(values) / values[:-1])
    assert found == [bool(rise >= detector.delta - 1e-12) for rise in rises]
    assert found[0]
    assert len(set(found)) == 2
    _, zero = detector.decide(state, 0.0, 8)
    assert [detector.decide(zero, value, 9)[0] for value in (0.0, 1e-9)] == [False, True]  # nothing after nothing


def test_a_window_by_hand() -> None:
    """Window 2, every round, nothing forced: means over (0, 0, 4), (0, 4, 4), (4, 4, 4), (4, 4, 1)."""
    detector = FGN(window=2)
    state = detector.start()
    found = []
    for t, value in enumerate([4.0, 4.0, 4.0, 1.0]):
        critical, state = detector.decide(state, value, t)
        found.append(critical)
    assert found == [True, True, False, False]


def test_between_checks_the_last_answer_stands() -> None:
    detector = FGN.released()
    state = detector.start()
    answers = []
    for t in range(30):
        critical, after = detector.decide(state, 1.0, t)
        if t % 2:
            assert after is state
            assert critical == answers[-1]
        answers.append(critical)
        state = after
    assert int(state["checks"]) == 15
    # Ten checks fill the window with ones; from the eleventh on nothing rises any more.
    assert answers == [True] * 20 + [False] * 10


def cohorts(algorithm: str, detector: Detector, fgn: Callable[[int], float], total: int) -> list[int]:
    """The cohort of every round when the federated gradient norm is given, of 128 clients and 16 to begin with."""
    made, layout = parse(algorithm), Layout((Entry("w", (1,), 0),))
    start = Run.start(torch.zeros(1), made, clients=128, seed=0, detectors=(detector,))
    recipe = Recipe(rounds=total, cohort=16, lr=1.0)
    course = rounds(start, made, recipe, clients=128, layout=layout, detectors=(detector,))
    _, briefs = next(course)
    sizes = []
    while briefs is not None:
        m = len(briefs)
        sizes.append(m)
        norms = np.full(m, fgn(len(sizes) - 1))
        _, briefs = course.send(answered(briefs.ids, np.full(m, 5), np.ones(m), norms))
    return sizes


@pytest.mark.parametrize("factor", [1.0, 0.97, 0.9])
def test_the_released_schedule(factor: float) -> None:
    """What the authors' code does, whatever the data: 16, 32, 32, 64, 64, sixteen rounds of 96, and down again."""
    sizes = cohorts("fedcl.released()", FGN.released(), lambda t: factor**t, 40)
    assert sizes == [16, 32, 32, 64, 64, *[96] * 16, 48, 48, 24, 24, *[16] * 15]


@pytest.mark.parametrize(("factor", "last"), [(0.8, 19), (0.5, 11)])
def test_the_released_schedule_with_a_fast_fall(factor: float, last: int) -> None:
    sizes = cohorts("fedcl.released()", FGN.released(), lambda t: factor**t, 40)
    assert sizes[5:last] == [96] * (last - 5)
    assert sizes[last : last + 5] == [48, 48, 24, 24, 16]


def test_the_papers_schedule() -> None:
    """Eq. 2 and Algorithm 2: doubling while the norm rises, up to all clients, then halving to half the start."""
    sizes = cohorts("fedcl", FGN(), lambda t: 1.1 ** min(t, 4), 12)
    assert sizes == [16, 32, 64, 128, 128, 128, 64, 32, 16, 8, 8, 8]


def test_text_forms() -> None:
    assert parse_detectors("fgn") == (FGN(),)
    assert parse_detectors("fgn.released() + fedfim(exact=false)") == (FGN.released(), FedFIM(exact=False))
    for detector in (FGN(), FGN.released(), FedFIM(delta=0.1)):
        assert parse_detectors(str(detector)) == (detector,)
    assert (FedFIM().measure, FedFIM(exact=False).measure, FGN().measure) == ("fisher", "fisher_sampled", None)
    with pytest.raises(UserError, match="'fgn'"):
        parse_detectors("fng")
    with pytest.raises(UserError, match="window = -1"):
        parse_detectors("fgn(window=-1)")


def test_without_a_fisher_trace_there_is_no_value() -> None:
    with pytest.raises(UserError, match="no Fisher trace"):
        FedFIM().value(asked(3), answered(torch.arange(3), N, EPOCHS, GRAD_SQ))
