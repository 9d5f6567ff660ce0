"""What the problem demands of every trial, such as privacy, robust rules, limits, a budget.

These rules of the file's algorithm (the trait `constraint`) are not choices. A search over other
algorithms appends them to every proposal, plain averaging too, and refuses proposals that cannot be
combined with them.
"""

from __future__ import annotations

from dataclasses import dataclass

from kairosfl.core.rule import Algorithm, Rule, about
from kairosfl.detectors import parse_detectors
from kairosfl.errors import UserError
from kairosfl.rules import Attack, parse
from kairosfl.runs.config import RunConfig

PLAIN = "fedavg"


def shields(rule: Rule) -> bool:
    """Whether a rule promises privacy to clients."""
    return bool(about(rule).promises)


@dataclass(frozen=True)
class Demands:
    """The rules of the file's algorithm that every trial keeps, in the order of the file."""

    rules: tuple[Rule, ...] = ()
    detector: str = "fgn"

    @classmethod
    def of(cls, config: RunConfig) -> Demands:
        """Those of a configuration."""
        rules = tuple(rule for rule in config.algorithm.rules if about(rule).constraint)
        return cls(rules, config.run.detector)

    @property
    def plain(self) -> str:
        """Plain averaging, with what is demanded."""
        return str(Algorithm(self.rules))

    @property
    def private(self) -> bool:
        """Whether clients are promised privacy."""
        return any(map(shields, self.rules))

    def within(self, text: str) -> str:
        """The text of an algorithm, as it is, with the demanded rules that it lacks."""
        algorithm = parse(text)
        if not algorithm.rules:
            return self.plain
        present = set(map(type, algorithm.rules))
        first = []
        last = []
        for rule in self.rules:
            if type(rule) in present:
                continue
            if isinstance(rule, Attack):
                first.append(str(rule))
            else:
                last.append(str(rule))
        return " + ".join([*first, text, *last])

    def ordered(self, algorithm: Algorithm) -> Algorithm:
        """With the demanded rules after the chosen ones, whose weights `limits` limits.

        `attack` comes before all.
        """
        first: list[Rule] = []
        chosen: list[Rule] = []
        last: list[Rule] = []
        for rule in algorithm.rules:
            if isinstance(rule, Attack):
                first.append(rule)
            elif self._has(rule):
                last.append(rule)
            else:
                chosen.append(rule)
        return Algorithm((*first, *chosen, *last))

    def only(self, text: str) -> str:
        """Plain averaging, with the demanded rules as an algorithm has them."""
        return str(Algorithm(tuple(filter(self._has, parse(text).rules))))

    def _has(self, rule: Rule) -> bool:
        """Whether a rule of this kind is demanded."""
        return type(rule) in map(type, self.rules)

    def is_plain(self, text: str) -> bool:
        """Whether an algorithm is plain averaging with what is demanded."""
        try:
            return text == self.only(text)
        except UserError:  # rules that cannot be combined
            return False

    def allows(self, text: str) -> bool:
        """Whether an algorithm can be combined with the demanded rules."""
        try:
            self._combined(text)
        except UserError:
            return False
        return True

    def check(self, name: str, text: str) -> None:
        """Refuse an algorithm of [tune] that does not agree with what is demanded."""
        demanded = {type(rule): rule for rule in self.rules}
        for rule in parse(text).rules if text else ():
            asked_for = demanded.get(type(rule))
            if asked_for is not None and asked_for != rule:
                raise UserError(
                    f"tune.{name}: {text!r} has {rule}, but every trial keeps the file's "
                    f"{asked_for}; leave {rule.name()} out of tune.{name}, or out of the file's "
                    "algorithm."
                )
            if asked_for is None and shields(rule):
                raise UserError(
                    f"tune.{name}: {text!r} would compete with trials that are not private, since "
                    f"the file's algorithm has no {rule.name()}; write it into algorithm, and "
                    "every trial has it."
                )
        try:
            self._combined(text)
        except UserError as error:
            raise UserError(
                f"tune.{name}: {text!r} cannot be tried with what the file's algorithm demands, "
                f"{self.plain}: {error}"
            ) from None

    def _combined(self, text: str) -> None:
        if not self.rules:
            return
        combined = self.ordered(parse(self.within(text if text else PLAIN)))
        combined.check_detectors(parse_detectors(self.detector))


def check_option(name: str, rule: type[Rule], option: str) -> None:
    """Refuse to search for what is promised to clients."""
    if option in about(rule()).promises:
        raise UserError(
            f"tune.{name} is a promise to the clients, of which a search would choose the weakest; "
            "set it in the file's algorithm."
        )
