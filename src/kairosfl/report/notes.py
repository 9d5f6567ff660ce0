"""What a reader must know about the runs of a group before believing its numbers."""

from __future__ import annotations

from collections.abc import Iterable

from kairosfl.report.pictures import counted
from kairosfl.report.read import Group, RunData
from kairosfl.runs.history import spent
from kairosfl.runs.metrics import judged

LATE = "† models are averaged only since one of the final 10 % of rounds: scored after the last, others by their mean"


def notes(group: Group) -> tuple[str, ...]:
    """A line for each run that is unfinished, stopped, ended early or diverged, for seeds that were
    run again with another result, for averages that began late, and for what the rules say."""
    unfinished = [run for run in group.runs if not run.done]
    left = "left out of the numbers" if group.compared else "not compared"
    stopped = [
        f"{_who(run, group)}stopped after round {run.last}: {run.stopped}"
        for run in unfinished
        if run.stopped
    ]
    running = [
        f"{_who(run, group)}{run.last} of {counted(run.planned, 'round')}"
        for run in unfinished
        if not run.stopped
    ]
    diverged = [
        f"{_who(run, group)}diverged in round {run.diverged}" for run in group.runs if run.diverged
    ]
    gaps = [
        f"{_who(run, group)}{counted(run.last - run.rounds, 'round')}"
        for run in group.runs
        if run.last > run.rounds
    ]
    ends: dict[int, list[float]] = {}
    for run in group.compared:
        ends.setdefault(run.seed, []).append(run.column(run.score.name)[-1])
    again = [
        f"seed {seed}: {counted(len(each), 'run')}"
        for seed, each in ends.items()
        if len({*each}) > 1
    ]
    early = [(run, run.summary["finished"]) for run in group.runs if run.summary.get("finished")]
    used = [
        f"{_who(run, group)}{name.replace('_', ' ')} {run.column(name)[-1]:.4g}"
        for run in group.runs
        for name in spent(run.columns)
    ]
    late = any(run.after_last for run in group.shown)
    said = (verdict for run in group.runs for verdict in run.summary.get("verdicts") or ())
    return (
        *([f"unfinished, {left}: {', '.join(running)}"] if running else []),
        *(f"{each} ({left})" for each in stopped),
        *(
            f"{each} ({left}): from there on its test loss is not finite, or has exploded"
            for each in diverged
        ),
        *(
            [f"runs of one seed that differ count as their mean: {', '.join(again)}"]
            if again
            else []
        ),
        *(f"{_who(run, group)}finished after round {run.last}: {said}" for run, said in early),
        *([LATE] if late else []),
        *([f"privacy spent: {', '.join(used)}"] if used else []),
        *(
            [f"missing from metrics.jsonl, so that later costs are unknown: {', '.join(gaps)}"]
            if gaps
            else []
        ),
        *dict.fromkeys(said),
    )


def detected(group: Group) -> str:
    """What the detector of a group said, and in which seeds: one period, two, none, or flicker."""
    said: dict[str, list[str]] = {}
    for run in group.runs:
        marks = zip(
            run.column("round").astype(int).tolist(),
            (run.column("critical") > 0).tolist(),
            strict=True,
        )
        said.setdefault(judged(list(marks)), []).append(str(run.seed))
    several = len(group.runs) > 1
    seeds = {
        text: f" (seed{'s' * (len(each) > 1)} {', '.join(each)})" * several
        for text, each in said.items()
    }
    return f"detector {detector_of(group)}: " + "; ".join(text + seeds[text] for text in said)


def detector_of(group: Group) -> str:
    """The name of the detector of a group."""
    return str(group.runs[0].settings.get("run.detector", "fgn"))


def measured_on(runs: Iterable[RunData]) -> str:
    """Which samples the accuracy per client was measured on, if the runs say so."""
    words = {"test": "its own test samples", "train": "its training samples"}
    found = dict.fromkeys(
        run.summary.get("client_accuracy_on") or run.about.get("client_accuracy_on") for run in runs
    )
    return " or ".join(words.get(each, each) for each in found if each)


def _who(run: RunData, group: Group) -> str:
    return f"seed {run.seed}: " if len(group.runs) > 1 else ""
