"""How fast a task trains: every line is measured, ratios are against the right lines, samples are
counted exactly.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from kairosfl.bench import Bench, Measured, bench, of_the_ceiling, one_model
from kairosfl.cli import app
from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CPU = torch.device("cpu")


def task_of(sizes: list[int], model: nn.Module | None = None) -> Task:
    count = sum(sizes)
    held = Samples(torch.randn(count, 1, 4, 4), torch.arange(count) % 3)
    model = model or nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    return Task(
        model,
        DataSet("random", held, held, 3),
        Population(np.arange(count), np.cumsum([0, *sizes])),
    )


def test_every_engine_is_measured_and_compared() -> None:
    found = bench(task_of([5, 9, 16]), Recipe(cohort=2, batch_size=4), CPU, clients=3, seconds=0.01)
    assert [(line.engine, line.precision) for line in found.lines] == [
        ("loop", "float32"),
        ("batched", "float32"),
        ("one model", "float32"),
    ]
    assert all(line.rate and line.rate > 0 for line in found.lines)
    assert found.lines[1].why == "stacked layer by layer"
    assert found.unit == "images"
    assert found.rows()[0]["times loop"] == "1.00"
    assert found.rows()[2]["of the ceiling"] == "100%"


def test_ratios_are_to_the_fastest_loop_and_to_one_model_in_the_same_precision() -> None:
    lines = [
        Measured("loop", "float32", 10.0),
        Measured("loop", "tf32", 20.0),
        Measured("batched", "bfloat16", 100.0, 2**30, "stacked"),
        Measured("one model", "float32", 50.0),
        Measured("one model", "bfloat16", 400.0),
        Measured("batched", "float32", None, None, "failed: out of memory"),
    ]
    found = Bench("a GPU", "tokens", 4, 8, 100, lines)
    assert found.ratio(lines[2]) == 5.0
    assert found.share(lines[2]) == 0.25
    assert found.share(lines[1]) is None
    assert found.ratio(lines[5]) is None
    assert found.rows()[2]["memory"] == "1.00 GiB"
    assert found.rows()[5]["tokens a second"] == "–"
    assert json.loads(json.dumps(found.numbers()))["lines"][2]["times_loop"] == 5.0


def test_a_line_that_fails_says_so_and_the_others_are_measured() -> None:
    class Shy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(x) > 8:
                raise ValueError("too many samples")
            y: torch.Tensor = self.linear(x.flatten(1))
            return y

    found = bench(task_of([8, 8], Shy()), Recipe(cohort=2, batch_size=8), CPU, seconds=0.01)
    assert found.lines[0].rate
    assert found.lines[2].rate is None
    assert found.lines[2].why == "failed: too many samples"


def test_more_clients_than_there_are_is_an_error() -> None:
    with pytest.raises(UserError, match="--clients 9 is more than the 2 clients"):
        bench(task_of([4, 4]), Recipe(cohort=1), CPU, clients=9)


def test_the_ceiling_trains_a_model_of_its_own() -> None:
    task = task_of([4, 4])
    before = task.start()
    assert one_model(task, CPU, "float32", 8, 0.01) > 0
    assert torch.equal(before, task.start())


LONG_RUN = {"samples_per_second": 1000.0, "seconds": 100.0, "average_cohort": 2.0}


def test_a_run_is_compared_with_one_model_on_the_batches_of_its_cohort(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[object, ...]] = []

    def measured(*given: object) -> float:
        asked.append(given)
        return 4000.0

    monkeypatch.setattr("kairosfl.bench.one_model", measured)
    task, recipe = task_of([2, 5, 9, 16]), Recipe(cohort=9, batch_size=8)
    assert of_the_ceiling(task, recipe, CPU, "tf32", LONG_RUN) == 0.25
    assert asked == [(task, CPU, "tf32", round(2 * (2 + 5 + 8 + 8) / 4), 0.5)]


@pytest.mark.parametrize(
    "other",
    [
        {"seconds": 19.0},
        {"samples_per_second": 5.0},  # a step would take more than a hundredth of the run
        {"samples_per_second": None},
        {"average_cohort": None},
        {"average_cohort": 0.0},
    ],
)
def test_the_ceiling_of_a_short_run_is_not_measured(other: dict[str, float | None]) -> None:
    assert (
        of_the_ceiling(task_of([8, 8]), Recipe(batch_size=8), CPU, "float32", LONG_RUN | other)
        is None
    )


def test_the_ceiling_of_a_long_run_is_measured() -> None:
    assert (
        of_the_ceiling(task_of([8, 8]), Recipe(batch_size=8), CPU, "float32", LONG_RUN) is not None
    )


def test_a_run_is_complete_where_its_ceiling_cannot_be_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object) -> float:
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr("kairosfl.bench.one_model", fails)
    assert of_the_ceiling(task_of([8, 8]), Recipe(batch_size=8), CPU, "float32", LONG_RUN) is None


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_prints_and_keeps_its_share_of_the_ceiling(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "run",
        "--engine",
        engine,
        "--device",
        "cpu",
        "--set",
        "train.rounds=2",
        "--set",
        "data.name='digits'",
    ]
    short = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "short")])
    assert short.exit_code == 0, short.output
    assert "images a second\n" in short.output
    monkeypatch.setattr("kairosfl.bench.LONG", 0.0)
    monkeypatch.setattr("kairosfl.bench.PART", 1e9)
    done = CliRunner().invoke(app, [*given, "--out", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    share = json.loads((tmp_path / "run" / "summary.json").read_text())["of_the_ceiling"]
    assert share > 0
    assert f"images a second, {share:.0%} of the device's ceiling" in done.output
    again = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert f"{share:.0%} of the device's ceiling" in again.output


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("stop", [None, 1.1])
def test_samples_are_counted_exactly(drop_last: bool, stop: float | None) -> None:
    task = task_of([3, 10, 11, 12])
    engine, seen = Loop(task), 0
    read = engine.trainer._batch

    def counting(rows: torch.Tensor, *rest: object) -> tuple[object, object]:
        nonlocal seen
        seen += len(rows)
        return read(rows, *rest)  # type: ignore[arg-type]

    engine.trainer._batch = counting  # type: ignore[method-assign, assignment]
    briefs = Briefs(
        seed=0,
        round=0,
        ids=torch.arange(4),
        start=engine.start(),
        lr=0.1,
        batch_size=[4, 4, 5, 4],
        epochs=[1, 2, 3, 2],
        drop_last=drop_last,
        stop_below=stop,  # type: ignore[arg-type]
        stop_per="batch",
    )
    assert engine.train(briefs).samples(briefs) == seen
    assert seen > 0


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(
        '[data]\nname = "digits"\nclients = 10\n[model]\nhidden = [4]\n[train]\ncohort = 2\n'
    )
    given = ["bench", str(file), "--seconds", "0.01", "--device", "cpu"]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 0, done.output
    assert "of the ceiling" in done.output
    done = CliRunner().invoke(app, [*given, "--json", "--clients", "3"])
    assert json.loads(done.stdout)["clients"] == 3
    refused = CliRunner().invoke(app, [*given, "--precision", "float8"])
    assert refused.exit_code == 2
    assert "'float8' is not a precision" in refused.output
