"""What a brief can ask beyond plain training, stacked: as engine loop does it, whatever else is
asked.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest
import torch
from test_batched import VARIANTS, _variants, assert_equal, make_briefs, make_task, named
from test_batched_sequences import _task as sequence
from test_batched_sequences import _Weights
from torch import Tensor, nn

from kairosfl.core.fields import AFTER, BEFORE, SQUARED_LOSS, Briefs, Reports
from kairosfl.engines.batched import Batched, scoring
from kairosfl.engines.batched.graphs import Steps
from kairosfl.engines.batched.state import Kind
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

ALONE = "one client after another"


class Gate(nn.Module):
    """Two parameters beside a layer: lifted."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(36, 5)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.inner(x.flatten(1))) * self.gate)


class Tied(nn.Module):
    """One matrix used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.again = nn.Linear(36, 36), nn.Linear(36, 36)
        self.again.weight = self.inner.weight
        self.middle = nn.Linear(36, 36).requires_grad_(False)
        self.out = nn.Linear(36, 3)

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh(self.inner(x.flatten(1)))
        return self.out(torch.tanh(self.again(self.middle(inner))))


def seeded(make: Callable[[], nn.Module]) -> Task:
    torch.manual_seed(3)
    return make_task(make().double(), (1, 6, 6))


WAYS: dict[str, tuple[Callable[[], Task], str]] = {
    "traced": (lambda: seeded(Tied), "stacked layer by layer"),
    "lifted": (lambda: seeded(Gate), "stacked by lifting its parameters"),
    "mapped": (lambda: sequence(_Weights()), "stacked by vmap"),
}


def check(task: Task, briefs: Briefs, engine: Batched | None = None) -> Reports:
    """Batched follows these briefs as loop does, and side by side."""
    engine = engine or Batched(task)
    found, wanted = engine.train(briefs), Loop(task).train(briefs)
    assert engine.stacks
    assert ALONE not in engine.why
    assert_equal(found, wanted, 1e-10)
    for name in (SQUARED_LOSS, "own"):
        a, b = getattr(found, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    return found


FIELDS: dict[str, dict[str, object]] = {
    "max_steps": {"max_steps": torch.tensor([1, 3, 5, 100])},
    "still": {"still": frozenset({0, 3})},
    "squared": {"measure": frozenset({SQUARED_LOSS})},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_whatever_else_is_asked(variant: str) -> None:
    task = named("mlp")
    fields = {**FIELDS["max_steps"], **FIELDS["still"], **_variants(task)[variant]}
    measure = fields.get("measure", frozenset()) | {SQUARED_LOSS}
    briefs = make_briefs(task, **{**fields, "measure": measure})
    found = check(task, briefs)
    for number, entry in enumerate(task.layout.entries):
        moved = entry.view(found.delta).abs().flatten(1).amax(1) > 0
        assert moved.tolist() == [number not in fields["still"]] * 4
    assert (found.steps <= fields["max_steps"]).all()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("field", FIELDS)
def test_in_every_way_of_stacking(way: str, field: str) -> None:
    make, why = WAYS[way]
    task = make()
    engine = Batched(task)
    assert engine.why.startswith(why), engine.why
    for changes in ({}, {"optimizer": "adamw", "momentum": 0.0}, {"radius": 0.05, "clip": 0.5}):
        check(task, make_briefs(task, **FIELDS[field], **changes), engine)


def test_cohorts_with_different_wishes_share_the_slots() -> None:
    task = named("mlp")
    other = replace(task, clients=Population(task.clients.order, np.array([0, 5, 10, 20, 40])))
    variants = _variants(task)
    cohorts = [
        (task, make_briefs(task, **FIELDS["still"])),
        (task, make_briefs(task, **variants["mean"], **FIELDS["max_steps"])),
        (other, make_briefs(other, still=frozenset({1}), **variants["pull"])),
        (other, make_briefs(other, seed=8, **FIELDS["squared"])),
        (task, make_briefs(task, epochs=0, measure=frozenset(BEFORE))),
        (task, make_briefs(task, **variants["adamw"], **FIELDS["still"])),
        (task, make_briefs(task)),
    ]
    wanted = [Loop(each).train(briefs) for each, briefs in cohorts]
    for slots in (None, 1, 3, 9):
        engine = Batched(task, slots=slots)
        for found, alone in zip(engine.train_many(cohorts), wanted, strict=True):
            assert_equal(found, alone, 1e-10)
        assert ALONE not in engine.why


def test_a_cohort_beside_others_is_the_same_to_the_bit_when_results_must_not_depend_on_them() -> (
    None
):
    task = named("mlp")
    still = make_briefs(task, **FIELDS["still"])
    plain = make_briefs(task, seed=9)
    alone = Batched(task, deterministic=True).train(still)
    _, beside = Batched(task, deterministic=True).train_many([(task, plain), (task, still)])
    assert torch.equal(alone.delta, beside.delta)


def test_clients_that_move_other_tensors_never_share_a_step() -> None:
    some, others = Kind(1, 8, still=frozenset({1})), Kind(1, 8, decay=True)
    assert not some.meets(others)
    assert some.meets(replace(others, still=frozenset({1})))
    assert (some | others).still == frozenset()


def test_a_limit_of_steps_meets_a_stop_rule_within_an_epoch() -> None:
    """The first client stops by the rule, the others by their limits or not at all."""
    task = named("mlp")
    stop = {"stop_below": [2.0, -1.0, -1.0, 2.0], "stop_per": "epoch", "stop_statistic": "mean"}
    found = check(task, make_briefs(task, batch_size=3, epochs=3, max_steps=[50, 4, 2, 1], **stop))
    batches = -(-task.clients.sizes // np.minimum(3, task.clients.sizes))
    assert found.steps.tolist() == [int(batches[0]), 4, 2, 1]


@pytest.mark.parametrize("dropped", [False, True])
def test_the_squared_loss_is_that_of_the_first_epoch(dropped: bool) -> None:
    task = named("logistic")
    ask = frozenset({SQUARED_LOSS})
    briefs = make_briefs(task, measure=ask, lr=0.0, epochs=3, batch_size=4, drop_last=dropped)
    found = check(task, briefs)
    used = task.clients.sizes
    if dropped:
        used = used - used % np.minimum(4, used)
    assert not dropped or (used < task.clients.sizes).any()
    trainer = Loop(task).trainer
    for client, squared in enumerate(found.squared_loss.tolist()):
        mine = task.clients[client]
        if used[client] < len(mine):
            continue  # which samples were left out is checked against engine loop
        inputs, targets = trainer._samples(torch.from_numpy(mine.astype(np.int64)))
        losses = task.loss(trainer.predict(task.start(), inputs), targets)
        assert squared == pytest.approx(float(losses.square().mean()), rel=1e-12)


def test_sam_does_not_count_its_second_look() -> None:
    task = named("logistic")
    briefs = make_briefs(task, measure=frozenset({SQUARED_LOSS}), lr=0.0, epochs=1, batch_size=100)
    plain = check(task, briefs).squared_loss
    sharp = check(task, replace(briefs, radius=torch.full((4,), 0.1, dtype=torch.float64)))
    torch.testing.assert_close(sharp.squared_loss, plain, rtol=1e-12, atol=0)


def test_clients_that_only_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    task = named("mlp")
    near = task.start() + 0.01 * torch.arange(4.0, dtype=torch.float64)[:, None]
    measure = frozenset({*BEFORE, "fisher"})
    for start in (task.start(), near):
        briefs = make_briefs(task, epochs=0, measure=measure, start=start)
        found = check(task, briefs)
        assert found.delta.shape == (4, 0)
        assert found.steps.tolist() == [0] * 4
        assert not found.faults(measuring=True)
        with monkeypatch.context() as patch:
            patch.setattr(scoring, "PASS", 1)  # one model at a time
            check(task, briefs)
    check(task, make_briefs(task, epochs=0, measure=frozenset()))


def test_clients_that_only_measure_beside_others_that_train() -> None:
    task = named("mlp")
    measure = frozenset({*BEFORE, *AFTER, SQUARED_LOSS})
    briefs = make_briefs(task, epochs=[2, 0, 1, 0], stop_below=0.5, measure=measure)
    reports = [Batched(task).train(briefs), Loop(task).train(briefs)]
    for report in reports:
        assert report.faults() == dict.fromkeys((1, 3), report.faults()[1])
        assert report.steps[[1, 3]].tolist() == [0, 0]
        assert not report.delta[[1, 3]].any()
    rows = torch.tensor([0, 2])
    assert_equal(reports[0].take(rows), reports[1].take(rows), 1e-10)
    for name in ("loss", "score_before", "score_after", "similarity", SQUARED_LOSS):
        a, b = (getattr(report, name) for report in reports)
        torch.testing.assert_close(a, b, rtol=1e-10, atol=0, equal_nan=True)


def test_orders_of_several_rounds_train_together() -> None:
    task = named("mlp")
    briefs = make_briefs(task, round=torch.tensor([2, 5, 2, 0]))
    check(task, briefs)


# --- own parts ---


def owning(task: Task, *own: str) -> tuple[Task, Tensor]:
    """The task with these tensors kept by clients, and what each client has of them."""
    task = replace(task, own=own)
    start = task.own_start()
    assert start is not None
    scales = torch.linspace(0.7, 1.3, len(task.clients), dtype=start.dtype)
    return task, start * scales[:, None]


PHASES = torch.tensor([2, 0, 1, 3])


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_own_part_with_whatever_else_is_asked(variant: str) -> None:
    """Once trained with the rest, once first alone and then with the body still."""
    task, own = owning(named("mlp"), "classifier.*")
    variants = _variants(task)[variant]
    engine = Batched(task)
    check(task, make_briefs(task, own=own, **variants), engine)
    briefs = make_briefs(task, own=own, own_epochs=PHASES, still=frozenset({1}), **variants)
    check(task, briefs, engine)


OWN: dict[str, tuple[str, ...]] = {
    "traced": ("inner.*", "again.weight"),  # tied, and the first of the model
    "lifted": ("gate", "inner.bias"),
    "mapped": ("layer.in_proj_weight", "out.bias"),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_own_part_in_every_way_of_stacking(way: str) -> None:
    make, why = WAYS[way]
    task, own = owning(make(), *OWN[way])
    engine = Batched(task)
    assert engine.why.startswith(why), engine.why
    for changes in ({}, {"optimizer": "adamw", "momentum": 0.0}, {"radius": 0.05, "clip": 0.5}):
        check(task, make_briefs(task, own=own, **changes), engine)
        check(task, make_briefs(task, own=own, own_epochs=PHASES, **changes), engine)
    check(task, make_briefs(task, own=own, still=frozenset(range(len(task.layout.entries)))))


@pytest.mark.parametrize("name", ["cnn", "resnet18", "char_lstm"])
def test_own_parts_of_convolutions_and_recurrences(name: str) -> None:
    plain = named(name)
    first, last = plain.layout.names[0], plain.layout.names[-1]
    task, own = owning(plain, first, last)
    check(task, make_briefs(task, own=own, own_epochs=PHASES))


def test_an_own_part_in_float32() -> None:
    task, own = owning(named("mlp", torch.float32), "fc1.*")
    briefs = make_briefs(task, own=own, own_epochs=PHASES)
    found, wanted = Batched(task).train(briefs), Loop(task).train(briefs)
    assert_equal(found, wanted, 1e-3)
    assert (found.own - wanted.own).norm() <= 1e-5 * wanted.own.norm()


def test_cohorts_with_own_parts_share_the_slots() -> None:
    task, own = owning(named("mlp"), "classifier.*")
    other = replace(task, clients=Population(task.clients.order, np.array([0, 5, 10, 20, 40])))
    variants = _variants(task)
    measure = frozenset({*BEFORE, *AFTER})
    cohorts = [
        (task, make_briefs(task, own=own)),
        (task, make_briefs(task, own=own, own_epochs=PHASES, **variants["mean"])),
        (other, make_briefs(other, own=own + 1, own_epochs=PHASES, measure=measure)),
        (other, make_briefs(other, own=own, still=frozenset({0}), **variants["contrast"])),
        (task, make_briefs(task, own=own, epochs=0, measure=frozenset({*BEFORE, "fisher"}))),
        (task, make_briefs(task, own=own, own_epochs=PHASES, **variants["adamw"])),
        (task, make_briefs(task, own=own, epochs=[1, 0, 2, 0], own_epochs=PHASES)),
    ]
    wanted = [Loop(each).train(briefs) for each, briefs in cohorts]
    for slots in (None, 1, 3, 9):
        engine = Batched(task, slots=slots)
        for found, alone in zip(engine.train_many(cohorts), wanted, strict=True):
            assert_equal(found, alone, 1e-10)
            assert (found.own is None) == (alone.own is None)
            if alone.own is not None:
                torch.testing.assert_close(found.own, alone.own, rtol=1e-10, atol=1e-12)
        assert ALONE not in engine.why


def test_what_clients_are_told_of_their_own_part_is_not_overwritten() -> None:
    task, own = owning(named("mlp"), "classifier.*")
    before = own.clone()
    reports = Batched(task).train(make_briefs(task, own=own, own_epochs=PHASES))
    assert torch.equal(own, before)
    assert not torch.equal(reports.own, own)


def test_nothing_of_a_cohort_with_two_phases_stays() -> None:
    task, own = owning(named("mlp"), "classifier.*")
    engine = Batched(task)
    ticket = engine.submit(task, make_briefs(task, own=own, own_epochs=PHASES))
    assert engine.collect() is ticket
    held = [ref(ticket), ref(ticket.first)]
    gc.disable()
    del ticket
    engine.train(make_briefs(task, own=own))  # takes the slots of the clients before
    assert [each() for each in held] == [None, None]
    gc.enable()


def test_when_steps_fail_own_parts_train_one_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """From the beginning, also where the own parts have already trained alone."""
    task, own = owning(named("mlp"), "classifier.*")
    briefs = make_briefs(task, own=own, own_epochs=PHASES)
    engine, wanted = Batched(task, slots=2), Loop(task).train(briefs)
    steps, whole = [0], Steps.__call__

    def failing(self: Steps, kind: Kind, count: int) -> None:
        if not kind.still:
            raise RuntimeError("in the second phase")
        steps[0] += count
        whole(self, kind, count)

    monkeypatch.setattr(Steps, "__call__", failing)
    with pytest.warns(UserWarning, match="in the second phase"):
        found = engine.train(briefs)
    assert steps[0] > 0
    assert_equal(found, wanted, 1e-10)
    assert torch.equal(found.own, wanted.own)


@pytest.mark.parametrize("engine", [Loop, Batched])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        (
            {"still": frozenset({1, 4, 9})},
            r"still = \[4, 9\] of the brief: the model has 4 trained",
        ),
        ({"still": frozenset(range(4))}, "still names all 4 trained tensors"),
        ({"own_epochs": [0, 1, 0, 0]}, "own_epochs needs a model of which a part stays"),
        ({"max_steps": [3, 2, 0, 1]}, "max_steps of client 2 is 0 and must be 1 or more"),
    ],
)
def test_what_no_client_can_follow_is_refused(
    engine: type[Loop | Batched], field: dict[str, object], message: str
) -> None:
    task = named("mlp")
    with pytest.raises(UserError, match=message):
        engine(task).train(make_briefs(task, **field))
