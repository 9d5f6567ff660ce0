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
    study: dict[str, Any] = {}
    if path.is_file():
        study = json.loads(path.read_text(encoding="utf-8"))
    theirs = study.get("pfl", {}).get("curve")
    ours = study.get("kairos", {}).get("curve")
    if study.get("setting") != "iid" or not theirs or not ours:
        return Clock(
            pfl.SECONDS * rounds,
            f"NVIDIA H200, {1000 * pfl.SECONDS:.1f} ms a round in an earlier run of ours",
        )
    begun, _, before = theirs[0]
    done, _, seconds = theirs[-1]
    pace = seconds / done
    if done > begun:
        pace = (seconds - before) / (done - begun)
    ours_seconds = None
    if ours[-1][0] == rounds:
        ours_seconds = ours[-1][2]
    hardware = study.get("gpu", "the same GPU")
    hardware += f", in the same process, from rounds {begun} to {done}"
    return Clock(pace * rounds, hardware, ours_seconds)


def speed(public: Sequence[Results], study: Path, link: Callable[[Results], str]) -> list[str]:
    """A row for every finished run with a published time, and one for pfl."""
    rows = []
    for results in public:
        for name, cell in results["cells"].items():
            clock = _clock(results, cell, study)
            if clock and complete(cell) and values(cell, "total_seconds"):
                rows.append(_row(results, name, cell, link, clock))
    if not rows:
        return []
    return [*markdown(rows), "", NOTE, ""]


def _clock(results: Results, cell: dict[str, Any], study: Path) -> Clock | None:
    if results["item"] == BESIDE:
        return beside_pfl(study, cell["rounds"])
    seconds = cell["printed"].get("total_seconds")
    if seconds is None:
        return None
    hardware = results.get("hardware", "")
    if not hardware:
        hardware = "not stated"
    return Clock(seconds, hardware)


def _row(
    results: Results, name: str, cell: dict[str, Any], link: Callable[[Results], str], clock: Clock
) -> dict[str, str]:
    ours = clock.ours
    if ours is None:
        ours = statistics.fmean(values(cell, "total_seconds"))
    devices = {device_name(run) for run in longest(cell)}
    return {
        "benchmark": f"[{results['title']}]({link(results)})",
        "run": words(name),
        "seconds, theirs": f"{clock.theirs:,.0f}",
        "their hardware": clock.hardware,
        "seconds, ours": fixed(ours, 1 if ours < 10 else 0),
        "our hardware": ", ".join(sorted(devices)),
    }
