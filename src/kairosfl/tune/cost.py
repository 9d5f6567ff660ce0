"""What the private runs of a search cost their clients together: the costs of all add up."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import Tensor

from kairosfl.core.rule import Rule
from kairosfl.errors import UserError
from kairosfl.rules import LocalPrivacy, Privacy, accounting
from kairosfl.runs.checkpoint import states
from kairosfl.runs.folder import Folder
from kairosfl.wording import counted


@dataclass(frozen=True)
class Cost:
    """The ε that several runs have spent, at a δ; `one` is a rule's, for one run or report."""

    name: str  # as metrics.jsonl has it
    epsilon: float
    delta: float
    one: float
    runs: int

    def sentence(self) -> str:
        """For the terminal and the report."""
        runs = f"{counted(self.runs, 'run')} of this search"
        spent = f"epsilon = {self.epsilon:.3g} at delta = {self.delta:g}"
        if self.name.startswith("hypothetical"):
            spent = f"hypothetical {spent}"
        if self.name == "local_epsilon":
            return (
                f"local privacy: the {runs} asked the same clients for reports of epsilon = "
                f"{self.one:g} each, and together cost a client at most {spent}; "
                "a run of best.toml adds to it."
            )
        return (
            f"privacy: the {runs} trained on the same clients and together cost {spent}, "
            f"where the file allows {self.one:g} for one run; a run of best.toml adds to it."
        )


def costs(folders: Iterable[Path]) -> list[Cost]:
    """What the runs in these folders cost together, for each private rule that they have."""
    spent: dict[type[Rule], list[tuple[Rule, dict[str, Tensor]]]] = {Privacy: [], LocalPrivacy: []}
    for path in folders:
        if not (path / "config.toml").is_file():
            continue
        rules = Folder(path).config().algorithm.rules
        if not any(isinstance(rule, Privacy | LocalPrivacy) for rule in rules):
            continue
        try:
            remembered = states(path)
        except UserError:  # it was stopped before its first checkpoint
            continue
        for number, rule in enumerate(rules):
            if type(rule) in spent:
                spent[type(rule)].append((rule, remembered.get(number, {})))
    both = (_central(spent[Privacy]), _local(spent[LocalPrivacy]))
    return [cost for cost in both if cost is not None]


def _central(runs: Collection[tuple[Rule, dict[str, Tensor]]]) -> Cost | None:
    """Rényi divergences of independent noise add up, order by order."""
    rules = []
    spent = []
    for rule, state in runs:
        if "spent" in state and float(state["spent"].max()) > 0:
            rules.append(rule)
            spent.append(state["spent"].numpy())
    if not rules:
        return None
    first = rules[0]
    assert isinstance(first, Privacy)
    name = "hypothetical_epsilon" if first.hypothetical else "epsilon"
    epsilon = accounting.running(np.sum(spent, axis=0), first.delta)
    return Cost(name, epsilon, first.delta, first.epsilon, len(rules))


def _local(runs: Collection[tuple[Rule, dict[str, Tensor]]]) -> Cost | None:
    """The reports of the client with the most, in every run, as if it were always the same one."""
    begun = []
    reports = 0
    for rule, state in runs:
        if int(state.get("most", 0)):
            begun.append((rule, state))
            reports += int(state["most"])
    if not begun:
        return None

    # With the same ε and δ, noise is the same multiple of the length of updates, also where trials
    # clip differently.
    rule, state = begun[0]
    assert isinstance(rule, LocalPrivacy)
    epsilon = rule.total(float(state["noise"]), reports)
    return Cost("local_epsilon", epsilon, rule.delta, rule.epsilon, len(begun))
