"""What a GPU has room for."""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

ROOMY = 160 << 10  # bytes of shared memory, as an A100 or H100 has


@cache
def stages(device: torch.device) -> int:
    """How many tiles of its operands a kernel may have on their way at once."""
    return 3 if driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"] >= ROOMY else 2
