"""Which parameters of a model never leave their client."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from kairosfl.errors import UserError
from kairosfl.tasks.vector import trained


def own_names(model: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """The names of the trained parameters that never leave a client.

    Args:
        model: The model.
        patterns: Names, or shell patterns of names such as "head.*".

    Raises:
        UserError: Names the pattern that fits nothing, and the parameter that cannot be a client's
            own.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shared = set(trained(model))
    chosen: set[str] = set()
    for pattern in patterns:
        named = {name for name in parameters if fnmatchcase(name, pattern)}
        if not named:
            raise UserError(_nothing(model, pattern))
        chosen |= named
    _check_frozen(model, patterns, chosen)
    _check_tied(model, patterns, chosen)
    if chosen and shared <= chosen:
        raise UserError(f"own = {list(patterns)} leaves nothing to share; leave some out.")
    return frozenset(chosen & shared)


def _nothing(model: nn.Module, pattern: str) -> str:
    """That a pattern is the name of no parameter."""
    for name, _ in model.named_buffers():
        if fnmatchcase(name, pattern):
            return (
                f"own = {pattern!r} names {name!r}, a buffer, which is not trained and the same on "
                "every client; leave it out."
            )
    listed = ", ".join(trained(model))
    return f"own = {pattern!r} is the name of no trained parameter; there are {listed}."


def _check_frozen(model: nn.Module, patterns: Sequence[str], chosen: set[str]) -> None:
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in chosen and not parameter.requires_grad:
            raise UserError(
                f"own = {list(patterns)} names {name!r}, which is frozen and therefore the same on "
                "every client; leave it out, or train it (requires_grad_(True))."
            )


def _check_tied(model: nn.Module, patterns: Sequence[str], chosen: set[str]) -> None:
    """Refuse one name of a tensor that has several, of which others would be shared."""
    names: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    for tied in names.values():
        own = [name for name in tied if name in chosen]
        others = [name for name in tied if name not in chosen]
        if own and others:
            raise UserError(
                f"own = {list(patterns)} names {own[0]!r}, but {others[0]!r} is the same tensor "
                "(tied weights) and would be shared; name both, or neither."
            )
