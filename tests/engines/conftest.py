"""Tests of an engine are collected where the package it stands on is installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

collect_ignore_glob = [
    pattern
    for package, pattern in (("ray", "test_ray*.py"), ("flwr", "test_flower*.py"))
    if find_spec(package) is None
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One torch thread, as on Flower's nodes, and a server that does not wait between two looks."""
    from kairosfl.engines.flower import collect, roster, server

    for module in (collect, server):
        monkeypatch.setattr(module, "POLL", (0.001, 0.002))
    monkeypatch.setattr(roster, "PAUSE", 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
