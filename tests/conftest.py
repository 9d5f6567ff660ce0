"""One thread per process: the tests are small, run side by side, and their bits must not depend on
the cores.
"""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Generator, Iterator
from functools import cache
from importlib.util import find_spec

os.environ.pop("COLUMNS", None)  # pytest-xdist says how wide its own terminal is
os.environ["KAIROSFL_CACHE"] = (
    "off"  # what a GPU measured for the user is none of the tests' business
)
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported, and for the processes that tests start

import pytest
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


# The packages of the extras without which most tests still run.
EXTRAS = {"privacy": "dp_accounting", "tune": "optuna", "files": "pyarrow"}
ASKED_FOR = re.compile(r"pip install .?kairosfl\[(\w+)\]")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    """Skip a test that Kairos answers with the name of an extra which is not installed."""
    try:
        return (yield)
    except Exception as error:
        for message in messages(error):
            extra = ASKED_FOR.search(message)
            if extra and find_spec(EXTRAS.get(extra[1], "pytest")) is None:
                pytest.skip(f"the extra {extra[1]} is not installed")
        raise


def messages(error: BaseException | None) -> Iterator[str]:
    """What an exception says, and those that it was raised from."""
    while error is not None:
        yield str(error)
        error = error.__cause__ or error.__context__
