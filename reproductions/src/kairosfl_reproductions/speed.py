"""Seconds of whole runs: theirs as published, or pfl's as we timed it; ours as measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairosfl.report.tables import fixed
from kairosfl_reproductions.details import device_name, markdown
from kairosfl_reproductions.public import pfl
from kairosfl_reproductions.results import Results, complete, longest, values
from kairosfl_reproductions.words import words

NOTE = (
    "Where the hardware differs, the seconds compare machines as well as programs. pfl publishes none for this GPU, so "
    "we timed it ourselves; [GPU](gpu.md#compared-with-pfl-research) has the milliseconds of a round."
)
BESIDE = "public/pfl-cifar10-iid"


@dataclass(frozen=True)
class Clock:
    """Seconds of a whole run of pfl, and of ours in the same process where it was the same; and on
    what.
    """

    theirs: float
    hardware: str
    ours: float | None = None


def beside_pfl(path: Path, rounds: int) -> Clock:
    """From what `benchmarks/speed/against_pfl.py --out` wrote or, without that, from the milliseconds of
    another run.
    """
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    theirs, ours = (found.get(who, {}).get("curve") for who in ("pfl", "kairos"))
    if found.get("setting") != "iid" or not theirs or not ours:
        return Clock(
            pfl.SECONDS * rounds,
            f"NVIDIA H200, {1000 * pfl.SECONDS:.1f} ms a round in an earlier run of ours",
        )
    (begun, _, before), (done, _, seconds) = theirs[0], theirs[-1]
    pace = (seconds - before) / (done - begun) if done > begun else seconds / done
    device = found.get("gpu", "the same GPU")
    whole = ours[-1][2] if ours[-1][0] == rounds else None
    return Clock(
        pace * rounds, f"{device}, in the same process, from rounds {begun} to {done}", whole
    )


def speed(public: Sequence[Results], study: Path, link: Callable[[Results], str]) -> list[str]:
    """A row for every finished run with a published time, and one for pfl."""
    rows = [
        _row(results, name, cell, link, clock)
        for results in public
        for name, cell in results["cells"].items()
        if complete(cell)
        and values(cell, "total_seconds")
        and (clock := _clock(results, cell, study))
    ]
    return [*markdown(rows), "", NOTE, ""] if rows else []


def _clock(results: Results, cell: dict[str, Any], study: Path) -> Clock | None:
    if results["item"] == BESIDE:
        return beside_pfl(study, cell["rounds"])
    seconds = cell["printed"].get("total_seconds")
    return None if seconds is None else Clock(seconds, results.get("hardware") or "not stated")


def _row(
    results: Results, name: str, cell: dict[str, Any], link: Callable[[Results], str], clock: Clock
) -> dict[str, str]:
    ours = clock.ours or statistics.fmean(values(cell, "total_seconds"))
    return {
        "benchmark": f"[{results['title']}]({link(results)})",
        "run": words(name),
        "seconds, theirs": f"{clock.theirs:,.0f}",
        "their hardware": clock.hardware,
        "seconds, ours": fixed(ours, 0 if ours >= 10 else 1),
        "our hardware": ", ".join(sorted({device_name(run) for run in longest(cell)})),
    }
