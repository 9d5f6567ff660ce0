"""Run folders read into plain records, and runs that differ only in their seed put into groups."""

from __future__ import annotations

import fnmatch
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.errors import UserError, nearest
from kairosfl.report import checked
from kairosfl.report.checked import Array, Say, silent
from kairosfl.rules import parse
from kairosfl.runs import STOPPED
from kairosfl.runs.config import Execution
from kairosfl.runs.files import check_runs, no_run
from kairosfl.runs.history import ending, final_tenth
from kairosfl.runs.score import Score, is_metrics, scores
from kairosfl.tasks import partitions

# Settings that may differ between two runs of one curve: they change neither the algorithm nor the
# problem.
_INCIDENTAL = {
    "seed",
    "run.checkpoint_every",
    "run.threads",
    "run.client_accuracy",
    "run.cosines",
    "run.track",
}
# Keys of [data] that are about how clients train, not about the problem.
_RECIPE = {"data.augment"}
# How samples are divided among clients: if each has the same samples, it does not matter how.
_DEALING = {
    f"data.{name}" for name in ("partition", "clients", *partitions.SETTINGS, "partition_seed")
}
# Nor does the engine matter, unless that is what is compared: one seed on several.
_TRAINERS = {"run.engine", "run.device", "run.slots", "run.deterministic"}
EXPLODED = (
    1000  # times the first test loss or, if that is less, the loss of guessing among the classes
)
_SETTINGS = {"seed": checked.is_seed, "train.rounds": checked.is_whole}
_ABOUT = {
    "algorithm": checked.is_text,
    "seed": checked.is_seed,
    "clients": checked.is_whole,
    "metrics": is_metrics,
}
_ABOUT |= {"partition": checked.is_text}
_SAID = {
    "verdicts": checked.is_texts,
    "client_accuracy_on": checked.is_text,
    "finished": checked.is_text,
}
_COUNTS = {"clients": checked.is_whole, "classes": checked.is_whole, "counts": checked.is_counts}
_PARTITION = {"labels": checked.is_texts, **_COUNTS}


OTHERWISE = {
    "fedfim": "fisher",
    "fgn": "noisedfgn",
}  # where a column is missing: its older name, or its noisy kin


@dataclass(frozen=True)
class RunData:
    """One run folder. Columns hold one value per round, NaN if nothing was written."""

    path: Path
    algorithm: str
    seed: int
    settings: Mapping[str, Any]  # the configuration, flat: "train.lr" -> 0.1
    config: str  # the same as the text of config.toml
    about: Mapping[str, Any]  # run.json
    summary: Mapping[str, Any]  # summary.json; empty during the run
    partition: Mapping[str, Any]  # partition.json
    columns: Mapping[str, Array]
    scores: tuple[Score, ...]  # its metrics, the main one first
    damaged: tuple[str, ...] = ()  # a sentence on each file of the folder that is not intact

    def column(self, name: str) -> Array:
        """One value per round; all NaN if the folder has none."""
        if name not in self.columns:
            name = OTHERWISE.get(name, name)
        return self.columns.get(name, np.full(self.rounds, np.nan))

    @property
    def recorded(self) -> list[str]:
        """The columns that rules recorded: a line begins with them."""
        return list(takewhile(lambda name: name != "round", self.columns))

    def total(self, *names: str) -> Array:
        """The sum of these columns up to and including each round; NaN after a round that is
        missing.
        """
        added = np.sum([np.nan_to_num(self.column(name)) for name in names], axis=0)
        known = np.any([np.isfinite(self.column(name)) for name in names])
        whole = self.column("round") == np.arange(1, self.rounds + 1)
        return np.where(known & whole, np.cumsum(added), np.nan)

    @property
    def score(self) -> Score:
        """The main metric."""
        return self.scores[0]

    @property
    def evaluated(self) -> NDArray[np.intp]:
        """Indices of the rounds that were evaluated, including those in which the result was not
        finite.
        """
        return np.flatnonzero(
            np.isfinite(self.column(self.score.name)) | (self.column("not_finite") > 0)
        )

    @property
    def averaged(self) -> list[bool]:
        """In which of these the result is not the model itself."""
        return [
            math.isfinite(value)
            for value in self.column(f"plain_{self.score.name}")[self.evaluated]
        ]

    @property
    def after_last(self) -> bool:
        """Whether it is scored by its last evaluation alone, of several in the final 10 %."""
        return len(ending(self.averaged, self.averaged)) < len(final_tenth(self.averaged))

    @property
    def follows_detector(self) -> bool:
        """Whether a rule acts on the detector's answers, or another detector than the default is
        named.
        """
        return self.settings.get(
            "run.detector", Execution.detector
        ) != Execution.detector or _follows(self.algorithm)

    @property
    def rounds(self) -> int:
        """Number of rounds recorded so far."""
        return len(self.columns["round"])

    @property
    def last(self) -> int:
        """The number of the last recorded round."""
        return int(self.columns["round"][-1])

    @property
    def planned(self) -> int:
        """The number of rounds that were requested."""
        return int(self.settings.get("train.rounds") or self.rounds)

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        return bool(self.summary)

    @cached_property
    def stopped(self) -> str:
        """Why it cannot continue as it is, if it said so."""
        try:
            lines = (
                (self.path / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
            )
        except OSError:
            return ""
        return (
            lines[-1].removeprefix(STOPPED)
            if lines and lines[-1].startswith(STOPPED) and not self.done
            else ""
        )

    @cached_property
    def diverged(self) -> int | None:
        """The round from which on the test loss was not finite, or had exploded; None: it did not
        diverge.
        """
        evaluated = self.evaluated
        loss = self.column("loss")[evaluated]
        classes = self.partition.get("classes", 0) if self.score.name == "accuracy" else 0
        usual = EXPLODED * min(
            loss[np.isfinite(loss)][:1].sum(), np.log(classes) if classes > 1 else np.inf
        )
        lost = (self.column("not_finite")[evaluated] > 0) | (loss > usual)
        fine = np.flatnonzero(~lost)
        first = fine[-1] + 1 if len(fine) else 0
        return int(self.column("round")[evaluated[first]]) if first < len(evaluated) else None

    @cached_property
    def clients(self) -> list[dict[str, Any]]:
        """What happened to each client, one object per round; read on first use, as it may be
        large.
        """
        return self._clients[0]

    @property
    def clients_damaged(self) -> tuple[str, ...]:
        """As `damaged`, about clients.jsonl."""
        return self._clients[1]

    @cached_property
    def _clients(self) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        said: list[str] = []
        return checked.clients(self.path / "clients.jsonl", self.score, said.append), tuple(said)


@lru_cache(maxsize=256)
def _follows(algorithm: str) -> bool:
    """Whether a rule of an algorithm acts on the detector's answers; of one that is not known here,
    it may.
    """
    try:
        return parse(algorithm).any("periods")
    except UserError:
        return True


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed: one curve with a band.

    `problem` names the data if groups differ in them: results on different data cannot be compared.
    """

    label: str
    runs: tuple[RunData, ...]
    problem: str = ""

    @property
    def score(self) -> Score:
        """The main metric of its runs."""
        return self.runs[0].score

    @property
    def follows_detector(self) -> bool:
        """Whether what the detector said matters: a rule acts on it, or it was asked for."""
        return any(run.follows_detector for run in self.runs)

    @property
    def finished(self) -> tuple[RunData, ...]:
        """The runs that have finished."""
        return tuple(run for run in self.runs if run.done)

    @property
    def compared(self) -> tuple[RunData, ...]:
        """The runs that can be compared: those that have finished without diverging."""
        return tuple(run for run in self.finished if run.diverged is None)

    @property
    def shown(self) -> tuple[RunData, ...]:
        """The runs its numbers come from: the comparable ones, or else the finished ones, or else
        all.
        """
        return self.compared or self.finished or self.runs


@dataclass(frozen=True)
class Study:
    """The contents of some folders."""

    groups: list[Group]
    waiting: int  # runs of a sweep that have not begun
    damaged: list[str]  # what could not be read, in sentences

    def all_damaged(self) -> list[str]:
        """Including what is damaged in clients.jsonl, which is large and read for this."""
        return self.damaged + [
            each for group in self.groups for run in group.runs for each in run.clients_damaged
        ]


def find_runs(dirs: Sequence[Path], say: Say = silent) -> list[Path]:
    """The run folders among these folders and those inside them, in the order of a sweep where
    there is one.
    """
    found: dict[Path, None] = {}
    check_runs([Path(given) for given in dirs])
    for given in map(Path, dirs):
        inside = [given] if _is_run(given) else _inside(given, say) if given.is_dir() else []
        # If several paths are given, such as runs/*, files and empty folders are skipped.
        exported = (
            given.parent / "sweep.json"
        ).is_file()  # plots or tables next to the runs, as in study/*
        if not inside and (
            len(dirs) == 1 or (given.is_dir() and any(given.iterdir()) and not exported)
        ):
            raise no_run(given)
        found.update(dict.fromkeys(path.resolve() for path in inside))
    return list(found)


def read_run(path: Path) -> RunData:
    """One run folder as it is now; a last line that is still being written is left for the next
    time.
    """
    said: list[str] = []
    text, tables = checked.toml(path / "config.toml", said.append)
    settings = checked.kept(tables, _SETTINGS, path / "config.toml", said.append)
    about = checked.table(path / "run.json", said.append, _ABOUT | _SAID)
    rows = checked.by_round(path / "metrics.jsonl", said.append)
    named = scores(about, rows[-1].get("metric") if rows else None)
    columns = checked.metrics(rows, named, path / "metrics.jsonl", said.append)
    summary = checked.table(path / "summary.json", said.append, _SAID)
    rounds = len(columns["round"])
    if (
        (path / "summary.json").exists()
        and not summary
        and rounds >= settings.get("train.rounds", rounds + 1)
    ):
        summary = {"rounds": rounds}  # it is damaged, but all rounds are there
    return RunData(
        path=path,
        algorithm=str(settings.get("algorithm", about.get("algorithm", path.name))),
        seed=settings.get("seed", about.get("seed")) or 0,
        settings=settings,
        config=text,
        about=about,
        summary=summary,
        partition=checked.table(path / "partition.json", said.append, _PARTITION),
        columns=columns,
        scores=named,
        damaged=tuple(said),
    )


def read_study(dirs: Sequence[Path]) -> Study:
    """Every run in these folders that has finished a round, grouped, and what is damaged."""
    said: list[str] = []
    read = [read_run(path) for path in find_runs(dirs, said.append)]
    said += [each for run in read for each in run.damaged]
    runs = [run for run in read if run.rounds]
    if not runs:
        why = f" {said[0]}" if said else ""
        raise UserError(
            f"No run in {', '.join(map(str, dirs))} has finished a round yet; wait for the first one.{why}"
        )
    _check_same_metric(runs)
    sweeps = {path.resolve() for given in dirs for path in Path(given).rglob("sweep.json")}
    to_come = {
        path for sweep in sweeps for path in _listed(sweep, said.append) if not _is_run(path)
    }
    return Study(group_runs(runs), len(to_come), list(dict.fromkeys(said)))


def _check_same_metric(runs: Sequence[RunData]) -> None:
    """Refuse runs that are judged by different metrics: no table, curve or target would fit them
    all.
    """
    first, name = runs[0], "{0.path} is judged by its {0.score.words} ({0.score.direction})"
    other = next((run for run in runs if run.score != first.score), None)
    if other:
        raise UserError(
            f"{name.format(first)}, but {name.format(other)}; give runs with the same main metric."
        )


def read_groups(dirs: Sequence[Path]) -> list[Group]:
    """The groups of `read_study`."""
    return read_study(dirs).groups


def chosen_groups(groups: Sequence[Group], only: Sequence[str]) -> list[Group]:
    """The groups whose label is, or matches, any of these, in this order; all of them if none is
    given.
    """
    found: dict[str, Group] = {}
    for text in only:
        mine = [
            group
            for group in groups
            if group.label == text or fnmatch.fnmatchcase(group.label, text)
        ]
        if not mine:
            raise UserError(
                f"No group is called {text!r}; {nearest(text, [group.label for group in groups])}"
            )
        found |= {group.label: group for group in mine}
    return list(found.values()) or list(groups)


def group_runs(runs: Iterable[RunData]) -> list[Group]:
    """Groups of runs that differ only in their seed, each labelled by what distinguishes it."""
    members = []
    for group in _alike(runs, _INCIDENTAL | _TRAINERS):
        parts = _alike(group, _INCIDENTAL)
        compared = sum(len({run.seed for run in part}) for part in parts) > len(
            {run.seed for run in group}
        )
        members += [_longest(each) for each in (parts if compared else [group])]
    problems = _problems(members)
    first = [each[0] for each in members]
    stated = {key for key in differing(first) if any(problems) and _of_the_problem(key)}
    for without in (
        stated | _TRAINERS,
        stated,
        _TRAINERS,
        set(),
    ):  # the shortest labels that are all different
        pairs = zip(_labels(first, without), problems, strict=True)
        labels = [
            own if problem in own else " · ".join(filter(None, (own, problem)))
            for own, problem in pairs
        ]
        if len(set(labels)) == len(members):
            break
    else:  # what distinguishes them could not be read
        labels = [f"{label} · {each[0].path}" for label, each in zip(labels, members, strict=True)]
    return [
        Group(label, each, problem)
        for label, each, problem in zip(labels, members, problems, strict=True)
    ]


def _longest(runs: Sequence[RunData]) -> tuple[RunData, ...]:
    """By seed; of runs with the same seed, those that got furthest, so that stopped ones do not
    enter the mean.
    """
    most = {
        seed: max(run.rounds for run in runs if run.seed == seed)
        for seed in sorted({run.seed for run in runs})
    }
    return tuple(
        run
        for seed, rounds in most.items()
        for run in runs
        if run.seed == seed and run.rounds == rounds
    )


def _alike(runs: Iterable[RunData], but: set[str]) -> list[list[RunData]]:
    """Groups of runs with the same settings apart from these."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        own = {key: value for key, value in run.settings.items() if key not in but} or {
            "path": str(run.path)
        }
        groups.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def differing(runs: Sequence[RunData]) -> list[str]:
    """The settings, other than seed and algorithm, in which those of these runs that have any
    differ.
    """
    runs = [run for run in runs if run.settings]
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    own = [key for key in keys if key not in _INCIDENTAL | {"algorithm"}]
    return [
        key
        for key in own
        if len({json.dumps(run.settings.get(key), default=str) for run in runs}) > 1
    ]


def _labels(runs: Sequence[RunData], without: set[str]) -> list[str]:
    """The algorithm, with the settings that distinguish equal texts; only the settings if all texts
    are equal.
    """
    labels = []
    for run in runs:
        alike = [other for other in runs if other.algorithm == run.algorithm]
        if not run.settings and len(alike) > 1:
            labels.append(f"{run.algorithm} · {run.path.name}")
            continue
        keys = [key for key in differing(alike) if key not in without]
        own = ", ".join(f"{key.rpartition('.')[2]}={run.settings.get(key)}" for key in keys)
        told = own or any(_of_the_problem(key) for key in without)  # by the rest of the label
        whole = (
            own
            if told and len(alike) == len(runs)
            else " · ".join(filter(None, [run.algorithm, own]))
        )
        labels.append(whole)
    return labels


def _of_the_problem(key: str) -> bool:
    return key.startswith("data.") and key not in _RECIPE


def _problems(groups: Sequence[tuple[RunData, ...]]) -> list[str]:
    """The data of each group, as far as they differ in their settings or in the samples themselves."""
    keys = [key for key in differing([runs[0] for runs in groups]) if _of_the_problem(key)]
    texts: list[str] = []
    for i, runs in enumerate(groups):
        own = [(key.partition(".")[2], runs[0].settings.get(key)) for key in keys]
        twin = next((j for j in range(i) if _same_samples(runs, groups[j])), None)
        text = ", ".join(str(value) if name == "name" else f"{name}={value}" for name, value in own)
        texts.append(
            texts[twin] if twin is not None else text if runs[0].settings else "unknown data"
        )
    return texts if len(set(texts)) > 1 else [""] * len(groups)


def _same_samples(one: Sequence[RunData], other: Sequence[RunData]) -> bool:
    """Whether every common seed gave the same samples to the same clients."""
    ours, theirs = ({run.seed: _samples(run) for run in runs} for runs in (one, other))
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(
        ours[seed] is not None and ours[seed] == theirs[seed] for seed in shared
    )


def _samples(run: RunData) -> tuple[str, str] | None:
    population, data = run.about.get("population_hash"), run.about.get("data_hashes")
    named = {
        key: value
        for key, value in run.settings.items()
        if _of_the_problem(key) and key not in _DEALING
    }
    return (str(population), str(data or named)) if population else None


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _inside(folder: Path, say: Say) -> list[Path]:
    """Run folders below this one: as sweep.json lists them, then any others by name, numbers in
    order.
    """
    below = sorted((path.parent.resolve() for path in folder.rglob("metrics.jsonl")), key=_natural)
    for path in below:
        if not _is_run(path):
            say(f"{path / 'metrics.jsonl'} is not a file; the run is left out.")
    return [
        path
        for path in dict.fromkeys([*_listed(folder / "sweep.json", say), *below])
        if _is_run(path)
    ]


def _listed(sweep: Path, say: Say) -> list[Path]:
    """The run folders that a sweep.json names."""
    runs = checked.table(sweep.resolve(), say, {"runs": _names_runs}).get("runs") or []
    return [(sweep.parent / run["path"]).resolve() for run in runs]


def _names_runs(runs: Any) -> bool:
    named = isinstance(runs, list) and all(isinstance(run, dict) for run in runs)
    return named and all(
        checked.is_text(run.get("path")) and "\0" not in run["path"] for run in runs
    )


def _natural(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
