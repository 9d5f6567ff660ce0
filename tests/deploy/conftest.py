"""Tests with real Flower processes; collected where Flower is installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("flwr") else ["*.py"]
