"""The memory of a GPU: what is free, and client rows that go to the host when it is full."""

from __future__ import annotations

import torch
from torch import Tensor

SPARE = 0.1  # of a GPU's memory that rows leave free for training


def available(device: torch.device) -> int:
    """Bytes of a GPU that are free, or that PyTorch holds and does not use."""
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_stats_as_nested_dict(
        device
    )  # memory_reserved and memory_allocated each flatten all of it
    return free + int(
        held["reserved_bytes"]["all"]["current"] - held["allocated_bytes"]["all"]["current"]
    )


def fits(device: torch.device, size: int) -> bool:
    """Whether the device has memory for so many bytes more, and enough to spare."""
    if device.type != "cuda":
        return True
    return available(device) - size > SPARE * torch.cuda.get_device_properties(device).total_memory


def spilling(shape: tuple[int, ...], row: Tensor) -> Tensor:
    """Memory for client rows on the row's device or, where that is full, on the host."""
    if fits(row.device, torch.Size(shape).numel() * row.element_size()):
        return row.new_empty(shape)
    return torch.empty(*shape, dtype=row.dtype, pin_memory=True)
