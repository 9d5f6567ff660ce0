"""What a reader must know about the runs of a group before believing its numbers."""

from __future__ import annotations

from collections.abc import Iterable

from kairosfl.report.pictures import counted
from kairosfl.report.read import Group, RunData
from kairosfl.runs.history import spent
from kairosfl.runs.metrics import judged

LATE = (
    "† models are averaged only since one of the final 10 % of rounds: scored after the last, "
    "others by their mean"
)


def notes(group: Group) -> tuple[str, ...]:
    """A line for everything that qualifies the numbers of a group, its rules' verdicts last."""
    return (
        *_unfinished(group),
        *_diverged(group),
        *_run_again(group),
        *_ended_early(group),
        *_averaged_late(group),
        *_privacy(group),
        *_gaps(group),
        *_verdicts(group),
    )


def _unfinished(group: Group) -> list[str]:
    """Runs that go on, in one line, and those that stopped."""
    fate = _fate(group)
    running = []
    stopped = []
    for run in group.runs:
        if run.done:
            continue
        if run.stopped:
            why = f"stopped after round {run.last}: {run.stopped}"
            stopped.append(f"{_who(run, group)}{why} ({fate})")
        else:
            running.append(f"{_who(run, group)}{run.last} of {counted(run.planned, 'round')}")
    if not running:
        return stopped
    return [f"unfinished, {fate}: {', '.join(running)}", *stopped]


def _diverged(group: Group) -> list[str]:
    since = "from there on its test loss is not finite, or has exploded"
    lines = []
    for run in group.runs:
        if run.diverged:
            who = _who(run, group)
            lines.append(f"{who}diverged in round {run.diverged} ({_fate(group)}): {since}")
    return lines


def _fate(group: Group) -> str:
    """What became of the runs that cannot be compared."""
    return "left out of the numbers" if group.compared else "not compared"


def _run_again(group: Group) -> list[str]:
    """Seeds that were run several times, with different results."""
    finals: dict[int, list[float]] = {}
    for run in group.compared:
        finals.setdefault(run.seed, []).append(run.column(run.score.name)[-1])
    again = []
    for seed, values in finals.items():
        if len(set(values)) > 1:
            again.append(f"seed {seed}: {counted(len(values), 'run')}")
    if not again:
        return []
    return [f"runs of one seed that differ count as their mean: {', '.join(again)}"]


def _ended_early(group: Group) -> list[str]:
    """Runs that finished before their last round, such as those whose privacy was spent."""
    lines = []
    for run in group.runs:
        if run.summary.get("finished"):
            why = run.summary["finished"]
            lines.append(f"{_who(run, group)}finished after round {run.last}: {why}")
    return lines


def _averaged_late(group: Group) -> list[str]:
    return [LATE] if any(run.after_last for run in group.shown) else []


def _privacy(group: Group) -> list[str]:
    epsilons = []
    for run in group.runs:
        for name in spent(run.columns):
            words = name.replace("_", " ")
            epsilons.append(f"{_who(run, group)}{words} {run.column(name)[-1]:.4g}")
    return [f"privacy spent: {', '.join(epsilons)}"] if epsilons else []


def _gaps(group: Group) -> list[str]:
    """Rounds that are missing from metrics.jsonl."""
    gaps = []
    for run in group.runs:
        if run.last > run.rounds:
            gaps.append(f"{_who(run, group)}{counted(run.last - run.rounds, 'round')}")
    if not gaps:
        return []
    return [f"missing from metrics.jsonl, so that later costs are unknown: {', '.join(gaps)}"]


def _verdicts(group: Group) -> list[str]:
    """What the rules said in the end, each sentence once."""
    verdicts: dict[str, None] = {}
    for run in group.runs:
        if run.summary.get("verdicts"):
            verdicts |= dict.fromkeys(run.summary["verdicts"])
    return list(verdicts)


def detected(group: Group) -> str:
    """What the detector of a group said, and in which seeds: one period, two, none, or flicker."""
    seeds: dict[str, list[str]] = {}
    for run in group.runs:
        rounds = run.column("round").astype(int).tolist()
        critical = (run.column("critical") > 0).tolist()
        verdict = judged(list(zip(rounds, critical, strict=True)))
        seeds.setdefault(verdict, []).append(str(run.seed))

    sentences = []
    for verdict, of in seeds.items():
        where = ""
        if len(group.runs) > 1:
            where = f" (seed{'s' if len(of) > 1 else ''} {', '.join(of)})"
        sentences.append(verdict + where)
    return f"detector {detector_of(group)}: {'; '.join(sentences)}"


def detector_of(group: Group) -> str:
    """The name of the detector of a group."""
    return str(group.runs[0].settings.get("run.detector", "fgn"))


def measured_on(runs: Iterable[RunData]) -> str:
    """Which samples the accuracy per client was measured on, if the runs say so."""
    words = {"test": "its own test samples", "train": "its training samples"}
    samples: dict[str, None] = {}
    for run in runs:
        name = run.summary.get("client_accuracy_on")
        if not name:
            name = run.about.get("client_accuracy_on")
        if name:
            samples[words.get(name, name)] = None
    return " or ".join(samples)


def _who(run: RunData, group: Group) -> str:
    return f"seed {run.seed}: " if len(group.runs) > 1 else ""
