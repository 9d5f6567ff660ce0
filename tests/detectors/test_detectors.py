"""FGN in both readings and FedFIM: values against numpy, and the schedules that they give FedCL."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import rounds
from kairosfl.core.rule import Memory
from kairosfl.core.run import Run, Setup
from kairosfl.core.table import Table
from kairosfl.detectors import FGN, Detector, FedFIM, parse_detectors
from kairosfl.errors import UserError
from kairosfl.rules import parse

N = np.array([10, 30, 60])
LR = np.array([0.1, 0.1, 0.2])
EPOCHS = np.array([2.0, 1.5, 4.0])
GRAD_SQ = np.array([3.0, 5.0, 11.0])
FISHER = np.array([7.0, 2.0, 1.0])


def asked(m: int, lr: np.ndarray | float = 0.1) -> Briefs:
    rate: Any = torch.from_numpy(lr) if isinstance(lr, np.ndarray) else lr
    return Briefs(seed=0, round=0, ids=torch.arange(m), start=torch.zeros(1), lr=rate)


def begun(detector: Detector) -> Memory:
    return Memory(detector.server(None), {}, Table({}))  # type: ignore[arg-type]


def decided(detector: Detector, value: float, memory: Memory, number: int) -> tuple[bool, Memory]:
    return detector.decide(value, memory, SimpleNamespace(number=number))  # type: ignore[arg-type]


def valued(detector: Detector, briefs: Briefs, reports: Reports) -> float:
    now = SimpleNamespace(briefs=briefs, reports=reports)
    return detector.value(begun(detector), now)  # type: ignore[arg-type]


def answered(
    ids: torch.Tensor,
    n: np.ndarray,
    epochs: np.ndarray,
    grad_sq: np.ndarray,
    fisher: np.ndarray | None = None,
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
    assert valued(detector, asked(3, LR), REPORTS) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("detector", [FGN(), FGN(delta=0.5), FedFIM()])
def test_consecutive_rounds_are_compared(detector: FGN | FedFIM) -> None:
    """Eq. 2 on given values: the first round is critical, then (v_t − v_{t−1}) / v_{t−1} ≥ delta."""
    values = np.array([1.0, 1.0, 1.02, 1.025, 2.0, 1.9, 3.8, 3.838])
    memory = begun(detector)
    found = []
    for t, value in enumerate(values):
        critical, memory = decided(detector, float(value), memory, t)
        found.append(critical)
    rises = np.append(np.inf, np.diff(values) / values[:-1])
    assert found == [bool(rise >= detector.delta - 1e-12) for rise in rises]
    assert found[0]
    assert len(set(found)) == 2
    _, zero = decided(detector, 0.0, memory, 8)
    assert [decided(detector, value, zero, 9)[0] for value in (0.0, 1e-9)] == [
        False,
        True,
    ]  # nothing after nothing


def test_a_window_by_hand() -> None:
    """Window 2, every round, nothing forced: means over (0, 0, 4), (0, 4, 4), (4, 4, 4), (4, 4, 1)."""
    detector = FGN(window=2)
    memory = begun(detector)
    found = []
    for t, value in enumerate([4.0, 4.0, 4.0, 1.0]):
        critical, memory = decided(detector, value, memory, t)
        found.append(critical)
    assert found == [True, True, False, False]


def test_between_checks_the_last_answer_stands() -> None:
    detector = FGN.released()
    memory = begun(detector)
    answers = []
    for t in range(30):
        critical, after = decided(detector, 1.0, memory, t)
        if t % 2:
            assert after is memory
            assert critical == answers[-1]
        answers.append(critical)
        memory = after
    assert int(memory.state["checks"]) == 15
    # Ten checks fill the window with ones; from the eleventh on nothing rises any more.
    assert answers == [True] * 20 + [False] * 10


def cohorts(
    algorithm: str, detector: Detector, fgn: Callable[[int], float], total: int
) -> list[int]:
    """The cohort of every round when the federated gradient norm is given, of 128 clients and 16 to
    begin with.
    """
    recipe, layout = Recipe(rounds=total, cohort=16, lr=1.0), Layout((Entry("w", (1,), 0),))
    setup = Setup(parse(algorithm), recipe, 128, layout, (detector,))
    course = rounds(Run.start(torch.zeros(1), setup, seed=0), setup)
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
    """What the authors' code does, whatever the data: 16, 32, 32, 64, 64, sixteen rounds of 96, and
    down again.
    """
    sizes = cohorts("fedcl.released()", FGN.released(), lambda t: factor**t, 40)
    assert sizes == [16, 32, 32, 64, 64, *[96] * 16, 48, 48, 24, 24, *[16] * 15]


@pytest.mark.parametrize(("factor", "last"), [(0.8, 19), (0.5, 11)])
def test_the_released_schedule_with_a_fast_fall(factor: float, last: int) -> None:
    sizes = cohorts("fedcl.released()", FGN.released(), lambda t: factor**t, 40)
    assert sizes[5:last] == [96] * (last - 5)
    assert sizes[last : last + 5] == [48, 48, 24, 24, 16]


def test_the_papers_schedule() -> None:
    """Eq. 2 and Algorithm 2: doubling while the norm rises, up to all clients, then halving to half
    the start.
    """
    sizes = cohorts("fedcl", FGN(), lambda t: 1.1 ** min(t, 4), 12)
    assert sizes == [16, 32, 64, 128, 128, 128, 64, 32, 16, 8, 8, 8]


def test_text_forms() -> None:
    assert parse_detectors("fgn") == (FGN(),)
    assert parse_detectors("fgn.released() + fedfim(exact=false)") == (
        FGN.released(),
        FedFIM(exact=False),
    )
    for detector in (FGN(), FGN.released(), FedFIM(delta=0.1)):
        assert parse_detectors(str(detector)) == (detector,)
    assert (FedFIM().measure, FedFIM(exact=False).measure, FGN().measure) == (
        "fisher",
        "fisher_sampled",
        None,
    )
    with pytest.raises(UserError, match="'fgn'"):
        parse_detectors("fng")
    with pytest.raises(UserError, match="window = -1"):
        parse_detectors("fgn(window=-1)")


def test_without_a_fisher_trace_there_is_no_value() -> None:
    with pytest.raises(UserError, match="no Fisher trace"):
        valued(FedFIM(), asked(3), answered(torch.arange(3), N, EPOCHS, GRAD_SQ))
