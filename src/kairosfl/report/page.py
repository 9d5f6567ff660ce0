"""The report: one HTML file with its data, style and scripts, which opens without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from kairosfl.report import parts
from kairosfl.report.checked import Say, silent
from kairosfl.report.figures import figures
from kairosfl.report.html import asset, document, option, options, select
from kairosfl.report.payload import payload
from kairosfl.report.pictures import SECTIONS, HeatMap, LeftOut, Picture, counted, letter
from kairosfl.report.read import Group, Study, all_runs, differing, read_study
from kairosfl.report.sweep import crossed, parameters, told_apart
from kairosfl.report.tables import Row, chosen_target, paired_tests, results, scored
from kairosfl.report.verdict import verdict
from kairosfl.runs.files import write
from kairosfl.runs.score import Score

_LIBRARY = "vendor/plot-0.6.17"
_SCRIPTS = ("chart.js", "lines.js", "heat.js", "tables.js", "sweep.js", "page.js")
_POLICY = "style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:; connect-src "
DETAILED = 12
# Evaluated rounds above which noise hides the curves: they are smoothed initially, with the raw
# ones faintly behind.
NOISY = 150
# Partitions that use data.alpha.
SKEWED = ("dirichlet", "client_dirichlet", "disjoint_dirichlet", "mixed", "quantity")
_HINT = "Drag across a chart to zoom, double-click to reset; charts over rounds zoom together."
_TEST = (
    "Compared with {pick}: difference{points} of the {score.words} over the final 10 % of rounds"
    "{better}, on the seeds that both have finished without diverging, with the 95 % interval of a "
    "paired t-test; p with Holm's correction for the number of comparisons, that of the two best "
    "included. Both need two seeds, and with few they assume normally distributed differences."
)
# What all runs have in common, below the title.
_FACTS = {
    "data.clients": "{} client(s)",
    "train.cohort": "{} a round",
    "train.rounds": "{} round(s)",
    "data.partition": "{} partition",
    "data.alpha": "α = {}",
    "train.epochs": "epochs {}",
    "train.lr": "learning rate {}",
}


@dataclass(frozen=True)
class _Contents:
    """What a page is about; its parts are made of this alone."""

    groups: Sequence[Group]
    rows: Sequence[Row]
    pictures: Sequence[Picture]
    left_out: Sequence[LeftOut]
    varied: Mapping[str, Sequence[str]]  # parameters of a sweep, with their value in every group
    data: Mapping[str, Any]  # what the scripts read

    @property
    def score(self) -> Score:
        """The main metric."""
        return self.groups[0].score

    @property
    def several_seeds(self) -> bool:
        """Whether any group has several runs."""
        return max(len(group.runs) for group in self.groups) > 1


def write_report(
    dirs: Sequence[Path],
    out: Path,
    *,
    target: float | None = None,
    baseline: str | None = None,
    say: Say = silent,
) -> Path:
    """Read run folders, or folders of them, and write one page about all.

    Args:
        dirs: The folders.
        out: The file.
        target: Of the main metric; by default what the baseline reaches in the end.
        baseline: What others are compared with: a group by its label, its letter or its algorithm.
        say: Called with a sentence for everything that is damaged.
    """
    study = read_study(dirs)
    write(Path(out), page(study, target=target, baseline=baseline))
    for sentence in study.all_damaged():
        say(sentence)
    return Path(out)


def page(
    study: Study, *, target: float | None = None, baseline: str | None = None, mark: str = ""
) -> str:
    """The page as text.

    With a mark it is a live page, which asks its server for a version newer than this mark.
    """
    groups = study.groups
    goal = chosen_target(groups, target, baseline)
    rows = results(groups, goal, baseline)
    pairs = paired_tests(groups, baseline)
    pictures, left_out = _within_bounds(*figures(groups), len(groups))
    varied = parameters(groups)
    data = payload(groups, rows, pictures, goal, given=target is not None, varied=varied)
    contents = _Contents(groups, rows, pictures, left_out, varied, data)

    sections = "".join(_section(name, contents) for name in SECTIONS if name != "result")
    body = f"""<div id="page">
<header>
<p class="over">Kairos report{_state(groups, study.waiting, live=bool(mark))}</p>
<h1>{escape(_title(groups))}</h1>
<p class="facts">{escape(_facts(groups))}</p>
<p class="verdict">{verdict(rows, pairs)}</p>
{parts.sentences("damaged", map(escape, study.all_damaged()))}</header>
<div class="bar"><div><div class="chips">{parts.chips(groups)}</div>{_controls(contents)}</div></div>
<main>
{_result(contents)}
{sections}
<section id="repeat"><h2>Repeat it</h2>
{parts.repeat(groups)}
</section>
</main>
<footer>{_HINT} {_footer(groups)}</footer>
</div>"""
    data_text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return shell(_title(groups), body, data_text, mark)


def _within_bounds(
    pictures: list[Picture], left_out: list[LeftOut], groups: int
) -> tuple[list[Picture], list[LeftOut]]:
    """Heat maps are large: a page about many groups has those of the first ones only."""
    drawn = []
    for picture in pictures:
        if not isinstance(picture, HeatMap) or picture.group < DETAILED:
            drawn.append(picture)
    missing = [one for one in left_out if one.group is None or one.group < DETAILED]
    why = f"a page has heat maps of its first {DETAILED} groups; make a report of this one alone"
    for number in range(DETAILED, groups):
        missing.append(LeftOut("inside", "Heat maps", why, number))
    return drawn, missing


def shell(title: str, body: str, data: str, mark: str = "") -> str:
    """The document around a body: with the scripts, and the data that they read."""
    library = f"/*\n{asset(f'{_LIBRARY}.LICENSE.txt')}*/\n{asset(f'{_LIBRARY}.min.js')}"
    scripts = "\n".join(map(asset, _SCRIPTS))
    without_tags = data.replace("<", "\\u003c")
    scripted = f"""{body}
<div id="tip" role="status" hidden></div>
<noscript><p style="padding:24px">The tables are here; the charts need JavaScript.</p></noscript>
<script type="application/json" id="data">{without_tags}</script>
<script>
{library}</script>
<script>
{scripts}</script>"""
    return document(
        title,
        scripted,
        policy=_POLICY + ("'self'" if mark else "'none'"),
        head='<style id="colours"></style>\n<style id="columns"></style>\n',
        attributes=f' data-mark="{escape(mark)}"' if mark else "",
    )


# --- sections -------------------------------------------------------------------------------------


def _section(name: str, contents: _Contents) -> str:
    pick = _picker(contents.groups) if name == "inside" else ""
    about = parts.detectors(contents.groups[:DETAILED]) if name == "signals" else ""
    heading = f"<h2>{SECTIONS[name]}{pick}</h2>"
    return f'<section id="{name}">{heading}{about}{_charts(name, contents)}</section>'


def _charts(name: str, contents: _Contents) -> str:
    pictures = [picture for picture in contents.pictures if picture.section == name]
    missing = parts.missing([one for one in contents.left_out if one.section == name])
    if not pictures:
        return missing
    lines = sum(not isinstance(picture, HeatMap) for picture in pictures)
    across = 2 if name == "inside" or lines in (1, 2, 4) else 3
    drawn = "".join(map(parts.figure, pictures))
    return f'<div class="charts" style="--across:{across}">{drawn}</div>{missing}'


def _result(contents: _Contents) -> str:
    """The main metric, the table with the comparison, what two parameters do, and every run."""
    groups, rows, score = contents.groups, contents.rows, contents.score
    spread = "Mean ± standard deviation over seeds" if contents.several_seeds else "One seed each"
    metric = score.words
    if score.percent:
        metric += " in per cent"
    if not score.higher:
        metric += f" ({score.direction})"

    versus, about = _comparison(contents)
    table = parts.results_table(rows, contents.varied, versus) + parts.notes(rows)
    boxes = parts.column_boxes(rows, contents.varied, bool(versus))
    goal = _goal(score, contents.data)
    return f"""<section id="result">{_charts("result", contents)}
<div class="together"><h3>Table</h3><p class="about">{spread}; {metric}. {goal}</p>{about}
{_finder(groups, boxes)}{table}</div>
{_grid(contents)}{_every_run(groups)}</section>"""


def _every_run(groups: Sequence[Group]) -> str:
    """The table of all runs, if there are several."""
    runs = len(all_runs(groups))
    if runs == 1:
        return ""
    summary = f"<summary>All {counted(runs, 'run')}</summary>"
    return f'<details id="every">{summary}{parts.runs_table(groups)}</details>'


def _comparison(contents: _Contents) -> tuple[dict[int, tuple[str, str]], str]:
    """The cells of each group against its baseline, and what they mean; empty if none has any."""
    score, compared = contents.score, contents.data["versus"]
    if not any(map(_compares, compared, compared.values())):
        return {}, ""
    versus: dict[int, tuple[str, str]] = {}
    for baseline in contents.data["baselines"]:
        versus |= compared[str(baseline)]
    words = _TEST.format(
        pick=_baseline_picker(contents),
        score=score,
        points=" in points" if score.percent else "",
        better="" if score.higher else ", above zero where a row is better, that is, lower",
    )
    return versus, f'<p class="about">{words}{_clear(versus, compared)}</p>'


def _compares(baseline: str, cells: Mapping[int, tuple[str, str]]) -> bool:
    """Whether any group but the baseline itself has been compared with it."""
    others = (cell for number, cell in cells.items() if number != int(baseline))
    return any(cell != parts.UNCOMPARED for cell in others)


def _clear(
    versus: Mapping[int, tuple[str, str]], compared: Mapping[str, Mapping[int, tuple[str, str]]]
) -> str:
    """What shaded p-values are, if this baseline or another that can be chosen has any."""
    if not any(map(_has_clear, compared.values())):
        return ""
    hidden = "" if _has_clear(versus) else " hidden"
    return f' <span id="clear"{hidden}>Shaded: p &lt; {parts.SIGNIFICANT}.</span>'


def _has_clear(cells: Mapping[int, tuple[str, str]]) -> bool:
    return any(parts.CLEAR in p for _, p in cells.values())


def _grid(contents: _Contents) -> str:
    """The figure of two parameters, if there are two."""
    axes = crossed(contents.varied)
    if axes is None:
        return ""
    pick = ""
    for direction, chosen in zip(("across", "up"), axes, strict=True):
        menu = select(f"grid-{direction}", options(contents.varied, chosen))
        pick += f"<label>{direction} {menu}</label>"
    problems = dict.fromkeys(group.problem for group in contents.groups)
    if len(problems) > 1:
        pick += f"<label>data {select('grid-data', options(problems))}</label>"

    score = contents.score
    title = escape(f"{score.title} by two parameters")
    note = escape(f"Final 10 % of rounds; the {score.best} of the groups in a cell.")
    caption = f'<figcaption><b>{title}</b><span class="about">{note}</span></figcaption>'
    return (
        f'<div class="controls picks">{pick}</div>'
        f'<div class="charts" style="--across:1"><figure id="fig-grid" class="wide" '
        f'data-title="{title}">{caption}<div class="plot"></div></figure></div>'
    )


# --- what can be chosen ---------------------------------------------------------------------------


def _goal(score: Score, data: Mapping[str, Any]) -> str:
    """The field of the target, and in words where it comes from."""
    bounds = 'min="0" max="100" step="0.5"' if score.percent else 'step="any"'
    value = "" if data["target"] is None else f"{score.scale * data['target']:g}"
    field = f'<input id="target" type="number" {bounds} value="{value}">'
    words = f'<span id="goal-words">{escape(data["words"]["target"])}</span>'
    return f"<label>Target {field}{score.unit}</label>: {words}."


def _baseline_picker(contents: _Contents) -> str:
    """Those that others can be compared with."""
    chosen = contents.data["baselines"][0]
    choices = ""
    for number in map(int, contents.data["versus"]):
        choices += _group_option(number, contents.groups[number], selected=number == chosen)
    return select("baseline", choices, about="baseline")


def _picker(groups: Sequence[Group]) -> str:
    """Which group is looked into, if there are several."""
    if len(groups) == 1:
        return ""
    choices = "".join(_group_option(number, group) for number, group in enumerate(groups))
    return select("inside-select", choices, about="which run")


def _group_option(number: int, group: Group, *, selected: bool = False) -> str:
    return option(str(number), f"{letter(number)}  {group.label}", selected=selected)


def _finder(groups: Sequence[Group], boxes: str) -> str:
    """The filter, where there are several groups, and the choice of columns of the table."""
    search = ""
    if len(groups) > 1:
        title = (
            "Show only groups whose name or parameters contain all of these words, such as: "
            "fedprox lr=0.1"
        )
        search = (
            '<input id="filter" type="search" placeholder="filter" '
            f'title="{title}" aria-label="{title}">'
        )
    return (
        f'<div class="finder">{search}<span id="found"></span>'
        f'<details id="choose"><summary>columns</summary><div>{boxes}</div></details>'
        '<button type="button" class="save-table" data-table="results">CSV</button></div>'
    )


def _controls(contents: _Contents) -> str:
    """What holds for all charts: colours, seeds, smoothing and the theme."""
    theme = '<input type="checkbox" id="theme" title="light or dark" aria-label="light or dark">'
    return (
        f'<div class="controls">{_colour_controls(contents)}{_seed_control(contents)}'
        f"{_smoothing(contents)}{theme}</div>"
    )


def _colour_controls(contents: _Contents) -> str:
    if len(contents.groups) <= 2 or not contents.varied:
        return ""
    colour, facet = told_apart(contents.varied)
    by_colour = option("", "group") + options(contents.varied, colour)
    by_facet = option("", "none") + options(contents.varied, facet)
    return (
        f"<label>colour by {select('colour', by_colour)}</label>"
        f"<label>facet by {select('facet', by_facet)}</label>"
    )


def _seed_control(contents: _Contents) -> str:
    if not contents.several_seeds:
        return ""
    choices = option("band", "± standard deviation")
    choices += option("seeds", "every seed")
    choices += option("mean", "mean only")
    return f"<label>seeds {select('spread', choices)}</label>"


def _smoothing(contents: _Contents) -> str:
    evaluated = max(len(scored(run)[0]) for run in all_runs(contents.groups))
    chosen = 11 if evaluated > NOISY else 1
    windows = {1: "none", 5: "5 points", 11: "11 points", 25: "25 points"}
    choices = ""
    for points, text in windows.items():
        choices += option(str(points), text, selected=points == chosen)
    menu = select("smooth", choices)
    return f'<label title="mean of neighbouring points">smooth {menu}</label>'


# --- sentences ------------------------------------------------------------------------------------


def _title(groups: Sequence[Group]) -> str:
    """What all runs have in common: the data and the model."""
    runs = [group.runs[0] for group in groups]
    names = []
    for key in ("data.name", "model.name"):
        values = dict.fromkeys(str(run.settings[key]) for run in runs if key in run.settings)
        if values:
            names.append(", ".join(values))
    if not names or not any(names):
        return runs[0].path.name
    return " · ".join(filter(None, names))


def _facts(groups: Sequence[Group]) -> str:
    """The settings that all runs have in common, and their seeds."""
    runs = all_runs(groups)
    settings = dict(runs[0].settings)
    for key in ("clients", "partition"):  # what the settings came to
        if key in runs[0].about:
            settings[f"data.{key}"] = runs[0].about[key]
    different = set(differing(runs))
    common = {key: settings[key] for key in _FACTS if key in settings and key not in different}
    if settings.get("data.partition") not in SKEWED:
        common.pop("data.alpha", None)
    facts = [_fact(key, value) for key, value in common.items()]

    seeds = sorted({run.seed for run in runs})
    shown = ", ".join(map(str, seeds[:8])) + ("…" if len(seeds) > 8 else "")
    facts.append(counted(len(runs), "run"))
    facts.append(f"seeds {shown}" if len(seeds) > 1 else f"seed {shown}")
    return " · ".join(facts)


def _fact(key: str, value: Any) -> str:
    """A setting in words."""
    if key == "data.partition" and not value:
        return "clients given"
    return _FACTS[key].format(value).replace("(s)", "" if value == 1 else "s")


def _state(groups: Sequence[Group], waiting: int, live: bool) -> str:
    """How many runs have finished or stopped, if not all have finished."""
    runs = all_runs(groups)
    reasons = [run.stopped for run in runs if run.stopped]
    finished = sum(run.done for run in runs)
    planned_runs = len(runs) + waiting
    is_going = planned_runs > finished + len(reasons)

    sentences = []
    if is_going:
        rounds = sum(run.rounds for run in runs)
        longest = max(run.planned for run in runs)
        planned = sum(run.planned for run in runs) + waiting * longest
        so_far = f"{finished} of {planned_runs} runs finished" if planned_runs > 1 else "unfinished"
        sentences.append(f"{so_far}, {rounds:,} of {counted(planned, 'round')}")
    if reasons:
        stopped = f"{len(reasons)} of {planned_runs} runs " if planned_runs > 1 else ""
        sentences.append(f"{stopped}stopped: {escape(reasons[0])}".strip())
    if not sentences:
        return ""
    attribute = " id=live" if live and is_going else ""
    return f" · <span{attribute}>{'; '.join(sentences)}</span>"


def _footer(groups: Sequence[Group]) -> str:
    versions = sorted(set(_versions(groups)))
    return escape(f"Made by kairosfl {', '.join(versions)}." if versions else "Made by kairosfl.")


def _versions(groups: Sequence[Group]) -> Iterator[str]:
    for run in all_runs(groups):
        if run.about.get("version"):
            yield str(run.about["version"])
