"""What the stacked layers of one pass share: rows of weights and of gradients, dropout keys,
features.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kairosfl.engines.batched.rows import RowLayout
from kairosfl.engines.batched.update import Optimiser
from kairosfl.engines.choices import Choices


class Frame:
    """Layers read their weights from `rows` and, in the backward pass, write their gradients into
    `gradients`.

    Layers with large weights write their gradients themselves, to where the optimiser reads them.
    The others take a `leaf`, whose gradient autograd returns. `tape` is an input of every layer of
    the first kind, so that its backward runs although autograd knows nothing of its weights.
    """

    def __init__(self, layout: RowLayout, uses: dict[int, int]) -> None:
        self.layout = layout
        # Gradients that are accumulated from zero: of tensors used more than once, or never.
        self.shared = frozenset(index for index, count in uses.items() if count != 1)
        self.fixed: list[
            Tensor
        ] = []  # frozen tensors of stacked layers, numbered after those in the rows
        self.compute = torch.float32  # type of activations
        self.last = False  # whether images are read channels last
        self.dot = "ieee"  # how Triton multiplies float32
        self.measures = False  # whether layers may time their methods
        self.choices = Choices()  # the results
        self.rows = torch.empty(0)
        self.gradients: Tensor | None = None
        self.keys: Tensor | None = None  # [m, 1] int64; None: dropout is off
        self.optimiser: Optimiser | None = None
        self.features: Tensor | None = None
        self.samples = 0  # of all clients in this pass
        self.tape = torch.empty(0)
        self.held: dict[int, Tensor] = {}  # leaves that a pass shares between its uses of a tensor
        self.written: set[int | None] = (
            set()
        )  # biases whose gradient the layer after theirs has written
        self.around: Callable[[], AbstractContextManager[Any]] = nullcontext  # of the backward pass
        self._leaves: list[tuple[int, Tensor]] = []

    def open(
        self,
        rows: Tensor,
        gradients: Tensor | None = None,
        keys: Tensor | None = None,
        optimiser: Optimiser | None = None,
    ) -> None:
        """Begin a pass with these weights; with `gradients` it can be differentiated."""
        self.rows, self.gradients, self.keys, self.features = rows, gradients, keys, None
        self.optimiser = optimiser
        self._leaves, self.held, self.written = [], {}, set()
        if gradients is None:
            return
        if not self.tape.requires_grad or self.tape.device != rows.device:
            self.tape = torch.zeros((), device=rows.device, requires_grad=True)
        for index in self.shared:
            self.layout.view(gradients, index).zero_()

    def close(self) -> None:
        """Release everything that belongs to the last pass."""
        self.open(torch.empty(0))

    @property
    def clients(self) -> int:
        return len(self.rows)

    def fix(self, tensor: Tensor) -> int:
        """The number of a frozen tensor, which all clients share."""
        known = [number for number, each in enumerate(self.fixed) if each is tensor]
        if not known:
            self.fixed.append(tensor)
        return len(self.layout.places) + (known[0] if known else len(self.fixed) - 1)

    def frozen(self, index: int | None) -> Tensor | None:
        """The frozen tensor with this number; None if it is trained or absent."""
        first = len(self.layout.places)
        return None if index is None or index < first else self.fixed[index - first]

    def weight(self, index: int) -> Tensor:
        """A tensor of the model for every client, in the layout of the rows."""
        return self.layout.view(self.rows, index)

    def slope(self, index: int) -> Tensor:
        """Where its gradient goes."""
        assert self.gradients is not None
        return self.layout.view(self.gradients, index)

    @contextmanager
    def writing(self, *indices: int | None) -> Iterator[list[Tensor | None]]:
        """Places to write whole gradients to; those of tensors used more than once are added up."""
        places = [None if index is None else self.slope(index) for index in indices]
        shared = [index in self.shared for index in indices]
        written = [
            torch.empty_like(place) if place is not None and many else place
            for place, many in zip(places, shared, strict=True)
        ]
        yield written
        for place, value, many in zip(places, written, shared, strict=True):
            if many and place is not None and value is not None:
                place.add_(value)

    def leaf(self, index: int) -> Tensor:
        """The tensor in the model's own axes, for autograd to differentiate if it is trained."""
        frozen = self.frozen(index)
        if frozen is not None:
            return frozen.expand(self.clients, *frozen.shape)
        value = self.layout.natural(self.rows, index)
        if self.gradients is None:
            return value
        leaf = value.detach().requires_grad_()
        self._leaves.append((index, leaf))
        return leaf

    def backward(self, end: Tensor, slope: Tensor | None = None) -> None:
        """Fill `gradients` from a loss, or from outputs with this slope, and let go of the pass.

        Its graph refers to this frame, a cycle that Python cannot free.
        """
        assert self.gradients is not None
        leaves = [leaf for _, leaf in self._leaves]
        indices = [index for index, _ in self._leaves]
        try:
            with self.around():
                slopes = torch.autograd.grad(end, [self.tape, *leaves], slope, allow_unused=True)[
                    1:
                ]
        finally:
            self.features, self._leaves, self.held = None, [], {}
        for index, slope in zip(indices, slopes, strict=True):
            target = self.layout.natural(self.gradients, index)
            if index in self.shared:
                if slope is not None:
                    target.add_(slope)
            elif slope is None:
                target.zero_()
            else:
                target.copy_(slope)
