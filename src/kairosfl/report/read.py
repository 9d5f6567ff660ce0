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
# Times the first test loss or, if that is less, the loss of guessing among the classes.
EXPLODED = 1000
_SETTINGS = {"seed": checked.is_seed, "train.rounds": checked.is_whole}
_ABOUT = {
    "algorithm": checked.is_text,
    "seed": checked.is_seed,
    "clients": checked.is_whole,
    "metrics": is_metrics,
    "partition": checked.is_text,
}
_SUMMARY = {
    "verdicts": checked.is_texts,
    "client_accuracy_on": checked.is_text,
    "finished": checked.is_text,
}
_COUNTS = {"clients": checked.is_whole, "classes": checked.is_whole, "counts": checked.is_counts}
_PARTITION = {"labels": checked.is_texts, **_COUNTS}

# Where a column is missing: its older name, or its noisy kin.
OTHERWISE = {"fedfim": "fisher", "fgn": "noisedfgn"}


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
        """The sum of these columns up to each round; NaN after a round that is missing."""
        columns = np.array([self.column(name) for name in names])
        spent = np.cumsum(np.nan_to_num(columns).sum(axis=0))
        without_gap = self.column("round") == np.arange(1, self.rounds + 1)
        return np.where(np.isfinite(columns).any() & without_gap, spent, np.nan)

    @property
    def score(self) -> Score:
        """The main metric."""
        return self.scores[0]

    @property
    def evaluated(self) -> NDArray[np.intp]:
        """Indices of the evaluated rounds, also of those whose result was not finite."""
        has_score = np.isfinite(self.column(self.score.name))
        return np.flatnonzero(has_score | (self.column("not_finite") > 0))

    @property
    def averaged(self) -> list[bool]:
        """In which of these the result is not the model itself."""
        plain_scores = self.column(f"plain_{self.score.name}")[self.evaluated]
        averaged: list[bool] = np.isfinite(plain_scores).tolist()
        return averaged

    @property
    def after_last(self) -> bool:
        """Whether it is scored by its last evaluation alone, of several in the final 10 %."""
        return len(ending(self.averaged, self.averaged)) < len(final_tenth(self.averaged))

    @property
    def follows_detector(self) -> bool:
        """Whether a rule acts on the detector's answers, or it is not the default detector."""
        detector = self.settings.get("run.detector", Execution.detector)
        return detector != Execution.detector or _follows(self.algorithm)

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
        if self.settings.get("train.rounds"):
            return int(self.settings["train.rounds"])
        return self.rounds

    @property
    def done(self) -> bool:
        """Whether the run has finished."""
        return bool(self.summary)

    @cached_property
    def stopped(self) -> str:
        """Why it cannot continue as it is, if it said so."""
        try:
            log = (self.path / "log.txt").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""
        last_line = "".join(log.splitlines()[-1:])
        if self.done or not last_line.startswith(STOPPED):
            return ""
        return last_line.removeprefix(STOPPED)

    @cached_property
    def diverged(self) -> int | None:
        """The round since which the test loss is not finite, or has exploded; None: never."""
        evaluated = self.evaluated
        loss = self.column("loss")[evaluated]
        largest = EXPLODED * min(loss[np.isfinite(loss)][:1].sum(), self._loss_of_guessing())
        has_diverged = (self.column("not_finite")[evaluated] > 0) | (loss > largest)

        # It may have recovered: only what follows the last good evaluation counts.
        good = np.flatnonzero(~has_diverged)
        first = int(good[-1]) + 1 if len(good) else 0
        if first == len(evaluated):
            return None
        return int(self.column("round")[evaluated[first]])

    def _loss_of_guessing(self) -> float:
        """The cross-entropy of guessing among the classes; infinite where nothing is classified."""
        classes = self.partition.get("classes") or 0
        if self.score.name != "accuracy" or classes < 2:
            return math.inf
        return math.log(classes)

    @cached_property
    def clients(self) -> list[dict[str, Any]]:
        """What happened to each client, one object per round; read on first use."""
        return self._clients[0]

    @property
    def clients_damaged(self) -> tuple[str, ...]:
        """As `damaged`, about clients.jsonl."""
        return self._clients[1]

    @cached_property
    def _clients(self) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        damage: list[str] = []
        rows = checked.clients(self.path / "clients.jsonl", self.score, damage.append)
        return rows, tuple(damage)


@lru_cache(maxsize=256)
def _follows(algorithm: str) -> bool:
    """Whether a rule acts on the detector's answers; one that cannot be read may."""
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
        """The runs its numbers come from: the comparable ones, else the finished ones, else all."""
        if self.compared:
            return self.compared
        if self.finished:
            return self.finished
        return self.runs


def all_runs(groups: Iterable[Group]) -> list[RunData]:
    """The runs of all groups."""
    return [run for group in groups for run in group.runs]


@dataclass(frozen=True)
class Study:
    """The contents of some folders."""

    groups: list[Group]
    waiting: int  # runs of a sweep that have not begun
    damaged: list[str]  # what could not be read, in sentences

    def all_damaged(self) -> list[str]:
        """Including what is damaged in clients.jsonl, which is large and read for this."""
        damage = list(self.damaged)
        for run in all_runs(self.groups):
            damage += run.clients_damaged
        return damage


def find_runs(dirs: Sequence[Path], say: Say = silent) -> list[Path]:
    """The run folders among and inside these, in the order of a sweep where there is one."""
    folders = [Path(folder) for folder in dirs]
    check_runs(folders)
    runs: dict[Path, None] = {}
    for folder in folders:
        inside = _inside(folder, say)
        if not inside and (len(folders) == 1 or _should_hold_runs(folder)):
            raise no_run(folder)
        runs.update(dict.fromkeys(path.resolve() for path in inside))
    return list(runs)


def _should_hold_runs(folder: Path) -> bool:
    """Whether one of several paths must hold a run.

    Of paths such as runs/*, files and empty folders are skipped, and so are plots and tables that
    were exported into the folder of a sweep.
    """
    beside_a_sweep = (folder.parent / "sweep.json").is_file()
    return folder.is_dir() and any(folder.iterdir()) and not beside_a_sweep


def read_run(path: Path) -> RunData:
    """One run folder as it is now; a line that is still being written is left for the next time."""
    damage: list[str] = []
    text, tables = checked.toml(path / "config.toml", damage.append)
    settings = checked.kept(tables, _SETTINGS, path / "config.toml", damage.append)
    about = checked.table(path / "run.json", damage.append, _ABOUT | _SUMMARY)
    rows = checked.by_round(path / "metrics.jsonl", damage.append)
    metrics = scores(about, rows[-1].get("metric") if rows else None)
    columns = checked.metrics(rows, metrics, path / "metrics.jsonl", damage.append)
    summary = checked.table(path / "summary.json", damage.append, _SUMMARY)
    rounds = len(columns["round"])
    has_all_rounds = rounds >= settings.get("train.rounds", rounds + 1)
    if (path / "summary.json").exists() and not summary and has_all_rounds:
        summary = {"rounds": rounds}  # the file is damaged, but the run has finished
    return RunData(
        path=path,
        algorithm=str(settings.get("algorithm", about.get("algorithm", path.name))),
        seed=settings.get("seed", about.get("seed")) or 0,
        settings=settings,
        config=text,
        about=about,
        summary=summary,
        partition=checked.table(path / "partition.json", damage.append, _PARTITION),
        columns=columns,
        scores=metrics,
        damaged=tuple(damage),
    )


def read_study(dirs: Sequence[Path]) -> Study:
    """Every run in these folders that has finished a round, grouped, and what is damaged."""
    damage: list[str] = []
    runs = [read_run(path) for path in find_runs(dirs, damage.append)]
    for run in runs:
        damage += run.damaged
    begun = [run for run in runs if run.rounds]
    if not begun:
        why = f" {damage[0]}" if damage else ""
        raise UserError(
            f"No run in {', '.join(map(str, dirs))} has finished a round yet; wait for the first "
            f"one.{why}"
        )
    _check_same_metric(begun)
    waiting = _not_begun(dirs, damage.append)
    return Study(group_runs(begun), len(waiting), list(dict.fromkeys(damage)))


def _not_begun(dirs: Sequence[Path], say: Say) -> set[Path]:
    """The runs that sweeps in these folders list and that have no folder yet."""
    waiting: set[Path] = set()
    for folder in dirs:
        for sweep in Path(folder).rglob("sweep.json"):
            waiting.update(_listed(sweep, say))
    return {path for path in waiting if not _is_run(path)}


def _check_same_metric(runs: Sequence[RunData]) -> None:
    """Refuse runs with different main metrics: no table, curve or target would fit them all."""
    first = runs[0]
    for run in runs:
        if run.score != first.score:
            raise UserError(
                f"{_judged(first)}, but {_judged(run)}; give runs with the same main metric."
            )


def _judged(run: RunData) -> str:
    return f"{run.path} is judged by its {run.score.words} ({run.score.direction})"


def read_groups(dirs: Sequence[Path]) -> list[Group]:
    """The groups of `read_study`."""
    return read_study(dirs).groups


def chosen_groups(groups: Sequence[Group], only: Sequence[str]) -> list[Group]:
    """The groups whose label is, or matches, any of these, in this order; without any, all."""
    if not only:
        return list(groups)
    by_label = {group.label: group for group in groups}
    chosen: dict[str, Group] = {}
    for text in only:
        matching = [name for name in by_label if name == text or fnmatch.fnmatchcase(name, text)]
        if not matching:
            raise UserError(f"No group is called {text!r}; {nearest(text, list(by_label))}")
        for label in matching:
            chosen[label] = by_label[label]
    return list(chosen.values())


def group_runs(runs: Iterable[RunData]) -> list[Group]:
    """Groups of runs that differ only in their seed, each labelled by what distinguishes it."""
    members: list[tuple[RunData, ...]] = []
    for same_recipe in _by_settings(runs, _INCIDENTAL | _TRAINERS):
        per_engine = _by_settings(same_recipe, _INCIDENTAL)
        if _compares_engines(per_engine):
            members += map(_longest, per_engine)
        else:
            members.append(_longest(same_recipe))
    problems = _problems(members)
    labels = _different_labels([runs[0] for runs in members], problems)
    groups = zip(labels, members, problems, strict=True)
    return [Group(label, runs, problem) for label, runs, problem in groups]


def _compares_engines(per_engine: Sequence[Sequence[RunData]]) -> bool:
    """Whether any seed was run on several engines."""
    seeds: list[int] = []
    for runs in per_engine:
        seeds += {run.seed for run in runs}
    return len(seeds) > len(set(seeds))


def _longest(runs: Sequence[RunData]) -> tuple[RunData, ...]:
    """By seed, and of each seed those that got furthest: stopped ones do not enter the mean."""
    by_seed: dict[int, list[RunData]] = {}
    for run in runs:
        by_seed.setdefault(run.seed, []).append(run)
    longest: list[RunData] = []
    for seed in sorted(by_seed):
        most = max(run.rounds for run in by_seed[seed])
        longest += [run for run in by_seed[seed] if run.rounds == most]
    return tuple(longest)


def _by_settings(runs: Iterable[RunData], but: set[str]) -> list[list[RunData]]:
    """Groups of runs with the same settings apart from these; one without any is by itself."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        settings = {key: value for key, value in run.settings.items() if key not in but}
        if not settings:
            settings = {"path": str(run.path)}
        groups.setdefault(json.dumps(settings, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def differing(runs: Sequence[RunData]) -> list[str]:
    """The settings, other than seed and algorithm, in which runs differ that have settings."""
    values: dict[str, set[str]] = {}
    runs = [run for run in runs if run.settings]
    for key in dict.fromkeys(key for run in runs for key in run.settings):
        if key not in _INCIDENTAL and key != "algorithm":
            values[key] = {json.dumps(run.settings.get(key), default=str) for run in runs}
    return [key for key, texts in values.items() if len(texts) > 1]


# --- labels ---------------------------------------------------------------------------------------


def _different_labels(runs: Sequence[RunData], problems: Sequence[str]) -> list[str]:
    """The shortest labels of these runs, one of each group, that are all different."""
    stated: set[str] = set()
    if any(problems):
        stated = {key for key in differing(runs) if _of_the_problem(key)}
    labels: list[str] = []
    for without in (stated | _TRAINERS, stated, _TRAINERS, set()):
        labels = []
        for label, problem in zip(_labels(runs, without), problems, strict=True):
            labels.append(label if problem in label else _joined(label, problem))
        if len(set(labels)) == len(runs):
            return labels
    # What distinguishes them could not be read.
    return [f"{label} · {run.path}" for label, run in zip(labels, runs, strict=True)]


def _labels(runs: Sequence[RunData], without: set[str]) -> list[str]:
    """The algorithm, with the settings that distinguish runs of it.

    Where all runs have one algorithm it is left out, if anything else tells them apart.
    """
    labels = []
    for run in runs:
        same_algorithm = [other for other in runs if other.algorithm == run.algorithm]
        if not run.settings and len(same_algorithm) > 1:
            labels.append(f"{run.algorithm} · {run.path.name}")
            continue
        keys = [key for key in differing(same_algorithm) if key not in without]
        settings = ", ".join(f"{key.rpartition('.')[2]}={run.settings.get(key)}" for key in keys)
        is_told_apart = settings != "" or any(map(_of_the_problem, without))
        if is_told_apart and len(same_algorithm) == len(runs):
            labels.append(settings)
        else:
            labels.append(_joined(run.algorithm, settings))
    return labels


def _joined(*parts: str) -> str:
    """Parts of a label; empty ones are left out."""
    return " · ".join(filter(None, parts))


# --- which data -----------------------------------------------------------------------------------


def _of_the_problem(key: str) -> bool:
    return key.startswith("data.") and key not in _RECIPE


def _problems(groups: Sequence[tuple[RunData, ...]]) -> list[str]:
    """The data of each group, as far as they differ in their settings or in the samples."""
    keys = [key for key in differing([runs[0] for runs in groups]) if _of_the_problem(key)]
    texts: list[str] = []
    for i, runs in enumerate(groups):
        twins = (j for j in range(i) if _same_samples(runs, groups[j]))
        twin = next(twins, None)
        if twin is not None:
            texts.append(texts[twin])
        else:
            texts.append(_data_in_words(runs[0], keys))
    if len(set(texts)) == 1:
        return [""] * len(groups)
    return texts


def _data_in_words(run: RunData, keys: Sequence[str]) -> str:
    """Such as `cifar10, alpha=0.1`: the values of these keys of [data]."""
    if not run.settings:
        return "unknown data"
    words = []
    for key in keys:
        value = run.settings.get(key)
        words.append(str(value) if key == "data.name" else f"{key.partition('.')[2]}={value}")
    return ", ".join(words)


def _same_samples(one: Sequence[RunData], other: Sequence[RunData]) -> bool:
    """Whether every common seed gave the same samples to the same clients."""
    ours = {run.seed: _samples(run) for run in one}
    theirs = {run.seed: _samples(run) for run in other}
    common = ours.keys() & theirs.keys()
    if not common:
        return False
    return all(ours[seed] is not None and ours[seed] == theirs[seed] for seed in common)


def _samples(run: RunData) -> tuple[str, str] | None:
    """What says which samples its clients hold: hashes, or settings where there is no hash."""
    population = run.about.get("population_hash")
    if not population:
        return None
    data = run.about.get("data_hashes")
    if not data:
        data = {}
        for key, value in run.settings.items():
            if _of_the_problem(key) and key not in _DEALING:
                data[key] = value
    return str(population), str(data)


# --- folders --------------------------------------------------------------------------------------


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _inside(folder: Path, say: Say) -> list[Path]:
    """A run folder itself, or those below: as sweep.json lists them, then any others by name."""
    if _is_run(folder):
        return [folder]
    if not folder.is_dir():
        return []
    below = sorted((path.parent.resolve() for path in folder.rglob("metrics.jsonl")), key=_natural)
    for path in below:
        if not _is_run(path):
            say(f"{path / 'metrics.jsonl'} is not a file; the run is left out.")
    paths = dict.fromkeys([*_listed(folder / "sweep.json", say), *below])
    return list(filter(_is_run, paths))


def _listed(sweep: Path, say: Say) -> list[Path]:
    """The run folders that a sweep.json names."""
    runs = checked.table(sweep.resolve(), say, {"runs": _names_runs}).get("runs")
    if not runs:
        return []
    return [(sweep.parent / run["path"]).resolve() for run in runs]


def _names_runs(runs: Any) -> bool:
    return isinstance(runs, list) and all(map(_names_a_run, runs))


def _names_a_run(run: Any) -> bool:
    if not isinstance(run, dict):
        return False
    return checked.is_text(run.get("path")) and "\0" not in run["path"]


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """A key by which numbers in names are in order: run-2 before run-10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]
