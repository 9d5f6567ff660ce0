"""Every fault with real processes: training ends with the right number of rounds, and one line says
what happened.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kit import CLIENTS, configure, go, lines, make_app, order, seconds

from kairosfl.deploy import model_of, run_to_end
from kairosfl.deploy.certificates import node_key
from kairosfl.deploy.local import HOST, LocalFederation, free_port
from kairosfl.engines.flower.roster import fingerprint

pytestmark = pytest.mark.slow
DEADLINE = 100.0
# seconds before a killed node is started again: Flower refuses a key that it believes to be online
RESTART = 65.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("faults") / "federation"
    make_app(folder, {})
    return folder


@pytest.fixture(scope="module")
def stage(folder: Path) -> Iterator[LocalFederation]:
    with LocalFederation(
        folder.parent / "stage", [str(client) for client in range(CLIENTS)]
    ) as stage:
        yield stage


def held(stage: LocalFederation, folder: Path, name: str, rounds: int, **changes: object) -> Path:
    """Hold a run; the folder that it leaves."""
    run = configure(
        folder,
        f"{name}.toml",
        **{"rounds": rounds, "deadline": DEADLINE, "algorithm": "scaffold + pa3fed"} | changes,
    )
    out = folder.parent / name
    began = time.monotonic()
    run_to_end(stage, folder / "app", run, out)
    print(
        f"{name}: {time.monotonic() - began:.0f} s, rounds of {[round(each, 1) for each in seconds(out)]} s"
    )
    rows = lines(out, "metrics.jsonl")
    assert [row["round"] for row in rows] == list(range(1, rounds + 1))
    assert bool(torch.isfinite(model_of(out)).all())
    return out


def log(out: Path) -> list[str]:
    """Everything but who is served by whom."""
    return [line for line in text(out).splitlines() if "is served by" not in line]


def text(out: Path) -> str:
    return (out / "log.txt").read_text() if (out / "log.txt").exists() else ""


def meanwhile(act: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def until(happened: Callable[[], bool], limit: float = 300.0) -> float:
    """Wait for something; the seconds that it took."""
    began = time.monotonic()
    while not happened():
        assert time.monotonic() < began + limit
        time.sleep(0.1)
    return time.monotonic() - began


def done(out: Path, rounds: int) -> bool:
    """Whether so many rounds are saved: their lines in metrics.jsonl come before their checkpoint."""
    return (out / "checkpoint" / f"checkpoint-{rounds:06d}.json").exists()


MISCHIEF = {
    "raise": "it raised <class 'OSError'>:<'no battery'>",
    "nan": "its update is not finite",
    "shape": "its update has the shape (81,), not (82,)",
    "broadcast": "its update has the shape (1,), not (82,)",
    "norm": "its update has the norm 1e+06, above deploy.max_norm = 10000",
    "round": "its report is of round 5, not 6",
    "id": "it answered as client 0",
}


@pytest.fixture(scope="module")
def misbehaved(stage: LocalFederation, folder: Path) -> Path:
    """A run in which client 3 does something else wrong in every round but the last."""
    order(folder, {3: dict(enumerate(MISCHIEF, 1))})
    return held(stage, folder, "misbehave", len(MISCHIEF) + 1)


@pytest.mark.parametrize("fault", MISCHIEF)
def test_a_client_misbehaves(misbehaved: Path, fault: str) -> None:
    number = list(MISCHIEF).index(fault) + 1
    told = [line for line in log(misbehaved) if line.startswith(f"round {number}:")]
    assert told == [f"round {number}: client 3 does not count: {MISCHIEF[fault]}"]
    row = lines(misbehaved, "metrics.jsonl")[number - 1]
    assert (row["reported"], row["rejected"]) == (3, 1)


def test_a_client_that_misbehaved_serves_on(misbehaved: Path) -> None:
    assert lines(misbehaved, "metrics.jsonl")[-1]["reported"] == CLIENTS
    assert len(log(misbehaved)) == len(MISCHIEF)


def test_a_client_hangs(stage: LocalFederation, folder: Path) -> None:
    order(folder, {3: {1: "hang"}})
    out = held(stage, folder, "hangs", 2, deadline=60.0)
    assert log(out) == ["round 1: client 3 does not count: no answer in 60 s"]
    assert lines(out, "metrics.jsonl")[-1]["reported"] == CLIENTS  # its node was freed


def test_a_clients_process_dies(stage: LocalFederation, folder: Path) -> None:
    order(folder, {3: {1: "exit"}})
    out = held(stage, folder, "dies", 2, deadline=240.0)
    assert log(out) == ["round 1: client 3 does not count: its process died"]


@pytest.fixture(scope="module")
def intruded(stage: LocalFederation, folder: Path) -> Path:
    """A run while three strangers want to be client 0."""
    order(folder, {})
    node_key(stage.certs / "stranger")  # has a key that nobody registered
    stage.start_node("stranger", "0")
    plain = ["--insecure", "--superlink", f"{HOST}:{stage.port}", "--port", str(free_port())]
    stage.start("plain", "flower-supernode", *plain, "--node-config", 'clients="0"')
    stage.keys["thief"] = node_key(
        stage.certs / "thief"
    )  # is registered, and claims a client who is not its own
    stage.register("thief")
    stage.start_node("thief", "0")
    stage.wait_for("thief", lambda: stage.connected("thief"))
    out = held(stage, folder, "intruders", 3)
    for name in ("stranger", "plain"):
        until(
            lambda name=name: "Connection attempt failed" in stage.log(name).read_text()
        )  # it did try
    for name in ("stranger", "plain", "thief"):
        stage.kill(name, signal.SIGTERM)
    return out


@pytest.mark.parametrize("name", ["stranger", "plain"])
def test_the_superlink_refuses(stage: LocalFederation, intruded: Path, name: str) -> None:
    """A node without a registered key, and one that speaks plain text."""
    assert not stage.connected(name)
    assert "received successfully" not in stage.log(name).read_text().lower()
    assert [row["reported"] for row in lines(intruded, "metrics.jsonl")] == [CLIENTS] * 3


def test_a_registered_node_cannot_take_another_ones_client(
    stage: LocalFederation, intruded: Path
) -> None:
    owner, thief = stage.roster()[0], fingerprint(stage.keys["thief"])
    (refused,) = log(intruded)
    assert refused.endswith(f"(key {thief}) claims client 0 of key {owner}: rejected")
    served = [line.split() for line in text(intruded).splitlines() if "is served by" in line]
    assert sorted((int(words[1]), words[-1].strip(")")) for words in served) == sorted(
        stage.roster().items()
    )
    assert [row["reported"] for row in lines(intruded, "metrics.jsonl")] == [CLIENTS] * 3


def outlives(stage: LocalFederation, folder: Path, name: str, kill: Callable[[], None]) -> Path:
    """The folder of a run of three rounds that goes on after something was killed in its second."""
    out = folder.parent / name

    def act() -> None:
        until(lambda: done(out, 1))
        kill()
        print(f"{name}: resumed {until(lambda: 'resumed' in text(out)):.0f} s after it was killed")

    order(folder, {})
    thread = meanwhile(act)
    held(stage, folder, name, 3)
    thread.join(1.0)
    assert not thread.is_alive()
    assert log(out) == ["resumed after round 1"]
    return out


def test_the_server_is_killed(stage: LocalFederation, folder: Path) -> None:
    def kill() -> None:
        for process in stage.find("flwr-serverapp"):
            os.kill(process, signal.SIGKILL)

    out = outlives(stage, folder, "server", kill)
    assert [row["reported"] for row in lines(out, "metrics.jsonl")] == [CLIENTS] * 3


def test_the_superlink_is_killed(stage: LocalFederation, folder: Path) -> None:
    outlives(stage, folder, "superlink", lambda: stage.kill("superlink"))


def test_the_disk_is_full_at_a_checkpoint(stage: LocalFederation, folder: Path) -> None:
    out = folder.parent / "full"
    (out / "checkpoint").mkdir(parents=True)
    (out / "checkpoint" / ".checkpoint-000002.json.part").symlink_to("/dev/full")
    order(folder, {})
    held(stage, folder, "full", 3)
    stopped, resumed = log(out)
    assert stopped.startswith("stopped: Cannot write ")
    assert "No space left on device" in stopped
    assert resumed == "resumed after round 1"


@pytest.fixture(scope="module")
def bereft(stage: LocalFederation, folder: Path) -> Path:
    """A run in whose second round a node is killed; in the third, client 0 waits until it is back."""
    out = folder.parent / "node"
    order(folder, {3: {2: "hang"}, 0: {3: "wait"}})

    def act() -> None:
        until(lambda: done(out, 1))
        until(lambda: bool(stage.find("flwr-clientapp")))
        time.sleep(5.0)
        stage.kill("node-3")
        print(
            f"node: missed {until(lambda: 'went offline' in text(out)):.0f} s after it was killed"
        )
        time.sleep(RESTART)
        stage.start_node("node-3", "3")
        up = until(lambda: text(out).count("client 3 is served by") == 2)
        print(f"node: serves {up:.0f} s after it was started again")
        go(folder)

    thread = meanwhile(act)
    held(stage, folder, "node", 4, deadline=240.0)
    thread.join(1.0)
    assert not thread.is_alive()
    return out


def test_a_node_is_killed_in_a_round(bereft: Path) -> None:
    rows = lines(bereft, "metrics.jsonl")
    assert [row["reported"] for row in rows[:3]] == [4, 3, 3]
    assert [line for line in log(bereft) if line.startswith("round 2")] == [
        "round 2: client 3 does not count: its node went offline"
    ]


def test_a_node_is_restarted(bereft: Path) -> None:
    assert lines(bereft, "metrics.jsonl")[3]["reported"] == CLIENTS
    assert [line for line in log(bereft) if line.startswith("round 4")] == []
