"""What is recorded about a round and about a run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kairosfl.core.fields import AFTER, BEFORE, Reports
from kairosfl.core.measures import cosine_matrix
from kairosfl.core.run import Run
from kairosfl.engines.evaluate import Scores
from kairosfl.runs.history import final_tenth
from kairosfl.tasks.metrics import TAKEN, Metric
from kairosfl.tasks.task import Task

PICTURED_CLIENTS = 2000
CONFUSED_CLASSES = 20  # at most, or the matrix would be the larger part of the file
FLICKER = "flicker"  # what `judged` calls answers that make no period
QUANTILES = 21  # of the clients' main metric


def row(
    run: Run,
    task: Task,
    scores: Scores | None,
    own: np.ndarray | None,
    seconds: float,
    plain: Scores | None = None,
) -> dict[str, Any]:
    """One line of metrics.jsonl; `plain` are the scores of the model itself, where the result is
    another vector.
    """
    record, signals = run.record, run.signals
    assert record is not None
    reports = record.reports
    main, metric = task.main
    return {
        "round": run.round,
        "metric": main,
        "evaluated": scores is not None,  # if it was, null is a number that was not finite
        **(scores.metrics if scores else dict.fromkeys(task.measures)),
        "loss": scores.loss if scores else None,
        "train_loss": float(record.weights @ reports.loss) if reports else None,
        "cohort": record.asked,
        "reported": len(record.ids),
        "rejected": len(record.rejected),
        "critical": signals.critical,
        **{name: value for name, value in signals.values.items() if name in TAKEN},
        "elud": signals.elud,
        "coherence": signals.coherence,
        "consensus": record.consensus,
        "epochs": float(reports.epochs.mean()) if reports else 0.0,
        "epochs_total": float(reports.epochs.sum()) if reports else 0.0,
        "steps": int(reports.steps.sum()) if reports else 0,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "lr": record.lr,
        "fisher_seconds": _all(reports, "fisher_seconds", sum),
        "fisher_bytes": _all(reports, "fisher_bytes", max) or None,
        f"client_{main}_mean": float(np.nanmean(own)) if own is not None else None,
        f"client_{main}_worst": worst_tenth(own, higher=is_higher(metric))
        if own is not None
        else None,
        "seconds": seconds,
        **({f"plain_{main}": plain.main} if plain else {}),
    }


def from_elsewhere(run: Run) -> dict[str, float]:
    """The values of detectors that are not part of Kairos, by their full names."""
    return {name: value for name, value in run.signals.values.items() if name not in TAKEN}


def _all(reports: Reports | None, name: str, together: Callable[[list[Any]], Any]) -> Any:
    """A measurement summed up over all reporters; None: not measured."""
    value = getattr(reports, name, None)
    return None if value is None else together(value.tolist())


def is_higher(metric: Metric | None) -> bool:
    """Whether higher values are better; None is the loss."""
    return metric is not None and metric.better == "higher"


def worst_tenth(values: np.ndarray, *, higher: bool = True) -> float:
    """The mean over the tenth of the clients with the worst values."""
    known = np.sort(values[~np.isnan(values)])
    known = known if higher else known[::-1]
    return float(known[: max(1, len(known) // 10)].mean())


def clients_row(
    run: Run,
    task: Task,
    own: np.ndarray | None,
    scores: Scores | None = None,
    *,
    cosines: bool = False,
) -> dict[str, Any]:
    """One line of clients.jsonl; `own` is the main metric of every client, if requested."""
    record = run.record
    assert record is not None
    reports = record.reports
    line: dict[str, Any] = {
        "round": run.round,
        "ids": record.ids.tolist(),
        "rejected": list(record.rejected),
    }
    if own is not None:
        quantiles = np.nanquantile(own, np.linspace(0, 1, QUANTILES)).tolist()
        line[f"{task.main[0]}_quantiles"] = [float(f"{value:.4g}") for value in quantiles]
    if scores and scores.confusion:
        line |= _by_class(scores.confusion)
    if reports is None:
        return line
    if cosines:
        line["cosines"] = np.round(cosine_matrix(reports.delta).double().cpu().numpy(), 4).tolist()
    score = next(
        (found for name in AFTER + BEFORE if (found := getattr(reports, name)) is not None), None
    )
    return line | {
        "n": reports.n.tolist(),
        "weights": record.weights.tolist(),
        "epochs": reports.epochs.tolist(),
        "steps": reports.steps.tolist(),
        "loss": reports.loss.tolist(),
        "similarity": None if reports.similarity is None else reports.similarity.tolist(),
        "score": None if score is None else score.tolist(),
        "lambda": _lambda(run),
    }


def _by_class(confusion: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The accuracy of every class, None for one without samples, and for few classes who is taken
    for whom.
    """
    right = [row[i] / sum(row) if sum(row) else None for i, row in enumerate(confusion)]
    accuracy = [None if share is None else float(f"{share:.4g}") for share in right]
    counts = [list(row[:-1]) for row in confusion] if len(confusion) <= CONFUSED_CLASSES else None
    return {"class_accuracy": accuracy, "confusion": counts}


def _lambda(run: Run) -> dict[str, float] | None:
    """The weights of a rule that combines every stored row, by client."""
    for slot, table in zip(run.states, run.tables, strict=True):
        if "lambda" in slot and len(slot["lambda"]) == len(table):
            values = slot["lambda"].tolist()
            return {
                str(client): value
                for client, value in zip(table.ids, values, strict=True)
                if value > 1e-6
            }
    return None


def partition_note(task: Task) -> dict[str, Any]:
    """Sizes and, for a population that can be drawn, the label counts of every client."""
    clients, dataset, labels = task.clients, task.dataset, task.dataset.labels_of_train
    counts = None
    if labels is not None and len(clients) <= PICTURED_CLIENTS and dataset.classes <= 1000:
        owner = np.repeat(np.arange(len(clients)), clients.sizes)
        pairs = owner * dataset.classes + labels[clients.order]
        counts = (
            np.bincount(pairs, minlength=len(clients) * dataset.classes)
            .reshape(len(clients), -1)
            .tolist()
        )
    return {
        "clients": len(clients),
        "classes": dataset.classes,
        "labels": list(dataset.labels),
        "sizes": clients.sizes.tolist() if len(clients) <= 100_000 else None,
        "counts": counts,
    }


# The columns of metrics.jsonl that a summary needs besides the main metric; a line without one of
# them is damaged.
NEEDED: dict[str, Any] = dict.fromkeys(("loss", "elud"), int | float | None) | dict.fromkeys(
    (
        "cohort",
        "rejected",
        "critical",
        "epochs_total",
        "steps",
        "bytes_down",
        "bytes_up",
        "seconds",
    ),
    int | float,
)


def needed(main: str) -> dict[str, Any]:
    """The columns that a line of a run with this main metric must have."""
    return {main: int | float | None} | NEEDED


def scored_rows(rows: list[dict[str, Any]], main: str) -> list[dict[str, Any]]:
    """The lines of the evaluated rounds, with null where the main metric was not finite."""
    return [row for row in rows if row.get("evaluated", row[main] is not None)]


def summary(
    rows: list[dict[str, Any]], rounds: int, main: str = "accuracy", higher: bool = True
) -> dict[str, Any]:
    """The summary of a run of this many rounds, from the lines of metrics that exist."""
    rows = [row for row in rows if row["round"] <= rounds]
    written = {row["round"] for row in rows}
    scored = scored_rows(rows, main)
    finite = [row for row in scored if row[main] is not None]
    best = (max if higher else min)(finite, key=lambda row: row[main], default=None)
    tenth = [row[main] for row in final_tenth(scored)]
    plain = [row.get(f"plain_{main}", row[main]) for row in scored]
    apart = any(f"plain_{main}" in row for row in scored)
    return {
        "rounds": rounds,
        "missing_rounds": [round for round in range(1, rounds + 1) if round not in written],
        "metric": main,
        main: scored[-1][main] if scored else None,
        "loss": scored[-1]["loss"] if scored else None,
        f"best_{main}": best[main] if best else None,
        "best_round": best["round"] if best else None,
        f"last_tenth_{main}": float(np.mean(tenth)) if tenth and None not in tenth else None,
        # Of the model itself, where a rule makes another vector the result.
        **(
            {f"plain_{main}": plain[-1], f"plain_last_tenth_{main}": _mean(final_tenth(plain))}
            if apart
            else {}
        ),
        "bytes_down": sum(row["bytes_down"] for row in rows),
        "bytes_up": sum(row["bytes_up"] for row in rows),
        "average_cohort": float(np.mean([row["cohort"] for row in rows])) if rows else None,
        "epochs_total": sum(row["epochs_total"] for row in rows),
        "steps": sum(row["steps"] for row in rows),
        "samples_per_second": _rate(rows),
        "elud_mean": _mean([row["elud"] for row in rows]),
        "critical_rounds": sum(row["critical"] for row in rows),
        "detector": judged([(row["round"], bool(row["critical"])) for row in rows]),
        "rejected": sum(row["rejected"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
    }


def _rate(rows: list[dict[str, Any]]) -> float | None:
    """Samples trained on in a second of the rounds, evaluation included; None where that was not
    recorded.
    """
    seconds = sum(row["seconds"] for row in rows)
    known = [row["samples"] for row in rows if isinstance(row.get("samples"), int)]
    return sum(known) / seconds if seconds and len(known) == len(rows) else None


def judged(marks: list[tuple[int, bool]]) -> str:
    """Whether the detector's answers, by round, make one period or flicker."""
    starts = [
        i for i, (_, critical) in enumerate(marks) if critical and not (i and marks[i - 1][1])
    ]
    if not starts:
        return "no critical period"
    if all(critical for _, critical in marks):
        return "critical in every round: no end was seen"
    if len(starts) > 2:
        switched = sum(a != b for (_, a), (_, b) in itertools.pairwise(marks))
        return f"switched {switched} times in {len(marks)} rounds: {FLICKER}"
    ends = [
        next((i for i in range(start, len(marks)) if not marks[i][1]), len(marks)) - 1
        for start in starts
    ]
    spans = " and ".join(
        f"{marks[a][0]} to {marks[b][0]}" for a, b in zip(starts, ends, strict=True)
    )
    return f"critical in rounds {spans}: {'one period' if len(starts) == 1 else 'two periods'}"


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None
