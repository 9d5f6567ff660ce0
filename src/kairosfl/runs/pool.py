"""Recorded runs that train together: side by side on a batched engine, in turn on any other.

Runs are added at any time, also while others train. `advance` does a piece of work and yields the
runs that ended in it, each with its summary or with the error that stopped it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import Writing
from kairosfl.runs.engines import SharedEngine
from kairosfl.runs.folder import Folder
from kairosfl.runs.lock import Displaced
from kairosfl.runs.prepare import Ready, within_memory

if TYPE_CHECKING:
    from kairosfl.engines.batched import Batched
    from kairosfl.engines.batched.jobs import Ticket

Outcome = dict[str, Any] | UserError


@dataclass(eq=False)
class Pending:
    """A run that is to be executed.

    Args:
        name: What it is called.
        ready: What it needs, but for an engine.
        folder: Where it is recorded.
        begun: Whether it is one that goes on.
        notify: Called with the metrics of every round.
        watch: Called with the metrics and the vector of every round; may end the run.
        writing: How long the checkpoints of all runs of the sweep or search have taken.
    """

    name: str
    ready: Ready
    folder: Folder
    begun: bool
    notify: experiment.Notify | None = None
    watch: experiment.Watch | None = None
    writing: Writing | None = None

    def open(self, engine: Engine, command: str) -> experiment.RecordedRun:
        """Begin it, or continue it if it was begun."""
        prepared = self.ready.on(engine)
        others: dict[str, Any] = {
            "notify": self.notify,
            "watch": self.watch,
            "writing": self.writing,
        }
        if self.begun:
            return experiment.reopen(prepared, self.folder, **others)
        return experiment.begin(prepared, self.folder, command=command, **others)


class Together:
    """Runs on one batched engine: the clients of all of them share one queue for its slots."""

    def __init__(self, engine: Batched, command: str = "") -> None:
        self.engine = engine
        self.command = command
        self.waiting: list[Pending] = []
        self.active: dict[Pending, experiment.RecordedRun] = {}
        self._training: dict[Ticket, Pending] = {}

    def __bool__(self) -> bool:
        return bool(self.waiting or self._training)

    def add(self, run: Pending) -> None:
        """Queue a run; it begins as soon as there is room for its largest cohort."""
        self.waiting.append(run)

    def advance(self) -> Iterator[tuple[Pending, Outcome]]:
        """Begin the runs that fit, and train until one cohort is complete.

        An error of the engine's own is raised.
        """
        for run in starting(self.waiting, list(self.active), self.engine.room):
            self.waiting.remove(run)
            yield from self._next_round(run, None)
        if self._training:
            with within_memory():
                ticket = self.engine.collect()
            yield from self._next_round(self._training.pop(ticket), ticket.reports())

    def _next_round(
        self, run: Pending, reports: Reports | None
    ) -> Iterator[tuple[Pending, Outcome]]:
        """The next round of a run, the first without reports; or its end."""
        try:
            with within_memory():
                if run not in self.active:
                    self.active[run] = run.open(
                        SharedEngine(self.engine, run.ready.task), self.command
                    )
                recorded = self.active[run]
                briefs = next(recorded) if reports is None else recorded.send(reports)
                self._training[self.engine.submit(run.ready.task, briefs)] = run
        except StopIteration as end:
            del self.active[run]
            yield run, end.value
        except Displaced:  # none of the others may write either
            self.active.pop(run, None)
            raise
        except UserError as error:
            self.active.pop(run, None)
            yield run, error

    def close(self) -> None:
        """Stop the active runs; each saves its last round."""
        for recorded in self.active.values():
            recorded.close()


class InTurn:
    """Runs one after another, each on an engine of its own."""

    def __init__(self, build: Callable[[Pending], Engine], command: str = "") -> None:
        self.build = build
        self.command = command
        self.waiting: list[Pending] = []
        self._now: tuple[Pending, Engine, experiment.RecordedRun, Briefs] | None = None

    def __bool__(self) -> bool:
        return bool(self.waiting or self._now)

    def add(self, run: Pending) -> None:
        """Queue a run."""
        self.waiting.append(run)

    @property
    def active(self) -> list[Pending]:
        """The run that trains."""
        if self._now is None:
            return []
        return [self._now[0]]

    def advance(self) -> Iterator[tuple[Pending, Outcome]]:
        """Train one round."""
        run = self._now[0] if self._now else self.waiting.pop(0)
        try:
            with within_memory():
                if self._now is None:
                    engine = self.build(run)
                    recorded = run.open(engine, self.command)
                    briefs = next(recorded)
                else:
                    _, engine, recorded, briefs = self._now
                    briefs = recorded.send(engine.train(briefs))
                self._now = run, engine, recorded, briefs
        except StopIteration as end:
            self._now = None
            yield run, end.value
        except Displaced:
            self.close()
            raise
        except UserError as error:
            self.close()
            yield run, error

    def close(self) -> None:
        """Stop the active run; it saves its last round."""
        if self._now is not None:
            self._now[2].close()
        self._now = None


def starting(waiting: Sequence[Pending], active: Sequence[Pending], room: int) -> list[Pending]:
    """Which runs to begin beside the active ones: those whose largest cohorts fit, at least one."""
    chosen: list[Pending] = []
    taken = sum(run.ready.largest for run in active)
    for run in waiting:
        if not (active or chosen) or taken + run.ready.largest <= room:
            chosen.append(run)
            taken += run.ready.largest
    return chosen
