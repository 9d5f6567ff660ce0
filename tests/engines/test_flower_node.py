"""A node with a resident worker: pauses that start short, a worker that is kept alive, and a fork
for every message.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from inspect import getsource, signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr")
if sys.platform != "linux":
    pytest.skip("the resident worker is for Linux", allow_module_level=True)
from flwr.supercore.constant import TaskType
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor import ExecutionSpec, LaunchResult
from flwr.supernode import start_client_internal

from kairosfl.deploy import node
from kairosfl.deploy.node import FIRST, GROWTH, Pauses, Wake, keep, worker
from kairosfl.engines.flower import pauses, resident
from kairosfl.engines.flower.pauses import Guess, Woken
from kairosfl.engines.flower.resident import Forks


def spec(kind: TaskType = TaskType.CLIENT_APP) -> ExecutionSpec:
    return ExecutionSpec(kind, "127.0.0.1:1", "token", True, None, False, os.getpid(), False, 1)


class Time:
    """A clock that a test moves, and what was slept."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.slept = 100.0, list[float]()
        monkeypatch.setattr(node, "time", self)
        monkeypatch.setattr(pauses, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def wait_for(clock: Time, guess: Guess, seconds: float, most: float = 3.0) -> tuple[int, float]:
    """Wait for something that comes after so many seconds: how many looks were in vain, and how
    late it was seen.
    """
    comes, vain = clock.now + seconds, 0
    clock.sleep(guess.begin(most))
    while clock.now < comes:
        vain += 1
        clock.sleep(guess.again(most))
    guess.found()
    return vain, clock.now - comes


def test_looks_are_frequent_at_first_and_never_rarer_than_flowers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Time(monkeypatch)
    wait_for(clock, Guess(FIRST, GROWTH), 100.0)
    assert clock.slept[:4] == pytest.approx([0, FIRST, FIRST * GROWTH, FIRST * GROWTH**2])
    assert max(clock.slept) == clock.slept[-1] == 3.0


def test_looks_start_shortly_before_something_that_comes_regularly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, guess = Time(monkeypatch), Guess(FIRST, GROWTH)
    waits = [wait_for(clock, guess, 2.0) for _ in range(20)]
    assert waits[0][0] > 6
    assert sum(vain for vain, _ in waits[2:]) / 18 < 5
    assert max(late for _, late in waits[2:]) < 0.45
    assert wait_for(clock, guess, 1000.0)[1] < 3.0


def test_a_wait_that_was_long_once_or_for_another_node_makes_nobody_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, guess = Time(monkeypatch), Guess(FIRST, GROWTH)
    for seconds in (0.5, 0.5, 2.5, 2.5, 2.5, 0.5, 30.0):
        wait_for(clock, guess, seconds)
    assert wait_for(clock, guess, 0.5)[1] < 0.2


def test_a_node_with_several_clients_takes_what_is_in_its_queue_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, guess = Time(monkeypatch), Guess(FIRST, GROWTH)
    waits = [wait_for(clock, guess, seconds) for _ in range(8) for seconds in (0.0, 0.0, 0.0, 2.0)]
    assert {wait for i, wait in enumerate(waits) if i % 4 != 3} == {(0, 0.0)}


def test_what_was_there_at_the_first_look_is_looked_for_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, guess = Time(monkeypatch), Guess(FIRST, GROWTH)
    for _ in range(4):
        wait_for(clock, guess, 2.0)
    late = [wait_for(clock, guess, 0.3)[1] for _ in range(8)]
    assert late[-1] < 0.2 < late[0]


def test_a_node_waits_for_messages_and_for_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, here = Time(monkeypatch), Pauses()
    here.before()
    for _ in range(3):
        here.sleep(3)
    assert clock.slept == pytest.approx([FIRST, FIRST * GROWTH, FIRST * GROWTH**2])
    here.found()
    stored: list[str] = []
    store = here.after(stored.append)
    threading.Timer(0.05, store, ("part",)).start()
    began = time.monotonic()
    here.sleep(30)  # until a part of the reply is there
    assert time.monotonic() - began < 20
    assert stored == ["part"]
    here.sleep(0.02)  # no other part
    assert len(clock.slept) == 3
    assert here.monotonic() == clock.now  # everything else is the module's


def test_a_message_wakes_the_worker() -> None:
    wake, runs = Wake(), iter([None, 7])
    here, workers = Pauses(), Woken(wake._theirs)
    look = wake.after(lambda **_: next(runs), here)
    began = time.monotonic()
    assert look(state=1) is None
    workers.sleep(0.05)
    assert time.monotonic() - began >= 0.05
    assert look(state=1) == 7
    workers.sleep(60)
    assert time.monotonic() - began < 30


def test_flower_still_has_what_the_node_replaces() -> None:
    assert start_client_internal.time.sleep
    assert start_client_internal._pull_and_store_message
    assert start_client_internal.subprocess.Popen
    assert signature(start_client_internal.pull_objects).parameters["initial_backoff"].default == 1
    assert signature(InMemoryObjectStore.put)
    assert "time.sleep(3)" in getsource(start_client_internal.start_client_internal)
    assert "time.sleep(0.5)" in getsource(start_client_internal._push_messages)
    assert run_superexec.time.sleep
    assert run_superexec.get_executor


def test_the_worker_takes_the_place_and_the_arguments_of_superexec_only() -> None:
    theirs = ["flower-superexec", "--insecure", "--parent-pid", "7"]
    assert worker(theirs) == [
        sys.executable,
        "-P",
        "-m",
        "kairosfl.engines.flower.resident",
        *theirs[1:],
    ]
    assert worker(["something-else", "--insecure"]) == ["something-else", "--insecure"]


def test_a_worker_that_dies_is_started_again_and_one_that_cannot_start_less_and_less_often() -> (
    None
):
    codes, slept = iter([0, 1, 1, 1, 1, 1, 1, 1, 0, -9]), []
    keep(lambda: next(codes), slept.append, lives=10)
    assert slept == [0, 2, 4, 8, 16, 32, 60, 60, 0, 2]


def started(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> SimpleNamespace:
    """What Flower's SuperNode finds when it is started by `node.main`."""
    import flwr.supernode.cli

    seen = SimpleNamespace()

    def supernode() -> None:
        seen.argv, seen.time, seen.subprocess = (
            sys.argv,
            start_client_internal.time,
            start_client_internal.subprocess,
        )

    monkeypatch.setattr(sys, "argv", ["pytest"])
    monkeypatch.setattr(flwr.supernode.cli, "flower_supernode", supernode)
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(start_client_internal, "subprocess", subprocess)
    monkeypatch.setattr(start_client_internal, "_pull_and_store_message", lambda **_: None)
    monkeypatch.setattr(start_client_internal, "pull_objects", start_client_internal.pull_objects)
    monkeypatch.setattr(InMemoryObjectStore, "put", InMemoryObjectStore.put)
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
    code = "import sys, kairosfl.deploy.node; sys.exit('torch' in sys.modules or 'flwr' in sys.modules)"
    assert subprocess.call([sys.executable, "-c", code]) == 0


def wait(done: Any, limit: float = 20.0) -> None:
    until = time.monotonic() + limit
    while not done():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_every_message_has_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(**given: Any) -> None:
        assert (given["token"], given["insecure"], given["certificates"]) == ("token", True, None)
        (tmp_path / str(os.getpid())).write_text(
            f"{sys.argv} {Path('/proc/self/comm').read_text().strip()}"
        )
        raise SystemExit(0)  # as Flower does

    monkeypatch.setattr(resident, "run_clientapp", run)
    forks = Forks()
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
    forks = Forks()
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
    Forks().launch(spec(TaskType.SERVER_APP))
    assert launched[0][0] == "flwr-serverapp"


def test_a_worker_exits_when_a_package_was_upgraded(monkeypatch: pytest.MonkeyPatch) -> None:
    forks = Forks()
    forks.reconcile()
    monkeypatch.setattr(resident, "OFTEN", 0.0)
    monkeypatch.setattr(resident, "installed", lambda: frozenset({("kairosfl/client.py", 1, 1)}))
    forks._next = 0.0
    with pytest.raises(SystemExit) as stopped:
        forks.reconcile()
    assert stopped.value.code == 0  # started again at once
