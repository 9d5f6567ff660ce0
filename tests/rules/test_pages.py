"""The rules' pages: every option with its default, and where each rule acts. (test_docs.py runs
their examples.)
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kairosfl.core.rule import Rule, acts
from kairosfl.rules import RULES
from kairosfl.rules.pages import options

HOOKS = ("select", "brief", "receive", "weigh", "combine", "observe", "step", "result")
PAGES = Path(__file__).parents[2] / "docs" / "rules"


@pytest.mark.parametrize("name", sorted(RULES))
def test_the_options_on_the_page_are_those_of_the_docstring(name: str) -> None:
    text = (PAGES / f"{name}.md").read_text(encoding="utf-8")
    shown = "".join(line for line in text.splitlines(keepends=True) if line.startswith("| `"))
    rows = options(name).split("\n", 2)[2]
    assert rows in shown, f"paste kairosfl.rules.pages.options({name!r})"


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
