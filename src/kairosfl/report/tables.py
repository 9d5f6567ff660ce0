"""Results of the runs: mean ± deviation over seeds, what a target costs, and paired tests between algorithms."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.report.checked import Array
from kairosfl.report.notes import notes
from kairosfl.report.read import Group, RunData, read_study
from kairosfl.runs.history import final_tenth
from kairosfl.runs.score import Score

_WIDE = ("final", "cohort", "e-LUD", "seconds")  # shown only in the page and the files


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over the `count` runs (of `asked`) for which the value exists."""

    mean: float
    deviation: float
    count: int
    asked: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        given = [float(value) for value in values]
        known = [value for value in given if abs(value) < 1e150]  # the deviation of larger values overflows
        mean = statistics.fmean(known) if known else math.nan
        deviation = statistics.stdev(known) if len(known) > 1 else math.nan
        return cls(mean, deviation, len(known), len(given))

    def of_score(self, score: Score) -> str:
        """A value of this metric as shown in a table."""
        size = max(abs(self.mean), self.deviation if self.count > 1 else 0.0)
        return self.text(score.digits(size), score.scale)

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """As shown in a table: a dash for none, a deviation if values differ, a count if it is not all of them."""
        if not self.count:
            return "–"
        shown = fixed(self.mean * scale, digits)
        if self.deviation > 0:
            shown += f" ± {fixed(self.deviation * scale, digits)}"
        return shown if self.count == self.asked else f"{shown} ({self.count} of {self.asked})"


@dataclass(frozen=True)
class Row:
    """One algorithm of the table of results. Accuracies and other percentages are fractions."""

    label: str
    problem: str
    score: Score  # the metric of `final`, `last_tenth`, `best` and the target
    seeds: tuple[int, ...]
    going: int  # runs that have neither finished nor stopped with an error
    diverged: int  # of the runs that the numbers are about
    finished: int  # runs; if there are any, the numbers are about these
    rounds: Spread
    planned: int
    final: Spread  # the last evaluated round
    last_tenth: Spread  # the mean of the final 10 % of the evaluated rounds
    best: Spread
    rounds_to_target: Spread
    bytes_to_target: Spread
    bytes: Spread
    epochs: Spread
    cohort: Spread
    elud: Spread
    seconds: Spread
    notes: tuple[str, ...]  # what qualifies its numbers


@dataclass(frozen=True)
class Pair:
    """The paired t-test of two algorithms that both have finished on the same seeds.

    It is about the main metric over the final 10 % of rounds: how much better the second is, which is second minus
    first, or first minus second if lower is better.
    """

    first: str
    second: str
    score: Score
    seeds: tuple[int, ...]
    difference: Spread
    p: float  # NaN with fewer than two seeds
    adjusted: float  # Holm's correction over all pairs of the same data that could be tested


def results(groups: Sequence[Group], target: float) -> list[Row]:
    """The table of results, with what it took to reach the target."""
    return [_row(group, target) for group in groups]


def _row(group: Group, target: float) -> Row:
    seeds = tuple(dict.fromkeys(run.seed for run in group.runs))

    def over(value: Callable[[RunData], float]) -> Spread:
        """Over the seeds: runs with the same seed count as one."""
        return Spread.of(_mean(np.array([value(run) for run in group.shown if run.seed == seed])) for seed in seeds)

    return Row(
        label=group.label,
        problem=group.problem,
        score=group.score,
        seeds=seeds,
        going=sum(not run.done and not run.stopped for run in group.runs),
        diverged=sum(run.diverged is not None for run in group.shown),
        finished=len(group.finished),
        rounds=over(lambda run: run.last),
        planned=max(run.planned for run in group.runs),
        final=over(lambda run: _last(scored(run)[1])),
        last_tenth=over(last_tenth),
        best=over(lambda run: _best(run)),
        rounds_to_target=over(lambda run: reach(run, run.column("round"), target)),
        bytes_to_target=over(lambda run: reach(run, run.total("bytes_down", "bytes_up"), target)),
        bytes=over(lambda run: _last(run.total("bytes_down", "bytes_up"))),
        epochs=over(lambda run: _last(run.total("epochs_total"))),
        cohort=over(lambda run: _mean(run.column("cohort"))),
        elud=over(lambda run: _mean(run.column("elud"))),
        seconds=over(lambda run: _last(run.total("seconds"))),
        notes=notes(group),
    )


def scored(run: RunData) -> tuple[NDArray[np.intp], Array]:
    """Indices of the rounds that were evaluated, and the main metric in them; infinitely bad if it was not finite."""
    values = run.column(run.score.name)[run.evaluated]
    return run.evaluated, np.where(np.isfinite(values), values, -run.score.sign * math.inf)


def last_tenth(run: RunData) -> float:
    """Mean of the main metric over the final 10 % of the evaluated rounds."""
    values = final_tenth(scored(run)[1])
    return float(values.mean()) if len(values) else math.nan


def reach(run: RunData, cost: Array, target: float) -> float:
    """The cost when the main metric first reached the target; NaN if it never did."""
    there = np.flatnonzero(run.score.reached(run.column(run.score.name), target))
    return float(cost[there[0]]) if len(there) else math.nan


def chosen_target(groups: Sequence[Group], target: float | None) -> float:
    """The requested target, checked, or the default one."""
    if target is None:
        return default_target(groups)
    groups[0].score.check(target)
    return target


def default_target(groups: Sequence[Group]) -> float:
    """A whole percentage, or a number of two digits, that at least half of the algorithms reach with every seed."""
    counted, score = [group for group in groups if group.finished] or groups, groups[0].score
    bests = [min(score.sign * _best(run) for run in group.shown) for group in counted]
    known = [best for best in bests if math.isfinite(best)]
    return score.rounded(score.sign * statistics.median_low(known)) if known else math.nan


def paired_tests(groups: Sequence[Group]) -> list[Pair]:
    """Every two algorithms that share the data and a seed, corrected for the number of tests on the same data."""
    return [
        pair
        for mine in by_problem(groups).values()
        for pair in _corrected([_pair(groups[i], groups[j]) for i, j in combinations(mine, 2)])
    ]


def by_problem(rows: Sequence[Group | Row]) -> dict[str, list[int]]:
    """Which groups or rows are about the same data."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.problem, []).append(i)
    return found


def _pair(first: Group, second: Group) -> Pair | None:
    ours, theirs = _by_seed(second), _by_seed(first)
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    differences = [first.score.sign * (ours[seed] - theirs[seed]) for seed in seeds]
    apart = Spread.of(differences)
    p = paired_t(differences)
    return Pair(first.label, second.label, first.score, seeds, apart, p, math.nan) if seeds else None


def _corrected(pairs: Iterable[Pair | None]) -> list[Pair]:
    made = [pair for pair in pairs if pair is not None]
    return [replace(pair, adjusted=p) for pair, p in zip(made, holm([pair.p for pair in made]), strict=True)]


def _by_seed(group: Group) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for run in group.finished:
        found.setdefault(run.seed, []).append(last_tenth(run))
    means = {seed: statistics.fmean(values) for seed, values in found.items()}
    return {seed: value for seed, value in means.items() if math.isfinite(value)}


def paired_t(differences: Sequence[float]) -> float:
    """The two-sided p-value of "the mean difference is zero"; NaN with fewer than two differences."""
    n = len(differences)
    if n < 2:
        return math.nan
    mean, deviation = statistics.fmean(differences), statistics.stdev(differences)
    if deviation == 0:
        return 1.0 if mean == 0 else 0.0
    return student_tail(mean / (deviation / math.sqrt(n)), n - 1)


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > |t|) for whole degrees of freedom, in closed form (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(2 + odd, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    inside = (angle + sine * total) * 2 / math.pi if odd else sine * total
    return max(0.0, 1.0 - inside)


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for as many tests as there are values; NaN stays and does not count."""
    order = sorted((i for i, p in enumerate(values) if math.isfinite(p)), key=lambda i: values[i])
    adjusted, highest = [math.nan] * len(values), 0.0
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * values[i]))
        adjusted[i] = highest
    return adjusted


def fixed(value: float, digits: int) -> str:
    """A number with this many decimals; halves are rounded away from zero, as in the page's scripts."""
    if abs(value) >= 1e9:  # it has exploded
        return f"{value:.{digits}e}"
    exact = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, Context(prec=400))
    return f"{exact:f}"


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, unless it is shown as zero."""
    shown = fixed(abs(value), digits)
    return shown if not float(shown) else f"{'−' if value < 0 else '+'}{shown}"


def probability(p: float) -> str:
    """A p-value as papers print it."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def said(p: float) -> str:
    """A p-value in a sentence: `p = 0.016` or `p < 0.001`."""
    shown = probability(p)
    return f"p {shown}" if shown.startswith("<") else f"p = {shown}"


def cells(row: Row) -> dict[str, str]:
    """A row of results as text by column, the same in the page, on the terminal and in files."""
    rounds = fixed(row.rounds.mean, 0)
    lost = row.diverged and not row.last_tenth.count
    return {
        "algorithm": row.label,
        "seeds": str(len(row.seeds)),
        "rounds": rounds if row.rounds.mean >= row.planned else f"{rounds} of {row.planned}",
        "final 10 %": "diverged" if lost else row.last_tenth.of_score(row.score),
        "final": row.final.of_score(row.score),
        "best": row.best.of_score(row.score),
        "rounds to target": row.rounds_to_target.text(0),
        "MB to target": megabytes(row.bytes_to_target),
        "MB": megabytes(row.bytes),
        "epochs": row.epochs.text(0),
        "cohort": row.cohort.text(1),
        "e-LUD": row.elud.text(2),
        "seconds": row.seconds.text(1),
    }


def megabytes(spread: Spread) -> str:
    """Bytes in millions, with three decimals for very small models."""
    shown = replace(spread, mean=spread.mean / 1e6, deviation=spread.deviation / 1e6)
    return shown.text(1 if spread.mean >= 1e6 else 3)


def pair_cells(pair: Pair) -> dict[str, str]:
    """A paired test as text by column."""
    points = " (points)" if pair.score.percent else ""
    return {
        "second": pair.second,
        "first": pair.first,
        "seeds": str(len(pair.seeds)),
        f"{'second − first' if pair.score.higher else 'first − second'}{points}": _difference(pair),
        "p": probability(pair.p),
        "p (Holm)": probability(pair.adjusted),
    }


def _difference(pair: Pair) -> str:
    size, score = replace(pair.difference, mean=abs(pair.difference.mean)), pair.score
    digits = score.digits(size.mean)
    rest = size.text(digits, score.scale).removeprefix(fixed(score.scale * size.mean, digits))
    return signed(score.scale * pair.difference.mean, digits) + rest


def results_table(rows: Sequence[Row], target: float, without: Sequence[str] = ()) -> list[dict[str, str]]:
    """The table of results as text, one dictionary per row, with metric and target named in its columns."""
    score = rows[0].score
    goal = "target" if math.isnan(target) else score.shown(target)
    heads = {name: f"{score.stated} {name}".lstrip() for name in ("final 10 %", "final", "best")}
    shown = ({name: value for name, value in cells(row).items() if name not in without} for row in rows)
    return [{heads.get(name, name.replace("target", goal)): value for name, value in row.items()} for row in shown]


def columns(row: Row | Pair) -> dict[str, Any]:
    """A row or test as numbers by column: mean, deviation and count of each value, lists as their length."""
    flat: dict[str, Any] = {}
    for name, value in vars(row).items():
        if isinstance(value, Spread):
            flat |= {name: value.mean, f"{name}_deviation": value.deviation, f"{name}_count": value.count}
        elif isinstance(value, Score):
            flat["metric"] = value.name
        else:
            flat[name] = "; ".join(value) if name == "notes" else len(value) if isinstance(value, tuple) else value
    return flat


@dataclass(frozen=True)
class Comparison:
    """What `kairosfl compare` prints."""

    rows: list[Row]
    target: float
    damaged: list[str]

    def table(self, columns: Sequence[str] | None = None) -> list[dict[str, str]]:
        """These columns after the algorithm, or those that fit a wide terminal."""
        without = _WIDE if columns is None else [n for n in cells(self.rows[0]) if n not in ("algorithm", *columns)]
        return results_table(self.rows, self.target, without)

    def numbers(self) -> list[dict[str, Any]]:
        """All columns: each value with mean, deviation, and over how many seeds of how many it is."""
        kept = [{"metric": row.score.name, "target": self.target} | asdict(row) for row in self.rows]
        return [{key: value for key, value in row.items() if key != "score"} for row in kept]

    def notes(self) -> list[str]:
        """Notes on the rows."""
        return [f"{row.label}: {note}" for row in self.rows for note in row.notes]


def compare(dirs: Sequence[Path], target: float | None = None) -> Comparison:
    """The results of the runs in these folders."""
    study = read_study(dirs)
    target = chosen_target(study.groups, target)
    return Comparison(results(study.groups, target), target, study.damaged)


def _best(run: RunData) -> float:
    values, sign = scored(run)[1], run.score.sign
    return float(sign * (sign * values).max()) if len(values) else math.nan


def _last(values: Array) -> float:
    return float(values[-1]) if len(values) else math.nan


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
