"""Results of an item: from run folders to a small JSON file, and from there to a table."""

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
from kairosfl.report.tables import fixed, signed
from kairosfl.runs.config import RunConfig, load, resolve, tables
from kairosfl.runs.files import plain, write
from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.item import Cell, Item, choose
from kairosfl_reproductions.measures import MEASURES, TRACES, RecordedRun

Results = dict[str, Any]
POINTS = 100  # at most, per curve
DIGITS = 4
WORDED, WORDED_CELL = ("title", "claim", "note", "sources", "hardware"), ("reading", "printed")
ABOUT = ("version", "git", "torch", "python", "device", "engine", "precision")
# What a round cost: columns of metrics.jsonl that are sums over the clients that reported.
A_ROUND = ("samples", "steps", "passes", "bytes_down", "bytes_up")


def identity(config: RunConfig) -> dict[str, Any]:
    """What identifies the cell of a run: its configuration without the seed, the rounds, and how it
    was executed.
    """
    whole = tables(config)
    del whole["seed"], whole["train"]["rounds"]
    whole["run"] = {"detector": config.run.detector}
    return whole


def altered(cell: Cell, changes: Sequence[str]) -> bool:
    """Whether changes make a cell another experiment, not only another way to execute it."""
    return bool(changes) and identity(cell.config(changes=changes)) != identity(cell.config())


def refuse_altered(item: Item, cells: Sequence[str], changes: Sequence[str]) -> None:
    """Refuse changes with which runs would no longer be those of the item, before they are added to
    its results.
    """
    for cell in choose(item, cells).values():
        if altered(cell, changes):
            told = " ".join(f"--set {change}" for change in changes)
            raise UserError(
                f"{told} makes another experiment of {item.key}, whose results --results adds to; leave either out."
            )


def collect(
    folders: Sequence[Path], item: Item, changes: Sequence[str] = (), baselines: Sequence[Path] = ()
) -> Results:
    """The results of an item from run folders: every run whose configuration, with `changes`, is
    that of a cell.

    Of two runs with the same cell and seed the longer one counts; of an interrupted run, the
    finished rounds count. Runs in the folders `baselines` only serve as baselines for these; a
    baseline has as many rounds as its run.
    """
    configs = {name: cell.config(changes=changes) for name, cell in item.cells.items()}
    cells = {_key(identity(config)): name for name, config in configs.items()}
    runs = _longest_runs(folders, cells)
    _give_baselines(runs, _longest_runs(baselines, cells) | runs, item)
    return {
        "item": item.key,
        "title": item.title,
        "claim": item.claim,
        "note": item.note,
        "beat": item.beat,
        "measures": list(item.measures),
        "sources": dict(item.sources),
        "hardware": item.hardware,
        "cells": _collected_cells(runs, item, configs, changes),
    }


def _give_baselines(runs: Found, known: Found, item: Item) -> None:
    """Tell each run which other one it is compared with: that of its seed, if it is as long."""
    for (name, seed), (run, rounds) in runs.items():
        baseline = item.cells[name].baseline
        if not baseline:
            baseline = name
        if (baseline, seed) in known:
            other, its_rounds = known[baseline, seed]
            if its_rounds == rounds:
                run.baseline = other


def _collected_cells(
    runs: Found, item: Item, configs: Mapping[str, RunConfig], changes: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """The cells that have runs, in the order of the item, each with its runs by seed."""
    entries: dict[str, list[dict[str, Any]]] = {}
    for (name, seed), (run, _) in sorted(runs.items(), key=lambda pair: pair[0][1]):
        entries.setdefault(name, []).append(_entry(run, seed, item))
    cells = {}
    for name, cell in item.cells.items():
        if name not in entries:
            continue
        cells[name] = {
            "reading": cell.reading,
            "baseline": cell.baseline,
            "printed": dict(cell.printed),
            "comparable": cell.comparable and not altered(cell, changes),
            "rounds": cell.config().train.rounds,
            "config": json.loads(_key(identity(configs[name]))),
            "runs": entries[name],
        }
    return cells


def save(results: Results, folder: Path) -> Path:
    """Merge results into the file of their item.

    Of two runs with the same cell and seed the longer one is kept; runs of an outdated
    configuration are dropped.
    """
    if not results["cells"]:
        raise UserError(
            f"None of these runs is a cell of {results['item']}; see its cells in `reproductions`."
        )
    path = folder / f"{results['item'].replace('/', '-')}.json"
    merged = _merge(read(path), results) if path.is_file() else results
    text = json.dumps(plain(merged), indent=1, ensure_ascii=False)
    # Each list of numbers on one line, or a curve would be a page long.
    text = re.sub(r"\[[^\[\]{}\"]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text)
    write(path, text + "\n")
    return path


def read(path: Path) -> Results:
    """Read a file written by `save`."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        results = None
    if not _are_results(results):
        raise UserError(f"{path} does not contain results; delete it and collect them again.")
    content: Results = results
    for cell in content["cells"].values():
        for run in cell["runs"]:
            run["curves"] = _by_todays_names(run["curves"])
    return content


def _by_todays_names(curves: Mapping[str, Any]) -> dict[str, Any]:
    """The curves of a run, of which earlier versions called some otherwise."""
    names = {trace.before: name for name, trace in TRACES.items() if trace.before}
    return {names.get(name, name): curve for name, curve in curves.items()}


def _are_results(content: object) -> bool:
    """Whether what a file contains has the form that `collect` gives it."""
    if not isinstance(content, dict) or not isinstance(content.get("cells"), dict):
        return False
    for cell in content["cells"].values():
        if not isinstance(cell, dict) or "comparable" not in cell:
            return False
        runs = cell.get("runs")
        if not isinstance(runs, list):
            return False
        if not all(isinstance(run, dict) and "curves" in run for run in runs):
            return False
    return True


def worded(results: Results) -> Results:
    """Stored results with what their item says and compares today, if it still exists; runs and
    settings stay.
    """
    item = ITEMS.get(results["item"])
    if item is None:
        return results
    cells = dict(results["cells"])
    for name in cells.keys() & item.cells.keys():
        cells[name] = cells[name] | {key: getattr(item.cells[name], key) for key in WORDED_CELL}
    return results | {key: getattr(item, key) for key in WORDED} | {"cells": cells}


def longest(cell: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The runs of a cell with the most rounds; only these count, as a mean over unequal rounds is
    meaningless.
    """
    most = max(run["rounds"] for run in cell["runs"])
    return [run for run in cell["runs"] if run["rounds"] == most]


def values(cell: Mapping[str, Any], measure: str) -> list[float]:
    """A measure of every run that counts, if known."""
    numbers = [run["values"].get(measure) for run in longest(cell)]
    return [number for number in numbers if number is not None]


def spread(numbers: Sequence[float], digits: int) -> str:
    """`mean ± standard deviation`; the latter only for two or more numbers."""
    if not numbers:
        return "–"
    text = fixed(statistics.fmean(numbers), digits)
    if len(numbers) > 1:
        text += f" ± {fixed(statistics.stdev(numbers), digits)}"
    return text


def complete(cell: Mapping[str, Any]) -> bool:
    """Whether its longest runs have as many rounds as the paper's."""
    return bool(longest(cell)[0]["rounds"] >= cell["rounds"])


def as_published(cell: Mapping[str, Any]) -> bool:
    """Whether a cell was run in the paper's setting and for all its rounds."""
    return complete(cell) and bool(cell["comparable"])


def done(cell: Mapping[str, Any]) -> str:
    """Rounds done, and of how many if incomplete."""
    rounds = str(longest(cell)[0]["rounds"])
    if complete(cell):
        return rounds
    return f"{rounds} of {cell['rounds']}"


def seeds(cell: Mapping[str, Any]) -> str:
    """How many runs count, and of how many if others ended earlier."""
    count = len(longest(cell))
    if count == len(cell["runs"]):
        return str(count)
    return f"{count} of {len(cell['runs'])}"


def table(results: Results) -> list[dict[str, str]]:
    """One row per cell: the reading, our value, the published value, their difference, and the
    rounds and seeds.
    """
    cells = results["cells"]
    published = set()
    measured = set()
    for measure in results["measures"]:
        if any(measure in cell["printed"] for cell in cells.values()):
            published.add(measure)
        if any(values(cell, measure) for cell in cells.values()):
            measured.add(measure)

    rows = []
    for name, cell in cells.items():
        row = {"cell": name, "reading": cell["reading"]}
        for measure in results["measures"]:
            if measure in published | measured:
                row |= _columns(cell, measure, published=measure in published)
        rows.append(row | {"rounds": done(cell), "seeds": seeds(cell)})
    return rows


def _columns(cell: Mapping[str, Any], measure: str, *, published: bool) -> dict[str, str]:
    """A measure in the row of a cell, with what is published next to it."""
    title = MEASURES[measure].title
    digits = MEASURES[measure].digits
    ours = values(cell, measure)
    columns = {title: spread(ours, digits)}
    if 0 < len(ours) < len(longest(cell)):
        columns[title] += f" ({len(ours)} of {len(longest(cell))})"
    if not published:
        return columns

    columns[f"{title}: published"] = "–"
    columns[f"{title}: difference"] = "–"
    number = cell["printed"].get(measure)
    if number is not None:
        columns[f"{title}: published"] = f"{number:.{digits}f}"
        if ours and as_published(cell):
            difference = statistics.fmean(ours) - number
            columns[f"{title}: difference"] = signed(difference, digits)
    return columns


def gain(results: Results, name: str, measure: str) -> tuple[list[float], float | None] | None:
    """The gain of a cell over its baseline, for every common seed, and as published. None without a
    baseline.
    """
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
    if measure not in cell["printed"] or measure not in base["printed"]:
        return ours, None
    return ours, cell["printed"][measure] - base["printed"][measure]


def _entry(run: RecordedRun, seed: int, item: Item) -> dict[str, Any]:
    about = {}
    if (run.path / "run.json").is_file():
        about = json.loads((run.path / "run.json").read_text())
    return {
        "seed": seed,
        "rounds": run.rows[-1]["round"],
        "evaluated": load(run.path / "config.toml").run.eval_every,
        **{key: about.get(key) for key in ABOUT},
        "seconds": round(float(run.column("seconds").sum()), 1),
        "a_round": {name: _mean_of(run, name) for name in A_ROUND},
        "values": {name: _rounded(MEASURES[name].of(run)) for name in item.measures},
        "curves": {name: _curve(run, name) for name in ("accuracy", *item.traces)},
    }


def _mean_of(run: RecordedRun, name: str) -> float | None:
    """The mean of a column over the rounds; None where one lacks it, as in runs of old versions."""
    numbers = run.column(name)
    if len(numbers) < len(run.rows):
        return None
    return round(float(numbers.mean()), 1)


def _curve(run: RecordedRun, name: str) -> dict[str, list[float]]:
    """At most `POINTS` points of a curve, including the first and the last, with enough digits for
    a plot.
    """
    rounds, values = TRACES[name].of(run)
    points = np.unique(
        np.linspace(0, max(len(rounds) - 1, 0), min(len(rounds), POINTS)).round().astype(int)
    )
    return {
        "round": rounds[points].tolist(),
        "value": [float(f"{value:.{DIGITS}g}") for value in values[points]],
    }


def _rounded(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return round(float(value), DIGITS)


def _merge(old: Results, new: Results) -> Results:
    """The new results with the runs of both, and the cells in the item's order."""
    cells = {**old["cells"], **new["cells"]}
    for name in old["cells"].keys() & new["cells"].keys():
        if _complete(old["cells"][name]["config"]) != _complete(new["cells"][name]["config"]):
            continue
        runs: dict[int, dict[str, Any]] = {}
        for run in (*old["cells"][name]["runs"], *new["cells"][name]["runs"]):
            if run["seed"] not in runs or run["rounds"] >= runs[run["seed"]]["rounds"]:
                runs[run["seed"]] = run
        cells[name] = {**new["cells"][name], "runs": [runs[seed] for seed in sorted(runs)]}
    order = list(cells)
    if new["item"] in ITEMS:
        order = [*ITEMS[new["item"]].cells, *cells]
    return {**new, "cells": {name: cells[name] for name in order if name in cells}}


def _complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """A stored configuration with the defaults of keys that were added since."""
    return identity(resolve(config))


Found = dict[tuple[str, int], tuple[RecordedRun, tuple[int, int]]]


def _longest_runs(folders: Sequence[Path], cells: Mapping[str, str]) -> Found:
    """The longest run of every cell and seed, with its rounds, planned and done."""
    longest_runs: Found = {}
    for path in _runs(folders):
        config = load(path / "config.toml")
        name = cells.get(_key(identity(config)))
        run = RecordedRun(path)
        if name and run.rows:
            before = longest_runs.get((name, config.seed))
            if before is None or len(before[0].rows) < len(run.rows):
                rounds = (config.train.rounds, run.rows[-1]["round"])
                longest_runs[name, config.seed] = run, rounds
    return longest_runs


def _key(value: Mapping[str, Any]) -> str:
    return json.dumps(value, sort_keys=True)


def _runs(folders: Sequence[Path]) -> list[Path]:
    for folder in folders:
        if not Path(folder).is_dir():
            raise UserError(
                f"{folder} is not a folder; give run folders, or folders that contain run folders."
            )
    runs = set()
    for folder in folders:
        for path in Path(folder).rglob("metrics.jsonl"):
            run = path.parent.resolve()
            if (run / "config.toml").is_file():
                runs.add(run)
    return sorted(runs)
