"""Recurrent layers over stacked clients, step by step: `[m, b, time, width]`, every client's own
weights.

What enters the gates needs no recurrence and is one product for all steps, and so are the gradients
of the weights. Between them a step is one product and one cell, forward and backward; an LSTM's are
one kernel on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from kairosfl.engines.batched.dropout import StackedDropout
from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import Find, Unstackable, found

State = tuple[Tensor, ...]  # the hidden state first
INNER = 1 << 16  # numbers of the dropouts inside layers, which must not clash with the model's own
Forward = Callable[[Tensor, Tensor, State], tuple[State, State]]
Backward = Callable[[State, State, State], tuple[Tensor, Tensor, State]]


class Cell(NamedTuple):
    """A step: from what the input and the recurrent product add to the gates, and the state before
    it.

    `forward` returns the state after the step and what `backward` needs. From the gradient of that
    state, `backward` returns those of both products, and that of the state before the step without
    what reaches it by the product.
    """

    forward: Forward
    backward: Backward


def _lstm(into: Tensor, back: Tensor, before: State) -> tuple[State, State]:
    enter, forget, candidate, leave = (into + back).chunk(4, -1)
    enter, forget, candidate, leave = (
        enter.sigmoid(),
        forget.sigmoid(),
        candidate.tanh(),
        leave.sigmoid(),
    )
    cell = forget * before[1] + enter * candidate
    top = cell.tanh()
    return (leave * top, cell), (enter, forget, candidate, leave, top)


def _lstm_back(slopes: State, kept: State, before: State) -> tuple[Tensor, Tensor, State]:
    enter, forget, candidate, leave, top = kept
    slope = slopes[1] + slopes[0] * leave * (1 - top * top)
    gates = (
        slope * candidate * enter * (1 - enter),
        slope * before[1] * forget * (1 - forget),
        slope * enter * (1 - candidate * candidate),
        slopes[0] * top * leave * (1 - leave),
    )
    both = torch.cat(gates, -1)
    return both, both, (torch.zeros_like(slope), slope * forget)


def _gru(into: Tensor, back: Tensor, before: State) -> tuple[State, State]:
    (reset_in, update_in, new_in), (reset, update, product) = into.chunk(3, -1), back.chunk(3, -1)
    reset, update = (reset_in + reset).sigmoid(), (update_in + update).sigmoid()
    new = (new_in + reset * product).tanh()
    return ((1 - update) * new + update * before[0],), (reset, update, new, product)


def _gru_back(slopes: State, kept: State, before: State) -> tuple[Tensor, Tensor, State]:
    (slope,), (reset, update, new, product) = slopes, kept
    inner = slope * (1 - update) * (1 - new * new)
    gates = inner * product * reset * (1 - reset), slope * (before[0] - new) * update * (1 - update)
    return torch.cat((*gates, inner), -1), torch.cat((*gates, inner * reset), -1), (slope * update,)


def _plain(activation: Callable[[Tensor], Tensor]) -> Forward:
    def forward(into: Tensor, back: Tensor, before: State) -> tuple[State, State]:
        after = (activation(into + back),)
        return after, after

    return forward


def _plain_back(
    derivative: Callable[[Tensor], Tensor],
) -> Callable[[State, State, State], tuple[Tensor, Tensor, State]]:
    """Of an activation, by its value."""

    def backward(slopes: State, kept: State, before: State) -> tuple[Tensor, Tensor, State]:
        inner = slopes[0] * derivative(kept[0])
        return inner, inner, (torch.zeros_like(inner),)

    return backward


CELLS = {
    "LSTM": Cell(_lstm, _lstm_back),
    "GRU": Cell(_gru, _gru_back),
    "RNN_TANH": Cell(_plain(torch.tanh), _plain_back(lambda y: 1 - y * y)),
    "RNN_RELU": Cell(_plain(torch.relu), _plain_back(lambda y: (y > 0).to(y.dtype))),
}


class _Steps(torch.autograd.Function):
    """All steps of a layer in one direction: the hidden state after each, and the rest of the last
    state.
    """

    @staticmethod
    def forward(
        ctx: Any, mode: str, into: Tensor, recurrent: Tensor, bias: Tensor | None, *begin: Tensor
    ) -> State:
        ctx.cell, ctx.begin, ctx.kept = CELLS[mode], begin, []
        outputs, state = [], begin
        for entering in into.unbind(2):
            back = torch.bmm(state[0], recurrent.mT)
            after, kept = ctx.cell.forward(
                entering, back if bias is None else back + bias[:, None], state
            )
            if any(ctx.needs_input_grad):
                ctx.kept.append((kept, state[1:]))
            outputs.append(after[0])
            state = after
        y = torch.stack(outputs, 2)
        ctx.save_for_backward(recurrent, y)
        return y, *state[1:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        recurrent, y = ctx.saved_tensors
        before = torch.cat([ctx.begin[0].unsqueeze(2), y[:, :, :-1]], 2)
        into, back, slope = [], [], (torch.zeros_like(ctx.begin[0]), *slopes[1:])
        for step in reversed(range(y.shape[2])):
            kept, rest = ctx.kept[step]
            state = (before[:, :, step], *rest)
            entering, product, direct = ctx.cell.backward(
                (slope[0] + slopes[0][:, :, step], *slope[1:]), kept, state
            )
            into.append(entering)
            back.append(product)
            slope = (torch.baddbmm(direct[0], product, recurrent), *direct[1:])
        gates = torch.stack(into[::-1], 2)
        products = gates if into[0] is back[0] else torch.stack(back[::-1], 2)
        bias = products.flatten(1, 2).sum(1) if ctx.needs_input_grad[3] else None
        return None, gates, _of_weights(ctx, products, before), bias, *slope


class _Fused(torch.autograd.Function):
    """The same of an LSTM, whose step is one kernel; both biases are in what enters its gates."""

    @staticmethod
    def forward(
        ctx: Any,
        module: Any,
        into: Tensor,
        recurrent: Tensor,
        hidden: Tensor,
        cell: Tensor,
        dot: str,
    ) -> State:
        y, cells, gates = module.forward(
            into, recurrent, hidden, cell, dot, keeps=any(ctx.needs_input_grad)
        )
        ctx.save_for_backward(recurrent, hidden, y, cells, gates)
        ctx.module, ctx.dot = module, dot
        return y, cells[:, :, -1].to(y.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        recurrent, hidden, y, cells, gates = ctx.saved_tensors
        gates, cell = ctx.module.backward(*slopes, recurrent, cells, gates, ctx.dot)
        before = torch.cat([hidden.unsqueeze(2), y[:, :, :-1]], 2)
        begin = torch.bmm(gates[:, :, 0], recurrent) if ctx.needs_input_grad[3] else None
        return None, gates, _of_weights(ctx, gates, before), begin, cell.to(y.dtype), None


def _of_weights(ctx: Any, products: Tensor, before: Tensor) -> Tensor | None:
    """The gradient of the recurrent weights, of all steps at once."""
    return (
        torch.bmm(products.flatten(1, 2).mT, before.flatten(1, 2))
        if ctx.needs_input_grad[2]
        else None
    )


class StackedRecurrent(nn.Module):
    """Every client's LSTM, GRU or plain recurrent layers."""

    def __init__(self, layer: nn.RNNBase, find: Find, frame: Frame) -> None:
        super().__init__()
        if layer.proj_size:
            raise Unstackable("an LSTM projects its outputs")
        self.frame, self.first, self.width, self.mode = (
            frame,
            layer.batch_first,
            layer.hidden_size,
            layer.mode,
        )
        self.sides = 2 if layer.bidirectional else 1
        self.weights = [[find(weight) for weight in group] for group in layer.all_weights]
        numbers = range(inner(find, layer), inner(find, layer) + layer.num_layers)
        self.drops = nn.ModuleList(
            StackedDropout(layer.dropout, number, frame) for number in numbers
        )

    def forward(self, x: Tensor, hx: Any = None) -> tuple[Tensor, Any]:
        x = x if self.first else x.transpose(0, 1)
        begins, ends = self._begins(x, hx), []
        for group in range(0, len(self.weights), self.sides):
            x = self.drops[group // self.sides](x) if group else x
            outputs = []
            for side in range(self.sides):
                y, end = self._run(x.flip(1) if side else x, group + side, begins[group + side])
                outputs.append(y.flip(1) if side else y)
                ends.append(end)
            x = torch.cat(outputs, -1) if self.sides > 1 else outputs[0]
        states = tuple(torch.stack(each).flatten(1, 2) for each in zip(*ends, strict=True))
        return (x if self.first else x.transpose(0, 1)), (
            states if self.mode == "LSTM" else states[0]
        )

    def _begins(self, x: Tensor, hx: Any) -> list[State]:
        m, groups = self.frame.clients, len(self.weights)
        if hx is None:
            zeros = x.new_zeros(m, len(x) // m, self.width)
            return [(zeros, zeros) if self.mode == "LSTM" else (zeros,)] * groups
        given = [
            each.to(x.dtype).unflatten(1, (m, -1))
            for each in (hx if self.mode == "LSTM" else (hx,))
        ]
        return [tuple(each[group] for each in given) for group in range(groups)]

    def _run(self, x: Tensor, group: int, begin: State) -> tuple[Tensor, State]:
        inward, recurrent, *biases = (
            self.frame.leaf(found(index)).to(x.dtype) for index in self.weights[group]
        )
        rows = x.unflatten(0, (self.frame.clients, -1))
        into = torch.bmm(rows.flatten(1, 2), inward.mT).unflatten(1, rows.shape[1:3])
        late = (
            biases.pop() if biases and self.mode == "GRU" else None
        )  # its reset gate multiplies this bias, too
        if biases:
            into = into + sum(biases)[:, None, None]  # type: ignore[index]
        module: Any = kernels("recurrent", into) if self.mode == "LSTM" else None
        if module is None:
            y, *rest = _Steps.apply(self.mode, into, recurrent, late, *begin)  # type: ignore[no-untyped-call]
        else:
            y, *rest = _Fused.apply(module, into, recurrent, *begin, self.frame.dot)  # type: ignore[no-untyped-call]
        return y.flatten(0, 1), (y[:, :, -1], *rest)


def inner(find: Find, layer: nn.Module) -> int:
    """The number of the first dropout inside a layer."""
    return INNER + 8 * found(find(next(layer.parameters())))
