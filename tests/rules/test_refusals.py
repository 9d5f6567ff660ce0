"""Which rules are refused side by side: all pairs, with their reasons, at many of their options."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse

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
