"""Engine `batched`: clients trained side by side."""

from kairosfl.engines.batched.engine import Batched
from kairosfl.engines.batched.jobs import Ticket

__all__ = ["Batched", "Ticket"]
