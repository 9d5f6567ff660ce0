"""How a model is called: with a tensor, a tuple or a dict of inputs, and which tensor of its answer
counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kairosfl.errors import UserError, first_line
from kairosfl.tasks.tree import Tree, leaves, shapes

NAMES = (
    "logits",
    "out",
)  # what Hugging Face and torchvision call the tensor that a loss compares with the targets


def call(model: nn.Module, inputs: Tree, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """The output tensor of `model(x)`, `model(*tuple)` or `model(**dict)`, with these weights
    instead of its own.
    """
    positional = (
        inputs if isinstance(inputs, tuple) else () if isinstance(inputs, dict) else (inputs,)
    )
    named: dict[str, Any] = dict(inputs) if isinstance(inputs, dict) else {}
    if getattr(getattr(model, "config", None), "use_cache", None) is True:
        named.setdefault(
            "use_cache", False
        )  # a language model would keep keys and values for generating text
    if weights is None:
        return output(model(*positional, **named), model)
    return output(functional_call(model, dict(weights), positional, named), model)


def attempt(model: nn.Module, inputs: Tree, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """`call`, where samples that were never tried may be ones on which the model fails."""
    try:
        return call(model, inputs, weights)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # the user's forward may raise anything
        reason = first_line(error)
        whole = [leaf for leaf in leaves(inputs) if leaf.dtype == torch.int64 and leaf.numel()]
        ranges = "".join(
            f", whole numbers from {int(leaf.min())} to {int(leaf.max())}" for leaf in whole[:1]
        )
        raise UserError(
            f"The model {type(model).__name__} fails on a batch of shape {shapes(inputs)}{ranges}: {reason}"
        ) from error


def output(answer: Any, model: nn.Module) -> Tensor:
    """The tensor in a model's answer: itself, `logits` or `out` by name, or the first of a tuple."""
    found = answer
    if isinstance(answer, Mapping):
        names = [name for name in NAMES if name in answer] or (
            list(answer) if len(answer) == 1 else []
        )
        found = answer[names[0]] if names else None
    elif isinstance(answer, tuple | list) and answer:
        found = answer[0]
    if isinstance(found, Tensor):
        return found
    kind = type(answer).__name__
    held = f" with {', '.join(map(repr, answer))}" if isinstance(answer, Mapping) else ""
    raise UserError(
        f"The model {type(model).__name__} returns a {kind}{held}; wrap it to return a tensor, a tuple that begins "
        "with one, or a dict with 'logits'."
    )
