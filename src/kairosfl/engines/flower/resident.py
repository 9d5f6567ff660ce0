"""The resident worker of a node: it has imported torch, and forks a process for every message.

It takes the place of `flower-superexec` and is that program, except that a client's app starts as a
fork instead of as a new Python. The fork then does what `flwr-clientapp` does. So every message
still has its own process, which loads the app that the message names, keeps nothing for the next
one, and may hang or die alone; the worker itself never imports an app. It computes nothing, so a
fork has neither threads of torch nor a GPU to inherit.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import time
from multiprocessing import active_children, get_context
from pathlib import Path

import flwr
import numpy as np
import numpy.random  # not imported by numpy itself, and every fork needs it
import torch
from flwr.supercore.cli import flower_superexec
from flwr.supercore.constant import TaskType
from flwr.supercore.exit.exit_handler import registered_exit_handlers
from flwr.supercore.superexec import run_superexec as loop
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.tls import validate_and_resolve_root_certificates
from flwr.supernode.runtime.run_clientapp import run_clientapp

from kairosfl.engines.flower.pauses import WAKE, Woken

# modules that the operator wants to be imported in advance, such as torchvision
PRELOAD = "KAIROSFL_PRELOAD"
NAME = "flwr-clientapp"
OFTEN = 1.0  # seconds between two looks at the installed packages


class Forks(SubprocessExecutor):
    """Starts a client's app as a fork of this process, and other tasks as Flower does."""

    def __init__(self, wake: int | None = None) -> None:
        """`wake` is the worker's end of a pipe, which a fork closes."""
        self._wake, self._installed, self._next = wake, installed(), 0.0

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start a task."""
        if spec.task_type != TaskType.CLIENT_APP:
            return super().launch(spec)
        get_context("fork").Process(target=_serve, args=(spec, self._wake), name=NAME).start()
        return LaunchResult.accepted()

    def reconcile(self) -> None:
        """Between two tasks: exit, to be started again, if a package was upgraded.

        The modules here are old then.
        """
        if active_children() or time.monotonic() < self._next:  # also reaps what has exited
            return
        self._next = time.monotonic() + OFTEN
        if installed() != self._installed:
            raise SystemExit(0)

    def close(self) -> None:
        """The node ends, and its clients with it."""
        for child in active_children():
            child.terminate()


def installed() -> frozenset[tuple[str, int, int]]:
    """What identifies the code that a fork starts with.

    It is Kairos file by file, and the versions of torch and Flower.
    """
    files = list(Path(__file__).parents[2].rglob("*.py"))
    files += [Path(torch.__file__).with_name("version.py"), Path(flwr.__file__)]
    versions = set()
    for file in files:
        with contextlib.suppress(FileNotFoundError):  # in the middle of an upgrade
            about = file.stat()
            versions.add((str(file), about.st_mtime_ns, about.st_size))
    return frozenset(versions)


def _serve(spec: ExecutionSpec, wake: int | None) -> None:
    """In the fork: what `flwr-clientapp` does, as a process that has just started."""
    if wake is not None:
        os.close(wake)
    registered_exit_handlers.clear()  # the worker's
    for number in (signal.SIGTERM, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    np.random.seed()  # a new process has a seed of its own; torch's is the same in all
    sys.argv = [NAME]
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(15, NAME.encode(), 0, 0, 0)  # PR_SET_NAME, for ps and top
    run_clientapp(
        runtime_api_address=spec.runtime_api_address,
        token=spec.token,
        insecure=spec.insecure,
        certificates=validate_and_resolve_root_certificates(
            spec.root_certificates_path, spec.insecure
        ),
        parent_pid=spec.parent_pid,
        runtime_dependency_install=spec.runtime_dependency_install,
    )


def main() -> None:
    """Run with the arguments of `flower-superexec`."""
    for name in (
        "kairosfl.engines.flower.client",
        *filter(None, os.environ.get(PRELOAD, "").split(",")),
    ):
        importlib.import_module(name)
    gc.freeze()  # the collector of a fork would copy every page that it looks at
    wake = int(os.environ.pop(WAKE))
    vars(loop).update(time=Woken(wake), get_executor=lambda *_, **__: Forks(wake))
    flower_superexec()


if __name__ == "__main__":
    main()
