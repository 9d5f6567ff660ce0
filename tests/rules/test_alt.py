"""ALT against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, follow
from reference import COHORTS, Network, Setting

from kairosfl.errors import UserError
from kairosfl.rules import ALT, parse

LONG = Setting(epochs=6, gamma=1.0)
THRESHOLDS = {
    "up": lambda r: 0.9 + 0.09 * r / 6,
    "down": lambda r: 0.99 - 0.09 * r / 6,
    "fixed": lambda r: 0.9,
}


@pytest.mark.parametrize("threshold", THRESHOLDS)
@pytest.mark.parametrize("statistic", ["mean", "min"])
@pytest.mark.parametrize("reference_", ["global", "previous"])
def test_six_rounds(threshold: str, statistic: str, reference_: str) -> None:
    problem = Network()
    want = reference.alt(problem, LONG, COHORTS, THRESHOLDS[threshold], statistic, reference_)
    text = f"alt(a=0.9, b=0.09, threshold='{threshold}', statistic='{statistic}', reference='{reference_}')"
    runs = follow(problem, LONG, COHORTS, text)
    np.testing.assert_allclose([run.x.numpy() for run in runs], want.course, rtol=0, atol=1e-12)
    reports = [run.record.reports for run in runs if run.record.reports is not None]
    assert [report.epochs.tolist() for report in reports] == want.epochs
    for report, similarity in zip(reports, want.similarity, strict=True):
        np.testing.assert_allclose(report.similarity.numpy(), similarity, rtol=0, atol=1e-12)
    stopped = [epochs for round in want.epochs for epochs in round]
    assert min(stopped) < 6, "nobody stops early, the setting shows nothing"


@pytest.mark.parametrize("per", ["epoch", "batch"])
def test_a_threshold_that_never_triggers_is_fedavg_to_the_bit(per: str) -> None:
    plain = course(Network(), LONG, COHORTS, "fedavg")
    text = f"alt(a=-1, threshold='fixed', per='{per}')"
    assert np.array_equal(course(Network(), LONG, COHORTS, text), plain)


def test_a_threshold_that_always_triggers_trains_one_epoch_or_one_batch() -> None:
    """The first batch has cosine 1, which is below a threshold of 1 + 9 / 6 at once."""
    one = course(Network(), Setting(epochs=1, gamma=1.0), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), LONG, COHORTS, "alt(a=1, b=9)"), one)
    runs = follow(Network(), LONG, COHORTS[:1], "alt(a=1, b=9, per='batch')")
    assert runs[0].record.reports.steps.tolist() == [1, 1, 1]
    assert runs[0].record.reports.epochs.tolist() == [1 / 2, 1 / 3, 1 / 4]


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("alt", 0.1 + 0.8 / 6, 0.9),
        ("alt(threshold='down')", 0.9 - 0.8 / 6, 0.1),
        ("alt(threshold='fixed', a=0.4)", 0.4, 0.4),
    ],
)
def test_rounds_count_from_one_to_the_last(text: str, first: float, last: float) -> None:
    """T(r) = a + b · r / R with r = 1 in the first round and r = R in the last."""
    rule = parse(text).rules[0]
    assert isinstance(rule, ALT)

    class At:
        rounds = 6

        def __init__(self, number: int) -> None:
            self.number = number

    assert rule.limit(At(0)) == pytest.approx(first, rel=1e-15)  # type: ignore[arg-type]
    assert rule.limit(At(5)) == pytest.approx(last, rel=1e-15)  # type: ignore[arg-type]


def test_nonsense_is_refused() -> None:
    with pytest.raises(UserError, match="use 'up', 'down' or 'fixed'"):
        ALT(threshold="sideways")
