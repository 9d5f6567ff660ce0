"""Randomness as a function of (seed, purpose, round, client): nothing to store or to forget."""

from __future__ import annotations

import hashlib
import struct
from functools import lru_cache
from typing import Any, cast

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor


def key(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """128 bits that depend on all four arguments and on nothing else."""
    low, high = _words(seed, purpose, round, client)
    return high << 64 | low


def word(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """The lowest 63 of these bits, which fit into an int64."""
    return _words(seed, purpose, round, client)[0] % 2**63


def _words(seed: int, purpose: str, round: int, client: int) -> tuple[int, int]:
    """All of them as two words, the lower one first."""
    text = _begun(seed, purpose, round).copy()
    text.update(f"{client}".encode())
    low, high = _WORDS(text.digest())
    return low, high


@lru_cache(maxsize=64, typed=True)  # a round asks for many clients
def _begun(seed: int, purpose: str, round: int) -> Any:
    return hashlib.blake2b(f"{seed}|{purpose}|{round}|".encode(), digest_size=16)


_WORDS = struct.Struct("<QQ").unpack


def stream(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A fresh counter-based generator; the same arguments give the same numbers anywhere."""
    words = cast(Any, _Key(_words(seed, purpose, round, client)))
    return np.random.Generator(np.random.Philox(words))


@lru_cache(maxsize=1)  # an engine may have asked already, to prepare for them
def drawn(seed: int, round: int, population: int, size: int) -> np.ndarray:
    """The clients that train in a round if no rule says which, ascending."""
    generator = stream(seed, "select", round)
    clients = generator.choice(population, size=min(size, population), replace=False)
    return np.sort(clients)


class _Key(ISeedSequence):
    """Seeds `Philox` with a key.

    Its own argument `key` asks the system for entropy, too, which takes longer.
    """

    def __init__(self, words: tuple[int, int]) -> None:
        self._words = words

    def generate_state(self, n_words: int, dtype: Any = np.uint64) -> np.ndarray:
        return np.array(self._words, dtype=np.uint64)


def secret_seed(seed: int, secret: bytes) -> int:
    """A seed that only those who have the secret, of at most 64 bytes, can work out."""
    return int.from_bytes(hashlib.blake2b(f"{seed}".encode(), key=secret).digest(), "little")


def normal(draw: np.random.Generator, like: Tensor) -> Tensor:
    """Standard normal numbers like this tensor, drawn where it is."""
    if like.device.type == "cpu":  # torch's own generator would keep 32 bits of the key
        return torch.from_numpy(draw.standard_normal(like.shape)).to(like)
    generator = torch.Generator(like.device).manual_seed(int(draw.integers(2**63)))
    return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)


class Streams:
    """`stream` with one generator that is given a new key each time.

    A generator is valid until the next call.

    Creating a generator takes longer than shuffling a small client's samples, because it asks the
    system for entropy.
    """

    def __init__(self) -> None:
        self._source = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._source)
        self._fresh = cast(Any, self._source.state)
        self._fresh["state"]["counter"] = self._fresh["buffer"] = (
            0,
        ) * 4  # quicker to read than arrays

    def __call__(
        self, seed: int, purpose: str, round: int = 0, client: int = 0
    ) -> np.random.Generator:
        self._fresh["state"]["key"] = _words(seed, purpose, round, client)
        self._source.state = self._fresh
        return self._generator
