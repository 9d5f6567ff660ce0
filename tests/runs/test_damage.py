"""A damaged line costs that line alone, and is named."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import cut_lines, read_lines
from kairosfl.runs.metrics import needed

TABLES = {
    "data": {"clients": 12},
    "model": {"hidden": [8]},
    "train": {"rounds": 6, "cohort": 3},
    "run": {"engine": "loop", "checkpoint_every": 1},
}
DAMAGE = {
    "a byte": lambda line: line.replace(b"{", b"x", 1),
    "not UTF-8": lambda line: line.replace(b'"round"', b'"r\xffund"'),
    "another key": lambda line: line.replace(b'"round"', b'"rounb"'),
    "cut": lambda line: line[: len(line) // 2] + b"\n",
    "a list": lambda line: b"[1]\n",
    "null": lambda line: b"null\n",
    "zeros": lambda line: bytes(len(line) - 1) + b"\n",
    "nested": lambda line: b"[" * 100_000 + b"\n",
    "a round far off": lambda line: line.replace(b'"round": 3', b'"round": 93'),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    return experiment.start(resolve(TABLES), folder), folder


@pytest.fixture
def stopped(tmp_path):
    """A run that was stopped in the fifth of six rounds."""

    def stop(row):
        if row["round"] == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.start(resolve(TABLES), tmp_path / "run", notify=stop)
    return tmp_path / "run"


def damage(path, how, number=3):
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number - 1] = DAMAGE[how](lines[number - 1])
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["metrics.jsonl", "clients.jsonl"])
def test_a_damaged_line_costs_that_line_alone(whole, stopped, name, how):
    damage(stopped / name, how)
    said = []
    summary = experiment.resume(stopped, say=said.append)
    expected = f"line 3 of {stopped / name} is damaged: the records of its round are lost"
    assert expected in said
    assert expected in (stopped / "log.txt").read_text().splitlines()
    assert [row["round"] for row in read_lines(stopped / name)] == [1, 2, 4, 5, 6]
    rows = list(read_lines(whole[1] / "metrics.jsonl"))
    lost = [3] if name == "metrics.jsonl" else []
    assert summary["missing_rounds"] == lost
    assert summary["rounds"] == 6
    assert summary["bytes_up"] == sum(row["bytes_up"] for row in rows if row["round"] not in lost)
    assert summary["accuracy"] == whole[0]["accuracy"]


def test_a_column_that_the_summary_needs(stopped):
    path = stopped / "metrics.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"bytes_up"', b'"bytes_vp"', 1))
    assert experiment.resume(stopped)["missing_rounds"] == [1]


def test_damage_while_the_run_goes_on_is_named_at_its_end(tmp_path):
    def listen(row):
        if row["round"] == 5:
            damage(tmp_path / "run" / "metrics.jsonl", "a byte")

    summary = experiment.start(resolve(TABLES), tmp_path / "run", notify=listen)
    assert summary["missing_rounds"] == [3]
    assert "line 3 of" in (tmp_path / "run" / "log.txt").read_text()


def test_the_terminal_says_that_rounds_are_missing(stopped):
    damage(stopped / "metrics.jsonl", "a byte")
    result = CliRunner().invoke(app, ["resume", str(stopped)])
    assert result.exit_code == 0
    assert f"line 3 of {stopped / 'metrics.jsonl'} is damaged" in result.stderr
    assert f"The metrics of round 3 are missing; {stopped / 'log.txt'} says why." in result.stderr


def test_the_last_line_of_a_killed_process_is_no_damage(stopped):
    with (stopped / "metrics.jsonl").open("ab") as file:
        file.write(b'{"round": 5, "accu')
    said = []
    assert experiment.resume(stopped, say=said.append)["missing_rounds"] == []
    assert not any("damaged" in line for line in said)


@pytest.mark.parametrize("rounds", [2, 3])
def test_lines_that_are_cut_off_are_damaged_only_if_their_round_stays(tmp_path, rounds):
    path, named = tmp_path / "a.jsonl", []
    path.write_text('{"round": 1}\n{"round": 2}\n{"rou\n')
    cut_lines(path, rounds, named.append)
    assert path.read_text() == '{"round": 1}\n{"round": 2}\n'
    assert named == ([3] if rounds == 3 else [])


def test_readers(tmp_path):
    path = tmp_path / "a.jsonl"
    assert list(read_lines(path)) == []
    path.write_text(
        '{"round": 1, "accuracy": null}\n\n{"round": true}\n3\n{"round": 2, "accuracy": "x"}\n'
    )
    named = []
    assert [row["round"] for row in read_lines(path, named.append)] == [1, 2]
    assert named == [3, 4]
    assert [
        row["round"] for row in read_lines(path, needs={"accuracy": needed("accuracy")["accuracy"]})
    ] == [1]
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        list(read_lines(tmp_path))


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b"\xff"])
def test_a_damaged_summary_is_made_again(whole, tmp_path, content):
    summary = experiment.start(resolve(TABLES), tmp_path / "run")
    (tmp_path / "run" / "summary.json").write_bytes(content)
    assert experiment.resume(tmp_path / "run") == summary
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
