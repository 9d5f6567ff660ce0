"""When does a deficit hurt for good? Deficits in windows over training, as one sweep; and which detector saw it.

Achille, Rovere and Soatto, "Critical Learning Periods in Deep Networks", ICLR 2019, did this with blurred images. Here
a window of the rounds has a fraction of the cohort, a fixed part of the clients, fewer local epochs, or wrong labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.streams import stream
from kairosfl.errors import UserError
from kairosfl.runs.config import resolve
from kairosfl.runs.experiment import build_task
from kairosfl.runs.files import read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import updated
from kairosfl.runs.sweep import Member
from kairosfl.tasks.kinds import CLASSED

DEFICITS = {
    "cohort": "a fraction of the cohort",
    "clients": "a fixed part of the clients",
    "epochs": "a fraction of the local epochs",
    "labels": "a fraction of the right labels; the others are wrong, a sample's always in the same way",
}
DEFAULT = ("cohort", "clients")
DETECTORS = ("fgn.paired()", "fgn.smoothed()", "fgn")
NONE = "none"
ENOUGH = 4  # seeds with which a null result is one
# Student's t, two-sided 99 %, by the number of seeds: with five windows, one in twenty studies finds harm by chance.
CERTAIN = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}
LIKELY = {4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}  # 95 %: too large to be called absent


@dataclass(frozen=True, kw_only=True)
class Deficit(Rule):
    """In the rounds from `first` to before `until`, only the fraction `amount` of what `of` says."""

    kind = "adaptive"
    last = True

    of: str = "cohort"
    first: int = 0
    until: int = 0
    amount: float = 0.2

    @classmethod
    def name(cls) -> str:
        """Not one of the rules that users choose, so it goes by its module."""
        return f"{cls.__module__}.{cls.__name__}"

    def __post_init__(self) -> None:
        self.check("of", self.of in DEFICITS, f"use one of {', '.join(DEFICITS)}")
        self.check("amount", 0 < self.amount < 1, "it is a fraction, above 0 and below 1")

    def _acts(self, now: Round) -> bool:
        return self.first <= now.number < self.until

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if not self._acts(now):
            return plan
        if self.of == "cohort":
            return replace(plan, size=max(1, round(self.amount * plan.size)))
        if self.of == "clients":
            some = max(1, round(self.amount * now.population))
            chosen = stream(now.seed, "deficit").choice(now.population, some, replace=False)
            return replace(plan, eligible=np.sort(chosen))
        return plan

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        if self.of not in ("epochs", "labels") or not self._acts(now):
            return briefs
        if self.of == "labels":
            return replace(briefs, label_noise=torch.full_like(briefs.label_noise, 1 - self.amount))
        return replace(briefs, epochs=(briefs.epochs * self.amount).round().clamp(min=1).to(briefs.epochs.dtype))


def windows(rounds: int, number: int) -> list[tuple[int, int]]:
    """The rounds of each window, from the first to before the last."""
    if not 2 <= number <= rounds:
        raise UserError(f"--windows {number} must be at least 2 and at most train.rounds = {rounds}.")
    edges = [round(rounds * i / number) for i in range(number + 1)]
    return list(pairwise(edges))


def members(
    tables: Mapping[str, Any],
    *,
    number: int = 6,
    deficits: Sequence[str] = DEFAULT,
    amount: float = 0.2,
    seeds: int = 3,
    detectors: Sequence[str] = DETECTORS,
) -> list[Member]:
    """The runs: without a deficit, once for each detector; and every deficit in every window. All with every seed."""
    if "sweep" in tables:
        raise UserError("The configuration has a [sweep] section; `kairosfl periods` makes its own, so leave it out.")
    for name in deficits:
        if name not in DEFICITS:
            raise UserError(f"--deficit {name} is not known; use one of {', '.join(DEFICITS)}.")
    if seeds < 1:
        raise UserError(f"--seeds {seeds} must be 1 or more.")
    whole = resolve(tables)
    if "epochs" in deficits and whole.train.epochs == 1:
        raise UserError("--deficit epochs needs train.epochs of 2 or more; with 1 there is nothing to leave out.")
    if "labels" in deficits and (kind := build_task(whole).dataset.kind) not in CLASSED:
        raise UserError(f"--deficit labels needs samples with one class each, and those of this task are {kind!r}.")
    found = []
    for seed in range(whole.seed, whole.seed + seeds):
        for i, detector in enumerate(detectors):
            settings = {"seed": seed, "run.detector": detector}
            found.append(Member(f"{NONE}-{i}-seed{seed}", settings, resolve(updated(tables, settings))))
        for name in deficits:
            for i, (first, last) in enumerate(windows(whole.train.rounds, number)):
                config = resolve(updated(tables, {"seed": seed, "run.detector": detectors[0]}))
                rule = Deficit(of=name, first=first, until=last, amount=amount)
                config = replace(config, algorithm=Algorithm((*config.algorithm.rules, rule)))
                settings = {"seed": seed, "deficit": name, "window": i + 1}
                found.append(Member(f"{name}-{i + 1}-seed{seed}", settings, config))
    return found


def findings(
    out: Path, summaries: Mapping[str, Mapping[str, Any]], made: Sequence[Member], number: int, amount: float = 0.2
) -> dict[str, Any]:
    """How much worse every deficit and window ended, over the seeds, and how much of each window a detector marks."""
    score = Folder(out / made[0].name).main()
    plain: dict[int, float] = {}
    marks: dict[str, list[list[float]]] = {}
    lost: dict[str, list[list[float]]] = {}
    for member in made:
        seed, ended = member.settings["seed"], summaries[member.name][f"last_tenth_{score.name}"]
        if ended is None:
            raise UserError(f"{out / member.name} ended with {score.with_article} that is not finite; lower train.lr.")
        if "window" in member.settings:
            rows = lost.setdefault(member.settings["deficit"], [[] for _ in range(number)])
            rows[member.settings["window"] - 1].append(score.sign * (plain[seed] - ended))
            continue
        plain.setdefault(seed, ended)
        critical = [bool(row["critical"]) for row in read_lines(out / member.name / "metrics.jsonl")]
        parts = [float(np.mean(critical[a:b])) for a, b in windows(len(critical), number)]
        marks.setdefault(member.settings["run.detector"], []).append(parts)
    return {
        "metric": {"name": score.name, "better": "higher" if score.higher else "lower", "percent": score.percent},
        "amount": amount,
        "windows": [[a + 1, b] for a, b in windows(made[0].config.train.rounds, number)],
        "none": {"mean": float(np.mean(list(plain.values()))), "seeds": list(plain.values())},
        "harm": {name: [_spread(each) for each in rows] for name, rows in lost.items()},
        "marked": {name: np.mean(rows, 0).round(3).tolist() for name, rows in marks.items()},
        "lasts": {name: lasting(rows) for name, rows in lost.items()},
        "verdict": [_verdict(name, rows) for name, rows in lost.items()],
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
    error = float(np.std(values, ddof=1) / len(values) ** 0.5) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "error": error}


def lasting(lost: Sequence[Sequence[float]]) -> list[int]:
    """The windows, from 1, whose harm is beyond chance; not the last, after which nothing could be recovered."""
    found = []
    for window, values in enumerate(lost[:-1], 1):
        harm = _spread(values)
        if harm["error"] is not None and (harm["mean"] or 0.0) > CERTAIN.get(len(values), 3.17) * harm["error"]:
            found.append(window)
    return found


def _verdict(name: str, lost: Sequence[Sequence[float]]) -> str:
    if len(lost[0]) < 2:
        return f"{name}: one seed does not show which differences are chance; use --seeds 4 or more"
    if found := lasting(lost):
        windows = f"window{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        return f"{name}: harm lasts from {windows} of {len(lost)} (99 % interval above zero)"
    seeds = len(lost[0])
    beyond = LIKELY.get(seeds, 2.0 if seeds < ENOUGH else 2.23)
    doubtful = [
        i for i, values in enumerate(lost[:-1], 1) if np.mean(values) > beyond * (_spread(values)["error"] or 0.0)
    ]
    where = f" (window{'s' * (len(doubtful) > 1)} {', '.join(map(str, doubtful))})" if doubtful else ""
    if seeds < ENOUGH or doubtful:
        more = ENOUGH if seeds < ENOUGH else 2 * seeds
        return f"{name}: undecided; {seeds} seeds are too few to tell harm{where} from chance; use --seeds {more}"
    return f"{name}: no critical period here; no harm before the last window is beyond chance"
