"""The report: one HTML file that holds its own data, style and scripts, and opens without a
network.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from kairosfl.report import parts
from kairosfl.report.checked import Say, silent
from kairosfl.report.figures import figures
from kairosfl.report.payload import payload
from kairosfl.report.pictures import SECTIONS, HeatMap, LeftOut, Picture, counted, letter
from kairosfl.report.read import Group, Study, differing, read_study
from kairosfl.report.sweep import crossed, parameters, told_apart
from kairosfl.report.tables import Row, chosen_target, paired_tests, results, scored
from kairosfl.report.verdict import verdict
from kairosfl.runs.files import write
from kairosfl.runs.score import Score

_LIBRARY = "vendor/plot-0.6.17"
_SCRIPTS = ("chart.js", "lines.js", "heat.js", "tables.js", "sweep.js", "page.js")
DETAILED = 12
# Evaluated rounds above which noise hides the curves: they are smoothed initially, with the raw
# ones faintly behind.
NOISY = 150
SKEWED = (
    "dirichlet",
    "client_dirichlet",
    "disjoint_dirichlet",
    "mixed",
    "quantity",
)  # partitions that use data.alpha
_HINT = "Drag across a chart to zoom, double-click to reset; charts over rounds zoom together."
_TEST = (
    "Compared with {pick}: difference{points} of the {score.words} over the final 10 % of rounds{better}, on the seeds "
    "that both have finished without diverging, with the 95 % interval of a paired t-test; p with Holm's correction "
    "for the number of comparisons, that of the two best included. Both need two seeds, and with few they assume "
    "normally distributed differences."
)


def write_report(
    dirs: Sequence[Path],
    out: Path,
    *,
    target: float | None = None,
    baseline: str | None = None,
    say: Say = silent,
) -> Path:
    """Read run folders, or folders of them, and write one page about all; `say` is called with what
    is damaged.
    """
    out, study = Path(out), read_study(dirs)
    write(out, page(study, target=target, baseline=baseline))
    for sentence in study.all_damaged():
        say(sentence)
    return out


def page(
    study: Study, *, target: float | None = None, baseline: str | None = None, mark: str = ""
) -> str:
    """The page as text. With a mark it is a live page, which asks its server for a version newer
    than this mark.
    """
    groups = study.groups
    goal = chosen_target(groups, target, baseline)
    rows, pairs = results(groups, goal, baseline), paired_tests(groups, baseline)
    pictures, left = _within_bounds(*figures(groups), len(groups))
    varied = parameters(groups)
    sections = "".join(_section(name, groups, pictures, left) for name in list(SECTIONS)[1:])
    data = payload(groups, rows, pictures, goal, given=target is not None, varied=varied)
    body = f"""<div id="page">
<header>
<p class="over">Kairos report{_state(groups, study.waiting, live=bool(mark))}</p>
<h1>{escape(_title(groups))}</h1>
<p class="facts">{escape(_facts(groups))}</p>
<p class="verdict">{verdict(rows, pairs)}</p>
{parts.sentences("damaged", map(escape, study.all_damaged()))}</header>
<div class="bar"><div><div class="chips">{parts.chips(groups)}</div>{_controls(groups, varied)}</div></div>
<main>
{_result(groups, rows, pictures, left, data, varied)}
{sections}
<section id="repeat"><h2>Repeat it</h2>
{parts.repeat(groups)}
</section>
</main>
<footer>{_HINT} {_footer(groups)}</footer>
</div>"""
    return shell(
        _title(groups), body, json.dumps(data, separators=(",", ":"), allow_nan=False), mark
    )


def _within_bounds(
    pictures: list[Picture], left: list[LeftOut], groups: int
) -> tuple[list[Picture], list[LeftOut]]:
    """Heat maps are large, so a page about many groups has those of the first ones only."""
    kept = [each for each in pictures if not isinstance(each, HeatMap) or each.group < DETAILED]
    why = f"a page has heat maps of its first {DETAILED} groups; make a report of this one alone"
    more = [LeftOut("inside", "Heat maps", why, number) for number in range(DETAILED, groups)]
    return kept, [each for each in left if each.group is None or each.group < DETAILED] + more


def shell(title: str, body: str, data: str, mark: str = "") -> str:
    """A whole document around a body; nothing is loaded from anywhere else, and the policy says so."""
    library = f"/*\n{_asset(f'{_LIBRARY}.LICENSE.txt')}*/\n{_asset(f'{_LIBRARY}.min.js')}"
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
<style id="colours"></style>
<style id="columns"></style>
</head>
<body>
{body}
<div id="tip" role="status" hidden></div>
<noscript><p style="padding:24px">The tables are here; the charts need JavaScript.</p></noscript>
<script type="application/json" id="data">{data.replace("<", chr(92) + "u003c")}</script>
<script>
{library}</script>
<script>
{scripts}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("kairosfl.report").joinpath("assets", name).read_text(encoding="utf-8")


def _section(
    name: str, groups: Sequence[Group], pictures: Sequence[Picture], left: Sequence[LeftOut]
) -> str:
    pick = _picker(groups) if name == "inside" else ""
    said = parts.detectors(groups[:DETAILED]) if name == "signals" else ""
    return f'<section id="{name}"><h2>{SECTIONS[name]}{pick}</h2>{said}{_charts(name, pictures, left)}</section>'


def _charts(name: str, pictures: Sequence[Picture], left: Sequence[LeftOut]) -> str:
    mine = [each for each in pictures if each.section == name]
    shown = [each for each in mine if not isinstance(each, HeatMap)]
    across = 2 if name == "inside" or len(shown) in (1, 2, 4) else 3
    drawn = "".join(map(parts.figure, mine))
    content = f'<div class="charts" style="--across:{across}">{drawn}</div>' if mine else ""
    return content + parts.missing([each for each in left if each.section == name])


def _result(
    groups: Sequence[Group],
    rows: Sequence[Row],
    pictures: Sequence[Picture],
    left: Sequence[LeftOut],
    data: Mapping[str, Any],
    varied: Mapping[str, Sequence[str]],
) -> str:
    """The main metric, the table with the comparison, what two parameters do, and every run."""
    score = rows[0].score
    several = max(len(group.runs) for group in groups) > 1
    what = "Mean ± standard deviation over seeds" if several else "One seed each"
    shown = (
        score.words + " in per cent" * score.percent + f" ({score.direction})" * (not score.higher)
    )
    compared = data["versus"]
    possible = any(
        cell != parts.UNCOMPARED and i != int(b)
        for b in compared
        for i, cell in compared[b].items()
    )
    versus = (
        {i: compared[str(b)][i] for b in data["baselines"] for i in compared[str(b)]}
        if possible
        else {}
    )
    about = ""
    if possible:
        pick = _baseline_picker(groups, data)
        better = "" if score.higher else ", above zero where a row is better, that is, lower"
        about = _TEST.format(
            pick=pick, score=score, points=" in points" * score.percent, better=better
        )
        about = f'<p class="about">{about}{_clear(versus, compared)}</p>'
    table = parts.results_table(rows, varied, versus) + parts.notes(rows)
    runs = sum(len(group.runs) for group in groups)
    every = f'<details id="every"><summary>All {counted(runs, "run")}</summary>{parts.runs_table(groups)}</details>'
    return f"""<section id="result">{_charts("result", pictures, left)}
<div class="together"><h3>Table</h3><p class="about">{what}; {shown}. {_goal(score, data)}</p>{about}
{_finder(groups, parts.column_boxes(rows, varied, possible))}{table}</div>
{_grid(groups, varied)}{every if runs > 1 else ""}</section>"""


def _clear(
    versus: Mapping[int, tuple[str, str]], every: Mapping[str, Mapping[int, tuple[str, str]]]
) -> str:
    """What shaded p-values are, if there are any, with this baseline or another that can be chosen."""
    if not any(parts.CLEAR in p for each in every.values() for _, p in each.values()):
        return ""
    hidden = "" if any(parts.CLEAR in p for _, p in versus.values()) else " hidden"
    return f' <span id="clear"{hidden}>Shaded: p &lt; {parts.SIGNIFICANT}.</span>'


def _goal(score: Score, data: Mapping[str, Any]) -> str:
    """The field of the target, and in words where it comes from."""
    bounds = 'min="0" max="100" step="0.5"' if score.percent else 'step="any"'
    value = "" if data["target"] is None else f"{score.scale * data['target']:g}"
    field = f'<label>Target <input id="target" type="number" {bounds} value="{value}">{score.unit}</label>'
    return f'{field}: <span id="goal-words">{escape(data["words"]["target"])}</span>.'


def _baseline_picker(groups: Sequence[Group], data: Mapping[str, Any]) -> str:
    """Those that others can be compared with."""
    chosen = data["baselines"][0]
    options = "".join(
        f'<option value="{i}"{" selected" if int(i) == chosen else ""}>{letter(int(i))}  '
        f"{escape(groups[int(i)].label)}</option>"
        for i in data["versus"]
    )
    return f'<select id="baseline" aria-label="baseline">{options}</select>'


def _finder(groups: Sequence[Group], boxes: str) -> str:
    """The filter and the choice of columns of the table."""
    words = "filter" if len(groups) > 1 else ""
    title = "Show only groups whose name or parameters contain all of these words, such as: fedprox lr=0.1"
    search = f'<input id="filter" type="search" placeholder="{words}" title="{title}" aria-label="{title}">'
    return (
        f'<div class="finder">{search if words else ""}<span id="found"></span>'
        f'<details id="choose"><summary>columns</summary><div>{boxes}</div></details>'
        '<button type="button" class="save-table" data-table="results">CSV</button></div>'
    )


def _grid(groups: Sequence[Group], varied: Mapping[str, Sequence[str]]) -> str:
    """The figure of two parameters, if there are two."""
    axes = crossed(varied)
    if axes is None:
        return ""
    score = groups[0].score
    pick = "".join(
        f'<label>{axis} <select id="grid-{axis}">{_options(varied, name)}</select></label>'
        for axis, name in zip(("across", "up"), axes, strict=True)
    )
    problems = list(dict.fromkeys(group.problem for group in groups))
    if len(problems) > 1:
        data = "".join(
            f'<option value="{escape(each)}">{escape(each)}</option>' for each in problems
        )
        pick += f'<label>data <select id="grid-data">{data}</select></label>'
    title, note = (
        f"{score.title} by two parameters",
        f"Final 10 % of rounds; the {score.best} of the groups in a cell.",
    )
    return (
        f'<div class="controls picks">{pick}</div><div class="charts" style="--across:1"><figure id="fig-grid" '
        f'class="wide" data-title="{escape(title)}"><figcaption><b>{escape(title)}</b>'
        f'<span class="about">{escape(note)}</span></figcaption><div class="plot"></div></figure></div>'
    )


def _options(names: Iterable[str], chosen: str = "") -> str:
    return "".join(
        f'<option value="{escape(name)}"{" selected" if name == chosen else ""}>{escape(name)}</option>'
        for name in names
    )


def _picker(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return ""
    options = "".join(
        f'<option value="{i}">{letter(i)}  {escape(group.label)}</option>'
        for i, group in enumerate(groups)
    )
    return f'<select id="inside-select" aria-label="which run">{options}</select>'


def _controls(groups: Sequence[Group], varied: Mapping[str, Sequence[str]]) -> str:
    windows = {1: "none", 5: "5 points", 11: "11 points", 25: "25 points"}
    noisy = max(len(scored(run)[0]) for group in groups for run in group.runs) > NOISY
    chosen = 11 if noisy else 1
    smooth = "".join(
        f'<option value="{size}"{" selected" if size == chosen else ""}>{text}</option>'
        for size, text in windows.items()
    )
    spread = '<option value="band">± standard deviation</option><option value="seeds">every seed</option>'
    spread += '<option value="mean">mean only</option>'
    several = max(len(group.runs) for group in groups) > 1
    seeds = f'<label>seeds <select id="spread">{spread}</select></label>' if several else ""
    by = ""
    if len(groups) > 2 and varied:
        colour, facet = (_options(varied, name) for name in told_apart(varied))
        by = f'<label>colour by <select id="colour"><option value="">group</option>{colour}</select></label>'
        by += f'<label>facet by <select id="facet"><option value="">none</option>{facet}</select></label>'
    return (
        f'<div class="controls">{by}{seeds}<label title="mean of neighbouring points">smooth '
        f'<select id="smooth">{smooth}</select></label>'
        '<input type="checkbox" id="theme" title="light or dark" aria-label="light or dark"></div>'
    )


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
    known = {key: runs[0].about[key] for key in ("clients", "partition") if key in runs[0].about}
    settings = {
        **runs[0].settings,
        **{f"data.{key}": value for key, value in known.items()},
    }  # what they came to
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
            given = name == "data.partition" and not settings[name]
            told = "clients given" if given else text.format(settings[name])
            facts.append(told.replace("(s)", "" if settings[name] == 1 else "s"))
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
    text = (
        f"{len(reasons) if of else ''}{of} stopped: {escape(reasons[0])}".strip() if reasons else ""
    )
    going = asked > done + len(reasons)
    if going:
        rounds = sum(run.rounds for run in runs)
        planned = sum(run.planned for run in runs) + to_come * max(run.planned for run in runs)
        so_far = f"{done}{of} finished" if of else "unfinished"
        text = "; ".join(
            filter(None, (f"{so_far}, {rounds:,} of {counted(planned, 'round')}", text))
        )
    return f" · <span{' id=live' if live and going else ''}>{text}</span>" if text else ""


def _footer(groups: Sequence[Group]) -> str:
    versions = sorted(
        {
            str(run.about["version"])
            for group in groups
            for run in group.runs
            if run.about.get("version")
        }
    )
    return escape(f"Made by kairosfl {', '.join(versions)}." if versions else "Made by kairosfl.")
