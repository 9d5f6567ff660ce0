"""Trust: every report is checked against its brief before it is used.

A rejected one gets a one-line reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from kairosfl.core.fields import (
    AFTER,
    SLACK,
    SQUARED_LOSS,
    TRAINED,
    Brief,
    Report,
    Reports,
    fields,
)
from kairosfl.core.work import epoch_of
from kairosfl.errors import UserError

PART = 1 << 20
NUMBERS = tuple(
    entry
    for entry in fields(Reports)
    if entry.travels and entry.shape == "each" and entry.name != "ids"
)
# What a client can report only if it trains.
IN_TRAINING = (*AFTER, SQUARED_LOSS, "similarity")


@dataclass(frozen=True)
class Trust:
    """How far a client is trusted."""

    max_norm: float = 1e4  # an update with a larger norm is rejected
    clip_norm: float = math.inf  # an update with a larger norm is scaled down to it
    max_samples: int = (
        10_000_000  # a client that claims more samples is rejected: they determine its weight
    )
    max_loss: float = 1e6  # a loss or score beyond this, positive or negative, is rejected
    min_loss: float = (
        0.0  # a smaller loss or score is rejected; -inf: for a loss that may be negative
    )
    samples: tuple[
        int, ...
    ] = ()  # how many samples each client enrolled with; one that claims more is rejected

    def __post_init__(self) -> None:
        if math.isnan(self.min_loss):
            raise UserError(
                "deploy.min_loss = nan must be a number; use -inf for a loss that may be negative."
            )
        for number in self.samples:
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise UserError(
                    f"deploy.samples = {list(self.samples)} must be numbers of samples, "
                    "each 1 or more."
                )
        for name in ("max_norm", "clip_norm", "max_samples", "max_loss"):
            if not getattr(self, name) > 0:
                raise UserError(f"deploy.{name} = {getattr(self, name)} must be above 0.")


def check(report: Report, round: int, brief: Brief, trust: Trust) -> Report | str:
    """The report if it is accepted, or the reason if not. Its update is clipped in place."""
    reason = (
        _addressed(report, round, brief)
        or _numbers(report, brief, trust)
        or _enrolled(report, trust)
        or _work(report, brief)
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
    squares = 0.0
    for part in delta.split(PART):
        squares += float(part.double().square().sum())
    return math.sqrt(squares)


def _addressed(report: Report, round: int, brief: Brief) -> str | None:
    if report.client != brief.client:
        return f"it answered as client {report.client}"
    if round != brief.round:
        return f"its report is of round {round + 1}, not {brief.round + 1}"
    return None


def _numbers(report: Report, brief: Brief, trust: Trust) -> str | None:
    """Every number is within the range of its field and the deployment's limits."""
    for entry in NUMBERS:
        number = getattr(report, entry.row)
        if number is None or (entry.name in TRAINED and not brief.epochs):
            continue
        bound, note = math.inf, ""
        if entry.limit:
            bound = getattr(trust, entry.limit)
            note = f" (deploy.{entry.limit} = {bound})"
        if entry.wrong(number, bound):
            return entry.fault(number) + note
        if entry.limit == "max_loss" and number < trust.min_loss:
            return entry.fault(number) + f" (deploy.min_loss = {trust.min_loss:g})"
    return None


def _enrolled(report: Report, trust: Trust) -> str | None:
    """It has at most the samples that it enrolled with, where the operator wrote them down."""
    if report.client < len(trust.samples) and report.n > trust.samples[report.client]:
        return (
            f"it claims {report.n} samples and enrolled with {trust.samples[report.client]} "
            "(deploy.samples)"
        )
    return None


def _work(report: Report, brief: Brief) -> str | None:
    """Steps and epochs are what the brief orders for that many samples.

    They may be fewer if it may stop early.
    """
    if not brief.epochs:
        return _untrained(report)
    per_epoch = int(epoch_of(report.n, brief.batch_size, drop_last=brief.drop_last).steps)
    most = per_epoch * brief.epochs
    if brief.max_steps is not None:
        most = min(most, brief.max_steps)
    ordered = f"{most} were ordered for its {report.n} samples"
    if brief.stop_below is None and report.steps != most:
        return f"it did {report.steps} steps, where {ordered}"
    if not 0 < report.steps <= most:
        return f"it did {report.steps} steps, where at most {ordered}"
    if abs(report.epochs - report.steps / per_epoch) > SLACK * brief.epochs:
        return f"its {report.epochs:g} epochs do not fit its {report.steps} steps"
    return None


def _untrained(report: Report) -> str | None:
    """It did no step."""
    if report.steps:
        return f"it did {report.steps} steps, where none was ordered"
    return None


def _measured(report: Report, brief: Brief) -> str | None:
    """It answers what was asked and nothing else; who does not train measures nothing after it."""
    for entry in NUMBERS:
        if not entry.when:
            continue
        due = entry.asked(brief)
        if entry.name in IN_TRAINING and not brief.epochs:
            due = False
        answered = getattr(report, entry.row) is not None
        if due and not answered:
            return f"it did not report {entry.row}"
        if answered and not due:
            return f"it reported {entry.row}, which was not asked for"
    if report.choice is not None and report.choice >= len(brief.candidates):
        return f"its choice is {report.choice}, of {len(brief.candidates)} candidates"
    return None
