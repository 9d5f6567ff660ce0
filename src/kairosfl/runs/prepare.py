"""One door: from a configuration to what a run needs.

Whatever runs a configuration comes through here: `prepare` gives the task, the setup, the engine
and what is recorded about the run, and nothing behind it sees the configuration again. Where
several runs share an engine, `ready` stops before it is built.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from kairosfl import data, models
from kairosfl.core.checked import checked
from kairosfl.core.layout import Layout
from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Setup
from kairosfl.detectors import parse_detectors
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.fleets import fleet_of
from kairosfl.runs import taskfile
from kairosfl.runs.config import GIVEN, Execution, RunConfig, tables
from kairosfl.runs.engines import build_engine, method, resolve_engine
from kairosfl.runs.sensible import check_fit
from kairosfl.tasks.dataset import DataSet, Samples, held_out
from kairosfl.tasks.noise import noisy
from kairosfl.tasks.partitions import SETTINGS, partition
from kairosfl.tasks.population import Population
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.task import Task

CHEAP = 0.05  # of the arithmetic of a run: what measuring every client may cost
TRAINING = 3  # passes: a backward pass costs about two forward passes
ENGINE = ("device", "precision", "slots", "deterministic")  # keys of [run] that define an engine


@dataclass(frozen=True, kw_only=True)
class About:
    """What is recorded about a run, and how it is carried out.

    Args:
        algorithm: The rules, as they are written in the configuration.
        seed: Of everything random in the run.
        run: [run], with every automatic choice made.
        settings: Every key of the configuration, as nested tables.
        start: The run folder whose model is the first one; empty: a new model.
        file: The task file whose code is called during training; empty: none.
        measures_clients: Whether every client is measured in a round that is evaluated.
        measures_last: The same of the last round.
    """

    algorithm: Algorithm
    seed: int
    run: Execution
    settings: Mapping[str, Any]
    start: str = ""
    file: str = ""
    measures_clients: bool = False
    measures_last: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared:
    """What a run needs, once its configuration is settled.

    Args:
        task: Data, clients and model.
        setup: What stays the same throughout the run.
        engine: What trains.
        about: What is recorded about it.
    """

    task: Task
    setup: Setup
    engine: Engine
    about: About

    @property
    def method(self) -> str:
        """How it is run, in one line."""
        return method(self.about.run, self.engine)


@dataclass(frozen=True, eq=False, kw_only=True)
class Ready:
    """A run whose engine is not built yet; runs of one `kind` may share a batched one.

    Args:
        task: Data, clients and model.
        setup: What stays the same throughout the run.
        about: What is recorded about it.
        because: Why this engine was chosen, if it was.
        kind: What runs must have in common to share a batched engine; empty on other ones.
    """

    task: Task
    setup: Setup
    about: About
    because: str = ""
    kind: str = ""

    @property
    def largest(self) -> int:
        """The largest cohort that it may have."""
        return self.setup.algorithm.largest_cohort(self.setup.recipe.cohort, self.setup.clients)

    def build(self, cohorts: Sequence[int] = ()) -> Engine:
        """Its engine; `cohorts` are the largest ones of all runs that will share it."""
        if not cohorts:
            cohorts = (self.largest,)
        return build_engine(self.about.run, self.task, cohorts, self.because)

    def on(self, engine: Engine) -> Prepared:
        """The run on an engine that exists."""
        return Prepared(task=self.task, setup=self.setup, engine=engine, about=self.about)


@dataclass(eq=False)
class Shared:
    """What runs of one sweep or search need not make twice.

    Equal samples are one object, so that their runs can share an engine, too.
    """

    _samples: WeakValueDictionary[str, Samples] = field(default_factory=WeakValueDictionary)
    _noised: tuple[str, DataSet, DataSet] | None = None  # what was asked for, of what, and made

    def once(self, dataset: DataSet) -> DataSet:
        """The data set with the samples of an equal one that another run has; it is `hashed`."""
        train, test = dataset.train, dataset.test
        if isinstance(train, Samples):
            train = self._samples.setdefault(dataset.hashes["train"], train)
        if isinstance(test, Samples):
            test = self._samples.setdefault(dataset.hashes["test"], test)
        return replace(dataset, train=train, test=test)

    def noisy(self, dataset: DataSet, clients: Population, noise: float, seed: int) -> DataSet:
        """The data set with noise on the clients' features; the last one is remembered."""
        key = f"{clients.hash()} {noise} {seed}"
        last = self._noised
        if last is None or last[0] != key or last[1] is not dataset:
            last = key, dataset, noisy(dataset, clients, noise, seed)
            self._noised = last
        return last[2]


def prepare(config: RunConfig, task: Task | None = None, engine: Engine | None = None) -> Prepared:
    """What a run of this configuration needs.

    Args:
        config: The configuration.
        task: Data, clients and model, where they are there already.
        engine: The engine, where there is one already, as on a deployed server.

    Raises:
        UserError: Names what does not fit together, and the fix.
    """
    task = build_task(config) if task is None else task
    with within_memory():
        run = ready(config, task)
        return run.on(run.build() if engine is None else engine)


def ready(config: RunConfig, task: Task, because: str = "") -> Ready:
    """A run of this configuration whose engine is not built yet.

    `because` is why its engine was chosen, where that was done before.
    """
    check_fit(config, task)
    execution, chosen = resolve_engine(config.run, config.train, task)
    resolved = replace(config, run=execution)
    if chosen:
        because = chosen
    kind = ""
    if execution.engine == "batched":
        kind = _kind(resolved, task)
    return Ready(
        task=task,
        setup=setup_of(config, task),
        about=about_of(resolved, task),
        because=because,
        kind=kind,
    )


def setup_of(config: RunConfig, task: Task) -> Setup:
    """What stays the same throughout a run of this configuration."""
    fleet = None
    if config.fleet.devices:
        devices = dataclasses.asdict(config.fleet)
        fleet = fleet_of(clients=len(task.clients), seed=config.seed, **devices)
    setup = setup_without_data(config, task.layout, len(task.clients), own=task.own_start())
    setup = replace(setup, sizes=task.clients.sizes, fleet=fleet, waits=None)
    if config.run.engine == "debug":
        setup = checked(setup)
    return setup


def setup_without_data(
    config: RunConfig, layout: Layout, clients: int, own: Tensor | None = None
) -> Setup:
    """The same where only the model is there: enough to read a checkpoint."""
    detectors = parse_detectors(config.run.detector)
    return Setup(config.algorithm, config.train, clients, layout, detectors, own=own, waits={})


def about_of(config: RunConfig, task: Task) -> About:
    """What is recorded about a run of this configuration."""
    return About(
        algorithm=config.algorithm,
        seed=config.seed,
        run=config.run,
        settings=tables(config),
        start=config.model.start,
        file=config.task.file,
        measures_clients=_measures_clients(config, task, last=False),
        measures_last=_measures_clients(config, task, last=True),
    )


# --- the task ---


@lru_cache(maxsize=2)
def _load(name: str, validation: float, normalise: bool, options: str) -> DataSet:
    dataset = data.load(name, **json.loads(options))
    if not normalise:
        dataset = replace(dataset, mean=(), std=())
    if validation:
        return held_out(dataset, validation)
    return dataset


def build_task(config: RunConfig, client: int | None = None, shared: Shared | None = None) -> Task:
    """The data, the clients and the model that a configuration names.

    Args:
        config: The configuration.
        client: For a device that has only the data of this client.
        shared: What runs of one sweep or search share.
    """
    shared = Shared() if shared is None else shared
    with within_memory():
        task = _task(config, client, shared)
    if not len(task.dataset.test) and client is None:
        raise UserError(
            f"data set {task.dataset.name!r} has no test samples, so no model can be evaluated; "
            "add some, or set data.validation to a fraction of the training samples."
        )
    return task


def _task(config: RunConfig, client: int | None, shared: Shared) -> Task:
    if config.task.file:
        return taskfile.build(config, divide, shared.once, client)
    return _built_in(config, shared)


def build_data(config: RunConfig, shared: Shared | None = None) -> tuple[DataSet, Population]:
    """The data set and the clients that a configuration names."""
    if config.task.file:
        task = build_task(config)
        return task.dataset, task.clients
    for key, name in (("data.name", config.data.name), ("model.name", config.model.name)):
        if name.startswith(GIVEN):
            raise UserError(
                f"{key} = {name!r} was passed to kairosfl.simulate and is not stored; continue the "
                "run from Python, by calling simulate with the same arguments and the same out."
            )
    options = json.dumps(dict(config.data.options), sort_keys=True, default=str)
    dataset = _load(config.data.name, config.data.validation, config.data.normalise, options)
    clients = divide(config, dataset)
    noise = config.data.noise
    if noise:
        shared = Shared() if shared is None else shared
        dataset = shared.noisy(dataset, clients, noise, partition_seed(config))
    return dataset, clients


def _built_in(config: RunConfig, shared: Shared) -> Task:
    """A task of data and a model that have names."""
    dataset, clients = build_data(config, shared)
    options = dict(config.model.options)
    if dataset.vocabulary and "vocabulary" in models.options(config.model.name):
        options.setdefault("vocabulary", dataset.vocabulary)
    model = models.build(
        config.model.name,
        shape=dataset.shape,
        classes=dataset.outputs,
        seed=config.seed,
        **options,
    )
    augment = config.data.augmentation()
    return Task(model, dataset, clients, augment=augment, own=config.model.own)


def partition_seed(config: RunConfig) -> int:
    """The seed of the partition."""
    if config.data.partition_seed < 0:
        return config.seed
    return config.data.partition_seed


def divide(config: RunConfig, dataset: DataSet) -> Population:
    """The clients among which a configuration divides a data set."""
    settings = {name: getattr(config.data, name) for name in SETTINGS}
    return partition(
        dataset,
        name=config.data.partition,
        clients=config.data.clients or None,
        seed=partition_seed(config),
        **settings,
    )


# --- what runs may share ---


def _kind(config: RunConfig, task: Task) -> str:
    """What runs must have in common to share a batched engine."""
    data, run = config.data, config.run
    threads = run.threads if run.device == "cpu" else None
    engine = [threads, *(getattr(run, name) for name in ENGINE)]
    # With noise, the samples of the clients differ.
    noised = (data, partition_seed(config)) if data.noise else ()
    samples = (data.name, data.options, data.augmentation(), data.validation, data.normalise)
    common: list[Any] = [*samples, noised, config.model, engine, task.base_hash]
    common.append(sorted(task.own_names))
    if config.task.file:
        common += [config.task, *_identity(task)]
    return repr(common)


def _identity(task: Task) -> tuple[Any, ...]:
    """What tells the tasks that a function made apart; equal samples are one object there."""
    dataset = task.dataset
    measures = [(name, id(metric.measure)) for name, metric in task.measures.items()]
    objects = (id(dataset.train), id(dataset.test), id(task.loss), measures, task.augment)
    form = (dataset.kind, dataset.classes, dataset.mean, dataset.std, dataset.vocabulary)
    return (*objects, repr(task.model), *form)


# --- whether every client is measured ---


def _measures_clients(config: RunConfig, task: Task, *, last: bool) -> bool:
    """Whether an evaluation also measures the model on every client's own data: on request, or
    after the last round where that is cheap.
    """
    held = bool(task.clients.sizes.any())
    if held and setup_of(config, task).personal:
        return True
    setting = config.run.client_accuracy
    if setting == "auto":
        return last and _is_cheap(config, task)
    return bool(setting)


def _is_cheap(config: RunConfig, task: Task) -> bool:
    """Decided by counting, not by a stopwatch, so that a run that is repeated records the same."""
    train, clients = config.train, task.clients
    samples = task.dataset.test if task.tests is not None else task.dataset.train
    held = int(clients.sizes.sum())  # none: the data are on the clients' own devices
    if not held or isinstance(samples, Streamed):
        return False
    if config.algorithm.any("promises"):
        return False  # such numbers have no noise
    trained = train.rounds * min(train.cohort, len(clients)) * train.epochs * held / len(clients)
    evaluated = train.rounds // config.run.eval_every * len(task.dataset.test)
    return len(samples) <= CHEAP * (TRAINING * trained + evaluated)


# --- running out of memory ---


@contextmanager
def within_memory() -> Iterator[None]:
    """Turn running out of memory into an error that says how to fix it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The GPU ran out of memory: stop other programs that use it, or set run.slots, the "
            "clients trained at the same time, in the run's config.toml; then `kairosfl resume`, "
            "or the same sweep again, continues from the last checkpoint."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        size = re.search(r"allocate (\d+) bytes", str(error))
        amount = f" ({int(size[1]) / 1e9:,.1f} GB were asked for at once)" if size else ""
        raise UserError(
            f"The memory of this machine is too small{amount}: choose a smaller model or less data, "
            "or set run.slots, the clients trained at the same time."
        ) from error
