"""A node with a resident worker: pauses that start short, a worker that is kept alive, and a fork for every message."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
if sys.platform != "linux":
    pytest.skip("the resident worker is for Linux", allow_module_level=True)
from flwr.supercore.constant import TaskType
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supernode import start_client_internal

from kairosfl.engines.flower import node, resident
from kairosfl.engines.flower.node import EARLY, FIRST, GROWTH, Pauses, Wake, keep, worker
from kairosfl.engines.flower.resident import Forks


def spec(kind: TaskType = TaskType.CLIENT_APP) -> ExecutionSpec:
    return ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, os.getpid(), False, 1)


def test_pauses_start_short_grow_to_flowers_and_start_again_when_something_happened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(node.time, "sleep", slept.append)
    pauses = Pauses()
    for _ in range(30):
        pauses.sleep(3)
    assert slept[:3] == pytest.approx([FIRST, FIRST * GROWTH, FIRST * GROWTH**2])
    assert slept[-1] == 3
    pauses.sleep(0.5)  # waits for something else
    pauses.sleep(0.5)
    assert slept[-2:] == pytest.approx([FIRST, FIRST * GROWTH])
    pauses.restart()
    pauses.sleep(0.5)
    assert slept[-1] == FIRST
    pauses.sleep(0.01)
    assert slept[-1] == 0.01
    assert pauses.monotonic() > 0  # everything else is the module's


def test_the_first_pause_of_a_wait_is_most_of_what_the_last_one_took(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    clock = [100.0]

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        clock[0] += seconds

    monkeypatch.setattr(node, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: clock[0]))
    pauses = Pauses()
    for _ in range(4):  # for a message
        pauses.sleep(3)
    took = sum(slept)
    pauses.sleep(0.5)  # for the reply
    pauses.sleep(3)
    pauses.sleep(3)
    assert slept[-2:] == pytest.approx([EARLY * took, FIRST])
    clock[0] += 1000
    pauses.restart()
    pauses.sleep(3)
    assert slept[-1] == 3  # never longer than Flower's own pause
    pauses.sleep(0.5)
    pauses.restart()  # the next message was there at once: another wait of the same kind
    pauses.sleep(0.5)
    assert slept[-1] == FIRST


def test_a_message_wakes_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    wake, runs = Wake(), iter([None, 7])
    pauses, workers = Pauses(), Pauses(wake._theirs)
    look = wake.after(lambda **_: next(runs), pauses)
    began = time.monotonic()
    assert look(state=1) is None
    workers.sleep(0.05)
    assert time.monotonic() - began >= 0.05
    monkeypatch.setattr(node, "FIRST", 60.0)
    assert look(state=1) == 7
    workers.sleep(60)
    assert time.monotonic() - began < 30


def test_flower_still_has_what_the_node_replaces() -> None:
    assert start_client_internal.time.sleep
    assert start_client_internal._pull_and_store_message
    assert start_client_internal.subprocess.Popen
    assert run_superexec.time.sleep
    assert run_superexec.get_executor


def test_the_worker_takes_the_place_and_the_arguments_of_superexec_only() -> None:
    theirs = ["flower-superexec", "--insecure", "--parent-pid", "7"]
    assert worker(theirs) == [sys.executable, "-P", "-m", "kairosfl.engines.flower.resident", *theirs[1:]]
    assert worker(["something-else", "--insecure"]) == ["something-else", "--insecure"]


def test_a_worker_that_dies_is_started_again_and_one_that_cannot_start_less_and_less_often() -> None:
    codes, slept = iter([0, 1, 1, 1, 1, 1, 1, 1, 0, -9]), []
    keep(lambda: next(codes), slept.append, lives=10)
    assert slept == [0, 2, 4, 8, 16, 32, 60, 60, 0, 2]


def started(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> SimpleNamespace:
    """What Flower's SuperNode finds when it is started by `node.main`."""
    import flwr.supernode.cli

    seen = SimpleNamespace()

    def supernode() -> None:
        seen.argv, seen.time, seen.subprocess = sys.argv, start_client_internal.time, start_client_internal.subprocess

    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(flwr.supernode.cli, "flower_supernode", supernode)
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(start_client_internal, "subprocess", subprocess)
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", lambda **_: None)
    node.main(arguments)
    return seen


def test_a_node_is_flowers_with_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = started(monkeypatch, ["--superlink", "a:1"])
    assert seen.argv == ["flower-supernode", "--superlink", "a:1"]
    assert isinstance(seen.time, Pauses)
    assert seen.subprocess.Popen is not subprocess.Popen


def test_a_variable_switches_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAIROSFL_RESIDENT", "0")
    seen = started(monkeypatch, [])
    assert (seen.time, seen.subprocess) == (time, subprocess)


def test_the_node_itself_does_not_import_torch() -> None:
    code = "import sys, kairosfl.engines.flower.node; sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


def wait(done: Any, limit: float = 20.0) -> None:
    until = time.monotonic() + limit
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_message_has_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(**given: Any) -> None:
        assert (given["token"], given["insecure"], given["certificates"]) == ("token", True, None)
        (tmp_path / str(os.getpid())).write_text(f"{sys.argv} {Path('/proc/self/comm').read_text().strip()}")
        raise SystemExit(0)  # as Flower does

    monkeypatch.setattr(resident, "run_clientapp", run)
    forks = Forks(Pauses())
    for _ in range(2):
        assert forks.launch(spec()) == LaunchResult.accepted()
    wait(lambda: not multiprocessing.active_children())
    written = {int(file.name): file.read_text() for file in tmp_path.iterdir()}
    assert len(written) == 2
    assert os.getpid() not in written
    assert set(written.values()) == {"['flwr-clientapp'] flwr-clientapp"}


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_client_that_dies_or_hangs_dies_or_hangs_alone_and_ends_with_the_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resident, "run_clientapp", lambda **_: os._exit(1))
    forks = Forks(Pauses())
    forks.launch(spec())
    wait(lambda: not multiprocessing.active_children())
    monkeypatch.setattr(resident, "run_clientapp", lambda **_: time.sleep(1000))
    forks.launch(spec())
    forks.reconcile()  # not replaced while a client is at work
    assert len(multiprocessing.active_children()) == 1
    forks.close()
    wait(lambda: not multiprocessing.active_children())


def test_other_tasks_start_as_flower_starts_them(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: launched.append(command))
    Forks(Pauses()).launch(spec(TaskType.SERVER_APP))
    assert launched[0][0] == "flwr-serverapp"


def test_a_worker_exits_when_a_package_was_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = Forks(Pauses())
    forks.reconcile()
    monkeypatch.setattr(resident, "OFTEN", 0.0)
    monkeypatch.setattr(resident, "installed", lambda: frozenset({("kairosfl/client.py", 1, 1)}))
    forks._next = 0.0
    with pytest.raises(SystemExit) as stopped:
        forks.reconcile()
    assert stopped.value.code == 0  # started again at once
