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
from kairosfl.report.read import Group, RunData
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
_AT_THE_END = "it was measured after the last round alone; set run.client_accuracy = true for every evaluated round"
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
    """The same curve drawn against what it cost: bytes or epochs."""
    if cost == "bytes":
        x_label, spent = "MB", lambda run: run.total("bytes_down", "bytes_up") / 1e6
    else:
        x_label, spent = "client epochs", lambda run: run.total("epochs_total")
    why = f"metrics.jsonl holds no evaluated round with its {cost}"
    return replace(curve, key=f"{curve.key}-{cost}", why=why, x_label=x_label, cost=spent)


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
            note=f"Solid: mean over clients; dashed: the tenth with the {score.worst} {score.words}.",
        ),
    )


def figures(groups: Sequence[Group]) -> tuple[list[Picture], list[LeftOut]]:
    """All plots of these groups in the order of the page, and those that are left out."""
    drawn = [
        *(_lines(curve, groups) for curve in _all_curves(groups)),
        _worst_class(groups),
        _served(groups),
    ]
    made: list[Picture | LeftOut] = [each for each in drawn if each is not None]
    made = [_with_samples(each, groups) for each in made]
    for number, group in enumerate(groups):
        made += inside(number, group)
    order = list(SECTIONS)
    made.sort(key=lambda each: order.index(each.section))
    return [e for e in made if not isinstance(e, LeftOut)], [
        e for e in made if isinstance(e, LeftOut)
    ]


def chart(groups: Sequence[Group], key: str, against: str = "round") -> Lines:
    """One plot for a paper: a curve, by default the main metric, against the round, the bytes or
    the epochs.
    """
    curves = {curve.key: curve for curve in _all_curves(groups) if curve.cost is None}
    key = key or groups[0].score.name
    key = key if key in curves else key.replace("_", "-")
    if key not in curves:
        raise UserError(f"{key!r} is not a curve; {nearest(key, curves)}")
    curve = curves[key]
    made = _lines(curve if against == "round" else _against(curve, against), groups)
    if isinstance(made, LeftOut):
        raise UserError(f"{curve.title} cannot be drawn: {made.why}.")
    return replace(made, y_label=made.title)


def smoothed(picture: Lines, points: int) -> Lines:
    """Every seed's curve as the mean of this many neighbouring points, except for what the server
    decided.
    """
    if points == 1 or picture.steps:
        return picture
    series = []
    for each in picture.series:
        seeds = np.array([_mean_of_neighbours(seed, points) for seed in each.seeds])
        series.append(_series(each.group, each.x, seeds, each.name, each.dashed, each.of))
    return replace(picture, series=tuple(series))


def _mean_of_neighbours(values: Array, points: int) -> Array:
    known, window = np.isfinite(values), np.ones(min(points, len(values)))
    total = np.convolve(np.where(known, values, 0.0), window, "same")
    count = np.convolve(known.astype(float), window, "same")
    return np.where(known, total / np.maximum(count, 1), np.nan)


def _all_curves(groups: Sequence[Group]) -> list[_Curve]:
    """What may be drawn of these groups, in the order of the page."""
    main = groups[0].score
    *curves, of_clients = _main_curves(main)
    further = dict.fromkeys(
        score for group in groups for run in group.runs for score in (_LOSS, *run.scores)
    )
    curves += [_measured(score, "learning") for score in further if score.name != main.name]
    return [*curves, _TRAIN_LOSS, of_clients, *_CURVES, *_recorded(groups)]


def _recorded(groups: Sequence[Group]) -> list[_Curve]:
    """What rules recorded, unless it is drawn anyway."""
    drawn = {column for curve in _CURVES for column in curve.columns}
    names = dict.fromkeys(name for group in groups for run in group.runs for name in run.recorded)
    words = {name: name.replace("_", " ") for name in names if name not in drawn}
    return [
        _Curve(
            name.replace("_", "-"),
            "signals",
            each[:1].upper() + each[1:],
            each,
            "metrics.jsonl holds no number",
            (name,),
            note="Recorded by a rule.",
        )
        for name, each in islice(words.items(), MOST_RECORDED)
    ]


def _with_samples(picture: Picture | LeftOut, groups: Sequence[Group]) -> Picture | LeftOut:
    """The main metric of clients, with the samples it was measured on in the title."""
    samples = measured_on(run for group in groups for run in group.runs)
    if not (samples and isinstance(picture, Lines) and picture.key.startswith("client-")):
        return picture
    return replace(picture, title=f"{picture.title}, on {samples}")


def _lines(curve: _Curve, groups: Sequence[Group]) -> Lines | LeftOut:
    series = []
    for number, group in enumerate(groups):
        for i, (column, name) in enumerate(zip(curve.columns, curve.names, strict=True)):
            points = (
                _over_cost(group, column, curve.cost) if curve.cost else _over_rounds(group, column)
            )
            made = _series(number, *points, name, i > 0, None if curve.cost else _steady(group))
            if len(made.x):
                series.append(made)
    if not series:
        return LeftOut(curve.section, curve.title, _missing(curve, groups))
    if curve.why == _UNASKED and all(
        _once(run, curve.columns[0]) for group in groups for run in group.runs
    ):
        return LeftOut(curve.section, curve.title, _AT_THE_END)
    values = np.concatenate([each.seeds.ravel() for each in series])
    values = values[np.isfinite(values)]
    if curve.plain and (values == values[0]).all():
        return LeftOut(curve.section, curve.title, f"{values[0]:g} in every round of every run")
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


def _once(run: RunData, column: str) -> bool:
    """Whether this was measured in one evaluated round of several, at most."""
    return int(np.isfinite(run.column(column)).sum()) <= 1 < len(run.evaluated)


def _missing(curve: _Curve, groups: Sequence[Group]) -> str:
    """Why there is nothing to draw: a failed training comes before a missing setting."""
    runs = [run for group in groups for run in group.runs]
    if not any(map(curve.asked, runs)):
        return curve.why
    if curve.section in ("signals", "learning") and not any(
        (run.column("reported") > 0).any() for run in runs
    ):
        return "no round had a good report"
    evaluated = any(len(run.evaluated) for run in runs)
    return (
        "training diverged: it was never finite"
        if curve.why == _UNSCORED and evaluated
        else curve.why
    )


def _worst_class(groups: Sequence[Group]) -> Lines | None:
    """The accuracy of the class that is recognised worst in each round, of the runs that recorded
    it.
    """
    series = []
    for number, group in enumerate(groups):
        found = [_lowest(run) for run in group.runs]
        rounds = np.unique(
            np.concatenate([np.array(sorted(each), dtype=np.float64) for each in found])
        )
        values = np.array([[each.get(int(at), np.nan) for at in rounds] for each in found])
        if len(rounds):
            series.append(_series(number, rounds, values, "", False, _steady(group)))
    note = "The class of which the smallest share of test samples is recognised; it may be another one in each round."
    title, drawn = "Accuracy of the worst class", tuple(each for each in series if len(each.x))
    return (
        Lines("worst-class", "learning", title, note, "round", "accuracy", drawn, percent=True)
        if drawn
        else None
    )


def _lowest(run: RunData) -> dict[int, float]:
    """By round."""
    rows = (
        (row["round"], [each for each in row.get("class_accuracy") or () if each is not None])
        for row in run.clients
    )
    return {at: float(min(known)) for at, known in rows if known and at <= run.last}


def _served(groups: Sequence[Group]) -> Lines | LeftOut:
    """The main metric of every client with the last evaluated model, from the lowest to the
    highest.
    """
    score = groups[0].score
    title, series, field = f"Final {score.words} of every client", [], score.quantiles
    for number, group in enumerate(groups):
        seeds = [
            next((row[field] for row in reversed(run.clients) if field in row), None)
            for run in group.runs
        ]
        known = [np.array(values, dtype=np.float64) for values in seeds if values is not None]
        if known:
            at = np.linspace(0, 100, max(map(len, known)))
            served = np.array(
                [np.interp(at, np.linspace(0, 100, len(each)), each) for each in known]
            )
            series.append(_series(number, at, served, "", False))
    if not series:
        return LeftOut("learning", title, _UNASKED)
    note = f"Clients from the lowest to the highest {score.words}; the flatter, the fairer."
    x_label, drawn = "% of the clients", tuple(series)
    return Lines(
        "client-quantiles", "learning", title, note, x_label, score.words, drawn, score.percent
    )


def _over_rounds(group: Group, column: str) -> tuple[Array, Array]:
    """Rounds that any seed has, and each seed's values at them `[seeds, rounds]`."""
    rounds = np.unique(np.concatenate([run.column("round") for run in group.runs]))
    values = np.full((len(group.runs), len(rounds)), np.nan)
    for i, run in enumerate(group.runs):
        values[i, np.searchsorted(rounds, run.column("round"))] = run.column(column)
    return rounds, values


def _over_cost(group: Group, column: str, cost: Callable[[RunData], Array]) -> tuple[Array, Array]:
    """The seeds at equal cost, as far as all of them got: interpolated at the costs of the one that
    spent least.
    """
    curves = []
    for run in [
        run for run in group.shown if np.isfinite(cost(run)[-1])
    ] or group.shown:  # not cut to the shortest
        x, y = cost(run), run.column(column)
        known = np.isfinite(y) & (x > 0)
        curves.append((x[known], y[known]))
    at = min((x for x, _ in curves if len(x)), key=lambda x: x[-1], default=np.empty(0))
    at = at[at >= max((x[0] for x, _ in curves if len(x)), default=0.0)]
    values = [
        np.interp(at, x, y, left=np.nan, right=np.nan) if len(x) else np.full(len(at), np.nan)
        for x, y in curves
    ]
    return at, np.array(values)


def _steady(group: Group) -> list[bool] | None:
    """Which runs have not diverged: a mean that a run leaves where it diverges would jump. None:
    all, or none.
    """
    steady = [run.diverged is None for run in group.runs]
    return steady if any(steady) and not all(steady) else None


def _series(
    number: int, x: Array, seeds: Array, name: str, dashed: bool, of: Sequence[bool] | None = None
) -> Series:
    """Mean and deviation over the seeds, or `of` some of them, wherever any of these has a value."""
    every, seeds = seeds, seeds if of is None else seeds[np.array(of)]
    kept = np.isfinite(seeds).any(axis=0)
    x, seeds, every = x[kept], seeds[:, kept], every[:, kept]
    known = np.isfinite(seeds)
    count = known.sum(axis=0)
    with np.errstate(over="ignore", invalid="ignore"):  # a loss may have exploded
        mean = np.where(known, seeds, 0).sum(axis=0) / count
        squares = np.where(known, (seeds - mean) ** 2, 0).sum(axis=0)
    alike = np.nanmax(seeds, axis=0, initial=-np.inf) == np.nanmin(
        seeds, axis=0, initial=np.inf
    )  # the mean may be rounded
    deviation = np.where(
        count > 1, np.where(alike, 0.0, np.sqrt(squares / np.maximum(count - 1, 1))), np.nan
    )
    return Series(number, x, mean, deviation, count, every, name, dashed, of)


def critical_periods(group: Group) -> list[tuple[float, float, float]]:
    """Stretches of rounds (left edge, right edge, share of the seeds) in which runs were in a
    critical period.
    """
    rounds = np.unique(np.concatenate([run.column("round") for run in group.runs]))
    share = np.zeros((2, len(rounds)))
    for run in group.runs:
        place = np.searchsorted(rounds, run.column("round"))
        share[0, place] += np.nan_to_num(run.column("critical"))
        share[1, place] += 1
    level = np.concatenate([[0.0], share[0] / share[1], [0.0]])
    edges = np.concatenate([rounds[:1] - 0.5, rounds + 0.5])
    turns = np.flatnonzero(np.diff(level))
    return [
        (float(edges[a]), float(edges[b]), float(level[a + 1]))
        for a, b in pairwise(turns)
        if level[a + 1] > 0
    ]


def followed_periods(group: Group) -> list[tuple[float, float, float]]:
    """Those that a rule acted on, or of a detector that was asked for; of any other they would be
    noise.
    """
    return critical_periods(group) if group.follows_detector else []
