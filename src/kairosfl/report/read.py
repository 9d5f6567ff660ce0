"""Run folders read into plain records, and runs that differ only in their seed put into groups."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.errors import UserError
from kairosfl.runs import STOPPED
from kairosfl.runs.files import read_lines
from kairosfl.runs.keys import flatten

Array = NDArray[np.float64]

# What two runs of one curve may differ in: it changes neither the algorithm nor the problem.
_INCIDENTAL = {"seed", "run.checkpoint_every", "run.threads", "run.client_accuracy", "run.cosines", "run.track"}
# What of [data] is how clients train, not what there is to learn.
_RECIPE = {"data.augment"}
# How samples are dealt to clients: with the same samples for each, it does not matter which way.
_DEALS = ("partition", "clients", "alpha", "minimum", "shards", "balance", "partition_seed")
_DEALING = {f"data.{name}" for name in _DEALS}
# Nor does it matter who trained, unless that is what is compared: one seed by several.
_TRAINERS = {"run.engine", "run.device", "run.slots", "run.deterministic"}


@dataclass(frozen=True)
class RunData:
    """One run folder. Columns hold a value a round, NaN where nothing was written."""

    path: Path
    algorithm: str
    seed: int
    settings: Mapping[str, Any]  # the configuration, flat: "train.lr" -> 0.1
    config: str  # the same as the text of config.toml
    about: Mapping[str, Any]  # run.json
    summary: Mapping[str, Any]  # summary.json; empty while the run goes on
    partition: Mapping[str, Any]  # partition.json
    columns: Mapping[str, Array]

    def column(self, name: str) -> Array:
        """One value a round; all NaN when the folder has none."""
        return self.columns.get(name, np.full(self.rounds, np.nan))

    def total(self, *names: str) -> Array:
        """The sum of these columns up to and including each round."""
        added = np.sum([np.nan_to_num(self.column(name)) for name in names], axis=0)
        known = np.any([np.isfinite(self.column(name)) for name in names])
        return np.cumsum(added) if known else np.full(self.rounds, np.nan)

    @property
    def rounds(self) -> int:
        """Rounds written down so far."""
        return len(self.columns["round"])

    @property
    def planned(self) -> int:
        """Rounds that the run was asked for."""
        return int(self.settings.get("train.rounds", self.rounds))

    @property
    def done(self) -> bool:
        """Whether the run has come to its end."""
        return bool(self.summary)

    @cached_property
    def stopped(self) -> str:
        """Why it cannot go on as it is, if it said so."""
        lines = _text(self.path / "log.txt").splitlines()
        return lines[-1].removeprefix(STOPPED) if lines and lines[-1].startswith(STOPPED) and not self.done else ""

    @cached_property
    def clients(self) -> list[dict[str, Any]]:
        """What happened to each client, an object a round; read when first asked for, as it may be large."""
        return list(read_lines(self.path / "clients.jsonl"))


@dataclass(frozen=True)
class Group:
    """Runs that differ only in their seed: one curve with a band.

    `problem` names the data where groups differ in them: accuracies on other data are not better or worse.
    """

    label: str
    runs: tuple[RunData, ...]
    problem: str = ""

    @property
    def algorithm(self) -> str:
        return self.runs[0].algorithm


def find_runs(dirs: Sequence[Path]) -> list[Path]:
    """The run folders among these folders and those inside them, in the order of a sweep where there is one."""
    found: dict[Path, None] = {}
    for given in map(Path, dirs):
        if not given.exists():
            raise UserError(f"There is no folder {given}; give a run folder or a folder of run folders.")
        inside = [given] if _is_run(given) else _inside(given) if given.is_dir() else []
        # Among others, as runs/* may have them, files and empty folders are passed over.
        exported = (given.parent / "sweep.json").is_file()  # pictures or tables beside the runs, as study/* has them
        if not inside and (len(dirs) == 1 or (given.is_dir() and any(given.iterdir()) and not exported)):
            raise UserError(
                f"{given} holds no run (no metrics.jsonl in it or in a folder below); give a folder that "
                "`kairosfl run` or `kairosfl sweep` wrote."
            )
        found.update(dict.fromkeys(path.resolve() for path in inside))
    return list(found)


def waiting(dirs: Sequence[Path]) -> int:
    """How many runs of the sweeps in these folders have not begun."""
    sweeps = [path for given in dirs for path in Path(given).rglob("sweep.json")]
    return sum(not _is_run(folder) for folder in {path for sweep in sweeps for path in _listed(sweep)})


def read_run(path: Path) -> RunData:
    """One run folder as it stands; a last line that is still being written is left for the next time."""
    text = _text(path / "config.toml")
    try:
        settings = flatten(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path / 'config.toml'} is not valid TOML: {error}.") from None
    about = _json(path / "run.json")
    return RunData(
        path=path,
        algorithm=str(settings.get("algorithm", about.get("algorithm", path.name))),
        seed=int(settings.get("seed", about.get("seed", 0))),
        settings=settings,
        config=text,
        about=about,
        summary=_json(path / "summary.json"),
        partition=_json(path / "partition.json"),
        columns=_columns(path / "metrics.jsonl"),
    )


def read_groups(dirs: Sequence[Path]) -> list[Group]:
    """Every run in these folders that has finished a round, grouped."""
    runs = [run for run in map(read_run, find_runs(dirs)) if run.rounds]
    if not runs:
        raise UserError(f"No run in {', '.join(map(str, dirs))} has finished a round yet; wait for the first one.")
    return group_runs(runs)


def group_runs(runs: Iterable[RunData]) -> list[Group]:
    """Runs that differ only in their seed together, each group labelled by what sets it apart."""
    members = []
    for group in _alike(runs, _INCIDENTAL | _TRAINERS):
        parts = _alike(group, _INCIDENTAL)
        compared = sum(len({run.seed for run in part}) for part in parts) > len({run.seed for run in group})
        members += [_longest(each) for each in (parts if compared else [group])]
    problems = _problems(members)
    first = [each[0] for each in members]
    stated = {key for key in differing(first) if any(problems) and _of_the_problem(key)}
    for without in (stated | _TRAINERS, stated, _TRAINERS, set()):  # the shortest labels that tell all apart
        pairs = zip(_labels(first, without), problems, strict=True)
        labels = [own if problem in own else " · ".join(filter(None, (own, problem))) for own, problem in pairs]
        if len(set(labels)) == len(members):
            break
    return [Group(label, each, problem) for label, each, problem in zip(labels, members, problems, strict=True)]


def _longest(runs: Sequence[RunData]) -> tuple[RunData, ...]:
    """By seed; of runs that repeat one, those that got furthest: a stopped one would be averaged into the finished."""
    most = {seed: max(run.rounds for run in runs if run.seed == seed) for seed in sorted({run.seed for run in runs})}
    return tuple(run for seed, rounds in most.items() for run in runs if run.seed == seed and run.rounds == rounds)


def _alike(runs: Iterable[RunData], but: set[str]) -> list[list[RunData]]:
    """Runs with the same settings together, but for these."""
    groups: dict[str, list[RunData]] = {}
    for run in runs:
        own = {key: value for key, value in run.settings.items() if key not in but} or {"path": str(run.path)}
        groups.setdefault(json.dumps(own, sort_keys=True, default=str), []).append(run)
    return list(groups.values())


def differing(runs: Sequence[RunData]) -> list[str]:
    """The settings in which these runs are not all alike, seed and algorithm apart."""
    keys = dict.fromkeys(key for run in runs for key in run.settings)
    own = [key for key in keys if key not in _INCIDENTAL | {"algorithm"}]
    return [key for key in own if len({json.dumps(run.settings.get(key), default=str) for run in runs}) > 1]


def _labels(runs: Sequence[RunData], without: set[str]) -> list[str]:
    """The algorithm, with the settings that tell apart those of the same text; only those if all have one text."""
    labels = []
    for run in runs:
        alike = [other for other in runs if other.algorithm == run.algorithm]
        keys = [key for key in differing(alike) if key not in without]
        own = ", ".join(f"{key.rpartition('.')[2]}={run.settings.get(key)}" for key in keys)
        told = own or any(_of_the_problem(key) for key in without)  # by what stands beside it
        whole = own if told and len(alike) == len(runs) else " · ".join(filter(None, [run.algorithm, own]))
        labels.append(whole)
    return labels


def _of_the_problem(key: str) -> bool:
    return key.startswith("data.") and key not in _RECIPE


def _problems(groups: Sequence[tuple[RunData, ...]]) -> list[str]:
    """The data of each group, as far as they are not all alike by their settings or by the samples themselves."""
    keys = [key for key in differing([runs[0] for runs in groups]) if _of_the_problem(key)]
    texts: list[str] = []
    for i, runs in enumerate(groups if keys else ()):
        own = [(key.partition(".")[2], runs[0].settings.get(key)) for key in keys]
        twin = next((j for j in range(i) if _same_samples(runs, groups[j])), None)
        text = ", ".join(str(value) if name == "name" else f"{name}={value}" for name, value in own)
        texts.append(text if twin is None else texts[twin])
    return texts if len(set(texts)) > 1 else [""] * len(groups)


def _same_samples(one: Sequence[RunData], other: Sequence[RunData]) -> bool:
    """Whether every seed that both have dealt the same samples to the same clients."""
    ours, theirs = ({run.seed: _samples(run) for run in runs} for runs in (one, other))
    shared = ours.keys() & theirs.keys()
    return bool(shared) and all(ours[seed] is not None and ours[seed] == theirs[seed] for seed in shared)


def _samples(run: RunData) -> tuple[str, str] | None:
    population, data = run.about.get("population_hash"), run.about.get("data_hashes")
    named = {key: value for key, value in run.settings.items() if _of_the_problem(key) and key not in _DEALING}
    return (str(population), str(data or named)) if population else None


def _is_run(folder: Path) -> bool:
    return (folder / "metrics.jsonl").is_file()


def _inside(folder: Path) -> list[Path]:
    """Run folders below this one: as sweep.json lists them, then any others by name, numbers in order."""
    below = sorted((path.parent.resolve() for path in folder.rglob("metrics.jsonl")), key=_natural)
    return [path for path in dict.fromkeys([*_listed(folder / "sweep.json"), *below]) if _is_run(path)]


def _listed(sweep: Path) -> list[Path]:
    """The run folders that a sweep.json names."""
    return [(sweep.parent / str(run["path"])).resolve() for run in _json(sweep).get("runs", []) if "path" in run]


def _natural(path: Path) -> list[tuple[int, int | str]]:
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part)) if part.isdigit() else (1, part) for part in parts]


def _columns(path: Path) -> dict[str, Array]:
    """Metrics as columns, by round; a round that was written twice counts as it was written last."""
    rows = {int(row["round"]): row for row in read_lines(path) if isinstance(row, dict) and "round" in row}
    ordered = [rows[number] for number in sorted(rows)]
    names = dict.fromkeys(name for row in ordered for name in row)
    columns = {name: np.array([_number(row.get(name)) for row in ordered], dtype=np.float64) for name in names}
    return {"round": np.zeros(0)} | columns


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}.") from None


def _json(path: Path) -> dict[str, Any]:
    text = _text(path)
    try:
        value = json.loads(text) if text else {}
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} must hold a JSON object.")
    return value
