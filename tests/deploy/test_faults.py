"""Every fault with real processes: training ends with the right number of rounds, and one line says what happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit import CLIENTS, configure, lines, make_app, order

from kairosfl.deploy import model_of, perform
from kairosfl.engines.flower.certs import node_key
from kairosfl.engines.flower.roster import fingerprint
from kairosfl.engines.flower.stage import HOST, Stage

pytestmark = pytest.mark.slow
DEADLINE = 100.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "federation"
    make_app(folder, {})
    return folder


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[Stage]:
    with Stage(folder.parent / "stage", [str(client) for client in range(CLIENTS)]) as stage:
        yield stage


def held(stage: Stage, folder: Path, name: str, rounds: int, **changes: object) -> Path:
    """Hold a run; the folder that it leaves."""
    run = configure(
        folder, f"{name}.toml", **{"rounds": rounds, "deadline": DEADLINE, "algorithm": "scaffold + pa3fed"} | changes
    )
    out = folder.parent / name
    began = time.monotonic()
    perform(stage, folder / "app", run, out)
    print(f"{name}: {rounds} rounds in {time.monotonic() - began:.0f} s")
    rows = lines(out, "metrics.jsonl")
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert bool(torch.isfinite(model_of(out)).all())
    return out


def log(out: Path) -> list[str]:
    return [line for line in (out / "log.txt").read_text().splitlines() if "is served by" not in line]


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def until(happened: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def done(out: Path, rounds: int) -> bool:
    return (out / "metrics.jsonl").exists() and len(lines(out, "metrics.jsonl")) >= rounds


def processes(stage: Stage, name: str) -> list[int]:
    """The running processes of this stage whose command has this name in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes()
            except OSError:
                continue
            if name.encode() in command and stage.environment["FLWR_HOME"].encode() in environment:
                found.append(int(entry.name))
    return found


def test_clients_that_misbehave(stage: Stage, folder: Path) -> None:
    faults = ["raise", "nan", "shape", "broadcast", "norm", "round", "id"]
    order(folder, {3: dict(enumerate(faults, 1))})
    out = held(stage, folder, "misbehave", len(faults) + 1)
    reasons = [
        "it raised <class 'OSError'>:<'no battery'>",
        "its update is not finite",
        "its update has the shape (81,), not (82,)",
        "its update has the shape (1,), not (82,)",
        "its update has the norm 1e+06, above deploy.max_norm = 10000",
        "its report is of round 5, not 6",
        "it answered as client 0",
    ]
    assert log(out) == [f"round {i}: client 3 rejected: {reason}" for i, reason in enumerate(reasons, 1)]
    assert [row["reported"] for row in lines(out, "metrics.jsonl")] == [3] * len(faults) + [4]


def test_a_client_hangs(stage: Stage, folder: Path) -> None:
    order(folder, {3: {1: "hang"}})
    out = held(stage, folder, "hangs", 2, deadline=60.0)
    assert log(out) == ["round 1: client 3 rejected: no answer in 60 s"]  # and is back in the next round


def test_a_clients_process_dies(stage: Stage, folder: Path) -> None:
    order(folder, {3: {1: "exit"}})
    out = held(stage, folder, "dies", 2, deadline=240.0)
    assert log(out) == ["round 1: client 3 rejected: its process died"]


def test_intruders_never_take_part(stage: Stage, folder: Path) -> None:
    order(folder, {})
    node_key(stage.certs / "stranger")  # has a key that nobody registered
    stage.start_node("stranger", "0")
    plain = ["--insecure", "--superlink", f"{HOST}:{stage.port}", "--port", "0", "--node-config", 'clients="0"']
    stage.start("plain", "flower-supernode", *plain)
    thief = node_key(stage.certs / "thief")  # is registered, and claims a client who is not its own
    stage.register("thief")
    stage.start_node("thief", "0")
    out = held(stage, folder, "intruders", 3)
    owner = stage.roster()[0]
    served = [line for line in (out / "log.txt").read_text().splitlines() if "served" in line]
    assert sorted(line.split()[1] for line in served) == ["0", "1", "2", "3"]
    (refused,) = log(out)
    assert refused.endswith(f"(key {fingerprint(thief)}) claims client 0 of key {owner}: refused")
    for name in ("stranger", "plain"):
        assert "Received successfully" not in stage.log(name).read_text()
    for name in ("stranger", "plain", "thief"):
        stage.kill(name)


def test_the_server_is_killed_and_goes_on(stage: Stage, folder: Path) -> None:
    out = folder.parent / "killed"

    def act() -> None:
        until(lambda: done(out, 1))
        for process in processes(stage, "flwr-serverapp"):
            os.kill(process, signal.SIGKILL)
        until(lambda: done(out, 2))
        stage.kill("superlink")

    thread = meanwhile(act)
    held(stage, folder, "killed", 4)
    thread.join(1.0)
    assert not thread.is_alive()
    assert [line for line in log(out) if line.startswith("resumed")] == [
        "resumed after round 1",
        "resumed after round 2",
    ]


def test_the_disk_is_full_at_a_checkpoint(stage: Stage, folder: Path) -> None:
    out = folder.parent / "full"
    (out / "checkpoint").mkdir(parents=True)
    (out / "checkpoint" / ".checkpoint-000002.json.part").symlink_to("/dev/full")
    held(stage, folder, "full", 3)
    stopped, resumed = log(out)
    assert stopped.startswith("stopped: Cannot write ")
    assert "No space left on device" in stopped
    assert resumed == "resumed after round 1"


def test_a_node_is_killed_and_comes_back(stage: Stage, folder: Path) -> None:
    out = folder.parent / "node"
    order(folder, {3: {2: "hang"}})

    def act() -> None:
        until(lambda: done(out, 1))
        until(lambda: bool(processes(stage, "flwr-clientapp")))
        time.sleep(5.0)
        stage.kill("node-3")
        time.sleep(70.0)  # inside its first minute Flower refuses a key that it believes to be online
        stage.start_node("node-3", "3")

    thread = meanwhile(act)
    held(stage, folder, "node", 6, algorithm="scaffold")
    thread.join(1.0)
    rows = lines(out, "metrics.jsonl")
    assert rows[1]["reported"] == 3
    assert "round 2: client 3 rejected: its node went away" in log(out)
    assert rows[-1]["reported"] == 4
