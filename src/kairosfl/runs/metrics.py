"""What is recorded about a round and about a run."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from kairosfl.core.fields import AFTER, BEFORE, Reports
from kairosfl.core.measures import cosine_matrix
from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Record, Run
from kairosfl.engines.evaluate import Scores
from kairosfl.runs.history import final_tenth
from kairosfl.tasks.columns import TAKEN
from kairosfl.tasks.metrics import Metric
from kairosfl.tasks.task import Task

PICTURED_CLIENTS = 2000
PICTURED_CLASSES = 1000
COUNTED_CLIENTS = 100_000
CONFUSED_CLASSES = 20  # at most, or the matrix would be the larger part of the file
FLICKER = "flicker"  # what `judged` calls answers that make no period
QUANTILES = 21  # of the clients' main metric


@dataclass(frozen=True)
class Measured:
    """What was evaluated after a round; all None: nothing.

    Args:
        scores: The outcome's, on the test set.
        by_client: Its main metric on every client's own data.
        plain: The scores of the model itself, where the outcome is another vector.
    """

    scores: Scores | None = None
    by_client: np.ndarray | None = None
    plain: Scores | None = None


def row(run: Run, task: Task, measured: Measured, seconds: float) -> dict[str, Any]:
    """One line of metrics.jsonl."""
    record, signals = run.record, run.signals
    assert record is not None
    main, _ = task.main
    line: dict[str, Any] = {
        "round": run.round,
        "metric": main,
        "evaluated": measured.scores is not None,  # then null is a number that was not finite
        **_evaluated(task, measured.scores),
        "train_loss": None,
        "cohort": record.asked,
        "reported": len(record.ids),
        "rejected": len(record.rejected),
        "critical": signals.critical,
        **{name: value for name, value in signals.values.items() if name in TAKEN},
        "elud": signals.elud,
        "coherence": signals.coherence,
        "consensus": record.consensus,
        "epochs": 0.0,
        "epochs_total": 0.0,
        "steps": 0,
        "samples": 0,
        "passes": passes(task, record),
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "lr": record.lr,
        "fisher_seconds": None,
        "fisher_bytes": None,
    }
    if record.reports:
        line |= _trained(record, record.reports)
    line |= _by_client(task, measured.by_client)
    line["seconds"] = seconds
    if measured.plain:
        line[f"plain_{main}"] = measured.plain.main
    if record.clock is not None:
        line |= {
            "time": run.time,
            "device_seconds": record.clock.device_seconds,
            "wasted_seconds": record.clock.wasted_seconds,
            "age": record.clock.age,
            "together": record.clock.together,
        }
    return line


def _evaluated(task: Task, scores: Scores | None) -> dict[str, Any]:
    """The metrics on the test set; None: the round was not evaluated."""
    if scores is None:
        return dict.fromkeys((*task.measures, "loss"))
    return {**scores.metrics, "loss": scores.loss}


def _trained(record: Record, reports: Reports) -> dict[str, Any]:
    """What the clients did whose reports count."""
    line: dict[str, Any] = {
        "train_loss": float(record.weights @ reports.loss),
        "epochs": float(reports.epochs.mean()),
        "epochs_total": float(reports.epochs.sum()),
        "steps": int(reports.steps.sum()),
        "samples": record.samples,
    }
    if reports.fisher_seconds is not None:
        line["fisher_seconds"] = sum(reports.fisher_seconds.tolist())
    if reports.fisher_bytes is not None:
        line["fisher_bytes"] = max(reports.fisher_bytes.tolist()) or None
    return line


def passes(task: Task, record: Record) -> int:
    """How often clients ran the model over a sample, forward and backward.

    These are the clients whose reports count, and those that were measured before the round was
    planned.
    """
    visits = []
    if record.first is not None:
        asked, answers = record.first
        visits.append((answers.work(asked), answers))
    if record.reports is not None and record.work is not None:
        visits.append((record.work, record.reports))

    total = 0
    for work, reports in visits:
        classes = task.scored_classes if work.fisher == "exact" else 0
        anew = bool(work.references.any()) and (task.varies or task.draws)
        total += work.passes(reports.steps.numpy(), classes=classes, anew=anew).total
    return total


def _by_client(task: Task, values: np.ndarray | None) -> dict[str, float | None]:
    """The main metric on the clients' own data: the mean, and that of the worst tenth."""
    main, metric = task.main
    mean, worst = f"client_{main}_mean", f"client_{main}_worst"
    if values is None:
        return {mean: None, worst: None}
    higher = is_higher(metric)
    return {mean: float(np.nanmean(values)), worst: worst_tenth(values, higher=higher)}


def from_elsewhere(run: Run) -> dict[str, float]:
    """The values of detectors that are not part of Kairos, by their full names."""
    return {name: value for name, value in run.signals.values.items() if name not in TAKEN}


def is_higher(metric: Metric | None) -> bool:
    """Whether higher values are better; None is the loss."""
    return metric is not None and metric.better == "higher"


def worst_tenth(values: np.ndarray, *, higher: bool = True) -> float:
    """The mean over the tenth of the clients with the worst values."""
    worst_first = np.sort(values[~np.isnan(values)])
    if not higher:
        worst_first = worst_first[::-1]
    return float(worst_first[: max(1, len(worst_first) // 10)].mean())


def clients_row(
    run: Run, task: Task, algorithm: Algorithm, measured: Measured, *, cosines: bool
) -> dict[str, Any]:
    """One line of clients.jsonl."""
    record = run.record
    assert record is not None
    line: dict[str, Any] = {
        "round": run.round,
        "ids": record.ids.tolist(),
        "rejected": list(record.rejected),
    }
    if measured.by_client is not None:
        quantiles = np.nanquantile(measured.by_client, np.linspace(0, 1, QUANTILES)).tolist()
        line[f"{task.main[0]}_quantiles"] = [_short(quantile) for quantile in quantiles]
    if measured.scores and measured.scores.confusion:
        line |= _by_class(measured.scores.confusion)
    reports = record.reports
    if reports is None:
        return line
    if cosines:
        angles = cosine_matrix(reports.delta).double().cpu().numpy()
        line["cosines"] = np.round(angles, 4).tolist()
    if record.clock is not None:
        line |= {"took": record.clock.took.tolist(), "age": record.clock.ages.tolist()}
    return line | {
        "n": reports.n.tolist(),
        "weights": record.weights.tolist(),
        "epochs": reports.epochs.tolist(),
        "steps": reports.steps.tolist(),
        "loss": reports.loss.tolist(),
        "similarity": _numbers(reports.similarity),
        "score": _score(reports),
        "lambda": _shares(run, algorithm),
    }


def _numbers(column: Tensor | None) -> list[float] | None:
    """A column of the reports; None: it was not asked for."""
    if column is None:
        return None
    numbers: list[float] = column.tolist()
    return numbers


def _score(reports: Reports) -> list[float] | None:
    """What clients measured on all of their data: the first of those that were asked for."""
    for name in AFTER + BEFORE:
        numbers = _numbers(getattr(reports, name))
        if numbers is not None:
            return numbers
    return None


def _short(value: float) -> float:
    """A number with four digits, as a file needs it."""
    return float(f"{value:.4g}")


def _by_class(confusion: Sequence[Sequence[int]]) -> dict[str, Any]:
    """The accuracy of every class, None without samples; for few classes, who is taken for whom."""
    accuracy = []
    for label, row in enumerate(confusion):
        samples = sum(row)
        accuracy.append(_short(row[label] / samples) if samples else None)
    counts = None
    if len(confusion) <= CONFUSED_CLASSES:
        counts = [list(row[:-1]) for row in confusion]
    return {"class_accuracy": accuracy, "confusion": counts}


def _shares(run: Run, algorithm: Algorithm) -> dict[str, float] | None:
    """The weights of a rule that combines every stored row, by client."""
    for i, traits in enumerate(algorithm.traits):
        shares = run.states[i].get(traits.weighs)
        ids = run.tables[i].ids
        if shares is not None and len(shares) == len(ids):
            pairs = zip(ids, shares.tolist(), strict=True)
            return {str(client): share for client, share in pairs if share > 1e-6}
    return None


def partition_note(task: Task) -> dict[str, Any]:
    """Sizes and, for a population that can be drawn, the label counts of every client."""
    clients, dataset = task.clients, task.dataset
    return {
        "clients": len(clients),
        "classes": dataset.classes,
        "labels": list(dataset.labels),
        "sizes": clients.sizes.tolist() if len(clients) <= COUNTED_CLIENTS else None,
        "counts": _label_counts(task),
    }


def _label_counts(task: Task) -> list[list[int]] | None:
    """How many samples of every class each client has; None for too many to draw."""
    clients, dataset = task.clients, task.dataset
    labels = dataset.labels_of_train
    if labels is None or len(clients) > PICTURED_CLIENTS or dataset.classes > PICTURED_CLASSES:
        return None
    owner = np.repeat(np.arange(len(clients)), clients.sizes)
    pairs = owner * dataset.classes + labels[clients.order]
    counts = np.bincount(pairs, minlength=len(clients) * dataset.classes)
    table: list[list[int]] = counts.reshape(len(clients), -1).tolist()
    return table


# The columns of metrics.jsonl that a summary needs besides the main metric; a line without one of
# them is damaged.
ALWAYS = (
    "cohort",
    "rejected",
    "critical",
    "epochs_total",
    "steps",
    "bytes_down",
    "bytes_up",
    "seconds",
)
NEEDED: dict[str, Any] = {
    **dict.fromkeys(("loss", "elud"), int | float | None),
    **dict.fromkeys(ALWAYS, int | float),
}


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
    missing = set(range(1, rounds + 1)) - {row["round"] for row in rows}
    marks = [(row["round"], bool(row["critical"])) for row in rows]
    return {
        "rounds": rounds,
        "missing_rounds": sorted(missing),
        "metric": main,
        **_scores(rows, main, higher),
        "bytes_down": _total(rows, "bytes_down"),
        "bytes_up": _total(rows, "bytes_up"),
        "average_cohort": _mean_of(rows, "cohort"),
        "epochs_total": _total(rows, "epochs_total"),
        "steps": _total(rows, "steps"),
        **_sums(rows),
        "samples_per_second": _rate(rows),
        "elud_mean": _mean_of(rows, "elud"),
        "critical_rounds": _total(rows, "critical"),
        "detector": judged(marks),
        "rejected": _total(rows, "rejected"),
        "seconds": _total(rows, "seconds"),
    }


def _sums(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    """Samples and passes of the whole run; None where it is not known of every round."""
    sums: dict[str, int | None] = {}
    for name in ("samples", "passes"):
        is_known = all(isinstance(row.get(name), int) for row in rows)  # not of earlier versions
        sums[name] = _total(rows, name) if is_known else None
    return sums


def _total(rows: list[dict[str, Any]], name: str) -> Any:
    """The sum of a column."""
    return sum(row[name] for row in rows)


def _mean_of(rows: list[dict[str, Any]], name: str) -> float | None:
    """The mean of a column over the rounds that have it; None: none has."""
    return _mean([row[name] for row in rows])


def _scores(rows: list[dict[str, Any]], main: str, higher: bool) -> dict[str, Any]:
    """What the evaluated rounds say about the model: the last, the best and the last tenth."""
    scored = scored_rows(rows, main)
    columns: dict[str, Any] = dict.fromkeys(
        (main, "loss", f"best_{main}", "best_round", f"last_tenth_{main}")
    )
    if scored:
        columns |= {main: scored[-1][main], "loss": scored[-1]["loss"]}
    best = best_row(scored, main, higher)
    if best is not None:
        columns |= {f"best_{main}": best[main], "best_round": best["round"]}
    tenth = [row[main] for row in final_tenth(scored)]
    if None not in tenth:
        columns[f"last_tenth_{main}"] = _mean(tenth)

    # Of the model itself, where a rule makes another vector the result.
    name = f"plain_{main}"
    if any(name in row for row in scored):
        plain = [row.get(name, row[main]) for row in scored]
        columns |= {name: plain[-1], f"plain_last_tenth_{main}": _mean(final_tenth(plain))}
    return columns


def best_row(rows: list[dict[str, Any]], main: str, higher: bool) -> dict[str, Any] | None:
    """The first line with the best value; None if no value is finite."""
    finite = [row for row in rows if row[main] is not None]
    if not finite:
        return None
    if higher:
        return max(finite, key=lambda row: row[main])
    return min(finite, key=lambda row: row[main])


def _rate(rows: list[dict[str, Any]]) -> float | None:
    """Samples trained on in a second of the rounds, evaluation included; None: not recorded."""
    seconds = _total(rows, "seconds")
    samples = _sums(rows)["samples"]
    if not seconds or samples is None:
        return None
    return float(samples / seconds)


def judged(marks: list[tuple[int, bool]]) -> str:
    """Whether the detector's answers, by round, make one period or flicker."""
    spans = _spans(marks)
    if not spans:
        return "no critical period"
    if all(critical for _, critical in marks):
        return "critical in every round: no end was seen"
    if len(spans) > 2:
        switched = sum(a != b for (_, a), (_, b) in itertools.pairwise(marks))
        return f"switched {switched} times in {len(marks)} rounds: {FLICKER}"
    words = " and ".join(f"{first} to {last}" for first, last in spans)
    count = "one period" if len(spans) == 1 else "two periods"
    return f"critical in rounds {words}: {count}"


def _spans(marks: list[tuple[int, bool]]) -> list[tuple[int, int]]:
    """The first and the last round of every stretch of critical ones."""
    spans: list[tuple[int, int]] = []
    follows = False  # whether the round before was critical
    for round, critical in marks:
        if critical and follows:
            spans[-1] = spans[-1][0], round
        elif critical:
            spans.append((round, round))
        follows = critical
    return spans


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return float(np.mean(numbers)) if numbers else None
