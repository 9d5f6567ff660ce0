"""Engine `batched`: clients trained side by side."""

from kairosfl.engines.batched.engine import Batched, Ticket

__all__ = ["Batched", "Ticket"]
