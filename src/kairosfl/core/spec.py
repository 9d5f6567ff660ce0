"""Text for frozen dataclasses: `name(option=0.1)` and back, for rules and detectors alike."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

from kairosfl.errors import UserError, nearest, shown

_WORDS = {"true": True, "false": False, "none": None}


class Spec:
    """A frozen dataclass of keyword-only hyper-parameters that prints as the text it is parsed
    from.
    """

    @classmethod
    def name(cls) -> str:
        """Its name in text: the class name in lower case, with the module in front unless it is
        part of kairosfl.
        """
        return (
            cls.__name__.lower()
            if cls.__module__.startswith("kairosfl.")
            else f"{cls.__module__}.{cls.__name__}"
        )

    def __str__(self) -> str:
        shown = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                shown.append(f"{field.name}={value!r}")
        return self.name() + (f"({', '.join(shown)})" if shown else "")

    def check_finite(self) -> None:
        """Refuse numbers that are infinite or not a number."""
        options: dict[str, Any] = _settings(self) if dataclasses.is_dataclass(self) else {}
        for name, value in options.items():
            self.check(
                name, not isinstance(value, float) or math.isfinite(value), "use a finite number"
            )

    def check(self, field: str, holds: bool, fix: str) -> None:
        """Refuse a hyper-parameter with the field, the value and the fix."""
        if not holds:
            value = shown(getattr(self, field))
            raise UserError(f"{self.name()}: {field} = {value} is not allowed; {fix}.")


EMPTY = {"rule": ("fedavg",)}  # names of the empty sum
# Of each kind, for messages: one with an option and another; `kairosfl.names` has better ones.
EXAMPLES = dict.fromkeys(("rule", "detector"), ("name(option=0.1)", "other"))
EXAMPLES |= {
    "fleet.devices": ("lognormal(sigma=1.0)", "equal()"),
    "fleet.availability": ("bernoulli(p=0.5)", "always"),
}


def build(
    kind: str,
    name: str,
    options: Mapping[str, Any],
    known: Mapping[str, type[Spec]],
    allow: Collection[str] = (),
) -> Spec:
    """The object of that name with those options; a UserError says what is wrong with them.

    A dotted name imports its module only if that is one of `allow`, or inside one: text may come
    from anybody.
    """
    base, _, preset = name.rpartition(".")
    if name in known:
        cls = _checked(kind, name, known[name])
    elif base in known:
        cls = _checked(kind, base, known[base])
        if not isinstance(vars(cls).get(preset), classmethod):
            raise UserError(f"{base} has no preset {preset!r}; {nearest(preset, _presets(cls))}")
        options = {**_settings(getattr(cls, preset)()), **options}
    elif "." in name:
        cls = _import(kind, name, allow)
    else:
        raise missing(kind, name, known)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for option, value in options.items():
        if option not in fields:
            raise UserError(f"{name} has no option {option!r}; {nearest(option, fields)}")
        _check_type(name, option, value, fields[option].default)
    for field in fields.values():
        if (
            field.default is field.default_factory is dataclasses.MISSING
            and field.name not in options
        ):
            raise UserError(
                f"{name} needs {field.name}: write {name}({field.name}=...), or give it a default."
            )
    made = cls(**options)
    made.check_finite()
    return made


def missing(kind: str, name: str, known: Collection[str]) -> UserError:
    """What to say of a name that is not known."""
    return UserError(
        f"There is no {kind} {name!r}; {nearest(name, {*known, *EMPTY.get(kind, ())})}"
    )


def parse(
    kind: str, text: str, known: Mapping[str, type[Spec]], allow: Collection[str] = ()
) -> tuple[Spec, ...]:
    """`a(x=1) + b` as objects. Names with dots are presets (`fedcl.released()`) or imports
    (`my.rules.Mine()`).
    """
    try:
        return tuple(_object(kind, term, text, known, allow) for term in _terms(_tree(kind, text)))
    except RecursionError:  # the parser goes deeper than what walks its tree
        raise _unreadable(kind, text) from None


def heads(kind: str, text: str) -> list[str]:
    """The names in `a(x=1) + b`, whatever they mean."""
    try:
        terms = _terms(_tree(kind, text))
        return [ast.unparse(term.func if isinstance(term, ast.Call) else term) for term in terms]
    except RecursionError:
        raise _unreadable(kind, text) from None


def _tree(kind: str, text: str) -> ast.expr:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _unreadable(kind, text) from None


def _unreadable(kind: str, text: str) -> UserError:
    return UserError(
        f"{kind} = {text!r} cannot be read; write it like '{' + '.join(EXAMPLES[kind])}'."
    )


def _terms(tree: ast.expr) -> list[ast.expr]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return [*_terms(tree.left), *_terms(tree.right)]
    return [tree]


def _object(
    kind: str, term: ast.expr, text: str, known: Mapping[str, type[Spec]], allow: Collection[str]
) -> Spec:
    options: dict[str, Any] = {}
    head = term
    if isinstance(term, ast.Call):
        head = term.func
        if term.args:
            raise UserError(f"{kind} = {text!r}: name every option, as in '{EXAMPLES[kind][0]}'.")
        for word in term.keywords:
            if word.arg in options:
                raise UserError(f"{kind} = {text!r}: {word.arg} appears twice; name it once.")
            options[str(word.arg)] = _value(kind, word.value, text)
    return build(kind, ast.unparse(head), options, known, allow)


def _settings(spec: Spec) -> dict[str, Any]:
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}  # type: ignore[arg-type]


def _presets(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if isinstance(value, classmethod)]


def _value(kind: str, node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(
            f"{kind} = {text!r}: {_source(node)} is not a value; use a number, a 'word' or true/false."
        ) from None


def _source(node: ast.expr) -> str:
    """The text of a node, quoted."""
    try:
        return repr(ast.unparse(node))
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or deep nesting
        return "one of its options"


def _import(kind: str, name: str, allow: Collection[str]) -> type[Spec]:
    module, _, attribute = name.rpartition(".")
    ours = module in sys.modules or any(
        f"{module}.".startswith(f"{each}.") for each in ("kairosfl", *allow)
    )
    if not ours:
        raise UserError(
            f"The {kind} {name!r} is in the module {module!r}, which text does not import unless it is allowed; write "
            f'allow = ["{module}"] under [run], or import it first.'
        )
    try:
        cls = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"The {kind} {name!r} cannot be imported ({error}); is it on the Python path?"
        ) from None
    return _checked(kind, name, cls)


def _checked(kind: str, name: str, cls: Any) -> type[Spec]:
    if not (isinstance(cls, type) and issubclass(cls, Spec)):
        raise UserError(
            f"{name!r} is not a {kind}; give the dotted name of a class derived from it."
        )
    if not dataclasses.is_dataclass(cls):
        raise UserError(
            f"{name} is not a dataclass; write @dataclass(frozen=True, kw_only=True) above its class."
        )
    return cls


def _check_type(name: str, option: str, value: Any, default: Any) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(
            f"{name}: {option} = {shown(value)} is too large; whole numbers go up to 2^63 - 1."
        )
    number = isinstance(value, int | float) and not isinstance(value, bool)
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a word"}.get(
        type(default)
    )
    fits = {
        bool: isinstance(value, bool),
        int: number and float(value).is_integer(),
        float: number,
        str: isinstance(value, str),
    }.get(type(default), True)
    if not fits:
        raise UserError(
            f"{name}: {option} = {shown(value)} is not {wanted}; its default is {default!r}."
        )
