"""Properties of the GPU on which tile sizes depend."""

# mypy: ignore-errors

from __future__ import annotations

from functools import cache

import torch
from triton.runtime import driver

ROOMY = 160 << 10  # bytes of shared memory per block, as on an A100 or H100
FUSED = {
    "enable_fp_fusion": True
}  # a·b + c is rounded once; from Triton 3.10 on, only if it is asked for


@cache
def stages(device: torch.device) -> int:
    """The number of pipeline stages: how many tiles of its operands a kernel may load ahead."""
    return (
        3
        if driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"] >= ROOMY
        else 2
    )
