"""What the batched engine chooses by measuring is written down, and a resumed run takes the same
path.
"""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from test_batched import assert_equal, make_briefs, make_task
from test_batched_fallbacks import BatchStatistics, _task
from torch import nn

from kairosfl.core.recipe import Recipe
from kairosfl.engines.auto import COHORT, SMALL, pick
from kairosfl.engines.batched import Batched, conv, evaluator, layers
from kairosfl.engines.choices import Cache, Choices
from kairosfl.engines.loop import Loop
from kairosfl.engines.precision import Precision
from kairosfl.models import MODELS
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import RunConfig, resolve
from kairosfl.runs.folder import Folder

CPU = torch.device("cpu")
SAME = {"device": "a GPU", "torch": "2"}


def small(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Two convolutions that have several ways."""
    flat = 4 * shape[1] * shape[2]
    images = (nn.Conv2d(shape[0], 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1))
    return nn.Sequential(*images, nn.Flatten(), nn.Linear(flat, classes))


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    monkeypatch.setitem(MODELS, "small", small)
    return resolve(
        {
            "data": {"clients": 12},
            "model": {"name": "small"},
            "train": {"rounds": 4, "cohort": 3},
            "run": {"engine": "batched", "checkpoint_every": 1},
        }
    )


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A CPU that measures as a GPU would, with a stopwatch that says something else each time."""
    found: list[str] = []
    turns = cycle(["grouped", "columns", "columns", "grouped"])
    whole = Batched.__init__

    def measuring(self: Batched, *arguments: object, **options: object) -> None:
        whole(self, *arguments, **options)  # type: ignore[arg-type]
        assert self._work is not None
        self._work.stack.frame.measures = True

    def quickest(ways: dict[str, conv.Method], *_: object) -> str:
        found.append(next(turns))
        assert found[-1] in ways
        return found[-1]

    monkeypatch.setattr(Batched, "__init__", measuring)
    monkeypatch.setattr(conv, "quickest", quickest)
    monkeypatch.setattr(layers, "MEASURE", 1)
    return found


def stop_in(round: int) -> Callable[[dict[str, int]], None]:
    def listen(row: dict[str, int]) -> None:
        if row["round"] == round:
            raise KeyboardInterrupt

    return listen


def test_a_resumed_run_takes_the_same_path(
    config: RunConfig, measured: list[str], tmp_path: Path
) -> None:
    experiment.start(config, tmp_path / "whole")
    assert measured == ["grouped", "columns"]
    written = json.loads((tmp_path / "whole" / "choices.json").read_text())
    assert [each["choice"] for each in written.values()] == measured
    assert {each["round"] for each in written.values()} == {1}
    assert all(name.startswith("conv Shape(inputs=") for name in written)

    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "cut", notify=stop_in(3))
    assert measured[2:] == ["columns", "grouped"]
    (tmp_path / "cut" / "choices.json").write_text(
        json.dumps(written)
    )  # as if it had chosen as the first
    del measured[:]
    engines: list[Batched] = []
    whole = Batched.train

    def train(self: Batched, briefs: object) -> object:
        engines.append(self)
        return whole(self, briefs)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Batched, "train", train)
        experiment.resume(tmp_path / "cut")
    assert measured == []
    assert list(engines[0].choices.made.values()) == ["grouped", "columns"]
    assert json.loads((tmp_path / "cut" / "choices.json").read_text()) == written
    assert json.loads(json.dumps(written)) == written


def test_a_run_that_is_resumed_is_to_the_bit_the_run_that_was_not(
    config: RunConfig, measured: list[str], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "cut", notify=stop_in(3))
    first = list(measured)
    experiment.resume(tmp_path / "cut")
    assert measured == first
    measured_again = iter(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conv, "quickest", lambda *_: next(measured_again))
        experiment.start(config, tmp_path / "whole")
    assert torch.equal(model(tmp_path / "cut")[0], model(tmp_path / "whole")[0])


def test_a_choice_of_a_round_to_come_waits_for_its_moment() -> None:
    choices = Choices()
    choices.restore({"early": ("a", 2), "late": ("b", 5)}, 4)
    assert choices.made == {"early": "a"}
    assert choices.choose("late", lambda: "measured") == "b"
    assert choices.choose("new", lambda: "measured") == "measured"
    assert choices.choose("new", lambda: "again") == "measured"
    assert choices.made == {"early": "a", "late": "b", "new": "measured"}


def test_a_guess_measures_and_keeps_nothing(tmp_path: Path) -> None:
    choices = Choices(Cache(tmp_path, SAME))
    choices.restore({"early": ("b", 2), "late": ("c", 5)}, 4)
    Cache(tmp_path, SAME).put("cached, here", "b")

    def measure() -> str:
        pytest.fail("measured")

    with choices.guessing():
        guesses = [
            choices.choose(name, measure, ("a", "b", "c"), "here")
            for name in ("early", "late", "cached", "new")
        ]
        assert guesses == ["b", "c", "b", "a"]
        assert choices.choose("cached", measure, ("a", "c"), "here") == "a"
    assert choices.made == {"early": "b"}
    assert choices.choose("new", lambda: "c", ("a", "b", "c"), "here") == "c"
    assert Cache(tmp_path, SAME).get("new, here") == "c"


def test_what_is_measured_is_what_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(small((2, 6, 6), 3), (2, 6, 6), clients=2)
    engine, asked = Batched(task), []
    assert engine._work is not None
    engine._work.stack.frame.measures = True
    monkeypatch.setattr(layers, "MEASURE", 1)
    monkeypatch.setattr(conv, "timed", lambda trial: trial() or 1.0)
    forward, backward = conv.Columns.forward, conv.Columns.backward

    def there(self: conv.Columns, shape: conv.Shape, *rest: Any) -> torch.Tensor:
        _, _, bias, relu = rest
        asked.append(("there", shape.inputs, bias is not None, relu))
        return forward(self, shape, *rest)

    def back(self: conv.Columns, shape: conv.Shape, *rest: Any) -> torch.Tensor | None:
        _, _, _, (_, bias), inward, masked = rest
        asked.append(("back", shape.inputs, bias is not None, inward, masked))
        return backward(self, shape, *rest)

    monkeypatch.setattr(conv.Columns, "forward", there)
    monkeypatch.setattr(conv.Columns, "backward", back)
    found = engine.train(make_briefs(task, epochs=1))
    first = [("there", 2, True, True), ("back", 2, True, False, False)]
    second = [("there", 3, True, False), ("back", 3, True, True, True)]
    assert asked[:9] == [*first * 4, first[0]]  # the trials, then the step
    assert asked[9:17] == second * 4
    assert asked[17:20] == [second[0], second[1], first[1]]
    assert_equal(found, Loop(task).train(make_briefs(task, epochs=1)), 1e-5)


def test_a_deterministic_run_and_a_cpu_measure_nothing(config: RunConfig, tmp_path: Path) -> None:
    experiment.start(config, tmp_path / "run")
    assert not (tmp_path / "run" / "choices.json").exists()


def test_auto_goes_by_a_rule() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(72, 3))
    task = make_task(model, (2, 6, 6), clients=10)
    enough = Recipe(cohort=COHORT, batch_size=8)
    assert pick(task, enough, CPU) == (
        "batched",
        "219 parameters times 8 samples are little work for a CPU",
    )
    assert pick(task, Recipe(cohort=COHORT - 1), CPU) == (
        "loop",
        "fewer than 8 clients in a round on a CPU",
    )
    large = Recipe(cohort=COHORT, batch_size=SMALL // 219 + 1)
    assert pick(task, large, CPU) == (
        "loop",
        "219 parameters times 19153 samples are enough work for a CPU",
    )
    assert pick(_task(BatchStatistics()), enough, CPU)[0] == "loop"
    assert "change each other's outputs" in pick(_task(BatchStatistics()), enough, CPU)[1]
    assert pick(task, Recipe(cohort=1), torch.device("cuda")) == (
        "batched",
        "a GPU trains clients side by side",
    )

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.out = nn.LSTM(6, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.out(self.lstm(x.flatten(1, 2))[0][:, -1])
            return y

    recurrent = make_task(Recurrent(), (2, 6, 6), clients=10)
    assert pick(recurrent, enough, CPU) == (
        "loop",
        "recurrent layers do not gain from stacking on a CPU",
    )


@pytest.mark.parametrize(("cohort", "engine"), [(3, "loop"), (8, "batched")])
def test_a_run_says_why_it_has_its_engine_and_keeps_it(
    cohort: int, engine: str, tmp_path: Path
) -> None:
    config = resolve(
        {
            "data": {"clients": 12},
            "model": {"hidden": [8]},
            "train": {"rounds": 2, "cohort": cohort},
        }
    )
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "run", say=said.append, notify=stop_in(2))
    assert said[0].startswith(f"engine {engine} on cpu, float32: ")
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["engine"] == engine
    assert "chosen because " in about["why"]
    assert said[0].endswith(about["why"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kairosfl.engines.auto.pick", lambda *_: ("nonsense", "a busy machine"))
        experiment.resume(tmp_path / "run", say=said.append)
    assert said[1].startswith(f"engine {engine} on cpu, float32")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["engine"] == engine


def test_evaluation_takes_the_way_that_it_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    task = make_task(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), (2, 6, 6))

    def way(x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return inputs

    def other(x: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        return x

    class Graph:
        def __init__(self, predict: object) -> None:
            self.predict = predict

        def replay(self) -> None:
            """Nothing to do."""

    monkeypatch.setattr(evaluator.GraphEvaluator, "_captured", lambda self, predict: Graph(predict))
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    for seconds, wanted in (
        (cycle([2.0, 2.0, 2.0, 1.0, 1.0, 1.0]), other),
        (cycle([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]), way),
    ):
        choices = Choices()
        monkeypatch.setattr(evaluator, "timed", lambda _, seconds=seconds: next(seconds))
        for _ in range(2):  # the second as a resumed run does it
            one = evaluator.GraphEvaluator(
                task, task.dataset.test, way, Precision.of("float32", CPU), choices
            )
            one.other, one._x = other, torch.zeros(1)
            assert one._quicker().predict is wanted  # type: ignore[attr-defined]
            monkeypatch.setattr(evaluator, "timed", None)


@pytest.mark.parametrize(
    "content",
    [b"[]", b"{", b'{"conv": 3, "linear": {"choice": "ours"}, "x": {"choice": 1, "round": 1}}'],
)
def test_damaged_choices_are_measured_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "choices.json").write_bytes(content)
    assert Folder(tmp_path).choices() == {}


def never() -> str:
    raise AssertionError("measured, although the choice was known")


def test_the_next_process_takes_choices_from_the_cache(tmp_path: Path) -> None:
    ways = ("a", "b")
    first = Choices(Cache(tmp_path, SAME))
    assert first.choose("conv", lambda: "b", ways, "8 clients") == "b"
    next_one = Choices(Cache(tmp_path, SAME))
    assert next_one.choose("conv", never, ways, "8 clients") == "b"
    assert next_one.made == {"conv": "b"}  # which the run stores in its folder
    assert Choices(Cache(tmp_path, SAME)).choose("conv", lambda: "a", ways, "9 clients") == "a"
    assert (
        Choices(Cache(tmp_path, SAME | {"torch": "3"})).choose(
            "conv", lambda: "a", ways, "8 clients"
        )
        == "a"
    )
    assert (
        Choices(Cache(tmp_path, SAME)).choose("conv", lambda: "c", ("a", "c"), "8 clients") == "c"
    )


def test_what_a_run_chose_counts_more_than_the_cache(tmp_path: Path) -> None:
    Choices(Cache(tmp_path, SAME)).choose("conv", lambda: "b", ("a", "b"))
    resumed = Choices(Cache(tmp_path, SAME))
    resumed.restore({"conv": ("a", 5)}, 4)
    assert resumed.choose("conv", never, ("a", "b")) == "a"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"choices": 3}', b'{"conditions": {}, "choices": {}}', b"\xff"]
)
def test_a_damaged_cache_is_measured_again_and_replaced(tmp_path: Path, content: bytes) -> None:
    cache = Cache(tmp_path, SAME)
    cache.path.write_bytes(content)
    assert Choices(cache).choose("conv", lambda: "b", ("a", "b")) == "b"
    assert Choices(Cache(tmp_path, SAME)).choose("conv", never, ("a", "b")) == "b"
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        ["choices.lock", cache.path.name]
    )


def test_a_disk_that_cannot_be_written_to_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a directory")
    assert (
        Choices(Cache(tmp_path / "file" / "below", SAME)).choose("conv", lambda: "b", ("a", "b"))
        == "b"
    )

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kairosfl.engines.choices.os.replace", full)
    assert Choices(Cache(tmp_path, SAME)).choose("conv", lambda: "b", ("a", "b")) == "b"
    assert {path.name for path in tmp_path.iterdir()} == {"choices.lock", "file"}


def _put(folder: Path, number: int) -> None:
    for each in range(10):
        Cache(folder, SAME).put(f"{number} {each}", "a")


def test_processes_that_write_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_put, args=(tmp_path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    cache = Cache(tmp_path, SAME)
    assert all(cache.get(f"{number} {each}") == "a" for number in range(4) for each in range(10))


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = Precision.of("float32", CPU)
    assert Cache.of(CPU, precision) is None  # the tests' own setting, off
    monkeypatch.setenv("KAIROSFL_CACHE", str(tmp_path / "own"))
    own = Cache.of(CPU, precision)
    assert own is not None
    assert own.path.parent == tmp_path / "own"
    monkeypatch.delenv("KAIROSFL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    usual, other = Cache.of(CPU, precision), Cache.of(CPU, Precision.of("bfloat16", CPU))
    assert usual is not None
    assert other is not None
    assert usual.path.parent == tmp_path / "kairosfl"
    assert usual.path != other.path


def test_a_second_run_measures_nothing_and_is_the_same_to_the_bit(
    config: RunConfig, measured: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = Batched.__init__

    def caching(self: Batched, *arguments: object, **options: object) -> None:
        whole(self, *arguments, **options)  # type: ignore[arg-type]
        self.choices.cache = Cache(tmp_path / "cache", SAME)

    monkeypatch.setattr(Batched, "__init__", caching)
    experiment.start(config, tmp_path / "first")
    assert measured == ["grouped", "columns"]
    experiment.start(config, tmp_path / "second")
    assert measured == ["grouped", "columns"]
    first, second = (
        json.loads((tmp_path / name / "choices.json").read_text()) for name in ("first", "second")
    )
    assert first == second
    assert torch.equal(model(tmp_path / "first")[0], model(tmp_path / "second")[0])
