"""Parts of the page as HTML: tables, figures, and how to repeat a run.

All text from folders is escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kairosfl.report.notes import detected, detector_of
from kairosfl.report.pictures import HeatMap, LeftOut, Picture, letter
from kairosfl.report.ranking import best_rows
from kairosfl.report.read import Group, RunData, all_runs, differing
from kairosfl.report.tables import Pair, Row, bounds, cells, difference, probability, results
from kairosfl.runs.metrics import FLICKER

_HEADS = {
    "final 10 %": (
        "Mean {0.words} over the final 10 % of the evaluated rounds; †: after the last round alone"
    ),
    "vs. baseline": (
        "How much better the final 10 % are than the baseline's on the same seeds, with its 95 % "
        "interval"
    ),
    "p (Holm)": "p of the paired t-test, with Holm's correction for all comparisons on these data",
    "final": "{0.title} in the last evaluated round",
    "best": "{1} {0.words} of any evaluated round",
    "worst clients": "{0.title} of the tenth of the clients that the last model serves worst",
    "rounds to target": "Rounds until the {0.words} first reached the target",
    "MB to target": "Megabytes, down and up, until then",
    "MB": "Megabytes, down and up, in total",
    "epochs": "Local epochs of all clients in all rounds",
    "passes": "How often clients ran the model over a sample, forward and backward, in all rounds",
    "cohort": "Mean number of clients per round",
    "e-LUD": "Mean local update diversity",
    "seconds": (
        "Wall-clock time of all rounds; runs of a sweep that shared an engine waited for each other"
    ),
}
# Columns in which the best value is highlighted.
_RANKED = ("final 10 %", "final", "best", "worst clients")
# Columns that are hidden until they are chosen; so are the parameters of a sweep, which labels
# contain.
EXTRA = ("final", "epochs", "passes", "cohort", "e-LUD", "seconds")
PARAMETER = "="  # before the names of columns that are parameters
AFTER = "final 10 %"  # the comparison follows this column
CLEAR, SIGNIFICANT = ' class="clear"', 0.05
_COMPARED = ("vs. baseline", "p (Holm)")
UNCOMPARED = ("–", "–")  # in these columns
# What run.json says about where a run was made.
_SURROUNDINGS = (
    *("version", "git", "python", "torch", "numpy", "platform", "device", "engine", "precision"),
    *("parameters", "clients", "population_hash", "data_hashes", "started"),
)


def key(number: int) -> str:
    """The letter of a group on its colour."""
    return f'<i class="key g{number}">{letter(number)}</i>'


def chips(groups: Sequence[Group]) -> str:
    """The legend: a button for each group."""
    buttons = ""
    for number, group in enumerate(groups):
        label = escape(group.label)
        title = f"{label} (click: hide or show; double-click: show only this)"
        buttons += (
            f'<button type="button" class="chip g{number}" data-group="{number}" '
            f'aria-pressed="true" title="{title}">{key(number)}<span>{label}</span></button>'
        )
    return buttons


# --- the table of results -------------------------------------------------------------------------


def results_table(
    rows: Sequence[Row], varied: Mapping[str, Sequence[str]], versus: Mapping[int, tuple[str, str]]
) -> str:
    """The table of results; the best values on the same data are highlighted.

    Args:
        rows: The results of the groups.
        varied: The parameters of a sweep, with their value in every group.
        versus: The cells of each group against its baseline; empty if nothing is compared.
    """
    best = {name: best_rows(rows, name) for name in _RANKED}
    body = ""
    for number, row in enumerate(rows):
        body += f'<tr data-group="{number}">{_name_cell(number, row)}'
        for name, values in varied.items():
            body += _cell(f"{PARAMETER}{name}", escape(values[number]))
        for name, text in cells(row).items():
            if name == "algorithm":
                continue
            body += _cell(name, escape(text), number in best.get(name, ()))
            if name == AFTER and versus:
                body += "".join(map(_cell, _COMPARED, versus.get(number, UNCOMPARED)))
        body += "</tr>"

    score = rows[0].score
    heads = {}
    for name in _columns(rows, varied, bool(versus)):
        heads[name] = _HEADS.get(name, "").format(score, score.best.capitalize())
    return table("results", heads, body)


def _name_cell(number: int, row: Row) -> str:
    """The first cell of a row: letter, label, and what keeps its runs out of comparisons."""
    label = escape(row.label)
    return f'<td data-column="algorithm" title="{label}">{key(number)}{label}{_flags(row)}</td>'


def _columns(rows: Sequence[Row], varied: Iterable[str], compared: bool) -> list[str]:
    """The names of the columns, in order."""
    names = []
    for name in cells(rows[0]):
        names.append(name)
        if name == "algorithm":
            names += [f"{PARAMETER}{parameter}" for parameter in varied]
        if name == AFTER and compared:
            names += _COMPARED
    return names


def column_boxes(rows: Sequence[Row], varied: Iterable[str], compared: bool) -> str:
    """A box for every column of the results but the first, ticked if it is shown to begin with."""
    hidden = set(EXTRA)
    if not any(row.worst_clients.count for row in rows):
        hidden.add("worst clients")
    boxes = ""
    for name in _columns(rows, varied, compared)[1:]:
        ticked = "" if name in hidden or name.startswith(PARAMETER) else " checked"
        box = (
            f'<input type="checkbox" id="column {escape(name)}" '
            f'data-column="{escape(name)}"{ticked}>'
        )
        boxes += f"<label>{box}{escape(name.removeprefix(PARAMETER))}</label>"
    return boxes


def _cell(name: str, html: str, best: bool = False) -> str:
    """A cell; where it is text alone, this is what it says when pointed at, too."""
    title = "" if "<" in html else f' title="{html}"'
    mark = ' class="best"' if best else ""
    return f'<td data-column="{escape(name)}"{title}{mark}>{html}</td>'


def _flags(row: Row) -> str:
    """What keeps runs of a group out of comparisons."""
    stopped = len(row.seeds) - row.finished - row.going  # below zero: a seed has been run twice
    counts = {"diverged": row.diverged, "unfinished": row.going, "stopped": stopped}
    flags = [f"{count} {name}" for name, count in counts.items() if count > 0]
    if not flags:
        return ""
    return f'<small class="flag">{" · ".join(flags)}</small>'


def runs_table(groups: Sequence[Group]) -> str:
    """Every run by itself, with its state."""
    heads = ("group", "seed", "state", "rounds", "final 10 %", "best", "MB", "seconds", "folder")
    body = ""
    for number, group in enumerate(groups):
        for run in group.runs:
            (row,) = results([Group(group.label, (run,))], math.nan)
            texts = cells(row)
            state = _state(run)
            mark = ' class="flag"' if state != "finished" else ""
            body += f'<tr data-group="{number}"><td>{key(number)}{escape(group.label)}</td>'
            body += f"<td>{run.seed}</td><td{mark}>{state}</td>"
            for name in heads[3:8]:
                body += f"<td>{escape(texts[name])}</td>"
            body += f"<td>{escape(run.path.name)}</td></tr>"
    return table("runs", dict.fromkeys(heads, ""), body)


def _state(run: RunData) -> str:
    if run.diverged is not None:
        return f"diverged in round {run.diverged}"
    if run.done:
        return "finished"
    return "stopped" if run.stopped else "unfinished"


def table(name: str, heads: Mapping[str, str], body: str) -> str:
    """A table that can be sorted, filtered and saved; `heads` says what its columns mean."""
    head = ""
    for column, about in heads.items():
        button = f'<button type="button">{escape(column.removeprefix(PARAMETER))}</button>'
        head += (
            f'<th scope="col" data-name="{escape(column)}" title="{escape(about)}">{button}</th>'
        )
    return (
        f'<div class="scroll"><table id="{name}" class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


# --- comparisons ----------------------------------------------------------------------------------


def versus(pairs: Sequence[Pair]) -> dict[str, tuple[str, str]]:
    """The cells of each group that is compared with a baseline, by label: the difference, and p.

    The intervals are drawn as well, on one scale.
    """
    ends: list[float] = []
    for pair in pairs:
        ends += filter(math.isfinite, (pair.low, pair.high, pair.difference.mean, 0.0))
    scale = (min(ends), max(ends)) if ends else (0.0, 1.0)

    compared = {}
    for pair in pairs:
        if not pair.runner_up:  # the sentence on top has it
            compared[pair.second] = _versus(pair, scale)
    return compared


def _versus(pair: Pair, scale: tuple[float, float]) -> tuple[str, str]:
    if math.isnan(pair.low):
        same = "<small>the same in all seeds</small>" if pair.alike else ""
        return f"{difference(pair)}{same}", "–"
    p = escape(probability(pair.adjusted))
    if pair.adjusted < SIGNIFICANT:
        p = f"<b{CLEAR}>{p}</b>"
    return f"{difference(pair)}<small>{bounds(pair)}</small>{_range(pair, scale)}", p


def _range(pair: Pair, scale: tuple[float, float]) -> str:
    """The interval of a difference as a bar; the style sheet draws it."""
    low, high = scale
    width = high - low if high > low else 1.0
    marks = {"low": pair.low, "high": pair.high, "at": pair.difference.mean, "zero": 0.0}
    places = ";".join(f"--{name}:{100 * (at - low) / width:.3g}%" for name, at in marks.items())
    return f'<i class="range" style="{places}"></i>'


# --- sentences ------------------------------------------------------------------------------------


def sentences(kind: str, lines: Iterable[str]) -> str:
    """A list of sentences, if there are any."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def notes(rows: Sequence[Row]) -> str:
    """Notes on the runs of each row that qualify its numbers."""
    lines = []
    for number, row in enumerate(rows):
        lines += [f"{key(number)} {escape(note)}" for note in row.notes]
    return sentences("notes", lines)


def detectors(groups: Sequence[Group]) -> str:
    """What those detectors said that a rule follows or that were asked for.

    Groups whose detectors flicker share a sentence, and so do those that follow none.
    """
    lines: list[str] = []
    ignored: list[int] = []
    flickering: dict[str, list[int]] = {}
    for number, group in enumerate(groups):
        if not group.follows_detector:
            ignored.append(number)
        elif FLICKER in detected(group):
            flickering.setdefault(detector_of(group), []).append(number)
        else:
            lines.append(_detected(number, group))

    for name, numbers in flickering.items():
        if len(numbers) == 1:
            lines.append(_detected(numbers[0], groups[numbers[0]]))
        else:
            lines.append(
                f"{_keys(numbers)} detector {escape(name)}: flicker; it switched too often to mark "
                "a period"
            )
    if ignored:
        lines.append(f"{_keys(ignored)} no rule acts on the detector, so what it said is not drawn")
    return sentences("notes", lines)


def _detected(number: int, group: Group) -> str:
    return f"{key(number)} {escape(detected(group))}"


def _keys(numbers: Iterable[int]) -> str:
    return " ".join(map(key, numbers))


# --- figures --------------------------------------------------------------------------------------


def figure(picture: Picture) -> str:
    """An empty figure that the scripts draw into."""
    inside = f' data-inside="{picture.group}"' if isinstance(picture, HeatMap) else ""
    target = ' data-target="yes"' if picture.section in ("result", "cost") else ""
    note = f'<span class="about">{escape(picture.note)}</span>' if picture.note else ""
    if not isinstance(picture, HeatMap):
        # an explanation of the shading, filled in when it is drawn
        note += '<span class="about shading"></span>'
    title = escape(picture.title)
    return (
        f'<figure id="fig-{picture.key}" class="{_size(picture)}" data-title="{title}"'
        f"{inside}{target}><figcaption><b>{title}</b>{note}</figcaption>"
        '<div class="plot"></div></figure>'
    )


def _size(picture: Picture) -> str:
    """The class that gives a figure its size."""
    if picture.section == "result":
        return "hero"
    return "wide" if picture.key.startswith("partition") else ""


def missing(left_out: Sequence[LeftOut]) -> str:
    """What is not drawn and why, in a line for each group that it concerns."""
    reasons: dict[int | None, list[str]] = {}
    for one in left_out:
        reasons.setdefault(one.group, []).append(f"{escape(one.title)} ({escape(one.why)})")
    lines = ""
    for group, texts in reasons.items():
        inside = "" if group is None else f' data-inside="{group}"'
        lines += f'<p class="missing"{inside}>Left out: {"; ".join(texts)}.</p>'
    return lines


# --- how to repeat a run --------------------------------------------------------------------------


def repeat(groups: Sequence[Group]) -> str:
    """Command, configuration and environment of every group."""
    differences = differing(all_runs(groups))
    about = ""
    if differences:
        names = ", ".join(f"<code>{escape(name)}</code>" for name in differences)
        about = f"<p>Besides algorithm and seed, the runs differ in {names}.</p>"
    elif len(groups) > 1:
        about = "<p>The runs differ only in algorithm and seed.</p>"
    alone = len(groups) == 1
    return about + "".join(_recipe(i, group, alone) for i, group in enumerate(groups))


def _recipe(number: int, group: Group, is_open: bool) -> str:
    run = group.runs[0]
    commands = list(dict.fromkeys(map(_command, group.runs)))  # those of a sweep are one
    heading = "command" if len(commands) == 1 else "commands, one per seed"
    command = _block(f"command-{number}", heading, "\n".join(commands))
    config = ""
    if run.config:
        config = _block(f"config-{number}", f"config.toml (seed {run.seed})", run.config.strip())
    attribute = " open" if is_open else ""
    return (
        f'<details id="recipe-{number}"{attribute}>'
        f"<summary>{key(number)}{escape(group.label)}</summary>"
        f'{command}<div class="rest">{config}<dl class="dl">{_surroundings(run)}</dl></div>'
        "</details>"
    )


def _block(name: str, title: str, text: str) -> str:
    button = f'<button type="button" class="copy" data-from="{name}">copy</button>'
    return f'<p class="copyline">{escape(title)} {button}</p><pre id="{name}">{escape(text)}</pre>'


def _command(run: RunData) -> str:
    command = run.about.get("command")
    if isinstance(command, list):
        return " ".join(map(str, command))
    return str(command) if command else f"# {run.path.name} does not record how it was started"


def _surroundings(run: RunData) -> str:
    """Versions, machine and data, as terms with their descriptions."""
    terms = ""
    for name in _SURROUNDINGS:
        if run.about.get(name):
            value = escape(_plain(run.about[name]))
            terms += f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{value}</dd>"
    return terms


def _plain(value: object) -> str:
    """A value of run.json as text."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {entry}" for name, entry in value.items())
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
