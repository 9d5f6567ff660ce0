"""Federated learning in numpy, written from the papers' formulas: what the rules are held against.

Nothing here knows of briefs, rules or masses. From the library it takes the random streams alone,
since who is drawn and which batches are trained on must be the same on both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from reference_clients import (
    COHORTS,
    Cohort,
    Local,
    Network,
    Problem,
    Quadratic,
    Setting,
    Vector,
    ascended,
    cosine,
    shares,
    train,
    unit_move,
)

from kairosfl.core.streams import stream

__all__ = [
    "COHORTS",
    "Cohort",
    "Local",
    "Network",
    "Problem",
    "Quadratic",
    "Setting",
    "ascended",
    "shares",
    "train",
    "unit_move",
]

Course = list[Vector]


def fedavg(
    problem: Problem, setting: Setting, cohorts: Sequence[Cohort], weights: str = "samples"
) -> Course:
    return fedprox(problem, setting, cohorts, mu=0.0, weights=weights)


def fedprox(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    mu: float,
    weights: str = "samples",
) -> Course:
    """Li et al. 2020: h_i(w) = f_i(w) + (mu / 2) ‖w − x‖²."""
    x, course = problem.x, []
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            ends = [
                train(problem, setting, t, i, x, lambda g, w, x=x: g + mu * (w - x)).w for i in ids
            ]
            x = shares(problem, ids, weights) @ np.array(ends)
        course.append(x)
    return course


def scaffold(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    weights: str = "uniform",
    lr: float = 1.0,
    divisor: str = "mass",
    correct: str = "gradients",
) -> Course:
    """Karimireddy et al. 2020, option II, with the distance of a unit gradient for K · lr, or with
    K · lr.

    Uniform: c ← c + (1/N) Σ_S (c_i⁺ − c_i). By samples: c = Σ n_i c_i / Σ n_i, the unseen being
    zeros of average size. Models: c uniformly, x by samples.
    """
    x, course, clients = problem.x, [], len(problem.n)
    c, own = np.zeros_like(x), {}
    for t, cohort in enumerate(cohorts):
        ids = cohort.reported
        before = {i: own.get(i, np.zeros_like(x)) for i in ids}
        if correct == "steps":
            locals_ = [train(problem, setting, t, i, x, after=c - before[i]) for i in ids]
        else:
            locals_ = [
                train(problem, setting, t, i, x, lambda g, w, own=before[i], c=c: g - own + c)
                for i in ids
            ]
        for i, local in zip(ids, locals_, strict=True):
            printed = local.steps * setting.lr_at(t)
            own[i] = (
                before[i]
                - c
                + (x - local.w)
                / (printed if divisor == "steps" else unit_move(setting, t, local.steps))
            )
        if ids:
            if weights != "samples":
                c = c + sum(own[i] - before[i] for i in ids) / clients
            else:
                seen = sorted(own)
                c = (
                    len(seen)
                    / clients
                    * (shares(problem, seen, "samples") @ np.array([own[i] for i in seen]))
                )
            p = shares(problem, ids, "uniform" if weights == "uniform" else "samples")
            x = x + lr * (p @ np.array([local.w - x for local in locals_]))
        course.append(x)
    return course


def vrlsgd(
    problem: Problem, setting: Setting, cohorts: Sequence[Cohort], rate: float = 1.0
) -> Course:
    """Liang et al. 2019, centred: Δ_i ← Δ_i + G_i − Σ p_j G_j, G_i the mean of the gradients that
    client i followed.
    """
    x, course = problem.x, []
    own: dict[int, Vector] = {}
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            p = shares(problem, ids, "samples")
            before = {i: own.get(i, np.zeros_like(x)) for i in ids}
            locals_ = [
                train(problem, setting, t, i, x, lambda g, w, own=before[i]: g - own) for i in ids
            ]
            G = np.array([(x - local.w) / unit_move(setting, t, local.steps) for local in locals_])
            for i, g in zip(ids, G - p @ G, strict=True):
                own[i] = before[i] + rate * g
            x = p @ np.array([local.w for local in locals_])
        course.append(x)
    return course


def fednova(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    mu: float = 0.0,
    server_momentum: float = 0.0,
    a: Callable[[int, int], float] | None = None,
) -> Course:
    """Wang et al. 2020: x ← x − τ_eff Σ p_i η d_i; `a(t, steps)` is the paper's ‖a_i‖₁ where it has
    a closed form.
    """
    x, course, slow = problem.x, [], np.zeros_like(problem.x)
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            eta, p = setting.lr_at(t), shares(problem, ids, "samples")
            locals_ = [
                train(problem, setting, t, i, x, lambda g, w, x=x: g + mu * (w - x)) for i in ids
            ]
            length = a or (lambda t, steps: unit_move(setting, t, steps, mu) / setting.lr_at(t))
            norms = np.array([length(t, local.steps) for local in locals_])
            d = np.array(
                [(x - local.w) / (eta * norm) for local, norm in zip(locals_, norms, strict=True)]
            )
            effective = p @ (np.array([local.steps for local in locals_]) if mu else norms)
            slow = server_momentum * slow + effective * (p @ d)
            x = x - eta * slow
        course.append(x)
    return course


def server_side(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    step: Callable[[Vector], Vector],
    weights: str = "samples",
) -> Course:
    """FedAvg's clients and a server that turns Σ p_i (w_i − x) into a step."""
    x, course = problem.x, []
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            moves = np.array([train(problem, setting, t, i, x).w - x for i in ids])
            x = x + step(shares(problem, ids, weights) @ moves)
        course.append(x)
    return course


def feddyn(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    alpha: float,
    weights: str = "uniform",
) -> Course:
    """Acar et al. 2021, Algorithm 1: h ← h − (alpha / N) Σ_S (w_i − x), x ← mean − h / alpha; L is
    ∇L_i.
    """
    x, course, clients = problem.x, [], len(problem.n)
    h, L = np.zeros_like(x), {}
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            before = {i: L.get(i, np.zeros_like(x)) for i in ids}
            ends = np.array(
                [
                    train(
                        problem,
                        setting,
                        t,
                        i,
                        x,
                        lambda g, w, i=i, x=x, L=before: g - L[i] + alpha * (w - x),
                    ).w
                    for i in ids
                ]
            )
            L.update({i: before[i] - alpha * (w - x) for i, w in zip(ids, ends, strict=True)})
            if weights == "uniform":
                h = h - alpha / clients * (ends - x).sum(0)
            else:
                seen = sorted(L)
                h = (
                    len(seen)
                    / clients
                    * (shares(problem, seen, "samples") @ np.array([L[i] for i in seen]))
                )
            x = shares(problem, ids, weights) @ ends - h / alpha
        course.append(x)
    return course


def fedcm(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    alpha: float,
    lr: float = 1.0,
    weights: str = "uniform",
    decay: bool = False,
) -> Course:
    """Xu et al. 2021: v = alpha ∇f + (1 − alpha) Δ; Δ is the mean of the v's that the clients
    followed.
    """
    x, course, delta = problem.x, [], np.zeros_like(problem.x)
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            locals_ = [
                train(problem, setting, t, i, x, lambda g, w, D=delta: alpha * g + (1 - alpha) * D)
                for i in ids
            ]
            p = shares(problem, ids, weights)
            means = [(x - local.w) / unit_move(setting, t, local.steps) for local in locals_]
            delta = p @ np.array(means)
            if not decay:  # it is the clients' own business
                delta = delta - setting.decay * x
            x = x + lr * (p @ np.array([local.w - x for local in locals_]))
        course.append(x)
    return course


def fedsam(problem: Problem, setting: Setting, cohorts: Sequence[Cohort], rho: float) -> Course:
    """Qu et al. 2022, Algorithm 1: every local step follows the batch's gradient at the sharpest
    point nearby.
    """
    x, course = problem.x, []
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            ends = [
                train(problem, setting, t, i, x, gradient=ascended(problem, i, rho)).w for i in ids
            ]
            x = shares(problem, ids, "samples") @ np.array(ends)
        course.append(x)
    return course


def mofedsam(
    problem: Problem, setting: Setting, cohorts: Sequence[Cohort], rho: float, beta: float
) -> Course:
    """Qu et al. 2022, Algorithm 2: v = beta g̃ + (1 − beta) Δ, g̃ as in FedSAM, Δ the mean of the
    last round's v's.
    """
    x, course, delta = problem.x, [], np.zeros_like(problem.x)
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            locals_ = [
                train(
                    problem,
                    setting,
                    t,
                    i,
                    x,
                    lambda g, w, D=delta: beta * g + (1 - beta) * D,
                    ascended(problem, i, rho),
                )
                for i in ids
            ]
            means = [(x - local.w) / unit_move(setting, t, local.steps) for local in locals_]
            delta = np.mean(means, 0) - setting.decay * x
            x = np.mean([local.w for local in locals_], 0)
        course.append(x)
    return course


def mutants(
    problem: Quadratic,
    setting: Setting,
    t: int,
    m: int,
    x: Vector,
    last: Vector,
    alpha: float,
    rate: float,
    bound: int,
) -> Vector:
    """Where m clients start in round t, `[m, d]`."""
    starts = np.tile(x, (m, 1))
    if t == 0:
        return starts
    rho = rate * (1 - min((t - 1) / bound, 1))
    signs = [1.0] * (m // 2) + [-(1 - rho)] * (m // 2) + [0.0] * (m % 2)
    rng, at = stream(setting.seed, "fedmut", t), 0
    for size in problem.tensors:
        for j, sign in enumerate(rng.permutation(signs)):
            starts[j, at : at + size] += alpha * sign * (x - last)[at : at + size]
        at += size
    return starts


def undone(problem: Quadratic, away: Vector, own: Vector) -> Vector:
    """The slope of −own against away over the cohort and a tensor, between 0 and 1, for every
    number of the model.
    """
    slopes, at = [], 0
    for size in problem.tensors:
        a, b = away[:, at : at + size], own[:, at : at + size]
        if np.ptp(a, axis=0).max() > 1e-9 * np.abs(a).max():
            a = a - a.mean(0)
        slopes += [float(np.clip(-(a * b).sum() / (a**2).sum(), 0, 1)) if a.any() else 0.0] * size
        at += size
    return np.array(slopes)


def fedmut(
    problem: Quadratic,
    setting: Setting,
    cohorts: Sequence[Cohort],
    alpha: float,
    rate: float,
    bound: int,
    weights: str = "uniform",
) -> Course:
    """Hu et al. 2024: mutants x + alpha · s · (x^t − x^{t−1}) with shuffled signs for every tensor.

    Where they were put counts alike, as if it had been dealt to the reporters, as far as training
    did not undo it.
    """
    x, course = problem.x, []
    last = x
    for t, cohort in enumerate(cohorts):
        starts = mutants(problem, setting, t, len(cohort.asked), x, last, alpha, rate, bound)
        if ids := cohort.reported:
            own = [starts[cohort.asked.index(i)] for i in ids]
            ends = np.array(
                [train(problem, setting, t, i, start).w for i, start in zip(ids, own, strict=True)]
            )
            put = mutants(problem, setting, t, len(ids), x, last, alpha, rate, bound).mean(0)
            p, kept = (
                shares(problem, ids, weights),
                1 - undone(problem, np.array(own) - x, ends - own),
            )
            last, x = x, p @ ends + kept * (put - p @ own)
        course.append(x)
    return course


def moon(
    problem: Network, setting: Setting, cohorts: Sequence[Cohort], mu: float, temperature: float
) -> Course:
    """Li et al. 2021: −log of the softmax of cos(z, z_global) against cos(z, z_previous), added mu
    times.
    """
    x, course = problem.x, []
    previous: dict[int, Vector] = {}
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            ends = []
            for i in ids:

                def slope(rows: Vector, w: Vector, i: int = i, x: Vector = x) -> Vector:
                    if i not in previous:
                        return problem.gradient(i, rows, w)
                    z = problem.features(i, rows, w)
                    near, near_slope = cosine(z, problem.features(i, rows, x))
                    far, far_slope = cosine(z, problem.features(i, rows, previous[i]))
                    wrong = 1 / (
                        1 + np.exp((near - far) / temperature)
                    )  # softmax of the second logit
                    back = (wrong / temperature)[:, None] * (far_slope - near_slope)
                    return problem.gradient(i, rows, w, mu * back / len(rows))

                ends.append(train(problem, setting, t, i, x, gradient=slope).w)
            previous.update(zip(ids, ends, strict=True))
            x = shares(problem, ids, "samples") @ np.array(ends)
        course.append(x)
    return course


@dataclass
class Stopped:
    """A course with what ALT's clients did."""

    course: Course = field(default_factory=list)
    epochs: list[list[float]] = field(default_factory=list)
    similarity: list[list[float]] = field(default_factory=list)


def alt(
    problem: Network,
    setting: Setting,
    cohorts: Sequence[Cohort],
    threshold: Callable[[int], float],
    statistic: str = "mean",
    reference: str = "global",
) -> Stopped:
    """Shenaj et al. 2025: stop after the epoch in which the features' cosine fell below T(r), r
    from 1.
    """
    x, out = problem.x, Stopped()
    previous: dict[int, Vector] = {}
    reduce = {"mean": np.mean, "min": np.min}[statistic]
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            locals_ = []
            for i in ids:
                fixed = previous.get(i, x) if reference == "previous" else x

                def similarity(rows: Vector, w: Vector, i: int = i, fixed: Vector = fixed) -> float:
                    cosines, _ = cosine(
                        problem.features(i, rows, w), problem.features(i, rows, fixed)
                    )
                    return float(reduce(cosines))

                locals_.append(
                    train(problem, setting, t, i, x, statistic=similarity, below=threshold(t + 1))
                )
            previous.update({i: local.w for i, local in zip(ids, locals_, strict=True)})
            x = shares(problem, ids, "samples") @ np.array([local.w for local in locals_])
            out.epochs.append([local.epochs for local in locals_])
            out.similarity.append([local.similarity for local in locals_])
        out.course.append(x)
    return out


def fgn(
    problem: Problem, setting: Setting, t: int, ids: Sequence[int], locals_: Sequence[Local]
) -> float:
    """FedCL's Eq. 1: the federated gradient norm, weighted by samples."""
    norms = [setting.lr_at(t) * local.grad_sq / local.epochs for local in locals_]
    return float(shares(problem, ids, "samples") @ np.array(norms))


def pa3fed(
    problem: Problem,
    setting: Setting,
    cohorts: Sequence[Cohort],
    beta: float,
    sign: float = 1.0,
    at: str = "after",
    always: bool = False,
    delta: float = 0.01,
    score: Callable[[int, Vector], float] | None = None,
) -> tuple[Course, list[Vector], list[bool]]:
    """AAAI 2025: alpha_i = exp(sign · beta · (s_old − s_new)), s the local loss, or another score;
    weights, periods.
    """
    score = score or problem.loss
    x, course, weights, periods = problem.x, [], [], []
    scores: dict[int, float] = {}
    norm = None
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            locals_ = [train(problem, setting, t, i, x) for i in ids]
            now = fgn(problem, setting, t, ids, locals_)
            critical = norm is None or (now - norm) / norm >= delta
            norm = now
            new = {
                i: score(i, local.w if at == "after" else x)
                for i, local in zip(ids, locals_, strict=True)
            }
            counts = problem.n[ids].astype(float)
            if critical or always:
                counts *= [
                    np.exp(sign * beta * (scores[i] - new[i])) if i in scores else 1.0 for i in ids
                ]
            scores.update(new)
            x = counts / counts.sum() @ np.array([local.w for local in locals_])
            weights.append(counts / counts.sum())
            periods.append(critical)
        course.append(x)
    return course, weights, periods
