"""Results of the runs: mean ± deviation over seeds, costs of a target, and paired comparisons."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Context, Decimal
from functools import partial
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
_OF_METRIC = ("final 10 %", "final", "best", "worst clients")  # columns of the main metric


@dataclass(frozen=True)
class Spread:
    """Mean and sample deviation over the `count` runs (of `asked`) for which the value exists."""

    mean: float
    deviation: float
    count: int
    asked: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        numbers = [float(value) for value in values]
        # The deviation of larger ones would overflow.
        existing = [number for number in numbers if abs(number) < 1e150]
        mean = deviation = math.nan
        if existing:
            mean = statistics.fmean(existing)
        if len(existing) > 1:
            deviation = statistics.stdev(existing)
        return cls(mean, deviation, len(existing), len(numbers))

    def of_score(self, score: Score) -> str:
        """A value of this metric as shown in a table."""
        size = abs(self.mean)
        if self.count > 1:
            size = max(size, self.deviation)
        return self.text(score.digits(size), score.scale)

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        """As shown in a table: a dash for none, with a deviation if values differ.

        A value that not all runs have says how many have it.
        """
        if not self.count:
            return "–"
        text = fixed(self.mean * scale, digits)
        if self.deviation > 0:
            text += f" ± {fixed(self.deviation * scale, digits)}"
        if self.count < self.asked:
            text += f" ({self.count} of {self.asked})"
        return text


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
    passes: Spread  # how often clients ran the model over a sample, measurements included
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
    """Two algorithms on the seeds that both have finished.

    These are the baseline and another one, or the two best. It is about the main metric over the
    final 10 % of rounds: how much better the second is, which is second minus first, or first minus
    second if lower is better.
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
    over = partial(_over_seeds, group)
    return Row(
        label=group.label,
        problem=group.problem,
        score=group.score,
        seeds=_seeds(group),
        going=sum(not run.done and not run.stopped for run in group.runs),
        finished=len(group.finished),
        diverged=len(group.finished) - len(group.compared),
        baseline=baseline,
        rounds=over(lambda run: run.last),
        planned=max(run.planned for run in group.runs),
        final=over(lambda run: _last(scored(run)[1])),
        last_tenth=over(last_tenth),
        best=over(_best),
        worst_clients=over(_worst_clients),
        rounds_to_target=over(lambda run: reach(run, run.column("round"), target)),
        bytes_to_target=over(lambda run: reach(run, _bytes(run), target)),
        bytes=over(lambda run: _last(_bytes(run))),
        epochs=over(lambda run: _last(run.total("epochs_total"))),
        passes=over(lambda run: _last(run.total("passes"))),
        cohort=over(lambda run: _mean(run.column("cohort"))),
        elud=over(lambda run: _mean(run.column("elud"))),
        seconds=over(lambda run: _last(run.total("seconds"))),
        notes=notes(group),
        dagger=any(run.after_last for run in group.shown),
    )


def _seeds(group: Group) -> tuple[int, ...]:
    return tuple(dict.fromkeys(run.seed for run in group.runs))


def _over_seeds(group: Group, measure: Callable[[RunData], float]) -> Spread:
    """A measure of the runs of a group; runs with the same seed count as one, by their mean."""
    by_seed: dict[int, list[float]] = {seed: [] for seed in _seeds(group)}
    for run in group.shown:
        by_seed[run.seed].append(measure(run))
    return Spread.of(_mean(np.array(values)) for values in by_seed.values())


def scored(run: RunData) -> tuple[NDArray[np.intp], Array]:
    """Indices of the evaluated rounds, and the main metric in them.

    It is infinitely bad where it was not finite.
    """
    values = run.column(run.score.name)[run.evaluated]
    return run.evaluated, np.where(np.isfinite(values), values, -run.score.sign * math.inf)


def last_tenth(run: RunData) -> float:
    """Mean of the main metric over the final 10 % of evaluated rounds, or over their `ending`."""
    values = ending(scored(run)[1], run.averaged)
    return float(values.mean()) if len(values) else math.nan


def reach(run: RunData, cost: Array, target: float) -> float:
    """The cost when the main metric first reached the target; NaN if it never did."""
    reached = np.flatnonzero(run.score.reached(run.column(run.score.name), target))
    return float(cost[reached[0]]) if len(reached) else math.nan


def chosen_target(
    groups: Sequence[Group], target: float | None, baseline: str | None = None
) -> float:
    """The requested target, checked, or the default one."""
    if target is None:
        return default_target(groups, baseline)
    groups[0].score.check(target)
    return target


def default_target(groups: Sequence[Group], baseline: str | None = None) -> float:
    """What the baseline reaches in the end, as a short number; NaN if unknown.

    Of several baselines, each on data of its own, it is the worst one's.
    """
    score = groups[0].score
    finals = []
    for number in baselines(groups, baseline).values():
        final = _mean(np.array(list(_by_seed(groups[number]).values())))
        if math.isfinite(final):
            finals.append(score.sign * final)
    if not finals:
        return math.nan
    return score.rounded(score.sign * min(finals))


def baselines(groups: Sequence[Group], name: str | None = None) -> dict[str, int]:
    """The group on each problem that others are compared with.

    It is the named one, else plain averaging, else the first. Of several, such as plain averaging
    with different learning rates, it is the best one.
    """
    if name is None:
        candidates = {i for i, group in enumerate(groups) if _is_plain(group)}
    else:
        candidates = {i for i, group in enumerate(groups) if _is_called(name, i, group)}
        if not candidates:
            labels = ", ".join(group.label for group in groups[:8])
            more = " …" if len(groups) > 8 else ""
            raise UserError(
                f"baseline = {name!r} is none of the groups; use a letter or one of these: "
                f"{labels}{more}."
            )
    chosen = {}
    for problem, members in by_problem(groups).items():
        here = [i for i in members if i in candidates]
        if not here and name is None:
            here = members[:1]
        if here:
            chosen[problem] = max(here, key=lambda i: _final(groups[i]))  # the first of equals
    return chosen


def _is_plain(group: Group) -> bool:
    return group.runs[0].algorithm.strip().lower() == PLAIN


def _is_called(name: str, number: int, group: Group) -> bool:
    return name in (group.label, group.runs[0].algorithm) or name.upper() == letter(number)


def _final(group: Group) -> float:
    """The final 10 %, higher is better; infinitely bad if it cannot be compared."""
    values = list(_by_seed(group).values())
    if not values:
        return -math.inf
    return group.score.sign * statistics.fmean(values)


def paired_tests(groups: Sequence[Group], baseline: str | None = None) -> list[Pair]:
    """Every algorithm against the baseline on the same data, and the best against the second best.

    p is corrected for the number of these comparisons.
    """
    problems = by_problem(groups)
    pairs = []
    for problem, number in baselines(groups, baseline).items():
        pairs += against(groups, number, problems[problem])
    return pairs


def against(groups: Sequence[Group], baseline: int, members: Sequence[int]) -> list[Pair]:
    """These members of the groups against the baseline, which is one of them.

    Also the best against the second best, if the baseline is neither of the two.
    """
    pairs = []
    for number in members:
        pair = _pair(groups[baseline], groups[number])
        if pair is not None and number != baseline:
            pairs.append(pair)
    best = _best_pair(groups, members, baseline)
    if best is not None:
        pairs.append(replace(best, runner_up=True))

    adjusted = holm([pair.p for pair in pairs])
    tested = sum(math.isfinite(pair.p) for pair in pairs)
    corrected = zip(pairs, adjusted, strict=True)
    return [replace(pair, adjusted=p, comparisons=tested) for pair, p in corrected]


def _best_pair(groups: Sequence[Group], members: Sequence[int], baseline: int) -> Pair | None:
    """The second best and the best of the members, unless the baseline is one of them."""
    comparable = [i for i in members if groups[i].compared]
    best = sorted(comparable, key=lambda i: -_final(groups[i]))[:2]
    if len(best) < 2 or baseline in best:
        return None
    return _pair(groups[best[1]], groups[best[0]])


def by_problem(rows: Sequence[Group | Row]) -> dict[str, list[int]]:
    """Which groups or rows are about the same data."""
    members: dict[str, list[int]] = {}
    for i, row in enumerate(rows):
        members.setdefault(row.problem, []).append(i)
    return members


def _pair(first: Group, second: Group) -> Pair | None:
    """Two groups on their common seeds, if there are any."""
    scores_of_first = _by_seed(first)
    scores_of_second = _by_seed(second)
    seeds = tuple(sorted(scores_of_first.keys() & scores_of_second.keys()))
    if not seeds:
        return None
    sign = first.score.sign
    differences = [sign * (scores_of_second[seed] - scores_of_first[seed]) for seed in seeds]
    spread = Spread.of(differences)
    low, high = interval(spread.mean, spread.deviation, spread.count)
    if alike(differences):
        low = high = math.nan
    return Pair(
        first=first.label,
        second=second.label,
        score=first.score,
        seeds=seeds,
        difference=spread,
        low=low,
        high=high,
        p=paired_t(differences),
        adjusted=math.nan,
        comparisons=0,
    )


def _by_seed(group: Group) -> dict[int, float]:
    """The final 10 % of the runs that can be compared; of several with one seed, their mean."""
    values: dict[int, list[float]] = {}
    for run in group.compared:
        values.setdefault(run.seed, []).append(last_tenth(run))
    means = {seed: statistics.fmean(finals) for seed, finals in values.items()}
    return {seed: mean for seed, mean in means.items() if math.isfinite(mean)}


# --- as text --------------------------------------------------------------------------------------


def fixed(value: float, digits: int) -> str:
    """A number with this many decimals; halves are rounded away from zero, as in page.js."""
    if abs(value) >= 1e9:  # it has exploded
        return f"{value:.{digits}e}"
    exact = Decimal(value).quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP, Context(prec=400))
    return f"{exact:f}"


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign, unless it is shown as zero."""
    size = fixed(abs(value), digits)
    if float(size) == 0:
        return size
    return f"−{size}" if value < 0 else f"+{size}"


def probability(p: float) -> str:
    """A p-value as papers print it."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def said(p: float) -> str:
    """A p-value in a sentence: `p = 0.016` or `p < 0.001`."""
    text = probability(p)
    return f"p {text}" if text.startswith("<") else f"p = {text}"


def cells(row: Row) -> dict[str, str]:
    """A row of results as text by column, the same in the page, on the terminal and in files."""
    rounds = fixed(row.rounds.mean, 0)
    if row.rounds.mean < row.planned:
        rounds += f" of {row.planned}"
    final = row.last_tenth.of_score(row.score)
    if row.diverged and not row.last_tenth.count:
        final = "diverged"
    elif row.dagger and row.last_tenth.count:
        final += DAGGER
    return {
        "algorithm": row.label,
        "seeds": str(len(row.seeds)),
        "rounds": rounds,
        "final 10 %": final,
        "final": row.final.of_score(row.score),
        "best": row.best.of_score(row.score),
        "worst clients": row.worst_clients.of_score(row.score),
        "rounds to target": row.rounds_to_target.text(0),
        "MB to target": megabytes(row.bytes_to_target),
        "MB": megabytes(row.bytes),
        "epochs": row.epochs.text(0),
        "passes": row.passes.text(0),
        "cohort": row.cohort.text(1),
        "e-LUD": row.elud.text(2),
        "seconds": row.seconds.text(1),
    }


def megabytes(spread: Spread) -> str:
    """Bytes in millions, with three decimals for very small models."""
    millions = replace(spread, mean=spread.mean / 1e6, deviation=spread.deviation / 1e6)
    return millions.text(1 if spread.mean >= 1e6 else 3)


def pair_cells(pair: Pair) -> dict[str, str]:
    """A paired test as text by column."""
    subtracted = "second − first" if pair.score.higher else "first − second"
    if pair.score.percent:
        subtracted += " (points)"
    return {
        "second": pair.second,
        "first": pair.first,
        "seeds": str(len(pair.seeds)),
        subtracted: difference(pair),
        "95 % interval": bounds(pair),
        "p (Holm)": probability(pair.adjusted),
    }


def difference(pair: Pair) -> str:
    """How much better the second is."""
    gap = pair.score.scale * pair.difference.mean
    return signed(gap, pair.score.digits(gap))


def bounds(pair: Pair) -> str:
    """The interval of the difference; a dash if there is none."""
    if math.isnan(pair.low):
        return "–"
    low = pair.score.scale * pair.low
    high = pair.score.scale * pair.high
    digits = pair.score.digits(max(abs(low), abs(high)))
    return f"{signed(low, digits)} to {signed(high, digits)}"


def results_table(
    rows: Sequence[Row], target: float, without: Collection[str] = ()
) -> list[dict[str, str]]:
    """The table of results as text, a dictionary per row; its heads name metric and target."""
    score = rows[0].score
    heads = {name: name for name in cells(rows[0]) if name not in without}
    if not math.isnan(target):
        heads = {name: head.replace("target", score.shown(target)) for name, head in heads.items()}
    for name in heads:
        if name in _OF_METRIC:
            heads[name] = f"{score.stated} {name}".lstrip()

    table = []
    for row in rows:
        texts = cells(row)
        table.append({head: texts[name] for name, head in heads.items()})
    return table


def columns(row: Row | Pair) -> dict[str, Any]:
    """A row or test as numbers by column: mean, deviation and count of each, lists by length."""
    numbers: dict[str, Any] = {}
    for name, value in vars(row).items():
        if isinstance(value, Spread):
            numbers[name] = value.mean
            numbers[f"{name}_deviation"] = value.deviation
            numbers[f"{name}_count"] = value.count
        elif isinstance(value, Score):
            numbers["metric"] = value.name
        elif name == "notes":
            numbers[name] = "; ".join(value)
        elif isinstance(value, tuple):
            numbers[name] = len(value)
        else:
            numbers[name] = value
    return numbers


# --- one number of a run --------------------------------------------------------------------------


def _best(run: RunData) -> float:
    values = scored(run)[1]
    if not len(values):
        return math.nan
    return float(values.max() if run.score.higher else values.min())


def _worst_clients(run: RunData) -> float:
    return _last(run.column(f"client_{run.score.name}_worst")[run.evaluated])


def _bytes(run: RunData) -> Array:
    return run.total("bytes_down", "bytes_up")


def _last(values: Array) -> float:
    return float(values[-1]) if len(values) else math.nan


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if len(finite) else math.nan
