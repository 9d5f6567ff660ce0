"""The recipe of a run: how many rounds, how many clients in each, and how a client trains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from kairosfl.errors import UserError

OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "exponential", "steps", "cosine")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Plain numbers, the same for every engine. A rule may change them for single clients through the brief."""

    rounds: int = 100
    cohort: int = 10
    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0  # of sgd
    beta1: float = 0.9  # of adamw, as the next two
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0  # largest norm of a mini-batch gradient; 0: no clipping
    schedule: str = "constant"
    gamma: float = 0.99  # exponential: factor per round; steps: factor per milestone
    milestones: tuple[int, ...] = ()  # steps: rounds at which the learning rate falls
    lr_min: float = 0.0  # cosine: where it ends

    def __post_init__(self) -> None:
        for field in ("rounds", "cohort", "epochs", "batch_size"):
            if getattr(self, field) < 1:
                raise UserError(f"train.{field} = {getattr(self, field)} must be 1 or more.")
        if not 0 < self.lr < math.inf:
            raise UserError(f"train.lr = {self.lr} must be above 0, and finite.")
        for field in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"train.{field} = {getattr(self, field)} must be at least 0 and below 1.")
        if not 0 < self.eps < math.inf:
            raise UserError(f"train.eps = {self.eps} must be above 0, and finite.")
        if self.optimizer not in OPTIMIZERS:
            raise UserError(f"train.optimizer = {self.optimizer!r} is not one of {', '.join(OPTIMIZERS)}.")
        if self.optimizer == "adamw" and self.momentum:
            raise UserError(f"train.momentum = {self.momentum} is for 'sgd'; set beta1 for train.optimizer = 'adamw'.")
        for field in ("weight_decay", "clip", "lr_min"):
            if getattr(self, field) < 0:
                raise UserError(f"train.{field} = {getattr(self, field)} must be 0 or more.")
        if not 0 < self.gamma <= 1:
            raise UserError(f"train.gamma = {self.gamma} must be above 0 and at most 1.")
        if self.schedule not in SCHEDULES:
            raise UserError(f"train.schedule = {self.schedule!r} is not one of {', '.join(SCHEDULES)}.")

    def lr_at(self, round: int) -> float:
        """The local learning rate of a round, counted from 0."""
        if self.schedule == "exponential":
            return self.lr * self.gamma**round
        if self.schedule == "steps":
            return self.lr * self.gamma ** sum(round >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            return self.lr_min + (self.lr - self.lr_min) * (1 + math.cos(math.pi * round / self.rounds)) / 2
        return self.lr

    def told(self, round: int) -> dict[str, Any]:
        """What every client is told in a round, by the names of the brief's fields."""
        names = ("optimizer", "momentum", "weight_decay", "beta1", "beta2", "eps", "batch_size", "epochs", "drop_last")
        return {name: getattr(self, name) for name in names} | {"lr": self.lr_at(round), "clip": self.clip or math.inf}
