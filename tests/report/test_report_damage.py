"""Damaged run folders: each damaged file or line is named in a sentence and costs only itself;
never a traceback.
"""

import json
import random
import shutil

import fake
import numpy as np
import pytest

from kairosfl.errors import UserError
from kairosfl.report.comparison import compare
from kairosfl.report.page import write_report
from kairosfl.report.read import read_run, read_study
from kairosfl.report.watch import LivePage

FILES = (
    "metrics.jsonl",
    "clients.jsonl",
    "partition.json",
    "run.json",
    "summary.json",
    "config.toml",
    "sweep.json",
)
DEEP = b"[" * 100_000
LONG = b'{"a": ' + b"9" * 5000 + b"}"
WHOLE = (b"", b"null", b"[1]", b'"text"', b"{", b"\xff\xfe\x00", b"NaN", b"\0" * 64, DEEP, LONG)
VALUES = (
    None,
    True,
    -1,
    0,
    10**400,
    1e308,
    float("nan"),
    "x",
    "\ud800",
    [],
    [None],
    [["x"]],
    {},
    {"a": 1},
    "1",
)


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = fake.write_sweep(
        tmp_path_factory.mktemp("good"),
        seeds=2,
        rounds=6,
        algorithms={"fedavg": 0.5, "fedaware + alt": 0.6},
        clients=5,
    )
    rows = [
        json.loads(line) for line in (folder / "1-0" / "clients.jsonl").read_text().splitlines()
    ]
    for row in rows:
        row["cosines"] = np.eye(len(row["ids"])).tolist()
    (folder / "1-0" / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def study(good, tmp_path):
    return shutil.copytree(good, tmp_path / "study")


def place(study, name):
    return study / name if name == "sweep.json" else study / "1-0" / name


def look(study):
    """Everything that reads a folder; the sentences that it says, or the mistake that it names."""
    said: list[str] = []
    try:
        write_report([study], study.parent / "report.html", say=said.append)
        found = compare([study])
        assert set(found.damaged) <= set(said)
        assert found.table()
        found.notes()
        json.dumps(found.numbers())
    except UserError as error:
        said.append(str(error))
    return said


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_rubbish_is_named_and_costs_only_itself(study, name):
    path = place(study, name)
    whole = path.read_bytes()
    for content in WHOLE:
        path.write_bytes(content)
        said = look(study)
        if content not in (
            (b"", b"[1]") if name.endswith("toml") else (b"",) if name.endswith("jsonl") else ()
        ):
            assert any(str(path) in sentence for sentence in said), (name, content[:20], said)
        assert all(name in sentence for sentence in said), said
        page = (study.parent / "report.html").read_text()
        assert (path.name in page.split("<main>")[0]) == bool(said)
    path.write_bytes(whole)
    assert look(study) == []


@pytest.mark.parametrize("name", FILES)
def test_a_directory_in_the_place_of_a_file_is_named(study, name):
    path = place(study, name)
    path.unlink()
    path.mkdir()
    (sentence,) = look(study)
    assert str(path) in sentence
    assert path.name in LivePage(study).newer("")


@pytest.mark.parametrize("name", FILES)
def test_values_of_wrong_types_never_give_a_traceback(study, name):
    """A handful of seeded changes of single values, lost keys, and damaged bytes."""
    path = place(study, name)
    whole = path.read_bytes()
    draw = random.Random(name)
    for turn in range(12):
        path.write_bytes(damaged(whole, name, draw) if turn % 3 else flipped(whole, draw))
        look(study)


def flipped(content, draw):
    changed = bytearray(content)
    for _ in range(3):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return bytes(changed)


def damaged(content, name, draw):
    lines = content.decode().splitlines()
    if name.endswith("toml"):
        place = draw.choice([i for i, line in enumerate(lines) if "=" in line])
        wrong = draw.choice(
            [
                "[]",
                "'x'",
                "-1",
                "nan",
                "1e400",
                "[[1], {a = 2}]",
                "true",
                "1979-05-27",
                f"0x{'f' * 5000}",
            ]
        )
        lines[place] = f"{lines[place].partition('=')[0]} = {wrong}"
        return "\n".join(lines).encode()
    place = draw.randrange(len(lines))
    record = json.loads(lines[place])
    change(record, draw)
    lines[place] = json.dumps(record)
    return "".join(f"{line}\n" for line in lines).encode()


def change(record, draw):
    """Another value, or none, for a key of the record or of something inside it."""
    key = draw.choice(list(record) if isinstance(record, dict) else range(len(record)))
    if isinstance(record[key], dict | list) and record[key] and draw.random() < 0.6:
        return change(record[key], draw)
    if draw.random() < 0.2:
        del record[key]
    else:
        record[key] = draw.choice(VALUES)
    return None


def test_a_damaged_line_costs_that_line_and_a_damaged_value_that_value(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=6)
    path = run / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b'{"round": 2, "accuracy": \xff}\n'
    lines[3] = lines[3].replace(b'"accuracy": 0.', b'"accuracy": "high", "was": 0.')
    lines[4] = b"[5]\n"
    path.write_bytes(b"".join(lines))
    data = read_run(run)
    assert data.column("round").tolist() == [1, 3, 4, 6]
    assert np.isfinite(data.column("accuracy")).tolist() == [True, True, False, True]
    assert np.isfinite(data.column("fgn")).all()
    assert data.damaged == (
        f"{path}: lines 2 and 5 are damaged and left out.",
        f"{path}: accuracy in round 4 is damaged and left out.",
    )
    assert data.done
    (note,) = compare([run]).notes()
    assert note == "fedavg: missing from metrics.jsonl, so that later costs are unknown: 2 rounds"
    sent = data.total("bytes_down", "bytes_up")
    assert np.isfinite(sent).tolist() == [
        True,
        False,
        False,
        False,
    ]  # what round 2 cost is not known


def test_damaged_fields_of_clients_are_left_out_one_by_one(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3, clients=4)
    rows = [
        {"round": 1, "ids": [0, 1], "weights": [0.5], "epochs": [1, 2]},
        {"round": 2, "ids": [0, "1"], "weights": [0.5, 0.5]},
        {
            "round": 3,
            "ids": [2, 3],
            "weights": [0.25, None],
            "lambda": {"x": 1},
            "cosines": [[1], [1, 2]],
        },
    ]
    path = run / "clients.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_run(run)
    assert data.damaged == ()
    assert data.clients == [
        {"round": 1, "ids": [0, 1], "epochs": [1, 2]},
        {"round": 3, "ids": [2, 3], "weights": [0.25, None]},
    ]
    assert data.clients_damaged == (
        f"{path}: weights in round 1 is damaged and left out.",
        f"{path}: ids in round 2 is damaged and left out.",
        f"{path}: lambda in round 3 is damaged and left out.",
        f"{path}: cosines in round 3 is damaged and left out.",
    )


def test_clients_may_be_a_round_ahead_of_the_metrics_while_a_run_goes_on(tmp_path):
    run = fake.write_run(tmp_path / "a", algorithm="fedaware", rounds=5, done=False)
    path = run / "metrics.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    assert look(tmp_path) == []


def test_a_run_without_a_readable_line_is_named_next_to_the_others(study):
    (study / "1-0" / "metrics.jsonl").write_text("rubbish\n")
    found = read_study([study])
    assert sum(len(group.runs) for group in found.groups) == 3
    assert found.damaged == [
        f"{(study / '1-0').resolve()}/metrics.jsonl: line 1 is damaged and left out."
    ]
    with pytest.raises(
        UserError, match=r"has finished a round yet; .*metrics.jsonl: line 1 is damaged"
    ):
        read_study([study / "1-0"])


def test_a_run_whose_configuration_is_damaged_is_not_compared_with_others(study):
    (study / "1-0" / "config.toml").write_bytes(b"\xff")
    (study / "1-0" / "run.json").unlink()
    groups = read_study([study]).groups
    assert [(group.label, group.problem) for group in groups] == [
        ("fedavg", ""),
        ("1-0 · unknown data", "unknown data"),
        ("fedaware + alt", ""),
    ]


def test_the_live_page_says_once_what_is_damaged(study):
    (study / "1-0" / "run.json").write_text("{")
    said: list[str] = []
    live = LivePage(study, say=said.append)
    for rounds in (1, 2):
        path = study / "0-0" / "metrics.jsonl"
        path.write_text(path.read_text() + "\n" * rounds)
        live._due = 0.0
        assert "run.json is not valid JSON" in live.newer("")
    assert len(said) == 1


def test_a_partition_with_null_for_the_number_of_classes_costs_nothing_else(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3)
    partition = json.loads((run / "partition.json").read_text()) | {"classes": None}
    (run / "partition.json").write_text(json.dumps(partition))

    study = read_study([run])

    assert (study.groups[0].runs[0].diverged, study.all_damaged()) == (None, [])
