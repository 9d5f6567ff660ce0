"""When does a deficit hurt for good? Deficits in windows over training, as one sweep; and which
detector saw it.

Achille, Rovere and Soatto, "Critical Learning Periods in Deep Networks", ICLR 2019, did this with
blurred images. Here a window of the rounds has a fraction of the cohort, a fixed part of the
clients, fewer local epochs, or wrong labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.streams import stream
from kairosfl.errors import UserError
from kairosfl.runs.config import RunConfig, resolve
from kairosfl.runs.files import read_json, read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.harm import lasting, spread, verdict
from kairosfl.runs.keys import updated
from kairosfl.runs.prepare import build_task
from kairosfl.runs.sweep import Member
from kairosfl.tasks.kinds import CLASSED
from kairosfl.wording import counted

DEFICITS = {
    "cohort": "a fraction of the cohort",
    "clients": "a fixed part of the clients",
    "epochs": "a fraction of the local epochs",
    "labels": "a fraction of the right labels; the others are wrong, a sample's always in the same way",
}
DEFAULT = ("cohort", "clients")
DETECTORS = ("fgn.paired()", "fgn.smoothed()", "fgn")
SPENT = {
    "cohort": "clients a round",
    "epochs": "epochs",
}  # deficits that are columns of the metrics
NONE = "none"


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
        if self.of == "cohort" and plan.ids is not None:
            ids = now.stream("deficit").choice(
                plan.ids, part(self.amount, len(plan.ids)), replace=False
            )
            return replace(plan, ids=ids)
        if self.of == "cohort":
            return replace(plan, size=part(self.amount, plan.size))
        if self.of == "clients":
            some = stream(now.seed, "deficit").choice(
                now.population, part(self.amount, now.population), replace=False
            )
            size = plan.size if plan.ids is None else len(plan.ids)
            return replace(plan, eligible=np.sort(some), ids=None, size=size)
        return plan

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        if self.of not in ("epochs", "labels") or not self._acts(now):
            return briefs
        if self.of == "labels":
            return replace(briefs, label_noise=torch.full_like(briefs.label_noise, 1 - self.amount))
        return replace(
            briefs,
            epochs=(briefs.epochs * self.amount).round().clamp(min=1).to(briefs.epochs.dtype),
        )


def part(amount: float, whole: int) -> int:
    """This fraction of so many, at least one."""
    return max(1, round(amount * whole))


def windows(rounds: int, number: int) -> list[tuple[int, int]]:
    """The rounds of each window, from the first to before the last."""
    if not 2 <= number <= rounds:
        raise UserError(
            f"--windows {number} must be at least 2 and at most train.rounds = {rounds}."
        )
    edges = [round(rounds * i / number) for i in range(number + 1)]
    return list(pairwise(edges))


def before_scoring(spans: Sequence[Sequence[int]]) -> int:
    """How many windows end before the final 10 % of rounds, which are scored: harm that is seen
    later may not last.
    """
    rounds = spans[-1][1]
    return sum(last <= rounds - max(1, rounds // 10) for _, last in spans)


def members(
    tables: Mapping[str, Any],
    *,
    number: int = 6,
    deficits: Sequence[str] = DEFAULT,
    amount: float = 0.2,
    seeds: int = 4,
    detectors: Sequence[str] = DETECTORS,
) -> list[Member]:
    """The runs: without a deficit, once for each detector; and every deficit in every window. All
    with every seed.
    """
    if "sweep" in tables:
        raise UserError(
            "The configuration has a [sweep] section; `kairosfl periods` makes its own, so leave it out."
        )
    deficits, detectors = list(dict.fromkeys(deficits)), list(dict.fromkeys(detectors))
    for name in deficits:
        if name not in DEFICITS:
            raise UserError(f"--deficit {name} is not known; use one of {', '.join(DEFICITS)}.")
    if seeds < 1:
        raise UserError(f"--seeds {seeds} must be 1 or more.")
    if not 0 < amount < 1:
        raise UserError(
            f"--amount {amount:g} must be above 0 and below 1: the fraction that a deficit leaves."
        )
    whole = resolve(tables)
    if whole.algorithm.any("private"):
        raise UserError(
            "kairosfl periods cannot be used with privacy, whose noise is for whole cohorts; leave it out."
        )
    _check_that_they_leave_something_out(deficits, amount, whole)
    found = []
    for seed in range(whole.seed, whole.seed + seeds):
        for i, detector in enumerate(detectors):
            settings = {"seed": seed, "run.detector": detector}
            found.append(
                Member(f"{NONE}-{i}-seed{seed}", settings, resolve(updated(tables, settings)))
            )
        for name in deficits:
            for i, (first, last) in enumerate(windows(whole.train.rounds, number)):
                config = resolve(updated(tables, {"seed": seed, "run.detector": detectors[0]}))
                rule = Deficit(of=name, first=first, until=last, amount=amount)
                config = replace(config, algorithm=Algorithm((*config.algorithm.rules, rule)))
                settings = {"seed": seed, "deficit": name, "window": i + 1}
                found.append(Member(f"{name}-{i + 1}-seed{seed}", settings, config))
    return found


def _check_that_they_leave_something_out(
    deficits: Sequence[str], amount: float, whole: RunConfig
) -> None:
    task = build_task(whole) if {"clients", "labels"} & {*deficits} else None
    if task and "labels" in deficits and (kind := task.dataset.kind) not in CLASSED:
        raise UserError(
            f"--deficit labels needs samples with one class each, and those of this task are {kind!r}."
        )
    counts = {
        "cohort": ("train.cohort", whole.train.cohort),
        "epochs": ("train.epochs", whole.train.epochs),
    }
    if task:
        counts["clients"] = ("data.clients", len(task.clients))
    for name in deficits:
        key, all_of_it = counts.get(name, ("", 0))
        if all_of_it and part(amount, all_of_it) == all_of_it:
            fix = "use a smaller --amount" if all_of_it > 1 else "use 2 or more"
            raise UserError(
                f"--deficit {name} with --amount {amount:g} leaves out nothing of {key} = {all_of_it}; {fix}."
            )


def findings(
    out: Path,
    summaries: Mapping[str, Mapping[str, Any]],
    made: Sequence[Member],
    number: int,
    amount: float = 0.2,
) -> dict[str, Any]:
    """How much worse every deficit and window ended, over the seeds, and how much of each window a
    detector marks.
    """
    score, about = Folder(out / made[0].name).main(), read_json(out / made[0].name / "run.json")
    plain: dict[int, float] = {}
    marks: dict[str, list[list[float]]] = {}
    lost: dict[str, list[list[float]]] = {}
    had: dict[
        str, list[list[float]]
    ] = {}  # by window: clients or epochs of a deficit, and of `all` without one
    spans = windows(made[0].config.train.rounds, number)
    for member in made:
        seed, ended = member.settings["seed"], summaries[member.name][f"last_tenth_{score.name}"]
        rows = list(read_lines(out / member.name / "metrics.jsonl"))
        if ended is None:
            raise UserError(
                f"{out / member.name} ended with {score.with_article} that is not finite; lower train.lr."
            )
        if "window" in member.settings:
            name, window = member.settings["deficit"], member.settings["window"] - 1
            lost.setdefault(name, [[] for _ in spans])[window].append(
                score.sign * (plain[seed] - ended)
            )
            had.setdefault(name, [[] for _ in spans])[window] += _column(
                rows[slice(*spans[window])], name
            )
            continue
        if seed not in plain:
            plain[seed] = ended
            for name, window in product(SPENT, range(number)):
                row = had.setdefault(f"all {name}", [[] for _ in spans])[window]
                row += _column(rows[slice(*spans[window])], name)
        critical = [bool(row["critical"]) for row in rows]
        parts = [float(np.mean(critical[a:b])) for a, b in windows(len(critical), number)]
        marks.setdefault(member.settings["run.detector"], []).append(parts)
    judged = before_scoring(spans)
    idle = {name: [i + 1 for i in range(judged) if _idle(name, i, had)] for name in lost}
    return {
        "metric": {
            "name": score.name,
            "better": "higher" if score.higher else "lower",
            "percent": score.percent,
        },
        "amount": amount,
        "left": {name: _left(name, amount, about.get("clients", 1), had) for name in lost},
        "windows": [[a + 1, b] for a, b in spans],
        "judged": judged,
        "none": {"mean": float(np.mean(list(plain.values()))), "seeds": list(plain.values())},
        "harm": {name: [spread(each) for each in rows] for name, rows in lost.items()},
        "marked": {name: np.mean(rows, 0).round(3).tolist() for name, rows in marks.items()},
        "lasts": {name: lasting(rows[:judged], idle[name]) for name, rows in lost.items()},
        "verdict": [
            f"{name}: {verdict(rows[:judged], number, idle[name], SPENT.get(name, ''))}"
            for name, rows in lost.items()
        ],
    }


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows] if name in SPENT else []


def _idle(name: str, window: int, had: Mapping[str, Sequence[Sequence[float]]]) -> bool:
    """Whether a deficit left out nothing in a window: rules may ask for as little anyway, or for
    more afterwards.
    """
    return name in SPENT and sum(had[name][window]) >= sum(had[f"all {name}"][window])


def _left(
    name: str, amount: float, clients: int, had: Mapping[str, Sequence[Sequence[float]]]
) -> str:
    """What a deficit leaves; of cohorts and epochs, which rules may change, the means of what the
    runs had.
    """
    if name == "labels":
        return f"{100 * amount:g} % of the labels right"
    if name == "clients":
        return f"{part(amount, clients)} of {counted(clients, 'client')}"
    left, whole = (
        np.mean(np.concatenate([*map(np.array, had[key])])) for key in (name, f"all {name}")
    )
    return f"{left:.3g} of {whole:.3g} {SPENT[name]}"
