"""Client-level differential privacy: McMahan et al., "Learning Differentially Private Recurrent
Models", ICLR 2018.

    cohort      every client takes part with probability q = m / N, independently
    client      Δ_i ← Δ_i · min(1, C / ‖Δ_i‖)
    server      Δ = (Σ Δ_i + z C · N(0, 1)) / m,    x ← x + Δ, or as another rule steps along Δ
    account     the cost of (q, z) is added in every round, also in one without reports

m is the size that the rules planned; `accounting.py` has the account. Adaptive clipping: Andrew et
al., "Differentially Private Learning with Adaptive Clipping", NeurIPS 2021, Algorithm 1:

    b = (Σ (1[‖Δ_i‖ ≤ C] − 1/2) + σ_b N(0, 1)) / m + 1/2,    C ← C · exp(−clip_lr · (b − quantile))

The updates' noise grows to (z⁻² − (2σ_b)⁻²)^(−1/2), so that both together cost what z does; σ_b =
max(m / 20, z).
"""

from __future__ import annotations

import hashlib
import math
import os
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Reports
from kairosfl.core.rule import Finished, Memory, Plan, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.streams import normal, secret_seed, stream
from kairosfl.core.traits import Traits
from kairosfl.detectors import squared_norms
from kairosfl.errors import UserError
from kairosfl.rules import accounting

UNCLIPPED = 1 - 1e-6  # of the clip norm: a longer update was clipped, up to rounding
SHORTEST_SECRET = 16
GUESSED = (
    "privacy needs a key in a deployment: its noise follows from the seed, which briefs tell the "
    "clients; set privacy(key='KAIROSFL_NOISE') and, for the server, export "
    "KAIROSFL_NOISE=$(openssl rand -hex 32)"
)


@dataclass(frozen=True, kw_only=True)
class Privacy(Rule):
    """Clips every update, adds noise, keeps the account, and ends the run within the budget.

    Args:
        epsilon: Budget of the whole run, with `delta`.
        delta: With what probability the promise may fail; well below 1 / population.
        clip: The largest norm C of an update; with `quantile` the first one.
        noise: The noise multiplier z; 0: the smallest with which the budget lasts for all rounds.
        quantile: Fraction of updates that adaptive clipping leaves as they are, such as 0.5; 0: C
            is fixed.
        clip_lr: How fast C follows the quantile.
        population: Clients of a larger federation that is simulated; 0: the real number.
        noise_cohort: Its cohort where `train.cohort` clients train; 0: the real number.
        key: Environment variable with the secret from which noise and cohorts are drawn; empty:
            they follow from the seed.
    """

    epsilon: float = 2.0
    delta: float = 1e-6
    clip: float = 1.0
    noise: float = 0.0
    quantile: float = 0.0
    clip_lr: float = 0.2
    population: int = 0
    noise_cohort: int = 0
    key: str = ""

    def __post_init__(self) -> None:
        self.check("epsilon", self.epsilon > 0, "use a number above 0")
        self.check(
            "delta", 0 < self.delta < 1, "use a probability well below 1 / population, such as 1e-6"
        )
        self.check(
            "clip", self.clip > 0, "use a number above 0, about the norm of a typical update"
        )
        self.check("noise", self.noise >= 0, "use a multiplier above 0, or 0 to calibrate it")
        self.check(
            "quantile",
            0 <= self.quantile < 1,
            "use a fraction below 1, such as 0.5, or 0 for a fixed clip",
        )
        self.check("clip_lr", self.clip_lr > 0, "use a number above 0; the paper uses 0.2")
        self.check(
            "population",
            self.population >= 0,
            "use the clients of the larger federation, or 0 for the real ones",
        )
        self.check(
            "noise_cohort",
            self.noise_cohort >= 0,
            "use the larger federation's cohort, or 0 for the real one",
        )

    def traits(self) -> Traits:
        return Traits(
            when="last",  # the rate of a round is that of the size that the other rules planned
            adapts=True,
            constraint=True,
            private=True,
            reads="direction",
            promises={"epsilon", "delta", "population", "noise_cohort", "key"},
            uniform=True,
            horizon=not self.noise,  # it is calibrated for them
            undeployable="" if self.key else GUESSED,
            sums=True,
        )

    @property
    def hypothetical(self) -> bool:
        """Whether ε is that of a federation that is not the simulated one."""
        return bool(self.population or self.noise_cohort)

    def largest_cohort(self, cohort: int, population: int) -> int:
        most = math.ceil(cohort + 10 * math.sqrt(cohort) + 20)  # more: a probability below e^−40
        return min(population, most)

    def verdict(self, memory: Memory, now: Round) -> str | None:
        clients = self._clients(now)
        if self.delta * clients > 1 + 1e-9:
            return (
                f"privacy(delta={self.delta:g}) promises little: with {clients} clients, "
                "publishing one of them as it is would be allowed; use a delta well below "
                "1 / clients"
            )
        if not self.hypothetical:
            return None
        cohort = self.noise_cohort or now.cohort
        return (
            f"the epsilon of privacy is hypothetical: that of cohorts of {cohort} out of {clients} "
            f"clients, of which {now.cohort} out of {now.population} were simulated"
        )

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        name = "hypothetical_epsilon" if self.hypothetical else "epsilon"
        values = {name: accounting.running(memory.state["spent"].numpy(), self.delta)}
        if self.quantile:
            values["update_clip"] = float(memory.state["clip"])
        return values

    def server(self, now: Round) -> State:
        accounting.library()
        self.check(
            "population",
            not self.population or self.population >= now.population,
            f"{now.population} clients are simulated",
        )
        self.check(
            "noise_cohort",
            self.noise_cohort <= self._clients(now),
            "give a population that is larger",
        )
        rate = self._rate(now.cohort, now)
        self._draw("", now)  # refuses a key without a secret
        z = self.noise or accounting.calibrated(rate, now.rounds, self.epsilon, self.delta)
        expected = self.expected(now.cohort, now)
        self._split(z, expected, now)  # refuses noise that leaves nothing for the updates
        return {
            "noise": torch.tensor(z, dtype=torch.float64),
            "clip": torch.tensor(self.clip, dtype=torch.float64),
            "spent": torch.zeros(len(accounting.ORDERS), dtype=torch.float64),
            "budget": torch.from_numpy(accounting.budgets(rate, z, self.epsilon, self.delta)),
        }

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if plan.ids is not None or plan.eligible is not None:
            raise UserError(
                "privacy draws every client with the same probability, and another rule chose "
                "clients."
            )
        size = min(plan.size, now.population)
        after = memory.state["spent"] + self._cost(size, memory, now)
        if not (after <= memory.state["budget"]).any():
            raise Finished(
                f"the privacy budget, epsilon = {self.epsilon:g} at delta = {self.delta:g}, does "
                "not pay for one more round"
            )
        drawn = self._draw("cohort", now).random(now.population) < size / now.population
        return Plan(size=size, ids=np.flatnonzero(drawn))

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        clip = float(memory.state["clip"])
        factors = (clip / _lengths(reports)).clamp(max=1.0)  # a length of 0 gives 1
        return replace(reports, delta=reports.delta * factors.to(reports.delta)[:, None])

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        expected = self.expected(now.size, now)
        multiplier, _ = self._split(float(memory.state["noise"]), expected, now)
        scale = multiplier * float(memory.state["clip"]) / expected
        return now.reports.delta.sum(0) / now.size + scale * self.normal("update", now, direction)

    def observe(self, memory: Memory, now: Round) -> Memory:
        state = dict(memory.state)
        state["spent"] = state["spent"] + self._cost(now.size, memory, now)
        if self.quantile:
            expected = self.expected(now.size, now)
            _, deviation = self._split(float(state["noise"]), expected, now)
            noise = deviation * self._draw("count", now).standard_normal()
            short = _lengths(now.reports) <= UNCLIPPED * float(state["clip"])
            below = float((short.double() - 0.5).sum()) / now.size + noise / expected + 0.5
            state["clip"] = state["clip"] * math.exp(-self.clip_lr * (below - self.quantile))
        return memory.replace(state=state)

    def expected(self, size: int, now: Round) -> float:
        """The expected cohort that the noise is for, where `size` clients are simulated."""
        scale = self.noise_cohort / now.cohort if self.noise_cohort else 1.0
        return min(size * scale, self._clients(now))

    def normal(self, purpose: str, now: Round, like: Tensor) -> Tensor:
        """Standard normal numbers like this tensor, drawn where it is."""
        return normal(self._draw(purpose, now), like)

    def _clients(self, now: Round) -> int:
        """How many clients the federation has that is promised something."""
        return self.population or now.population

    def _rate(self, size: int, now: Round) -> float:
        return self.expected(size, now) / self._clients(now)

    def _cost(self, size: int, memory: Memory, now: Round) -> Tensor:
        """ρ of a round of this size, for every order."""
        cost = accounting.cost(self._rate(size, now), float(memory.state["noise"]))
        return torch.from_numpy(cost.copy())  # the cached one cannot be written

    def _split(self, z: float, expected: float, now: Round) -> tuple[float, float]:
        """The multipliers of the updates and of the count; with the detectors' they cost z."""
        count = max(expected / 20, z)
        others = (2 * count) ** -2 if self.quantile else 0.0
        others += sum(detector.multiplier**-2 for detector in now.detectors)
        if z**-2 <= others:
            raise UserError(
                f"run.detector = {str(now.detectors[0])!r} has too little noise for the multiplier "
                f"{z:.4g} of privacy, of which it is a part; use several times as much, such as "
                f"noise={math.ceil(3 * z)}."
            )
        return (z**-2 - others) ** -0.5, count

    def _draw(self, purpose: str, now: Round) -> np.random.Generator:
        """The generator of this purpose and round, from the seed alone or with the secret."""
        if not self.key:
            return now.stream(f"privacy {purpose}")
        secret = os.environ.get(self.key, "")
        if len(secret) < SHORTEST_SECRET:
            raise UserError(
                f"privacy: key = {self.key!r} must name an environment variable with a secret of "
                f"{SHORTEST_SECRET} characters or more; set it, for instance by export "
                f"{self.key}=$(openssl rand -hex 32)."
            )
        seed = secret_seed(now.seed, hashlib.sha256(secret.encode()).digest())
        return stream(seed, f"privacy {purpose}", now.number)


def _lengths(reports: Reports) -> Tensor:
    """‖Δ_i‖, `[m]`."""
    rows = reports.delta
    if not len(rows):
        return torch.empty(0, dtype=torch.float64, device=rows.device)
    return squared_norms(rows).double().sqrt()
