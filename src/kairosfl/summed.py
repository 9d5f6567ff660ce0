"""Updates of which only weighted sums and norms can be had, for rules that need no more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from kairosfl.core.fields import Reports
from kairosfl.core.rule import Memory, Rule, acts, changed
from kairosfl.core.run import Round

HOOKS = ("receive", "weigh", "combine", "observe", "step")
# What can be done to all updates alike, which leaves them as closed as before.
SCALED = {"mul", "__mul__", "__rmul__", "div", "__truediv__", "neg", "__neg__"}
MOVED = {"add", "__add__", "__radd__", "sub", "__sub__", "__rsub__"}
CAST = {"to", "double", "float", "cpu", "clone", "contiguous", "detach"}
# What opens them: sums over the clients, and the length of each.
PRODUCTS = {"matmul", "__matmul__", "__rmatmul__", "mm", "mv"}
TOTALS = {"sum", "mean"}
LENGTHS = {"norm", "linalg_vector_norm", "vector_norm"}
# What tells nothing about them.
LIKE = {"zeros_like", "ones_like", "empty_like", "new_zeros", "new_full", "new_empty", "new_ones"}
FORM = {"size", "dim", "numel", "element_size", "__len__", "is_floating_point", "get_device"}
FORM_GETTERS = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "requires_grad")
}


class Single(Exception):
    """Somebody looked at a single update."""


class Closed(Tensor):
    """Updates `[m, d]` of which nothing but weighted sums and norms can be had."""

    moved = False  # after that, lengths are no longer those of the updates

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        name = func.__name__
        closed = [argument for argument in args if isinstance(argument, Closed)]
        first = bool(args) and isinstance(args[0], Closed)
        plain = [_opened(argument) for argument in args]
        outcome = func(*plain, **kwargs)

        if func in FORM_GETTERS or name in FORM or name in LIKE:
            return outcome
        if name in CAST:  # of other tensors to the updates' type, too
            if not first:
                return outcome
            return _closed(outcome, closed[0].moved)
        if name in SCALED and len(closed) == 1:
            return _closed(outcome, closed[0].moved)
        if name in MOVED and len(closed) == 1:
            return _closed(outcome, moved=True)
        if name in PRODUCTS and not first:
            return outcome
        if name in TOTALS and _dim(args, kwargs) == 0:
            return outcome
        if name in LENGTHS and _dim(args, kwargs) in (1, -1) and not closed[0].moved:
            return outcome
        if name == "unbind" and not closed[0].moved:
            return [row.as_subclass(Row) for row in outcome]
        raise Single(name)


class Row(Tensor):
    """One update, of which only the length can be had."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        alone = func.__name__ == "norm" or (func.__name__ == "dot" and args[0] is args[1])
        if not alone:
            raise Single(func.__name__)
        if kwargs is None:
            kwargs = {}
        return func(*map(_opened, args), **kwargs)


def _opened(value: Any) -> Any:
    if isinstance(value, Closed | Row):
        return value.as_subclass(Tensor)
    return value


def _closed(delta: Tensor, moved: bool = False) -> Closed:
    closed: Closed = _opened(delta).as_subclass(Closed)
    closed.moved = moved
    return closed


def _dim(args: Any, kwargs: dict[str, Any]) -> Any:
    if "dim" in kwargs:
        return kwargs["dim"]
    numbers = [argument for argument in args[1:] if isinstance(argument, int)]
    if not numbers:
        return None
    return numbers[-1]


def closed_to(rule: Rule) -> Rule:
    """The same rule, whose hooks see closed updates."""
    cls = type(rule)
    hooks = {name: _closing(name, getattr(cls, name)) for name in HOOKS if acts(rule, name)}
    twin: Rule = object.__new__(type(cls.__name__, (cls,), {"__module__": cls.__module__, **hooks}))
    vars(twin).update(vars(rule))
    return twin


def _closing(name: str, hook: Callable[..., Any]) -> Callable[..., Any]:
    def closed(self: Rule, *arguments: Any) -> Any:
        try:
            answer = hook(self, *map(_hidden, arguments))
        except Single as fault:
            operation = str(fault)
            raise AssertionError(
                f"{self.name()} in {name} looks at single updates ({operation}), but says by the "
                "trait sums that weighted sums and norms are all that it needs."
            ) from None
        if isinstance(answer, Reports):
            return changed(answer, delta=_opened(answer.delta))
        after = answer[1] if isinstance(answer, tuple) else answer
        if isinstance(after, Memory):
            kept = [*after.state.values(), *after.rows.values()]
            if any(isinstance(tensor, Closed | Row) for tensor in kept):
                raise AssertionError(
                    f"{self.name()} in {name} remembers single updates, but says by the trait sums "
                    "that weighted sums and norms are all that it needs."
                )
        return answer

    return closed


def _hidden(argument: Any) -> Any:
    if isinstance(argument, Reports):
        return changed(argument, delta=_closed(argument.delta))
    if isinstance(argument, Round) and isinstance(argument.reports, Reports):
        return changed(argument, reports=_hidden(argument.reports))
    return argument
