"""Models by name: `build` one, list its `options`, `describe` it.

Add your own to `MODELS`, or by an entry point.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from kairosfl.errors import UserError, nearest
from kairosfl.models.alexnet_vgg import alexnet, vgg11
from kairosfl.models.char_lstm import char_lstm
from kairosfl.models.gpt_neox import gpt_neox
from kairosfl.models.norms import freeze_norms, group_norm
from kairosfl.models.resnet import resnet18, resnet50
from kairosfl.models.small import alt_cnn, aware_cnn, cnn, lenet, logistic, mlp, pfl_cnn
from kairosfl.plugins import Registry

__all__ = [
    "MODELS",
    "Builder",
    "Description",
    "build",
    "describe",
    "freeze_norms",
    "group_norm",
    "options",
]

Builder = Callable[..., nn.Module]
"""builder(shape, classes, *, option=default, ...)

`shape` is that of one sample; options are keyword-only.
"""

MODELS: Registry[Builder] = Registry(
    "kairosfl.models",
    {
        "logistic": logistic,
        "mlp": mlp,
        "lenet": lenet,
        "cnn": cnn,
        "alt_cnn": alt_cnn,
        "aware_cnn": aware_cnn,
        "pfl_cnn": pfl_cnn,
        "alexnet": alexnet,
        "vgg11": vgg11,
        "resnet18": resnet18,
        "resnet50": resnet50,
        "char_lstm": char_lstm,
        "gpt_neox": gpt_neox,
    },
)

# Sample shape and number of classes of the data that each model is typically used with.
_TYPICAL: dict[str, tuple[tuple[int, ...], int]] = {
    "logistic": ((1, 28, 28), 10),
    "mlp": ((1, 28, 28), 10),
    "lenet": ((3, 32, 32), 10),
    "cnn": ((3, 32, 32), 10),
    "alt_cnn": ((3, 32, 32), 10),
    "aware_cnn": ((3, 32, 32), 10),
    "pfl_cnn": ((3, 32, 32), 10),
    "alexnet": ((3, 32, 32), 10),
    "vgg11": ((3, 32, 32), 10),
    "resnet18": ((3, 32, 32), 100),
    "resnet50": ((3, 64, 64), 200),
    "char_lstm": ((80,), 80),
    "gpt_neox": ((100,), 4),
}


@dataclass(frozen=True)
class Description:
    """A one-line summary of a model, with its number of parameters.

    Args:
        name: One of `MODELS`.
        summary: The first line of its docstring.
        shape: The shape of one sample.
        classes: The number of outputs.
        parameters: How many it has for this shape and these classes.
    """

    name: str
    summary: str
    shape: tuple[int, ...]
    classes: int
    parameters: int

    def __str__(self) -> str:
        size = "x".join(map(str, self.shape))
        about = f"{self.parameters:,} parameters ({size}, {self.classes} classes)"
        return f"{self.name}: {self.summary} {about}"


def build(
    name: str, *, shape: tuple[int, ...], classes: int, seed: int, **options: Any
) -> nn.Module:
    """A model on the CPU whose initial parameters depend on nothing but the arguments.

    Args:
        name: One of `MODELS`, such as "mlp" or "resnet18".
        shape: The shape of one sample, such as `(3, 32, 32)`.
        classes: The number of outputs.
        seed: Of the initial parameters.
        **options: Options of the model; `options(name)` lists them with their defaults.
    """
    # Only the CPU's default generator is seeded, and put back: torch.manual_seed would reset every
    # device's.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return _construct(name, shape, classes, options)


def options(name: str) -> dict[str, Any]:
    """The options of a model with their defaults.

    Args:
        name: One of `MODELS`.
    """
    defaults = {}
    for parameter in inspect.signature(_builder(name)).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            defaults[parameter.name] = parameter.default
    return defaults


def describe(
    name: str, *, shape: tuple[int, ...] | None = None, classes: int | None = None, **options: Any
) -> Description:
    """A model's line for a listing; nothing is allocated.

    Args:
        name: One of `MODELS`.
        shape: The shape of one sample, by default that of the data the model is best known for.
        classes: The number of outputs, by default of the same data.
        **options: Options of the model.
    """
    builder = _builder(name)
    typical_shape, typical_classes = _TYPICAL.get(name, (None, None))
    if shape is None:
        shape = typical_shape
    if classes is None:
        classes = typical_classes
    if shape is None or classes is None:
        raise UserError(f"model {name} has no typical data: give shape and classes")
    with torch.device("meta"):
        model = _construct(name, shape, classes, options)
    documentation = inspect.getdoc(builder) or ""
    return Description(
        name=name,
        summary=documentation.partition("\n")[0],
        shape=tuple(shape),
        classes=classes,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
    )


def _builder(name: str) -> Builder:
    if name not in MODELS:
        raise UserError(f"model.name {name!r} is not a model: {nearest(name, MODELS)}")
    return MODELS[name]


def _construct(
    name: str, shape: tuple[int, ...], classes: int, chosen: Mapping[str, Any]
) -> nn.Module:
    """The model with the chosen options, after all arguments were checked."""
    builder = _builder(name)
    if not shape or not all(_accepts(side, int) and side > 0 for side in shape):
        raise UserError(
            f"model {name} needs the shape of one sample, such as (3, 32, 32), got {shape!r}"
        )
    if not _accepts(classes, int) or classes < 1:
        raise UserError(f"model {name} needs at least 1 class, got {classes!r}")
    defaults = options(name)
    hints = _hints(builder)
    arguments = {}
    for key, value in chosen.items():
        if key not in defaults:
            hint = nearest(key, defaults) if defaults else "it has none"
            raise UserError(f"model.{key} is not an option of {name}: {hint}")
        if not _accepts(value, hints.get(key)):
            raise UserError(f"model.{key} of {name} must be {_spell(hints[key])}, got {value!r}")
        arguments[key] = tuple(value) if isinstance(value, list) else value
    return builder(tuple(shape), classes, **arguments)


def _hints(builder: Builder) -> dict[str, Any]:
    """The annotations of a builder; none where they are imported only for type checkers."""
    try:
        return get_type_hints(builder)
    except NameError:
        return {}


def _accepts(value: object, hint: object) -> bool:
    """Whether a value, perhaps read from a file, matches a builder's annotation."""
    if hint is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if hint is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    if get_origin(hint) in (Union, UnionType):
        return any(_accepts(value, member) for member in get_args(hint))
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            return False
        return all(_accepts(element, get_args(hint)[0]) for element in value)
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    return not isinstance(hint, type) or isinstance(value, hint)


def _spell(hint: object) -> str:
    """What a value must be, in words."""
    words = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    if get_origin(hint) in (Union, UnionType):
        # Unions here are "X or None" and "string or path": naming the first member is enough.
        return _spell(get_args(hint)[0])
    if get_origin(hint) is tuple:
        return f"a list, each {_spell(get_args(hint)[0])}"
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if isinstance(hint, type) and hint in words:
        return words[hint]
    return str(hint)
