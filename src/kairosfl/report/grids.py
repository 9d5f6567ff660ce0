"""Heat maps of one run: clients by rounds, clients by classes, and clients by clients."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.report.checked import Array
from kairosfl.report.pictures import HeatMap, LeftOut, counted
from kairosfl.report.read import Group, RunData
from kairosfl.runs.metrics import PICTURED_CLIENTS

Whole = NDArray[np.int64]

# More cells than this are not visible on a screen; neighbours are averaged, and the note says so.
MOST_COLUMNS = 240
MOST_ROWS = 150
MOST_MATRICES = 6  # of cosines: the first, the last and evenly spaced ones in between

_FIELDS = {
    "weights": (
        "Aggregation weights",
        "weight",
        "Share of each client in the average; blank: not in the cohort.",
    ),
    "lambda": (
        "AWARE's λ",
        "λ",
        "Weights of the minimum-norm direction; blank: zero, or a client not seen yet.",
    ),
    "epochs": (
        "Epochs of each client",
        "epochs",
        "Local epochs before ALT stopped a client; blank: not in the cohort.",
    ),
    "similarity": (
        "Similarity to the reference",
        "cosine",
        "The last cosine that ALT's stop rule checked.",
    ),
    "score": (
        "PA3Fed's score",
        "score",
        "Loss, or accuracy, of the scored model on the client's own data.",
    ),
}
_ABSENT = {
    "weights": "clients.jsonl says nothing of them",
    "lambda": "only FedAWARE solves for it",
    "epochs": "clients.jsonl says nothing of them",
    "similarity": "only ALT measures it",
    "score": "only PA3Fed measures it",
}


def inside(number: int, group: Group) -> list[HeatMap | LeftOut]:
    """The heat maps of a group's first run; the cosines are from the first run that recorded them."""
    run = group.runs[0]
    whose = _whose(run, group)
    maps: list[HeatMap | LeftOut] = [_client_by_class(number, run, whose)]
    maps += _class_by_round(number, run, whose)
    maps += _confusions(number, run, whose)
    for field in _FIELDS:
        maps.append(_client_by_round(number, run, field, whose))
    return maps + _client_by_client(number, group)


def _whose(run: RunData, group: Group) -> str:
    return f"The run with seed {run.seed}." if len(group.runs) > 1 else ""


def _client_by_round(number: int, run: RunData, field: str, whose: str) -> HeatMap | LeftOut:
    title, value, note = _FIELDS[field]
    last = run.last  # clients.jsonl may be a round ahead of metrics.jsonl during a run
    rows = [row for row in run.clients if row.get(field) and row["round"] <= last]
    if not rows:
        return LeftOut("inside", title, _ABSENT[field], number)
    ids, rounds, values = _cells(rows, field)
    if not np.isfinite(values).any():
        return LeftOut("inside", title, "none of its values is a number", number)
    if field == "epochs" and (values == values[0]).all():
        words = "1 epoch" if values[0] == 1 else f"{values[0]:g} epochs"
        why = f"every client trained {words} whenever it took part"
        return LeftOut("inside", title, why, number)
    clients = int(ids.max(initial=0)) + 1
    if run.partition.get("clients"):
        clients = max(clients, int(run.partition["clients"]))
    grid, tall, wide = _binned(ids, rounds - 1, values, clients, last)
    if tall > 1 or wide > 1:
        note += f" A cell is the mean over {counted(tall, 'client')} and {counted(wide, 'round')}."
    return HeatMap(
        key=f"{field}-{number}",
        section="inside",
        title=title,
        note=f"{note} {whose}".strip(),
        group=number,
        x_label="round",
        y_label="client",
        value_label=value,
        x_range=(0.5, 0.5 + wide * grid.shape[1]),
        y_range=(-0.5, tall * grid.shape[0] - 0.5),
        grid=grid,
        power=0.5 if field in ("lambda", "weights") else 1.0,
        from_zero=field != "similarity",
    )


def _cells(rows: list[dict[str, Any]], field: str) -> tuple[Whole, Whole, Array]:
    """A field of clients.jsonl as three columns: client, round and value."""
    cells: list[tuple[int, int, float]] = []
    for row in rows:
        values = row[field]
        by_client = isinstance(values, dict)
        pairs = values.items() if by_client else zip(row["ids"], values, strict=True)
        for client, value in pairs:
            if value is not None:
                cells.append((int(client), row["round"], float(value)))
    ids = np.array([client for client, _, _ in cells], dtype=np.int64)
    rounds = np.array([number for _, number, _ in cells], dtype=np.int64)
    return ids, rounds, np.array([value for _, _, value in cells])


def _binned(
    ids: Whole, rounds: Whole, values: Array, clients: int, last: int
) -> tuple[Array, int, int]:
    """Means over blocks of `tall` clients and `wide` rounds, as small as the picture allows."""
    tall = _ceil(clients, MOST_ROWS)
    wide = _ceil(last, MOST_COLUMNS)
    shape = (_ceil(clients, tall), _ceil(last, wide))
    place = (ids // tall) * shape[1] + rounds // wide
    size = shape[0] * shape[1]
    count = np.bincount(place, minlength=size)
    with np.errstate(invalid="ignore"):
        grid = np.bincount(place, weights=values, minlength=size) / count
    return grid.reshape(shape), tall, wide


def _client_by_class(number: int, run: RunData, whose: str) -> HeatMap | LeftOut:
    title = "Client × class"
    counts = run.partition.get("counts")
    if not counts:
        return LeftOut("inside", title, _why_without_counts(run), number)
    table = np.array(counts, dtype=np.float64).T
    classes, clients = table.shape
    wide = _ceil(clients, MOST_COLUMNS)
    tall = _ceil(classes, MOST_ROWS)
    table = _blocks(_blocks(table, tall).T, wide).T
    table[table == 0] = np.nan
    note = "Training samples of each class that a client holds; blank: none."
    if wide > 1 or tall > 1:
        note += f" A cell is the mean over {counted(wide, 'client')} and {counted(tall, 'class')}."
    return HeatMap(
        key=f"partition-{number}",
        section="inside",
        title=title,
        note=f"{note} {whose}".strip(),
        group=number,
        x_label="client",
        y_label="class",
        value_label="samples",
        x_range=(-0.5, wide * table.shape[1] - 0.5),
        y_range=(-0.5, tall * table.shape[0] - 0.5),
        grid=table,
        names=_class_names(run, classes) if tall == 1 else (),
        power=0.5,
    )


def _why_without_counts(run: RunData) -> str:
    """Why it is not known how many samples of each class a client holds."""
    if not (run.path / "partition.json").exists():
        return "partition.json is missing"
    clients = run.partition.get("clients")
    if not clients:
        return "partition.json has none"
    if clients <= PICTURED_CLIENTS:
        return "samples do not have one class each"
    return f"{clients} clients are too many to draw"


def _class_by_round(number: int, run: RunData, whose: str) -> list[HeatMap]:
    """The accuracy of every class in evaluated rounds; no setting adds it where it is missing."""
    rows = [row for row in run.clients if row.get("class_accuracy") and row["round"] <= run.last]
    classes = max((len(row["class_accuracy"]) for row in rows), default=0)
    rows = [row for row in rows if len(row["class_accuracy"]) == classes]
    table = np.array([row["class_accuracy"] for row in rows], dtype=np.float64)
    if not np.isfinite(table).any():
        return []
    rounds = np.array([row["round"] for row in rows])
    gaps = np.sort(np.diff(rounds, prepend=0))
    usual_gap = int(gaps[len(gaps) // 2])  # as a rule, run.eval_every
    wide = max(usual_gap, _ceil(run.last, MOST_COLUMNS))
    grid = np.full((classes, _ceil(run.last, wide)), np.nan)
    columns = (rounds - 1) // wide
    for column in np.unique(columns):
        shares = table[columns == column]
        total = np.nansum(shares, axis=0)
        grid[:, column] = total / np.maximum(np.isfinite(shares).sum(0), 1)
    grid[~np.isfinite(table).any(0)] = np.nan
    return [
        HeatMap(
            key=f"classes-{number}",
            section="inside",
            title="Accuracy of each class",
            note=f"Share of the test samples of a class that are recognised. {whose}".strip(),
            group=number,
            x_label="round",
            y_label="class",
            value_label="share",
            x_range=(0.5, 0.5 + wide * grid.shape[1]),
            y_range=(-0.5, classes - 0.5),
            grid=grid,
            names=_class_names(run, classes),
            scale=(0.0, 1.0),
        )
    ]


def _confusions(number: int, run: RunData, whose: str) -> list[HeatMap]:
    """Which classes are taken for which, in the first, the middle and the last round that has it."""
    rows = [row for row in run.clients if row.get("confusion") and row["round"] <= run.last]
    if not rows:
        return []
    note = (
        "Share of the test samples of a class, in its row, that are taken for each class; blank: "
        "none."
    )
    maps = []
    for place in sorted({0, len(rows) // 2, len(rows) - 1}):
        row = rows[place]
        counts = np.array(row["confusion"], dtype=np.float64)
        with np.errstate(invalid="ignore"):
            grid = counts / counts.sum(1, keepdims=True)
        grid[counts == 0] = np.nan
        ends = (-0.5, len(grid) - 0.5)
        maps.append(
            HeatMap(
                key=f"confusion-{row['round']}-{number}",
                section="inside",
                title=f"Confusion, round {row['round']}",
                note=f"{note} {whose}".strip(),
                group=number,
                x_label="taken for class",
                y_label="class",
                value_label="share",
                x_range=ends,
                y_range=ends,
                grid=grid,
                names=_class_names(run, len(grid)),
                power=0.5,
                scale=(0.0, 1.0),
            )
        )
    return maps


def _class_names(run: RunData, classes: int) -> tuple[str, ...]:
    labels = run.partition.get("labels")
    if not labels or len(labels) != classes:
        return ()
    return tuple(map(str, labels))


def _client_by_client(number: int, group: Group) -> list[HeatMap | LeftOut]:
    """The cosines between the updates of a cohort, from the first run that has any.

    All rounds are on one scale.
    """
    title = "Cosines between updates"
    for run in group.runs:
        rows = [row for row in run.clients if _has_pairs(row)]
        if rows:
            break
    else:
        why = "no round was requested; set run.cosines = [1, 10]"
        if group.runs[0].settings.get("run.cosines"):
            why = "no round in run.cosines has been reached yet, or none with two clients"
        return [LeftOut("inside", title, why, number)]

    spread = np.linspace(0, len(rows) - 1, min(len(rows), MOST_MATRICES))
    places = np.unique(spread.round().astype(int))
    note = (
        "How alike the updates of every two clients are; blank: a client and itself. All rounds "
        "share one scale."
    )
    if len(places) < len(rows):
        note += (
            f" These are {len(places)} of the {len(rows)} recorded rounds; clients.jsonl has all."
        )
    note = f"{note} {_whose(run, group)}".strip()

    tables = [_cosines(rows[place]) for place in places]
    lowest = min(float(np.nanmin(table)) for table in tables)
    highest = max(float(np.nanmax(table)) for table in tables)
    maps: list[HeatMap | LeftOut] = []
    for place, table in zip(places, tables, strict=True):
        maps.append(_matrix(number, title, rows[place], table, (lowest, highest), note))
    return maps


def _matrix(
    number: int,
    title: str,
    row: dict[str, Any],
    table: Array,
    scale: tuple[float, float],
    note: str,
) -> HeatMap:
    tall = _ceil(len(table), MOST_ROWS)
    grid = _blocks(_blocks(table, tall).T, tall).T
    has_everyone = max(row["ids"]) < len(row["ids"])
    axis = "client" if has_everyone else "place in the cohort"
    ends = (-0.5, tall * len(grid) - 0.5)
    return HeatMap(
        key=f"cosines-{row['round']}-{number}",
        section="inside",
        title=f"{title}, round {row['round']}",
        note=f"{note} A cell is the mean over {tall} by {tall} clients." if tall > 1 else note,
        group=number,
        x_label=axis,
        y_label=axis,
        value_label="cosine",
        x_range=ends,
        y_range=ends,
        grid=grid,
        scale=scale,
    )


def _has_pairs(row: dict[str, Any]) -> bool:
    """Whether a line of clients.jsonl has the cosine of any two clients."""
    return bool(row.get("cosines")) and bool(np.isfinite(_cosines(row)).any())


def _cosines(row: dict[str, Any]) -> Array:
    """The matrix in the order of the clients, without the ones on its diagonal.

    They would dominate the colours.
    """
    table = np.array(row["cosines"], dtype=np.float64)
    np.fill_diagonal(table, np.nan)
    ordered = np.argsort(row["ids"])
    return table[np.ix_(ordered, ordered)]


def _ceil(number: int, size: int) -> int:
    """How many blocks of this size hold this many."""
    return -(-number // size)


def _blocks(table: Array, size: int) -> Array:
    """Means over blocks of `size` rows; the last block may hold fewer."""
    if size == 1:
        return table
    padded = np.full((_ceil(len(table), size) * size, table.shape[1]), np.nan)
    padded[: len(table)] = table
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return np.asarray(np.nanmean(padded.reshape(-1, size, table.shape[1]), axis=1))
