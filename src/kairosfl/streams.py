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
