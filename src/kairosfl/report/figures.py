"""The plots of a report: curves of all groups, heat maps of each, and what is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice, pairwise

import numpy as np

from kairosfl.errors import UserError, nearest
from kairosfl.report.checked import Array
from kairosfl.report.grids import inside
from kairosfl.report.notes import measured_on
from kairosfl.report.pictures import SECTIONS, LeftOut, Lines, Picture, Series
from kairosfl.report.read import Group, RunData, all_runs
from kairosfl.runs.score import Score


@dataclass(frozen=True)
class _Curve:
    key: str
    section: str
    title: str
    y_label: str
    why: str  # it may be missing
    columns: tuple[str, ...]  # the first drawn solid, others dashed
    names: tuple[str, ...] = ("",)
    note: str = ""
    percent: bool = False
    plain: bool = False  # one value throughout is a sentence, not a picture
    x_label: str = "round"
    cost: Callable[[RunData], Array] | None = None  # drawn against this instead of the round
    asked: Callable[[RunData], bool] = lambda run: True  # whether the run was to write it


MOST_RECORDED = 24  # curves of what rules recorded
_UNSCORED = "no round was evaluated"
_UNASKED = "it was not requested; set run.client_accuracy = true"
_AT_THE_END = (
    "it was measured after the last round alone; set run.client_accuracy = true for every "
    "evaluated round"
)
_LOSS = Score("loss", higher=False)
_TRAIN_LOSS = _Curve(
    "train-loss",
    "learning",
    "Training loss",
    "loss",
    "metrics.jsonl holds none",
    ("train_loss",),
    note="Of the cohort, while it trained.",
)


def _has_fedaware(run: RunData) -> bool:
    return "fedaware" in run.algorithm.lower()


_CURVES = (
    _Curve(
        "fgn",
        "signals",
        "Federated gradient norm",
        "FGN",
        "the FGN detector did not run; add fgn to run.detector",
        ("fgn",),
        asked=lambda run: "fgn" in str(run.settings.get("run.detector", "fgn")),
        note="Its rise or fall decides what counts as a critical period.",
    ),
    _Curve(
        "fedfim",
        "signals",
        "Fisher trace",
        "trace",
        "the FedFIM detector did not run; add fedfim to run.detector",
        ("fedfim",),
        asked=lambda run: "fedfim" in str(run.settings.get("run.detector")),
    ),
    _Curve(
        "elud",
        "signals",
        "Local update diversity (e-LUD)",
        "e-LUD",
        "metrics.jsonl holds none",
        ("elud",),
        note="1: all clients move in the same direction; higher: more diverse.",
    ),
    _Curve(
        "coherence",
        "signals",
        "Client coherence",
        "coherence",
        "metrics.jsonl holds none",
        ("coherence",),
    ),
    _Curve(
        "lud",
        "signals",
        "Diversity under FedAWARE's weights (LUD)",
        "LUD",
        "only FedAWARE records it",
        ("lud",),
        asked=_has_fedaware,
        note="Of every client's moving average, weighted by λ; 1: all point in the same direction.",
    ),
    _Curve(
        "chi-square",
        "signals",
        "FedAWARE's weights against uniform ones (χ²)",
        "χ²",
        "only FedAWARE records it",
        ("chi_square",),
        asked=_has_fedaware,
        note="0: λ is uniform; K − 1: one of K clients has all of the weight.",
    ),
    _Curve(
        "cohort",
        "decisions",
        "Cohort size",
        "clients",
        "metrics.jsonl holds none",
        ("cohort",),
        plain=True,
    ),
    _Curve(
        "epochs",
        "decisions",
        "Epochs per client",
        "epochs",
        "metrics.jsonl holds none",
        ("epochs",),
        note="Mean over the cohort.",
        plain=True,
    ),
    _Curve(
        "lr",
        "decisions",
        "Learning rate",
        "learning rate",
        "metrics.jsonl holds none",
        ("lr",),
        plain=True,
    ),
    _Curve(
        "rejected",
        "decisions",
        "Reports rejected",
        "clients",
        "metrics.jsonl does not record it",
        ("rejected",),
        plain=True,
    ),
)


def _measured(score: Score, section: str) -> _Curve:
    """A metric over the rounds."""
    return _Curve(
        score.name,
        section,
        f"Test {score.words}",
        score.words,
        _UNSCORED,
        (score.name,),
        percent=score.percent,
    )


def _against(curve: _Curve, cost: str) -> _Curve:
    """The same curve drawn against what it cost."""
    x_label, spent = _COSTS[cost]
    why = f"metrics.jsonl holds no evaluated round with its {cost}"
    return replace(curve, key=f"{curve.key}-{cost}", why=why, x_label=x_label, cost=spent)


def _megabytes(run: RunData) -> Array:
    return run.total("bytes_down", "bytes_up") / 1e6


def _epochs(run: RunData) -> Array:
    return run.total("epochs_total")


# What a curve can be drawn against instead of the round: the label of its axis, and the cost.
_COSTS: dict[str, tuple[str, Callable[[RunData], Array]]] = {
    "bytes": ("MB", _megabytes),
    "epochs": ("client epochs", _epochs),
}


def _main_curves(score: Score) -> tuple[_Curve, ...]:
    """The main metric: over the rounds, against what it cost, and of the clients."""
    over_rounds = _measured(score, "result")
    return (
        over_rounds,
        replace(
            _against(over_rounds, "bytes"),
            section="cost",
            title=f"{score.title} against communication",
            note="Bytes down and up together; seeds are compared at equal bytes.",
        ),
        replace(
            _against(over_rounds, "epochs"),
            section="cost",
            title=f"{score.title} against local epochs",
            note="Total epochs of all clients; seeds are compared at equal epochs.",
        ),
        replace(
            over_rounds,
            key=f"client-{score.name}",
            section="learning",
            title=f"{score.title} per client",
            why=_UNASKED,
            columns=(f"client_{score.name}_mean", f"client_{score.name}_worst"),
            asked=lambda run: bool(run.settings.get("run.client_accuracy")),
            names=("mean", "worst tenth"),
            note=(
                f"Solid: mean over clients; dashed: the tenth with the {score.worst} {score.words}."
            ),
        ),
    )


# --- all plots ------------------------------------------------------------------------------------


def figures(groups: Sequence[Group]) -> tuple[list[Picture], list[LeftOut]]:
    """All plots of these groups in the order of the page, and those that are left out."""
    plots: list[Picture | LeftOut] = [_lines(curve, groups) for curve in _all_curves(groups)]
    worst_class = _worst_class(groups)
    if worst_class is not None:
        plots.append(worst_class)
    plots.append(_every_client(groups))
    plots = [_with_samples(plot, groups) for plot in plots]
    for number, group in enumerate(groups):
        plots += inside(number, group)

    order = list(SECTIONS)
    plots.sort(key=lambda plot: order.index(plot.section))
    pictures: list[Picture] = []
    left_out: list[LeftOut] = []
    for plot in plots:
        if isinstance(plot, LeftOut):
            left_out.append(plot)
        else:
            pictures.append(plot)
    return pictures, left_out


def chart(groups: Sequence[Group], key: str, against: str = "round") -> Lines:
    """One plot for a paper.

    Args:
        groups: The groups to draw.
        key: The curve; if empty, the main metric.
        against: What it is drawn against: the round, the bytes or the epochs.
    """
    curves = {curve.key: curve for curve in _all_curves(groups) if curve.cost is None}
    if not key:
        key = groups[0].score.name
    if key not in curves:
        key = key.replace("_", "-")
    if key not in curves:
        raise UserError(f"{key!r} is not a curve; {nearest(key, curves)}")
    curve = curves[key]
    plot = _lines(curve if against == "round" else _against(curve, against), groups)
    if isinstance(plot, LeftOut):
        raise UserError(f"{curve.title} cannot be drawn: {plot.why}.")
    return replace(plot, y_label=plot.title)


def smoothed(picture: Lines, points: int) -> Lines:
    """Every seed's curve as the mean of this many neighbouring points.

    What the server decided stays as it is.
    """
    if points == 1 or picture.steps:
        return picture
    smooth = []
    for series in picture.series:
        seeds = np.array([_mean_of_neighbours(seed, points) for seed in series.seeds])
        smooth.append(_series(series.group, series.x, seeds, series.name, series.dashed, series.of))
    return replace(picture, series=tuple(smooth))


def _mean_of_neighbours(values: Array, points: int) -> Array:
    finite = np.isfinite(values)
    window = np.ones(min(points, len(values)))
    total = np.convolve(np.where(finite, values, 0.0), window, "same")
    count = np.convolve(finite.astype(float), window, "same")
    return np.where(finite, total / np.maximum(count, 1), np.nan)


def _all_curves(groups: Sequence[Group]) -> list[_Curve]:
    """What may be drawn of these groups, in the order of the page."""
    main = groups[0].score
    *curves, of_clients = _main_curves(main)
    further: dict[Score, None] = {}
    for run in all_runs(groups):
        further |= dict.fromkeys((_LOSS, *run.scores))
    curves += [_measured(score, "learning") for score in further if score.name != main.name]
    return [*curves, _TRAIN_LOSS, of_clients, *_CURVES, *_recorded(groups)]


def _recorded(groups: Sequence[Group]) -> list[_Curve]:
    """What rules recorded, unless it is drawn anyway."""
    drawn: set[str] = set()
    for curve in _CURVES:
        drawn.update(curve.columns)
    names: dict[str, None] = {}
    for run in all_runs(groups):
        names |= dict.fromkeys(run.recorded)
    others = (name for name in names if name not in drawn)
    return list(map(_recorded_curve, islice(others, MOST_RECORDED)))


def _recorded_curve(name: str) -> _Curve:
    words = name.replace("_", " ")
    return _Curve(
        name.replace("_", "-"),
        "signals",
        words[:1].upper() + words[1:],
        words,
        "metrics.jsonl holds no number",
        (name,),
        note="Recorded by a rule.",
    )


def _with_samples(picture: Picture | LeftOut, groups: Sequence[Group]) -> Picture | LeftOut:
    """The main metric of clients, with the samples it was measured on in the title."""
    if not isinstance(picture, Lines) or not picture.key.startswith("client-"):
        return picture
    samples = measured_on(all_runs(groups))
    if not samples:
        return picture
    return replace(picture, title=f"{picture.title}, on {samples}")


# --- one plot -------------------------------------------------------------------------------------


def _lines(curve: _Curve, groups: Sequence[Group]) -> Lines | LeftOut:
    """A curve of every group, or why there is none."""
    series = []
    for number, group in enumerate(groups):
        series += _series_of(curve, number, group)
    if not series:
        return LeftOut(curve.section, curve.title, _missing(curve, groups))
    if curve.why == _UNASKED and all(_once(run, curve.columns[0]) for run in all_runs(groups)):
        return LeftOut(curve.section, curve.title, _AT_THE_END)

    values = np.concatenate([one.seeds.ravel() for one in series])
    values = values[np.isfinite(values)]
    if curve.plain and (values == values[0]).all():
        why = f"{values[0]:g} in every round of every run"
        return LeftOut(curve.section, curve.title, why)
    return Lines(
        curve.key,
        curve.section,
        curve.title,
        curve.note,
        curve.x_label,
        curve.y_label,
        tuple(series),
        curve.percent,
        steps=curve.section == "decisions",
    )


def _series_of(curve: _Curve, number: int, group: Group) -> list[Series]:
    """The columns of a curve that a group has values of."""
    series = []
    for column, name in zip(curve.columns, curve.names, strict=True):
        if curve.cost is None:
            x, seeds = _over_rounds(group, column)
            of = _steady(group)
        else:
            x, seeds = _over_cost(group, column, curve.cost)
            of = None
        one = _series(number, x, seeds, name, column != curve.columns[0], of)
        if len(one.x):
            series.append(one)
    return series


def _once(run: RunData, column: str) -> bool:
    """Whether this was measured in one evaluated round of several, at most."""
    return int(np.isfinite(run.column(column)).sum()) <= 1 < len(run.evaluated)


def _missing(curve: _Curve, groups: Sequence[Group]) -> str:
    """Why there is nothing to draw: a failed training comes before a missing setting."""
    runs = all_runs(groups)
    if not any(map(curve.asked, runs)):
        return curve.why
    if curve.section in ("signals", "learning") and not any(map(_has_reports, runs)):
        return "no round had a good report"
    if curve.why == _UNSCORED and any(len(run.evaluated) for run in runs):
        return "training diverged: it was never finite"
    return curve.why


def _has_reports(run: RunData) -> bool:
    return bool((run.column("reported") > 0).any())


def _worst_class(groups: Sequence[Group]) -> Lines | None:
    """The accuracy of the worst class in each round, of the runs that recorded it."""
    series = []
    for number, group in enumerate(groups):
        lowest = [_lowest(run) for run in group.runs]
        rounds = np.array(sorted(set().union(*lowest)), dtype=np.float64)
        if not len(rounds):
            continue
        values = np.full((len(lowest), len(rounds)), np.nan)
        for i, by_round in enumerate(lowest):
            values[i, np.searchsorted(rounds, list(by_round))] = list(by_round.values())
        one = _series(number, rounds, values, "", False, _steady(group))
        if len(one.x):
            series.append(one)
    if not series:
        return None
    return Lines(
        "worst-class",
        "learning",
        "Accuracy of the worst class",
        "The class of which the smallest share of test samples is recognised; it may be another "
        "one in each round.",
        "round",
        "accuracy",
        tuple(series),
        percent=True,
    )


def _lowest(run: RunData) -> dict[int, float]:
    """The accuracy of the worst class by round."""
    lowest = {}
    for row in run.clients:
        shares = row.get("class_accuracy")
        if not shares or row["round"] > run.last:
            continue
        existing = [share for share in shares if share is not None]
        if existing:
            lowest[row["round"]] = float(min(existing))
    return lowest


def _every_client(groups: Sequence[Group]) -> Lines | LeftOut:
    """The main metric of every client with the last evaluated model, from lowest to highest."""
    score = groups[0].score
    title = f"Final {score.words} of every client"
    series = []
    for number, group in enumerate(groups):
        quantiles = []
        for run in group.runs:
            quantiles += _last_quantiles(run, score)
        if quantiles:
            at = np.linspace(0, 100, max(map(len, quantiles)))
            seeds = [np.interp(at, np.linspace(0, 100, len(one)), one) for one in quantiles]
            series.append(_series(number, at, np.array(seeds), "", False))
    if not series:
        return LeftOut("learning", title, _UNASKED)
    return Lines(
        "client-quantiles",
        "learning",
        title,
        f"Clients from the lowest to the highest {score.words}; the flatter, the fairer.",
        "% of the clients",
        score.words,
        tuple(series),
        score.percent,
    )


def _last_quantiles(run: RunData, score: Score) -> list[Array]:
    """The last quantiles that a run recorded, or nothing."""
    for row in reversed(run.clients):
        if score.quantiles in row:
            values = row[score.quantiles]
            return [] if values is None else [np.array(values, dtype=np.float64)]
    return []


# --- several seeds --------------------------------------------------------------------------------


def _rounds(group: Group) -> Array:
    """The rounds that any run of a group has."""
    return np.unique(np.concatenate([run.column("round") for run in group.runs]))


def _over_rounds(group: Group, column: str) -> tuple[Array, Array]:
    """Rounds that any seed has, and each seed's values at them `[seeds, rounds]`."""
    rounds = _rounds(group)
    values = np.full((len(group.runs), len(rounds)), np.nan)
    for i, run in enumerate(group.runs):
        values[i, np.searchsorted(rounds, run.column("round"))] = run.column(column)
    return rounds, values


def _over_cost(group: Group, column: str, cost: Callable[[RunData], Array]) -> tuple[Array, Array]:
    """The seeds at equal cost, as far as all of them got.

    They are interpolated at the costs of the one that spent least.
    """
    # A run that does not know all of its cost would cut the others short.
    runs = [run for run in group.shown if np.isfinite(cost(run)[-1])]
    if not runs:
        runs = list(group.shown)
    costs: list[Array] = []
    values: list[Array] = []
    for run in runs:
        spent = cost(run)
        measured = run.column(column)
        usable = np.isfinite(measured) & (spent > 0)
        costs.append(spent[usable])
        values.append(measured[usable])

    begun = [x for x in costs if len(x)]
    if not begun:
        return np.empty(0), np.empty((len(runs), 0))
    at = min(begun, key=lambda x: x[-1])
    at = at[at >= max(x[0] for x in begun)]
    seeds = np.full((len(runs), len(at)), np.nan)
    for i, (x, y) in enumerate(zip(costs, values, strict=True)):
        if len(x):
            seeds[i] = np.interp(at, x, y, left=np.nan, right=np.nan)
    return at, seeds


def _steady(group: Group) -> list[bool] | None:
    """Which runs have not diverged; None where that is all of them, or none.

    A mean that a run leaves where it diverges would jump.
    """
    steady = [run.diverged is None for run in group.runs]
    return steady if any(steady) and not all(steady) else None


def _series(
    number: int,
    x: Array,
    every_seed: Array,
    name: str,
    dashed: bool,
    of: Sequence[bool] | None = None,
) -> Series:
    """Mean and deviation over the seeds, or `of` some of them, wherever any of these has a value."""
    seeds = every_seed
    if of is not None:
        seeds = every_seed[np.array(of)]
    has_any = np.isfinite(seeds).any(axis=0)
    x = x[has_any]
    every_seed = every_seed[:, has_any]
    seeds = seeds[:, has_any]

    finite = np.isfinite(seeds)
    count = finite.sum(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):  # a loss may have exploded
        mean = np.where(finite, seeds, 0).sum(axis=0) / count
        squares = np.where(finite, (seeds - mean) ** 2, 0).sum(axis=0)
    deviation = np.sqrt(squares / np.maximum(count - 1, 1))

    # Seeds that agree have none, although their mean may be rounded.
    highest = np.nanmax(seeds, axis=0, initial=-np.inf)
    lowest = np.nanmin(seeds, axis=0, initial=np.inf)
    deviation[highest == lowest] = 0.0
    deviation[count < 2] = np.nan
    return Series(number, x, mean, deviation, count, every_seed, name, dashed, of)


# --- critical periods -----------------------------------------------------------------------------


def critical_periods(group: Group) -> list[tuple[float, float, float]]:
    """Stretches of rounds in which runs were in a critical period.

    Each is its left edge, its right edge, and the share of the seeds.
    """
    rounds = _rounds(group)
    critical = np.zeros(len(rounds))
    runs = np.zeros(len(rounds))
    for run in group.runs:
        place = np.searchsorted(rounds, run.column("round"))
        critical[place] += np.nan_to_num(run.column("critical"))
        runs[place] += 1
    share = np.concatenate([[0.0], critical / runs, [0.0]])

    edges = np.concatenate([rounds[:1] - 0.5, rounds + 0.5])
    stretches = []
    for left, right in pairwise(np.flatnonzero(np.diff(share))):
        if share[left + 1] > 0:
            stretches.append((float(edges[left]), float(edges[right]), float(share[left + 1])))
    return stretches


def followed_periods(group: Group) -> list[tuple[float, float, float]]:
    """Those that a rule acted on, or of a detector that was asked for; others would be noise."""
    return critical_periods(group) if group.follows_detector else []
