"""Local differential privacy: what a client sends when its brief asks for noise.

    Δ ← Δ · min(1, C / ‖Δ‖) + σ · N(0, 1) in every entry

C is `update_clip`, σ is `update_noise`. With noise, everything else that tells about its data, the
fields that the list marks as secret, is sent as 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from kairosfl.core.fields import Brief, Briefs, Report, Reports, fields
from kairosfl.core.streams import normal, secret_seed, stream

SECRET = tuple(entry.row for entry in fields(Reports) if entry.secret)


def hidden(report: Report, brief: Brief, secret: bytes = b"") -> Report:
    """The report as it is sent; its update is changed in place.

    The noise follows from the seed, the round and the client, and from `secret`, without which the
    server knows it.
    """
    if brief.update_clip is None and brief.update_noise is None:
        return report
    length = float(torch.linalg.vector_norm(report.delta, dtype=torch.float64))
    if brief.update_clip is not None and length > brief.update_clip:
        report.delta.mul_(brief.update_clip / length)
    if brief.update_noise is None:
        return report
    if not math.isfinite(length):  # or the rejection would tell that training diverged
        report.delta.zero_()
    seed = brief.seed
    if secret:
        seed = secret_seed(brief.seed, secret)
    rng = stream(seed, "update noise", brief.round, brief.client)
    report.delta.add_(normal(rng, report.delta), alpha=brief.update_noise)
    zeros = {name: 0.0 for name in SECRET if getattr(report, name) is not None}
    return replace(report, **zeros)  # type: ignore[type-var]


def all_hidden(reports: Reports, briefs: Briefs) -> Reports:
    """The reports of a cohort as they are sent; their updates are changed in place."""
    if briefs.update_clip is None and briefs.update_noise is None:
        return reports
    rows = []
    for report, brief in zip(reports.each(), briefs.each(), strict=True):
        rows.append(hidden(report, brief))
    return Reports.stack(rows, reports.delta, reports.failed)
