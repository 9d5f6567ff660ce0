"""Results of an item: from run folders to a small JSON file, and from that to a table."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.papers import ITEMS
from kairosfl.papers.item import Item
from kairosfl.papers.measures import MEASURES, TRACES, Course
from kairosfl.report.tables import fixed, signed
from kairosfl.runs.config import RunConfig, load, tables
from kairosfl.runs.files import plain, write

Results = dict[str, Any]
POINTS = 100  # at most, of a curve
DIGITS = 4
ABOUT = ("version", "git", "torch", "python", "device", "engine", "precision")


def identity(config: RunConfig) -> dict[str, Any]:
    """What makes a run a cell: its configuration without the seed, the rounds, and how it was carried out."""
    whole = tables(config)
    del whole["seed"], whole["train"]["rounds"]
    whole["run"] = {"detector": config.run.detector}
    return whole


def collect(folders: Sequence[Path], item: Item, changes: Sequence[str] = (), beside: Sequence[Path] = ()) -> Results:
    """What the runs in these folders say about an item: every run whose configuration, `changes` made, is a cell's.

    Of two runs of one cell and seed the longer one counts, and a run that was cut counts as far as it got. Runs in the
    folders `beside` are baselines for these, and nothing more.
    """
    configs = {name: cell.config(changes=changes) for name, cell in item.cells.items()}
    cells = {_key(identity(config)): name for name, config in configs.items()}
    found = _courses(folders, cells)
    baselines = _courses(beside, cells) | found
    for (name, seed), (course, rounds) in found.items():
        baseline, its_rounds = baselines.get((item.cells[name].baseline or name, seed), (None, rounds))
        course.baseline = baseline if its_rounds == rounds else None
    return {
        "item": item.key,
        "title": item.title,
        "claim": item.claim,
        "note": item.note,
        "beat": item.beat,
        "measures": list(item.measures),
        "cells": {
            name: {
                "reading": cell.reading,
                "baseline": cell.baseline,
                "printed": dict(cell.printed),
                "judged": cell.judged,
                "rounds": cell.config().train.rounds,
                "config": json.loads(_key(identity(configs[name]))),
                "runs": [
                    _run(course, seed, item)
                    for (own, seed), (course, _) in sorted(found.items(), key=lambda pair: pair[0][1])
                    if own == name
                ],
            }
            for name, cell in item.cells.items()
            if any(own == name for own, _ in found)
        },
    }


def save(results: Results, folder: Path) -> Path:
    """Put results into their file, beside those that it has.

    Of two runs of one cell and seed the longer one stays; runs of another configuration of the cell do not.
    """
    if not results["cells"]:
        raise UserError(f"None of these runs is a cell of {results['item']}; its cells are in `kairosfl.papers`.")
    path = folder / f"{results['item'].replace('/', '-')}.json"
    merged = _merge(read(path), results) if path.is_file() else results
    text = json.dumps(plain(merged), indent=1, ensure_ascii=False)
    # Lists of numbers on one line each, or a curve would be a page long.
    text = re.sub(r"\[[^\[\]{}\"]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    write(path, text + "\n")
    return path


def read(path: Path) -> Results:
    """A file that `save` wrote."""
    try:
        results: Results = json.loads(path.read_text(encoding="utf-8"))
        assert all("curves" in run for cell in results["cells"].values() for run in cell["runs"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError, AssertionError):
        raise UserError(f"{path} holds no results; delete it and collect them again.") from None
    return results


def longest(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a cell that got furthest: those that count. A mean over unequal rounds would mean nothing."""
    most = max(run["rounds"] for run in cell["runs"])
    return [run for run in cell["runs"] if run["rounds"] == most]


def values(cell: Mapping[str, Any], measure: str) -> list[float]:
    """A measure of every run that counts, where it is known."""
    return [run["values"][measure] for run in longest(cell) if run["values"].get(measure) is not None]


def spread(numbers: Sequence[float], digits: int) -> str:
    """`mean ± deviation`; the deviation only where there are two or more."""
    if not numbers:
        return "–"
    shown = fixed(statistics.fmean(numbers), digits)
    return f"{shown} ± {fixed(statistics.stdev(numbers), digits)}" if len(numbers) > 1 else shown


def complete(cell: Mapping[str, Any]) -> bool:
    """Whether its longest runs have the paper's rounds."""
    return bool(longest(cell)[0]["rounds"] >= cell["rounds"])


def done(cell: Mapping[str, Any]) -> str:
    """Rounds done, of how many where it is not all."""
    rounds = str(longest(cell)[0]["rounds"])
    return rounds if complete(cell) else f"{rounds} of {cell['rounds']}"


def seeds(cell: Mapping[str, Any]) -> str:
    """How many runs count, of how many where others ended sooner."""
    count = len(longest(cell))
    return str(count) if count == len(cell["runs"]) else f"{count} of {len(cell['runs'])}"


def table(results: Results) -> list[dict[str, str]]:
    """A row a cell: what was read, ours, printed, the difference, and how many rounds and seeds stand behind it."""
    printed = [m for m in results["measures"] if any(m in cell["printed"] for cell in results["cells"].values())]
    rows = []
    for name, cell in results["cells"].items():
        row = {"cell": name, "reading": cell["reading"]}
        for measure in results["measures"]:
            title, digits = MEASURES[measure].title, MEASURES[measure].digits
            ours = values(cell, measure)
            row[title] = spread(ours, digits)
            if 0 < len(ours) < len(longest(cell)):
                row[title] += f" ({len(ours)} of {len(longest(cell))})"
            if measure in printed:
                value = cell["printed"].get(measure)
                row[f"{title}: printed"] = "–" if value is None else f"{value:.{digits}f}"
                known = ours and value is not None
                row[f"{title}: difference"] = signed(statistics.fmean(ours) - value, digits) if known else "–"
        rows.append(row | {"rounds": done(cell), "seeds": seeds(cell)})
    return rows


def gain(results: Results, name: str, measure: str) -> tuple[list[float], float | None] | None:
    """What a cell adds to its baseline: ours for every seed that both have, and printed. None without a baseline."""
    cell = results["cells"][name]
    base = results["cells"].get(cell["baseline"])
    if base is None:
        return None
    before = {(run["seed"], run["rounds"]): run["values"].get(measure) for run in base["runs"]}
    ours = []
    for run in longest(cell):
        first, second = before.get((run["seed"], run["rounds"])), run["values"].get(measure)
        if first is not None and second is not None:
            ours.append(second - first)
    known = measure in cell["printed"] and measure in base["printed"]
    return ours, cell["printed"][measure] - base["printed"][measure] if known else None


def _run(course: Course, seed: int, item: Item) -> dict[str, Any]:
    about = json.loads((course.path / "run.json").read_text()) if (course.path / "run.json").is_file() else {}
    return {
        "seed": seed,
        "rounds": course.rows[-1]["round"],
        "evaluated": load(course.path / "config.toml").run.eval_every,
        **{key: about.get(key) for key in ABOUT},
        "seconds": round(float(course.column("seconds").sum()), 1),
        "values": {name: _rounded(MEASURES[name].of(course)) for name in item.measures},
        "curves": {name: _curve(course, name) for name in ("accuracy", *item.traces)},
    }


def _curve(course: Course, name: str) -> dict[str, list[float]]:
    """Some points of a curve, the first and the last among them, in as many digits as a picture needs."""
    rounds, values = TRACES[name].of(course)
    points = np.unique(np.linspace(0, max(len(rounds) - 1, 0), min(len(rounds), POINTS)).round().astype(int))
    return {"round": rounds[points].tolist(), "value": [float(f"{value:.{DIGITS}g}") for value in values[points]]}


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(float(value), DIGITS)


def _merge(old: Results, new: Results) -> Results:
    """The new item with the runs of both, its cells in their own order."""
    cells = {**old["cells"], **new["cells"]}
    for name in old["cells"].keys() & new["cells"].keys():
        if old["cells"][name]["config"] != new["cells"][name]["config"]:
            continue
        runs: dict[int, dict[str, Any]] = {}
        for run in (*old["cells"][name]["runs"], *new["cells"][name]["runs"]):
            if run["seed"] not in runs or run["rounds"] >= runs[run["seed"]]["rounds"]:
                runs[run["seed"]] = run
        cells[name] = {**new["cells"][name], "runs": [runs[seed] for seed in sorted(runs)]}
    known = ITEMS[new["item"]].cells if new["item"] in ITEMS else {}
    return {**new, "cells": {name: cells[name] for name in (*known, *cells) if name in cells}}


def _courses(folders: Sequence[Path], cells: Mapping[str, str]) -> dict[tuple[str, int], tuple[Course, int]]:
    """The longest run of every cell and seed, and the rounds that it was to have."""
    found: dict[tuple[str, int], tuple[Course, int]] = {}
    for path in _runs(folders):
        config = load(path / "config.toml")
        name = cells.get(_key(identity(config)))
        course = Course(path)
        if name and course.rows:
            before = found.get((name, config.seed))
            if before is None or len(before[0].rows) < len(course.rows):
                found[name, config.seed] = course, config.train.rounds
    return found


def _key(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _runs(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(f"There is no folder {folder}; give run folders, or folders of run folders.")
    found = {path.parent.resolve() for folder in folders for path in Path(folder).rglob("metrics.jsonl")}
    return sorted(path for path in found if (path / "config.toml").is_file())
