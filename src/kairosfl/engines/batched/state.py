"""The state of the clients in the slots: rows of weights, and numbers for each, on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from enum import IntEnum, auto
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from kairosfl.core.fields import REALS
from kairosfl.engines.batched.rows import RowLayout

# Rows of `State.reals`, by the names of the brief's fields; kernels read them by these positions.
Real = SimpleNamespace(**{name: row for row, name in enumerate(REALS)})


class Whole(IntEnum):
    """Rows of `State.wholes`."""

    POSITION = 0  # steps done
    TOTAL = auto()  # steps to do; a stop rule lowers it
    SIZE = auto()  # samples in a full batch
    END = auto()  # samples used in an epoch
    BATCHES = auto()  # batches in an epoch
    SAMPLES = auto()  # samples trained on
    STOPS = auto()  # has a stop rule
    LEAST = auto()  # which uses the smallest cosine, not the mean
    AT_ONCE = auto()  # and stops immediately, not at the end of the epoch
    FLAG = auto()  # a cosine of this epoch was below the threshold
    CLIENT = auto()
    CROPS = auto()  # the key of the crops in this run and round
    DROPS = auto()  # the key of the client's dropout in this round
    LABELS = auto()  # the key of the wrong labels in this run
    LATE = auto()  # is clipped after the corrections


class Sum(IntEnum):
    """Rows of `State.sums`, float64."""

    LOSS = 0
    GRAD_SQ = auto()
    SIMILARITY = auto()
    SQUARED = auto()  # squared losses of the samples in the first epoch


@dataclass(frozen=True)
class Kind:
    """The kind of a step: everything that determines the operations, not their operands."""

    width: int  # slots that take part
    batch: int
    clip: bool = False
    late: bool = False  # clips after the corrections
    decay: bool = False
    pull: bool = False
    push: bool = False
    momentum: bool = False
    stop: bool = False
    reference: bool = False  # a stop rule compares with a model other than the start
    contrast: bool = False
    adamw: bool = False
    sam: bool = False
    mislabel: bool = False
    squared: bool = False  # sums the squared losses of the first epoch
    # Numbers of the tensors that do not move; clients train in one step only if theirs are the same.
    still: frozenset[int] = frozenset()

    @property
    def fuses(self) -> bool:
        """Whether layers may step in their backward pass: not if the whole gradient has to be known
        first.
        """
        return not (self.clip or self.adamw or self.sam)

    @property
    def holds(self) -> bool:
        """Whether large layers may step once the length of the whole gradient is known, without
        writing their own.
        """
        return self.clip and not (self.late or self.adamw or self.sam)

    def __or__(self, other: Kind) -> Kind:
        """A kind that suits the clients of both."""
        flags = {name: getattr(self, name) or getattr(other, name) for name in _FLAGS}
        width = max(self.width, other.width)
        return Kind(width, max(self.batch, other.batch), **flags, still=self.still & other.still)

    def meets(self, other: Kind) -> bool:
        """Whether clients of both may train in one step: it has one optimiser and moves the same
        tensors for all.
        """
        return self.adamw == other.adamw and self.still == other.still

    def wide(self, width: int) -> Kind:
        """The same kind for another number of slots."""
        return replace(self, width=width)

    def needs(self) -> frozenset[str]:
        """Which model-sized rows it reads in addition to weights, momenta and gradients."""
        wanted = {
            "anchor": self.pull or self.contrast or self.stop,
            "push": self.push,
            "previous": self.contrast,
            "reference": self.reference,
            "second": self.adamw,
            "here": self.sam,
        }
        return frozenset(name for name, asked in wanted.items() if asked)


_FLAGS = tuple(
    entry.name for entry in fields(Kind) if entry.name not in ("width", "batch", "still")
)


class State:
    """Buffers at fixed addresses for `slots` clients, as captured steps need them."""

    def __init__(
        self, layout: RowLayout, slots: int, length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.slots, self.length, self.dtype, self.device = (
            layout,
            slots,
            length,
            dtype,
            device,
        )
        self.w, self.v, self.g = (self._rows() for _ in range(3))
        self.moved = False  # whether a step may have written momenta; until then all are zero
        self.extra: dict[
            str, Tensor
        ] = {}  # anchor, push, second moments, ...: where a brief needs them
        self.reals = torch.zeros(len(REALS), slots, dtype=dtype, device=device)
        self.numbers = torch.zeros(
            len(Whole) + len(Sum), slots, dtype=torch.int64, device=device
        )  # copied together
        self.wholes, self.sums = (
            self.numbers[: len(Whole)],
            self.numbers[len(Whole) :].view(torch.float64),
        )
        self.order = torch.zeros(slots, length, dtype=torch.int64, device=device)
        self.strips = layout.strips()
        self._blocks: dict[frozenset[int], Tensor] = {}
        self.on = torch.ones((), dtype=torch.bool, device=device)  # off: steps change nothing
        self.wholes[Whole.SIZE :].fill_(1)
        self.reals[Real.eps] = 1  # or AdamW would divide by zero in slots that nobody has used yet

    def _rows(self) -> Tensor:
        return torch.zeros(self.slots, self.layout.width, dtype=self.dtype, device=self.device)

    def rows(self, name: str) -> Tensor:
        """One of the extra buffers, created on first use."""
        if name not in self.extra:
            self.extra[name] = self._rows()
        return self.extra[name]

    def fill(self, rows: Tensor, here: slice | Tensor, vectors: Tensor) -> None:
        """Write vectors, `[d]` or `[m, d]`, to some rows."""
        if isinstance(here, slice):
            self.layout.fill(vectors, rows[here])
        else:
            rows[here] = self.layout.pack(vectors.view(-1, vectors.shape[-1]))

    def blocks(self, done: frozenset[int], kernels: Any) -> Tensor:
        """The pieces of the rows that a kernel has to step when these tensors have stepped already."""
        if done not in self._blocks:
            self._blocks[done] = kernels.blocks(self.layout.ranges(done), self.device)
        return self._blocks[done]

    def swap(self, some: list[int], others: list[int]) -> None:
        """Exchange the clients of two sets of slots."""
        here, there = upload(some + others, self.device), upload(others + some, self.device)
        for rows in (self.w, self.v, self.order, *self.extra.values()):
            rows[here] = rows[there]
        for columns in (self.reals, self.numbers):
            columns[:, here] = columns[:, there]


def upload(numbers: Any, device: torch.device) -> Tensor:
    """Copied to the device, without waiting for it."""
    tensor = torch.as_tensor(numbers)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def places(numbers: list[int], device: torch.device) -> slice | Tensor:
    """An index of these positions: a slice if they are consecutive, which needs neither an upload
    nor a gather.
    """
    first, count = numbers[0], len(numbers)
    return (
        slice(first, first + count)
        if numbers == list(range(first, first + count))
        else upload(numbers, device)
    )
