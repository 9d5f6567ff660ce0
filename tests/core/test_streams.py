"""Randomness as a function of what it is for."""

from __future__ import annotations

import numpy as np

from kairosfl.core.streams import Streams, drawn, key, stream

WHICH = [(3, "batches", 5, 17), (2**40, "select", 0, 0), (0, "ü|", 12, 10**6)]


def test_a_stream_is_philox_with_the_key() -> None:
    shared = Streams()
    for which in WHICH:
        assert 0 <= key(*which) < 2**128
        plain = np.random.Generator(np.random.Philox(key=key(*which)))
        wanted = plain.random(5).tolist(), plain.permutation(9).tolist()
        for made in (stream(*which), shared(*which)):
            assert (made.random(5).tolist(), made.permutation(9).tolist()) == wanted


def test_keys_are_the_same_forever() -> None:
    assert key(3, "batches", 5, 17) == 0xF9B4BEB5DB52E0074CE62A2859C6A0AF


def test_a_cohort_is_drawn_without_replacement() -> None:
    for population, size in ((500, 50), (7, 7), (3, 9), (10**6, 20)):
        plain = stream(3, "select", 5).choice(population, size=min(size, population), replace=False)
        assert drawn(3, 5, population, size).tolist() == sorted(plain.tolist())
