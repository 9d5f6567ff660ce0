"""Ways to convolve stacked clients: one grouped convolution, or columns of patches times weights.

Images are `[m·b, C, H, W]`, weights `[m, O, h, w, C / groups]`, biases `[m, O]`. Grouped wins for few channels, columns
for many: the engine measures.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Pair = tuple[int, int]


@dataclass(frozen=True)
class Shape:
    """What a convolution is, but for its weights and the images."""

    inputs: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def size(self, height: int, width: int) -> Pair:
        """Height and width of the output."""
        sides = zip((height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True)
        rows, columns = ((side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in sides)
        return rows, columns


class Method(Protocol):
    """One way to convolve; the weights' gradient is `[m, O, h, w, C / groups]`."""

    def forward(self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor: ...

    def backward(
        self, shape: Shape, dy: Tensor, x: Tensor, w: Tensor, inward: bool
    ) -> tuple[Tensor | None, Tensor]: ...


class Grouped:
    """All clients as the groups of one convolution."""

    def forward(self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        m = len(w)
        y = F.conv2d(
            _beside(x, m),
            _merged(w),
            None if b is None else b.reshape(-1),
            shape.stride,
            shape.padding,
            shape.dilation,
            m * shape.groups,
        )
        return _below(y, m)

    def backward(self, shape: Shape, dy: Tensor, x: Tensor, w: Tensor, inward: bool) -> tuple[Tensor | None, Tensor]:
        m = len(w)
        dx, dw, _ = torch.ops.aten.convolution_backward(
            _beside(dy, m),
            _beside(x, m),
            _merged(w),
            None,
            shape.stride,
            shape.padding,
            shape.dilation,
            False,
            [0, 0],
            m * shape.groups,
            [inward, True, False],
        )
        dw = dw.view(m, shape.outputs, -1, *shape.kernel).permute(0, 1, 3, 4, 2)
        return (_below(dx, m) if inward else None), dw


def _beside(x: Tensor, m: int) -> Tensor:
    """[m·b, C, H, W] to [b, m·C, H, W]."""
    return x.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)


def _below(y: Tensor, m: int) -> Tensor:
    return y.unflatten(1, (m, -1)).transpose(0, 1).flatten(0, 1)


def _merged(w: Tensor) -> Tensor:
    """[m, O, h, w, C] to [m·O, C, h, w]."""
    return w.permute(0, 1, 4, 2, 3).flatten(0, 1)


class Columns:
    """Patches as the rows of a matrix, times the weights, one batched product for all clients."""

    def forward(self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        m = len(w)
        columns, weights = _patches(shape, x, m), w.flatten(2).mT
        y = torch.bmm(columns, weights) if b is None else torch.baddbmm(b.unsqueeze(1), columns, weights)
        return _images(y, len(x), *shape.size(*x.shape[2:]))

    def backward(self, shape: Shape, dy: Tensor, x: Tensor, w: Tensor, inward: bool) -> tuple[Tensor | None, Tensor]:
        m = len(w)
        rows = dy.permute(0, 2, 3, 1).reshape(m, -1, shape.outputs)
        dw = torch.bmm(rows.mT, _patches(shape, x, m)).view(w.shape)
        return (_spread(shape, torch.bmm(rows, w.flatten(2)), x.shape) if inward else None), dw


def _patches(shape: Shape, x: Tensor, m: int) -> Tensor:
    """[m, b·rows·columns, h·w·C]: what each output pixel sees, channels innermost."""
    (top, left), (down, right), (kernel_h, kernel_w) = shape.padding, shape.stride, shape.kernel
    padded = F.pad(x, (left, left, top, top)).permute(0, 2, 3, 1)
    rows, columns = shape.size(*x.shape[2:])
    n, y, z, c = padded.stride()
    view = padded.as_strided(
        (len(x), rows, columns, kernel_h, kernel_w, shape.inputs),
        (n, y * down, z * right, y * shape.dilation[0], z * shape.dilation[1], c),
        padded.storage_offset(),
    )
    return view.reshape(m, -1, kernel_h * kernel_w * shape.inputs)


def _spread(shape: Shape, columns: Tensor, size: torch.Size) -> Tensor:
    """The transpose of `_patches`: every patch is added where it was taken."""
    n, channels, height, width = size
    (top, left), (down, right), (kernel_h, kernel_w) = shape.padding, shape.stride, shape.kernel
    rows, wide = shape.size(height, width)
    patches = columns.view(n, rows, wide, kernel_h, kernel_w, channels)
    total = columns.new_zeros(n, height + 2 * top, width + 2 * left, channels)
    for i in range(kernel_h):
        for j in range(kernel_w):
            y, z = i * shape.dilation[0], j * shape.dilation[1]
            part = total[:, y : y + down * (rows - 1) + 1 : down, z : z + right * (wide - 1) + 1 : right]
            part.add_(patches[:, :, :, i, j])
    return total[:, top : top + height, left : left + width].permute(0, 3, 1, 2)


def _images(rows: Tensor, n: int, height: int, width: int) -> Tensor:
    """[m, b·H·W, C] to [m·b, C, H, W] in channels-last order, without a copy."""
    return rows.view(n, height, width, rows.shape[-1]).permute(0, 3, 1, 2)


GROUPED, COLUMNS = Grouped(), Columns()


def methods(shape: Shape, device: torch.device) -> dict[str, Method]:
    """The ways open to this convolution, by name."""
    return {"grouped": GROUPED} | ({"columns": COLUMNS} if shape.groups == 1 else {})


def first(shape: Shape) -> Method:
    """The way taken where nothing was measured."""
    return COLUMNS if shape.groups == 1 else GROUPED
