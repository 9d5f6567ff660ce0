"""The kernels of a step, compiled side by side before a first step would wait for one after
another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from kairosfl.engines.batched.conv import last
from kairosfl.engines.batched.dropout import StackedDropout
from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import StackedConv2d, StackedGroupNorm, StackedLinear
from kairosfl.engines.batched.pool import ReluPool
from kairosfl.engines.batched.recurrent import StackedRecurrent
from kairosfl.engines.batched.update import Optimiser

# Those with kernels.
LAYERS = (
    StackedConv2d,
    StackedGroupNorm,
    StackedLinear,
    StackedDropout,
    StackedRecurrent,
    ReluPool,
)


@dataclass(frozen=True)
class Rehearsal:
    """The layers of a stacked model, and what they were given in a pass: the shape of a sample, if
    it was derived.
    """

    seen: dict[nn.Module, tuple[torch.Size, bool]] = field(default_factory=dict)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Remember what the layers are given here."""

        def remember(layer: nn.Module, given: tuple[Tensor, ...]) -> None:
            x = _samples_first(layer, given[0])
            # The weights of a recurrent layer are leaves of their own, which the tape does not
            # reach.
            self.seen[layer] = (x.shape[1:], x.requires_grad or isinstance(layer, StackedRecurrent))

        fused = {layer.drop for layer in model.modules() if isinstance(layer, ReluPool)}
        layers = [
            layer for layer in model.modules() if isinstance(layer, LAYERS) and layer not in fused
        ]
        hooks = [layer.register_forward_pre_hook(remember) for layer in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __call__(
        self,
        frame: Frame,
        rows: Tensor,
        gradients: Tensor | None,
        samples: int,
        optimiser: Optimiser | None = None,
        surround: Callable[[], None] = lambda: None,
    ) -> None:
        """Compile the kernels that the layers launch for this many samples per client, and those
        that `surround` does.

        With `gradients`, this covers the backward pass and dropout, and leaves the gradients
        zeroed; with None, only the forward pass. Errors are ignored: they recur in the first real
        pass, which handles them.
        """
        module: Any = kernels("launch", rows)
        if module is None or not self.seen:
            return
        frame.samples = len(rows) * samples
        keys = (
            None
            if gradients is None
            else torch.zeros(len(rows), 1, dtype=torch.int64, device=rows.device)
        )
        frame.open(rows, gradients, keys, optimiser)
        try:
            # Raises with versions of Triton that cannot compile in parallel.
            with suppress(Exception), frame.choices.guessing(), module.rehearsal():
                # Last layer first, as in a backward pass: a layer may compute the bias gradient of
                # the one before it.
                for layer, (shape, inward) in reversed(self.seen.items()):
                    with suppress(Exception):
                        _there_and_back(
                            layer, (frame.samples, *shape), inward and gradients is not None, frame
                        )
                with suppress(Exception):
                    surround()
        finally:
            frame.close()
            if gradients is not None:
                gradients.zero_()


def _there_and_back(layer: nn.Module, size: tuple[int, ...], inward: bool, frame: Frame) -> None:
    x = torch.zeros(size, dtype=frame.compute, device=frame.rows.device)
    x = (last(x) if x.ndim == 4 else x).requires_grad_(inward)
    y = layer(_samples_first(layer, x))
    y = y[0] if isinstance(layer, StackedRecurrent) else y
    if y.requires_grad:  # a frozen part's does not
        wanted = [each for each in (x, frame.tape) if each.requires_grad]
        torch.autograd.grad(y, wanted, torch.zeros_like(y), allow_unused=True)


def _samples_first(layer: nn.Module, x: Tensor) -> Tensor:
    """To and from the order of a recurrent layer that has time first."""
    return x.transpose(0, 1) if isinstance(layer, StackedRecurrent) and not layer.first else x
