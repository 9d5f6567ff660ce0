"""Parts of the page as HTML: tables, figures, and how to repeat a run. All text from folders is
escaped here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

from kairosfl.report.notes import detected, detector_of
from kairosfl.report.pictures import HeatMap, LeftOut, Picture, letter
from kairosfl.report.ranking import best_rows
from kairosfl.report.read import Group, RunData, differing
from kairosfl.report.tables import Pair, Row, bounds, cells, difference, probability, results
from kairosfl.runs.metrics import FLICKER

_HEADS = {
    "final 10 %": "Mean {0.words} over the final 10 % of the evaluated rounds; †: after the last round alone",
    "vs. baseline": "How much better the final 10 % are than the baseline's on the same seeds, with its 95 % interval",
    "p (Holm)": "p of the paired t-test, with Holm's correction for all comparisons on these data",
    "final": "{0.title} in the last evaluated round",
    "best": "{1} {0.words} of any evaluated round",
    "worst clients": "{0.title} of the tenth of the clients that the last model serves worst",
    "rounds to target": "Rounds until the {0.words} first reached the target",
    "MB to target": "Megabytes, down and up, until then",
    "MB": "Megabytes, down and up, in total",
    "epochs": "Local epochs of all clients in all rounds",
    "cohort": "Mean number of clients per round",
    "e-LUD": "Mean local update diversity",
    "seconds": "Wall-clock time of all rounds; runs of a sweep that shared an engine waited for each other",
}


# Columns that are hidden until they are chosen; so are the parameters of a sweep, which labels
# contain.
EXTRA = ("final", "epochs", "cohort", "e-LUD", "seconds")
PARAMETER = "="  # before the names of columns that are parameters
AFTER = "final 10 %"  # the comparison follows this column
CLEAR, SIGNIFICANT = ' class="clear"', 0.05
_COMPARED = ("vs. baseline", "p (Holm)")
UNCOMPARED = ("–", "–")  # in these columns


def key(number: int) -> str:
    """The letter of a group on its colour."""
    return f'<i class="key g{number}">{letter(number)}</i>'


def chips(groups: Sequence[Group]) -> str:
    """The legend: a button for each group."""
    title = "click: hide or show; double-click: show only this"
    return "".join(
        f'<button type="button" class="chip g{i}" data-group="{i}" aria-pressed="true" '
        f'title="{escape(group.label)} ({title})">{key(i)}<span>{escape(group.label)}</span></button>'
        for i, group in enumerate(groups)
    )


def results_table(
    rows: Sequence[Row], varied: Mapping[str, Sequence[str]], versus: Mapping[int, tuple[str, str]]
) -> str:
    """The table of results; the best values on the same data are highlighted."""
    score = rows[0].score
    about = {name: text.format(score, score.best.capitalize()) for name, text in _HEADS.items()}
    best = {
        name: best_rows(rows, name) for name in ("final 10 %", "final", "best", "worst clients")
    }
    body = ""
    for i, row in enumerate(rows):
        shown = {
            name: _cell(name, escape(value), i in best.get(name, ()))
            for name, value in cells(row).items()
        }
        first = (
            shown.pop("algorithm")
            .replace(">", f">{key(i)}", 1)
            .replace("</td>", f"{_flags(row)}</td>")
        )
        own = "".join(
            _cell(f"{PARAMETER}{name}", escape(values[i])) for name, values in varied.items()
        )
        shown[AFTER] += "".join(map(_cell, _COMPARED, versus.get(i, UNCOMPARED))) if versus else ""
        body += f'<tr data-group="{i}">{first}{own}{"".join(shown.values())}</tr>'
    return table(
        "results",
        {name: about.get(name, "") for name in _columns(rows, varied, bool(versus))},
        body,
    )


def _columns(rows: Sequence[Row], varied: Iterable[str], compared: bool) -> list[str]:
    names = list(cells(rows[0]))
    at = names.index(AFTER) + 1
    parameters = (f"{PARAMETER}{name}" for name in varied)
    return [names[0], *parameters, *names[1:at], *(_COMPARED if compared else ()), *names[at:]]


def column_boxes(rows: Sequence[Row], varied: Iterable[str], compared: bool) -> str:
    """A box for every column of the results but the first, ticked if it is shown to begin with."""
    off = EXTRA if any(row.worst_clients.count for row in rows) else (*EXTRA, "worst clients")
    boxes = ""
    for name in _columns(rows, varied, compared)[1:]:
        ticked = "" if name in off or name.startswith(PARAMETER) else " checked"
        box = f'<input type="checkbox" id="column {escape(name)}" data-column="{escape(name)}"{ticked}>'
        boxes += f"<label>{box}{escape(name.removeprefix(PARAMETER))}</label>"
    return boxes


def _cell(name: str, text: str, best: bool = False) -> str:
    plain = "" if "<" in text else f' title="{text}"'
    mark = ' class="best"' if best else ""
    return f'<td data-column="{escape(name)}"{plain}{mark}>{text}</td>'


def _flags(row: Row) -> str:
    """What keeps runs of a group out of comparisons, where its name is."""
    stopped = len(row.seeds) - row.finished - row.going  # below zero: a seed has been run twice
    counts = {"diverged": row.diverged, "unfinished": row.going, "stopped": stopped}
    words = [f"{count} {name}" for name, count in counts.items() if count > 0]
    return f'<small class="flag">{" · ".join(words)}</small>' if words else ""


def runs_table(groups: Sequence[Group]) -> str:
    """Every run by itself, with its state."""
    heads = ("group", "seed", "state", "rounds", "final 10 %", "best", "MB", "seconds", "folder")
    body = ""
    for i, group in enumerate(groups):
        for run in group.runs:
            (row,) = results([Group(group.label, (run,))], math.nan)
            shown = cells(row)
            state = _state(run)
            mark = ' class="flag"' if state != "finished" else ""
            body += f'<tr data-group="{i}"><td>{key(i)}{escape(group.label)}</td>'
            body += f"<td>{run.seed}</td><td{mark}>{state}</td>"
            body += "".join(f"<td>{escape(shown[name])}</td>" for name in heads[3:8])
            body += f"<td>{escape(run.path.name)}</td></tr>"
    return table("runs", dict.fromkeys(heads, ""), body)


def _state(run: RunData) -> str:
    if run.diverged is not None:
        return f"diverged in round {run.diverged}"
    return "finished" if run.done else "stopped" if run.stopped else "unfinished"


def versus(pairs: Sequence[Pair]) -> dict[str, tuple[str, str]]:
    """For each group that is compared with a baseline, by label: the difference with its interval,
    and p.

    The intervals are drawn as well, on one scale.
    """
    ends = [
        end
        for pair in pairs
        for end in (pair.low, pair.high, pair.difference.mean, 0.0)
        if math.isfinite(end)
    ]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)

    def at(value: float) -> str:
        return f"{100 * (value - low) / ((high - low) or 1.0):.3g}%"

    found = {}
    for pair in pairs:
        if pair.runner_up:  # the sentence on top has it
            continue
        if math.isnan(pair.low):
            same = "<small>the same in all seeds</small>" if pair.alike else ""
            found[pair.second] = f"{difference(pair)}{same}", "–"
            continue
        ends_at = f"--low:{at(pair.low)};--high:{at(pair.high)};--at:{at(pair.difference.mean)};--zero:{at(0.0)}"
        text = f'{difference(pair)}<small>{bounds(pair)}</small><i class="range" style="{ends_at}"></i>'
        p = escape(probability(pair.adjusted))
        found[pair.second] = text, f"<b{CLEAR}>{p}</b>" if pair.adjusted < SIGNIFICANT else p
    return found


def table(name: str, heads: Mapping[str, str], body: str) -> str:
    """A table that can be sorted, filtered and saved; `heads` are its columns with what they mean."""
    head = "".join(
        f'<th scope="col" data-name="{escape(each)}" title="{escape(about)}">'
        f'<button type="button">{escape(each.removeprefix(PARAMETER))}</button></th>'
        for each, about in heads.items()
    )
    return (
        f'<div class="scroll"><table id="{name}" class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def sentences(kind: str, lines: Iterable[str]) -> str:
    """A list of sentences, if there are any."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def notes(rows: Sequence[Row]) -> str:
    """Notes on the runs of each row that qualify its numbers."""
    return sentences(
        "notes", (f"{key(i)} {escape(note)}" for i, row in enumerate(rows) for note in row.notes)
    )


def detectors(groups: Sequence[Group]) -> str:
    """What the detectors said whose answers a rule acts on, or that were asked for; flicker in one
    sentence.
    """
    lines: list[str] = []
    flickering: dict[str, list[int]] = {}
    ignored = [i for i, group in enumerate(groups) if not group.follows_detector]
    for i, group in enumerate(groups):
        words = detected(group)
        if i in ignored:
            continue
        if FLICKER in words:
            flickering.setdefault(detector_of(group), []).append(i)
        else:
            lines.append(f"{key(i)} {escape(words)}")
    for name, members in flickering.items():
        if len(members) == 1:
            lines.append(f"{key(members[0])} {escape(detected(groups[members[0]]))}")
            continue
        marks = " ".join(map(key, members))
        lines.append(
            f"{marks} detector {escape(name)}: flicker; it switched too often to mark a period"
        )
    if ignored:
        marks = " ".join(map(key, ignored))
        lines.append(f"{marks} no rule acts on the detector, so what it said is not drawn")
    return sentences("notes", lines)


def figure(picture: Picture) -> str:
    """An empty figure that the scripts draw into."""
    kind = (
        "hero"
        if picture.section == "result"
        else "wide"
        if picture.key.startswith("partition")
        else ""
    )
    inside = f' data-inside="{picture.group}"' if isinstance(picture, HeatMap) else ""
    target = ' data-target="yes"' if picture.section in ("result", "cost") else ""
    note = f'<span class="about">{escape(picture.note)}</span>' if picture.note else ""
    if not isinstance(picture, HeatMap):
        # an explanation of the shading, filled in when it is drawn
        note += '<span class="about shading"></span>'
    return (
        f'<figure id="fig-{picture.key}" class="{kind}" data-title="{escape(picture.title)}"{inside}{target}>'
        f'<figcaption><b>{escape(picture.title)}</b>{note}</figcaption><div class="plot"></div></figure>'
    )


def missing(left: Sequence[LeftOut]) -> str:
    """What is not drawn and why, in a line for each group that it concerns."""
    lines: dict[int | None, list[str]] = {}
    for each in left:
        lines.setdefault(each.group, []).append(f"{escape(each.title)} ({escape(each.why)})")
    out = ""
    for group, reasons in lines.items():
        inside = "" if group is None else f' data-inside="{group}"'
        out += f'<p class="missing"{inside}>Left out: {"; ".join(reasons)}.</p>'
    return out


def repeat(groups: Sequence[Group]) -> str:
    """Command, configuration and environment of every group."""
    runs = [run for group in groups for run in group.runs]
    differences = differing(runs)
    out = ""
    if differences:
        lines = ", ".join(f"<code>{escape(name)}</code>" for name in differences)
        out += f"<p>Besides algorithm and seed, the runs differ in {lines}.</p>"
    elif len(groups) > 1:
        out += "<p>The runs differ only in algorithm and seed.</p>"
    return out + "".join(_recipe(i, group, len(groups) == 1) for i, group in enumerate(groups))


def _recipe(number: int, group: Group, open_: bool) -> str:
    run = group.runs[0]
    commands = list(dict.fromkeys(_command(each) for each in group.runs))  # a sweep is one
    facts = "".join(
        f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>"
        for name, value in _surroundings(run).items()
    )
    return (
        f'<details id="recipe-{number}"{" open" if open_ else ""}><summary>{key(number)}{escape(group.label)}</summary>'
        + _block(
            f"command-{number}",
            "command" if len(commands) == 1 else "commands, one per seed",
            "\n".join(commands),
        )
        + '<div class="rest">'
        + (
            _block(f"config-{number}", f"config.toml (seed {run.seed})", run.config.strip())
            if run.config
            else ""
        )
        + f'<dl class="dl">{facts}</dl></div></details>'
    )


def _block(name: str, title: str, text: str) -> str:
    return (
        f'<p class="copyline">{escape(title)} <button type="button" class="copy" data-from="{name}">copy</button></p>'
        f'<pre id="{name}">{escape(text)}</pre>'
    )


def _command(run: RunData) -> str:
    command = run.about.get("command")
    if isinstance(command, list):
        return " ".join(map(str, command))
    return str(command) if command else f"# {run.path.name} does not record how it was started"


def _surroundings(run: RunData) -> dict[str, str]:
    names = (
        "version",
        "git",
        "python",
        "torch",
        "numpy",
        "platform",
        "device",
        "engine",
        "precision",
        "parameters",
    )
    more = ("clients", "population_hash", "data_hashes", "started")
    facts = {
        name.replace("_", " "): run.about[name] for name in (*names, *more) if run.about.get(name)
    }
    return {name: _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
