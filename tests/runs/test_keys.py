"""Nested tables to dotted keys and back."""

import pytest

from kairosfl.errors import UserError
from kairosfl.runs.keys import flatten, updated

TABLES = {"seed": 1, "train": {"lr": 0.1}, "model": {"options": {"width": 8}}}


def test_there_and_back() -> None:
    assert flatten(TABLES) == {"seed": 1, "train.lr": 0.1, "model.options.width": 8}
    assert updated({}, {"seed": 1, "train.lr": 0.1}) == {"seed": 1, "train": {"lr": 0.1}}


def test_the_given_tables_are_left_as_they_are() -> None:
    section = {"name": "digits"}
    changed = updated(TABLES, {"train.lr": 0.2, "data": section})
    changed["data"]["name"] = "cifar10"
    assert TABLES["train"] == {"lr": 0.1}
    assert section == {"name": "digits"}


def test_a_key_below_a_plain_value_is_named() -> None:
    with pytest.raises(
        UserError, match=r"Cannot set seed.x: seed = 1 is not a section; write \[seed\]"
    ):
        updated(TABLES, {"seed.x": 2})
