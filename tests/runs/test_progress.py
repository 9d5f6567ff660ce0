"""Progress on a terminal of the usual width: the numbers are never what is cut off."""

from __future__ import annotations

import contextlib
import io
import itertools
import math
import re
import threading

import pytest
from rich.console import Console

from kairosfl import progress
from kairosfl.progress import RunProgress, SweepProgress, TuneProgress, duration

ROW = {
    "round": 7,
    "accuracy": 0.4567,
    "loss": 1.2345,
    "cohort": 10,
    "reported": 9,
    "rejected": 1,
    "critical": True,
}


def terminal(width):
    return Console(
        file=io.StringIO(),
        force_terminal=True,
        width=width,
        color_system=None,
        legacy_windows=False,
    )


def shown(console):
    """The lines that stay, without what moves the cursor."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())
    return [line for line in plain.splitlines() if line.strip()]


@pytest.mark.parametrize("width", [60, 80, 200])
def test_one_run(width):
    console = terminal(width)
    with RunProgress(500, console=console) as show:
        show(ROW | {"seconds": 0.1})
    last = shown(console)[-1]
    assert "7/500" in last
    assert "accuracy 0.4567" in last
    assert len(last) <= width


@pytest.mark.parametrize(
    ("loss", "words"),
    [(1.2345, "loss 1.2345"), (1.5e30, "loss 1.50e+30"), (math.inf, "diverged"), (None, "")],
)
def test_a_loss_that_explodes_is_short_and_one_that_is_not_finite_is_called_diverged(loss, words):
    rest = "cohort 9/10  critical"
    assert progress.describe(ROW | {"loss": loss}, None) == f"{words}  {rest}".strip()


def test_a_metric_that_explodes_is_short_and_one_that_is_not_finite_is_left_to_diverged():
    row = ROW | {"metric": "rmse", "rejected": 0, "critical": False, "loss": 2e12}
    assert progress.describe(row, 3e6) == "rmse 3.00e+06  loss 2.00e+12  cohort 10"
    assert progress.describe(row | {"loss": math.nan}, math.inf) == "diverged  cohort 10"
    assert progress.describe(row | {"loss": math.nan}, 0.5) == "rmse 0.5000  diverged  cohort 10"
    assert progress.describe(row | {"metric": "loss"}, 2e12) == "loss 2.00e+12  cohort 10"


def left_on_screen(console):
    """The lines of the screen at the end, as a terminal would show them."""
    lines, row = [""], 0
    for code, times, text in re.findall(
        r"\x1b\[(?:(\d*)([A-Za-z])|[?\d;]*[a-z])|([^\x1b]+)", console.file.getvalue()
    ):
        if times == "A":
            row -= int(code or 1)
        elif times == "K":
            lines[row] = ""
        for part in re.split(r"(\n|\r)", text):
            if part == "\n":
                row += 1
                lines += [""] * (row + 1 - len(lines))
            elif part != "\r" and part:
                lines[row] = part
    return [line.rstrip() for line in lines if line.strip()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_no_bar_stays_after_an_interruption(error):
    console = terminal(80)
    with contextlib.suppress(error), RunProgress(500, console=console) as show:
        show(ROW | {"seconds": 0.1})
        raise error
    assert left_on_screen(console) == []
    console = terminal(80)
    with contextlib.suppress(error), SweepProgress({"a": 20, "b": 20}, console=console) as show:
        show.begin("a", 0)(ROW | {"round": 20})
        show.begin("b", 0)(ROW)
        raise error
    assert [line.split(":")[0] for line in left_on_screen(console)] == [
        "run 1/2 a"
    ]  # what was said stays


def test_a_search_leaves_its_lines_and_no_bar():
    console = terminal(80)
    with TuneProgress(console=console) as show:
        show.say("trial 0, 6 rounds")
        show.update(0.8, "1 running, 5 runs ended")
    assert left_on_screen(console) == ["trial 0, 6 rounds"]


def test_a_bar_that_ends_stays():
    console = terminal(80)
    with RunProgress(7, console=console) as show:
        show(ROW | {"seconds": 0.1})
    assert "7/7" in left_on_screen(console)[0]


def test_a_line_is_not_printed_while_the_bars_are_redrawn():
    console = terminal(80)
    with SweepProgress({"a": 20}, console=console) as show:
        redrawn = threading.Thread(target=lambda: show.say("a line"))
        with show.progress.live._lock:  # as rich's thread does
            redrawn.start()
            redrawn.join(0.2)
            assert redrawn.is_alive()
        redrawn.join(5)
    assert left_on_screen(console)[0] == "a line"


def test_a_bar_is_there_before_the_runs_are_known():
    console = terminal(80)
    with SweepProgress(console=console) as show:
        show.state("loading the data")
        show.progress.refresh()
        assert "0/?" in shown(console)[-1]
        assert "loading the data" in shown(console)[-1]
        show.plan({"a": 20, "b[1]": 20})
        show.state("")
        show.say("Skipping [b]")  # not markup
        show.begin("b[1]", 0)(ROW)
        show.progress.refresh()
    lines = shown(console)
    assert "Skipping [b]" in "".join(lines)
    assert "1/40" in lines[-2]
    assert "run 2/2 b[1]" in lines[-1]


def test_the_privacy_spent_is_shown():
    assert progress.describe(ROW | {"epsilon": 1.23456}, None).endswith("critical  epsilon 1.23")
    assert progress.describe(ROW | {"hypothetical_epsilon": 1.0}, None).endswith(
        "hypothetical epsilon 1"
    )
    assert progress.describe(ROW | {"local_epsilon": 9.5}, None).endswith("local epsilon 9.5")


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_sweep_of_long_names(width):
    console = terminal(width)
    names = [f"cifar10-fedavgm-aware-raw-seed{seed}-rounds20" for seed in range(3)]
    with SweepProgress(dict.fromkeys(names, 20), console=console) as show:
        show.begin(names[0], 5)
        show.begin(names[1], 0)(ROW)
    whole, run = shown(console)[-2:]
    assert "6/60" in whole
    assert "all runs" in whole
    assert "7/20" in run
    assert "run 2/3" in run
    assert "accurac" in run


def test_a_sweep_without_a_terminal_says_now_and_then_how_far_it_is(monkeypatch):
    clock = itertools.count(step=25.0)  # a round takes 25 seconds
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    console = Console(file=io.StringIO(), force_terminal=False, width=200)
    with SweepProgress({"a": 8, "b": 8}, console=console) as show:
        listen = show.begin("a", 3)
        for number in range(4, 9):
            listen(ROW | {"round": number})
    lines = shown(console)
    assert lines[:1] == ["all runs: 6/16 rounds, about 4.2 minutes left"]
    assert len(lines) == 2
    assert lines[1].startswith("run 1/2 a: accuracy 0.4567")


def test_durations_as_one_says_them():
    assert [duration(s) for s in (0.2, 42, 75, 150, 1800, 5000, 20000, 200000, 1e7)] == [
        "2 seconds",
        "42 seconds",
        "1 minute",
        "2.5 minutes",
        "30 minutes",
        "1 hour",
        "5.6 hours",
        "2.3 days",
        "116 days",
    ]
