"""What is searched: default ranges around a configuration, and those of its [tune] table.

    [tune]
    algorithm = ["fedavgm", "fedadam + fedcl"]       # one of these
    add = ["", "fedprox"]                            # a rule that is added to it, or none
    train.lr = {low = 0.01, high = 0.3, log = true}  # a range
    train.schedule = ["constant", "cosine"]          # one of these
    train.clip = 10.0                                # not searched
    fedavgm.beta = {low = 0.5, high = 0.95}          # an option of a rule

What it does not name keeps its default range. What the file's algorithm demands stays in every
trial: `demands.py`.
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kairosfl.core.rule import Algorithm, Rule
from kairosfl.errors import UserError, nearest
from kairosfl.rules import RULES, parse
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.keys import flatten, updated
from kairosfl.tune.demands import PLAIN, Demands, check_option

if TYPE_CHECKING:
    import optuna

SERVERS = (PLAIN, "fedavgm", "fedadam", "fedyogi")
SEARCHED = ("train", "model")  # sections whose keys can be searched, and data.augment
_RANGE = {"low", "high", "log"}


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def contains(self, value: Any) -> bool:
        """Whether it is one of them."""
        return isinstance(value, int | float) and self.low <= value <= self.high

    def ends(self) -> tuple[Any, ...]:
        """The values to check before anything runs."""
        return (self.low, self.high)

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """A value, as Optuna proposes it."""
        if self.whole:
            return trial.suggest_int(name, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(name, self.low, self.high, log=self.log)


@dataclass(frozen=True)
class Choice:
    """One of several values."""

    values: tuple[Any, ...]

    def contains(self, value: Any) -> bool:
        """Whether it is one of them."""
        return value in self.values

    def ends(self) -> tuple[Any, ...]:
        """The values to check before anything runs."""
        return self.values

    def suggest(self, trial: optuna.Trial, name: str) -> Any:
        """A value, as Optuna proposes it."""
        return trial.suggest_categorical(name, self.values)


Domain = Range | Choice


@dataclass(frozen=True)
class Space:
    """What is searched: the algorithm, a rule added to it, keys of the configuration, and options
    of rules.
    """

    algorithm: Choice
    add: Choice
    keys: Mapping[str, Domain]
    options: Mapping[str, Domain]  # "fedavgm.beta"
    fixed: Mapping[str, Any]  # keys that every trial has, besides those of the file
    demands: Demands = field(default_factory=Demands)  # rules that every trial keeps

    def suggest(
        self, trial: optuna.Trial, given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The settings of a trial. Where values are `given`, only keys whose range contains them
        are set.
        """
        drawn = {
            name: domain.suggest(trial, name)
            for name, domain in {"algorithm": self.algorithm, "add": self.add, **self.keys}.items()
            if len(domain.ends()) > 1 and (given is None or domain.contains(given.get(name)))
        }
        text = drawn.pop("algorithm", given.get("algorithm") if given else self.algorithm.values[0])
        more = drawn.pop("add", "" if given else self.add.values[0])
        return {**self.fixed, **drawn, "algorithm": self._with_options(trial, text, more, given)}

    def _with_options(
        self, trial: optuna.Trial, text: str, more: str, given: Mapping[str, Any] | None
    ) -> str:
        """The algorithm as text, with the options that are searched; those that are written out
        stay.
        """
        whole = parse(text)
        if more and not {type(rule) for rule in parse(more).rules} & {
            type(rule) for rule in whole.rules
        }:
            text = f"{text} + {more}"
            try:
                whole = self.demands.ordered(whole + parse(more))
            except UserError:  # they cannot be combined: the trial will fail with the reason
                return text
        written = _written(text)
        rules = list(whole.rules)
        for name, domain in self.options.items():
            rule, _, option = name.partition(".")
            for place, each in enumerate(rules):
                free = each.name() == rule and (rule, option) not in written
                if free and (given is None or domain.contains(given.get(name))):
                    rules[place] = replace(each, **{option: domain.suggest(trial, name)})  # type: ignore[type-var]
        return str(Algorithm(tuple(rules)))

    def combined(self, text: str, more: str) -> str:
        """An algorithm with a rule that is added to it, and what is demanded."""
        whole = parse(text)
        return str(self.demands.ordered(whole + parse(more)) if more else whole)

    def own(self, config: RunConfig, algorithm: str | None = None) -> dict[str, Any]:
        """The values of a configuration, to be `given`; with another algorithm, if one is named."""
        chosen = str(config.algorithm) if algorithm is None else algorithm
        options = {
            f"{rule.name()}.{field.name}": getattr(rule, field.name)
            for rule in parse(chosen).rules
            for field in dataclasses.fields(rule)  # type: ignore[arg-type]
        }
        return flatten(tables(config)) | {"algorithm": chosen, "add": ""} | options

    def describe(self) -> dict[str, Any]:
        """As plain values, to compare with and to print."""
        domains = {"algorithm": self.algorithm, "add": self.add, **self.keys, **self.options}
        shown = {
            name: list(d.values) if isinstance(d, Choice) else dataclasses.asdict(d)
            for name, d in domains.items()
        }
        return shown | dict(self.fixed)


def _written(text: str) -> set[tuple[str, str | None]]:
    """The options that an algorithm's text names, by rule."""
    calls = [
        node
        for node in ast.walk(ast.parse(text.strip(), mode="eval"))
        if isinstance(node, ast.Call)
    ]
    return {(ast.unparse(call.func), word.arg) for call in calls for word in call.keywords}


def defaults(config: RunConfig, shape: Sequence[int]) -> Space:
    """Ranges that make sense for most tasks, wide enough to contain the configuration's own values."""
    train = config.train
    low, high = (3e-3, 0.5) if train.optimizer == "sgd" else (3e-5, 1e-2)
    keys: dict[str, Domain] = {
        "train.lr": Range(min(low, train.lr), max(high, train.lr), log=True),
        "train.schedule": _choice(("constant", "cosine"), train.schedule),
        "train.epochs": Range(
            max(1, train.epochs // 2), 2 * train.epochs + 2, log=True, whole=True
        ),
        "train.clip": _choice((0.0, 10.0), train.clip),
        "train.weight_decay": _choice((0.0, 1e-4, 1e-3), train.weight_decay),
    }
    if len(shape) == 3 and shape[0] == 3:  # crops and flips suit colour images
        keys["data.augment"] = Choice((False, True))
    adaptive = {"lr": Range(1e-3, 0.1, log=True), "tau": Range(1e-4, 1e-2, log=True)}
    options: dict[str, Domain] = {"fedavgm.beta": Range(0.3, 0.95)}
    options |= {
        f"{rule}.{name}": domain
        for rule in ("fedadam", "fedyogi")
        for name, domain in adaptive.items()
    }
    add = ("", "average") if "average" in RULES else ("",)
    demands = Demands.of(config)
    servers = dict.fromkeys(demands.within(text) for text in SERVERS if demands.allows(text))
    added = tuple(text for text in add if demands.allows(text))
    return Space(
        algorithm=_choice(tuple(servers), str(config.algorithm)),
        add=Choice(added),
        keys=keys,
        options=options,
        fixed={},
        demands=demands,
    )


def _choice(values: Sequence[Any], own: Any) -> Choice:
    return Choice((*values, *(() if own in values else (own,))))


def overridden(space: Space, table: Any, config: RunConfig) -> Space:
    """The space with what a [tune] table says instead; refused if a value could not be used."""
    if not isinstance(table, Mapping):
        raise UserError(
            f"tune = {table!r} must be a section: write [tune] and the keys to search below."
        )
    keys, options, fixed = dict(space.keys), dict(space.options), dict(space.fixed)
    chosen = {"algorithm": space.algorithm, "add": space.add}
    for name, value in _flat(table).items():
        section, dot, option = name.partition(".")
        if name in ("algorithm", "add"):
            chosen[name] = Choice(_texts(name, value, space.demands))
        elif dot and section in RULES:
            options[name] = _option(name, section, option, value)
        elif name == "data.augment" or (dot and section in SEARCHED and name != "train.rounds"):
            own = flatten(tables(config)).get(name)
            domain = _domain(name, value, isinstance(own, int) or own is None)
            for each in domain.ends():
                _try(f"tune.{name}", config, {name: each})
            keys.pop(name, None)
            if len(domain.ends()) > 1:
                keys[name] = domain
            else:
                fixed[name] = domain.ends()[0]
        else:
            raise UserError(
                f"tune.{name} cannot be searched; use algorithm, add, data.augment, a key of [train] but rounds, "
                f"a key of [model], or an option of a rule such as fedavgm.beta."
            )
    return replace(
        space,
        algorithm=chosen["algorithm"],
        add=chosen["add"],
        keys=keys,
        options=options,
        fixed=fixed,
    )


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted keys; a table of `low` and `high` is a value."""
    flat: dict[str, Any] = {}
    for key, value in table.items():
        nested = isinstance(value, Mapping) and not _RANGE & value.keys()
        flat |= _flat(value, f"{prefix}{key}.") if nested else {f"{prefix}{key}": value}
    return flat


def _texts(name: str, value: Any, demands: Demands) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"tune.{name} = {value!r} must be a list of texts such as 'fedavgm' or 'fedprox(mu=0.1)'."
        )
    for text in texts:
        if text or name == "algorithm":
            parse(text)
        demands.check(name, text)
    if name == "add":
        return tuple(dict.fromkeys(texts))
    return tuple(
        dict.fromkeys(demands.within(text) for text in (PLAIN, *texts))
    )  # plain averaging always competes


def _option(name: str, rule: str, option: str, value: Any) -> Domain:
    kind = RULES[rule]
    fields = {field.name: field.default for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if option not in fields:
        raise UserError(f"tune.{name}: {rule} has no option {option!r}; {nearest(option, fields)}")
    if issubclass(kind, Rule):
        check_option(name, kind, option)
    domain = _domain(
        name, value, isinstance(fields[option], int) and not isinstance(fields[option], bool)
    )
    for each in domain.ends():
        parse([{"rule": rule, option: each}])
    return domain


def _domain(name: str, value: Any, whole: bool) -> Domain:
    if isinstance(value, list):
        if not value or not all(isinstance(each, str | int | float) for each in value):
            raise UserError(f"tune.{name} = {value!r} must be a list of values to choose from.")
        return Choice(tuple(dict.fromkeys(value)))
    if not isinstance(value, Mapping):
        return Choice((value,))
    wrong = set(value) - _RANGE
    numbers = [value.get(end) for end in ("low", "high")]
    fits = all(isinstance(each, int | float) and not isinstance(each, bool) for each in numbers)
    if wrong or not fits or not isinstance(value.get("log", False), bool):
        raise UserError(
            f"tune.{name} = {dict(value)!r} must be like {{low = 0.01, high = 0.3, log = true}}."
        )
    low, high = value["low"], value["high"]
    if not low < high or (value.get("log") and low <= 0):
        rule = "low below high, and both above 0 with log" if value.get("log") else "low below high"
        raise UserError(f"tune.{name} = {dict(value)!r} needs {rule}.")
    return Range(
        low, high, value.get("log", False), whole and isinstance(low, int) and isinstance(high, int)
    )


def _try(name: str, config: RunConfig, settings: Mapping[str, Any]) -> None:
    try:
        resolve(updated(tables(config), settings))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
