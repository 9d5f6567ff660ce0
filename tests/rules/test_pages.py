"""The rules' pages: every option with its default, and where each rule acts. (test_docs.py runs
their examples.)
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from kairosfl.core.rule import Rule, acts
from kairosfl.rules import RULES

HOOKS = ("select", "brief", "receive", "weigh", "combine", "observe", "step", "result")
PAGES = Path(__file__).parents[2] / "docs" / "rules"


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_option_stands_on_the_page_with_its_default(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", text, flags=re.MULTILINE))
    fields = {entry.name: entry.default for entry in dataclasses.fields(RULES[name])}  # type: ignore[arg-type]
    assert {key: repr(value) for key, value in fields.items()} == {
        key: v.replace('"', "'") for key, v in rows.items()
    }


def test_the_index_names_every_rule_and_where_it_acts() -> None:
    text = (PAGES / "index.md").read_text()
    rows = dict(
        re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \| [^|]* \| ([^|]*) \|", text, flags=re.MULTILINE)
    )
    assert set(rows) == {"fedavg", *RULES}
    for name, rule in RULES.items():
        assert issubclass(rule, Rule)
        assert {hook for hook in HOOKS if hook in rows[name]} == {
            hook for hook in HOOKS if acts(rule(), hook)
        }, name
