"""How a model is called with its inputs, and which tensor of its answer counts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kairosfl.errors import UserError, first_line
from kairosfl.tasks.tree import Tree, leaves, shapes

# What Hugging Face and torchvision call the tensor that a loss compares with the targets.
NAMES = ("logits", "out")


def call(model: nn.Module, inputs: Tree, weights: Mapping[str, Tensor] | None = None) -> Tensor:
    """The output tensor of `model(x)`, `model(*tuple)` or `model(**dict)`.

    `weights` take the place of the model's own.
    """
    positional: tuple[Tensor, ...] = ()
    named: dict[str, Any] = {}
    if isinstance(inputs, tuple):
        positional = inputs
    elif isinstance(inputs, dict):
        named = dict(inputs)
    else:
        positional = (inputs,)

    # A language model would keep keys and values for generating text.
    if getattr(getattr(model, "config", None), "use_cache", None) is True:
        named.setdefault("use_cache", False)

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
        raise UserError(
            f"The model {type(model).__name__} fails on a batch of shape "
            f"{shapes(inputs)}{_token_range(inputs)}: {reason}"
        ) from error


def _token_range(inputs: Tree) -> str:
    """The range of the first whole numbers among the inputs, for the end of a sentence."""
    for leaf in leaves(inputs):
        if leaf.dtype == torch.int64 and leaf.numel():
            return f", whole numbers from {int(leaf.min())} to {int(leaf.max())}"
    return ""


def output(answer: Any, model: nn.Module) -> Tensor:
    """The tensor in a model's answer: itself, `logits` or `out`, or the first of a tuple."""
    tensor = _part_of(answer)
    if isinstance(tensor, Tensor):
        return tensor
    names = ""
    if isinstance(answer, Mapping):
        names = f" with {', '.join(map(repr, answer))}"
    raise UserError(
        f"The model {type(model).__name__} returns a {type(answer).__name__}{names}; wrap it to "
        "return a tensor, a tuple that begins with one, or a dict with 'logits'."
    )


def _part_of(answer: Any) -> Any:
    """The part of an answer that should be the tensor; None where no name says which."""
    if isinstance(answer, Mapping):
        for name in NAMES:
            if name in answer:
                return answer[name]
        if len(answer) == 1:
            (name,) = answer
            return answer[name]
        return None
    if isinstance(answer, tuple | list) and answer:
        return answer[0]
    return answer
