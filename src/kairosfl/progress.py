"""Progress of runs: live bars on a terminal and in a notebook, plain lines elsewhere."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column

from kairosfl.runs.history import main_value, spent
from kairosfl.wording import counted, measured, pace

PLAIN_LINES = 50  # per run, without a terminal
SECONDS_PER_LINE = 60.0  # of a sweep, without a terminal
SECONDS_PER_UPDATE = 0.1  # in a notebook
BAR_WIDTH = 20


def numbers() -> list[ProgressColumn]:
    """The bar, the counts and the time left; never cut off, even in a narrow terminal."""
    return [
        BarColumn(bar_width=None, table_column=Column(width=12)),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=9)),
        TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=7)),
    ]


def text(what: str) -> ProgressColumn:
    """A text column, truncated to the space that is left."""
    return TextColumn(
        what, markup=False, table_column=Column(ratio=1, no_wrap=True, overflow="ellipsis")
    )


class _Screen:
    """Bars on a terminal, lines elsewhere, nothing if `quiet`."""

    progress: Progress

    def __init__(self, quiet: bool, console: Console | None) -> None:
        self.quiet = quiet
        self.console = Console(stderr=True) if console is None else console
        self.live = not quiet and self.console.is_terminal

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.live:
            # Bars of what was interrupted would stay as if it ran on.
            self.progress.live.transient |= kind is not None
            self.progress.stop()

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        if self.quiet:
            return
        # Not while rich's own thread redraws the bars: they would be drawn twice, and the copy
        # above would stay.
        with self.progress.live._lock:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)


class _Notebook:
    """One line below a notebook's cell, replaced in place; rich would need ipywidgets for it."""

    def __init__(self) -> None:
        import IPython.display

        show: Any = IPython.display.display
        self.handle = show({"text/plain": ""}, raw=True, display_id=True)
        self.last = -math.inf

    def update(self, done: int, rounds: int, words: str) -> None:
        now = time.perf_counter()
        if now - self.last < SECONDS_PER_UPDATE and done < rounds:
            return
        self.last = now
        full = BAR_WIDTH * done // max(rounds, 1)
        bar = "█" * full + "░" * (BAR_WIDTH - full)
        self.handle.update({"text/plain": f"{bar} {done}/{rounds}  {words}"}, raw=True)


class RunProgress(_Screen):
    """Shows the metrics of a run as they arrive; called with one row per round."""

    notebook: _Notebook | None = None

    def __init__(
        self,
        rounds: int,
        *,
        quiet: bool = False,
        done: int = 0,
        critical: bool = True,
        console: Console | None = None,
    ) -> None:
        super().__init__(quiet, console)
        self.critical = critical  # whether to say what the detector says
        self.rounds = rounds
        self.done = done
        self.first = done  # the rounds before those of this session
        self.score: float | None = None
        self.began: float | None = None
        self.progress = Progress(
            *numbers(), text("{task.description}"), console=self.console, expand=True
        )

    def __enter__(self) -> Self:
        if self.live:
            self.progress.start()
            self.task = self.progress.add_task("rounds", total=self.rounds, completed=self.done)
        elif not self.quiet and self.console.is_jupyter:
            self.notebook = _Notebook()
        return self

    def __call__(self, row: dict[str, Any]) -> None:
        """Show one more round."""
        self.done = row["round"]
        score = main_value(row)
        if score is not None:
            self.score = score
        if self.began is None:  # set-up before the first round does not count towards the speed
            self.began = time.perf_counter() - row["seconds"]
            self.first = self.done - 1
        speed = (self.done - self.first) / max(time.perf_counter() - self.began, 1e-9)
        words = describe(row, self.score, critical=self.critical)
        if self.live:
            self.progress.update(
                self.task, completed=self.done, description=f"{words}  {pace(speed)}"
            )
        elif self.notebook is not None:
            self.notebook.update(self.done, self.rounds, f"{words}  {pace(speed)}")
        elif not self.quiet and self._prints():
            seconds = (self.rounds - self.done) / max(speed, 1e-9)
            time_left = f"{seconds:.0f} s" if seconds < 90 else duration(seconds)
            print(
                f"round {self.done}/{self.rounds}  {words}  {pace(speed)}  {time_left} left",
                file=sys.stderr,
            )

    def _prints(self) -> bool:
        """Whether this round is one of those that are printed: some, and the last."""
        every = -(-self.rounds // PLAIN_LINES)
        return self.done % every == 0 or self.done == self.rounds


class SweepProgress(_Screen):
    """Shows a sweep: one bar for all rounds, and one for each active run.

    What the runs are may be told later, by `plan`; until then the bar has no end.
    """

    def __init__(
        self,
        rounds: dict[str, int] | None = None,
        *,
        quiet: bool = False,
        critical: Collection[str] | None = None,
        console: Console | None = None,
    ) -> None:
        super().__init__(quiet, console)
        self.rounds = {} if rounds is None else rounds
        self.critical = critical  # the runs of which to say what the detector says; None: all
        self.done = self.done_now = 0  # rounds of all runs, and those of them done in this session
        self.began = self.last_line = time.perf_counter()
        self.progress = Progress(
            *numbers(),
            text("{task.fields[name]}"),
            text("{task.description}"),
            console=self.console,
            expand=True,
        )

    def __enter__(self) -> Self:
        if self.live:
            self.progress.start()
            total = sum(self.rounds.values()) if self.rounds else None
            self.all_runs = self.progress.add_task("", total=total, name="all runs")
            self.bars: dict[str, TaskID] = {}
        return self

    def plan(self, rounds: dict[str, int]) -> None:
        """How many rounds every run has."""
        self.rounds = rounds
        self.began = time.perf_counter()
        if self.live:
            self.progress.reset(self.all_runs, total=sum(rounds.values()))

    def state(self, words: str) -> None:
        """What is being done before the first round; only a bar shows it."""
        if self.live:
            self.progress.update(self.all_runs, description=words)

    def begin(self, name: str, done: int) -> Callable[[dict[str, Any]], None]:
        """Register a run of which `done` rounds are finished; returns a listener for its rounds."""
        rounds = self.rounds[name]
        title = f"run {list(self.rounds).index(name) + 1}/{len(self.rounds)} {name}"
        critical = self.critical is None or name in self.critical
        self.done += done
        if self.live:
            self.progress.advance(self.all_runs, done)

        def listen(row: dict[str, Any]) -> None:
            self.done += 1
            self.done_now += 1
            if not self.live:
                self._print_progress()
            else:
                if name not in self.bars:
                    self.bars[name] = self.progress.add_task("", total=rounds, name=title)
                self.progress.advance(self.all_runs)
                words = describe(row, main_value(row), critical=critical)
                over = row["round"] == rounds
                self.progress.update(
                    self.bars[name], completed=row["round"], description=words, visible=not over
                )
            if row["round"] == rounds:
                self.say(f"{title}: {describe(row, main_value(row), critical=critical)}")

        return listen

    def _print_progress(self) -> None:
        """Without a terminal: print the overall progress from time to time."""
        now = time.perf_counter()
        if now - self.last_line >= SECONDS_PER_LINE:
            self.last_line = now
            total = sum(self.rounds.values())
            time_left = duration((total - self.done) * (now - self.began) / self.done_now)
            self.say(f"all runs: {self.done}/{counted(total, 'round')}, about {time_left} left")


class TuneProgress(_Screen):
    """Shows a search: one bar for the budget."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(quiet, console)
        self.last_line = time.perf_counter()
        self.progress = Progress(
            BarColumn(bar_width=None, table_column=Column(width=24)),
            TaskProgressColumn(table_column=Column(no_wrap=True, min_width=5)),
            text("{task.description}"),
            console=self.console,
            expand=True,
            # it ends with what was last running, and not always with the whole budget
            transient=True,
        )

    def __enter__(self) -> Self:
        if self.live:
            self.progress.start()
            self.task = self.progress.add_task("", total=1.0)
        return self

    def update(self, part: float, words: str) -> None:
        """The part of the budget that is used, and what is being done."""
        now = time.perf_counter()
        if self.live:
            self.progress.update(self.task, completed=part, description=words)
        elif now - self.last_line >= SECONDS_PER_LINE:
            self.last_line = now
            self.say(f"{100 * part:.0f} % of the budget: {words}")


def describe(row: dict[str, Any], score: float | None, *, critical: bool = True) -> str:
    """One round in a few words; `score` is the main metric as it was last measured.

    `critical`: whether the detector's answer is among them.
    """
    name = row.get("metric", "accuracy")
    values = {name.replace("_", " "): score} | {"loss": row["loss"]}
    parts = []
    diverged = False
    for word, value in values.items():
        if value is None:
            continue
        if math.isfinite(value):
            parts.append(f"{word} {measured(value)}")
        else:
            diverged = True
    if diverged:
        parts.append("diverged")
    if row["rejected"]:
        parts.append(f"cohort {row['reported']}/{row['cohort']}")
    else:
        parts.append(f"cohort {row['cohort']}")
    if critical and row["critical"]:
        parts.append("critical")
    if "time" in row:
        parts.append(f"clock {duration(row['time'])}")
    for column in spent(row):
        if row.get(column) is not None:
            parts.append(f"{column.replace('_', ' ')} {row[column]:.3g}")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """A duration in readable units."""
    for size, one, many in (
        (86400, "day", "days"),
        (3600, "hour", "hours"),
        (60, "minute", "minutes"),
    ):
        if seconds >= 10 * size:
            return f"{seconds / size:.0f} {many}"
        if seconds >= 1.5 * size:
            return f"{seconds / size:.1f} {many}"
        if seconds >= size:
            return f"1 {one}"
    return f"{max(2, round(seconds))} seconds"
