"""The recipe of a run: how many rounds, how many clients in each, and how a client trains."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

import numpy as np

from kairosfl.errors import UserError

LARGEST = 3.4028234663852886e38  # of float32, in which clients train
MOST = 2**31 - 1  # what every engine can count
OPTIMIZERS = ("sgd", "adamw")
SCHEDULES = ("constant", "exponential", "steps", "cosine")


def _whole(number: Any) -> int:
    if isinstance(number, bool):
        raise TypeError
    return operator.index(number)


def _real(number: Any) -> float:
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError
    if isinstance(number, int):  # TOML's whole numbers stay as they are written
        return number
    return float(number)


def _truth(answer: Any) -> bool:
    if not isinstance(answer, bool | np.bool_):
        raise TypeError
    return bool(answer)


def _rounds(numbers: Any) -> tuple[int, ...]:
    if isinstance(numbers, str):
        raise TypeError
    return tuple(map(_whole, numbers))


# By the types of the fields, and what they take.
CONVERSIONS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "int": (_whole, "a whole number"),
    "float": (_real, "a number"),
    "bool": (_truth, "True or False"),
    "tuple[int, ...]": (_rounds, "a list of whole numbers"),
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Plain numbers, the same for every engine.

    A rule may change them for single clients through the brief.

    Args:
        rounds: How many rounds the run has.
        cohort: Clients per round; a rule may select more or fewer.
        epochs: Passes over a client's data in a round, at most.
        batch_size: Samples in a batch; a client with fewer uses all of them.
        drop_last: Whether the last batch of an epoch is dropped if it is smaller.
        optimizer: The clients' optimizer, "sgd" or "adamw".
        lr: The clients' learning rate in the first round.
        momentum: Of "sgd", reset in every round.
        beta1: Of "adamw": decay of the first moment.
        beta2: Of "adamw": decay of the second moment.
        eps: Of "adamw": added to the root of the second moment.
        weight_decay: Added to the gradient by "sgd", decoupled in "adamw".
        clip: Largest norm of a batch's gradient; 0 for no clipping.
        clip_after: Whether to clip after the corrections of rules, not before.
        schedule: Of the learning rate over the rounds: "constant", "exponential", "steps" or
            "cosine".
        gamma: Factor per round ("exponential") or per milestone ("steps").
        milestones: Rounds at which the learning rate falls ("steps").
        lr_min: Where "cosine" ends.
    """

    rounds: int = 100
    cohort: int = 10
    epochs: int = 1
    batch_size: int = 32
    drop_last: bool = False
    optimizer: str = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip: float = 0.0
    clip_after: bool = False
    schedule: str = "constant"
    gamma: float = 0.99
    milestones: tuple[int, ...] = ()
    lr_min: float = 0.0

    def __post_init__(self) -> None:
        for entry in fields(self):
            self._convert(entry.name, str(entry.type))
        for field in ("rounds", "cohort", "epochs", "batch_size"):
            self._check(field, 1 <= getattr(self, field) <= MOST, f"1 or more, and at most {MOST}")
        self._check("lr", 0 < self.lr <= LARGEST, f"above 0, finite, and at most {LARGEST:.1e}")
        for field in ("momentum", "beta1", "beta2"):
            self._check(field, 0 <= getattr(self, field) < 1, "at least 0 and below 1")
        self._check("eps", 0 < self.eps <= LARGEST, f"above 0, finite, and at most {LARGEST:.1e}")
        self._check("optimizer", self.optimizer in OPTIMIZERS, f"one of {', '.join(OPTIMIZERS)}")
        plain = self.optimizer == "sgd" or not self.momentum
        self._check(
            "momentum",
            plain,
            f"0 with train.optimizer = {self.optimizer!r}, which has beta1 instead",
        )
        for field in ("weight_decay", "clip", "lr_min"):
            self._check(
                field,
                0 <= getattr(self, field) <= LARGEST,
                f"0 or more, finite, and at most {LARGEST:.1e}",
            )
        self._check("gamma", 0 < self.gamma <= 1, "above 0 and at most 1")
        self._check("schedule", self.schedule in SCHEDULES, f"one of {', '.join(SCHEDULES)}")
        self._check(
            "milestones",
            all(round >= 0 for round in self.milestones),
            "a list of rounds, each 0 or more",
        )

    def _convert(self, field: str, kind: str) -> None:
        """Make the field a number of Python's own, on which engines rely.

        Numpy's are welcome, text is not.
        """
        if kind not in CONVERSIONS:
            return
        convert, expected = CONVERSIONS[kind]
        try:
            object.__setattr__(self, field, convert(getattr(self, field)))
        except TypeError:
            self._check(field, False, expected)

    def _check(self, field: str, holds: bool, expected: str) -> None:
        if not holds:
            raise UserError(f"train.{field} = {getattr(self, field)!r} must be {expected}.")

    def check_cohort(self, clients: int) -> None:
        """Refuse a cohort that is larger than the population."""
        if self.cohort > clients:
            raise UserError(
                f"train.cohort = {self.cohort} is more than the {clients} clients available; "
                "lower it."
            )

    def lr_at(self, round: int) -> float:
        """The local learning rate of a round, counted from 0."""
        if self.schedule == "exponential":
            return self.lr * self.gamma**round
        if self.schedule == "steps":
            return self.lr * self.gamma ** sum(round >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            wave = 1 + math.cos(math.pi * round / self.rounds)
            return self.lr_min + (self.lr - self.lr_min) * wave / 2
        return self.lr

    def told(self, round: int) -> dict[str, Any]:
        """What every client is told in a round, by the names of the brief's fields."""
        return {
            "optimizer": self.optimizer,
            "momentum": self.momentum,
            "weight_decay": self.weight_decay,
            "beta1": self.beta1,
            "beta2": self.beta2,
            "eps": self.eps,
            "batch_size": self.batch_size,
            "epochs": self.epochs,
            "drop_last": self.drop_last,
            "clip_after": self.clip_after,
            "lr": self.lr_at(round),
            "clip": self.clip if self.clip else math.inf,
        }
