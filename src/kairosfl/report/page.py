"""The report: one HTML file that holds its own data, style and scripts, and opens without a network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from kairosfl.report import parts
from kairosfl.report.checked import Say, silent
from kairosfl.report.figures import figures
from kairosfl.report.payload import payload
from kairosfl.report.pictures import SECTIONS, HeatMap, LeftOut, Picture, counted, letter
from kairosfl.report.read import Group, Study, differing, read_study
from kairosfl.report.tables import Pair, Row, by_problem, chosen_target, megabytes, paired_tests, results, said
from kairosfl.runs.files import write

_SCRIPTS = ("chart.js", "lines.js", "heat.js", "page.js")
DETAILED = 12
COMPARED = 12
SKEWED = ("dirichlet", "client_dirichlet", "mixed", "quantity")  # partitions that use data.alpha
SUMMARISED = 3
_HINT = "Drag across a chart to zoom, double-click to reset; charts over rounds zoom together."
_TEST = (
    "Difference{points} of the {score.words} over the final 10 % of rounds{better}; p of a paired t-test over the "
    "seeds that both have finished, Holm-corrected for all pairs. With few seeds the test assumes normally distributed "
    "differences."
)


def write_report(dirs: Sequence[Path], out: Path, *, target: float | None = None, say: Say = silent) -> Path:
    """Read run folders, or folders of them, and write one page about all; `say` is called with what is damaged."""
    out, study = Path(out), read_study(dirs)
    write(out, page(study, target=target))
    for sentence in study.all_damaged():
        say(sentence)
    return out


def page(study: Study, *, target: float | None = None, mark: str = "") -> str:
    """The page as text. With a mark it is a live page, which asks its server for a version newer than this mark."""
    groups = study.groups
    target = chosen_target(groups, target)
    rows, pairs = results(groups, target), paired_tests(groups)
    pictures, left = _within_bounds(*figures(groups), len(groups))
    sections = "".join(_section(name, groups, rows, pairs, pictures, left, target) for name in SECTIONS)
    data = json.dumps(payload(groups, pictures, target), separators=(",", ":"), allow_nan=False)
    body = f"""<div id="page">
<header>
<p class="over">Kairos report{_state(groups, study.waiting, live=bool(mark))}</p>
<h1>{escape(_title(groups))}</h1>
<p class="facts">{escape(_facts(groups))}</p>
<p class="verdict">{verdict(rows, pairs)}</p>
{parts.sentences("damaged", map(escape, study.all_damaged()))}</header>
<div class="bar"><div><div class="chips">{parts.chips(groups)}</div>{_controls(groups)}</div></div>
<main>
{sections}
<section id="repeat"><h2>Repeat it</h2>
{parts.repeat(groups)}
</section>
</main>
<footer>{_HINT} {_footer(groups)}</footer>
</div>"""
    return shell(_title(groups), body, data, mark)


def _within_bounds(pictures: list[Picture], left: list[LeftOut], groups: int) -> tuple[list[Picture], list[LeftOut]]:
    """Heat maps are large, so a page about many groups has those of the first ones only."""
    kept = [each for each in pictures if not isinstance(each, HeatMap) or each.group < DETAILED]
    why = f"a page has heat maps of its first {DETAILED} groups; make a report of this one alone"
    more = [LeftOut("inside", "Heat maps", why, number) for number in range(DETAILED, groups)]
    return kept, [each for each in left if each.group is None or each.group < DETAILED] + more


def shell(title: str, body: str, data: str, mark: str = "") -> str:
    """A whole document around a body; nothing is loaded from anywhere else, and the policy says so."""
    scripts = "\n".join(_asset(name) for name in _SCRIPTS)
    connect = "connect-src 'self'" if mark else "connect-src 'none'"
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; {connect}"
    live = f' data-mark="{escape(mark)}"' if mark else ""
    return f"""<!doctype html>
<html lang="en"{live}>
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{escape(title)} · Kairos report</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
{body}
<div id="tip" role="status" hidden></div>
<noscript><p style="padding:24px">The tables are here; the charts need JavaScript.</p></noscript>
<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>
<script>
{scripts}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("kairosfl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _section(
    name: str,
    groups: Sequence[Group],
    rows: Sequence[Row],
    pairs: Sequence[Pair],
    pictures: Sequence[Picture],
    left: Sequence[LeftOut],
    target: float,
) -> str:
    mine = [each for each in pictures if each.section == name]
    drawn = "".join(map(parts.figure, mine))
    shown = [each for each in mine if not isinstance(each, HeatMap)]
    across = 2 if name == "inside" or len(shown) in (1, 2, 4) else 3
    content = f'<div class="charts" style="--across:{across}">{drawn}</div>' if mine else ""
    lines = parts.missing([each for each in left if each.section == name])
    if name == "result":
        return f'<section id="result">{content}{lines}{_results(groups, rows, pairs, target)}</section>'
    pick = _picker(groups) if name == "inside" else ""
    return f'<section id="{name}"><h2>{SECTIONS[name]}{pick}</h2>{content}{lines}</section>'


def _results(groups: Sequence[Group], rows: Sequence[Row], pairs: Sequence[Pair], target: float) -> str:
    score = rows[0].score
    bounds = 'min="0" max="100" step="0.5"' if score.percent else 'step="any"'
    value = f'value="{score.scale * target:g}">{score.unit}'
    field = f'<label>target <input id="target" type="number" {bounds} {value}</label>' if math.isfinite(target) else ""
    several = max(len(group.runs) for group in groups) > 1
    what = "Mean ± standard deviation over seeds" if several else "One seed each"
    table = parts.results_table(rows) + parts.notes(rows)
    shown = score.words + " in per cent" * score.percent + f" ({score.direction})" * (not score.higher)
    out = f'<div class="together"><h3>Table</h3><p class="about">{what}; {shown}. {field}</p>{table}</div>'
    better = "" if score.higher else ", above zero where the row is better, that is, lower"
    test = _TEST.format(score=score, points=" in points" * score.percent, better=better)
    about = f'<p class="about">{escape(test)}</p>'
    for problem, mine in by_problem(rows).items():
        labels = {groups[i].label for i in mine}
        if any(pair.first in labels for pair in pairs):
            finished = [i for i in mine if rows[i].finished]
            ranked = sorted(finished, key=lambda i: -score.sign * rows[i].last_tenth.mean)[:COMPARED]
            tests = parts.tests_table(groups, pairs, sorted(ranked))
            if len(finished) > COMPARED:
                tests += f'<p class="missing">Of the {COMPARED} best; the exported table has all pairs.</p>'
            where = f": {escape(problem)}" if problem else ""
            clear = '<p class="missing">Shaded: p &lt; 0.05.</p>' if parts.CLEAR in tests else ""
            out += f'<div class="together"><h3>Row against column{where}</h3>{about}{tests}{clear}</div>'
            about = ""
    return out


def _picker(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return ""
    options = "".join(
        f'<option value="{i}">{letter(i)}  {escape(group.label)}</option>' for i, group in enumerate(groups)
    )
    return f'<select id="inside-select" aria-label="which run">{options}</select>'


def _controls(groups: Sequence[Group]) -> str:
    windows = {1: "none", 5: "5 points", 11: "11 points", 25: "25 points"}
    smooth = "".join(f'<option value="{size}">{text}</option>' for size, text in windows.items())
    spread = '<option value="band">± standard deviation</option><option value="seeds">every seed</option>'
    spread += '<option value="mean">mean only</option>'
    several = max(len(group.runs) for group in groups) > 1
    seeds = f'<label>seeds <select id="spread">{spread}</select></label>' if several else ""
    return (
        f'<div class="controls">{seeds}<label title="mean of neighbouring points">smooth '
        f'<select id="smooth">{smooth}</select></label>'
        '<button type="button" id="theme" title="light or dark" aria-label="light or dark">◐</button></div>'
    )


def verdict(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The result in one or two sentences on each problem, and how far it can be trusted."""
    scored = [row for row in rows if row.last_tenth.count]
    if not scored:
        return "No round has been evaluated yet."
    problems = [[scored[i] for i in mine] for mine in by_problem(scored).values()]
    more = " The table has the results on other data." if len(problems) > SUMMARISED else ""
    return " ".join(_summary(each, pairs) for each in problems[:SUMMARISED]) + more


def _summary(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    finished = [row for row in rows if row.finished]
    if len(rows) == 1 or len(finished) == len(rows):
        return _compared(rows, pairs)
    if not finished:
        return f"None of {len(rows)} algorithms has finished, so they are not compared; the table shows their progress."
    left = counted(len(rows) - len(finished), "unfinished algorithm")
    return f"{_compared(finished, pairs)} Not compared: {left}."


def _compared(rows: Sequence[Row], pairs: Sequence[Pair]) -> str:
    """The best of these against the second best."""
    score = rows[0].score
    order = sorted(rows, key=lambda row: -score.sign * row.last_tenth.mean)
    best = order[0]
    so_far = "So far " if any(row.going for row in rows) else ""
    named = f"{escape(score.with_article)} of " if score.stated else ""
    reached = f"{named}<b>{escape(best.last_tenth.of_score(score))}{score.unit}</b>"
    text = f"{so_far}<b>{escape(best.label)}</b> reaches {reached} in the final 10 % of its rounds"
    if len(order) == 1:
        peak = f"its best round has {best.best.of_score(score)}{score.unit}"
        epochs = "1 client epoch" if best.epochs.text(0) == "1" else f"{best.epochs.text(0)} client epochs"
        return f"{text}; {peak}, for {megabytes(best.bytes)} MB and {epochs}."
    second = order[1]
    both = {best.label, second.label}
    test = next((pair for pair in pairs if {pair.first, pair.second} == both), None)
    gap = score.scale * abs(best.last_tenth.mean - second.last_tenth.mean)
    digits = score.digits(best.last_tenth.mean)
    apart = f"{gap:.{digits}f}{' points' * score.percent} {'above' if score.higher else 'below'}"
    text += f", {apart} " if gap >= 0.5 * 10**-digits else ", level with "
    text += f"<b>{escape(second.label)}</b>"
    if test is None:
        return f"{text}. The two have no finished seed in common, so a paired test is not possible."
    if math.isnan(test.p):
        return f"{text}. They share only one seed: the difference may be due to chance."
    p = f"{said(test.adjusted)} over {len(test.seeds)} shared seeds"
    if test.adjusted < 0.05:
        return f"{text} (paired test, {escape(p)})."
    return f"{text}; the difference is not statistically significant (paired test, {escape(p)})."


def _title(groups: Sequence[Group]) -> str:
    """What all runs have in common: the data and the model."""
    runs = [group.runs[0] for group in groups]
    names = []
    for name in ("data.name", "model.name"):
        found = list(dict.fromkeys(str(run.settings[name]) for run in runs if name in run.settings))
        names.append(", ".join(found))
    return " · ".join(filter(None, names)) or runs[0].path.name


def _facts(groups: Sequence[Group]) -> str:
    runs = [run for group in groups for run in group.runs]
    known = runs[0].about.get("clients")  # the setting may be 0, for all clients
    settings = {**runs[0].settings, **({"data.clients": known} if known else {})}
    apart = set(differing(runs))
    facts = []
    for name, text in (
        ("data.clients", "{} client(s)"),
        ("train.cohort", "{} a round"),
        ("train.rounds", "{} round(s)"),
        ("data.partition", "{} partition"),
        ("data.alpha", "α = {}"),
        ("train.epochs", "epochs {}"),
        ("train.lr", "learning rate {}"),
    ):
        used = name != "data.alpha" or settings.get("data.partition") in SKEWED
        if name in settings and name not in apart and used:
            facts.append(text.format(settings[name]).replace("(s)", "" if settings[name] == 1 else "s"))
    seeds = sorted({run.seed for run in runs})
    named = ", ".join(map(str, seeds[:8])) + ("…" if len(seeds) > 8 else "")
    facts.append(counted(len(runs), "run"))
    facts.append(f"seeds {named}" if len(seeds) > 1 else f"seed {named}")
    return " · ".join(facts)


def _state(groups: Sequence[Group], to_come: int, live: bool) -> str:
    runs = [run for group in groups for run in group.runs]
    asked = len(runs) + to_come
    reasons, done = [run.stopped for run in runs if run.stopped], sum(run.done for run in runs)
    of = f" of {asked} runs" if asked > 1 else ""
    text = f"{len(reasons) if of else ''}{of} stopped: {escape(reasons[0])}".strip() if reasons else ""
    going = asked > done + len(reasons)
    if going:
        rounds = sum(run.rounds for run in runs)
        planned = sum(run.planned for run in runs) + to_come * max(run.planned for run in runs)
        so_far = f"{done}{of} finished" if of else "unfinished"
        text = "; ".join(filter(None, (f"{so_far}, {rounds:,} of {counted(planned, 'round')}", text)))
    return f" · <span{' id=live' if live and going else ''}>{text}</span>" if text else ""


def _footer(groups: Sequence[Group]) -> str:
    versions = sorted({str(run.about["version"]) for group in groups for run in group.runs if run.about.get("version")})
    return escape(f"Made by kairosfl {', '.join(versions)}." if versions else "Made by kairosfl.")
