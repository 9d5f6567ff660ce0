"""Which rules are refused side by side: all pairs, with their reasons, at many of their options."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import pytest

from kairosfl.core.rule import Rule
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse
from kairosfl.rules.pages import refusals, sums

# By reason, every pair that is refused for it.
STORED: dict[str, list[str]] = json.loads(
    Path(__file__).with_name("refused.json").read_text(encoding="utf-8")
)
WITH_OPTIONS = (
    "alt(reference='previous')",
    "budget(by='detector')",
    "fedcl(budget=0.5)",
    "fedcl.random()",
    "fedaware(explore=True)",
    "fedaware(project=False)",
    "fedcm(weights='samples')",
    "feddyn(weights='samples')",
    "fedmut(weights='samples')",
    "scaffold(weights='samples')",
    "scaffold(divisor='steps', correct='steps')",
    "fedavgm(beta=0.0)",
    "fedadam(beta1=0.0)",
    "fedams(beta1=0.0)",
    "fedadagrad(beta1=0.9)",
    "krum(keep=0)",
    "krum(keep=2)",
    "normclipping(norm=1.0)",
    "geometricmedian(weights='uniform')",
    "centeredclipping(weights='samples')",
    "fednova(momentum=0.9)",
    "pa3fed(always=True)",
    "privacy(quantile=0.5)",
)


def refusal(text: str) -> str | None:
    try:
        parse(text)
    except UserError as error:
        return str(error).split(" cannot be combined: ", 1)[1]
    return None


def test_every_pair_is_refused_for_its_reason_or_allowed_in_either_order() -> None:
    expected = {pair: reason for reason, pairs in STORED.items() for pair in pairs}
    texts = (*RULES.own, *WITH_OPTIONS)
    seen = {}
    for one, other in combinations(texts, 2):
        if type(parse(one).rules[0]) is type(parse(other).rules[0]):
            continue
        reason = refusal(f"{one} + {other}")
        assert refusal(f"{other} + {one}") == reason, f"{one} + {other}"
        if reason:
            seen[f"{one} + {other}"] = reason
    assert seen.keys() == expected.keys()
    for pair, reason in seen.items():
        assert reason == expected[pair], pair


@pytest.mark.parametrize(
    ("heading", "table"), [("Refused", refusals), ("Sums only", sums)], ids=["refused", "sums"]
)
def test_the_page_of_compositions_has_the_table(heading: str, table: Callable[[], str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "rules" / "compositions.md"
    text = page.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    assert f"\n\n{table()}" in text, f"paste {table.__module__}.{table.__name__}() into {page}"


def test_a_rule_of_others_that_moves_starts_is_refused_like_ours() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Scattered(Rule):
        def traits(self) -> Traits:
            return Traits(changes={"starts"})

    with pytest.raises(UserError, match=r"an adaptive server step is about equally long"):
        parse("fedadam") + Scattered()
    with pytest.raises(UserError, match=r"Scattered's clients start on opposite sides"):
        parse("median") + Scattered()
    parse("fedavgm") + Scattered()
