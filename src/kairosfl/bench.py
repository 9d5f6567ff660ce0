"""How fast a task trains on this machine: loop, batched, and one model as the ceiling.

The ceiling is one model that trains on one batch as large as all clients' together, captured as a
graph where there is a GPU: what the device could do if all clients had the same weights.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.streams import stream
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.engines.precision import Precision
from kairosfl.errors import UserError, first_line
from kairosfl.tasks.forward import call
from kairosfl.tasks.prepare import ordered
from kairosfl.tasks.task import Task

LR = 1e-4  # of the ceiling, whose weights do not matter as long as they stay finite
LONG = 20.0  # seconds of a run whose ceiling is worth measuring
BRIEF = 0.5  # seconds of that measurement
PART = 0.01  # of the run that one of its steps may take
LARGEST = 4096  # samples in its batch


@dataclass(frozen=True)
class Measured:
    """One line of the table; `rate` is None if it failed, and `why` says why."""

    engine: str  # "loop", "batched" or "one model"
    precision: str
    rate: float | None  # images, tokens or samples a second
    memory: int | None = None  # bytes at the peak; known on GPUs only
    why: str = ""  # how the model runs


@dataclass(frozen=True)
class Bench:
    """What was measured."""

    device: str
    unit: str  # "images", "tokens" or "samples"
    clients: int
    batch: int
    parameters: int
    lines: list[Measured] = field(default_factory=list)

    def ratio(self, line: Measured) -> float | None:
        """How many times as fast as the fastest loop."""
        fastest = 0.0
        for other in self.lines:
            if other.engine == "loop" and other.rate:
                fastest = max(fastest, other.rate)
        if not line.rate or not fastest:
            return None
        return line.rate / fastest

    def share(self, line: Measured) -> float | None:
        """The part of what one model does in the same precision."""
        ceiling = None
        for other in self.lines:
            if other.engine == "one model" and other.precision == line.precision:
                ceiling = other.rate
                break
        if not line.rate or not ceiling:
            return None
        return line.rate / ceiling

    def rows(self) -> list[dict[str, str]]:
        """The table, as text."""
        return [self._row(line) for line in self.lines]

    def _row(self, line: Measured) -> dict[str, str]:
        gibibytes = None
        if line.memory is not None:
            gibibytes = line.memory / 2**30
        return {
            "engine": line.engine,
            "precision": line.precision,
            f"{self.unit} a second": _cell(line.rate, "{:,.0f}"),
            "times loop": _cell(self.ratio(line), "{:.2f}"),
            "of the ceiling": _cell(self.share(line), "{:.0%}"),
            "memory": _cell(gibibytes, "{:.2f} GiB"),
            "how": line.why,
        }

    def numbers(self) -> dict[str, Any]:
        """The same for JSON."""
        lines = []
        for line in self.lines:
            ratios = {"times_loop": self.ratio(line), "of_the_ceiling": self.share(line)}
            lines.append({**vars(line), **ratios})
        return {**vars(self), "lines": lines}


def _cell(number: float | None, form: str) -> str:
    return "–" if number is None else form.format(number)


def precisions(device: torch.device) -> tuple[str, ...]:
    """Those that the device computes in without emulating them."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return ("float32", "tf32", "bfloat16")
    return ("float32",)


def bench(
    task: Task,
    recipe: Recipe,
    device: torch.device,
    *,
    clients: int | None = None,
    seconds: float = 3.0,
    chosen: Sequence[str] = (),
    seed: int = 0,
    show: Callable[[Measured], None] | None = None,
) -> Bench:
    """Measure a task.

    Args:
        task: What is learnt.
        recipe: How clients train.
        device: Where.
        clients: How many train in a round, by default the recipe's cohort.
        seconds: Of each measurement, at least; a round that takes longer is measured once.
        chosen: The precisions, by default all that the device has.
        seed: Which clients train.
        show: Called with every line as soon as it is measured.
    """
    population = len(task.clients)
    cohort = clients or recipe.cohort
    if cohort > population:
        raise UserError(
            f"--clients {cohort} is more than the {population} clients of this task; give fewer."
        )
    drawn = stream(seed, "select").choice(population, cohort, replace=False)
    ids = torch.from_numpy(drawn).sort().values
    together = int(task.clients.sizes[ids.numpy()].clip(max=recipe.batch_size).sum())

    def loop(precision: str) -> tuple[float, str]:
        return _loop(task, recipe, ids, device, precision, seconds, seed)

    def batched(precision: str) -> tuple[float, str]:
        return _batched(task, recipe, ids, device, precision, seconds, seed)

    def ceiling(precision: str) -> tuple[float, str]:
        return one_model(task, device, precision, together, seconds), ""

    unit, items = task.dataset.unit
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    table = Bench(where, unit, cohort, recipe.batch_size, task.layout.size)
    measures = {"loop": loop, "batched": batched, "one model": ceiling}
    names = tuple(chosen) or precisions(device)
    for engine, precision in itertools.product(measures, names):
        if engine == "loop" and precision == "bfloat16":  # which it does not have
            continue
        line = _line(engine, precision, measures[engine], items, device)
        table.lines.append(line)
        if show is not None:
            show(line)
    return table


def _line(
    engine: str,
    name: str,
    measure: Callable[[str], tuple[float, str]],
    items: int,
    device: torch.device,
) -> Measured:
    """One line of the table, with the memory at the peak of its measurement."""
    memory = None
    free(device)
    try:
        rate, why = measure(name)
    except Exception as error:  # the other lines are worth having
        reason = first_line(error)
        return Measured(engine, name, None, None, f"failed: {reason[:200]}")
    finally:
        if device.type == "cuda":
            memory = torch.cuda.max_memory_allocated(device)
        free(device)
    return Measured(engine, name, rate * items, memory, why)


def free(device: torch.device) -> None:
    """Return what the last measurement held, so that the next peak is its own."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def briefs_of(recipe: Recipe, ids: Tensor, start: Tensor, seed: int = 0) -> Briefs:
    """What these clients are told in the first round of FedAvg."""
    terms = recipe.told(0) | {"round": 0}
    return Briefs(seed=seed, ids=ids, start=start, **terms)


def _loop(
    task: Task,
    recipe: Recipe,
    ids: Tensor,
    device: torch.device,
    precision: str,
    seconds: float,
    seed: int,
) -> tuple[float, str]:
    """Samples a second: one client after another, as many as the time allows."""
    engine = Loop(task, device, precision=precision)
    briefs = briefs_of(recipe, ids, engine.start(), seed)
    single = _turns([briefs.take(torch.tensor([row])) for row in range(len(ids))])
    return _rate(lambda: engine.train(next(single)), briefs, device, seconds), engine.why


def _turns(parts: list[Briefs]) -> Iterator[Briefs]:
    while True:
        yield from parts


def _batched(
    task: Task,
    recipe: Recipe,
    ids: Tensor,
    device: torch.device,
    precision: str,
    seconds: float,
    seed: int,
) -> tuple[float, str]:
    """Samples a second of whole rounds, and how the engine runs the model."""
    engine = Batched(task, device, precision=precision, cohorts=(len(ids),))
    briefs = briefs_of(recipe, ids, engine.start(), seed)
    return _rate(lambda: engine.train(briefs), briefs, device, seconds), engine.why


def _rate(
    train: Callable[[], Reports], briefs: Briefs, device: torch.device, seconds: float
) -> float:
    """Samples a second.

    The first call, which captures graphs and chooses methods, counts only if it took too long.
    """
    seen = 0
    taken = 0.0
    first = True
    while not seen or taken < seconds:
        wait(device)
        began = time.perf_counter()
        reports = train()
        wait(device)
        took = time.perf_counter() - began
        if not first or (took > seconds and device.type == "cpu"):
            taken += took
            seen += reports.samples(briefs)
        first = False
    return seen / taken


def of_the_ceiling(
    task: Task, recipe: Recipe, device: torch.device, precision: str, summary: Mapping[str, Any]
) -> float | None:
    """The part of what one model does that a finished run reached, with all that it did.

    None for a run that is short compared with the measurement, and where the measurement fails.
    """
    rate = summary["samples_per_second"] or 0.0
    seconds = summary["seconds"] or 0.0
    cohort = summary["average_cohort"] or 0.0
    batch = min(LARGEST, round(cohort * task.clients.sizes.clip(max=recipe.batch_size).mean()))
    if not rate or not batch or seconds < LONG or batch / rate > PART * seconds:
        return None
    free(device)
    try:
        return float(rate / one_model(task, device, precision, batch, BRIEF))
    except Exception:  # the device's memory, say; the run itself is complete
        return None
    finally:
        free(device)


def one_model(
    task: Task,
    device: torch.device,
    precision: str,
    batch: int,
    seconds: float,
    *,
    captured: bool = True,
) -> float:
    """Samples a second of one model: steps of SGD with momentum on batches of this size."""
    model = copy.deepcopy(task.model).to(device).train()
    low = precision == "bfloat16"
    trained: list[Tensor] = []
    for parameter in model.parameters():
        if parameter.requires_grad:
            trained.append(parameter)
        elif low and parameter.dtype == torch.float32:
            # As the engine does: what is frozen is stored in the lower precision.
            parameter.data = parameter.data.to(torch.bfloat16)
    speed = [torch.zeros_like(parameter) for parameter in trained]
    data = task.dataset.train
    stored, targets = data.take(torch.arange(batch) % len(data)).to(device).read(slice(None))
    inputs = ordered(task.prepared(stored, trained[0].dtype))

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            outputs = call(model, inputs)
        loss = task.loss(outputs.to(trained[0].dtype), targets).mean()
        slopes = list(torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True))
        with torch.no_grad():
            torch._foreach_mul_(speed, 0.9)
            torch._foreach_add_(speed, slopes)
            torch._foreach_add_(trained, speed, alpha=-LR)

    with Precision(precision)():
        run: Callable[[], None] = step
        if captured and device.type == "cuda":
            run = _graph(step)
        return batch / time_of(run, device, seconds)


def _graph(step: Callable[[], None]) -> Callable[[], None]:
    """The step as a graph that a GPU replays, captured after three steps on a stream of its own."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def time_of(run: Callable[[], object], device: torch.device, least: float = 1.0) -> float:
    """Seconds of one call, the mean over about `least` seconds after a first one."""
    wait(device)
    began = time.perf_counter()
    run()
    wait(device)
    count = 1
    taken = time.perf_counter() - began
    if taken > least and device.type == "cpu":
        return taken
    while True:
        began = time.perf_counter()
        for _ in range(count):
            run()
        wait(device)
        taken = time.perf_counter() - began
        if taken >= least:
            return taken / count
        count = max(count + 1, math.ceil(1.2 * count * least / max(taken, 1e-6)))


def wait(device: torch.device) -> None:
    """Until the device has done all that was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
