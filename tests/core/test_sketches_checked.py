"""The sketches keep the promises that every rule makes: `check_rule` passes each of them."""

from __future__ import annotations

import pytest
import test_sketches_adapters as adapters
import test_sketches_bytes as coded
import test_sketches_personal as personal
import test_sketches_selection as selection
import test_sketches_time as time

from kairosfl.core.rule import Rule
from kairosfl.engines.loop import Loop
from kairosfl.testing import check_rule

RULES: list[Rule] = [
    time.FedBuff(),
    time.FedAsync(),
    time.CA2FL(),
    time.SCAFFOLD(),
    time.PartialWork(),
    selection.Oort(),
    selection.TiFL(),
    selection.PowerOfChoice(candidates=6),
    personal.Ditto(),
    personal.APFL(),
    personal.PFedMe(),
    personal.IFCA(),
    coded.Feedback(),
    coded.EF21(),
    coded.CodedDownlink(),
    adapters.Alternate(),
    adapters.FedEx(),
    adapters.FLoRA(),
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
def test_a_sketch_keeps_the_contract(rule: Rule) -> None:
    check_rule(rule, engines={"loop": Loop})
