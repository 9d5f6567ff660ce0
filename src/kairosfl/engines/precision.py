"""Precision of the engine's own arithmetic; the server's stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from kairosfl.errors import UserError, nearest

PRECISIONS = ("float32", "tf32", "bfloat16")


@dataclass(frozen=True)
class Precision:
    """The numbers that engines compute with.

    `float32` and `tf32` (19-bit products, on GPUs that have them) keep float32 throughout;
    `bfloat16` computes activations and products in it and keeps weights, momenta and gradients in
    float32.
    """

    name: str

    @classmethod
    def of(cls, name: str | None, device: torch.device) -> Precision:
        """The precision of this name; by default tf32 on a GPU."""
        if name is None:
            return cls("tf32" if device.type == "cuda" else "float32")
        if name not in PRECISIONS:
            raise UserError(
                f"run.precision = {name!r} is not a precision; {nearest(name, PRECISIONS)}"
            )
        return cls(name)

    def compute(self, weights: torch.dtype) -> torch.dtype:
        """The type of activations for weights of this type; float64 stays float64."""
        if self.name == "bfloat16" and weights == torch.float32:
            return torch.bfloat16
        return weights

    @property
    def dot(self) -> str:
        """Triton's name for how float32 numbers are multiplied."""
        return "ieee" if self.name == "float32" else "tf32"

    def autocast(self, device: torch.device) -> torch.autocast:
        """Autocast for models that are not stacked: bfloat16 if requested."""
        enabled = self.name == "bfloat16"
        return torch.autocast(device.type, torch.bfloat16, enabled=enabled, cache_enabled=False)

    @contextmanager
    def __call__(self) -> Iterator[None]:
        matmul = torch.backends.cuda.matmul
        cudnn = torch.backends.cudnn
        matmul_before = matmul.allow_tf32
        cudnn_before = cudnn.allow_tf32
        matmul.allow_tf32 = self.name != "float32"
        cudnn.allow_tf32 = self.name != "float32"
        try:
            yield
        finally:
            matmul.allow_tf32 = matmul_before
            cudnn.allow_tf32 = cudnn_before
