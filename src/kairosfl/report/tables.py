"""Results of the runs: mean ± deviation over seeds, what a target costs, and each algorithm against
a baseline.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.errors import UserError
from kairosfl.report.checked import Array
from kairosfl.report.notes import notes
from kairosfl.report.pictures import letter
from kairosfl.report.read import Group, RunData
from kairosfl.report.student import alike, holm, interval, paired_t
from kairosfl.runs.history import ending
from kairosfl.runs.score import Score

PLAIN = "fedavg"  # plain averaging
DAGGER = "†"  # after a value that is scored otherwise than the others


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
        known = [
            value for value in given if abs(value) < 1e150
        ]  # the deviation of larger values overflows
        mean = statistics.fmean(known) if known else math.nan
        deviation = statistics.stdev(known) if len(known) > 1 else math.nan
        return cls(mean, deviation, len(known), len(given))

    def of_score(self, score: Score) -> str:
        """A value of this metric as shown in a table."""
        size = max(abs(self.mean), self.deviation if self.count > 1 else 0.0)
        return self.text(score.digits(size), score.scale)

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """As shown in a table: a dash for none, a deviation if values differ, a count if it is not
        all of them.
        """
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
    finished: int  # runs
    diverged: int  # of the finished runs; the numbers are about the others, if there are any
    baseline: bool  # whether the others on its data are compared with it
    rounds: Spread
    planned: int
    final: Spread  # the last evaluated round
    last_tenth: Spread  # the mean of the final 10 % of the evaluated rounds, or of their `ending`
    best: Spread
    worst_clients: Spread  # the tenth that the last model serves worst
    rounds_to_target: Spread
    bytes_to_target: Spread
    bytes: Spread
    epochs: Spread
    cohort: Spread
    elud: Spread
    seconds: Spread
    notes: tuple[str, ...]  # what qualifies its numbers
    # `last_tenth` is after the last round: models are averaged only since one of the tenth
    dagger: bool = False

    @property
    def when(self) -> str:
        """Of what `last_tenth` is."""
        return "after its last round" if self.dagger else "in the final 10 % of its rounds"

    @property
    def compared(self) -> bool:
        """Whether it has a result that others can be compared with."""
        return self.finished > self.diverged and self.last_tenth.count > 0


@dataclass(frozen=True)
class Pair:
    """An algorithm against the baseline, or the best against the second best, on the seeds that
    both have finished.

    It is about the main metric over the final 10 % of rounds: how much better the second is, which
    is second minus first, or first minus second if lower is better.
    """

    first: str  # the baseline, or the second best
    second: str
    score: Score
    seeds: tuple[int, ...]
    difference: Spread
    # the 95 % interval of the mean difference; NaN where the seeds say nothing about chance
    low: float
    high: float
    p: float  # of the paired t-test; likewise
    adjusted: float  # Holm's correction for all comparisons on these data that could be tested
    comparisons: int  # how many these are
    runner_up: bool = False  # the best against the second best, neither of which is the baseline

    @property
    def alike(self) -> bool:
        """Whether all of a few seeds differ by the same amount, which says nothing about chance."""
        return len(self.seeds) > 1 and math.isnan(self.p)


def results(groups: Sequence[Group], target: float, baseline: str | None = None) -> list[Row]:
    """The table of results, with what it took to reach the target."""
    chosen = baselines(groups, baseline).values()
    return [_row(group, target, number in chosen) for number, group in enumerate(groups)]


def _row(group: Group, target: float, baseline: bool) -> Row:
    seeds = tuple(dict.fromkeys(run.seed for run in group.runs))

    def over(value: Callable[[RunData], float]) -> Spread:
        """Over the seeds: runs with the same seed count as one."""
        return Spread.of(
            _mean(np.array([value(run) for run in group.shown if run.seed == seed]))
            for seed in seeds
        )

    return Row(
        label=group.label,
        problem=group.problem,
        score=group.score,
        seeds=seeds,
        going=sum(not run.done and not run.stopped for run in group.runs),
        finished=len(group.finished),
        diverged=len(group.finished) - len(group.compared),
        baseline=baseline,
        rounds=over(lambda run: run.last),
        planned=max(run.planned for run in group.runs),
        final=over(lambda run: _last(scored(run)[1])),
        last_tenth=over(last_tenth),
        best=over(_best),
        worst_clients=over(
            lambda run: _last(run.column(f"client_{run.score.name}_worst")[run.evaluated])
        ),
        rounds_to_target=over(lambda run: reach(run, run.column("round"), target)),
        bytes_to_target=over(lambda run: reach(run, run.total("bytes_down", "bytes_up"), target)),
        bytes=over(lambda run: _last(run.total("bytes_down", "bytes_up"))),
        epochs=over(lambda run: _last(run.total("epochs_total"))),
        cohort=over(lambda run: _mean(run.column("cohort"))),
        elud=over(lambda run: _mean(run.column("elud"))),
        seconds=over(lambda run: _last(run.total("seconds"))),
        notes=notes(group),
        dagger=any(run.after_last for run in group.shown),
    )


def scored(run: RunData) -> tuple[NDArray[np.intp], Array]:
    """Indices of the rounds that were evaluated, and the main metric in them; infinitely bad if it
    was not finite.
    """
    values = run.column(run.score.name)[run.evaluated]
    return run.evaluated, np.where(np.isfinite(values), values, -run.score.sign * math.inf)


def last_tenth(run: RunData) -> float:
    """Mean of the main metric over the final 10 % of the evaluated rounds, or over their `ending`."""
    values = ending(scored(run)[1], run.averaged)
    return float(values.mean()) if len(values) else math.nan


def reach(run: RunData, cost: Array, target: float) -> float:
    """The cost when the main metric first reached the target; NaN if it never did."""
    there = np.flatnonzero(run.score.reached(run.column(run.score.name), target))
    return float(cost[there[0]]) if len(there) else math.nan


def chosen_target(
    groups: Sequence[Group], target: float | None, baseline: str | None = None
) -> float:
    """The requested target, checked, or the default one."""
    if target is None:
        return default_target(groups, baseline)
    groups[0].score.check(target)
    return target


def default_target(groups: Sequence[Group], baseline: str | None = None) -> float:
    """What the baseline reaches in the end, as a short number; on several data, the worst of these;
    NaN if unknown.
    """
    score = groups[0].score
    values = [
        _mean(np.array(list(_by_seed(groups[i]).values())))
        for i in baselines(groups, baseline).values()
    ]
    known = [score.sign * value for value in values if math.isfinite(value)]
    return score.rounded(score.sign * min(known)) if known else math.nan


def baselines(groups: Sequence[Group], name: str | None = None) -> dict[str, int]:
    """The group on each problem that others are compared with: the named one, else plain averaging,
    else the first.

    Of several, such as plain averaging with different learning rates, it is the best one.
    """
    if name is not None and not any(_is_called(name, i, group) for i, group in enumerate(groups)):
        labels = ", ".join(group.label for group in groups[:8]) + (" …" if len(groups) > 8 else "")
        raise UserError(
            f"baseline = {name!r} is none of the groups; use a letter or one of these: {labels}."
        )
    found = {}
    for problem, mine in by_problem(groups).items():
        plain = [i for i in mine if groups[i].runs[0].algorithm.strip().lower() == PLAIN] or mine[
            :1
        ]
        wanted = plain if name is None else [i for i in mine if _is_called(name, i, groups[i])]
        if wanted:
            found[problem] = max(wanted, key=lambda i: _final(groups[i]))  # the first of equals
    return found


def _is_called(name: str, number: int, group: Group) -> bool:
    return name in (group.label, group.runs[0].algorithm) or name.upper() == letter(number)


def _final(group: Group) -> float:
    """The final 10 %, higher is better; infinitely bad if it cannot be compared."""
    values = list(_by_seed(group).values())
    return group.score.sign * statistics.fmean(values) if values else -math.inf


def paired_tests(groups: Sequence[Group], baseline: str | None = None) -> list[Pair]:
    """Every algorithm against the baseline on the same data, and the best against the second best.

    p is corrected for the number of these comparisons.
    """
    chosen, problems = baselines(groups, baseline), by_problem(groups)
    return [pair for problem, i in chosen.items() for pair in against(groups, i, problems[problem])]


def against(groups: Sequence[Group], baseline: int, mine: Iterable[int]) -> list[Pair]:
    """These groups against this one; also the best of them against the second best, if it is
    neither of the two.
    """
    members = list(mine)
    made = [pair for i in members if i != baseline and (pair := _pair(groups[baseline], groups[i]))]
    best = sorted((i for i in members if groups[i].compared), key=lambda i: -_final(groups[i]))[:2]
    if (
        len(best) == 2
        and baseline not in best
        and (last := _pair(groups[best[1]], groups[best[0]]))
    ):
        made.append(replace(last, runner_up=True))
    count = sum(math.isfinite(pair.p) for pair in made)
    corrected = zip(made, holm([pair.p for pair in made]), strict=True)
    return [replace(pair, adjusted=p, comparisons=count) for pair, p in corrected]


def by_problem(rows: Sequence[Group | Row]) -> dict[str, list[int]]:
    """Which groups or rows are about the same data."""
    found: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        found.setdefault(row.problem, []).append(i)
    return found


def _pair(first: Group, second: Group) -> Pair | None:
    ours, theirs = _by_seed(second), _by_seed(first)
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    if not seeds:
        return None
    differences = [first.score.sign * (ours[seed] - theirs[seed]) for seed in seeds]
    apart = Spread.of(differences)
    low, high = interval(apart.mean, apart.deviation, apart.count)
    if alike(differences):
        low = high = math.nan
    p = paired_t(differences)
    return Pair(first.label, second.label, first.score, seeds, apart, low, high, p, math.nan, 0)


def _by_seed(group: Group) -> dict[int, float]:
    found: dict[int, list[float]] = {}
    for run in group.compared:
        found.setdefault(run.seed, []).append(last_tenth(run))
    means = {seed: statistics.fmean(values) for seed, values in found.items()}
    return {seed: value for seed, value in means.items() if math.isfinite(value)}


def fixed(value: float, digits: int) -> str:
    """A number with this many decimals; halves are rounded away from zero, as in the page's
    scripts.
    """
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
    mark = DAGGER if row.dagger and row.last_tenth.count else ""
    return {
        "algorithm": row.label,
        "seeds": str(len(row.seeds)),
        "rounds": rounds if row.rounds.mean >= row.planned else f"{rounds} of {row.planned}",
        "final 10 %": "diverged" if lost else row.last_tenth.of_score(row.score) + mark,
        "final": row.final.of_score(row.score),
        "best": row.best.of_score(row.score),
        "worst clients": row.worst_clients.of_score(row.score),
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
        f"{'second − first' if pair.score.higher else 'first − second'}{points}": difference(pair),
        "95 % interval": bounds(pair),
        "p (Holm)": probability(pair.adjusted),
    }


def difference(pair: Pair) -> str:
    """How much better the second is."""
    gap = pair.score.scale * pair.difference.mean
    return signed(gap, pair.score.digits(gap))


def bounds(pair: Pair) -> str:
    """The interval of the difference; a dash if there is none."""
    ends = [pair.score.scale * end for end in (pair.low, pair.high)]
    digits = pair.score.digits(max(map(abs, ends)))
    return "–" if math.isnan(pair.low) else " to ".join(signed(end, digits) for end in ends)


def results_table(
    rows: Sequence[Row], target: float, without: Sequence[str] = ()
) -> list[dict[str, str]]:
    """The table of results as text, one dictionary per row, with metric and target named in its
    columns.
    """
    score = rows[0].score
    goal = "target" if math.isnan(target) else score.shown(target)
    heads = {
        name: f"{score.stated} {name}".lstrip()
        for name in ("final 10 %", "final", "best", "worst clients")
    }
    shown = (
        {name: value for name, value in cells(row).items() if name not in without} for row in rows
    )
    return [
        {heads.get(name, name.replace("target", goal)): value for name, value in row.items()}
        for row in shown
    ]


def columns(row: Row | Pair) -> dict[str, Any]:
    """A row or test as numbers by column: mean, deviation and count of each value, lists as their
    length.
    """
    flat: dict[str, Any] = {}
    for name, value in vars(row).items():
        if isinstance(value, Spread):
            flat |= {
                name: value.mean,
                f"{name}_deviation": value.deviation,
                f"{name}_count": value.count,
            }
        elif isinstance(value, Score):
            flat["metric"] = value.name
        else:
            flat[name] = (
                "; ".join(value)
                if name == "notes"
                else len(value)
                if isinstance(value, tuple)
                else value
            )
    return flat


def _best(run: RunData) -> float:
    values, sign = scored(run)[1], run.score.sign
    return float(sign * (sign * values).max()) if len(values) else math.nan


def _last(values: Array) -> float:
    return float(values[-1]) if len(values) else math.nan


def _mean(values: Array) -> float:
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else math.nan
