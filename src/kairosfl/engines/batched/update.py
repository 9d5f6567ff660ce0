"""The optimiser over `[m, width]`: correction, weight decay, momentum and step.

    g = scale · clip(∇L) + pull · (w − start) + push,    then sgd or adamw as in `client.optimizers`

for the clients that are live; the others keep what they have. With `clip_after`, all of g is
clipped instead of ∇L.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.rows import ALIGN
from kairosfl.engines.batched.state import Kind, Real, State, Whole


def square_norms(g: Tensor) -> Tensor:
    """‖g‖² of every row, in pieces: one long sum in float32 loses accuracy."""
    squares: Tensor = torch.linalg.vector_norm(g.view(len(g), ALIGN, -1), dim=2).square().sum(1)
    return squares


class Optimiser:
    """One step of all clients. Linear layers may step in their backward pass, by `linear`; `finish`
    does the rest.

    Where gradients are clipped, large linear layers are held: their step waits for the length of
    the whole gradient.
    """

    def __init__(self, state: State, kind: Kind, live: Tensor, dot: str) -> None:
        a = kind.width
        self.state, self.kind, self.live, self.dot = state, kind, live, dot
        self.w, self.v, self.g, self.reals = (
            state.w[:a],
            state.v[:a],
            state.g[:a],
            state.reals[:, :a],
        )
        self.anchor = state.extra["anchor"][:a] if kind.pull else None
        self.push = state.extra["push"][:a] if kind.push else None
        self._still = [state.layout.view(self.g, index) for index in sorted(kind.still)]
        self._done = set(kind.still)  # what `finish` leaves out
        self._held: dict[int, tuple[Tensor, Tensor]] = {}  # inputs, and gradients of outputs
        self._kernels: Any = None if kind.adamw else kernels("update", state.w)
        if self._kernels is not None:
            self._alive = live.view(torch.int8)
            # The strips of linear layers, then the pieces of the rest: a layer that steps itself
            # may split one in two.
            pieces = len(state.blocks(frozenset(), self._kernels)) + len(state.layout.places)
            self._partials = torch.zeros(
                a, state.strips[-1] + pieces, dtype=torch.float32, device=state.device
            )

    def linear(
        self, x: Tensor, dy: Tensor, weight: int, inward: bool
    ) -> tuple[bool, Tensor | None]:
        """Whether the layer's weights have stepped, or will, and if so the gradient of its input."""
        module: Any = kernels("linear", self.w)
        if module is None or self._kernels is None or x.shape[1] > module.MOST:
            return False, None
        if weight in self.kind.still:
            return False, None
        if self.kind.fuses:
            self._done.add(weight)
            return True, self._step(x, dy, weight, self.reals[Real.scale], inward)
        w = self.state.layout.view(self.w, weight)
        if not self.kind.holds or w[0].numel() < module.LARGE:
            return False, None
        self._done.add(weight)
        self._held[weight] = x.detach(), dy  # without its graph, which refers back to this
        self._partials[:, self.state.strips[weight]] = module.squares(x, dy) * self.live
        return True, torch.bmm(dy, w.to(dy.dtype)) if inward else None

    def _step(
        self, x: Tensor, dy: Tensor, weight: int, factor: Tensor, inward: bool
    ) -> Tensor | None:
        """A linear layer's step, and the gradient of its input."""
        module: Any = kernels("linear", self.w)
        dx: Tensor | None = module.backward(
            x,
            dy,
            self.w,
            self.v,
            self.anchor,
            self.push,
            self.state.reals,
            factor,
            self._alive,
            self._partials,
            self.state.strips[weight],
            self.state.layout.places[weight].offset,
            inward,
            self.kind.momentum,
            self.dot,
        )
        return dx

    def forget_still(self) -> None:
        """Zero the gradients of tensors that do not move: they are no part of ‖∇L‖, and SAM does not
        climb along them.
        """
        for gradient in self._still:
            gradient.zero_()

    def finish(self) -> Tensor:
        """Step whatever has not stepped; returns ‖∇L‖² of every client, clipped as trained, in
        pieces `[a, pieces]`.
        """
        factor = self.reals[Real.scale]
        if self._kernels is None or self.kind.clip:
            squares = self._squares()
            if self.kind.clip:
                late = self.state.wholes[Whole.LATE, : self.kind.width] > 0
                shrink = (
                    torch.where(late, 1.0, self._shrink(squares))
                    if self.kind.late
                    else self._shrink(squares)
                )
                squares, factor = squares * shrink.square(), factor * shrink
                if self.kind.late:
                    self._correct(factor)
                    factor = torch.where(late, self._shrink(square_norms(self.g)), 1.0)
                    squares = squares * factor.square()
        if self._kernels is None:
            self._plain(factor)
            return squares[:, None]
        pieces = self.state.blocks(frozenset(self._done), self._kernels)
        self._kernels.update(
            self.w,
            self.v,
            self.g,
            self.anchor,
            self.push,
            self.state.reals,
            factor,
            self._alive,
            pieces,
            self._partials[:, self.state.strips[-1] :],
            self.kind.momentum,
        )
        for weight, (x, dy) in self._held.items():
            self._step(x, dy, weight, factor, inward=False)
        self._held = {}
        return squares[:, None] if self.kind.clip else self._partials

    def _squares(self) -> Tensor:
        """‖∇L‖² of every client."""
        if not self._held:
            return square_norms(self.g)
        pieces = self.state.blocks(frozenset(self._done), self._kernels)
        self._kernels.squares(
            self.g, self._alive, pieces, self._partials[:, self.state.strips[-1] :]
        )
        return self._partials.sum(1)

    def _shrink(self, squares: Tensor) -> Tensor:
        """The factor that clips a gradient of this squared norm."""
        # NaN times the zeros between the tensors of a row would stay there for the next client in
        # this slot.
        return (self.reals[Real.clip] / (squares.sqrt() + 1e-6)).clamp(max=1.0).nan_to_num(nan=1.0)

    def _correct(self, factor: Tensor) -> None:
        """Scale, pull and push the gradients now, so that their norm can be taken; the step then
        leaves it out.
        """
        self.g.mul_(factor[:, None])
        if self.anchor is not None:
            self.g.addcmul_(self.w - self.anchor, self.reals[Real.pull][:, None])
        if self.push is not None:
            self.g.add_(self.push)
        self.forget_still()
        self.anchor = self.push = None

    def _plain(self, factor: Tensor) -> None:
        """Step without kernels, one range of columns after another: without still tensors it is one."""
        for begin, end in self.state.layout.ranges(self.kind.still):
            self._plain_columns(slice(begin, end), factor)

    def _plain_columns(self, columns: slice, factor: Tensor) -> None:
        w, v, g = self.w[:, columns], self.v[:, columns], self.g[:, columns]
        reals, on, kind = self.reals, self.live.to(w.dtype), self.kind
        if not (
            kind.decay or kind.pull or kind.push or kind.momentum or kind.adamw
        ):  # all of it in one pass
            w.addcmul_(g, (reals[Real.lr] * factor * -on)[:, None])
            return
        g.mul_((factor * on)[:, None])
        if kind.decay and not kind.adamw:
            g.addcmul_(w, (reals[Real.weight_decay] * on)[:, None])
        if self.anchor is not None:
            g.addcmul_(w - self.anchor[:, columns], (reals[Real.pull] * on)[:, None])
        if self.push is not None:
            g.addcmul_(self.push[:, columns], on[:, None])
        if kind.adamw:
            second = self.state.extra["second"][: kind.width, columns]
            self._adamw(w, v, second, g, on)
            return
        if kind.momentum:
            g = v.mul_(torch.where(self.live, reals[Real.momentum], 1.0)[:, None]).add_(g)
        w.addcmul_(g, (reals[Real.lr] * -on)[:, None])

    def _adamw(self, w: Tensor, first: Tensor, second: Tensor, g: Tensor, on: Tensor) -> None:
        """Every live client's moments and step; a client counts its own steps."""
        reals, live = self.reals, self.live[:, None]
        steps = (self.state.wholes[Whole.POSITION, : self.kind.width] + 1).to(w.dtype)
        beta1, beta2 = reals[Real.beta1], reals[Real.beta2]
        if self.kind.decay:
            w.mul_((1 - reals[Real.lr] * reals[Real.weight_decay] * on)[:, None])
        torch.where(live, first.lerp(g, (1 - beta1)[:, None]), first, out=first)
        grown = second * beta2[:, None] + (1 - beta2)[:, None] * g * g
        torch.where(live, grown, second, out=second)
        root = grown.sqrt_().div_((1 - beta2**steps).sqrt()[:, None]).add_(reals[Real.eps][:, None])
        w.addcmul_(first / root, (-reals[Real.lr] * on / (1 - beta1**steps))[:, None])
