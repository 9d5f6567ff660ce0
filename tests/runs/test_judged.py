"""The sentence about a detector's answers: one period, two, none, or flicker."""

from __future__ import annotations

import pytest

from kairosfl.runs.metrics import judged


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        ("1110000000", "critical in rounds 1 to 3: one period"),
        ("1110000011", "critical in rounds 1 to 3 and 9 to 10: two periods"),
        ("1111", "critical in every round: no end was seen"),
        ("0111", "critical in rounds 2 to 4: one period"),
        ("0000", "no critical period"),
        ("1010110100", "switched 7 times in 10 rounds: flicker"),
        ("", "no critical period"),
    ],
)
def test_marks(marks: str, expected: str) -> None:
    assert judged([(i, mark == "1") for i, mark in enumerate(marks, 1)]) == expected
