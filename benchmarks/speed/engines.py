"""How fast clients train: one after another, and side by side, on CIFAR-10 dealt to 100 clients by
Dir(0.1).

    python benchmarks/speed/engines.py --device cuda --models alexnet cnn alt_cnn resnet18 --json engines.json
    python benchmarks/speed/engines.py --device cuda --models cnn --parts profile

For each model: whether `batched` computes what `loop` computes; then images really trained on per
second, over whole rounds with the server's arithmetic and an evaluation after every round, by

    eager     a tight hand-written loop over clients (no server, no evaluation)
    loop      engine `loop`, one run
    batched   engine `batched`, a sweep of runs
    ceiling   one model, one batch as large as all clients' together, in a captured graph: no federation
    traffic   full batches if memory did nothing but move every client's weights, gradients and momenta: the forward
              pass reads w; the backward pass reads w and writes g; the step reads w, v and g and writes w and v

A part that fails is printed and left out.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import Rounds, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.data import load
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.models import build
from kairosfl.rules import parse
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.partitions import dirichlet
from kairosfl.tasks.prepare import prepare
from kairosfl.tasks.task import Task


@dataclass(frozen=True)
class Case:
    """One line of the table: batch size, runs in the sweep, clients at once for the ceiling, what
    is required.
    """

    batch: int
    runs: int
    together: int
    required: tuple[float, int]  # times eager, images per second
    aim: tuple[float, int]


CASES = {
    "alexnet": Case(32, 8, 64, (9, 85_000), (13, 130_000)),
    "cnn": Case(64, 8, 64, (11, 380_000), (16, 600_000)),
    "alt_cnn": Case(64, 8, 64, (15, 500_000), (30, 1_000_000)),
    "resnet18": Case(64, 4, 32, (2.3, 17_000), (4, 30_000)),
    "aware_cnn": Case(64, 8, 64, (1, 1), (1, 1)),
}
CLIENTS, COHORT = 100, 10
CHECKED = 6  # clients whose step is compared


def main() -> None:
    arguments = _arguments()
    device = torch.device(arguments.device)
    dataset = _data()
    table: dict[str, dict[str, float]] = {}
    lines: list[str] = []
    for name in arguments.models:
        found = table[name] = {}
        for part, action in _parts(name, dataset, device, arguments):
            began = time.perf_counter()
            try:
                found |= action()
                print(f"{name} {part}: {time.perf_counter() - began:.0f} s", flush=True)
            except Exception:  # one part must not take the others with it
                print(f"{name} {part} failed\n{traceback.format_exc(limit=-6)}", flush=True)
            gc.collect()  # traced models are cycles, and hold on to their engine's memory
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
        lines.append(_line(name, found))
        if arguments.json:
            part_file = Path(f"{arguments.json}.part")
            part_file.write_text(json.dumps(table, indent=1))
            os.replace(part_file, arguments.json)
    print("\n".join(["", _HEAD, *lines]))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--models",
        nargs="+",
        default=["alexnet", "cnn", "alt_cnn", "resnet18"],
        choices=list(CASES),
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precisions", nargs="+", default=["tf32", "bfloat16"])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each measurement")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument(
        "--parts", nargs="+", default=["check", "eager", "batched", "ceiling", "traffic"]
    )
    parser.add_argument("--json", help="write all numbers here")
    return parser.parse_args()


def _parts(
    name: str, dataset: DataSet, device: torch.device, arguments: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], dict[str, float]]]]:
    case, wanted = CASES[name], arguments.parts
    tasks = [_task(name, dataset, seed) for seed in range(case.runs)]
    recipe = Recipe(
        rounds=10**6,
        cohort=COHORT,
        epochs=arguments.epochs,
        batch_size=case.batch,
        lr=0.01,
        momentum=0.9,
    )
    precisions = arguments.precisions if device.type == "cuda" else ["float32"]
    if "check" in wanted:
        yield "check", lambda: check(tasks[0], recipe, device, ["float32", *precisions])
    if "eager" in wanted:
        yield "eager", lambda: {"eager": eager(tasks[0], recipe, device, arguments.seconds / 2)}
    if "loop" in wanted:
        yield "loop", lambda: {"loop": looped(tasks[0], recipe, device, arguments.seconds / 2)}
    if "batched" in wanted:
        for each in precisions:
            yield (
                f"batched {each}",
                lambda each=each: sweep(
                    tasks, recipe, device, each, arguments.seconds, arguments.algorithm
                ),
            )
    if "ceiling" in wanted and device.type == "cuda":
        yield "ceiling", lambda: {"ceiling": ceiling(tasks[0], case.batch * case.together, device)}
    if "traffic" in wanted and device.type == "cuda":
        yield "traffic", lambda: {"traffic": traffic(tasks[0], case.batch, device)}
    if "profile" in wanted and device.type == "cuda":
        for each in precisions:
            yield f"profile {each}", lambda each=each: profile(tasks, recipe, device, each)


def _data() -> DataSet:
    try:
        return load("cifar10")
    except UserError as missing:
        print(f"noise instead of CIFAR-10: {missing}", flush=True)
    rng = np.random.default_rng(0)

    def samples(count: int) -> Samples:
        images = torch.from_numpy(rng.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8))
        return Samples(images, torch.from_numpy(rng.integers(0, 10, count)))

    return DataSet(
        "noise", samples(50_000), samples(10_000), 10, (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)
    )


def _task(name: str, dataset: DataSet, seed: int) -> Task:
    clients = dirichlet(dataset.train.targets.numpy(), CLIENTS, seed, alpha=0.1, minimum=2)
    return Task(
        build(name, shape=dataset.shape, classes=dataset.classes, seed=seed), dataset, clients
    )


def _course(
    task: Task, recipe: Recipe, device: torch.device, seed: int = 0, algorithm: str = "fedavg"
) -> Rounds:
    setup = Setup(parse(algorithm), recipe, CLIENTS, task.layout, detectors=(FGN(),))
    return rounds(Run.start(task.start().to(device), setup, seed=seed), setup)


def _first(task: Task, recipe: Recipe, device: torch.device, seed: int = 0) -> Briefs:
    return next(_course(task, recipe, device, seed))[1]  # type: ignore[return-value]


def check(
    task: Task, recipe: Recipe, device: torch.device, precisions: list[str]
) -> dict[str, float]:
    """Relative error of the updates after one step of the smallest clients, against `loop` in
    float64 on the CPU.
    """
    model = copy.deepcopy(task.model)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0  # the engines draw their masks differently
    task = replace(task, model=model)
    smallest = torch.from_numpy(np.sort(np.argsort(task.clients.sizes)[:CHECKED]))
    most = int(task.clients.sizes[smallest.numpy()].max())
    briefs = _first(
        task, replace(recipe, cohort=CLIENTS, epochs=1, lr=0.1, batch_size=most), device
    ).take(smallest)
    exact = replace(task, model=copy.deepcopy(model).double())
    wanted = Loop(exact).train(replace(briefs, start=exact.start())).delta
    engines = {"loop": lambda: Loop(task, device)}
    engines |= {
        f"batched {each}": lambda each=each: Batched(task, device, precision=each)
        for each in precisions
    }
    found = {}
    for name, make in engines.items():
        delta = make().train(briefs).delta.cpu().double()
        found[f"error {name}"] = float((delta - wanted).norm() / wanted.norm())
    print("  " + ", ".join(f"{key} {value:.1e}" for key, value in found.items()), flush=True)
    return found


def eager(task: Task, recipe: Recipe, device: torch.device, seconds: float) -> float:
    """Images per second of the loop that everyone writes, with nothing in it that need not be."""
    dataset = task.dataset
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = copy.deepcopy(task.model).to(device).train()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    inputs, targets = dataset.train.inputs.to(device), dataset.train.targets.to(device)
    rng = np.random.default_rng(0)
    trained, began = 0, 0.0
    warm = time.perf_counter() + 1.0
    while not began or time.perf_counter() - began < seconds:
        mine = torch.from_numpy(task.clients[int(rng.integers(CLIENTS))].astype(np.int64)).to(
            device
        )
        model.load_state_dict(start)
        optimiser = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
        for _ in range(recipe.epochs):
            for batch in mine[torch.randperm(len(mine), device=device)].split(recipe.batch_size):
                loss = F.cross_entropy(model(prepare(inputs[batch], dataset)), targets[batch])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            trained += len(mine)
        _wait(device)
        if not began and time.perf_counter() > warm:
            trained, began = 0, time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = False
    return trained / (time.perf_counter() - began)


def looped(task: Task, recipe: Recipe, device: torch.device, seconds: float) -> float:
    """Images per second of engine `loop`, rounds and evaluations included."""
    engine, course = Loop(task, device), _course(task, recipe, device)
    _, briefs = next(course)
    trained, began = 0.0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        assert briefs is not None
        reports = engine.train(briefs)
        trained += float((reports.n * reports.epochs).sum())
        run, briefs = course.send(reports)
        engine.evaluate(run.x)
    return trained / (time.perf_counter() - began)


def sweep(
    tasks: list[Task],
    recipe: Recipe,
    device: torch.device,
    precision: str,
    seconds: float,
    algorithm: str,
) -> dict[str, float]:
    """Images per second of a sweep on one engine, rounds and evaluations included, once every width
    was captured.
    """
    engine = Batched(tasks[0], device, precision=precision)
    courses, training, accuracy = [], {}, 0.0
    spent = dict.fromkeys(("collect", "report", "server", "evaluate", "submit"), 0.0)
    for seed, task in enumerate(tasks):
        courses.append(_course(task, recipe, device, seed, algorithm))
        briefs = next(courses[-1])[1]
        assert briefs is not None
        training[engine.submit(task, briefs)] = seed
    trained, done, began, warm = 0.0, 0, 0.0, time.perf_counter() + max(4.0, seconds / 2)
    while not began or time.perf_counter() - began < seconds:
        clock = [time.perf_counter()]
        ticket = engine.collect()
        clock.append(time.perf_counter())
        seed, reports = training.pop(ticket), ticket.reports()
        clock.append(time.perf_counter())
        run, briefs = courses[seed].send(reports)
        clock.append(time.perf_counter())
        accuracy = engine.evaluate(run.x).accuracy
        clock.append(time.perf_counter())
        assert briefs is not None
        training[engine.submit(tasks[seed], briefs)] = seed
        clock.append(time.perf_counter())
        if began:
            trained += float((reports.n * reports.epochs).sum())
            done += 1
            for name, since, until in zip(spent, clock, clock[1:], strict=False):
                spent[name] += until - since
        elif clock[-1] > warm:
            began = time.perf_counter()
    elapsed = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
    shares = ", ".join(f"{name} {value / elapsed:.0%}" for name, value in spent.items())
    print(
        f"  {trained / elapsed:,.0f} images/s, {done} rounds, accuracy {accuracy:.3f}, {peak:.1f} GiB, {engine.why}"
    )
    print(f"  host time: {shares}", flush=True)
    return {f"batched {precision}": trained / elapsed, f"memory {precision}": peak}


def ceiling(task: Task, batch: int, device: torch.device) -> float:
    """Images per second of one model on one large batch, in a captured graph."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    model = copy.deepcopy(task.model).to(device, memory_format=torch.channels_last).train()
    inputs = prepare(task.dataset.train.inputs[:batch].to(device), task.dataset)
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    targets = task.dataset.train.targets[:batch].to(device)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

    def step() -> None:
        optimiser.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimiser.step()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
    seconds = _replay(graph, 20)
    torch.backends.cuda.matmul.allow_tf32 = False
    return batch / seconds


PASSES = 8  # of a step over a client's vectors of weights, gradients and momenta


def traffic(task: Task, batch: int, device: torch.device) -> float:
    """Images per second at which moving weights, gradients and momenta takes all of the memory's
    speed.
    """
    block = torch.zeros(1 << 29, device=device)
    into = torch.empty_like(block)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.add(block, 1, out=into)
    speed = 2 * block.nbytes / _replay(graph, 20)
    print(f"  memory moves {speed / 1e12:.2f} TB/s", flush=True)
    return batch * speed / (PASSES * 4 * task.layout.size)


def _replay(graph: torch.cuda.CUDAGraph, count: int) -> float:
    """Seconds of one replay."""
    graph.replay()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(count):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / count


def profile(
    tasks: list[Task], recipe: Recipe, device: torch.device, precision: str
) -> dict[str, float]:
    """Images per second of the step alone for several numbers of clients, and where the time of one
    of them goes.
    """
    engine = Batched(tasks[0], device, precision=precision)
    for seed, task in enumerate(tasks):
        engine.submit(task, _first(task, recipe, device, seed))
    found = {}
    with engine._working():
        engine._ready()
        slots = engine._slots
        assert slots is not None
        slots._settle(lambda _: None)
        kind = next(job for job in slots.jobs if job is not None).kind
        steps, slots.state.wholes[1] = engine._steps, 10**9  # nobody finishes
        for width in (4, 8, 16, 24, 32, 48, 64, 80):
            if width > slots.state.slots:
                break
            wide = kind.wide(width)
            steps(wide, 2)
            slots.state.wholes[0] = 0
            torch.cuda.synchronize()
            began = time.perf_counter()
            steps(wide, 20)
            torch.cuda.synchronize()
            seconds = (time.perf_counter() - began) / 20
            found[f"step {precision} {width}"] = width * recipe.batch_size / seconds
            print(
                f"  {width} clients: {seconds * 1e3:.2f} ms, {width * recipe.batch_size / seconds:,.0f} images/s"
            )
        model = tasks[0].start().to(device)
        engine.evaluate(model)
        began = time.perf_counter()
        for _ in range(5):
            engine.evaluate(model)
        print(f"  evaluation: {(time.perf_counter() - began) / 5 * 1e3:.2f} ms")
        slots.state.wholes[0] = 0
        wide = kind.wide(min(32, slots.state.slots))
        _events(lambda: steps(wide, 5), 5)
        for layer, method in engine._work.stack.frame.chosen.items():
            print(f"  {layer}: {method}")
    return found


def _events(action: Callable[[], None], times: int) -> None:
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as record:
        action()
        torch.cuda.synchronize()
    rows = sorted(record.key_averages(), key=lambda row: -row.self_device_time_total)
    total = sum(row.self_device_time_total for row in rows)
    print(
        f"  kernels: {total / times / 1e3:.2f} ms a step, {sum(row.count for row in rows) / times:.0f} launches"
    )
    for row in rows[:25]:
        share, mean = row.self_device_time_total / total, row.self_device_time_total / row.count
        print(f"    {share:6.1%} {row.count / times:5.1f} x {mean:8.1f} us  {row.key[:100]}")


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


_HEAD = (
    f"{'images per second':12s} {'eager':>9s} {'loop':>9s} {'batched':>10s} {'x':>6s} {'(asked)':>18s} "
    f"{'ceiling':>16s} {'traffic':>16s}"
)


def _line(name: str, found: dict[str, float]) -> str:
    case = CASES[name]
    best = max(
        (value for key, value in found.items() if key.startswith("batched")), default=float("nan")
    )
    tf32 = found.get("batched tf32", found.get("batched float32", best))
    nan = float("nan")
    return (
        f"{name:17s} {found.get('eager', nan):9,.0f} {found.get('loop', nan):9,.0f} {tf32:10,.0f} "
        f"{tf32 / found.get('eager', nan):5.1f}x {case.required[0]:5.1f}x {case.required[1]:10,d} "
        f"{_part(tf32, found.get('ceiling'))} {_part(tf32, found.get('traffic'))}   "
        f"best {best:,.0f} ({best / found.get('eager', nan):.1f}x)"
    )


def _part(speed: float, bound: float | None) -> str:
    """A bound, and how much of it was reached."""
    return f"{bound:10,.0f} {speed / bound:5.0%}" if bound else f"{'–':>16s}"


if __name__ == "__main__":
    main()
