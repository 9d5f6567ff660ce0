"""Long runs in which three reports in ten fail, in every way: the accuracy of a run without
failures, memory flat.
"""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Error, Message, MessageType
from kit import CLIENTS, configure, lines, make_app, order

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import rounds
from kairosfl.core.run import Run, Setup
from kairosfl.data import load
from kairosfl.deploy import model_of, run_to_end
from kairosfl.deploy.local import LocalFederation
from kairosfl.detectors import FGN
from kairosfl.engines.flower import collect, roster, server
from kairosfl.engines.flower.client import client_app
from kairosfl.engines.flower.server import Flower, Settings
from kairosfl.engines.flower.wire import NUMBERS, Piece, piece_record
from kairosfl.models import build
from kairosfl.rules import parse
from kairosfl.tasks.partitions import dirichlet
from kairosfl.tasks.task import Task

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from flower_grid import FakeGrid, Node

pytestmark = pytest.mark.slow
KINDS = ["raise", "die", "hang", "nan", "shape", "broadcast", "norm", "round", "id", "garbage"]


def resident(process: int | str = "self") -> float:
    """Megabytes of memory that a process holds."""
    gc.collect()
    fields = Path(f"/proc/{process}/statm").read_text().split()
    return int(fields[1]) * 4096 / 1e6


def spoil(reply: Message, fault: str) -> Message:
    content = reply.content
    size = len(content[NUMBERS]["delta.0"]) // 4

    def update(array: np.ndarray) -> None:
        content["delta.0"] = piece_record(Piece(array.dtype.name, array.shape, array.tobytes()))

    if fault == "nan":
        update(np.full(size, np.nan, np.float32))
    elif fault == "shape":
        update(np.zeros(size + 1, np.float32))
    elif fault == "broadcast":
        update(np.ones(1, np.float32))
    elif fault == "norm":
        update(np.full(size, 1e6, np.float32))
    elif fault == "round":
        content[NUMBERS]["round"] = -1
    elif fault == "id":
        content[NUMBERS]["client"] = 0 if content[NUMBERS]["client"] else 1
    elif fault == "garbage":
        content.clear()
    return reply


def federation(failures: float) -> tuple[float, float, list[str]]:
    """Final accuracy, megabytes that memory grew by after the first quarter, and the reasons in the
    log.
    """
    dataset = load("digits")
    clients = dirichlet(dataset.train.targets.numpy(), 20, 0, alpha=0.5, minimum=10)
    task = Task(build("mlp", shape=dataset.shape, classes=10, seed=0), dataset, clients)
    honest, chance = client_app(lambda _: task), np.random.default_rng(0)

    def app(message: Message, context: Context) -> Message:
        fault = str(chance.choice(KINDS)) if chance.random() < failures else ""
        if message.metadata.message_type != MessageType.TRAIN or not fault:
            return honest(message, context)
        if fault == "raise":
            raise OSError("no battery")
        if fault == "die":
            return Message(Error(8, "crashed"), reply_to=message)
        if fault == "hang":
            grid.nodes[message.metadata.dst_node_id].late = 10**9
        return spoil(honest(message, context), fault)

    class Grid(FakeGrid):
        def push_messages(self, messages: list[Message]) -> list[str]:
            for node in self.nodes.values():
                node.late = 0
            return super().push_messages(messages)

    grid = Grid({100 + i: Node(bytes([i]), app, str(i)) for i in range(20)})
    engine = Flower(grid, task, Settings(deadline=0.5, wait=5.0), print)
    recipe = Recipe(rounds=200, cohort=8, epochs=1, batch_size=16, lr=0.1)
    setup = Setup(parse("scaffold + fedcl + pa3fed"), recipe, 20, task.layout, detectors=(FGN(),))
    course = rounds(Run.start(engine.start(), setup, seed=0), setup)
    run, briefs = next(course)
    reasons: list[str] = []
    while briefs is not None:
        run, briefs = course.send(engine.train(briefs))
        assert run.record is not None
        reasons += [reason for _, reason in run.record.rejected]
        grid.answers.clear()
        grid.sent.clear()
        if run.round == 50:
            before = resident()
    assert run.round == 200
    assert bool(torch.isfinite(run.x).all())
    return engine.evaluate(run.x).accuracy, resident() - before, reasons


def test_two_hundred_rounds_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "POLL", (0.001, 0.01))
    monkeypatch.setattr(server, "POLL", (0.001, 0.01))
    monkeypatch.setattr(roster, "PAUSE", 0.0)
    calm, _, none = federation(0.0)
    rough, growth, reasons = federation(0.3)
    print(
        f"accuracy {calm:.3f} without failures, {rough:.3f} with {len(reasons)}; memory grew by {growth:.1f} MB"
    )
    assert none == []
    assert 0.2 < len(reasons) / (len(reasons) + 200 * 8) < 0.4
    assert len({reason.split(" (")[0][:15] for reason in reasons}) >= 8
    assert abs(calm - rough) < 0.03
    assert growth < 10


def test_twenty_rounds_over_flower(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    kinds = ["raise", "nan", "shape", "broadcast", "norm", "round", "id"]
    faults = {  # kinds[-1] is no fault of client 0, whose id it is
        client: {
            r: str(chance.choice(kinds if client else kinds[:-1]))
            for r in range(1, 21)
            if chance.random() < 0.3
        }
        for client in range(CLIENTS)
    }
    app = make_app(tmp_path / "federation", {})
    with LocalFederation(tmp_path / "stage", [str(client) for client in range(CLIENTS)]) as stage:
        accuracy: dict[str, float] = {}
        memory: list[
            float
        ] = []  # of the server, after every round but the last, when it is about to end

        def watch(row: dict[str, Any]) -> None:
            if row["round"] < 20:
                memory.append(max(map(resident, stage.find("flwr-serverapp"))))

        for name, ordered in (("calm", {}), ("rough", faults)):
            order(tmp_path / "federation", ordered)
            changes = {
                "algorithm": "scaffold + pa3fed",
                "rounds": 20,
                "deadline": 300.0,
                "quorum": 0.25,
            }
            run = configure(
                tmp_path / "federation", f"{name}.toml", **changes
            )  # everybody is asked in every round
            memory.clear()
            accuracy[name] = run_to_end(stage, app, run, tmp_path / name, watch)["accuracy"]
            assert bool(torch.isfinite(model_of(tmp_path / name)).all())
    rejected = sum(row["rejected"] for row in lines(tmp_path / "rough", "metrics.jsonl"))
    growth = max(memory[5:]) - memory[4]
    print(
        f"accuracy {accuracy['calm']:.3f} without failures, {accuracy['rough']:.3f} with {rejected}",
        end="; ",
    )
    print(f"memory grew by {growth:.1f} MB after round 5, from {memory[4]:.0f} MB")
    assert rejected == sum(map(len, faults.values()))
    assert abs(accuracy["calm"] - accuracy["rough"]) < 0.05
    assert growth < 10
