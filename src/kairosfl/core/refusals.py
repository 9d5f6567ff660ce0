"""Which two rules are refused side by side: a table over what they say about themselves.

The table names no rule, so that it also covers those that others write. A row has what one rule is,
what the other is, and why they cannot be combined. A rule is what its traits say: the words of
`changes`, and the facts below, which follow from its other traits and from the hooks that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kairosfl.core.traits import Traits

FACTS = {
    "server optimizer": "it turns directions into steps",
    "private": "only what has noise decides anything",
    "reads clients": "it acts on reports or rows of single clients",
    "counting": "it plans cohorts by how many clients took part",
    "uniform": "all clients count equally",
    "measuring": "it acts on what clients measure on their data",
    "combining": "it corrects or replaces the cohort's direction",
}


@dataclass(frozen=True)
class Refusal:
    """A row of the table.

    Args:
        one: What one rule is, all of it.
        other: What the other rule is, all of it.
        why: The reason, in which {one} and {other} stand for their names.
        fix: What a user can do besides what the rules themselves suggest.
    """

    one: frozenset[str]
    other: frozenset[str]
    why: str
    fix: str = ""


def _row(one: str, other: str, why: str, fix: str = "") -> Refusal:
    return Refusal(frozenset(one.split(" & ")), frozenset(other.split(" & ")), why, fix)


EITHER = "leave one of them out"
# The first row that fits gives the reason.
TABLE = (
    _row(
        "server optimizer",
        "server optimizer",
        "both are server optimizers, and one would take the other's step for a gradient",
        EITHER,
    ),
    _row(
        "private",
        "counting",
        "{other} plans cohorts by how many clients took part so far, a number without noise",
    ),
    _row(
        "private",
        "waiting",
        "with {other}, whether a client's answer counts depends on when others answer, which noise "
        "for one update does not hide",
        "leave {other} out, or use a deadline alone",
    ),
    _row(
        "private",
        "quorum",
        "with {other}, whether or when a client's answer counts depends on other clients, which "
        "noise for one update does not hide",
        "leave keep and quorum out",
    ),
    _row(
        "counts",
        "uniform",
        "{other} counts all clients equally already",
        "leave {one} out",
    ),
    _row(
        "outliers",
        "starts",
        "{other}'s clients start on opposite sides of the model, which looks like an attack, and "
        "only the plain mean of all of them leads back to it",
    ),
    _row(
        "private",
        "outliers & reads clients",
        "{other} treats a report by what others sent, so one client could change them all, which "
        "noise for one update does not hide",
        "leave {other} out, since {one} clips every update by itself and counts all clients "
        "equally",
    ),
    _row(
        "private",
        "reads clients",
        "{other} may act on reports or rows of single clients, to which no noise was added; a rule "
        'that does not says reads="direction" in its traits',
    ),
    _row(
        "noise",
        "measuring",
        "{other} acts on what clients measure on their data, and with {one} they tell nothing "
        "about it but the update with noise",
    ),
    _row("waiting", "waiting", "both choose how the server waits", EITHER),
    _row("ages", "ages", "both weigh answers by their age", EITHER),
    _row(
        "starts",
        "waiting",
        "{one} needs the answers of all clients that it placed, in the round in which it did",
    ),
    _row("size", "size", "both choose the size of the cohort", EITHER),
    _row("visits", "total", "exploring chooses cohorts of its own"),
    _row("drift", "drift", "both correct the same drift, so together they correct it twice"),
    _row(
        "steps",
        "gradients",
        "both correct clients, but one their steps and the other their gradients",
    ),
    _row(
        "local momentum",
        "momentum & server optimizer",
        "both reuse the previous directions, {one} in every local step and the server in its "
        "momentum, and together they overshoot",
    ),
    _row(
        "starts",
        "coordinates",
        "an adaptive server step is about equally long in every coordinate, however little the "
        "clients moved along it, so clients placed several such steps away start far from the "
        "model",
    ),
    _row(
        "descent",
        "direction",
        "{one} does not follow the global gradient descent rule, on which {other}'s direction "
        "relies",
    ),
    _row("mixture", "mixture", "both mix the updates", EITHER),
    _row(
        "mixture",
        "histories",
        "{other} remembers every client's own update, which {one} mixes with others'",
    ),
    _row(
        "mixture",
        "units",
        "{other} divides every update by its client's own steps, and {one} mixes several clients'",
    ),
    _row("lengths", "lengths", "both clip the same updates", EITHER),
    _row("mean", "mean", "both replace the mean of the cohort's updates", EITHER),
    _row(
        "mean",
        "direction",
        "{other} steps along the updates that it remembers of every client, so a robust mean of "
        "this round's has no effect",
    ),
    _row(
        "mean & combining",
        "combining",
        "{other} corrects the weighted mean, which {one} replaces",
    ),
    _row(
        "one report",
        "units",
        "{one} takes a single report, and {other} compares how far several clients went",
    ),
    _row("one report", "weights", "{one} takes a single report, whatever its weight"),
)


def facts(rule: Any, traits: Traits, acts: Callable[[Any, str], bool]) -> frozenset[str]:
    """What a rule is, in the words of the table."""
    derived = {
        "server optimizer": traits.server_optimizer,
        "private": traits.private,
        "reads clients": traits.reads == "clients",
        "counting": traits.idle and acts(rule, "select"),
        "uniform": traits.uniform,
        "measuring": traits.measures,
        "combining": acts(rule, "combine"),
    }
    return frozenset(traits.changes) | {name for name, holds in derived.items() if holds}


@dataclass(frozen=True)
class Member:
    """A rule of a sum, with what the table reads about it."""

    rule: Any
    traits: Traits
    facts: frozenset[str]


Match = tuple[Refusal, Member, Member]


def match(first: Member, second: Member) -> Match | None:
    """The first row that refuses two rules, with the one and the other as the row has them."""
    for row in TABLE:
        for one, other in ((first, second), (second, first)):
            if row.one <= one.facts and row.other <= other.facts:
                return row, one, other
    return None


def refused(first: Member, second: Member) -> str | None:
    """Why two rules cannot be combined, or None."""
    matched = match(first, second)
    if matched:
        return _reason(*matched)
    for one, other in ((second, first), (first, second)):
        for word, reason in one.traits.refuses.items():
            if word in other.facts:
                return reason
        reason = one.rule.conflicts_with(other.rule)  # as rules refused until 0.2
        if reason:
            return str(reason)
    return None


def _reason(row: Refusal, one: Member, other: Member) -> str:
    fixes = [*suggested(one, row.other), *suggested(other, row.one)]
    if row.fix:
        fixes.append(row.fix)
    why = "; ".join((row.why, *[", or ".join(fixes)] * bool(fixes)))
    return why.format(one=one.rule.name(), other=other.rule.name())


def suggested(member: Member, changed: frozenset[str]) -> Iterator[str]:
    """What a rule suggests about another one that changes this."""
    for word in sorted(changed):
        if word in member.traits.instead:
            yield member.traits.instead[word]
