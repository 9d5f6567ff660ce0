"""Parts of the page as HTML: tables, figures, and how to repeat a run. All text from folders is escaped here."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from kairosfl.report.pictures import COLOURS, HeatMap, LeftOut, Picture, letter
from kairosfl.report.read import Group, RunData, differing
from kairosfl.report.tables import Pair, Row, by_problem, cells, said, signed

_HEADS = {
    "final 10 %": "Mean {0.words} over the final 10 % of the evaluated rounds",
    "final": "{0.title} in the last evaluated round",
    "best": "{1} {0.words} of any evaluated round",
    "rounds to target": "Rounds until the {0.words} first reached the target",
    "MB to target": "Megabytes, down and up, until then",
    "MB": "Megabytes, down and up, in total",
    "epochs": "Local epochs of all clients in all rounds",
    "cohort": "Mean number of clients per round",
    "e-LUD": "Mean local update diversity",
    "seconds": "Wall-clock time of all rounds; runs of a sweep that shared an engine waited for each other",
}


CLEAR = ' class="clear"'  # statistically significant


def key(number: int) -> str:
    """The letter of a group on its colour."""
    return f'<i class="key g{number % len(COLOURS)}">{letter(number)}</i>'


def chips(groups: Sequence[Group]) -> str:
    """The legend: a button for each group."""
    title = "click: hide or show; double-click: show only this"
    return "".join(
        f'<button type="button" class="chip g{i % len(COLOURS)}" data-group="{i}" aria-pressed="true" '
        f'title="{escape(group.label)} ({title})">{key(i)}<span>{escape(group.label)}</span></button>'
        for i, group in enumerate(groups)
    )


def results_table(rows: Sequence[Row]) -> str:
    """The table of results; the best values on the same data are highlighted."""
    shown, score = [cells(row) for row in rows], rows[0].score
    about = {name: text.format(score, score.best.capitalize()) for name, text in _HEADS.items()}
    heads = "".join(
        f'<th scope="col" title="{escape(about.get(name, ""))}"><button type="button">{escape(name)}</button></th>'
        for name in shown[0]
    )
    best = {
        "final 10 %": _best(rows, lambda row: score.sign * row.last_tenth.mean),
        "final": _best(rows, lambda row: score.sign * row.final.mean),
        "best": _best(rows, lambda row: score.sign * row.best.mean),
    }
    body = ""
    for i, row in enumerate(shown):
        body += f'<tr data-group="{i}">'
        for name, value in row.items():
            mark = ' class="best"' if i in best.get(name, ()) else ""
            head = key(i) if name == "algorithm" else ""
            body += f'<td data-column="{escape(name)}" title="{escape(value)}"{mark}>{head}{escape(value)}</td>'
        body += "</tr>"
    return _table("sortable", heads, body)


def _best(rows: Sequence[Row], value: Callable[[Row], float]) -> set[int]:
    """The best rows of each problem on which several have finished."""
    compared = ([i for i in mine if rows[i].finished] for mine in by_problem(rows).values())
    known = ([i for i in mine if math.isfinite(value(rows[i]))] for mine in compared if len(mine) > 1)
    return {i for mine in known for i in mine if value(rows[i]) == max(value(rows[j]) for j in mine)}


def tests_table(groups: Sequence[Group], pairs: Sequence[Pair], shown: Sequence[int]) -> str:
    """How much better the row is than the column, with the p-value below; significant ones are highlighted."""
    number = {group.label: i for i, group in enumerate(groups)}
    found: dict[tuple[int, int], str] = {}
    for pair in pairs:
        a, b = number[pair.first], number[pair.second]
        mark = CLEAR if pair.adjusted < 0.05 else ""
        p = escape(said(pair.adjusted)) if math.isfinite(pair.p) else "one seed"
        gap = pair.score.scale * pair.difference.mean
        digits = pair.score.digits(gap)
        for at, sign in (((b, a), 1), ((a, b), -1)):
            found[at] = f"<td{mark}>{signed(sign * gap, digits)}<small>{p}</small></td>"
    head = "".join(f'<th scope="col">{key(i)}</th>' for i in shown)
    body = ""
    for i in shown:
        label = escape(groups[i].label)
        row = "".join("<td>·</td>" if i == j else found.get((i, j), "<td>–</td>") for j in shown)
        body += f'<tr data-group="{i}"><td title="{label}">{key(i)}{label}</td>{row}</tr>'
    return _table("matrix", f"<th></th>{head}", body)


def _table(kind: str, head: str, body: str) -> str:
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
    )


def sentences(kind: str, lines: Iterable[str]) -> str:
    """A list of sentences, if there are any."""
    items = "".join(f"<li>{line}</li>" for line in lines)
    return f'<ul class="{kind}">{items}</ul>' if items else ""


def notes(rows: Sequence[Row]) -> str:
    """Notes on the runs of each row that qualify its numbers."""
    return sentences("notes", (f"{key(i)} {escape(note)}" for i, row in enumerate(rows) for note in row.notes))


def figure(picture: Picture) -> str:
    """An empty figure that the scripts draw into."""
    kind = "hero" if picture.section == "result" else "wide" if picture.key.startswith("partition") else ""
    inside = f' data-inside="{picture.group}"' if isinstance(picture, HeatMap) else ""
    target = ' data-target="yes"' if picture.section in ("result", "cost") else ""
    note = f'<span class="about">{escape(picture.note)}</span>' if picture.note else ""
    if not isinstance(picture, HeatMap):
        note += '<span class="about shading"></span>'  # an explanation of the shading, filled in when it is drawn
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
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _surroundings(run).items())
    return (
        f'<details id="recipe-{number}"{" open" if open_ else ""}><summary>{key(number)}{escape(group.label)}</summary>'
        + _block(
            f"command-{number}", "command" if len(commands) == 1 else "commands, one per seed", "\n".join(commands)
        )
        + '<div class="rest">'
        + (_block(f"config-{number}", f"config.toml (seed {run.seed})", run.config.strip()) if run.config else "")
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
    names = ("version", "git", "python", "torch", "numpy", "platform", "device", "engine", "precision", "parameters")
    more = ("clients", "population_hash", "data_hashes", "started")
    facts = {name.replace("_", " "): run.about[name] for name in (*names, *more) if run.about.get(name)}
    return {name: _plain(value) for name, value in facts.items()}


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {each}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
