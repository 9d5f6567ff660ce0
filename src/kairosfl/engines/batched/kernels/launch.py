"""Launching kernels, or compiling them side by side before they are launched."""

# mypy: ignore-errors

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial

import torch
import triton
from triton.runtime import driver

MOST = 16  # kernels compiled at once; each takes some memory of the host
TRIES = 5

_rehearsing = ContextVar("rehearsing", default=False)


def on(kernel, grid):
    """The kernel on this grid, to be called with its arguments; in a rehearsal that only has it
    compiled.
    """
    return partial(kernel.warmup, grid=grid) if _rehearsing.get() else kernel[grid]


class _Workshop(ThreadPoolExecutor):
    """Also builds what launches a kernel, which some versions of Triton do with a C compiler; it is
    stored on disk.
    """

    def submit(self, compile_one: Callable) -> Future:
        def build():
            kernel = _patiently(compile_one)
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(build)


def _patiently(compile_one: Callable) -> object:
    """Once more where Python 3.11 and 3.12 fail to parse in two threads at a time."""
    for _ in range(TRIES - 1):
        with suppress(SystemError):
            return compile_one()
    return compile_one()


@contextmanager
def rehearsal() -> Iterator[None]:
    """Have the kernels that are launched here compiled side by side; on leaving, all are.

    They do not run: what they would write stays as it is. One that cannot be compiled fails when it
    is launched.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    pool, token = _Workshop(min(MOST, cores)), _rehearsing.set(True)
    try:
        # A backward pass in a thread of its own would not see that this is a rehearsal.
        with (
            triton.AsyncCompileMode(pool, ignore_errors=True),
            torch.autograd.set_multithreading_enabled(False),
        ):
            yield
    finally:
        _rehearsing.reset(token)
        pool.shutdown(cancel_futures=True)  # if it was interrupted
