"""`kairosfl demo`: what averaging and the right moment give at equal bytes, on digits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kairosfl.cli.common import Quiet, friendly, run_sweep
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from kairosfl.runs.sweep import Member

# How clients are spent, and the algorithms whose models are read without and with averaging. A run
# that averages is scored both ways, except by the detector: without averaging, that rule keeps
# clients for the final rounds.
EVENLY = "40 % of them, evenly"
CRITICAL = "40 % of them, most while critical"
BUDGET = "budget(share=0.4)"
DETECTED = "budget(share=0.4, by='detector')"
WAYS = {
    "all clients": ("average", "average"),
    EVENLY: (f"{BUDGET} + average", f"{BUDGET} + average"),
    CRITICAL: (DETECTED, f"{DETECTED} + average"),
}
SCHEDULES = {"constant": "constant rate", "cosine": "annealed rate"}
# Student's t, two-sided 99 %, of four seeds: one demo in 25 finds one of four differences by chance
CHANCE = 5.84
VERDICTS = {  # by the signs of the differences that are not chance
    frozenset(): "These seeds do not show that it pays to spend clients early.",
    frozenset("+"): "It pays here to spend clients early.",
    frozenset("-"): "It does not pay here to spend clients early.",
    frozenset("+-"): "Whether it pays to spend clients early depends here on schedule and model.",
}
# Per cent of every seed, by way, schedule, and whether averaged.
Scores = dict[tuple[str, str, bool], list[float]]


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the demo.")] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """Show on digits what averaging models is worth, and whether it matters when clients train;
    about a minute.
    """
    from kairosfl.runs.config import read
    from kairosfl.runs.sweep import expand

    with friendly(lambda: "Start again with: kairosfl demo"):
        from kairosfl.report.demo import draw
        from kairosfl.report.page import write_report

        tables = read(Path(__file__).parents[1] / "demo.toml")
        members = expand(tables)
        if (out / "sweep.json").is_file():  # always run the demo from the start
            clear(out, {member.name for member in members})
        summaries = run_sweep(tables, out, quiet)
        scores, sent = ended(members, summaries)
        typer.echo("\n".join(story(scores, sent)))
        typer.echo(f"picture: {draw(scores, sent, SCHEDULES, out / 'demo.png')}")
        typer.echo(f"report:  {write_report([out], out / 'report.html')}  (open it in a browser)")


def ended(
    members: Sequence[Member], summaries: Mapping[str, Mapping[str, Any]]
) -> tuple[Scores, dict[str, float]]:
    """How the runs ended, and the megabytes of a run, which do not depend on its schedule."""
    scores: Scores = {}
    sent: dict[str, float] = {}
    for way, names in WAYS.items():
        plain = _runs(members, summaries, names[0])
        averaged = _runs(members, summaries, names[1])
        counts = []  # bytes of each run
        for schedule in SCHEDULES:
            scores[way, schedule, False] = [100 * _plain(run) for run in plain[schedule]]
            scores[way, schedule, True] = [
                100 * float(run["accuracy"]) for run in averaged[schedule]
            ]
            counts += [run["bytes_down"] + run["bytes_up"] for run in averaged[schedule]]
        sent[way] = sum(counts) / len(counts) / 1e6
    return scores, sent


def story(scores: Scores, sent: Mapping[str, float]) -> list[str]:
    """The runs as a table, and what they say; every number is from these runs."""
    lines = [f"{'clients':<35}{'schedule':<14}{'MB':>5}{'plain':>13}{'averaged':>13}"]
    for way, size in sent.items():
        for schedule, words in SCHEDULES.items():
            plain = _spread(scores[way, schedule, False])
            averaged = _spread(scores[way, schedule, True])
            lines.append(f"{way:<35}{words:<14}{size:>5.1f}{plain:>13}{averaged:>13}")
    seeds = len(next(iter(scores.values())))
    lines.append(
        f"Accuracy in %, mean ± standard error of {seeds} seeds; plain: final 10 % of rounds"
    )
    return [*lines, "", *_differences(scores)]


def _differences(scores: Scores) -> list[str]:
    lines = []
    signs = set()  # of the differences that are not chance
    for schedule, words in SCHEDULES.items():
        plain = scores[EVENLY, schedule, False]
        averaged = scores[EVENLY, schedule, True]
        article = "an" if words[0] in "aeiou" else "a"
        lines.append(f"With 40 % of the clients and {article} {words}:")
        lines.append(f"  averaging the last models           {_gain(plain, averaged)}")
        for kind, name in ((False, "plain"), (True, "averaged")):
            gain = _gain(scores[EVENLY, schedule, kind], scores[CRITICAL, schedule, kind])
            if "chance" not in gain:
                signs.add(gain[0])
            lines.append(f"  clients while critical, {name:<8}    {gain}")
        everybody = scores["all clients", schedule, False]
        lines.append(f"  averaged, against all clients plain {_gain(everybody, averaged)}")
    lines.append(VERDICTS[frozenset(signs)])
    return [*lines, "Is there a critical period in your problem? Measure it: kairosfl periods FILE"]


def _runs(
    members: Sequence[Member], summaries: Mapping[str, Mapping[str, Any]], algorithm: str
) -> dict[str, list[Mapping[str, Any]]]:
    """The summaries of an algorithm by schedule, in the order of the seeds."""
    runs: dict[str, list[Mapping[str, Any]]] = {schedule: [] for schedule in SCHEDULES}
    for member in members:
        if member.settings["algorithm"] == algorithm:
            runs[member.settings["train.schedule"]].append(summaries[member.name])
    return runs


def _plain(run: Mapping[str, Any]) -> float:
    return float(run.get("plain_last_tenth_accuracy", run["last_tenth_accuracy"]))


def _spread(values: Sequence[float]) -> str:
    mean, error = _mean(values)
    return f"{mean:.1f} ± {error:.1f}"


def _gain(before: Sequence[float], after: Sequence[float]) -> str:
    """The difference in points, paired by seed."""
    mean, error = _mean([b - a for a, b in zip(before, after, strict=True)])
    text = f"{mean:+.1f} ± {error:.1f} points"
    is_sure = abs(mean) > CHANCE * error
    if not is_sure:
        text += ", which may be chance"
    return text


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its standard error."""
    import statistics

    return statistics.fmean(values), statistics.stdev(values) / len(values) ** 0.5


def clear(folder: Path, names: set[str]) -> None:
    """Delete the runs of a sweep that consists of exactly these, and nothing else."""
    import shutil

    from kairosfl.runs.lock import lock

    try:
        runs = json.loads((folder / "sweep.json").read_text())["runs"]
        recorded = {run["name"] for run in runs}
    except (ValueError, KeyError, TypeError):
        recorded = set()
    if recorded != names:
        raise UserError(f"{folder} contains another sweep; choose another folder with --out.")
    with lock(folder):
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)
