"""Ways to convolve stacked clients: one grouped convolution, or patches times weights, stored or
gathered on the fly.

Images are `[m·b, C, H, W]`, weights `[m, O, h, w, C / groups]`, biases `[m, O]`. The engine
measures which is fastest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from kairosfl.engines.batched.fast import kernels, slow_transposed, timed

Pair = tuple[int, int]
Slopes = tuple[Tensor, Tensor | None]  # gradients of weights and bias


@dataclass(frozen=True)
class Shape:
    """A convolution apart from its weights and the images."""

    inputs: int
    outputs: int
    kernel: Pair
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int

    def size(self, height: int, width: int) -> Pair:
        """Height and width of the output."""
        sides = zip(
            (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
        )
        rows, columns = ((side + 2 * p - d * (k - 1) - 1) // s + 1 for side, k, s, p, d in sides)
        return rows, columns


class Method(Protocol):
    """One way to convolve."""

    @property
    def last(self) -> bool:
        """Whether it reads images channels last."""
        ...

    def forward(
        self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool = False
    ) -> Tensor:
        """The outputs or, if `relu`, what a ReLU makes of them."""
        ...

    def backward(
        self,
        shape: Shape,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        slopes: Slopes,
        inward: bool,
        masked: bool = False,
    ) -> Tensor | None:
        """The gradient of the images, if `inward`; those of weights and bias are written into
        `slopes`.

        If `masked`, the images are what a ReLU returned, and the gradient is that of its input.
        """
        ...


class Grouped:
    """All clients as the groups of one convolution."""

    last: ClassVar[bool] = False

    def forward(
        self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool = False
    ) -> Tensor:
        m = len(w)
        y = F.conv2d(
            _beside(x, m),
            _merged(w.to(x.dtype)),
            None if b is None else b.to(x.dtype).reshape(-1),
            shape.stride,
            shape.padding,
            shape.dilation,
            m * shape.groups,
        )
        return _below(y.relu_() if relu else y, m)

    def backward(
        self,
        shape: Shape,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        slopes: Slopes,
        inward: bool,
        masked: bool = False,
    ) -> Tensor | None:
        m = len(w)
        dx, slope, _ = torch.ops.aten.convolution_backward(
            _beside(dy, m),
            _beside(x, m),
            _merged(w.to(x.dtype)),
            None,
            shape.stride,
            shape.padding,
            shape.dilation,
            False,
            [0, 0],
            m * shape.groups,
            [inward, True, False],
        )
        slopes[0].copy_(slope.view(m, shape.outputs, -1, *shape.kernel).permute(0, 1, 3, 4, 2))
        total(dy, slopes[1])
        return _masked(_below(dx, m), x, masked) if inward else None


def _beside(x: Tensor, m: int) -> Tensor:
    """[m·b, C, H, W] to [b, m·C, H, W]."""
    n, channels, height, width = x.shape
    return x.reshape(m, n // m, channels, height, width).transpose(0, 1).flatten(1, 2)


def _below(y: Tensor, m: int) -> Tensor:
    batch, channels, height, width = y.shape
    return y.view(batch, m, channels // m, height, width).transpose(0, 1).flatten(0, 1)


def _merged(w: Tensor) -> Tensor:
    """[m, O, h, w, C] to [m·O, C, h, w]."""
    return w.permute(0, 1, 4, 2, 3).flatten(0, 1)


class Columns:
    """Patches as the rows of a matrix, times the weights, one batched product for all clients."""

    last: ClassVar[bool] = False

    def forward(
        self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool = False
    ) -> Tensor:
        m = len(w)
        columns, weights = _patches(shape, x, m), w.to(x.dtype).flatten(2).mT
        weights = weights.contiguous() if slow_transposed(x) else weights
        size = (len(x), shape.outputs, *shape.size(*x.shape[2:]))
        # A model may change its activations in place, which autograd does not allow for a view.
        y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        rows = y.permute(0, 2, 3, 1).view(m, -1, shape.outputs)
        if b is None:
            torch.bmm(columns, weights, out=rows)
        else:
            torch.baddbmm(b.to(x.dtype).unsqueeze(1), columns, weights, out=rows)
        return y.relu_() if relu else y

    def backward(
        self,
        shape: Shape,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        slopes: Slopes,
        inward: bool,
        masked: bool = False,
    ) -> Tensor | None:
        m = len(w)
        rows = dy.permute(0, 2, 3, 1).reshape(m, -1, shape.outputs)
        slopes[0].copy_(torch.bmm(rows.mT, _patches(shape, x, m)).view(slopes[0].shape))
        total(dy, slopes[1])
        if not inward:
            return None
        return _masked(
            _spread(shape, torch.bmm(rows, w.to(dy.dtype).flatten(2)), x.shape), x, masked
        )


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
    """The transpose of `_patches`: every patch is added back at its place."""
    n, channels, height, width = size
    (top, left), (down, right), (kernel_h, kernel_w) = shape.padding, shape.stride, shape.kernel
    rows, wide = shape.size(height, width)
    patches = columns.view(n, rows, wide, kernel_h, kernel_w, channels)
    total = columns.new_zeros(n, height + 2 * top, width + 2 * left, channels)
    for i in range(kernel_h):
        for j in range(kernel_w):
            y, z = i * shape.dilation[0], j * shape.dilation[1]
            part = total[
                :, y : y + down * (rows - 1) + 1 : down, z : z + right * (wide - 1) + 1 : right
            ]
            part.add_(patches[:, :, :, i, j])
    return total[:, top : top + height, left : left + width].permute(0, 3, 1, 2)


def _masked(dx: Tensor, x: Tensor, masked: bool) -> Tensor:
    """The gradient of the input of the ReLU that returned x, from that of x, if `masked`."""
    return relu_backward(dx, x) if masked else dx


def relu_backward(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of the input of a ReLU from that of its output y."""
    slope: Tensor = torch.ops.aten.threshold_backward(dy, y, 0)
    return slope


def total(dy: Tensor, db: Tensor | None) -> None:
    """The gradient of the bias: the sum over samples and pixels."""
    if db is None:
        return
    if dy.is_contiguous(memory_format=torch.channels_last):
        torch.sum(
            dy.permute(0, 2, 3, 1).reshape(len(db), -1, db.shape[1]), 1, dtype=db.dtype, out=db
        )
    else:
        db.copy_(dy.unflatten(0, (len(db), -1)).sum((1, 3, 4), dtype=db.dtype))


@dataclass(frozen=True)
class Gathered:
    """Products of patches that Triton gathers while it multiplies."""

    last: ClassVar[bool] = True
    kernels: Any
    dot: str

    def forward(
        self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool = False
    ) -> Tensor:
        y: Tensor = self.kernels.forward(shape, last(x), w, b, relu, self.dot)
        return y

    def backward(
        self,
        shape: Shape,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        slopes: Slopes,
        inward: bool,
        masked: bool = False,
    ) -> Tensor | None:
        x, dy = last(x), last(dy)
        self.kernels.weights(shape, x, dy, *slopes, self.dot)
        if not inward:
            return None
        dx: Tensor = self.kernels.inward(shape, dy, w, x, masked, self.dot)
        return dx


@dataclass(frozen=True)
class Depthwise:
    """Every channel by itself, in channels-last order, by Triton."""

    last: ClassVar[bool] = True
    kernels: Any

    def forward(
        self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool = False
    ) -> Tensor:
        y: Tensor = self.kernels.forward(shape, last(x), w, b)
        return y.relu_() if relu else y

    def backward(
        self,
        shape: Shape,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        slopes: Slopes,
        inward: bool,
        masked: bool = False,
    ) -> Tensor | None:
        dy = last(dy)
        self.kernels.weights(shape, last(x), dy, *slopes)
        if not inward:
            return None
        return _masked(self.kernels.inward(shape, dy, w, *x.shape[2:]), x, masked)


@dataclass(frozen=True)
class Cropped:
    """Another way, without the taps that meet nothing but padding: of a 3 × 3 kernel on a single
    pixel, all but one.
    """

    way: Method
    shape: Shape
    rows: slice
    columns: slice

    @property
    def last(self) -> bool:
        return self.way.last

    def forward(
        self, shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool = False
    ) -> Tensor:
        return self.way.forward(self.shape, x, self._of(w).contiguous(), b, relu)

    def backward(
        self,
        shape: Shape,
        dy: Tensor,
        x: Tensor,
        w: Tensor,
        slopes: Slopes,
        inward: bool,
        masked: bool = False,
    ) -> Tensor | None:
        w, (dw, db) = self._of(w).contiguous(), slopes
        kept = torch.empty(w.shape, dtype=dw.dtype, device=dw.device)
        dx = self.way.backward(self.shape, dy, x, w, (kept, db), inward, masked)
        self._of(dw.zero_()).copy_(kept)
        return dx

    def _of(self, w: Tensor) -> Tensor:
        return w[:, :, self.rows, self.columns]


@cache
def cropped(shape: Shape, height: int, width: int) -> tuple[Shape, slice, slice] | None:
    """The convolution without the taps that meet nothing but padding, and which are left; None if
    that is all.
    """
    size = shape.size(height, width)
    sides = zip(
        (height, width),
        size,
        shape.kernel,
        shape.stride,
        shape.padding,
        shape.dilation,
        strict=True,
    )
    rows, columns = (_met(*side) for side in sides)
    (top, left), (down, right) = shape.padding, shape.dilation
    padding = (top - rows.start * down, left - columns.start * right)
    small = replace(shape, kernel=(len(rows), len(columns)), padding=padding)
    if (
        small == shape
        or not (rows and columns)
        or min(padding) < 0
        or small.size(height, width) != size
    ):
        return None
    return small, slice(rows.start, rows.stop), slice(columns.start, columns.stop)


def _met(side: int, outputs: int, kernel: int, stride: int, padding: int, dilation: int) -> range:
    """The taps, from the first to the last, that meet a pixel of a side of this length."""
    places = range(-padding, stride * outputs - padding, stride)
    met = [
        tap for tap in range(kernel) if any(0 <= place + tap * dilation < side for place in places)
    ]
    return range(met[0], met[-1] + 1) if met else range(0)


def last(x: Tensor) -> Tensor:
    """The images with channels last in memory, copied if they are not."""
    return x.contiguous(memory_format=torch.channels_last)


def pair(sides: tuple[int, ...] | str) -> Pair:
    """A pair of numbers, as in the options of a 2d convolution."""
    height, width = (int(side) for side in sides)
    return height, width


def methods(shape: Shape, x: Tensor, clients: int, dot: str) -> dict[str, Method]:
    """The ways available for this convolution of such images, by name; the first is used if nothing
    is measured.
    """
    found: dict[str, Method] = {}
    module = kernels("conv", x)
    if (
        shape.groups == 1
        and module is not None
        and shape.dilation == (1, 1)
        and _countable(shape, x, clients)
    ):
        found["gathered"] = Gathered(module, dot)
    if shape.groups == 1:
        found["columns"] = Columns()
    found["grouped"] = Grouped()
    apart = kernels("depthwise", x) if shape.groups == shape.inputs == shape.outputs > 1 else None
    if apart is not None and _countable(shape, x, clients):
        found["depthwise"] = Depthwise(apart)
    crop = cropped(shape, *x.shape[2:])
    return {name: Cropped(way, *crop) for name, way in found.items()} if crop else found


def _countable(shape: Shape, x: Tensor, clients: int) -> bool:
    """Whether 32-bit indices suffice for the inputs and outputs of one client's layer."""
    rows, columns = shape.size(*x.shape[2:])
    return max(x.numel(), len(x) * rows * columns * shape.outputs) // clients < 1 << 31


def quickest(ways: dict[str, Method], trial: Callable[[Method], object]) -> str:
    """The way with which a trial is fastest."""
    times: dict[str, float] = {}
    for name, way in ways.items():
        try:
            times[name] = _seconds(partial(trial, way), min(times.values(), default=float("inf")))
        except Exception:  # too large for the memory, or for what a kernel may use of the GPU
            if not times and name == list(ways)[-1]:
                raise
    return min(times, key=times.__getitem__)


def _seconds(trial: Callable[[], object], best: float) -> float:
    """The least time of a few trials, or of two if they are far from the best."""
    times: list[float] = []
    while len(times) < 4 and (len(times) < 2 or min(times) < 2 * best):
        times.append(timed(trial))
    return min(times)
