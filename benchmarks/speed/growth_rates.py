"""Speed and memory as work grows: 1 to 1,000 clients, 0.1 to 300 M parameters trained in full,
adapters of up to 1.1 B.

    python benchmarks/speed/growth_rates.py --device cuda --limit 6 --json growth.json

Engine `batched`, random data, one step of batch 8 a client and round: a residual CNN of growing
width (images a second) and the language models with LoRA adapters of `adapters.py` (tokens a
second). A size that does not fit, or would take longer than --limit seconds, is left out, and the
table says so. --small tries the script on a CPU.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

import torch
from adapters import Decoder
from anymodel import Case, task_of
from torch import Tensor, nn

from kairosfl.bench import briefs_of, free, time_of
from kairosfl.core.recipe import Recipe
from kairosfl.engines.batched import Batched

CLIENTS = (1, 10, 100, 1000)
BATCH = 8
WORDS = 32_000
ROOM = (
    14e9  # bytes of all clients' updates; with more, an H200 leaves models and updates on the host
)
Found = dict[str, dict[int, dict[str, float | str]]]


class Block(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.norm1, self.norm2 = nn.GroupNorm(8, width), nn.GroupNorm(8, width)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.first(x)))
        return torch.relu(x + self.norm2(self.second(y)))


def cnn(width: int) -> nn.Module:
    """Four residual blocks on 16 × 16 patches: 72 · width² parameters and a few."""
    stem = [nn.Conv2d(3, width, 2, 2), nn.ReLU()]
    return nn.Sequential(
        *stem,
        *(Block(width) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, 10),
    )


def cases(small: bool) -> dict[str, Case]:
    """Models by name; the numbers of a case's clients and steps are not used."""
    if small:
        tiny = partial(Decoder, 32, 2, 4, 2, 48, 8, 50)
        return {
            "full 0.01 M": Case(partial(cnn, 8), (3, 32, 32), 0, 1, BATCH, 1, ()),
            "adapters tiny": Case(tiny, (8,), 50, 1, BATCH, 1, ()),
        }
    widths = {"0.1": 40, "1": 120, "10": 376, "100": 1184, "300": 2040}
    full = {
        f"full {size} M": Case(partial(cnn, width), (3, 32, 32), 0, 1, BATCH, 1, ())
        for size, width in widths.items()
    }
    return full | {
        "adapters 27 M": Case(
            partial(Decoder, 512, 8, 8, 8, 1376, 128, WORDS), (128,), WORDS, 1, BATCH, 1, ()
        ),
        "adapters 336 M": Case(
            partial(Decoder, 1024, 24, 16, 16, 2752, 128, WORDS), (128,), WORDS, 1, BATCH, 1, ()
        ),
        "adapters 1.1 B": Case(
            partial(Decoder, 2048, 22, 32, 4, 5632, 128, WORDS), (128,), WORDS, 1, BATCH, 1, ()
        ),
    }


def measure(
    case: Case, clients: tuple[int, ...], device: torch.device, limit: float
) -> dict[int, dict[str, float | str]]:
    """Items a second and gigabytes by the number of clients, or why there are none."""
    found: dict[int, dict[str, float | str]] = {}
    last, model = 0.0, case.make()
    size = sum(each.numel() for each in model.parameters() if each.requires_grad)
    for count in clients:
        if 4 * count * size > ROOM:
            found[count] = {"why": f"{4e-9 * count * size:,.0f} GB of updates"}
            break
        before = max((each for each in found if "rate" in found[each]), default=count)
        if last * count / before > limit:
            found[count] = {"why": f"about {last * count / before:,.0f} s a round"}
            continue
        free(device)
        try:
            task = task_of(case, count, model)
            engine = Batched(
                task,
                device,
                precision="bfloat16" if device.type == "cuda" else None,
                cohorts=(count,),
            )
            recipe = Recipe(cohort=count, lr=0.001, momentum=0.9, batch_size=case.batch)
            briefs = briefs_of(recipe, torch.arange(count), engine.start())
            last = time_of(partial(engine.train, briefs), device, min(1.0, limit))
        except (torch.OutOfMemoryError, MemoryError) as error:
            found[count] = {"why": str(error).splitlines()[0][:80]}
            break  # more clients need more memory
        finally:
            task = engine = briefs = None  # type: ignore[assignment]
        found[count] = {"rate": count * case.batch * case.items / last, "seconds": last}
        if device.type == "cuda":
            found[count]["memory"] = torch.cuda.max_memory_allocated(device) / 1e9
        print(f"  {count} clients: {found[count]}", flush=True)
    return found


def draw(found: Found, title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 4.5), layout="constrained")
    for name, values in found.items():
        for pane, what in zip(axes, ("rate", "memory"), strict=True):
            points = [(count, value[what]) for count, value in values.items() if what in value]
            if points:
                pane.plot(
                    *zip(*points, strict=True),
                    "--" if "adapters" in name else "-",
                    marker="o",
                    label=name,
                )
    for pane, what in zip(axes, ("images or tokens a second", "GB of memory"), strict=True):
        scale = "log" if pane.lines else "linear"
        pane.set(xscale=scale, yscale=scale, xlabel="clients in a round", ylabel=what)
        pane.xaxis.set_major_formatter("{x:,.0f}")
        pane.yaxis.set_major_formatter("{x:,.7g}")
        pane.grid(True, which="major", alpha=0.3)
    axes[0].legend(fontsize="x-small", title="parameters", title_fontsize="x-small")
    figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--models", nargs="+", help="names, such as 'full 10 M'; by default all")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of one round")
    parser.add_argument("--out", type=Path, default=Path("docs/assets/growth-gpu.png"))
    parser.add_argument(
        "--json", type=Path, help="keep the numbers here; models that it has are not run again"
    )
    parser.add_argument(
        "--small", action="store_true", help="tiny models and few clients, to try the script"
    )
    options = parser.parse_args()
    device = torch.device(options.device)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    found: Found = {}
    if options.json and options.json.exists():
        stored = json.loads(options.json.read_text())
        where = stored["device"]
        found = {
            name: {int(n): value for n, value in values.items()}
            for name, values in stored["models"].items()
        }
    for name, case in cases(options.small).items():
        if name in found or (options.models and name not in options.models):
            continue
        print(name, flush=True)
        found[name] = measure(case, (1, 3) if options.small else CLIENTS, device, options.limit)
        if options.json:  # after each, in case the rest does not finish
            options.json.write_text(json.dumps({"device": where, "models": found}, indent=1) + "\n")
    draw(found, f"Engine batched, {BATCH} samples a client and step, {where}", options.out)
    counts = sorted({count for values in found.values() for count in values})
    print("\n| model | " + " | ".join(f"{count:,} clients" for count in counts) + " |")
    print("|---|" + "---|" * len(counts))
    for name, values in found.items():
        print(f"| {name} | " + " | ".join(spell(values.get(count)) for count in counts) + " |")


def spell(value: dict[str, float | str] | None) -> str:
    if value is None:
        return "–"
    if "rate" not in value:
        return f"left out: {value['why']}"
    return f"{value['rate']:,.0f} a second" + (
        f", {value['memory']:.1f} GB" if "memory" in value else ""
    )


if __name__ == "__main__":
    main()
