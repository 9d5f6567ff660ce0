"""Randomness as a function of (seed, purpose, round, client): nothing to store, nothing to forget on resume."""

from __future__ import annotations

import hashlib

import numpy as np


def key(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """128 bits that depend on all four arguments and on nothing else."""
    text = f"{seed}|{purpose}|{round}|{client}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=16).digest(), "little")


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A fresh counter-based generator for this purpose; the same arguments give the same numbers anywhere."""
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, round, client)))


class Streams:
    """`stream` with one generator that is given a new key each time; the result is valid until the next call.

    Creating a generator takes longer than shuffling a small client's samples, because it asks the system for entropy.
    """

    def __init__(self) -> None:
        self._source = np.random.Philox(key=0)
        self._generator, self._fresh = np.random.Generator(self._source), self._source.state

    def __call__(self, seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
        bits = key(seed, purpose, round, client)
        self._fresh["state"]["key"][:] = bits & (2**64 - 1), bits >> 64
        self._source.state = self._fresh
        return self._generator
