"""What a rule says about itself, in one record, and which rules are refused side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

Reads = Literal["clients", "signals", "direction"]
When = Literal["as written", "late", "last"]
WHEN: tuple[When, ...] = ("as written", "late", "last")
NONE: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a rule says about itself. The defaults are right for most rules and safe for all.

    Args:
        when: Whether it selects and steps as written, after those that do, or at the very end.
        adapts: Whether it adapts another algorithm instead of being one, whose direction FedAWARE
        would project.
        server_optimizer: Whether it turns directions into steps; an algorithm has at most one such
        rule.
        needs: What it cannot do without: "mass" (mean gradients, which only local sgd defines),
            "features" (which not every model has).
        reads: What it acts on: reports or rows of single "clients", the detector's answer
            ("signals"), or at most the cohort's "direction". A private rule is combined only with
            rules that do not read clients.
        idle: Whether observe and step are also called in rounds without a usable report.
        private: Whether only what has noise decides anything: rounds without reports then run like
        all others.
        uniform: Whether all clients have equal weight, as in some papers, instead of by their
        samples.
        horizon: Whether it depends on the total number of rounds, so that none can be added later.
        weighs: Whether it weighs clients itself, and by `now.factors`.
        constraint: Whether the problem demands it, so that a search keeps it in every trial.
        sums: Whether weighted sums of the updates and their norms are all that it needs, and never
        a single update.
        late: Whether it is right for answers to an older round's order, because it needs nothing
            that it read when it briefed, or gets it back by `memory.sent`.
        keeps: Fields marked as kept that its briefs use.
        changes: What it changes, in the words of the table of refusals.
        refuses: Why it cannot be combined with a rule that changes this, by what the other changes.
    """

    when: When = "as written"
    adapts: bool = False
    server_optimizer: bool = False
    needs: frozenset[str] = NONE
    reads: Reads = "clients"
    idle: bool = False
    private: bool = False
    uniform: bool = False
    horizon: bool = False
    weighs: bool = False
    constraint: bool = False
    sums: bool = False
    late: bool = False
    keeps: frozenset[str] = NONE
    changes: frozenset[str] = NONE
    refuses: Mapping[str, str] = field(default_factory=dict)


def refused(first: Any, one: Traits, second: Any, two: Traits) -> str | None:
    """Why two rules cannot be combined, or None."""
    if one.server_optimizer and two.server_optimizer:
        return "both are server optimizers, and one would take the other's step for a gradient; leave one of them out"
    for rule, other in ((second, first), (first, second)):
        reason = rule.conflicts_with(other)
        if reason:
            return str(reason)
    return None


class Declarations:
    """What rules said about themselves before there were traits."""

    kind: ClassVar[Literal["base", "adaptive"]] = "base"
    last: ClassVar[bool] = False
    server_optimizer: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    needs_mass: ClassVar[bool] = False
    sees_idle: ClassVar[bool] = False
    own_weights: ClassVar[bool] = False
    private: ClassVar[bool] = False
    constraint: ClassVar[bool] = False
    reads: ClassVar[Reads] = "clients"

    @property
    def uniform(self) -> bool:
        """Whether all clients have equal weight, instead of by their samples."""
        return False

    @property
    def reads_rounds(self) -> bool:
        """Whether its behaviour depends on the total number of rounds, so that none can be added
        later.
        """
        return False

    @property
    def reads_periods(self) -> bool:
        """Whether the detector's answer changes what it does."""
        return self.reads == "signals"

    def conflicts_with(self, other: Any) -> str | None:
        """Why this rule cannot be combined with `other`, or None when it can."""
        return None

    def widened(self, factor: float) -> Any:
        """The same rule for a cohort `factor` times as large, of which not all will be waited for."""
        return self


# Declarations of rules written for 0.2, and the trait that each has become.
_DECLARED = {
    "server_optimizer": "server_optimizer",
    "reads": "reads",
    "sees_idle": "idle",
    "private": "private",
    "uniform": "uniform",
    "reads_rounds": "horizon",
    "own_weights": "weighs",
    "constraint": "constraint",
}


def declared(rule: Any, base: type) -> Traits:
    """The traits of a rule that declares them as attributes, as rules did until 0.2."""
    own = {
        name
        for cls in type(rule).__mro__
        if cls is not base and issubclass(cls, base)
        for name in vars(cls)
    }
    values: dict[str, Any] = {}
    for name, trait in _DECLARED.items():
        if name in own:
            values[trait] = getattr(rule, name)
    needs = {"needs_mass": "mass", "needs_features": "features"}
    values["needs"] = frozenset(
        need for name, need in needs.items() if name in own and getattr(rule, name)
    )
    if "kind" in own:
        values["adapts"] = rule.kind == "adaptive"
    if "last" in own and rule.last:
        values["when"] = "last" if values.get("adapts") else "late"
    return Traits(**values)
