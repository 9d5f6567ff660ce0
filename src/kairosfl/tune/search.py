"""The search: trials run side by side, the best third goes on until the budget is used.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

import torch

from kairosfl.errors import UserError
from kairosfl.runs.checkpoint import Writing
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.files import read_json, write_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import flatten, updated
from kairosfl.runs.lock import Displaced, Lock, lock
from kairosfl.runs.pool import Outcome as Ending
from kairosfl.runs.pool import Pending
from kairosfl.runs.prepare import Shared, build_task, ready, within_memory
from kairosfl.runs.sensible import flat
from kairosfl.tune import outcomes
from kairosfl.tune.budget import ETA, Budget, stages
from kairosfl.tune.ledger import Key, Ledger, Metered
from kairosfl.tune.outcomes import Ended, Outcome
from kairosfl.tune.pools import Pool, Pools
from kairosfl.tune.pricing import Prices, check_budget
from kairosfl.tune.proposals import STARTUP, Proposals, Trial
from kairosfl.tune.space import defaults, overridden
from kairosfl.tune.variants import Variants
from kairosfl.wording import counted

VALIDATION = 0.1  # of the training samples, if the file does not say
PARALLEL = 16  # trials at a time
RECENT = 16  # pieces of work, the longest of which must fit into what is left of the time
# What a search must have in common with the one that began in its folder.
ABOUT = ("config", "space", "parallel")


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
        show: Where it says what happens.
        parallel: Trials that run at the same time; proposals do not depend on which of them end
            first.
        command: The command line, which runs record.
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
        self.nested = {key: value for key, value in nested.items() if key != "tune"}
        self.out = out
        self.budget = budget
        self.show = show
        self.command = command
        self.began = time.monotonic()
        self.earlier = 0.0  # seconds of the sessions before
        self._took: deque[float] = deque(maxlen=RECENT)  # seconds of each piece of work

        # --- what is searched, around the file's configuration ---
        config = resolve(self.nested)
        shared = Shared()
        task = build_task(config, shared=shared)
        self.space = overridden(
            defaults(config, task.dataset.shape), nested.get("tune", {}), config
        )
        validation = {"data.validation": config.data.validation or VALIDATION}
        begun = ready(resolve(updated(tables(config), validation)), task)
        self.because = begun.because
        self.config = resolve(begun.about.settings)
        self.stages = stages(self.config.train.rounds)
        check_budget(budget, self.space, self.config, task)

        # --- the runs ---
        self.parallel = parallel if self.config.run.engine == "batched" else 1
        self.variants = Variants(self.config, shared)
        self.pools = Pools(self.parallel, command, show.say)
        self.ledger = Ledger(budget.kind, budget.total)
        self.writing = Writing()
        self.running: dict[Pending, tuple[Trial, int]] = {}
        self.ended = Ended()
        # Runs that stopped because the budget did not pay for a round.
        self.unpaid: set[Key] = set()
        self.guard: Lock | None = None

    def run(self) -> None:
        """Search until the budget is used."""
        if (self.out / "config.toml").exists() or (self.out / "sweep.json").exists():
            raise UserError(
                f"{self.out} contains a run or a sweep, and a search needs its own folder; "
                "give another --out."
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
                self.pools.close()
                self._write()

    # --- its folder -------------------------------------------------------------------------------

    def _open(self) -> None:
        """Read what an earlier search in this folder did, and refuse another one's folder."""
        before = read_json(self.out / "tune.json")
        if before:
            _check_same(self.out, before, self._about())
        self.earlier = float(before.get("seconds", 0.0))
        self.ended = outcomes.load(self.out / "outcomes.jsonl")
        self.proposals = Proposals(self.out / "study.journal", self.space, self.config)
        self.prices = Prices(self.budget, self.variants, self.proposals)
        for trial in self.proposals.trials:
            for rounds in self.stages:
                self.ledger.read((trial.number, rounds), self.folder(trial.number, rounds))
        self._write()

    def _about(self) -> dict[str, Any]:
        config = tables(self.config)
        config.pop("run", None)
        about = {"config": config, "space": self.space.describe(), "parallel": self.parallel}
        plain: dict[str, Any] = json.loads(json.dumps(about))  # as it is read back
        return plain

    def _write(self) -> None:
        if self.guard is not None:
            self.guard.check()
        progress = {
            "budget": asdict(self.budget),
            "stages": list(self.stages),
            "seconds": self.clock(),
            "command": self.command,
        }
        write_json(self.out / "tune.json", self._about() | progress)

    def clock(self) -> float:
        """Seconds that the search has taken, in all its sessions."""
        return self.earlier + time.monotonic() - self.began

    def folder(self, trial: int, rounds: int) -> Path:
        """The run folder of a trial in a stage."""
        return self.out / f"{rounds}-rounds" / f"trial-{trial:03d}"

    def begun(self) -> list[Key]:
        """The runs that exist, ended or not."""
        keys = []
        for rounds in self.stages:
            for trial in self.proposals.trials:
                if self.folder(trial.number, rounds).exists():
                    keys.append((trial.number, rounds))
        return keys

    # --- the first stage --------------------------------------------------------------------------

    def _explore(self) -> None:
        """New trials as long as their part of the budget lasts, and plain averaging at the end."""
        count = self._try_new()

        # Trials of an earlier session that the budget still pays for, which may be the last one.
        for trial in self.proposals.trials[count:]:
            if self.unpaid:
                break
            if self._pays(trial.number, self._tell(trial.number), reserve=False):
                self._begin(trial, self.stages[0])
        self._drain()
        self._tell(len(self.proposals.trials))
        self._try_plain()

    def _try_new(self) -> int:
        """Begin trials until the budget pays for no more; how many there are then.

        A proposal waits for the trial `parallel` before it and knows of none after that one, so
        that it does not depend on which of them end first. Where the clock is the budget it does
        anyway. When the budget does not seem to pay for one more, those that run are waited for:
        they may have used less than they might have.
        """
        number = waited = 0
        while not self.unpaid:
            count = max(number + 1 - self.parallel, waited)
            if self.budget.kind == "minutes":
                count = number
            ended = self._tell(count)
            if number - len(ended) >= self.parallel:
                self._work()
            elif len(ended) >= STARTUP and outcomes.all_failed(ended):
                break
            elif self._pays(number, ended, reserve=True):
                self._begin(self.proposals.trials[number], self.stages[0])
                number += 1
            elif self.running:
                self._drain()
                waited = number
            elif waited < number:
                waited = number
            else:
                break
        return number

    def _try_plain(self) -> None:
        """Plain averaging with the recipe of the best trial, if the budget still pays for it."""
        ranked = self.ended.ranked(self.stages[0])
        if not ranked or not self._room():
            return
        twin = self.proposals.plain_twin(self.proposals.trials[ranked[0].trial])
        if twin is not None and self._pays(twin.number, self._tell(twin.number), reserve=False):
            self._begin(twin, self.stages[0])
            self._drain()
            self._tell(len(self.proposals.trials))

    def _tell(self, count: int) -> list[Outcome]:
        """Tell Optuna which of the first `count` trials have ended, and how."""
        ended = self.ended.first(count, self.stages[0])
        for outcome in ended:
            self.proposals.tell(outcome)
        return ended

    def _room(self) -> bool:
        """Whether there may be one more trial at all, whatever it costs."""
        if self.budget.kind == "trials":
            return len(self.proposals.trials) < self.budget.total
        return not self.unpaid

    def _pays(self, number: int, ended: list[Outcome], *, reserve: bool) -> bool:
        """Whether the budget pays for this trial, which is proposed if there is none yet.

        Args:
            number: That of the trial.
            ended: How trials before it ended. What the others may use is kept for them.
            reserve: Whether what plain averaging with the best recipe will use is kept, too.
        """
        trials = self.proposals.trials
        if self.budget.kind == "minutes":
            is_new = number >= len(trials)
            if is_new and self.budget.has_time(ended, len(self.stages), self.clock()):
                self.proposals.ask()
            return number < len(trials)

        # What is spent, or kept for those that train.
        first = self.stages[0]
        spent = sum(map(self.budget.used, ended))
        have_ended = {outcome.trial for outcome in ended}
        kept = 0.0
        for trial in trials[:number]:
            if trial.number not in have_ended:
                kept += self.prices.of(trial, first, ended)
        spent += kept
        again = self.prices.of_plain(first, ended) if reserve else 0.0

        # Trials and rounds cost the same for all, so that nothing is proposed in vain.
        if not self.budget.allows(spent + self.budget.fixed(first) + again, len(self.stages)):
            return False
        trial = trials[number] if number < len(trials) else self.proposals.ask()
        cost = self.prices.of(trial, first, ended)
        return self.budget.allows(spent + cost + again, len(self.stages))

    # --- later stages -----------------------------------------------------------------------------

    def _go_on(self, stage: int) -> None:
        """A later stage: the best trials of the one before."""
        rounds = self.stages[stage]
        ranked = self.ended.ranked(self.stages[stage - 1])
        if not ranked:
            return
        trials = self.proposals.trials
        earlier = self.ended.shorter(rounds)
        clock = self.clock()
        candidates = []
        prices = {}
        for outcome in ranked:
            trial = trials[outcome.trial]
            candidates.append(trial)
            prices[trial.number] = self.prices.of(trial, rounds, earlier)
        others = []
        for number, planned in self.ledger.spent:
            if planned != rounds or number not in prices:
                others.append((number, planned))
        chosen = self.budget.going_on(
            ranked,
            _in_any_case(candidates),
            stage=stage,
            rounds=self.stages,
            earlier={0: self.ledger.of(others)},
            clock=clock,
            speed=sum(outcome.steps for outcome in earlier) / clock,
            prices=prices,
        )
        self.show.say(
            f"stage {stage + 1} of {len(self.stages)}: {len(chosen)} of "
            f"{counted(len(ranked), 'trial')}, {counted(rounds, 'round')}"
        )
        for number in chosen:
            self._begin(trials[number], rounds)
        self._drain()

    # --- one run ----------------------------------------------------------------------------------

    def trial_config(self, settings: Mapping[str, Any], rounds: int, number: int = 0) -> RunConfig:
        """The configuration of a trial in a stage, as `Variants.config` makes it."""
        return self.variants.config(settings, rounds, number)

    def _config_of(self, trial: Trial, rounds: int) -> RunConfig:
        return self.trial_config(trial.settings, rounds, trial.number)

    def _begin(self, trial: Trial, rounds: int) -> None:
        """Queue a run of a trial, unless it has ended before; one that is refused has failed."""
        key = (trial.number, rounds)
        if key in self.ended:
            return
        path = self.folder(trial.number, rounds)
        folder = Folder(path, guard=self.guard)
        try:
            begun = (path / "config.toml").is_file()
            config = folder.config() if begun else self._config_of(trial, rounds)
            run = Metered(
                name=path.name,
                ready=ready(config, self.variants.task(config), self.because),
                folder=folder,
                begun=begun,
                notify=lambda row: self._count(key, row),
                watch=_stops_early(),
                writing=self.writing,
                key=key,
                ledger=self.ledger,
            )
            pool = self.pools.pool(run)
        except UserError as error:
            self._end(trial, rounds, str(error), failed=True)
            return
        self.running[run] = (trial, rounds)
        pool.add(run)

    def _drain(self) -> None:
        """Train until every run has ended."""
        while self.running:
            self._work()

    def _work(self) -> None:
        """Train until a run has ended, or the budget does not pay for its next round."""
        before = len(self.running)
        while self.running and len(self.running) >= before:
            for kind, pool in list(self.pools.by_kind.items()):
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

    def _advance(self, kind: str, pool: Pool) -> None:
        """A piece of work of one engine, after which some of its runs may have ended."""
        try:
            for run, ending in pool.advance():
                self._settle(*self.running.pop(run), ending)
        except Displaced:  # another process may be searching here
            raise
        except UserError as error:  # the engine's own; a new one may be able to continue
            for run in self.pools.drop(kind):
                self._end(*self.running.pop(run), str(error), failed=True)

    def _settle(self, trial: Trial, rounds: int, ending: Ending) -> None:
        """What a run's summary, or the error that stopped it, says about its trial."""
        if isinstance(ending, UserError):
            out_of_memory = isinstance(ending.__cause__, torch.OutOfMemoryError)
            self._end(trial, rounds, str(ending), failed=out_of_memory)
        elif ending.get("unpaid"):
            self.unpaid.add((trial.number, rounds))
            self.show.say(
                f"trial {trial.number} stops after round {ending['rounds']} of {rounds}: "
                "the budget does not pay for one more"
            )
        else:
            finished = str(ending.get("finished") or "")
            stopped = ""
            if ending["rounds"] < rounds and not finished:
                stopped = f"diverged in round {ending['rounds']}"
            self._end(trial, rounds, stopped, failed=False, finished=finished)

    def _end(
        self, trial: Trial, rounds: int, stopped: str, *, failed: bool, finished: str = ""
    ) -> None:
        """Record how a run ended.

        One that stopped before its first round has failed, one that stopped later has diverged.
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
                f"trial {trial.number}, {trial.settings['algorithm']}: "
                f"{outcome.state}: {outcome.reason}"
            )
        elif self.ended.ranked(rounds)[0] is outcome or rounds != self.stages[0]:
            score = metric.measured(outcome.score if metric.higher else -outcome.score)
            self.show.say(
                f"trial {trial.number}, {outcome.length}: {score} on validation samples, "
                f"{words(trial)}"
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


def _check_same(out: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Refuse the folder of a search that was begun with other settings."""
    # A key may not have existed when the search began.
    default = {f"config.{key}": value for key, value in flat(RunConfig()).items()}
    for part in ABOUT:
        then = flatten({part: before[part]})
        today = flatten({part: now[part]})
        for key in {**then, **today}:
            began = then.get(key, default.get(key))
            if began != today.get(key):
                raise UserError(
                    f"{out} was begun with {key} = {began!r}, and now it is {today.get(key)!r}; "
                    "give another --out, or restore the old value."
                )


def _in_any_case(ranked: list[Trial]) -> list[int]:
    """Trials that go on in any case, of these that are ranked.

    They are the best of plain averaging, and the best with and without crops and flips.
    """
    best: dict[str, int] = {}
    for trial in ranked:
        if trial.plain:
            best.setdefault("plain", trial.number)
    for augment in (False, True):
        for trial in ranked:
            if trial.params.get("data.augment") is augment:
                best.setdefault(f"augment {augment}", trial.number)
    return list(best.values())


def _stops_early() -> Callable[[dict[str, Any], torch.Tensor], bool | None]:
    """Ends a run that has diverged."""
    first: float | None = None

    def watch(row: dict[str, Any], _: torch.Tensor) -> bool | None:
        nonlocal first
        if outcomes.exploded(row, first):
            return False
        if first is None:
            first = row.get("loss")
        return None

    return watch


def words(trial: Trial) -> str:
    """The settings of a trial in a few words."""
    parts = {}
    for key, value in trial.recipe.items():
        name = key.rpartition(".")[2]
        parts[name] = f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}"
    return ", ".join([_rounded(trial.settings["algorithm"]), *parts.values()])


def _rounded(algorithm: str) -> str:
    """An algorithm with three digits in its options."""
    return re.sub(r"\d+\.\d+(?:e-?\d+)?", lambda number: f"{float(number[0]):.3g}", algorithm)
