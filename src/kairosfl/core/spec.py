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
    """A frozen dataclass of keyword-only options that prints as the text it is parsed from."""

    @classmethod
    def name(cls) -> str:
        """Its name in text: the class name in lower case.

        Of a class that is not part of kairosfl, it is the class name with the module in front.
        """
        if cls.__module__.startswith("kairosfl."):
            return cls.__name__.lower()
        return f"{cls.__module__}.{cls.__name__}"

    def __str__(self) -> str:
        options = []
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if value != field.default:
                options.append(f"{field.name}={value!r}")
        if not options:
            return self.name()
        return f"{self.name()}({', '.join(options)})"

    def check_finite(self) -> None:
        """Refuse numbers that are infinite or not a number."""
        if not dataclasses.is_dataclass(self):
            return
        for name, value in _settings(self).items():
            finite = not isinstance(value, float) or math.isfinite(value)
            self.check(name, finite, "use a finite number")

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
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in options:
            raise UserError(
                f"{name} needs {field.name}: write {name}({field.name}=...), or give it a default."
            )
    spec = cls(**options)
    spec.check_finite()
    return spec


def missing(kind: str, name: str, known: Collection[str]) -> UserError:
    """What to say of a name that is not known."""
    return UserError(
        f"There is no {kind} {name!r}; {nearest(name, {*known, *EMPTY.get(kind, ())})}"
    )


def parse(
    kind: str, text: str, known: Mapping[str, type[Spec]], allow: Collection[str] = ()
) -> tuple[Spec, ...]:
    """`a(x=1) + b` as objects.

    Names with dots are presets (`fedcl.released()`) or imports (`my.rules.Mine()`).
    """
    try:
        specs = []
        for term in _terms(_tree(kind, text)):
            specs.append(_object(kind, term, text, known, allow))
        return tuple(specs)
    except RecursionError:  # the parser goes deeper than what walks its tree
        raise _unreadable(kind, text) from None


def heads(kind: str, text: str) -> list[str]:
    """The names in `a(x=1) + b`, whatever they mean."""
    try:
        names = []
        for term in _terms(_tree(kind, text)):
            head = term.func if isinstance(term, ast.Call) else term
            names.append(ast.unparse(head))
        return names
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
    options: Any = dataclasses.fields(spec)  # type: ignore[arg-type]
    return {field.name: getattr(spec, field.name) for field in options}


def _presets(cls: type) -> list[str]:
    return [name for name, value in vars(cls).items() if isinstance(value, classmethod)]


def _value(kind: str, node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name) and node.id.lower() in _WORDS:
        return _WORDS[node.id.lower()]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, MemoryError, RecursionError):
        raise UserError(
            f"{kind} = {text!r}: {_source(node)} is not a value; "
            "use a number, a 'word' or true/false."
        ) from None


def _source(node: ast.expr) -> str:
    """The text of a node, quoted."""
    try:
        return repr(ast.unparse(node))
    except (ValueError, RecursionError):  # a whole number of thousands of digits, or deep nesting
        return "one of its options"


def _import(kind: str, name: str, allow: Collection[str]) -> type[Spec]:
    module, _, attribute = name.rpartition(".")
    inside = any(f"{module}.".startswith(f"{package}.") for package in ("kairosfl", *allow))
    if not inside and module not in sys.modules:
        raise UserError(
            f"The {kind} {name!r} is in the module {module!r}, which text does not import unless "
            f'it is allowed; write allow = ["{module}"] under [run], or import it first.'
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
            f"{name} is not a dataclass; write @dataclass(frozen=True, kw_only=True) above its "
            "class."
        )
    return cls


def _check_type(name: str, option: str, value: Any, default: Any) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(
            f"{name}: {option} = {shown(value)} is too large; whole numbers go up to 2^63 - 1."
        )
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    fits = True
    expected = ""
    if type(default) is bool:
        fits = isinstance(value, bool)
        expected = "true or false"
    elif type(default) is int:
        fits = is_number and float(value).is_integer()
        expected = "a whole number"
    elif type(default) is float:
        fits = is_number
        expected = "a number"
    elif type(default) is str:
        fits = isinstance(value, str)
        expected = "a word"
    if not fits:
        raise UserError(
            f"{name}: {option} = {shown(value)} is not {expected}; its default is {default!r}."
        )
