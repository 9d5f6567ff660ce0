"""A model as one flat vector: where each of its tensors lies, and how to go back and forth."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from kairosfl.errors import UserError


@dataclass(frozen=True)
class Entry:
    """One tensor of the model inside the vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, vector: Tensor) -> Tensor:
        """This tensor inside a vector `[d]` or the same tensor of every client inside `[m, d]`."""
        return vector[..., self.offset : self.offset + self.size].view(*vector.shape[:-1], *self.shape)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model in the order in which they lie in the vector."""

    entries: tuple[Entry, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Layout:
        check_state(model)
        entries, offset = [], 0
        for name, parameter in model.named_parameters():
            entries.append(Entry(name, tuple(parameter.shape), offset))
            offset += parameter.numel()
        return cls(tuple(entries))

    @property
    def size(self) -> int:
        """Length d of the vector."""
        return sum(entry.size for entry in self.entries)

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every entry, without a copy."""
        for entry in self.entries:
            yield entry.name, entry.view(vector)


def check_state(model: nn.Module) -> None:
    """Refuse a model whose state is more than its parameters: averaging would leave the rest behind in silence."""
    buffers = [name for name, buffer in model.named_buffers() if buffer is not None]
    if buffers:
        kind = type(model.get_submodule(buffers[0].rpartition(".")[0])).__name__
        mend = "use nn.GroupNorm instead" if "BatchNorm" in kind else "make it a constant or a parameter"
        raise UserError(f"The model keeps state outside its parameters ({buffers[0]!r} of a {kind}): {mend}.")
    if next(model.parameters(), None) is None:
        raise UserError(f"The model {type(model).__name__} has no parameters to train.")


def flatten(model: nn.Module) -> Tensor:
    """The model's parameters as one new vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def load(model: nn.Module, x: Tensor) -> nn.Module:
    """The model with its parameters copied from the vector."""
    with torch.no_grad():
        for (_, value), parameter in zip(Layout.of(model).views(x), model.parameters(), strict=True):
            parameter.copy_(value.reshape(parameter.shape))
    return model
