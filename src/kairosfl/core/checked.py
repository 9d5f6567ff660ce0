"""Rules and detectors of which every call is checked as it happens, for engine `debug`.

A checked rule is the rule: an instance of a subclass that overrides exactly the hooks that the rule
has. So everything that asks for a rule's type, traits, text or hooks gets the same answer.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import cache, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kairosfl.core.answers import ANSWERS, Wrong, check_answer, require
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Layout
from kairosfl.core.rule import (
    Algorithm,
    Detector,
    Finished,
    Memory,
    Plan,
    Round,
    Rule,
    about,
    changed,
)
from kairosfl.core.run import Setup
from kairosfl.core.spec import Spec
from kairosfl.core.traits import Traits
from kairosfl.errors import StageError, first_line

Hook = Callable[..., Any]
S = TypeVar("S", bound=Spec)
SHOWN = 8  # clients that a message lists
DETECTING = ("server", "client", "value", "decide")


def checked(setup: Setup) -> Setup:
    """The same setup, of which every call of a hook is checked: the first that fails, or returns
    what a round cannot go on with, is a `StageError`.

    Args:
        setup: Of a run that has not started.
    """
    rules = tuple(_checked(rule, _rule_class) for rule in setup.algorithm.rules)
    detectors = tuple(_checked(detector, _detector_class) for detector in setup.detectors)
    return changed(setup, algorithm=Algorithm(rules), detectors=detectors)


def _checked(original: S, class_for: Callable[[Any], type[S]]) -> S:
    """The same settings, in a class that checks its hooks."""
    copy = object.__new__(class_for(type(original)))
    vars(copy).update(vars(original))
    return copy


@cache
def _rule_class(cls: Any) -> Any:
    members: dict[str, Any] = {"traits": _traits_of(cls)}
    for hook in ANSWERS:
        if getattr(cls, hook) is not getattr(Rule, hook):
            members[hook] = _rule_hook(hook, getattr(cls, hook))
    return _subclass(cls, members)


@cache
def _detector_class(cls: Any) -> Any:
    members = {hook: _detector_hook(hook, getattr(cls, hook)) for hook in DETECTING}
    return _subclass(cls, members)


def _subclass(cls: type, members: dict[str, Any]) -> Any:
    """A class that goes by the name of `cls`."""
    names = ("__module__", "__qualname__", "__doc__")
    return type(cls.__name__, (cls,), {name: getattr(cls, name) for name in names} | members)


def _traits_of(cls: type[Rule]) -> Hook:
    """The traits, also where they are declared as until 0.2, which is read from the class."""

    def traits(self: Rule) -> Traits:
        original = object.__new__(cls)
        vars(original).update(vars(self))
        return about(original)

    return traits


def _rule_hook(hook: str, method: Hook) -> Hook:
    @wraps(method)
    def checking(self: Rule, *arguments: Any) -> Any:
        answer = _called(self, hook, method, arguments)
        try:
            check_answer(self, hook, arguments, answer)
        except Wrong as fault:
            raise _failure(self, hook, arguments, f"{fault}", answer) from None
        return answer

    return checking


def _detector_hook(hook: str, method: Hook) -> Hook:
    @wraps(method)
    def checking(self: Detector, *arguments: Any) -> Any:
        answer = _called(self, hook, method, arguments)
        try:
            _check_detector(hook, answer)
        except Wrong as fault:
            raise _failure(self, hook, arguments, f"{fault}", answer) from None
        return answer

    return checking


def _check_detector(hook: str, answer: Any) -> None:
    """What a detector must return."""
    if hook == "value":
        require(isinstance(answer, int | float), "does not return a number")
    elif hook == "decide":
        fits = isinstance(answer, tuple) and len(answer) == 2 and isinstance(answer[1], Memory)
        require(fits, "does not return whether the period is critical, and a Memory")
    else:
        require(isinstance(answer, dict), "returns a state that is not a dictionary of tensors")


def _called(part: Rule | Detector, hook: str, method: Hook, arguments: tuple[Any, ...]) -> Any:
    """The answer of a hook; what it raises is the cause of a `StageError`."""
    try:
        return method(part, *arguments)
    except (Finished, StageError):
        raise
    except Exception as error:  # a stranger's code may raise anything
        fault = f"fails{_line(error)} with {type(error).__name__} ({first_line(error)})"
        raise _failure(part, hook, arguments, fault) from error


def _line(error: Exception) -> str:
    """Where in the hook it was raised, as file and line."""
    frames = traceback.extract_tb(error.__traceback__)
    if len(frames) < 2:  # called with the wrong number of arguments: the hook never began
        return ""
    hook = frames[1]
    return f" at {Path(hook.filename).name}:{hook.lineno}"


def _failure(
    part: Rule | Detector, hook: str, arguments: tuple[Any, ...], fault: str, answer: Any = None
) -> StageError:
    now: Round = arguments[-1]
    sentence = f"round {now.number + 1}, {hook} of {part.name()}: it {fault.rstrip('.')}"
    if answer is not None:
        sentence += _spread(answer, now.layout)
    sentence += f". It got {', '.join(_arguments(arguments))}"
    if answer is not None:
        sentence += f"; it returned {shown(answer)}"
    return StageError(f"{sentence}.", stage=hook, round=now.number + 1, part=part.name())


# --- what went in and came out ---


def shown(value: Any) -> str:
    """A value that a hook gets or returns, by its shape."""
    if isinstance(value, Tensor):
        device = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{device}"
    if isinstance(value, Reports):
        return f"{len(value)} reports of {clients(value.ids)} with updates {shown(value.delta)}"
    if isinstance(value, Briefs):
        return f"briefs for {clients(value.ids)} with start {shown(value.start)}"
    if isinstance(value, Plan):
        return f"a plan for {value.size} clients"
    if isinstance(value, Memory):
        return f"state {shown(value.state)} and rows {shown(value.rows)}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name}: {shown(entry)}" for name, entry in value.items()) + "}"
    if isinstance(value, tuple):
        return "(" + ", ".join(map(shown, value)) + ")"
    if isinstance(value, bool | int | float):
        return str(value)
    return f"a {type(value).__name__}"


def clients(ids: Tensor) -> str:
    """Clients by their ids, of many the first ones."""
    numbers = ids.tolist()
    if not numbers:
        return "no client"
    listed = ", ".join(map(str, numbers[:SHOWN]))
    if len(numbers) > SHOWN:
        listed += ", …"
    return f"client{'s' if len(numbers) > 1 else ''} {listed}"


def spread(vector: Tensor, layout: Layout) -> str:
    """How many numbers of a vector `[d]` or of `[m, d]` are not finite, and in which tensors of the
    model; empty if all are.
    """
    bad = ~torch.isfinite(vector)
    count = int(bad.sum())
    if not count:
        return ""
    names = [entry.name for entry in layout.entries if bool(entry.view(bad).any())]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f" ({count:,} of {vector.numel():,} numbers, in {', '.join(names[:3])}{more})"


def _spread(answer: Any, layout: Layout) -> str:
    """The same of the first vector in a hook's answer."""
    for vector in _vectors(answer):
        if vector.is_floating_point() and vector.shape[-1:] == (layout.size,):
            return spread(vector, layout)
    return ""


def _vectors(answer: Any) -> Iterator[Tensor]:
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, Reports):
        yield answer.delta
    elif isinstance(answer, tuple) and answer:
        yield from _vectors(answer[0])


def _arguments(arguments: tuple[Any, ...]) -> Iterator[str]:
    """What a hook got, without what the round has in every call."""
    *values, now = arguments
    for value in values:
        yield shown(value)
    if isinstance(now.reports, Reports) and not any(isinstance(v, Reports) for v in values):
        yield shown(now.reports)
    yield f"x {shown(now.x)}"
