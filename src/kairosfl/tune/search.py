"""The search: trials run side by side, the best third goes on to more rounds, until the budget is used.

A search started again in the same folder continues: ended runs are left alone, unfinished ones resume.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import EVERY
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.engines import build_engine, largest, method, resolve_engine
from kairosfl.runs.files import read_json, write_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import flatten, updated
from kairosfl.runs.lock import lock
from kairosfl.runs.pool import InTurn, Pending, Together
from kairosfl.tasks.task import Task
from kairosfl.tune import outcomes
from kairosfl.tune.budget import ETA, Budget, stages
from kairosfl.tune.outcomes import Outcome
from kairosfl.tune.proposals import Proposals, Trial
from kairosfl.tune.space import defaults, overridden
from kairosfl.wording import counted

VALIDATION = 0.1  # of the training samples, if the file does not say
PARALLEL = 16  # trials at a time
SCORED = 100  # evaluations of a run
SAVED = 10  # checkpoints of a run
ABOUT = ("config", "space", "parallel")  # what a search must have in common with the one that began in its folder


class Show(Protocol):
    """Where a search says what happens."""

    def say(self, line: str) -> None:
        """A line for the user."""

    def update(self, part: float, words: str) -> None:
        """The part of the budget that is used, and what is being done."""


class _TimeUp(Exception):
    """The minutes of the budget are used."""


class Search:
    """A search in a folder.

    Args:
        nested: The tables of the configuration, with [tune] if there is one.
        out: Its folder.
        budget: What all runs may use together.
        parallel: Trials that run at the same time; proposals do not depend on which of them end first.
    """

    def __init__(
        self,
        nested: Mapping[str, Any],
        out: Path,
        budget: Budget,
        show: Show,
        *,
        parallel: int = PARALLEL,
        command: str = "",
    ) -> None:
        rest = {key: value for key, value in nested.items() if key != "tune"}
        self.nested, self.out, self.budget, self.show, self.command = rest, out, budget, show, command
        self.began = time.monotonic()
        config = resolve(rest)
        task = experiment.build_task(config)
        self.space = overridden(defaults(config, task.dataset.shape), nested.get("tune", {}), config)
        held = {"data.validation": config.data.validation or VALIDATION}
        config, self.because = resolve_engine(resolve(updated(tables(config), held)), task)
        self.config, self.stages = config, stages(config.train.rounds)
        sent = 2 * config.train.cohort * task.layout.size * task.start().element_size()
        budget.check(config.train.rounds, sent)
        self.cost = {"rounds": self.stages[0], "bytes": self.stages[0] * sent}.get(budget.kind, 0)
        self.parallel = parallel if config.run.engine == "batched" else 1
        self.tasks: dict[str, Task] = {}
        self._told: set[str] = set()
        self.pools: dict[str, Together | InTurn] = {}
        self.running: dict[Pending, tuple[Trial, int]] = {}
        self.ended: dict[tuple[int, int], Outcome] = {}
        self.live = 0.0
        self.earlier = 0.0

    def run(self) -> None:
        """Search until the budget is used."""
        if (self.out / "config.toml").exists() or (self.out / "sweep.json").exists():
            raise UserError(
                f"{self.out} contains a run or a sweep, and a search needs its own folder; give another --out."
            )
        with lock(self.out), experiment.within_memory():
            self._open()
            try:
                self._explore()
                for stage in range(1, len(self.stages)):
                    self._go_on(stage)
            except _TimeUp:
                self.show.say("the time is used")
            finally:
                for pool in self.pools.values():
                    pool.close()
                self._write()

    def _open(self) -> None:
        """Read what an earlier search in this folder did, and refuse another one's folder."""
        before = read_json(self.out / "tune.json")
        now = self._about()
        for part in ABOUT if before else ():
            then, wanted = (flatten({part: each[part]}) for each in (before, now))
            for key in {**then, **wanted}:
                if then.get(key) != wanted.get(key):
                    raise UserError(
                        f"{self.out} was begun with {key} = {then.get(key)!r}, and now it is {wanted.get(key)!r}; give "
                        "another --out, or restore the old value."
                    )
        self.earlier = float(before.get("seconds", 0.0))
        self.ended = outcomes.load(self.out / "outcomes.jsonl")
        self.live = sum(map(self.budget.used, self.ended.values()))
        self.proposals = Proposals(self.out / "study.journal", self.space, self.config)
        self._write()

    def _about(self) -> dict[str, Any]:
        config = {key: value for key, value in tables(self.config).items() if key != "run"}
        about = {"config": config, "space": self.space.describe(), "parallel": self.parallel}
        plain: dict[str, Any] = json.loads(json.dumps(about))  # as it is read back
        return plain

    def _write(self) -> None:
        more = {"budget": asdict(self.budget), "stages": list(self.stages), "seconds": self.clock()}
        write_json(self.out / "tune.json", self._about() | more | {"command": self.command})

    def clock(self) -> float:
        """Seconds that the search has taken, in all its sessions."""
        return self.earlier + time.monotonic() - self.began

    def _explore(self) -> None:
        """The first stage: new trials as long as its part of the budget lasts; the last one is plain averaging with the
        best recipe."""
        first, proposals = self.stages[0], self.proposals
        for trial in proposals.trials:
            self._begin(trial, first)
        while True:
            asked = len(proposals.trials)
            # A proposal waits for the trial `parallel` before it and knows of none after that one, so that it does not
            # depend on which of them end first. Where the clock is the budget it does anyway.
            timed = self.budget.kind == "minutes"
            told = self._tell(asked if timed else asked + 1 - self.parallel)
            waiting = asked - len(told)
            if waiting < self.parallel and self.budget.allows_new(
                told, waiting, self.cost, len(self.stages), self.clock(), reserve=1
            ):
                self._begin(proposals.ask(), first)
            elif self.running:
                self._work()
            else:
                break
        self._tell(len(proposals.trials))
        ranked = self._ranked(first)
        twin = proposals.plain_twin(proposals.trials[ranked[0].trial]) if ranked else None
        if twin is not None:
            self._begin(twin, first)
            while self.running:
                self._work()
            self._tell(len(proposals.trials))

    def _tell(self, count: int) -> list[Outcome]:
        """Tell Optuna which of the first `count` trials have ended, and how."""
        told = [each for number in range(count) if (each := self.ended.get((number, self.stages[0])))]
        for each in told:
            self.proposals.tell(each)
        return told

    def _ranked(self, rounds: int) -> list[Outcome]:
        """The trials that finished a stage, best first."""
        found = [each for (_, planned), each in self.ended.items() if planned == rounds and each.score is not None]
        return sorted(found, key=lambda each: (-(each.score or 0.0), each.trial))

    def _go_on(self, stage: int) -> None:
        """A later stage: the best trials of the one before."""
        rounds, ranked = self.stages[stage], self._ranked(self.stages[stage - 1])
        if not ranked:
            return
        trials = self.proposals.trials
        earlier = [each for (_, planned), each in self.ended.items() if planned < rounds]
        chosen = self.budget.going_on(
            ranked,
            self._kept([trials[each.trial] for each in ranked]),
            stage=stage,
            rounds=self.stages,
            earlier={number: self.budget.used(each) for number, each in enumerate(earlier)},
            clock=self.clock(),
            speed=sum(each.steps for each in earlier) / self.clock(),
        )
        self.show.say(
            f"stage {stage + 1} of {len(self.stages)}: {len(chosen)} of {counted(len(ranked), 'trial')}, "
            f"{counted(rounds, 'round')}"
        )
        for number in chosen:
            self._begin(trials[number], rounds)
        while self.running:
            self._work()

    def _kept(self, ranked: list[Trial]) -> list[int]:
        """Trials that go on in any case: the best of plain averaging, and the best with and without crops and flips."""
        groups = [[trial for trial in ranked if trial.plain]]
        groups += [[t for t in ranked if t.params.get("data.augment") is value] for value in (False, True)]
        return [group[0].number for group in groups if group]

    def trial_config(self, settings: Mapping[str, Any], rounds: int) -> RunConfig:
        """The configuration of a trial in a stage: its schedule is that of the whole run, in fewer rounds."""
        config = resolve(updated(tables(self.config), settings))
        train, part, every = config.train, rounds / config.train.rounds, config.run.checkpoint_every
        short: dict[str, Any] = {
            "train.rounds": rounds,
            "run.eval_every": max(1, rounds // SCORED),
            "run.checkpoint_every": every if rounds // SAVED <= (every or EVERY) else rounds // SAVED,
            "run.client_accuracy": False,
        }
        if train.schedule == "exponential":
            short["train.gamma"] = train.gamma ** (1 / part)
        if train.schedule == "steps":
            short["train.milestones"] = [round(each * part) for each in train.milestones]
        return resolve(updated(tables(config), short))

    def folder(self, trial: int, rounds: int) -> Path:
        """The run folder of a trial in a stage."""
        return self.out / f"{rounds}-rounds" / f"trial-{trial:03d}"

    def _task(self, config: RunConfig) -> Task:
        """The task of a configuration; trials share it where they can."""
        key = repr((config.data, config.model, config.seed))
        if key not in self.tasks:
            self.tasks[key] = experiment.build_task(config)
        return self.tasks[key]

    def _begin(self, trial: Trial, rounds: int) -> None:
        """Queue a run of a trial, unless it has ended before; one that is refused has failed."""
        if (trial.number, rounds) in self.ended:
            return
        path = self.folder(trial.number, rounds)
        folder = Folder(path)
        try:
            begun = (path / "config.toml").is_file()
            config = folder.config() if begun else self.trial_config(trial.settings, rounds)
            run = Pending(
                path.name, config, self._task(config), folder, begun, self._count, self.because, _stops_early()
            )
            pool = self._pool(run)
        except UserError as error:
            self._end(trial, rounds, str(error), failed=True)
            return
        self.running[run] = trial, rounds
        pool.add(run)

    def _pool(self, run: Pending) -> Together | InTurn:
        """The runs that share an engine with this one."""
        kind = run.kind if run.config.run.engine == "batched" else ""
        if kind not in self.pools:
            self.pools[kind] = self._together(run) if kind else InTurn(self._alone, self.command)
        return self.pools[kind]

    def _together(self, run: Pending) -> Together:
        from kairosfl.engines.batched import Batched

        cohorts = [largest(run.config, run.task)] * self.parallel
        engine = build_engine(run.config, run.task, cohorts, self.because)
        assert isinstance(engine, Batched)
        self._once(method(run.config, engine))
        return Together(engine, self.command)

    def _alone(self, run: Pending) -> Any:
        engine = build_engine(run.config, run.task, because=self.because)
        self._once(method(run.config, engine))
        return engine

    def _once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.show.say(line)

    def _work(self) -> None:
        """Train until a run has ended."""
        ended = len(self.ended)
        while len(self.ended) == ended:
            for kind, pool in list(self.pools.items()):
                if pool:
                    self._advance(kind, pool)
            if self.budget.kind == "minutes" and self.clock() > self.budget.total:
                raise _TimeUp

    def _advance(self, kind: str, pool: Together | InTurn) -> None:
        try:
            for run, outcome in pool.advance():
                trial, rounds = self.running.pop(run)
                stopped = str(outcome) if isinstance(outcome, UserError) else ""
                memory = isinstance(getattr(outcome, "__cause__", None), torch.OutOfMemoryError)
                if not stopped and outcome["rounds"] < rounds:  # type: ignore[index]
                    stopped = f"diverged in round {outcome['rounds']}"  # type: ignore[index]
                self._end(trial, rounds, stopped, failed=memory)
        except UserError as error:  # the engine's own: none of its runs can continue, but a new engine may
            del self.pools[kind]
            pool.close()
            for run in [*pool.active, *pool.waiting]:
                self._end(*self.running.pop(run), str(error), failed=True)

    def _end(self, trial: Trial, rounds: int, stopped: str, *, failed: bool) -> None:
        """Record how a run ended. One that stopped before its first round has failed, a later one has diverged."""
        path = self.folder(trial.number, rounds)
        failed = failed or (bool(stopped) and not (path / "metrics.jsonl").exists())
        outcome = outcomes.measure(trial.number, rounds, path, stopped, failed)
        outcomes.save(self.out / "outcomes.jsonl", outcome)
        self.ended[trial.number, rounds] = outcome
        self._write()
        metric = Folder(path).main()
        if outcome.score is None:
            self.show.say(f"trial {trial.number}, {trial.settings['algorithm']}: {outcome.state}: {outcome.reason}")
        elif self._ranked(rounds)[0] is outcome or rounds != self.stages[0]:
            shown = metric.measured(outcome.score if metric.higher else -outcome.score)
            self.show.say(
                f"trial {trial.number}, {counted(rounds, 'round')}: {shown} on validation samples, {words(trial)}"
            )

    def _count(self, row: dict[str, Any]) -> None:
        """After every round of every run: how much of the budget is used."""
        used = {"rounds": 1.0, "bytes": row["bytes_up"] + row["bytes_down"]}
        self.live += used.get(self.budget.kind, 0.0)
        total = self.budget.total
        if self.budget.kind == "minutes":
            part = self.clock() / total
        elif self.budget.kind == "trials":
            part = len(self.ended) / (total * sum(ETA**-stage for stage in range(len(self.stages))))
        else:
            part = self.live / total
        self.show.update(min(part, 1.0), f"{len(self.running)} running, {counted(len(self.ended), 'run')} ended")


def _stops_early() -> Callable[[dict[str, Any], torch.Tensor], bool | None]:
    """Ends a run that has diverged."""
    first: list[float] = []

    def watch(row: dict[str, Any], _: torch.Tensor) -> bool | None:
        if outcomes.exploded(row, first[0] if first else None):
            return False
        if not first and row.get("loss") is not None:
            first.append(row["loss"])
        return None

    return watch


def words(trial: Trial) -> str:
    """The settings of a trial in a few words."""
    shown = {key.rpartition(".")[2]: value for key, value in trial.recipe.items()}
    parts = [f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()]
    return ", ".join([_rounded(trial.settings["algorithm"]), *parts])


def _rounded(algorithm: str) -> str:
    """An algorithm with three digits in its options."""
    return re.sub(r"\d+\.\d+(?:e-?\d+)?", lambda number: f"{float(number[0]):.3g}", algorithm)
