"""The report of a search: one HTML file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from kairosfl.runs.files import write
from kairosfl.tune.result import Result, brief
from kairosfl.tune.search import words

WIDTH, HEIGHT, MARGIN, LEFT = 300, 170, 34, 58
_STYLE = """
.slices{display:flex;flex-wrap:wrap;gap:16px}
.slices svg,.parallel svg{font:10px system-ui,sans-serif;fill:currentColor}
.bar-row{display:grid;grid-template-columns:12em 1fr 4em;gap:8px;align-items:center;margin:3px 0}
.bar-row i{display:block;height:12px;background:#00897b;border-radius:2px}
.wide{overflow-x:auto}
td.number{text-align:right}
#page td:last-child,#page th:last-child{text-align:left}
"""


def write_page(found: Result) -> Path:
    """Write report.html into the folder of the search."""
    path = found.out / "report.html"
    write(path, page(found))
    return path


def page(found: Result) -> str:
    """The page as text."""
    css = files("kairosfl.report").joinpath("assets", "page.css").read_text(encoding="utf-8")
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    title = f"Search in {found.out.name}"
    sentences = "".join(f"<p>{escape(line)}</p>" for line in found.sentences())
    failed = sum(each.state != "complete" for each in found.ended.values())
    first = found.stages[0]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)} · Kairos report</title>
<link rel="icon" href="data:,">
<style>
{css}{_STYLE}</style>
</head>
<body>
<div id="page">
<header>
<p class="over">Kairos report</p>
<h1>{escape(title)}</h1>
<p class="facts">{len(found.trials)} trials, {len(found.ended)} runs of {" / ".join(map(str, found.stages))} rounds,
{failed} diverged or failed; scored on validation samples, mean of the final 10 % of evaluations</p>
<div class="verdict">{sentences}</div>
</header>
<main>
<section><h2>What mattered</h2>{_importance(found)}</section>
<section><h2>Each parameter</h2>
<p>Every trial after {first} rounds; the best one is ringed.</p><div class="slices">{_slices(found)}</div></section>
<section class="parallel"><h2>All parameters together</h2><div class="wide">{_parallel(found)}</div></section>
<section><h2>Trials</h2><div class="wide">{_table(found)}</div></section>
</main>
</div>
</body>
</html>
"""


def _importance(found: Result) -> str:
    if not found.importances:
        return "<p>Too few trials ended to say how much each parameter mattered.</p>"
    bars = "".join(
        f'<div class="bar-row"><span>{escape(name)}</span><i style="width:{100 * share:.1f}%"></i>'
        f"<span>{100 * share:.0f} %</span></div>"
        for name, share in sorted(found.importances.items(), key=lambda item: -item[1])
    )
    note = f"Share in being among the best trials after {found.stages[0]} rounds, by PED-ANOVA."
    return (
        f"<p>{note} It says what mattered within these ranges, not which value is best.</p>{bars}"
    )


def _scored(found: Result) -> list[tuple[int, float]]:
    """Trials with their scores after the first stage."""
    pairs = (
        (trial.number, found.ended.get((trial.number, found.stages[0]))) for trial in found.trials
    )
    return [
        (number, each.score)
        for number, each in pairs
        if each is not None and each.score is not None
    ]


def _names(found: Result) -> list[str]:
    seen = dict.fromkeys(name for trial in found.trials for name in trial.params)
    return sorted(seen, key=lambda name: -found.importances.get(name, 0.0))


def _positions(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Where values are between 0 and 1, and the marks of the axis; logarithmic if they span more
    than a factor 20.
    """
    if any(isinstance(each, str | bool) for each in values) or len(set(values)) <= 3:
        kinds = sorted(dict.fromkeys(values), key=str)
        places = {each: (k + 0.5) / len(kinds) for k, each in enumerate(kinds)}
        return [places[each] for each in values], [
            (place, brief(each)) for each, place in places.items()
        ]
    log = min(values) > 0 and max(values) > 20 * min(values)
    moved = [math.log(each) if log else float(each) for each in values]
    low, high = min(moved), max(moved)
    return [(each - low) / (high - low) for each in moved], [
        (0.0, brief(min(values))),
        (1.0, brief(max(values))),
    ]


def _slices(found: Result) -> str:
    """For each parameter, the score against its value."""
    scores, best = dict(_scored(found)), found.best[0].number
    if not scores:
        return ""
    low, high = min(scores.values()), max(scores.values())
    drawn = []
    for name in _names(found):
        mine = [trial for trial in found.trials if name in trial.params and trial.number in scores]
        if not mine:
            continue
        places, marks = _positions([trial.params[name] for trial in mine])
        dots = ""
        for trial, place in zip(mine, places, strict=True):
            x = LEFT + place * (WIDTH - LEFT - MARGIN)
            y = (
                HEIGHT
                - MARGIN
                - (scores[trial.number] - low) / ((high - low) or 1) * (HEIGHT - 2 * MARGIN)
            )
            ring = ' stroke="#d84315" stroke-width="2"' if trial.number == best else ""
            hint = f"trial {trial.number}: {found.show(scores[trial.number])}, {words(trial)}"
            dots += (
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="#00897b" fill-opacity="0.6"{ring}>'
                f"<title>{escape(hint)}</title></circle>"
            )
        axis = "".join(
            f'<text x="{LEFT + at * (WIDTH - LEFT - MARGIN):.0f}" y="{HEIGHT - 16}" text-anchor="middle">'
            f"{escape(text[:14])}</text>"
            for at, text in marks
        )
        drawn.append(
            f'<svg width="{WIDTH}" height="{HEIGHT}" role="img"><text x="{WIDTH / 2}" y="12" text-anchor="middle" '
            f'font-weight="bold">{escape(name)}</text><text x="2" y="{MARGIN}">{escape(found.show(high))}</text>'
            f'<text x="2" y="{HEIGHT - MARGIN}">{escape(found.show(low))}</text>{axis}{dots}</svg>'
        )
    return "".join(drawn)


def _parallel(found: Result) -> str:
    """One line per trial through all of its parameters, darker for better ones."""
    scores = dict(_scored(found))
    names = [
        name
        for name in _names(found)
        if "." not in name or name.split(".")[0] in ("train", "data", "model")
    ]
    mine = [
        t for t in found.trials if t.number in scores and all(name in t.params for name in names)
    ]
    if len(mine) < 2 or not names:
        return "<p>Too few trials.</p>"
    gap, height = 130, 220
    columns = [_positions([trial.params[name] for trial in mine]) for name in names]
    ends, _ = _positions([scores[trial.number] for trial in mine])
    order = sorted(range(len(mine)), key=lambda k: scores[mine[k].number])
    lines = ""
    for rank, k in enumerate(order):
        at = [*(places[k] for places, _ in columns), ends[k]]
        points = " ".join(
            f"{60 + gap * c:.0f},{height - 30 - p * (height - 70):.1f}" for c, p in enumerate(at)
        )
        shade = 0.08 + 0.8 * (rank / len(order)) ** 3
        last = rank == len(order) - 1
        lines += (
            f'<polyline points="{points}" fill="none" stroke="{"#d84315" if last else "#00897b"}" '
            f'stroke-opacity="{1 if last else round(shade, 2)}" stroke-width="{2 if last else 1.2}"/>'
        )
    heads = ""
    for c, name in enumerate([*names, found.metric.name]):
        x = 60 + gap * c
        marks = columns[c][1] if c < len(columns) else []
        heads += (
            f'<text x="{x}" y="16" text-anchor="middle" font-weight="bold">{escape(name)}</text>'
        )
        heads += f'<line x1="{x}" x2="{x}" y1="40" y2="{height - 30}" stroke="currentColor" stroke-opacity="0.3"/>'
        heads += "".join(
            f'<text x="{x + 4}" y="{height - 30 - at * (height - 70) + 3:.1f}">{escape(text[:18])}</text>'
            for at, text in marks
        )
    return (
        f'<svg width="{120 + gap * len(names)}" height="{height}" role="img">{lines}{heads}</svg>'
    )


def _table(found: Result) -> str:
    """Every trial, the best first."""
    order = [trial for trial, _ in found.ranked()]
    order += [trial for trial in found.trials if trial not in order]
    head = "".join(f"<th>{rounds} rounds</th>" for rounds in found.stages)
    rows = ""
    for trial in order:
        cells = ""
        for rounds in found.stages:
            each = found.ended.get((trial.number, rounds))
            shown = (
                ""
                if each is None
                else found.show(each.score)
                if each.score is not None
                else each.state
            )
            hint = f' title="{escape(each.reason)}"' if each is not None and each.reason else ""
            cells += f'<td class="number"{hint}>{escape(shown)}</td>'
        rows += (
            f'<tr><td class="number">{trial.number}</td>{cells}<td>{escape(words(trial))}</td></tr>'
        )
    return f"<table><thead><tr><th>trial</th>{head}<th>settings</th></tr></thead><tbody>{rows}</tbody></table>"
