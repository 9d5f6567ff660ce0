"""`kairosfl deploy status`: what a deployed run is doing, from its folder."""

from __future__ import annotations

import json
import multiprocessing
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

pytest.importorskip("flwr")
from flower_grid import FakeGrid, Node
from flwr.app import Context, Message

from kairosfl import deploy
from kairosfl.cli import app
from kairosfl.deploy.status import status, text
from kairosfl.engines.flower import roster
from kairosfl.engines.flower.board import FILE, Board
from kairosfl.engines.flower.client import client_app
from kairosfl.report.watch import LivePage
from kairosfl.runs.lock import lock
from kairosfl.runs.prepare import build_task

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = """
[data]
name = "digits"
clients = 3
[train]
rounds = 2
cohort = 3
[run]
threads = 1
[deploy]
quorum = 0.0
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in which client 2 always fails."""
    (tmp_path / "run.toml").write_text(CONFIG)
    task = build_task(deploy.load(tmp_path / "run.toml")[0])
    out = tmp_path / "out"

    def broken(message: Message, context: Context) -> Message:
        raise OSError("no battery")

    good = client_app(lambda _: task)
    nodes = {i: Node(bytes([i]), broken if i == 2 else good, str(i)) for i in range(3)}
    (tmp_path / "out").mkdir()
    roster.save(out / "roster.json", {i: roster.fingerprint(bytes([i])) for i in range(3)})
    deploy.serve(FakeGrid(nodes), lambda _: task, tmp_path / "run.toml", out)
    return out


def test_a_finished_run(run: Path) -> None:
    found = status(run)
    assert (found["state"], found["done"], found["rounds"]) == ("finished", 2, 2)
    assert found["clients"] == ["0", "1", "2"]
    assert found["current"]["round"] == 2
    assert sorted(found["current"]["reported"]) == [0, 1]
    assert found["current"]["failed"].keys() == {"2"}
    assert found["current"]["online"] == [0, 1, 2]
    assert found["current"]["seen"].keys() == {"0", "1"}
    assert "no battery" in found["faults"][-1]
    lines = text(found)
    assert lines[0] == f"{run}: finished, 2 of 2 rounds (fedavg)"
    assert lines[1].startswith("round 2: accuracy 0.")
    assert "2 reported, 1 rejected" in lines[1]


def test_the_live_report_follows_a_deployed_run(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    task, out = build_task(deploy.load(tmp_path / "run.toml")[0]), tmp_path / "out"
    page, seen = LivePage(out), []
    good = client_app(lambda _: task)

    def watched(message: Message, context: Context) -> Message:
        if message.metadata.group_id == "2":  # in the middle of the second round
            seen.append((page.newer(""), status(out)["done"]))
        return good(message, context)

    nodes = {i: Node(bytes([i]), watched if i == 0 else good, str(i)) for i in range(3)}
    deploy.serve(FakeGrid(nodes), lambda _: task, tmp_path / "run.toml", out)
    ((during, done),) = seen
    page._due = 0.0
    after = page.newer("")
    assert done == 1
    rounds = [json.loads(re.search(r'"round":(\[[^]]*\])', text)[1]) for text in (during, after)]
    assert rounds == [[1], [1, 2]]


def hold(path: Path, held: object, done: object) -> None:
    with lock(path):
        held.set()  # type: ignore[attr-defined]
        done.wait(60)  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_run_in_progress_and_one_that_was_stopped(run: Path) -> None:
    (run / "summary.json").unlink()
    now = {
        "round": 3,
        "phase": "training",
        "asked": [0, 1, 2, 3],
        "needed": 3,
        "reported": [0],
        "began": 100.0,
    }
    now |= {
        "until": 160.0,
        "failed": {"2": "its update is not finite"},
        "seen": {"0": 108.0, "1": 60.0},
    }
    (run / FILE).write_text(json.dumps(now))
    assert text(status(run))[1].startswith("No server is using the folder;")
    fork = multiprocessing.get_context("fork")
    held, done = fork.Event(), fork.Event()
    process = fork.Process(target=hold, args=(run, held, done))
    process.start()
    assert held.wait(60)
    try:
        found = status(run)
        assert found["state"] == "running"
        assert text(found, at=110.0)[2:7] == [
            "round 3: training for 10 s; 1 of 4 reported, 3 needed, at most 50 s more",
            "  client 0: reported; last report 2 s ago",
            "  client 1: no answer so far; last report 50 s ago",
            "  client 2: rejected: its update is not finite; no report yet",
            "  client 3: no answer so far; no report yet",
        ]
    finally:
        done.set()
        process.join()


def test_the_command(run: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["deploy", "status", str(run)])
    assert done.exit_code == 0
    assert done.stdout.startswith(f"{run}: finished, 2 of 2 rounds")
    assert (
        json.loads(CliRunner().invoke(app, ["deploy", "status", str(run), "--json"]).stdout)["done"]
        == 2
    )
    nothing = CliRunner().invoke(app, ["deploy", "status", str(tmp_path)])
    assert nothing.exit_code == 2


@pytest.mark.parametrize(
    "damage", ["", "[]", '{"seen": 5}', '{"round": "x", "seen": {"0": "y"}, "asked": 5}']
)
def test_a_damaged_file_is_no_status(run: Path, damage: str) -> None:
    (run / FILE).write_text(damage)
    assert text(status(run))[0].endswith("finished, 2 of 2 rounds (fedavg)")
    assert isinstance(Board(run).seen, dict)


def test_a_damaged_roster_is_no_status(run: Path) -> None:
    (run / "roster.json").write_text('{"x": "y", "2": "z", "10": "z"}')
    assert status(run)["clients"] == ["2", "10"]


def test_a_full_disk_does_not_stop_a_round(tmp_path: Path) -> None:
    (tmp_path / f".{FILE}.part").symlink_to("/dev/full")
    board = Board(tmp_path)
    board.gather(1, [0])
    board.begin(1, 60.0, {})
    board.outcome(0, None)
    board.end([0])
    assert not (tmp_path / FILE).is_file()
