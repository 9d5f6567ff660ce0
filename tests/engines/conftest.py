"""Tests of an engine are collected where the package it stands on is installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [
    pattern for package, pattern in (("ray", "test_ray*.py"), ("flwr", "test_flower*.py")) if find_spec(package) is None
]
