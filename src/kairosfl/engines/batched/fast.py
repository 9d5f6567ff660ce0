"""What is fast where: the Triton kernels if they can run, products on a CPU; timing on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

_plain = ContextVar("plain", default=False)


def kernels(name: str, tensor: Tensor) -> ModuleType | None:
    """The module of kernels with this name, if they support such a tensor."""
    if (
        tensor.device.type != "cuda"
        or tensor.dtype not in (torch.float32, torch.bfloat16)
        or _plain.get()
    ):
        return None
    return _module(name) if _able(tensor.device.index or 0) else None


@contextmanager
def without_kernels() -> Iterator[None]:
    """Here, `kernels` finds none."""
    token = _plain.set(True)
    try:
        yield
    finally:
        _plain.reset(token)


@cache
def _able(index: int) -> bool:
    """Whether Triton is installed and the GPU is new enough for it."""
    try:
        import_module("triton")
    except ImportError:
        return False
    return torch.cuda.get_device_capability(index) >= (8, 0)


@cache
def _module(name: str) -> ModuleType:
    return import_module(f"kairosfl.engines.batched.kernels.{name}")


MKL = torch.backends.mkl.is_available()


def slow_transposed(tensor: Tensor) -> bool:
    """Whether a batched product is slow if its second factor is transposed: on a CPU without MKL,
    such as ARM's, where small ones take up to ten times as long."""
    return tensor.is_cpu and not MKL


# device cycles, about a millisecond: longer than the host takes to queue what is timed
PAUSE = 2_000_000


def timed(action: Callable[[], object]) -> float:
    """Seconds of device time. The device is kept busy while the host queues the action, so launch
    overhead is excluded.

    Captured steps have no launch overhead either, so a kernel that is slow to launch may still be
    the fastest.
    """
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(PAUSE)
    began.record()
    action()
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000
