"""The report of a search: one HTML file that opens without a network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from kairosfl.report.html import document
from kairosfl.runs.files import write
from kairosfl.tune.proposals import Trial
from kairosfl.tune.result import Result, brief
from kairosfl.tune.search import words

_POLICY = "style-src 'unsafe-inline'; img-src data:"
_STYLE = """
.slices{display:flex;flex-wrap:wrap;gap:16px}
.slices svg,.parallel svg{font:10px system-ui,sans-serif;fill:currentColor}
.bar-row{display:grid;grid-template-columns:12em 1fr 4em;gap:8px;align-items:center;margin:3px 0}
.bar-row i{display:block;height:12px;background:#00897b;border-radius:2px}
.wide{overflow-x:auto}
td.number{text-align:right}
#page td:last-child,#page th:last-child{text-align:left}
"""
_COLOUR = "#00897b"
_BEST = "#d84315"  # the colour of the best trial
# A plot of one parameter, in pixels.
WIDTH, HEIGHT, MARGIN, LEFT = 300, 170, 34, 58
# The plot of all parameters: its height, the distance of two axes, and where the axes end.
_TALL, _GAP, _TOP, _FOOT = 220, 130, 40, 190


def write_page(result: Result) -> Path:
    """Write report.html into the folder of the search."""
    path = result.out / "report.html"
    write(path, page(result))
    return path


def page(result: Result) -> str:
    """The page as text."""
    title = f"Search in {result.out.name}"
    sentences = ""
    for line in result.sentences():
        sentences += f"<p>{escape(line)}</p>"
    failed = sum(outcome.state != "complete" for outcome in result.ended.values())
    rounds = " / ".join(map(str, result.stages))
    body = f"""<div id="page">
<header>
<p class="over">Kairos report</p>
<h1>{escape(title)}</h1>
<p class="facts">{len(result.trials)} trials, {len(result.ended)} runs of {rounds} rounds,
{failed} diverged or failed; scored on validation samples, mean of the final 10 % of evaluations</p>
<div class="verdict">{sentences}</div>
</header>
<main>
<section><h2>What mattered</h2>{_importance(result)}</section>
<section><h2>Each parameter</h2>
<p>Every trial after {result.stages[0]} rounds; the best one is ringed.</p>\
<div class="slices">{_slices(result)}</div></section>
<section class="parallel"><h2>All parameters together</h2>\
<div class="wide">{_parallel(result)}</div></section>
<section><h2>Trials</h2><div class="wide">{_table(result)}</div></section>
</main>
</div>"""
    return document(title, body, policy=_POLICY, style=_STYLE)


def _importance(result: Result) -> str:
    """A bar for each parameter, the most important one first."""
    if not result.importances:
        return "<p>Too few trials ended to say how much each parameter mattered.</p>"
    bars = ""
    for name in sorted(result.importances, key=lambda name: -result.importances[name]):
        per_cent = 100 * result.importances[name]
        bars += (
            f'<div class="bar-row"><span>{escape(name)}</span>'
            f'<i style="width:{per_cent:.1f}%"></i><span>{per_cent:.0f} %</span></div>'
        )
    note = (
        f"Share in being among the best trials after {result.stages[0]} rounds, by PED-ANOVA. It "
        "says what mattered within these ranges, not which value is best."
    )
    return f"<p>{note}</p>{bars}"


def _scores(result: Result) -> dict[int, float]:
    """The scores of trials after the first stage."""
    scores = {}
    for trial in result.trials:
        outcome = result.ended.get((trial.number, result.stages[0]))
        if outcome is not None and outcome.score is not None:
            scores[trial.number] = outcome.score
    return scores


def _names(result: Result) -> list[str]:
    """The parameters, the most important one first."""
    names: dict[str, None] = {}
    for trial in result.trials:
        names |= dict.fromkeys(trial.params)
    return sorted(names, key=lambda name: -result.importances.get(name, 0.0))


def _positions(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Where values are between 0 and 1, and the marks of the axis.

    Few values, and those that are no numbers, are spread evenly; numbers that span more than a
    factor of 20 are on a logarithmic axis.
    """
    are_names = any(isinstance(value, str | bool) for value in values)
    if are_names or len(set(values)) <= 3:
        kinds = sorted(dict.fromkeys(values), key=str)
        places = {}
        marks = []
        for number, kind in enumerate(kinds):
            places[kind] = (number + 0.5) / len(kinds)
            marks.append((places[kind], brief(kind)))
        return [places[value] for value in values], marks

    low = min(values)
    high = max(values)
    ends = [(0.0, brief(low)), (1.0, brief(high))]
    scale: Callable[[Any], float] = float
    if low > 0 and high > 20 * low:
        scale = math.log
    span = scale(high) - scale(low)
    return [(scale(value) - scale(low)) / span for value in values], ends


# --- each parameter -------------------------------------------------------------------------------


def _slices(result: Result) -> str:
    """For each parameter, the score against its value."""
    scores = _scores(result)
    if not scores:
        return ""
    plots = ""
    for name in _names(result):
        trials = [t for t in result.trials if name in t.params and t.number in scores]
        if trials:
            plots += _slice(result, name, trials, scores)
    return plots


def _slice(result: Result, name: str, trials: Sequence[Trial], scores: dict[int, float]) -> str:
    """A dot for each of these trials; the best of all is ringed."""
    low = min(scores.values())
    high = max(scores.values())
    places, marks = _positions(_values(name, trials))
    dots = ""
    for trial, place in zip(trials, places, strict=True):
        score = scores[trial.number]
        x = LEFT + place * (WIDTH - LEFT - MARGIN)
        y = float(HEIGHT - MARGIN)
        if high > low:
            y -= (score - low) / (high - low) * (HEIGHT - 2 * MARGIN)
        ring = ""
        if trial.number == result.best[0].number:
            ring = f' stroke="{_BEST}" stroke-width="2"'
        hint = f"trial {trial.number}: {result.show(score)}, {words(trial)}"
        dots += (
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{_COLOUR}" fill-opacity="0.6"{ring}>'
            f"<title>{escape(hint)}</title></circle>"
        )
    axis = ""
    for place, text in marks:
        x = LEFT + place * (WIDTH - LEFT - MARGIN)
        axis += (
            f'<text x="{x:.0f}" y="{HEIGHT - 16}" text-anchor="middle">{escape(text[:14])}</text>'
        )
    return (
        f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">'
        f'<text x="{WIDTH / 2}" y="12" text-anchor="middle" font-weight="bold">'
        f"{escape(name)}</text>"
        f'<text x="2" y="{MARGIN}">{escape(result.show(high))}</text>'
        f'<text x="2" y="{HEIGHT - MARGIN}">{escape(result.show(low))}</text>{axis}{dots}</svg>'
    )


# --- all parameters -------------------------------------------------------------------------------


def _parallel(result: Result) -> str:
    """One line per trial through all of its parameters, darker for better ones."""
    scores = _scores(result)
    names = list(filter(_is_of_every_trial, _names(result)))
    trials = []
    for trial in result.trials:
        if trial.number in scores and trial.params.keys() >= set(names):
            trials.append(trial)
    if len(trials) < 2 or not names:
        return "<p>Too few trials.</p>"

    places = []
    axes = ""
    for column, name in enumerate(names):
        at, marks = _positions(_values(name, trials))
        places.append(at)
        axes += _axis(column, name, marks)
    ends, _ = _positions([scores[trial.number] for trial in trials])
    places.append(ends)
    axes += _axis(len(names), result.metric.name, [])

    lines = ""
    order = sorted(range(len(trials)), key=lambda k: scores[trials[k].number])
    for rank, k in enumerate(order):
        lines += _line([at[k] for at in places], rank / len(order), best=k == order[-1])
    width = 120 + _GAP * len(names)
    return f'<svg width="{width}" height="{_TALL}" role="img">{lines}{axes}</svg>'


def _values(name: str, trials: Sequence[Trial]) -> list[Any]:
    """The values of a parameter in these trials."""
    return [trial.params[name] for trial in trials]


def _is_of_every_trial(name: str) -> bool:
    """Whether it is a key of the configuration and not an option of one rule."""
    return "." not in name or name.split(".")[0] in ("train", "data", "model")


def _axis(column: int, name: str, marks: Sequence[tuple[float, str]]) -> str:
    """The axis of a parameter, with its name and marks."""
    x = 60 + _GAP * column
    axis = f'<text x="{x}" y="16" text-anchor="middle" font-weight="bold">{escape(name)}</text>'
    axis += (
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{_FOOT}" stroke="currentColor" '
        'stroke-opacity="0.3"/>'
    )
    for place, text in marks:
        y = _FOOT - place * (_FOOT - _TOP) + 3
        axis += f'<text x="{x + 4}" y="{y:.1f}">{escape(text[:18])}</text>'
    return axis


def _line(places: Sequence[float], rank: float, *, best: bool) -> str:
    """The line of a trial through all axes; `rank` is the share of the trials that are worse."""
    points = []
    for column, place in enumerate(places):
        points.append(f"{60 + _GAP * column:.0f},{_FOOT - place * (_FOOT - _TOP):.1f}")
    look = (
        f'stroke="{_COLOUR}" stroke-opacity="{round(0.08 + 0.8 * rank**3, 2)}" stroke-width="1.2"'
    )
    if best:
        look = f'stroke="{_BEST}" stroke-opacity="1" stroke-width="2"'
    return f'<polyline points="{" ".join(points)}" fill="none" {look}/>'


# --- the table ------------------------------------------------------------------------------------


def _table(result: Result) -> str:
    """Every trial, the best first."""
    order = [trial for trial, _ in result.ranked()]
    for trial in result.trials:
        if trial not in order:
            order.append(trial)
    head = ""
    for rounds in result.stages:
        head += f"<th>{rounds} rounds</th>"
    rows = ""
    for trial in order:
        rows += f'<tr><td class="number">{trial.number}</td>'
        for rounds in result.stages:
            rows += _cell(result, trial, rounds)
        rows += f"<td>{escape(words(trial))}</td></tr>"
    return (
        f"<table><thead><tr><th>trial</th>{head}<th>settings</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
    )


def _cell(result: Result, trial: Trial, rounds: int) -> str:
    """The score of a trial in a stage, or how it ended, with the reason as a hint."""
    outcome = result.ended.get((trial.number, rounds))
    if outcome is None:
        return '<td class="number"></td>'
    text = outcome.state if outcome.score is None else result.show(outcome.score)
    hint = f' title="{escape(outcome.reason)}"' if outcome.reason else ""
    return f'<td class="number"{hint}>{escape(text)}</td>'
