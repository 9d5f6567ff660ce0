"""Trains clients whose briefs use every real number; run on its own, also says where a field named
`dummy` is found.

`test_fields.py` calls `trained` with the package as it is, and runs this file on a copy with one
more field.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from kairosfl.core.fields import REALS, Briefs, reals, table
from kairosfl.engines.batched import Batched
from kairosfl.engines.batched.state import Real, Whole
from kairosfl.engines.loop import Loop
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

GIVEN = [1.5, 2.5, 3.5]  # what `dummy` of the clients is


def task() -> Task:
    """Three unequal clients and a network with features."""
    rng = np.random.default_rng(0)
    samples = Samples(
        torch.from_numpy(rng.standard_normal((24, 4))).float(),
        torch.from_numpy(rng.integers(0, 3, 24)),
    )
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    start = torch.from_numpy(
        rng.standard_normal(sum(p.numel() for p in model.parameters()))
    ).float()
    nn.utils.vector_to_parameters(start, model.parameters())
    clients = Population.from_lists(np.split(np.arange(24), [5, 14]))
    return Task(model, DataSet("dummy", samples, samples, classes=3), clients)


def column(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def cases(job: Task) -> dict[str, Briefs]:
    """Between them they read every real number of a brief, of each client another one."""
    start = job.start()
    plain = Briefs(
        seed=1,
        round=2,
        ids=torch.arange(3),
        start=start,
        lr=column(0.1, 0.05, 0.2),
        weight_decay=column(0.01, 0.02, 0.03),
        batch_size=4,
        epochs=2,
    )
    corrected = replace(
        plain,
        momentum=column(0.5, 0.6, 0.7),
        clip=column(0.9, 1.1, 1.3),
        scale=column(0.8, 0.9, 1.1),
        pull=column(0.1, 0.2, 0.3),
        push=torch.linspace(-0.1, 0.1, 3)[:, None] * torch.ones_like(start),
    )
    aware = replace(
        plain,
        stop_below=column(0.9, 0.95, 0.99),
        contrast=column(0.5, 1.0, 1.5),
        temperature=0.7,
        previous=start + torch.linspace(-0.2, 0.2, 3)[:, None],
    )
    betas: dict[str, Any] = {"beta1": column(0.8, 0.85, 0.9), "beta2": column(0.95, 0.97, 0.99)}
    adamw = replace(plain, optimizer="adamw", eps=column(1e-3, 1e-4, 1e-5), **betas)
    return {
        "corrected": corrected,
        "aware": aware,
        "adamw": adamw,
        "sam": replace(plain, radius=column(0.1, 0.2, 0.3)),
    }


def trained() -> dict[str, str]:
    """The bits of every update."""
    torch.set_num_threads(1)
    job = task()
    engines = {"loop": Loop(job), "batched": Batched(job, deterministic=True)}
    assert engines["batched"].why == "stacked layer by layer"
    return {
        f"{case} on {name}": hashlib.sha256(
            engine.train(briefs).delta.numpy().tobytes()
        ).hexdigest()
        for name, engine in engines.items()
        for case, briefs in cases(job).items()
    }


def _through_flower(briefs: Briefs) -> list[float] | None:
    try:
        from kairosfl.engines.flower import wire
    except ImportError:
        return None
    return [
        wire.read_brief(wire.brief_record(row, wire.Packing(), {}))[0].dummy
        for row in briefs.each()
    ]


def _through_ray(briefs: Briefs) -> list[float] | None:
    from kairosfl.errors import UserError

    try:
        from kairosfl.engines import ray
    except UserError:
        return None
    found: Any = ray._tensors(ray._arrays(briefs.take(torch.tensor([2, 0]))))
    return found.dummy.tolist()


def _kernels() -> dict[str, int] | None:
    """The rows that the Triton kernels read."""
    try:
        from kairosfl.engines.batched.kernels import update
    except ImportError:
        return None
    names = {"lr": "LR", "momentum": "MOMENTUM_ROW", "weight_decay": "DECAY", "pull": "PULL_ROW"}
    return {field: getattr(update, name).value for field, name in names.items()}


def main() -> None:
    job = task()
    plain = cases(job)["corrected"]
    given: Any = {"dummy": column(*GIVEN)}
    briefs = replace(plain, **given)
    engine = Batched(job, deterministic=True)
    engine.train(briefs)
    assert engine._slots is not None
    state = engine._slots.state
    slots = zip(
        state.wholes[Whole.CLIENT], state.reals[Real.dummy], state.reals[Real.momentum], strict=True
    )
    found = {
        "default": [row.dummy for row in plain.each()],
        "rows": [row.dummy for row in briefs.each()],
        "order": REALS,
        "reals": reals(briefs)[:, Real.dummy].tolist(),
        "slots": sorted(
            [int(client), float(dummy), float(momentum)]
            for client, dummy, momentum in list(slots)[:3]
        ),
        "kernels": _kernels(),
        "flower": _through_flower(briefs),
        "ray": _through_ray(briefs),
        "table": table(Briefs).splitlines(),
        "trained": trained(),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
