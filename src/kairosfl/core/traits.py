"""What a rule says about itself, in one record."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from kairosfl.core.fields import Reports, fields
from kairosfl.errors import UserError, nearest

Reads = Literal["clients", "signals", "direction"]
When = Literal["first", "as written", "late", "last"]
WHEN: tuple[When, ...] = ("first", "as written", "late", "last")
NONE: frozenset[str] = frozenset()

# What rules change, as far as other rules may not. `refusals.py` says which two are refused.
WORDS = {
    "size": "how many clients a round asks for",
    "total": "how many clients the whole run asks for",
    "visits": "which clients take part, by a plan of its own",
    "starts": "where clients start, each elsewhere",
    "drift": "what a client's gradients differ by from the others'",
    "gradients": "every gradient of a client, by a correction",
    "steps": "every step of a client, by a correction",
    "descent": "what clients minimise, so that their updates do not lead downhill",
    "local momentum": "every gradient of a client, by the last round's direction",
    "momentum": "the step of the server, by the last rounds' directions",
    "coordinates": "how long the server's step is in every coordinate",
    "direction": "the direction: it is made of updates that were remembered",
    "histories": "what it remembers of every client, by the client's own update",
    "units": "what an update is divided by: the client's own steps",
    "weights": "how much a client counts, by what it reports",
    "counts": "nothing but that all clients count equally",
    "outliers": "what counts of a report that differs from the others",
    "lengths": "how long updates are",
    "mixture": "updates, to means of several clients'",
    "mean": "the mean of the cohort, to another centre",
    "one report": "the cohort, to a single report",
    "noise": "reports, at the client: they tell nothing but an update with noise",
    "waiting": "how the server waits, so that one client's answer takes another's place",
    "quorum": "whether a round counts, by how many answered, or in which round an answer does",
    "ages": "how much a client counts, by the age of its answer",
}
# What a report may lack: beside its fields, what not every optimizer or model defines.
NEEDS = ("mass", "features")
SECRET = frozenset(entry.name for entry in fields(Reports) if entry.secret)


@dataclass(frozen=True, kw_only=True)
class Traits:
    """What a rule says about itself. The defaults are right for most rules and safe for all.

    Args:
        when: Whether it selects and steps before the others, as written, after those that do, or
            at the very end.
        adapts: Whether it adapts another algorithm instead of being one. A rule that projects does
            so with the direction of an algorithm.
        server_optimizer: Whether it turns directions into steps; an algorithm has at most one such
            rule.
        needs: What it cannot do without: "mass" (mean gradients, which only local sgd defines),
            "features" (which not every model has), and fields of reports that tell about clients'
            data, such as "loss" or "score_after".
        reads: What it acts on: reports or rows of single "clients", the detector's answer
            ("signals"), or at most the cohort's "direction". A private rule is combined only with
            rules that do not read clients.
        periods: Whether the detector's answer changes what it does; always with
            `reads="signals"`. Runs then say whether the answers made a period.
        idle: Whether observe and step are also called in rounds without a usable report.
        private: Whether only what has noise decides anything: rounds without reports then run like
            all others.
        promises: Options that say what is promised to the clients, of which a search would choose
            the weakest.
        uniform: Whether all clients have equal weight, as in some papers, instead of by their
            samples.
        horizon: Whether it depends on the total number of rounds, so that none can be added later.
        weighs: Whether it weighs clients itself, and by `now.factors`: the name, in its state, of
            the weight of every client that it remembers.
        constraint: Whether the problem demands it, so that a search keeps it in every trial.
        undeployable: Why a deployed server refuses it; empty: it does not.
        sums: Whether weighted sums of the updates and their norms are all that it needs, and never
            a single update.
        late: Whether it is right for answers to an older round's order, because it needs nothing
            that it read when it briefed, or gets it back by `memory.sent`.
        clock: Whether it makes sense only with a clock: devices, or a simulation with a fleet.
        keeps: Fields marked as kept that its briefs use.
        changes: What it changes, in the words of `WORDS`; words of your own have a dot.
        refuses: Why it cannot be combined with a rule that changes this, by what the other changes.
        instead: What a user can do when the two are refused, by what the other changes.
    """

    when: When = "as written"
    adapts: bool = False
    server_optimizer: bool = False
    needs: Set[str] = NONE
    reads: Reads = "clients"
    periods: bool = False
    idle: bool = False
    private: bool = False
    promises: Set[str] = NONE
    uniform: bool = False
    horizon: bool = False
    weighs: str = ""
    constraint: bool = False
    undeployable: str = ""
    sums: bool = False
    late: bool = False
    clock: bool = False
    keeps: Set[str] = NONE
    changes: Set[str] = NONE
    refuses: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("needs", "promises", "keeps", "changes"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))
        if self.reads == "signals":
            object.__setattr__(self, "periods", True)

        for name in ("changes", "refuses", "instead"):
            for word in getattr(self, name):
                if word not in WORDS and "." not in word:
                    raise UserError(f"traits: {name} has {word!r}; {nearest(word, WORDS)}")
        needed = {*NEEDS, *(entry.name for entry in fields(Reports))}
        for word in self.needs:
            if word not in needed:
                raise UserError(f"traits: needs has {word!r}; {nearest(word, needed)}")

    @property
    def measures(self) -> bool:
        """Whether it acts on what clients measure on their data, itself or by a detector."""
        return self.periods or bool(self.needs & SECRET)


# What rules declared as attributes until 0.2, and what has become of each.
_BECAME = {
    "kind": 'adapts (kind = "adaptive" is adapts=True)',
    "last": 'when (last = True is when="last" with adapts=True, otherwise when="late")',
    "server_optimizer": "server_optimizer",
    "needs_mass": 'needs (needs_mass = True is needs={"mass"})',
    "needs_features": 'needs (needs_features = True is needs={"features"})',
    "sees_idle": "idle",
    "private": "private",
    "reads": "reads",
    "reads_periods": "periods",
    "uniform": "uniform",
    "reads_rounds": "horizon",
    "own_weights": 'weighs (own_weights = True is weighs="lambda")',
    "constraint": "constraint",
    "conflicts_with": "refuses",
}
_warned: set[type] = set()


def traits_of(rule: Any, base: type) -> Traits:
    """What a rule says about itself; also one that declares it as rules did until 0.2."""
    said: Traits = rule.traits()
    declared = _declared(type(rule), base)
    if not declared:
        return said
    _warn(type(rule), declared)
    changes: dict[str, Any] = {}
    for name in ("server_optimizer", "reads", "private", "uniform", "constraint"):
        if name in declared:
            changes[name] = getattr(rule, name)
    if "sees_idle" in declared:
        changes["idle"] = rule.sees_idle
    if "reads_rounds" in declared:
        changes["horizon"] = rule.reads_rounds
    if "reads_periods" in declared:
        changes["periods"] = rule.reads_periods
    if "own_weights" in declared:
        changes["weighs"] = "lambda" if rule.own_weights else ""
    if "kind" in declared:
        changes["adapts"] = rule.kind == "adaptive"
    for name, need in (("needs_mass", "mass"), ("needs_features", "features")):
        if name in declared:
            others = changes.get("needs", said.needs) - {need}
            changes["needs"] = others | {need} if getattr(rule, name) else others
    said = replace(said, **changes)
    if "last" in declared:
        said = replace(said, when=_place(rule.last, said.adapts))
    # A server's momentum was known by the names of its options.
    if said.server_optimizer and any(getattr(rule, name, 0) for name in ("beta", "beta1")):
        said = replace(said, changes=said.changes | {"momentum"})
    return said


def _place(last: bool, adapts: bool) -> When:
    if not last:
        return "as written"
    return "last" if adapts else "late"


def _declared(cls: type, base: type) -> list[str]:
    """The attributes that a class and those below the one that defines `traits` declare."""
    names: set[str] = set()
    for ancestor in cls.__mro__:
        if ancestor is base or "traits" in vars(ancestor):
            break
        names |= _BECAME.keys() & vars(ancestor).keys()
    return [name for name in _BECAME if name in names]


def _warn(cls: type, declared: list[str]) -> None:
    if cls in _warned:
        return
    _warned.add(cls)
    became = "; ".join(f"{name} has become the trait {_BECAME[name]}" for name in declared)
    warnings.warn(
        f"{cls.__name__} says what it is by attributes, which the version after this one no longer "
        f"reads: {became}. Define traits(self) and return a kairosfl.Traits.",
        FutureWarning,
        stacklevel=4,
    )


class Was:
    """What was an attribute of every rule, for rules of 0.2 that read it from another one."""

    def __init__(self, read: Any) -> None:
        self.read = read

    def __get__(self, rule: Any, cls: type) -> Any:
        return self.read((cls() if rule is None else rule).traits())


class Declarations:
    """How rules said until 0.2 what is now in their traits; remains for one version."""

    kind = Was(lambda traits: "adaptive" if traits.adapts else "base")
    last = Was(lambda traits: traits.when != "as written")
    server_optimizer = Was(lambda traits: traits.server_optimizer)
    needs_features = Was(lambda traits: "features" in traits.needs)
    needs_mass = Was(lambda traits: "mass" in traits.needs)
    sees_idle = Was(lambda traits: traits.idle)
    own_weights = Was(lambda traits: bool(traits.weighs))
    private = Was(lambda traits: traits.private)
    constraint = Was(lambda traits: traits.constraint)
    reads = Was(lambda traits: traits.reads)
    uniform = Was(lambda traits: traits.uniform)
    reads_rounds = Was(lambda traits: traits.horizon)
    reads_periods = Was(lambda traits: traits.periods)

    def conflicts_with(self, other: Any) -> str | None:
        """Why this rule cannot be combined with `other`, or None when it can."""
        return None
