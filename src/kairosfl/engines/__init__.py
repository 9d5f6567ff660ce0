"""Engines turn briefs into reports and evaluate a vector; nothing else touches data or devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kairosfl.lazy import attach

if TYPE_CHECKING:
    from kairosfl.engines.batched import Batched
    from kairosfl.engines.debug import Debug
    from kairosfl.engines.loop import Loop
    from kairosfl.engines.ray import Ray as Ray  # not in __all__: it needs the extra `ray`
else:
    __getattr__, __dir__ = attach(
        "kairosfl.engines",
        {
            "Batched": "kairosfl.engines.batched",
            "Debug": "kairosfl.engines.debug",
            "Loop": "kairosfl.engines.loop",
            "Ray": "kairosfl.engines.ray",
        },
    )

__all__ = ["Batched", "Debug", "Loop"]
