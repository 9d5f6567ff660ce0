"""What fits a terminal: tables, lists, plurals, and runs that diverged, said as such."""

from __future__ import annotations

import json
import math

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner

from kairosfl.cli import app, screen
from kairosfl.cli.common import print_summary
from kairosfl.cli.screen import fitted, print_pairs, print_rows
from kairosfl.wording import counted, measured, pace

ROWS = [
    {
        "cell": "cifar10-fedavg",
        "reading": "as the text says",
        "accuracy, final 10 %": "55.21 ± 1.89",
        "rounds": "500",
    },
    {
        "cell": "cifar10-fedavg-aware-raw",
        "reading": "raw [vectors]",
        "accuracy, final 10 %": "25.10",
        "rounds": "500",
    },
]


@pytest.mark.parametrize("width", [60, 80, 100, None])
def test_a_table_keeps_to_the_width_and_says_what_it_leaves_out(capsys, monkeypatch, width):
    monkeypatch.setattr(screen, "width", lambda: width)
    rows = [row | {f"column {i}": "0123456789" for i in range(4)} for row in ROWS]
    print_rows(rows, first_out=["reading"])
    shown = capsys.readouterr().out.splitlines()
    left_out = [line for line in shown if line.startswith("Left out")]
    table = [line for line in shown if line not in left_out]
    assert max(cell_len(line) for line in table) <= (width or 1000)
    assert all("cifar10-fedavg-aware-raw" in "".join(table) for row in rows)
    assert "55.21 ± 1.89" in "".join(table)
    if width is None:
        assert not left_out
        assert "raw [vectors]" in shown[2]  # not taken for markup
    else:
        assert left_out[0].startswith(f"Left out to fit {width} columns: reading")


def test_headings_are_wrapped_before_a_column_is_left_out():
    assert fitted(ROWS, 80) == (list(ROWS[0]), [])
    assert fitted(ROWS, 46, ["reading"]) == (
        ["cell", "accuracy, final 10 %", "rounds"],
        ["reading"],
    )  # 24, 12 and 6
    assert fitted(ROWS, 45, ["reading"]) == (
        ["cell", "accuracy, final 10 %"],
        ["reading", "rounds"],
    )
    assert fitted(ROWS, 10)[0] == ["cell", "reading"]  # the first two stay


def test_a_table_is_turned_before_a_column_is_left_out(capsys, monkeypatch):
    monkeypatch.setattr(screen, "width", lambda: 60)
    heads = [f"{10 * i + 1}–{10 * i + 10}" for i in range(6)]
    print_rows(
        [{"rounds": f"points lost: {name}"} | dict.fromkeys(heads, "+1.2 ± 0.3") for name in "ab"],
        turn=True,
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-6:]] == heads
    assert max(map(len, lines)) <= 60


@pytest.mark.parametrize("width", [40, 60, 80])
def test_lists_are_wrapped_next_to_their_names(capsys, monkeypatch, width):
    monkeypatch.setattr(screen, "width", lambda: width)
    text = "words of a sentence that is long enough for several lines of a terminal, wherever it is"
    print_pairs([("short", text), ("a-name-of-some-length", text)], as_json=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    assert " ".join(shown.split()) == f"short {text} a-name-of-some-length {text}"


def test_what_goes_to_a_file_has_a_line_for_each(capsys, monkeypatch):
    monkeypatch.setattr(screen, "width", lambda: None)
    print_pairs([("name", "word " * 60)], as_json=False)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_width_is_that_of_columns_where_there_is_no_terminal(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert screen.width() is None
    monkeypatch.setenv("COLUMNS", "72")
    assert screen.width() == 72


@pytest.mark.parametrize("width", ["60", "80"])
@pytest.mark.parametrize(
    "words", [["list"], ["list", "rules"], ["list", "presets"], ["list", "data"], ["reproduce"]]
)
def test_lists_of_the_command_fit(monkeypatch, words, width):
    monkeypatch.setenv("COLUMNS", width)
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert max(map(cell_len, done.stdout.splitlines())) <= int(width)


def test_plurals():
    assert [counted(n, "round") for n in (0, 1, 2)] == ["0 rounds", "1 round", "2 rounds"]


def test_numbers_that_explode_are_in_scientific_notation():
    values = [0.0, 0.5, 12345.678, 1.5e30, -2e7, 3e-9]
    assert [measured(value) for value in values] == [
        "0.0000",
        "0.5000",
        "12345.6780",
        "1.50e+30",
        "-2.00e+07",
        "3.00e-09",
    ]


def summary(folder, losses, **more):
    """What the command prints about a run with these test losses."""
    folder.mkdir()
    rows = [
        {"round": i, "accuracy": 0.1, "loss": loss, "evaluated": True}
        for i, loss in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_summary(
        folder, {"rounds": len(losses), "accuracy": 0.1, "rejected": 0} | more, as_json=False
    )


def test_a_run_that_diverged_is_called_that(tmp_path, capsys):
    summary(tmp_path / "fine", [2.0, 1.0], rejected=1)
    told = capsys.readouterr()
    assert told.out == f"accuracy 0.1000 after 2 rounds, in {tmp_path / 'fine'}\n"
    assert (
        told.err
        == f"1 report does not count; see {tmp_path / 'fine' / 'log.txt'} for the reasons.\n"
    )
    for name, losses in {"exploded": [2.0, 3e30], "lost": [2.0, None]}.items():
        summary(tmp_path / name, losses, accuracy=math.nan)
        told = capsys.readouterr()
        assert told.out == f"accuracy not measured after 2 rounds, in {tmp_path / name}\n"
        assert told.err.startswith(
            "It diverged in round 2: from there on its test loss is not finite, or has exploded."
        )
    summary(tmp_path / "one", [2.0])
    assert "after 1 round, in" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("speed", "words"),
    [(12.34, "12.3 rounds/s"), (1.0, "1.0 rounds/s"), (0.04, "25.0 s/round"), (0.8, "1.2 s/round")],
)
def test_the_pace_of_quick_and_slow_rounds(speed: float, words: str) -> None:
    assert pace(speed) == words
