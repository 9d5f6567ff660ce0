"""How many slots fit into memory, and whether the server's vectors fit as well."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import torch

from kairosfl.engines.batched.state import Kind, State
from kairosfl.engines.batched.step import Work, step

MOST = 256
SHARE = 0.7  # of the free memory: evaluation, captured steps and the server need the rest
CPU_BYTES = 1 << 31
SERVER_SHARE = 0.4  # of a GPU's memory, for the server's vectors
SERVER_VECTORS = (
    4  # for every client of a cohort: its update, its correction, its row, and a temporary copy
)


def affordable(
    work: Work, kind: Kind, length: int, dtype: torch.dtype, device: torch.device, reserved: int = 0
) -> int:
    """The number of slots that free memory allows, at least one, from the peak of one step of two
    clients.

    On a GPU `reserved` bytes of what is free are left to the servers.
    """
    layout = work.stack.frame.layout
    if device.type != "cuda":
        row = layout.width * dtype.itemsize
        return max(1, min(MOST, CPU_BYTES // (row * (4 + len(kind.needs())))))
    # traced models of earlier engines are reference cycles that keep their slots alive
    gc.collect()
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    try:
        state = State(layout, 2, length, dtype, device)
        for name in kind.needs():
            state.rows(name)
        state.on.fill_(False)
        work.rehearse(state, kind.wide(2))
        torch.cuda.reset_peak_memory_stats(device)
        step(work, state, kind.wide(2))
    except torch.OutOfMemoryError:
        return 1
    finally:
        peak = torch.cuda.max_memory_allocated(device) - before
        work.stack.frame.close()
        torch.cuda.empty_cache()
    return max(1, min(MOST, int(SHARE * (free - reserved) / (peak / 2))))


def home(cohorts: Sequence[int], size: int, device: torch.device) -> tuple[torch.device, int, int]:
    """Where the servers of runs with cohorts up to these keep models, updates and tables (the
    engine's device or, if too large, the host), how many clients' vectors have room there, and how
    many bytes of the device they take.
    """
    if device.type != "cuda":
        return device, sum(cohorts), 0
    _, total = torch.cuda.mem_get_info(device)
    room = int(SERVER_SHARE * total) // (SERVER_VECTORS * size)
    if max(cohorts) > room:
        return torch.device("cpu"), sum(cohorts), 0
    return device, room, SERVER_VECTORS * size * min(room, sum(cohorts))
