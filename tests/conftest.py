"""One thread per process: the tests are small, run side by side, and their bits must not depend on
the cores.
"""

from __future__ import annotations

import gc
import os
from functools import cache

os.environ.pop("COLUMNS", None)  # pytest-xdist says how wide its own terminal is
os.environ["KAIROSFL_CACHE"] = (
    "off"  # what a GPU measured for the user is none of the tests' business
)
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported, and for the processes that tests start

import torch
import typer.testing

gc.disable()  # what is made until all tests are known stays until the end
torch.set_num_threads(1)
typer.testing._get_command = cache(typer.main.get_command)  # type: ignore[attr-defined]  # not anew for every call


def pytest_collection_finish() -> None:
    # a full collection would look at 800,000 objects of imported modules and collected tests
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # nanobind would report what the interpreter cannot free at its end
