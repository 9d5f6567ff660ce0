"""What runs of trials may use of a budget, before they have begun and as others end."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.keys import updated
from kairosfl.tasks.task import Task
from kairosfl.tune.budget import Budget
from kairosfl.tune.ledger import Key
from kairosfl.tune.outcomes import Outcome
from kairosfl.tune.price import Price, price
from kairosfl.tune.proposals import Proposals, Trial
from kairosfl.tune.space import Space
from kairosfl.tune.variants import Variants


def check_budget(budget: Budget, space: Space, config: RunConfig, task: Task) -> None:
    """Refuse a budget that is too small; one of bytes is judged by what the algorithms send."""
    planned = 0.0
    most = 0.0
    if budget.kind == "bytes":
        for sent in _prices_of(space, config, task):
            planned = max(planned, sent.vectors)
            most = max(most, sent.most)
    budget.check(config.train.rounds, planned, most)


def _prices_of(space: Space, config: RunConfig, task: Task) -> list[Price]:
    """What the algorithms that are searched send."""
    prices = []
    for algorithm in space.algorithm.values:
        for more in space.add.values:
            with suppress(UserError):  # they cannot be combined
                text = space.combined(algorithm, more)
                prices.append(price(resolve(updated(tables(config), {"algorithm": text})), task))
    return prices


class Prices:
    """What runs may use of a budget, with what is known from those that have ended.

    Args:
        budget: That of the search.
        variants: The configurations and tasks of trials.
        proposals: The trials.
    """

    def __init__(self, budget: Budget, variants: Variants, proposals: Proposals) -> None:
        self.budget = budget
        self.variants = variants
        self.proposals = proposals
        self._alone: dict[Key, Price] = {}

    def of(self, trial: Trial, rounds: int, ended: Iterable[Outcome]) -> float:
        """What a run of a trial may use, if runs with the same rules send as those that ended."""
        if self.budget.kind != "bytes":
            return self.budget.fixed(rounds)
        trials = self.proposals.trials
        rules = _rules_of(trial)
        shares = []
        for outcome in ended:
            other = trials[outcome.trial]
            if outcome.rounds and _rules_of(other) == rules:
                most = self.alone(other, outcome.round).most * outcome.rounds / outcome.round
                shares.append(outcome.bytes / most if most else 0.0)
        return self.alone(trial, rounds).after(shares)

    def of_plain(self, rounds: int, ended: Iterable[Outcome]) -> float:
        """What plain averaging with the file's recipe may use."""
        algorithm = self.proposals.space.demands.plain
        plain = Trial(-1, {"algorithm": algorithm}, {}, plain=True)
        return self.of(plain, rounds, ended)

    def alone(self, trial: Trial, rounds: int) -> Price:
        """What a run of a trial sends by its rules alone; nothing if it is refused."""
        key = (trial.number, rounds)
        if key not in self._alone:
            try:
                config = self.variants.config(trial.settings, rounds)
                self._alone[key] = price(config, self.variants.task(config))
            except UserError:
                self._alone[key] = Price(0.0, 0.0, varies=False)
        return self._alone[key]


def _rules_of(trial: Trial) -> tuple[str, ...]:
    """The names of the rules of a trial."""
    algorithm = trial.settings["algorithm"]
    try:
        return tuple(rule.name() for rule in parse(algorithm).rules)
    except UserError:  # they cannot be combined
        return (str(algorithm),)
