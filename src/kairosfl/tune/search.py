"""The search: trials run side by side, the best third goes on to more rounds, until the budget is
used.

A trial begins when the budget pays for it and for what the running ones may still use; `Metered`
runs stop before a round that it does not pay for. Trials that promise privacy have seeds of their
own: with the same noise in two of them, the difference of their models would have none.

A search started again in the same folder continues: ended runs are left alone, unfinished ones
resume.
"""

from __future__ import annotations

import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.runs.checkpoint import EVERY, Writing
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.files import read_json, write_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import flatten, updated
from kairosfl.runs.lock import Displaced, Lock, lock
from kairosfl.runs.pool import InTurn, Pending, Together
from kairosfl.runs.prepare import Shared, build_task, partition_seed, ready, within_memory
from kairosfl.runs.sensible import flat
from kairosfl.tasks.task import Task
from kairosfl.tune import outcomes
from kairosfl.tune.budget import ETA, Budget, stages
from kairosfl.tune.demands import shields
from kairosfl.tune.ledger import Key, Ledger, Metered
from kairosfl.tune.outcomes import Outcome
from kairosfl.tune.price import Price, price
from kairosfl.tune.proposals import STARTUP, Proposals, Trial
from kairosfl.tune.space import defaults, overridden
from kairosfl.wording import counted

VALIDATION = 0.1  # of the training samples, if the file does not say
PARALLEL = 16  # trials at a time
SCORED = 100  # evaluations of a run
SAVED = 10  # checkpoints of a run
RECENT = 16  # pieces of work, the longest of which must fit into what is left of the time
ABOUT = (
    "config",
    "space",
    "parallel",
)  # what a search must have in common with the one that began in its folder


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
        parallel: Trials that run at the same time; proposals do not depend on which of them end
        first.
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
        self.nested, self.out, self.budget, self.show, self.command = (
            rest,
            out,
            budget,
            show,
            command,
        )
        self.began = time.monotonic()
        config = resolve(rest)
        self.shared = Shared()
        self.writing = Writing()
        task = build_task(config, shared=self.shared)
        self.space = overridden(
            defaults(config, task.dataset.shape), nested.get("tune", {}), config
        )
        held = {"data.validation": config.data.validation or VALIDATION}
        begun = ready(resolve(updated(tables(config), held)), task)
        self.because = begun.because
        config = resolve(begun.about.settings)
        self.config, self.stages = config, stages(config.train.rounds)
        self.ledger = Ledger(budget.kind, budget.total)
        self.prices: dict[Key, Price] = {}
        self._check_budget(task)
        self.parallel = parallel if config.run.engine == "batched" else 1
        self.tasks: dict[str, Task] = {}
        self._told: set[str] = set()
        self.pools: dict[str, Together | InTurn] = {}
        self.running: dict[Pending, tuple[Trial, int]] = {}
        self.ended: dict[Key, Outcome] = {}
        self.unpaid: set[Key] = (
            set()
        )  # runs that stopped because the budget did not pay for a round
        self.earlier = 0.0
        self.guard: Lock | None = None
        self._took: deque[float] = deque(maxlen=RECENT)  # seconds of each piece of work

    def run(self) -> None:
        """Search until the budget is used."""
        if (self.out / "config.toml").exists() or (self.out / "sweep.json").exists():
            raise UserError(
                f"{self.out} contains a run or a sweep, and a search needs its own folder; give another --out."
            )
        with lock(self.out) as self.guard, within_memory():
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
        default = {f"config.{key}": value for key, value in flat(RunConfig()).items()}
        for part in ABOUT if before else ():
            then, wanted = (flatten({part: each[part]}) for each in (before, now))
            for key in {**then, **wanted}:
                began = then.get(
                    key, default.get(key)
                )  # the key may not have existed when the search began
                if began != wanted.get(key):
                    raise UserError(
                        f"{self.out} was begun with {key} = {began!r}, and now it is {wanted.get(key)!r}; give "
                        "another --out, or restore the old value."
                    )
        self.earlier = float(before.get("seconds", 0.0))
        self.ended = outcomes.load(self.out / "outcomes.jsonl")
        self.proposals = Proposals(self.out / "study.journal", self.space, self.config)
        for trial in self.proposals.trials:
            for rounds in self.stages:
                self.ledger.read((trial.number, rounds), self.folder(trial.number, rounds))
        self._write()

    def _check_budget(self, task: Task) -> None:
        """Refuse a budget that is too small; one of bytes is judged by what the searched algorithms
        send.
        """
        rounds, prices = self.config.train.rounds, []
        if self.budget.kind == "bytes":
            for algorithm in self.space.algorithm.values:
                for more in self.space.add.values:
                    with suppress(UserError):  # they cannot be combined
                        text = self.space.combined(algorithm, more)
                        prices.append(
                            price(resolve(updated(tables(self.config), {"algorithm": text})), task)
                        )
        planned = max((sent.vectors for sent in prices), default=0.0)
        self.budget.check(rounds, planned, max((sent.most for sent in prices), default=0.0))

    def _about(self) -> dict[str, Any]:
        config = {key: value for key, value in tables(self.config).items() if key != "run"}
        about = {"config": config, "space": self.space.describe(), "parallel": self.parallel}
        plain: dict[str, Any] = json.loads(json.dumps(about))  # as it is read back
        return plain

    def _write(self) -> None:
        if self.guard is not None:
            self.guard.check()
        more = {"budget": asdict(self.budget), "stages": list(self.stages), "seconds": self.clock()}
        write_json(self.out / "tune.json", self._about() | more | {"command": self.command})

    def clock(self) -> float:
        """Seconds that the search has taken, in all its sessions."""
        return self.earlier + time.monotonic() - self.began

    def _explore(self) -> None:
        """The first stage: new trials as long as its part of the budget lasts; the last one is
        plain averaging with the best recipe."""
        first, proposals = self.stages[0], self.proposals

        # A proposal waits for the trial `parallel` before it and knows of none after that one, so
        # that it does not depend on which of them end first. Where the clock is the budget it does
        # anyway. When the budget does not seem to pay for one more, those that run are waited for:
        # they may have used less than they might have.
        number = waited = 0
        while not self.unpaid:
            timed = self.budget.kind == "minutes"
            told = self._tell(number if timed else max(number + 1 - self.parallel, waited))
            if number - len(told) >= self.parallel:
                self._work()
            elif len(told) >= STARTUP and all(outcome.state == "failed" for outcome in told):
                break
            elif self._pays(number, told, reserve=True):
                self._begin(proposals.trials[number], first)
                number += 1
            elif self.running:
                self._drain()
                waited = number
            elif waited < number:
                waited = number
            else:
                break

        # Trials of an earlier session that the budget still pays for, which may be the last one.
        for trial in proposals.trials[number:]:
            if not self.unpaid and self._pays(
                trial.number, self._tell(trial.number), reserve=False
            ):
                self._begin(trial, first)
        self._drain()

        self._tell(len(proposals.trials))
        ranked = self._ranked(first)
        twin = (
            proposals.plain_twin(proposals.trials[ranked[0].trial])
            if ranked and self._room()
            else None
        )
        if twin is not None and self._pays(twin.number, self._tell(twin.number), reserve=False):
            self._begin(twin, first)
            self._drain()
            self._tell(len(proposals.trials))

    def _room(self) -> bool:
        """Whether there may be one more trial at all, whatever it costs."""
        if self.budget.kind == "trials":
            return len(self.proposals.trials) < self.budget.total
        return not self.unpaid

    def _drain(self) -> None:
        """Train until every run has ended."""
        while self.running:
            self._work()

    def _pays(self, number: int, told: list[Outcome], *, reserve: bool) -> bool:
        """Whether the budget pays for this trial, which is proposed if there is none of this
        number.

        What the trials before it may use that have not ended is kept for them, and with `reserve`
        what plain averaging with the best recipe will use.
        """
        first, stages = self.stages[0], len(self.stages)
        if self.budget.kind == "minutes":
            begun = number < len(self.proposals.trials)
            if not begun and self.budget.has_time(told, stages, self.clock()):
                self.proposals.ask()
            return number < len(self.proposals.trials)

        # Trials and rounds cost the same for all, so that nothing is proposed in vain.
        spent = sum(map(self.budget.used, told))
        ended = {outcome.trial for outcome in told}
        trials = self.proposals.trials
        spent += sum(
            self._price(trial, first, told)
            for trial in trials[:number]
            if trial.number not in ended
        )
        again = self._price_of_plain(first, told) if reserve else 0.0
        least = {"trials": 1.0, "rounds": float(first)}.get(self.budget.kind, 0.0)
        if not self.budget.allows(spent + least + again, stages):
            return False
        return self.budget.allows(
            spent + self._price(self._proposed(number), first, told) + again, stages
        )

    def _proposed(self, number: int) -> Trial:
        trials = self.proposals.trials
        return trials[number] if number < len(trials) else self.proposals.ask()

    def _price(self, trial: Trial, rounds: int, ended: Iterable[Outcome]) -> float:
        """What a run of a trial may use of the budget, with what is known from those that have
        ended.
        """
        if self.budget.kind != "bytes":
            return {"trials": 1.0, "rounds": float(rounds)}.get(self.budget.kind, 0.0)
        trials, alike = self.proposals.trials, _kinds(trial)
        shares = []
        for outcome in ended:
            if outcome.rounds and _kinds(trials[outcome.trial]) == alike:
                most = (
                    self._priced(trials[outcome.trial], outcome.round).most
                    * outcome.rounds
                    / outcome.round
                )
                shares.append(outcome.bytes / most if most else 0.0)
        return self._priced(trial, rounds).after(shares)

    def _price_of_plain(self, rounds: int, ended: Iterable[Outcome]) -> float:
        """What plain averaging with the file's recipe may use."""
        plain = self.space.demands.plain
        return self._price(Trial(-1, {"algorithm": plain}, {}, plain=True), rounds, ended)

    def _priced(self, trial: Trial, rounds: int) -> Price:
        """What a run of a trial sends by its rules alone; nothing if it is refused."""
        key = trial.number, rounds
        if key not in self.prices:
            try:
                config = self.trial_config(trial.settings, rounds)
                self.prices[key] = price(config, self._task(config))
            except UserError:
                self.prices[key] = Price(0.0, 0.0, varies=False)
        return self.prices[key]

    def _tell(self, count: int) -> list[Outcome]:
        """Tell Optuna which of the first `count` trials have ended, and how."""
        told = [
            each for number in range(count) if (each := self.ended.get((number, self.stages[0])))
        ]
        for each in told:
            self.proposals.tell(each)
        return told

    def _ranked(self, rounds: int) -> list[Outcome]:
        """The trials that finished a stage, best first."""
        found = [
            each
            for (_, planned), each in self.ended.items()
            if planned == rounds and each.score is not None
        ]
        return sorted(found, key=lambda each: (-(each.score or 0.0), each.trial))

    def _go_on(self, stage: int) -> None:
        """A later stage: the best trials of the one before."""
        rounds, ranked = self.stages[stage], self._ranked(self.stages[stage - 1])
        if not ranked:
            return
        trials = self.proposals.trials
        earlier = [each for (_, planned), each in self.ended.items() if planned < rounds]
        candidates = {(outcome.trial, rounds) for outcome in ranked}
        others = [key for key in self.ledger.spent if key not in candidates]
        chosen = self.budget.going_on(
            ranked,
            self._kept([trials[each.trial] for each in ranked]),
            stage=stage,
            rounds=self.stages,
            earlier={0: self.ledger.of(others)},
            clock=self.clock(),
            speed=sum(each.steps for each in earlier) / self.clock(),
            prices={
                outcome.trial: self._price(trials[outcome.trial], rounds, earlier)
                for outcome in ranked
            },
        )
        self.show.say(
            f"stage {stage + 1} of {len(self.stages)}: {len(chosen)} of {counted(len(ranked), 'trial')}, "
            f"{counted(rounds, 'round')}"
        )
        for number in chosen:
            self._begin(trials[number], rounds)
        self._drain()

    def _kept(self, ranked: list[Trial]) -> list[int]:
        """Trials that go on in any case: the best of plain averaging, and the best with and without
        crops and flips.
        """
        groups = [[trial for trial in ranked if trial.plain]]
        groups += [
            [t for t in ranked if t.params.get("data.augment") is value] for value in (False, True)
        ]
        return [group[0].number for group in groups if group]

    def trial_config(self, settings: Mapping[str, Any], rounds: int, number: int = 0) -> RunConfig:
        """The configuration of a trial in a stage: its schedule is that of the whole run, in fewer
        rounds.

        With privacy it has a seed of its own, among the same clients: its noise must be independent
        of other runs'.
        """
        config = resolve(updated(tables(self.config), settings))
        train, part, every = config.train, rounds / config.train.rounds, config.run.checkpoint_every
        short: dict[str, Any] = {
            "train.rounds": rounds,
            "run.eval_every": max(1, rounds // SCORED),
            "run.checkpoint_every": every
            if rounds // SAVED <= (every or EVERY)
            else rounds // SAVED,
            "run.client_accuracy": False,
        }
        if train.schedule == "exponential":
            short["train.gamma"] = train.gamma ** (1 / part)
        if train.schedule == "steps":
            short["train.milestones"] = [round(each * part) for each in train.milestones]
        if any(map(shields, config.algorithm.rules)):
            short["seed"] = int(
                np.random.SeedSequence([config.seed, number, rounds]).generate_state(1)[0]
            )
            short["data.partition_seed"] = partition_seed(config)
        return resolve(updated(tables(config), short))

    def folder(self, trial: int, rounds: int) -> Path:
        """The run folder of a trial in a stage."""
        return self.out / f"{rounds}-rounds" / f"trial-{trial:03d}"

    def begun(self) -> list[Key]:
        """The runs that exist, ended or not."""
        keys = [(trial.number, rounds) for rounds in self.stages for trial in self.proposals.trials]
        return [key for key in keys if self.folder(*key).exists()]

    def _task(self, config: RunConfig) -> Task:
        """The task of a configuration; trials share it where they can."""
        key = repr((config.data, config.model, config.seed))
        if config.seed != self.config.seed:  # of one trial alone
            return build_task(config, shared=self.shared)
        if key not in self.tasks:
            self.tasks[key] = build_task(config, shared=self.shared)
        return self.tasks[key]

    def _begin(self, trial: Trial, rounds: int) -> None:
        """Queue a run of a trial, unless it has ended before; one that is refused has failed."""
        if (trial.number, rounds) in self.ended:
            return
        path = self.folder(trial.number, rounds)
        folder = Folder(path, guard=self.guard)
        try:
            begun = (path / "config.toml").is_file()
            config = (
                folder.config()
                if begun
                else self.trial_config(trial.settings, rounds, trial.number)
            )
            key = trial.number, rounds
            run = Metered(
                path.name,
                ready(config, self._task(config), self.because),
                folder,
                begun,
                lambda row: self._count(key, row),
                _stops_early(),
                self.writing,
                key,
                self.ledger,
            )
            pool = self._pool(run)
        except UserError as error:
            self._end(trial, rounds, str(error), failed=True)
            return
        self.running[run] = trial, rounds
        pool.add(run)

    def _pool(self, run: Pending) -> Together | InTurn:
        """The runs that share an engine with this one."""
        kind = run.ready.kind
        if kind not in self.pools:
            self.pools[kind] = self._together(run) if kind else InTurn(self._alone, self.command)
        return self.pools[kind]

    def _together(self, run: Pending) -> Together:
        from kairosfl.engines.batched import Batched

        engine = run.ready.build([run.ready.largest] * self.parallel)
        assert isinstance(engine, Batched)
        self._once(run.ready.on(engine).method)
        return Together(engine, self.command)

    def _alone(self, run: Pending) -> Any:
        engine = run.ready.build()
        self._once(run.ready.on(engine).method)
        return engine

    def _once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self.show.say(line)

    def _work(self) -> None:
        """Train until a run has ended, or the budget does not pay for its next round."""
        before = len(self.running)
        while self.running and len(self.running) >= before:
            for kind, pool in list(self.pools.items()):
                if pool:
                    self._check_time()
                    began = self.clock()
                    self._advance(kind, pool)
                    self._took.append(self.clock() - began)

    def _check_time(self) -> None:
        """Stop before a piece of work that would probably take longer than is left."""
        longest = max(self._took, default=0.0)
        if self.budget.kind == "minutes" and self.clock() + longest > self.budget.total:
            raise _TimeUp

    def _advance(self, kind: str, pool: Together | InTurn) -> None:
        try:
            for run, outcome in pool.advance():
                trial, rounds = self.running.pop(run)
                if isinstance(outcome, UserError):
                    memory = isinstance(outcome.__cause__, torch.OutOfMemoryError)
                    self._end(trial, rounds, str(outcome), failed=memory)
                elif outcome.get("unpaid"):
                    self.unpaid.add((trial.number, rounds))
                    self.show.say(
                        f"trial {trial.number} stops after round {outcome['rounds']} of {rounds}: the budget does not "
                        "pay for one more"
                    )
                else:
                    finished = str(outcome.get("finished") or "")
                    early = outcome["rounds"] < rounds and not finished
                    stopped = f"diverged in round {outcome['rounds']}" if early else ""
                    self._end(trial, rounds, stopped, failed=False, finished=finished)
        except Displaced:  # another process may be searching here
            raise
        except (
            UserError
        ) as error:  # the engine's own: none of its runs can continue, but a new engine may
            del self.pools[kind]
            pool.close()
            for run in [*pool.active, *pool.waiting]:
                self._end(*self.running.pop(run), str(error), failed=True)

    def _end(
        self, trial: Trial, rounds: int, stopped: str, *, failed: bool, finished: str = ""
    ) -> None:
        """Record how a run ended. One that stopped before its first round has failed, a later one
        has diverged.
        """
        path = self.folder(trial.number, rounds)
        failed = failed or (bool(stopped) and not (path / "metrics.jsonl").exists())
        outcome = outcomes.measure(trial.number, rounds, path, stopped, failed, finished)
        outcomes.save(self.out / "outcomes.jsonl", outcome)
        self.ended[trial.number, rounds] = outcome
        self._write()
        metric = Folder(path).main()
        if outcome.score is None:
            self.show.say(
                f"trial {trial.number}, {trial.settings['algorithm']}: {outcome.state}: {outcome.reason}"
            )
        elif self._ranked(rounds)[0] is outcome or rounds != self.stages[0]:
            shown = metric.measured(outcome.score if metric.higher else -outcome.score)
            self.show.say(
                f"trial {trial.number}, {outcome.length}: {shown} on validation samples, {words(trial)}"
            )

    def _count(self, key: Key, row: dict[str, Any]) -> None:
        """After every round of every run: how much of the budget is used."""
        self.ledger.record(key, row)
        total = self.budget.total
        if self.budget.kind == "minutes":
            part = self.clock() / total
        elif self.budget.kind == "trials":
            part = len(self.ended) / (total * sum(ETA**-stage for stage in range(len(self.stages))))
        else:
            part = self.ledger.used / total
        self.show.update(
            min(part, 1.0), f"{len(self.running)} running, {counted(len(self.ended), 'run')} ended"
        )


def _kinds(trial: Trial) -> tuple[str, ...]:
    """The names of the rules of a trial."""
    try:
        return tuple(rule.name() for rule in parse(trial.settings["algorithm"]).rules)
    except UserError:  # they cannot be combined
        return (str(trial.settings["algorithm"]),)


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
    parts = [
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in shown.items()
    ]
    return ", ".join([_rounded(trial.settings["algorithm"]), *parts])


def _rounded(algorithm: str) -> str:
    """An algorithm with three digits in its options."""
    return re.sub(r"\d+\.\d+(?:e-?\d+)?", lambda number: f"{float(number[0]):.3g}", algorithm)
