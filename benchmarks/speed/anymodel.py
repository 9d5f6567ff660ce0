"""How fast models that nobody wrote for this engine train: a ViT with a class token, and a
separable CNN.

    python benchmarks/speed/anymodel.py --device cuda

For each model and precision, images a second of random data in one process: `eager` one client
after another in a tight loop, `batched` with all clients in one cohort, and `ceiling` one model on
one batch as large as all clients' together, in a captured graph where there is a GPU.
"""

from __future__ import annotations

import argparse
import traceback
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.bench import briefs_of, free, one_model, time_of
from kairosfl.core.recipe import Recipe
from kairosfl.engines.batched import Batched
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
        x = x + self.proj(
            F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, length, width)
        )
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


def separable(
    widths: tuple[int, ...] = (64, 128, 128, 256, 256), strides: tuple[int, ...] = (1, 2, 1, 2)
) -> nn.Module:
    """Depthwise 3 × 3 and pointwise convolutions, GroupNorm, SiLU."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, widths[0], 3, padding=1),
        nn.GroupNorm(8, widths[0]),
        nn.SiLU(),
    ]
    for before, after, stride in zip(widths, widths[1:], strides, strict=False):
        layers += [
            nn.Conv2d(before, before, 3, stride, 1, groups=before),
            nn.GroupNorm(8, before),
            nn.SiLU(),
        ]
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
    dataset = DataSet(
        "random", held, held, case.classes, mean=scale, std=scale, vocabulary=case.tokens
    )
    cuts = np.arange(clients + 1) * case.batch * case.steps
    return Task(model, dataset, Population(np.arange(count), cuts))


def batched(case: Case, precision: str, device: torch.device) -> tuple[float, str]:
    """Items a second of whole rounds of all clients on engine `batched`, and how it runs the model."""
    task = task_of(case, case.clients, case.make())
    engine = Batched(
        task,
        device,
        precision=precision if device.type == "cuda" or precision == "bfloat16" else None,
    )
    recipe = Recipe(cohort=case.clients, lr=0.001, momentum=0.9, batch_size=case.batch)
    briefs = briefs_of(recipe, torch.arange(case.clients), engine.start())
    seconds = time_of(lambda: engine.train(briefs), device)
    return case.clients * case.steps * case.batch * case.items / seconds, engine.why


def plain(case: Case, precision: str, device: torch.device, clients: int) -> float:
    """Items a second of one model, on batches as large as so many clients' together; of several, as
    a graph.
    """
    task = task_of(case, case.clients, case.make())
    return case.items * one_model(
        task, device, precision, case.batch * clients, 1.0, captured=clients > 1
    )


def table(cases: dict[str, Case], device: torch.device, unit: str) -> None:
    """Measure and print one line per model and precision."""
    for name, case in cases.items():
        size = sum(each.numel() for each in case.make().parameters())
        print(
            f"{name}: {size / 1e6:.2f} M parameters, {case.clients} clients × {case.batch}",
            flush=True,
        )
        for precision in (
            case.precisions if device.type == "cuda" else ("float32",)
        ):  # CPUs may emulate the others
            found: dict[str, float] = {}
            ways: dict[str, Callable[[], float]] = {
                "eager": lambda: plain(case, precision, device, 1),  # noqa: B023
                "ceiling": lambda: plain(case, precision, device, case.clients),  # noqa: B023
            }
            for way, action in ways.items():
                try:
                    found[way] = action()
                except Exception as error:  # the others are worth having
                    print(f"  {precision} {way} failed: {str(error).splitlines()[0][:200]}")
                free(device)
            try:
                found["batched"], why = batched(case, precision, device)
            except Exception:
                print(traceback.format_exc(limit=-8))
                continue
            memory = torch.cuda.max_memory_allocated() / 1e9 if device.type == "cuda" else 0.0
            free(device)
            ratios = [
                f"{found['batched'] / found[way]:.2f} × {way}" for way in ways if way in found
            ]
            rates = ", ".join(f"{way} {rate:,.0f}" for way, rate in found.items())
            print(
                f"  {precision}: {rates} {unit} a second; {', '.join(ratios)}; {memory:.1f} GB; {why}",
                flush=True,
            )


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
            name: Case(each.make, each.shape, each.tokens, 2, 2, 1, each.precisions)
            for name, each in cases.items()
        }
    table(cases, torch.device(chosen.device), "images")


if __name__ == "__main__":
    main()
