"""Problems and clients in numpy: what the rules' clients are held against.

Nothing here knows of briefs, rules or masses. From the library it takes the random streams alone,
since who is drawn and which batches are trained on must be the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kairosfl.core.streams import stream

Vector = np.ndarray
Correct = Callable[[Vector, Vector], Vector]


@dataclass(frozen=True)
class Setting:
    """How the clients train; the learning rate falls by `gamma` every round."""

    lr: float = 0.05
    gamma: float = 0.9
    momentum: float = 0.6
    decay: float = 0.02
    batch: int = 3
    epochs: int = 2
    seed: int = 7
    clip: float = np.inf  # largest norm of the gradient that a step uses

    def lr_at(self, t: int) -> float:
        return self.lr * self.gamma**t

    def batches(self, t: int, i: int, n: int) -> Iterator[list[Vector]]:
        rng = stream(self.seed, "batches", t, i)
        for _ in range(self.epochs):
            order = rng.permutation(n)
            yield [order[k : k + self.batch] for k in range(0, n, self.batch)]


@dataclass(frozen=True)
class Cohort:
    """One round: who was asked and who answered."""

    asked: tuple[int, ...]
    lost: tuple[int, ...] = ()

    @property
    def reported(self) -> list[int]:
        return [i for i in self.asked if i not in self.lost]


# Client 1 fails in round 1, client 4 is seen for the first time in round 3, everyone fails in round
# 4.
COHORTS = (
    Cohort((0, 1, 2)),
    Cohort((0, 1, 3), lost=(1,)),
    Cohort((0, 1, 2, 3)),
    Cohort((1, 2, 4)),
    Cohort((0, 3), lost=(0, 3)),
    Cohort((0, 1, 2, 3, 4), lost=(2,)),
)


class Quadratic:
    """f_i(w) = mean over the client's samples s of ½ (w − b_s)ᵀ A_i (w − b_s)."""

    tensors = (3, 1)

    def __init__(self, sizes: Sequence[int] = (4, 7, 10, 2, 8), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        d = sum(self.tensors)
        self.n = np.array(sizes)
        roots = rng.normal(size=(len(sizes), d, d))
        self.A = roots @ roots.transpose(0, 2, 1) / d + 0.3 * np.eye(d)
        self.b = [2 * rng.normal(size=d) + rng.normal(size=(n, d)) for n in sizes]
        self.x = rng.normal(size=d)

    def gradient(self, i: int, rows: Vector, w: Vector) -> Vector:
        return self.A[i] @ (w - self.b[i][rows].mean(0))

    def loss(self, i: int, w: Vector) -> float:
        away = w - self.b[i]
        return float(np.einsum("sj,jk,sk->s", away, self.A[i], away).mean() / 2)

    def optimum(self, p: Vector, decay: float) -> Vector:
        """Of Σ p_i f_i(w) + (decay / 2) ‖w‖²."""
        left = np.einsum("i,ijk->jk", p, self.A) + decay * np.eye(len(self.x))
        return np.linalg.solve(
            left, sum(p[i] * self.A[i] @ self.b[i].mean(0) for i in range(len(p)))
        )


class Network:
    """Cross entropy of softmax(W2 tanh(W1 x + b1) + b2); the features are the hidden units."""

    def __init__(self, sizes: Sequence[int] = (4, 7, 10, 2, 8), seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.shapes = ((4, 5), (4,), (3, 4), (3,))
        self.n = np.array(sizes)
        self.inputs = [rng.normal(size=(n, 5)) + rng.normal(size=5) for n in sizes]
        self.targets = [rng.integers(0, 3, n) for n in sizes]
        self.x = rng.normal(size=sum(int(np.prod(shape)) for shape in self.shapes)) * 0.7

    def parts(self, w: Vector) -> list[Vector]:
        cuts = np.cumsum([int(np.prod(shape)) for shape in self.shapes])[:-1]
        return [
            part.reshape(shape) for part, shape in zip(np.split(w, cuts), self.shapes, strict=True)
        ]

    def features(self, i: int, rows: Vector, w: Vector) -> Vector:
        W1, b1, _, _ = self.parts(w)
        return np.tanh(self.inputs[i][rows] @ W1.T + b1)

    def probabilities(self, i: int, rows: Vector, w: Vector) -> Vector:
        _, _, W2, b2 = self.parts(w)
        logits = self.features(i, rows, w) @ W2.T + b2
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    def loss(self, i: int, w: Vector) -> float:
        rows = np.arange(self.n[i])
        return float(-np.log(self.probabilities(i, rows, w)[rows, self.targets[i]]).mean())

    def accuracy(self, i: int, w: Vector) -> float:
        rows = np.arange(self.n[i])
        return float((self.probabilities(i, rows, w).argmax(1) == self.targets[i]).mean())

    def gradient(
        self, i: int, rows: Vector, w: Vector, at_features: Vector | None = None
    ) -> Vector:
        """With `at_features`, a further gradient that arrives at the features, `[rows, 4]`."""
        _, _, W2, _ = self.parts(w)
        z, errors = self.features(i, rows, w), self.probabilities(i, rows, w)
        errors[np.arange(len(rows)), self.targets[i][rows]] -= 1
        errors /= len(rows)
        back = errors @ W2 + (0 if at_features is None else at_features)
        back = back * (1 - z**2)
        pieces = (back.T @ self.inputs[i][rows], back.sum(0), errors.T @ z, errors.sum(0))
        return np.concatenate([piece.ravel() for piece in pieces])


Problem = Quadratic | Network


@dataclass
class Local:
    """One client's training."""

    w: Vector
    steps: int = 0
    epochs: float = 0.0
    grad_sq: float = 0.0
    similarity: float = 1.0


def train(
    problem: Problem,
    setting: Setting,
    t: int,
    i: int,
    start: Vector,
    correct: Correct = lambda g, w: g,
    gradient: Callable[[Vector, Vector], Vector] | None = None,
    statistic: Callable[[Vector, Vector], float] | None = None,
    below: float = -np.inf,
    after: Vector | float = 0.0,
) -> Local:
    """SGD with momentum on `correct(∇f, w)`, with `after` added to each step.

    It ends after the epoch in which `statistic` fell below the bound.
    """
    slope = gradient or (lambda rows, w: problem.gradient(i, rows, w))
    local, velocity = Local(start.copy()), np.zeros_like(start)
    for epoch in setting.batches(t, i, problem.n[i]):
        stop = False
        for rows in epoch:
            if statistic:
                local.similarity = statistic(rows, local.w)
                stop = stop or local.similarity < below
            g = slope(rows, local.w)
            g = g * min(1.0, setting.clip / (np.linalg.norm(g) + 1e-6))
            local.grad_sq += g @ g
            velocity = setting.momentum * velocity + correct(g, local.w) + setting.decay * local.w
            local.w = local.w - setting.lr_at(t) * (velocity + after)
            local.steps += 1
        local.epochs += 1
        if stop:
            break
    return local


def ascended(problem: Problem, i: int, rho: float) -> Callable[[Vector, Vector], Vector]:
    """SAM: the gradient of a batch at w + rho · ∇f(w) / ‖∇f(w)‖, where w was."""

    def slope(rows: Vector, w: Vector) -> Vector:
        uphill = problem.gradient(i, rows, w)
        return problem.gradient(i, rows, w + rho * uphill / np.linalg.norm(uphill))

    return slope


def unit_move(setting: Setting, t: int, steps: int, pull: float = 0.0) -> float:
    """How far SGD goes along a gradient that is 1 all the time, step by step."""
    u = v = 0.0
    for _ in range(steps):
        v = setting.momentum * v + 1 + (pull + setting.decay) * u
        u -= setting.lr_at(t) * v
    return -u


def shares(problem: Problem, ids: Sequence[int], weights: str) -> Vector:
    """p_i over these clients."""
    counts = problem.n[list(ids)].astype(float) if weights == "samples" else np.ones(len(ids))
    return counts / counts.sum()


def cosine(z: Vector, u: Vector) -> tuple[Vector, Vector]:
    """Cosine of every row, and its gradient with respect to z."""
    lengths = np.linalg.norm(z, axis=1, keepdims=True), np.linalg.norm(u, axis=1, keepdims=True)
    value = (z * u).sum(1, keepdims=True) / (lengths[0] * lengths[1])
    return value[:, 0], u / (lengths[0] * lengths[1]) - value * z / lengths[0] ** 2
