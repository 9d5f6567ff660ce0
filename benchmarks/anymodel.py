"""How fast models that nobody wrote for this engine train: a ViT with a class token, and a separable CNN.

    python benchmarks/anymodel.py --device cuda

For each model and precision, images a second of random data in one process: `eager` one client after another in a tight
loop, `batched` with all clients in one cohort, and `ceiling` one model on one batch as large as all clients' together,
in a captured graph where there is a GPU.
"""

from __future__ import annotations

import argparse
import copy
import gc
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.core.fields import Briefs
from kairosfl.engines.batched import Batched
from kairosfl.engines.precision import Precision
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task


class Block(nn.Module):
    """Attention and an MLP, both after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """65 tokens of 32 × 32 images."""

    def __init__(self, width: int = 192, depth: int = 6, heads: int = 3, patch: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (32 // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        y: Tensor = self.head(self.norm(self.blocks(x))[:, 0])
        return y


def separable(widths: tuple[int, ...] = (64, 128, 128, 256, 256), strides: tuple[int, ...] = (1, 2, 1, 2)) -> nn.Module:
    """Depthwise 3 × 3 and pointwise convolutions, GroupNorm, SiLU."""
    layers: list[nn.Module] = [nn.Conv2d(3, widths[0], 3, padding=1), nn.GroupNorm(8, widths[0]), nn.SiLU()]
    for before, after, stride in zip(widths, widths[1:], strides, strict=False):
        layers += [nn.Conv2d(before, before, 3, stride, 1, groups=before), nn.GroupNorm(8, before), nn.SiLU()]
        layers += [nn.Conv2d(before, after, 1), nn.GroupNorm(8, after), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))


@dataclass(frozen=True)
class Case:
    """A model, what a sample looks like, and how many clients take how many steps of which batch."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    tokens: int  # 0: images
    clients: int
    batch: int
    steps: int
    precisions: tuple[str, ...]
    classes: int = 10

    @property
    def items(self) -> int:
        """Images or tokens in a sample."""
        return self.shape[0] if self.tokens else 1


CASES = {
    "vit": Case(ViT, (3, 32, 32), 0, 40, 32, 8, ("tf32", "bfloat16")),
    "separable": Case(separable, (3, 32, 32), 0, 40, 32, 8, ("tf32", "bfloat16")),
}


def task_of(case: Case, clients: int, model: nn.Module) -> Task:
    """Random samples, the same number for each client."""
    generator, count = torch.Generator().manual_seed(0), clients * case.batch * case.steps
    high = case.tokens or 256
    inputs = torch.randint(0, high, (count, *case.shape), generator=generator)
    targets = torch.randint(0, case.classes, (count,), generator=generator)
    held = Samples(inputs if case.tokens else inputs.to(torch.uint8), targets)
    scale = () if case.tokens else (0.5,) * case.shape[0]
    dataset = DataSet("random", held, held, case.classes, mean=scale, std=scale, vocabulary=case.tokens)
    cuts = np.arange(clients + 1) * case.batch * case.steps
    return Task(model, dataset, Population(np.arange(count), cuts))


def plain(case: Case, precision: str, device: torch.device, batch: int, captured: bool) -> float:
    """Items a second of one model after another: steps of SGD with momentum on batches of this size."""
    model = copy.deepcopy(case.make()).to(device).train()
    low = precision == "bfloat16"
    if low:  # as the engine does: what is frozen is stored in it
        for parameter in model.parameters():
            parameter.data = parameter.data if parameter.requires_grad else parameter.data.to(torch.bfloat16)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    speed = [torch.zeros_like(each) for each in trained]
    kind = {"device": device}
    x = (
        torch.randint(0, case.tokens, (batch, *case.shape), **kind)
        if case.tokens
        else torch.randn(batch, *case.shape, **kind)
    )
    y = torch.randint(0, case.classes, (batch,), **kind)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=low, cache_enabled=False):
            outputs = model(x)
        slopes = list(torch.autograd.grad(F.cross_entropy(outputs.float(), y), trained))
        with torch.no_grad():
            torch._foreach_mul_(speed, 0.9)
            torch._foreach_add_(speed, slopes)
            torch._foreach_add_(trained, speed, alpha=-0.001)

    with Precision(precision)():
        run = _graph(step) if captured and device.type == "cuda" else step
        return batch * case.items / _seconds(run, device)


def _graph(step: Callable[[], None]) -> Callable[[], None]:
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


def _seconds(run: Callable[[], object], device: torch.device, least: float = 1.0) -> float:
    """Of one call, over about this many seconds."""
    run()
    count, taken = 1, 0.0
    while taken < least:
        _wait(device)
        began = time.perf_counter()
        for _ in range(count):
            run()
        _wait(device)
        taken = time.perf_counter() - began
        if taken < least:
            count = max(count + 1, int(1.2 * count * least / max(taken, 1e-6)))
    return taken / count


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def batched(case: Case, precision: str, device: torch.device) -> tuple[float, str]:
    """Items a second of whole rounds of all clients on engine `batched`, and how it runs the model."""
    task = task_of(case, case.clients, case.make())
    engine = Batched(task, device, precision=precision if device.type == "cuda" or precision == "bfloat16" else None)
    briefs = Briefs(
        seed=0,
        round=0,
        ids=torch.arange(case.clients),
        start=engine.start(),
        lr=0.001,
        momentum=0.9,
        batch_size=case.batch,
        epochs=1,
    )
    seconds = _seconds(lambda: engine.train(briefs), device)
    return case.clients * case.steps * case.batch * case.items / seconds, engine.why


def table(cases: dict[str, Case], device: torch.device, unit: str) -> None:
    """Measure and print one line per model and precision."""
    for name, case in cases.items():
        size = sum(each.numel() for each in case.make().parameters())
        print(f"{name}: {size / 1e6:.2f} M parameters, {case.clients} clients × {case.batch}", flush=True)
        for precision in case.precisions:
            found: dict[str, float] = {}
            ways: dict[str, Callable[[], float]] = {
                "eager": lambda: plain(case, precision, device, case.batch, False),  # noqa: B023
                "ceiling": lambda: plain(case, precision, device, case.batch * case.clients, True),  # noqa: B023
            }
            for way, action in ways.items():
                try:
                    found[way] = action()
                except Exception as error:  # the others are worth having
                    print(f"  {precision} {way} failed: {str(error).splitlines()[0][:200]}")
                _free(device)
            try:
                found["batched"], why = batched(case, precision, device)
            except Exception:
                print(traceback.format_exc(limit=-8))
                continue
            memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
            _free(device)
            ratios = [f"{found['batched'] / found[way]:.2f} × {way}" for way in ways if way in found]
            rates = ", ".join(f"{way} {rate:,.0f}" for way, rate in found.items())
            print(f"  {precision}: {rates} {unit} a second; {', '.join(ratios)}; {memory:.1f} GB; {why}", flush=True)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def arguments(names: list[str]) -> argparse.Namespace:
    """Which cases to run, and where."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", nargs="+", default=names, choices=names)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="a few samples, to try the script")
    return parser.parse_args()


def main() -> None:
    chosen = arguments(list(CASES))
    cases = {name: CASES[name] for name in chosen.models}
    if chosen.small:
        cases = {
            name: Case(each.make, each.shape, each.tokens, 2, 2, 1, each.precisions) for name, each in cases.items()
        }
    table(cases, torch.device(chosen.device), "images")


if __name__ == "__main__":
    main()
