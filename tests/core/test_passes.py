"""Passes in the metrics are those that clients make: counted by hooks on the trainer's models."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.work import Passes
from kairosfl.engines import Loop
from kairosfl.runs.config import resolve
from kairosfl.runs.experiment import begin, execute
from kairosfl.runs.folder import Folder
from kairosfl.runs.prepare import prepare
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

SIZES = (3, 8, 10)  # with batches of 4: less than one, two, and two and a half
CLASSES = 3


class Recurrent(nn.Module):
    """Its Fisher information is measured sample by sample, where hooks can count."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(2, 4, batch_first=True)
        self.head = nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.cell(x[:, None])[0][:, -1]
        return self.head(hidden)


def job(*, recurrent: bool = False, dropout: bool = False, own: tuple[str, ...] = ()) -> Task:
    torch.manual_seed(0)
    count = sum(SIZES)
    train = Samples(torch.randn(count, 2), torch.arange(count) % CLASSES)
    body: list[nn.Module] = [nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, CLASSES)]
    if dropout:
        body.insert(2, nn.Dropout(0.5))
    model = Recurrent() if recurrent else nn.Sequential(*body)
    data = DataSet("count", train, train, classes=CLASSES)
    bounds = torch.tensor([0, *SIZES]).cumsum(0).tolist()
    lists = [list(range(a, b)) for a, b in pairwise(bounds)]
    return Task(model, data, Population.from_lists(lists), own=own)


class Counter:
    """Counts the samples that go forward and backward through the models of a trainer."""

    def __init__(self, engine: Loop) -> None:
        self.forward = self.backward = 0
        for model in (engine.trainer.model, engine.trainer.still):
            last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
            last.register_forward_hook(self._seen)

    def _seen(self, _: nn.Module, __: Any, output: Tensor) -> None:
        self.forward += len(output)
        if output.requires_grad:
            output.register_hook(self._slope)

    def _slope(self, gradient: Tensor) -> None:
        self.backward += len(gradient)


def orders(task: Task, **asked: Any) -> Briefs:
    start = task.start()
    usual: dict[str, Any] = {"lr": 0.1, "batch_size": 4, "epochs": 2}
    return Briefs(seed=0, round=0, ids=torch.arange(3), start=start, **(usual | asked))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def counted(task: Task, briefs: Briefs) -> tuple[Counter, Reports]:
    engine = Loop(task)
    # Whether dropout masks differ is tried once, when the first client compares features.
    engine.train(orders(task, own=briefs.own, stop_below=column(-2.0, -2.0, -2.0)))
    counter = Counter(engine)
    return counter, engine.train(briefs)


def vectors(task: Task, *shape: int) -> Tensor:
    return 0.1 * torch.randn(*shape, len(task.start()))


SCORES = ("score_before", "score_after", "accuracy_before", "accuracy_after")
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "an incomplete batch left out": {"drop_last": True},
    "partial work": {"max_steps": torch.tensor([1, 3, 4])},
    "sam": {"radius": column(0.05, 0.0, 0.05)},
    "sam for all": {"radius": 0.1},
    "scores": {"measure": frozenset(SCORES)},
    "squared losses": {"measure": frozenset({"squared_loss"}), "radius": 0.1},
    "a stop rule": {"stop_below": column(2.0, -2.0, 2.0)},
    "a stop rule that finishes no epoch": {
        "stop_below": column(2.0, 2.0, 0.999999),
        "stop_per": "batch",
    },
    "contrast": {"contrast": column(1.0, 0.0, 1.0)},
    "contrast and a stop rule": {"contrast": 1.0, "stop_below": column(-2.0, 2.0, -2.0)},
    "measured only": {"epochs": 0, "measure": frozenset(SCORES)},
    "all of it": {
        "radius": 0.1,
        "contrast": 1.0,
        "stop_below": column(-2.0, 2.0, -2.0),
        "measure": frozenset({*SCORES, "squared_loss"}),
    },
}


def check(task: Task, briefs: Briefs, **known: Any) -> Passes:
    counter, reports = counted(task, briefs)
    work = briefs.work(reports.n.numpy())
    passes = work.passes(reports.steps.numpy(), **known)
    assert (passes.forward.sum(), passes.backward.sum()) == (counter.forward, counter.backward)
    assert passes.total == counter.forward + counter.backward
    return passes


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("name", list(ASKED))
def test_what_is_counted_is_what_clients_do(name: str, dropout: bool) -> None:
    task = job(dropout=dropout)
    assert task.draws is dropout
    briefs = orders(task, **ASKED[name])
    if name in ("contrast", "contrast and a stop rule", "all of it"):
        briefs = replace(briefs, previous=vectors(task, 3))
    check(task, briefs, anew=dropout)


def test_a_reference_of_its_own() -> None:
    task = job()
    stop = column(-2.0, -2.0, 2.0)
    briefs = orders(task, stop_below=stop, stop_reference=vectors(task, 3))
    check(task, briefs)
    check(task, replace(briefs, contrast=torch.ones(3).double(), previous=vectors(task, 3)))


def test_numbers_worked_out_by_hand() -> None:
    """Three, eight and ten samples, twice: 42 forward and 42 backward."""
    passes = check(job(), orders(job()))
    assert passes.forward.tolist() == passes.backward.tolist() == [6, 16, 20]
    scored = check(job(), orders(job(), measure=frozenset({"score_before", "score_after"})))
    assert scored.forward.tolist() == [6 + 6, 16 + 16, 20 + 20]
    compared = check(job(), orders(job(), contrast=1.0, previous=vectors(job(), 3)))
    assert compared.forward.tolist() == [6 + 6, 16 + 16, 20 + 20]  # two models, every sample once


def test_candidates() -> None:
    task = job()
    passes = check(task, orders(task, candidates=vectors(task, 5)))
    assert passes.forward.tolist() == [6 + 15, 16 + 40, 20 + 50]


@pytest.mark.parametrize("how", ["fisher", "fisher_sampled"])
def test_the_fisher_information(how: str) -> None:
    task = job(recurrent=True)
    assert task.scored_classes == CLASSES
    labels = CLASSES if how == "fisher" else 1
    briefs = orders(task, measure=frozenset({how, "score_after"}))
    passes = check(task, briefs, classes=task.scored_classes)
    assert passes.backward.tolist() == [n * (2 + labels) for n in SIZES]
    check(task, replace(briefs, epochs=torch.zeros(3, dtype=torch.int64)), classes=CLASSES)


@pytest.mark.parametrize("when", ["batch", "before", "after"])
def test_a_second_model(when: str) -> None:
    task = job()
    briefs = orders(
        task,
        second=vectors(task, 3),
        second_lr=column(0.1, 0.1, 0.1),
        second_pull=column(0.1, 0.1, 0.1),
        second_centre="start",
        second_when=when,
        second_inner=2,
        max_steps=torch.tensor([1, 3, 4]),
    )
    check(task, briefs)
    check(task, replace(briefs, radius=column(0.1, 0.0, 0.1)))


def test_an_own_part_that_trains_first() -> None:
    task = job(own=("2.*",))
    own = task.own_start()
    assert own is not None
    own_epochs = torch.tensor([0, 1, 3])
    briefs = orders(task, own=own.expand(3, -1).clone(), own_epochs=own_epochs, radius=0.1)
    check(task, replace(briefs, max_steps=torch.tensor([1, 3, 4])))


def test_a_joined_record_with_clients_that_were_not_told() -> None:
    """NaN stands for what a client was not told."""
    nothing = float("nan")
    briefs = orders(job(), stop_below=column(nothing, 0.5, nothing))
    assert briefs.work(torch.tensor(SIZES)).references.tolist() == [0, 1, 0]
    briefs = replace(briefs, second_lr=column(0.1, nothing, 0.1), second_when="batch")
    assert briefs.work(torch.tensor(SIZES)).slopes.tolist() == [2, 1, 2]


@pytest.mark.parametrize(
    ("algorithm", "detector"),
    [
        ("fedavg", "fgn"),
        ("moon(mu=1.0)", "fgn.paired()"),
        ("alt", "fgn"),
        ("fedsam(rho=0.05) + moon", "fgn"),
        ("pa3fed", "fgn"),
    ],
)
def test_metrics_have_what_the_clients_of_a_run_did(
    algorithm: str, detector: str, tmp_path: Path
) -> None:
    tables = {
        "algorithm": algorithm,
        "data": {"name": "digits", "clients": 6},
        "train": {"rounds": 3, "cohort": 3, "epochs": 2},
        "run": {"engine": "loop", "detector": detector, "client_accuracy": False},
    }
    prepared = prepare(resolve(tables))
    engine = prepared.engine
    assert isinstance(engine, Loop)
    engine.trainer.masks = False  # otherwise tried once, by a pass of its own
    counter = Counter(engine)
    train = engine.train
    rows: list[dict[str, Any]] = []
    counts: list[int] = []
    folder = Folder(tmp_path / "run")

    def trained(briefs: Briefs) -> Reports:
        before = counter.forward + counter.backward
        reports = train(briefs)
        counts.append(counter.forward + counter.backward - before)
        return reports

    engine.train = trained  # type: ignore[method-assign]
    execute(begin(prepared, folder, notify=rows.append), engine)
    assert [row["passes"] for row in rows] == counts
    assert folder.summary()["passes"] == sum(counts)
