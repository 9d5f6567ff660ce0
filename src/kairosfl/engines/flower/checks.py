"""Trust: every report is checked against its brief before it is used; a rejected one gets a one-line reason."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kairosfl.core.briefs import FISHER, FISHER_SAMPLED, SCORE_AFTER, SCORE_BEFORE, Brief, Report
from kairosfl.errors import UserError

PART = 1 << 20
SLACK = 1e-6  # tolerance for fractions of an epoch and cosines, which are rounded in transit


@dataclass(frozen=True)
class Trust:
    """How far a client is trusted."""

    max_norm: float = 1e4  # an update with a larger norm is rejected
    clip_norm: float = math.inf  # an update with a larger norm is scaled down to it
    max_samples: int = 10_000_000  # a client that claims more samples is rejected: they determine its weight
    max_loss: float = 1e6  # a loss or score beyond this, positive or negative, is rejected

    def __post_init__(self) -> None:
        for name in ("max_norm", "clip_norm", "max_samples", "max_loss"):
            if not getattr(self, name) > 0:
                raise UserError(f"deploy.{name} = {getattr(self, name)} must be above 0.")


def check(report: Report, round: int, brief: Brief, trust: Trust) -> Report | str:
    """The report if it is accepted, or the reason if not. Its update is clipped in place."""
    reason = (
        _addressed(report, round, brief)
        or _numbers(report, trust)
        or _work(report, brief, trust)
        or _measured(report, brief)
    )
    if reason:
        return reason
    norm = _norm(report.delta)
    if not math.isfinite(norm):
        return "its update is not finite"
    if norm > trust.max_norm:
        return f"its update has the norm {norm:.3g}, above deploy.max_norm = {trust.max_norm:g}"
    if norm > trust.clip_norm:
        report.delta.mul_(trust.clip_norm / norm)
    return report


def _norm(delta: Tensor) -> float:
    """In double precision, which does not overflow, and chunk by chunk, to save memory."""
    return math.sqrt(sum(float(part.double().square().sum()) for part in delta.split(PART)))


def _addressed(report: Report, round: int, brief: Brief) -> str | None:
    if report.client != brief.client:
        return f"it answered as client {report.client}"
    if round != brief.round:
        return f"its report is of round {round + 1}, not {brief.round + 1}"
    return None


def _numbers(report: Report, trust: Trust) -> str | None:
    for name in ("loss", "score_before", "score_after"):
        value = getattr(report, name)
        if value is not None and not abs(value) <= trust.max_loss:  # false for NaN, too
            return f"its {name} is {value:g}"
    for name in ("grad_sq", "fisher", "seconds", "fisher_seconds", "epochs"):
        value = getattr(report, name)
        if value is not None and not 0 <= value < math.inf:
            return f"its {name} is {value:g}"
    if report.similarity is not None and not abs(report.similarity) <= 1 + SLACK:
        return f"its similarity is {report.similarity:g}"
    return None


def _work(report: Report, brief: Brief, trust: Trust) -> str | None:
    """Steps and epochs must be what the brief asks for with that many samples, or fewer if it allows early stopping."""
    if not 0 < report.n <= trust.max_samples:
        return f"it claims {report.n} samples (deploy.max_samples = {trust.max_samples})"
    size = min(brief.batch_size, report.n)
    per_epoch = report.n // size if brief.drop_last else math.ceil(report.n / size)
    most = per_epoch * brief.epochs
    if brief.stop_below is None and report.steps != most:
        return f"it did {report.steps} steps, where {most} were ordered for its {report.n} samples"
    if not 0 < report.steps <= most:
        return f"it did {report.steps} steps, where at most {most} were ordered for its {report.n} samples"
    if abs(report.epochs - report.steps / per_epoch) > SLACK * brief.epochs:
        return f"its {report.epochs:g} epochs do not fit its {report.steps} steps"
    return None


def _measured(report: Report, brief: Brief) -> str | None:
    """It must contain what was asked for and nothing else."""
    asked = {
        "similarity": brief.stop_below is not None,
        "score_before": SCORE_BEFORE in brief.measure,
        "score_after": SCORE_AFTER in brief.measure,
        "fisher": bool(brief.measure & {FISHER, FISHER_SAMPLED}),
    }
    for name, wanted in asked.items():
        if wanted != (getattr(report, name) is not None):
            return f"it did not report {name}" if wanted else f"it reported {name}, which was not asked for"
    return None
