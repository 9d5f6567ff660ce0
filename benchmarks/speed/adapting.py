"""What adapting costs a client: each measurement as a part of plain local training. CPU seconds,
taken in turns.

    python benchmarks/speed/adapting.py [--model cnn] [--augment] [--samples 200] [--epochs 5] \
        [--batch 32] [--repeats 7]

CIFAR-shaped synthetic data. Memory is what the process takes beyond what it held before.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from kairosfl import Task, models
from kairosfl.client.trainer import Trainer
from kairosfl.core.fields import FISHER, FISHER_SAMPLED, Brief
from kairosfl.data import load
from kairosfl.tasks.partitions import iid

LIMITS = {"FGN": 0.05, "PA3Fed's score": 0.10, "ALT's second pass": 0.40}


def seconds(work: Callable[[], object]) -> float:
    began = time.process_time()
    work()
    return time.process_time() - began


def gradient_norms(trainer: Trainer, brief: Brief) -> float:
    """Seconds of the squared gradient norms alone in a round's steps, each on gradients fresh from
    a backward pass.
    """
    rows = torch.arange(min(brief.batch_size, len(trainer.task.clients[brief.client])))
    spent = 0.0
    for _ in range(brief.epochs * -(-len(trainer.task.clients[brief.client]) // brief.batch_size)):
        inputs, targets = trainer._samples(rows)
        loss = trainer.task.loss(trainer.model(inputs), targets).mean()
        g = torch.autograd.grad(loss, trainer.parameters)
        spent += seconds(lambda g=g: torch.stack(torch._foreach_norm(g)).square_().sum())
    return spent


def memory(work: Callable[[], object]) -> float:
    """MiB that the work takes at its peak beyond what the process held; NaN where the system does
    not tell.
    """
    status, reset = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not reset.exists():
        return float("nan")

    def kibibytes(field: str) -> int:
        return next(
            int(line.split()[1])
            for line in status.read_text().splitlines()
            if line.startswith(field)
        )

    gc.collect()
    ctypes.CDLL(None).malloc_trim(
        0
    )  # freed memory goes back to the system, or the next work would seem to need none
    reset.write_text("5")
    before = kibibytes("VmRSS")
    work()
    return (kibibytes("VmHWM") - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--augment", action="store_true")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    dataset = load("synthetic", samples=args.samples, classes=10, shape=(3, 32, 32), seed=0)
    model = models.build(args.model, shape=dataset.shape, classes=10, seed=0)
    task = Task(model, dataset, iid(dataset.train.targets.numpy(), 1, 0), augment=args.augment)
    trainer = Trainer(task, torch.device("cpu"))
    told = {"lr": 0.01, "momentum": 0.9, "batch_size": args.batch, "epochs": args.epochs}
    plain = Brief(seed=0, round=0, client=0, start=task.start(), **told)
    mine = torch.arange(args.samples)

    stopping = replace(plain, stop_below=-2.0)  # a cosine never falls below it: nobody stops
    contrasting = replace(plain, contrast=1.0, previous=task.start())
    exact, sampled = (
        replace(plain, measure=frozenset({what})) for what in (FISHER, FISHER_SAMPLED)
    )
    works: dict[str, Callable[[], object]] = {
        "training": lambda: trainer.follow(plain),
        "PA3Fed's score": lambda: trainer.score(trainer.w, mine),
        "training with ALT": lambda: trainer.follow(stopping),
        "training with MOON": lambda: trainer.follow(contrasting),
        "FedFIM, exact": lambda: trainer.fisher(plain.start, mine, exact),
        "FedFIM, sampled": lambda: trainer.fisher(plain.start, mine, sampled),
    }
    spent: dict[str, float] = {}
    trainer.follow(stopping)
    for _ in range(
        args.repeats
    ):  # in turns, so that whatever else the machine does hits all; the fastest counts
        spent["FGN"] = min(spent.get("FGN", float("inf")), gradient_norms(trainer, plain))
        for name, work in works.items():
            if not (name.startswith("FedFIM") and name in spent):
                spent[name] = min(spent.get(name, float("inf")), seconds(work))
    used = {name: memory(work) for name, work in works.items()}
    whole = spent.pop("training")
    for name, pass_ in (("ALT", "ALT's second pass"), ("MOON", "MOON's passes")):
        spent[pass_] = spent.pop(f"training with {name}") - whole
        used[pass_] = used.pop(f"training with {name}")

    print(
        f"{args.model}{', augmented' if args.augment else ''}, {task.layout.size:,} parameters, "
        f"{args.samples} samples, {args.epochs} epochs, batch {args.batch}, {args.threads} thread(s)"
    )
    print(f"{'':20s}{'seconds':>10s}{'of a round':>12s}{'limit':>8s}{'x FGN':>9s}{'MiB':>9s}")
    print(f"{'training, FGN in it':20s}{whole:10.4f}{1:12.1%}{'':17s}{used['training']:9.1f}")
    for name, cost in sorted(spent.items(), key=lambda entry: entry[1]):
        limit = f"{LIMITS[name]:8.0%}" if name in LIMITS else " " * 8
        memory_used = f"{used[name]:9.1f}" if name in used else f"{'8 bytes':>9s}"
        print(
            f"{name:20s}{cost:10.4f}{cost / whole:12.1%}{limit}{cost / spent['FGN']:9.1f}{memory_used}"
        )


if __name__ == "__main__":
    main()
