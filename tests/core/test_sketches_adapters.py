"""Low-rank adapters sketched against the contract: alternating LoRA, FedEx-LoRA, FLoRA with unequal
ranks. The weights are W + 2 b a, and W is frozen.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from sketches import SHARES
from test_versions import adapted
from test_visits import ENGINES, SIZES, data, engines
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Round, Rule
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream

Factors = tuple[np.ndarray, np.ndarray]


def course(rule: Rule, engine: str) -> list[Run]:
    job = adapted()
    how = Recipe(rounds=3, cohort=3, batch_size=8, lr=0.02)
    setup = Setup(Algorithm((rule,)), how, 3, job.layout)
    return list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), ENGINES[engine](job)))


def slopes(a: np.ndarray, b: np.ndarray, frozen: np.ndarray, client: int) -> Factors:
    """The gradients of a client's mean loss at the factors."""
    x, y = data()
    rows = np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1])[client]
    error = 2 * ((x[rows] @ (frozen + 2 * b @ a).T).sum(1) - y[rows]) / len(rows)
    of_weights = np.ones((4, 1)) * (error @ x[rows])
    return 2 * b.T @ of_weights, 2 * of_weights @ a.T


def begun() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    model = adapted().model
    return tuple(tensor.detach().numpy().copy() for tensor in (model.a, model.b, model.w))  # type: ignore[return-value]


def split(x: Tensor) -> Factors:
    return x.numpy()[:6].reshape(3, 2), x.numpy()[6:].reshape(4, 3)


@dataclass(frozen=True, kw_only=True)
class Alternate(Rule):
    """b moves in even rounds, a in odd ones: the mean of the products is the product of the means."""

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        names = [pair.b.name if now.number % 2 else pair.a.name for pair in now.layout.pairs]
        return replace(briefs, still=frozenset(map(now.layout.names.index, names)))


@engines
def test_alternating_lora(engine: str) -> None:
    a, b, w = begun()
    for number, run in enumerate(course(Alternate(), engine)):
        moved = [slopes(a, b, w, client) for client in range(3)]
        if number % 2:
            a = a - 0.02 * sum(p * of_a for p, (of_a, _) in zip(SHARES, moved, strict=True))
        else:
            b = b - 0.02 * sum(p * of_b for p, (_, of_b) in zip(SHARES, moved, strict=True))
        np.testing.assert_allclose(split(run.x)[0], a, atol=1e-13)
        np.testing.assert_allclose(split(run.x)[1], b, atol=1e-13)


@dataclass(frozen=True, kw_only=True)
class FedEx(Rule):
    """What the mean of the products is beyond the product of the means goes into W."""

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        base = base.clone()
        for pair in now.layout.pairs:
            products = pair.product(now.trained())
            mean = torch.tensordot(now.weights.to(products), products, 1)
            pair.base.view(base).add_(mean - pair.product(now.moved))
        return base


@engines
def test_fedex(engine: str) -> None:
    a, b, w = begun()
    for run in course(FedEx(), engine):
        ends = []
        for client in range(3):
            of_a, of_b = slopes(a, b, w, client)
            ends.append((a - 0.02 * of_a, b - 0.02 * of_b))
        exact = w + sum(2 * p * c_b @ c_a for p, (c_a, c_b) in zip(SHARES, ends, strict=True))
        a = sum(p * c_a for p, (c_a, _) in zip(SHARES, ends, strict=True))
        b = sum(p * c_b for p, (_, c_b) in zip(SHARES, ends, strict=True))
        w = exact - 2 * b @ a
        np.testing.assert_allclose(split(run.x)[0], a, atol=1e-6)  # the base moves in float32
        np.testing.assert_allclose(split(run.x)[1], b, atol=1e-6)
        np.testing.assert_allclose(run.base.reshape(4, 2), w - begun()[2], atol=1e-6)


@dataclass(frozen=True, kw_only=True)
class FLoRA(Rule):
    """Clients of unequal ranks; the mean of their products is merged into W, and every round begins
    with a new a, and b = 0.
    """

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, rank=1 + briefs.ids % 3)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        fresh = now.x.clone()
        draws = now.stream("flora")
        for pair in now.layout.pairs:
            pair.a.view(fresh).copy_(torch.from_numpy(draws.standard_normal(pair.a.shape)))
            pair.b.view(fresh).zero_()
        return fresh - now.x, memory

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        base = base.clone()
        for pair in now.layout.pairs:
            products = pair.product(now.trained())
            pair.base.view(base).add_(torch.tensordot(now.weights.to(products), products, 1))
        return base


@engines
def test_flora(engine: str) -> None:
    a, b, w = begun()
    for number, run in enumerate(course(FLoRA(), engine)):
        merged = w.copy()
        for client, rank in enumerate((1, 2, 3)):
            part_a, part_b = a[:rank], b[:, :rank]
            of_a, of_b = slopes(part_a, part_b, w, client)
            merged += 2 * SHARES[client] * (part_b - 0.02 * of_b) @ (part_a - 0.02 * of_a)
        w = merged
        a, b = stream(0, "flora", number).standard_normal((3, 2)), np.zeros((4, 3))
        np.testing.assert_allclose(split(run.x)[0], a, atol=1e-12)
        np.testing.assert_allclose(split(run.x)[1], b, atol=1e-12)
        np.testing.assert_allclose(run.base.reshape(4, 2), w - begun()[2], atol=1e-5)
