"""The recipe takes numbers of any kind that mean the same, and refuses the others in a sentence, at
once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kairosfl.core.recipe import Recipe
from kairosfl.errors import UserError

NAN = float("nan")


@pytest.mark.parametrize("field", ["rounds", "cohort", "epochs", "batch_size"])
@pytest.mark.parametrize(
    "value", [1.5, 4.0, NAN, np.float64(4), np.array(2.0), True, np.True_, "4", None, 1j, [4]]
)
def test_whole_numbers_are_whole(field: str, value: Any) -> None:
    with pytest.raises(UserError, match=rf"^train\.{field} = .* must be a whole number\.$"):
        Recipe(**{field: value})


@pytest.mark.parametrize("value", [0, -1, 2**31, np.int64(0), 10**30])
def test_whole_numbers_have_bounds(value: Any) -> None:
    with pytest.raises(
        UserError, match=r"^train\.epochs = .* must be 1 or more, and at most 2147483647\.$"
    ):
        Recipe(epochs=value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"lr": NAN}, "train.lr = nan must be above 0, finite, and at most 3.4e+38."),
        ({"lr": "0.1"}, "train.lr = '0.1' must be a number."),
        ({"lr": True}, "train.lr = True must be a number."),
        ({"momentum": None}, "train.momentum = None must be a number."),
        ({"momentum": np.float32("nan")}, "train.momentum = nan must be at least 0 and below 1."),
        ({"clip": NAN}, "train.clip = nan must be 0 or more, finite, and at most 3.4e+38."),
        ({"gamma": NAN}, "train.gamma = nan must be above 0 and at most 1."),
        ({"drop_last": "no"}, "train.drop_last = 'no' must be True or False."),
        ({"clip_after": 1}, "train.clip_after = 1 must be True or False."),
        ({"milestones": [1.5]}, "train.milestones = [1.5] must be a list of whole numbers."),
        ({"milestones": 5}, "train.milestones = 5 must be a list of whole numbers."),
        (
            {"milestones": (-1,)},
            "train.milestones = (-1,) must be a list of rounds, each 0 or more.",
        ),
    ],
)
def test_other_fields_are_refused_in_a_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        Recipe(**changes)
    assert str(caught.value) == sentence


def test_numbers_of_numpy_become_those_of_python() -> None:
    given = Recipe(
        rounds=np.int32(3),
        batch_size=np.int64(4),
        lr=np.float32(0.5),
        momentum=np.float64(0.25),
        drop_last=np.True_,
        milestones=[np.int64(1), 2],
    )
    same = Recipe(rounds=3, batch_size=4, lr=0.5, momentum=0.25, drop_last=True, milestones=(1, 2))
    assert given == same
    assert repr(given) == repr(same)
