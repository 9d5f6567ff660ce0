"""What the searches chose, and the presets that ship it."""

from __future__ import annotations

import pytest

from kairosfl import presets
from kairosfl.runs.config import resolve
from kairosfl.runs.keys import updated
from kairosfl_reproductions.beyond import CHOSEN
from kairosfl_reproductions.searches import HELD_OUT, SEARCHES


@pytest.mark.parametrize("data", CHOSEN)
def test_a_preset_is_what_its_search_chose_for_all_rounds_and_samples(data: str) -> None:
    recipe, algorithm, _ = CHOSEN[data]
    cell = SEARCHES[data].cells()[f"{algorithm}-{recipe}"]
    settings = {
        name: value
        for name, value in cell.settings.items()
        if name not in (*HELD_OUT, "train.rounds")
    }
    assert resolve(presets.read(f"kairos-{data}")) == resolve(
        updated(presets.read(cell.preset), settings)
    )
