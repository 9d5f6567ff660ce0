"""When does a deficit hurt for good, and which detector saw it? One sweep over windows of rounds.

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
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError
from kairosfl.runs.config import RunConfig, resolve
from kairosfl.runs.files import read_json, read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import updated
from kairosfl.runs.prepare import build_task
from kairosfl.runs.sweep import Member
from kairosfl.tasks.kinds import CLASSED
from kairosfl.wording import counted

DEFICITS = {
    "cohort": "a fraction of the cohort",
    "clients": "a fixed part of the clients",
    "epochs": "a fraction of the local epochs",
    "labels": (
        "a fraction of the right labels; the others are wrong, a sample's always in the same way"
    ),
}
DEFAULT = ("cohort", "clients")
DETECTORS = ("fgn.paired()", "fgn.smoothed()", "fgn")
# Deficits that are columns of the metrics.
SPENT = {"cohort": "clients a round", "epochs": "epochs"}
NONE = "none"

Lost = Sequence[Sequence[float]]  # by window, by seed
Spent = dict[str, list[list[float]]]  # clients or epochs, by window
ENOUGH = 4  # seeds with which a null result is one
SIGNS = 8  # seeds of which all lose by chance once in 256 times
# Student's t, two-sided, by the number of seeds. 99 %: with five windows, one deficit in forty
# seems harmful by chance. 95 %: too large to be called absent.
CERTAIN = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}
LIKELY = {4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


@dataclass(frozen=True, kw_only=True)
class Deficit(Rule):
    """From round `first` to before `until`, only the fraction `amount` of what `of` says."""

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

    def traits(self) -> Traits:
        return Traits(adapts=True, when="last")

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
    """How many windows end before the final 10 % of rounds, which are scored.

    Harm that is seen later may not last.
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
    """The runs: without a deficit for each detector, and every deficit in every window.

    All of them with every seed.
    """
    # --- what cannot be ---
    if "sweep" in tables:
        raise UserError(
            "The configuration has a [sweep] section; `kairosfl periods` makes its own, so leave "
            "it out."
        )
    deficits = list(dict.fromkeys(deficits))
    detectors = list(dict.fromkeys(detectors))
    for name in deficits:
        if name not in DEFICITS:
            raise UserError(f"--deficit {name} is not known; use one of {', '.join(DEFICITS)}.")
    if seeds < 1:
        raise UserError(f"--seeds {seeds} must be 1 or more.")
    if not 0 < amount < 1:
        raise UserError(
            f"--amount {amount:g} must be above 0 and below 1: the fraction that a deficit leaves."
        )
    plain = resolve(tables)
    if plain.algorithm.any("private"):
        raise UserError(
            "kairosfl periods cannot be used with privacy, whose noise is for whole cohorts; leave "
            "it out."
        )
    _check_that_they_leave_something_out(deficits, amount, plain)

    # --- the runs ---
    runs = []
    for seed in range(plain.seed, plain.seed + seeds):
        for i, detector in enumerate(detectors):
            settings = {"seed": seed, "run.detector": detector}
            config = resolve(updated(tables, settings))
            runs.append(Member(f"{NONE}-{i}-seed{seed}", settings, config))
        for name in deficits:
            for i, (first, last) in enumerate(windows(plain.train.rounds, number)):
                config = resolve(updated(tables, {"seed": seed, "run.detector": detectors[0]}))
                rule = Deficit(of=name, first=first, until=last, amount=amount)
                config = replace(config, algorithm=Algorithm((*config.algorithm.rules, rule)))
                settings = {"seed": seed, "deficit": name, "window": i + 1}
                runs.append(Member(f"{name}-{i + 1}-seed{seed}", settings, config))
    return runs


def _check_that_they_leave_something_out(
    deficits: Sequence[str], amount: float, plain: RunConfig
) -> None:
    counts = {
        "cohort": ("train.cohort", plain.train.cohort),
        "epochs": ("train.epochs", plain.train.epochs),
    }
    if {"clients", "labels"} & {*deficits}:
        task = build_task(plain)
        counts["clients"] = ("data.clients", len(task.clients))
        if "labels" in deficits and task.dataset.kind not in CLASSED:
            raise UserError(
                "--deficit labels needs samples with one class each, and those of this task are "
                f"{task.dataset.kind!r}."
            )
    for name in deficits:
        key, count = counts.get(name, ("", 0))
        if count and part(amount, count) == count:
            fix = "use a smaller --amount" if count > 1 else "use 2 or more"
            raise UserError(
                f"--deficit {name} with --amount {amount:g} leaves out nothing of {key} = {count}; "
                f"{fix}."
            )


def findings(
    out: Path,
    summaries: Mapping[str, Mapping[str, Any]],
    runs: Sequence[Member],
    number: int,
    amount: float = 0.2,
) -> dict[str, Any]:
    """How much worse every deficit and window ended, and how much of each a detector marks.

    Args:
        out: The folder of the sweep.
        summaries: Of its runs, by their names.
        runs: As `members` gave them: those without a deficit before the others with their seed.
        number: Of windows.
        amount: What a deficit leaves, as a fraction.
    """
    score = Folder(out / runs[0].name).main()
    about = read_json(out / runs[0].name / "run.json")
    spans = windows(runs[0].config.train.rounds, number)
    plain: dict[int, float] = {}  # how the first run without a deficit ended, by seed
    marks: dict[str, list[list[float]]] = {}  # shares of each window, by detector
    lost: dict[str, list[list[float]]] = {}
    had: Spent = {}  # of a deficit, and of `all` without one

    # --- every run ---
    for run in runs:
        seed = run.settings["seed"]
        ended = summaries[run.name][f"last_tenth_{score.name}"]
        rows = list(read_lines(out / run.name / "metrics.jsonl"))
        if ended is None:
            raise UserError(
                f"{out / run.name} ended with {score.with_article} that is not finite; lower "
                "train.lr."
            )
        if "window" in run.settings:
            name = run.settings["deficit"]
            window = run.settings["window"] - 1
            losses = lost.setdefault(name, _empty(spans))
            losses[window].append(score.sign * (plain[seed] - ended))
            _add(had, name, window, rows, name, spans)
            continue
        if seed not in plain:
            plain[seed] = ended
            for name, window in product(SPENT, range(number)):
                _add(had, f"all {name}", window, rows, name, spans)
        critical = [bool(row["critical"]) for row in rows]
        shares = [float(np.mean(critical[a:b])) for a, b in windows(len(critical), number)]
        marks.setdefault(run.settings["run.detector"], []).append(shares)

    # --- every deficit ---
    judged = before_scoring(spans)
    remaining: dict[str, str] = {}
    harm: dict[str, list[dict[str, float | None]]] = {}
    lasts: dict[str, list[int]] = {}
    verdicts: list[str] = []
    for name, losses in lost.items():
        idle = [window + 1 for window in range(judged) if _idle(name, window, had)]
        remaining[name] = _left(name, amount, about.get("clients", 1), had)
        harm[name] = list(map(spread, losses))
        lasts[name] = lasting(losses[:judged], idle)
        words = verdict(losses[:judged], number, idle, SPENT.get(name, ""))
        verdicts.append(f"{name}: {words}")

    return {
        "metric": {
            "name": score.name,
            "better": "higher" if score.higher else "lower",
            "percent": score.percent,
        },
        "amount": amount,
        "left": remaining,
        "windows": [[a + 1, b] for a, b in spans],
        "judged": judged,
        "none": {"mean": float(np.mean(list(plain.values()))), "seeds": list(plain.values())},
        "harm": harm,
        "marked": {name: np.mean(shares, 0).round(3).tolist() for name, shares in marks.items()},
        "lasts": lasts,
        "verdict": verdicts,
    }


def _add(
    had: Spent,
    key: str,
    window: int,
    rows: Sequence[Mapping[str, Any]],
    column: str,
    spans: Sequence[tuple[int, int]],
) -> None:
    """Add what a run had of a column in the rounds of a window; the list exists in any case."""
    numbers = had.setdefault(key, _empty(spans))[window]
    if column in SPENT:
        numbers += [row[column] for row in rows[slice(*spans[window])]]


def _empty(spans: Sequence[tuple[int, int]]) -> list[list[float]]:
    """A list for each window."""
    return [[] for _ in spans]


def _idle(name: str, window: int, had: Spent) -> bool:
    """Whether a deficit left out nothing in a window.

    Rules may ask for as little anyway, or for more afterwards.
    """
    return name in SPENT and sum(had[name][window]) >= sum(had[f"all {name}"][window])


def _left(name: str, amount: float, clients: int, had: Spent) -> str:
    """What a deficit leaves; of cohorts and epochs, which rules may change, the means of what the
    runs had.
    """
    if name == "labels":
        return f"{100 * amount:g} % of the labels right"
    if name == "clients":
        return f"{part(amount, clients)} of {counted(clients, 'client')}"
    part_of_it = np.mean(np.concatenate(list(map(np.array, had[name]))))
    all_of_it = np.mean(np.concatenate(list(map(np.array, had[f"all {name}"]))))
    return f"{part_of_it:.3g} of {all_of_it:.3g} {SPENT[name]}"


# --- does the harm last? ---


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error."""
    error = None
    if len(values) > 1:
        error = float(np.std(values, ddof=1)) / len(values) ** 0.5
    return {"mean": float(np.mean(values)), "error": error}


def lasting(lost: Lost, idle: Sequence[int] = ()) -> list[int]:
    """The windows, from 1, whose harm is beyond chance; `idle` ones left out nothing."""
    return [window for window in _above(lost, CERTAIN, 3.17, idle) if not _agree(lost[window - 1])]


def verdict(lost: Lost, number: int, idle: Sequence[int] = (), unit: str = "") -> str:
    """What is known about a deficit in windows of `number`.

    Those that had no less of `unit` are not judged.
    """
    seeds = len(lost[0])
    judged = [values for window, values in enumerate(lost, 1) if window not in idle]

    # --- what is not judged ---
    none = f"had no fewer {unit} than without a deficit"
    after = ""
    if idle:
        verb = "are" if len(idle) > 1 else "is"
        after = f"; {_listed(idle)} {none}, and {verb} not judged"
    if not judged:
        return f"undecided; no window counts, since each {none}"
    if not any(map(any, judged)):
        return f"undecided; it changed no score at all: look whether the runs learn{after}"
    if seeds < 2:
        return (
            "undecided; one seed does not show which differences are chance; "
            f"use --seeds {ENOUGH} or more{after}"
        )

    # --- what lasts ---
    doubtful = _above(lost, LIKELY, 2.0 if seeds < ENOUGH else 2.23, idle)
    harmful = lasting(lost, idle)
    if harmful:
        undecided = [window for window in doubtful if window not in harmful]
        rest = f"; {_listed(undecided)} undecided" if undecided else ""
        return (
            f"harm done in {_listed(harmful)} of {number} lasts "
            f"(99 % interval above zero){rest}{after}"
        )

    # --- what may last ---
    if seeds < ENOUGH or doubtful:
        where = f" ({_listed(doubtful)})" if doubtful else ""
        more = ENOUGH if seeds < ENOUGH else 2 * seeds
        return (
            f"undecided; {seeds} seeds are too few to tell harm{where} from chance; "
            f"use --seeds {more}{after}"
        )
    return (
        f"no critical period here; no harm before the final 10 % of rounds is beyond chance{after}"
    )


def _above(
    lost: Lost, bounds: Mapping[int, float], otherwise: float, idle: Sequence[int]
) -> list[int]:
    """The windows, from 1, whose mean is more than so many standard errors above zero."""
    above = []
    for window, values in enumerate(lost, 1):
        if window in idle or len(values) < 2:
            continue
        harm = spread(values)
        assert harm["mean"] is not None
        assert harm["error"] is not None
        if harm["mean"] > bounds.get(len(values), otherwise) * harm["error"]:
            above.append(window)
    return above


def _agree(values: Sequence[float]) -> bool:
    """Whether a few seeds lost the same, as with few test samples: it says nothing about chance."""
    return len(values) < SIGNS and bool(np.ptp(values) < 1e-9 * max(map(abs, values)))


def _listed(numbers: Sequence[int]) -> str:
    return f"window{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"
