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
    """What is searched: the algorithm with a rule added to it, and the values of keys and options.

    Args:
        algorithm: The algorithms to choose from.
        add: Rules that are added to them; "" is none.
        keys: The values of each key of the configuration.
        options: The values of options of rules, by names such as "fedavgm.beta".
        fixed: Keys that every trial has, besides those of the file.
        demands: Rules that every trial keeps.
    """

    algorithm: Choice
    add: Choice
    keys: Mapping[str, Domain]
    options: Mapping[str, Domain]
    fixed: Mapping[str, Any]
    demands: Demands = field(default_factory=Demands)

    def suggest(
        self, trial: optuna.Trial, given: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The settings of a trial.

        Args:
            trial: Optuna's, which draws the values.
            given: Values by name, as `own` returns them; only keys whose range contains them are
                set. By default every value is drawn.
        """
        domains = {"algorithm": self.algorithm, "add": self.add, **self.keys}
        drawn = {}
        for name, domain in domains.items():
            if len(domain.ends()) > 1 and _draws(domain, name, given):
                drawn[name] = domain.suggest(trial, name)

        text = self.algorithm.values[0]
        more = self.add.values[0]
        if given:
            text = given.get("algorithm")
            more = ""
        text = drawn.pop("algorithm", text)
        more = drawn.pop("add", more)
        return {**self.fixed, **drawn, "algorithm": self._with_options(trial, text, more, given)}

    def _with_options(
        self, trial: optuna.Trial, text: str, more: str, given: Mapping[str, Any] | None
    ) -> str:
        """The algorithm as text, with the options that are searched; those written out stay."""
        algorithm = parse(text)
        if more and not _kinds(more) & _kinds(text):
            text = f"{text} + {more}"
            try:
                algorithm = self.demands.ordered(algorithm + parse(more))
            except UserError:  # they cannot be combined: the trial will fail with the reason
                return text
        written = _written(text)
        rules = list(algorithm.rules)
        for name, domain in self.options.items():
            kind, _, option = name.partition(".")
            for place, rule in enumerate(rules):
                is_free = rule.name() == kind and (kind, option) not in written
                if is_free and _draws(domain, name, given):
                    drawn: Any = {option: domain.suggest(trial, name)}
                    rules[place] = replace(rule, **drawn)  # type: ignore[type-var]
        return str(Algorithm(tuple(rules)))

    def combined(self, text: str, more: str) -> str:
        """An algorithm with a rule that is added to it, and what is demanded."""
        algorithm = parse(text)
        if more:
            algorithm = self.demands.ordered(algorithm + parse(more))
        return str(algorithm)

    def own(self, config: RunConfig, algorithm: str | None = None) -> dict[str, Any]:
        """The values of a configuration, to be `given`; with another algorithm, if one is named."""
        if algorithm is None:
            algorithm = str(config.algorithm)
        values = flatten(tables(config)) | {"algorithm": algorithm, "add": ""}
        for rule in parse(algorithm).rules:
            for option in dataclasses.fields(rule):  # type: ignore[arg-type]
                values[f"{rule.name()}.{option.name}"] = getattr(rule, option.name)
        return values

    def describe(self) -> dict[str, Any]:
        """As plain values, to compare with and to print."""
        domains = {"algorithm": self.algorithm, "add": self.add, **self.keys, **self.options}
        plain: dict[str, Any] = {}
        for name, domain in domains.items():
            if isinstance(domain, Choice):
                plain[name] = list(domain.values)
            else:
                plain[name] = dataclasses.asdict(domain)
        return plain | dict(self.fixed)


def _draws(domain: Domain, name: str, given: Mapping[str, Any] | None) -> bool:
    """Whether a value is drawn: always, or where the given one is in the range."""
    return given is None or domain.contains(given.get(name))


def _kinds(text: str) -> set[type[Rule]]:
    """The kinds of the rules of an algorithm."""
    return set(map(type, parse(text).rules))


def _written(text: str) -> set[tuple[str, str | None]]:
    """The options that an algorithm's text names, by rule."""
    options: set[tuple[str, str | None]] = set()
    for node in ast.walk(ast.parse(text.strip(), mode="eval")):
        if isinstance(node, ast.Call):
            rule = ast.unparse(node.func)
            options.update((rule, word.arg) for word in node.keywords)
    return options


def defaults(config: RunConfig, shape: Sequence[int]) -> Space:
    """Ranges that make sense for most tasks, and contain the configuration's own values."""
    train = config.train
    rates = (3e-3, 0.5) if train.optimizer == "sgd" else (3e-5, 1e-2)
    epochs = (max(1, train.epochs // 2), 2 * train.epochs + 2)
    keys: dict[str, Domain] = {
        "train.lr": Range(min(rates[0], train.lr), max(rates[1], train.lr), log=True),
        "train.schedule": _choice(("constant", "cosine"), train.schedule),
        "train.epochs": Range(*epochs, log=True, whole=True),
        "train.clip": _choice((0.0, 10.0), train.clip),
        "train.weight_decay": _choice((0.0, 1e-4, 1e-3), train.weight_decay),
    }
    if len(shape) == 3 and shape[0] == 3:  # crops and flips suit colour images
        keys["data.augment"] = Choice((False, True))
    options: dict[str, Domain] = {"fedavgm.beta": Range(0.3, 0.95)}
    for rule in ("fedadam", "fedyogi"):
        options[f"{rule}.lr"] = Range(1e-3, 0.1, log=True)
        options[f"{rule}.tau"] = Range(1e-4, 1e-2, log=True)

    demands = Demands.of(config)
    servers = tuple(dict.fromkeys(map(demands.within, filter(demands.allows, SERVERS))))
    add = ("", "average") if "average" in RULES else ("",)
    return Space(
        algorithm=_choice(servers, str(config.algorithm)),
        add=Choice(tuple(filter(demands.allows, add))),
        keys=keys,
        options=options,
        fixed={},
        demands=demands,
    )


def _choice(values: Sequence[Any], own: Any) -> Choice:
    """One of these values, or the configuration's own."""
    if own in values:
        return Choice(tuple(values))
    return Choice((*values, own))


def overridden(space: Space, table: Any, config: RunConfig) -> Space:
    """The space with what a [tune] table says instead; refused if a value could not be used."""
    if not isinstance(table, Mapping):
        raise UserError(
            f"tune = {table!r} must be a section: write [tune] and the keys to search below."
        )
    keys = dict(space.keys)
    options = dict(space.options)
    fixed = dict(space.fixed)
    chosen = {"algorithm": space.algorithm, "add": space.add}
    for name, value in _flat(table).items():
        section, dot, option = name.partition(".")
        is_key = dot and section in SEARCHED and name != "train.rounds"
        if name in ("algorithm", "add"):
            chosen[name] = Choice(_texts(name, value, space.demands))
        elif dot and section in RULES:
            options[name] = _option(name, section, option, value)
        elif name == "data.augment" or is_key:
            domain = _key(name, value, config)
            keys.pop(name, None)
            if len(domain.ends()) > 1:
                keys[name] = domain
            else:
                fixed[name] = domain.ends()[0]
        else:
            raise UserError(
                f"tune.{name} cannot be searched; use algorithm, add, data.augment, a key of "
                "[train] but rounds, a key of [model], or an option of a rule such as fedavgm.beta."
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
        if isinstance(value, Mapping) and not _RANGE & value.keys():
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _texts(name: str, value: Any, demands: Demands) -> tuple[str, ...]:
    """The algorithms, or the rules to add, that [tune] names."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise UserError(
            f"tune.{name} = {value!r} must be a list of texts such as 'fedavgm' or "
            "'fedprox(mu=0.1)'."
        )
    for text in texts:
        if text or name == "algorithm":
            parse(text)
        demands.check(name, text)
    if name == "algorithm":  # plain averaging always competes
        texts = list(map(demands.within, (PLAIN, *texts)))
    return tuple(dict.fromkeys(texts))


def _key(name: str, value: Any, config: RunConfig) -> Domain:
    """The values of a key of the configuration, each of which must be possible."""
    own = flatten(tables(config)).get(name)
    domain = _domain(name, value, isinstance(own, int) or own is None)
    for end in domain.ends():
        _try(f"tune.{name}", config, {name: end})
    return domain


def _option(name: str, rule: str, option: str, value: Any) -> Domain:
    """The values of an option of a rule, each of which must be possible."""
    kind = RULES[rule]
    options: Any = dataclasses.fields(kind)  # type: ignore[arg-type]
    own = {field.name: field.default for field in options}
    if option not in own:
        raise UserError(f"tune.{name}: {rule} has no option {option!r}; {nearest(option, own)}")
    if issubclass(kind, Rule):
        check_option(name, kind, option)
    default = own[option]
    domain = _domain(name, value, isinstance(default, int) and not isinstance(default, bool))
    for end in domain.ends():
        parse([{"rule": rule, option: end}])
    return domain


def _domain(name: str, value: Any, whole: bool) -> Domain:
    """What [tune] says about one name: a range, several values, or one that is not searched."""
    if isinstance(value, list):
        if not value or not all(isinstance(entry, str | int | float) for entry in value):
            raise UserError(f"tune.{name} = {value!r} must be a list of values to choose from.")
        return Choice(tuple(dict.fromkeys(value)))
    if not isinstance(value, Mapping):
        return Choice((value,))

    low: Any = value.get("low")
    high: Any = value.get("high")
    log = value.get("log", False)
    fits = _is_number(low) and _is_number(high) and isinstance(log, bool)
    if set(value) - _RANGE or not fits:
        raise UserError(
            f"tune.{name} = {dict(value)!r} must be like {{low = 0.01, high = 0.3, log = true}}."
        )
    if not low < high or (log and low <= 0):
        condition = "low below high"
        if log:
            condition = "low below high, and both above 0 with log"
        raise UserError(f"tune.{name} = {dict(value)!r} needs {condition}.")
    return Range(low, high, log, whole and isinstance(low, int) and isinstance(high, int))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _try(name: str, config: RunConfig, settings: Mapping[str, Any]) -> None:
    """Refuse settings that no run could have."""
    try:
        resolve(updated(tables(config), settings))
    except UserError as error:
        raise UserError(f"{name}: {error}") from None
