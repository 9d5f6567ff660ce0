"""One call: from data and a model to a trained model."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairosfl.core.layout import Layout
from kairosfl.core.round import result
from kairosfl.core.rule import Algorithm, Rule
from kairosfl.core.run import Run
from kairosfl.data.own import from_any
from kairosfl.engines.memory import spilling
from kairosfl.errors import UserError, nearest
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.runs.config import GIVEN, SECTIONS, RunConfig, resolve, tables, text_of
from kairosfl.runs.experiment import begin, execute, reopen
from kairosfl.runs.export import beyond_adapters, has_adapters, save_adapters, save_state
from kairosfl.runs.export import load as trained_model
from kairosfl.runs.files import plain, write
from kairosfl.runs.folder import Folder, silent
from kairosfl.runs.lock import NAME
from kairosfl.runs.prepare import about_of, divide, prepare, setup_of, within_memory
from kairosfl.runs.sensible import harmful, pinned
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.digest import hashed
from kairosfl.tasks.kinds import Loss
from kairosfl.tasks.metrics import Measure, Metric
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import load

COHORT = 10  # or all clients, where there are fewer
OF_DATASET = ("mean", "std", "vocabulary", "labels")
# Keys of a configuration that say what is an argument here, or that change built-in data.
UNAVAILABLE = ("name", "options", "start", "validation", "normalise", "noise")


class _Home:
    """Where a run is recorded: a folder, or a temporary one that is deleted with its last user."""

    def __init__(self, out: str | Path | None) -> None:
        if out is None:
            parent = Path(tempfile.mkdtemp(prefix="kairosfl-"))
            weakref.finalize(self, shutil.rmtree, parent, ignore_errors=True)
            out = parent / "run"
        self.path = Path(out)


@dataclass(frozen=True, eq=False, repr=False)
class History:
    """What a run has done so far.

    Args:
        metrics: One dict per round, as in `metrics.jsonl`: `round`, `accuracy`, `loss`,
            `train_loss`, `cohort`, `bytes_up` and so on.
        initial: The model before training.
        x: The trained parameters after the last of these rounds.
        home: Where the run is recorded.
        layout: Where the trained parameters lie in x.
    """

    metrics: list[dict[str, Any]]
    initial: nn.Module
    x: Tensor
    home: _Home
    layout: Layout

    @cached_property
    def model(self) -> nn.Module:
        """The trained model, on the CPU and in evaluation mode; the model passed to `simulate` is
        not changed.

        Parameters that never leave a client are as they were before training: it is the model of a
        client that has not trained yet. `model_of` gives that of another one.
        """
        return load(copy.deepcopy(self.initial), self.x, self.layout).eval()

    def model_of(self, client: int) -> nn.Module:
        """The model with which a client is evaluated: with its own part, or as a rule says.

        Args:
            client: Its number, 0 to N − 1.
        """
        last = self.metrics[-1]["round"] if self.metrics else 0
        if Folder(self.folder).rounds_done() != last:
            raise UserError(
                f"model_of reads the newest checkpoint, and there is none of round {last} yet; "
                "call it when the run has ended, or set checkpoint_every = 1."
            )
        return trained_model(self.folder, self.initial, client)

    @property
    def score(self) -> float:
        """The main metric in the last round that was evaluated; NaN if none was."""
        return self.last(self.metric)

    @property
    def accuracy(self) -> float:
        """The test accuracy in the last round that was evaluated; NaN if none was."""
        return self.last("accuracy")

    @property
    def metric(self) -> str:
        """The name of the main metric."""
        return Folder(self.folder).main().name

    def last(self, name: str) -> float:
        """A column of the metrics in the last round that measured it; NaN if none did."""
        if self.metrics and name not in self.metrics[-1]:
            raise UserError(f"the history has no {name!r}; {nearest(name, self.metrics[-1])}")
        for row in reversed(self.metrics):
            if row[name] is not None:
                return float(row[name])
        return float("nan")

    @property
    def folder(self) -> Path:
        """The run folder; without `out` it is deleted with the last `History` of the run."""
        return self.home.path

    def frame(self) -> Any:
        """The metrics as a pandas `DataFrame`, or as a list of dicts if pandas is not installed."""
        try:
            import pandas
        except ModuleNotFoundError:
            return list(self.metrics)
        return pandas.DataFrame(self.metrics)

    def report(self, path: str | Path = "report.html") -> Path:
        """Write the report, one HTML page that works offline; returns its path."""
        from kairosfl.report.page import write_report

        return write_report([self.folder], Path(path))

    def save(self, directory: str | Path) -> Path:
        """Copy the run folder, with the trained model as `model.safetensors`; returns the path.

        If peft's adapters are all that was trained, they are saved instead, as peft's directory
        `adapter`.
        """
        directory = Path(directory)
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise UserError(
                f"{directory} exists and is not an empty directory; save to another one."
            )
        shutil.copytree(
            self.folder, directory, ignore=shutil.ignore_patterns(".lock"), dirs_exist_ok=True
        )
        if has_adapters(self.model) and not beyond_adapters(self.model):
            save_adapters(self.model, directory / "adapter")
        else:
            save_state(self.model, directory / "model.safetensors")
        return directory

    def __repr__(self) -> str:
        score = f"{self.metric}={self.score:.4f}"
        return f"History(rounds={len(self.metrics)}, {score}, folder={str(self.folder)!r})"


def simulate(
    model: nn.Module,
    train: Any,
    test: Any = None,
    *,
    algorithm: str | Algorithm | Rule = "fedavg",
    rounds: int = 100,
    cohort: int | None = None,
    clients: int | Population | Sequence[Any] | None = None,
    partition: str | None = None,
    alpha: float = 0.3,
    epochs: int = 1,
    batch_size: int = 32,
    lr: float = 0.1,
    optimizer: str = "sgd",
    kind: str | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric | Measure] | None = None,
    own: Sequence[str] = (),
    seed: int = 0,
    engine: str = "auto",
    device: str = "auto",
    out: str | Path | None = None,
    on_round: Callable[[History], bool | None] | None = None,
    progress: bool = True,
    name: str | None = None,
    classes: int | None = None,
    input: str | Sequence[str] | None = None,
    target: str = "label",
    client: str | None = None,
    encode: Callable[[Any], Any] | None = None,
    lazy: bool | None = None,
    fleet: str | Mapping[str, Any] | None = None,
    **settings: Any,
) -> History:
    """Train a model by federated learning, simulated on this machine.

    Args:
        model: Any module: one of your own, or from torchvision, timm, transformers or peft. It is
            copied, not modified. Only parameters with `requires_grad` are trained and sent.
        train: A tuple `(x, y)` of arrays or tensors, a torch data set of (input, target) pairs, a
            Hugging Face `Dataset` or `DatasetDict`, a `DataSet`, or a list with one of these for
            each client. `x` may be a tuple or a dict of arrays, with which the model is called as
            `model(*x)` or `model(**x)`.
        test: The test samples, in any of these forms; None where `train` contains them.
        algorithm: A sum of rules, as text or in Python.
        rounds: The number of rounds.
        cohort: Clients in each round; by default 10, or all where there are fewer.
        clients: The number of clients, a `Population`, or the indices of each client's training
            samples in a list. By default the clients that the data has, or else 40.
        partition: How samples are dealt to the clients: "dirichlet", "iid", "natural" and others.
            By default "natural" where the data has its own clients, or else "dirichlet", or "iid"
            if samples do not have one class each.
        alpha: Of the Dirichlet distribution: the smaller, the more clients differ.
        epochs: Local epochs.
        batch_size: Samples in a local step.
        lr: The local learning rate.
        optimizer: The local optimizer, "sgd" or "adamw".
        kind: What the targets are: "classification", "binary", "multilabel", "regression",
            "segmentation" or "language"; by default inferred from them. It gives `loss` and
            `metrics` their defaults.
        loss: From outputs and targets of a batch to one loss per sample.
        metrics: What is measured on the test set, by name, the main one first: functions from
            outputs and targets to a number per sample, of which the mean is better when higher, or
            a `kairosfl.Metric`.
        own: Patterns of the parameters that never leave a client, such as ["head.*"]: see Personal
            models.
        seed: Of everything random but the model, whose initial weights are those passed in.
        engine: "auto", "loop", "batched", "ray", or "debug", which names the stage that goes wrong.
        device: "auto", "cpu" or "cuda".
        out: A run folder, as the command line writes one. If it has a run with the same arguments,
            that is continued from its last checkpoint, including its weights; a finished one is
            returned without training.
        on_round: Called after every round with the `History` so far; the run ends if it returns
        False.
        progress: Whether progress is shown.
        name: What reports call the data; by default "own", or a `DataSet`'s own name.
        classes: The number of classes; by default counted from the labels.
        input: Hugging Face: the column of inputs, or several, which become a dict; by default
            "image", or the only one left.
        target: Hugging Face: the column of targets.
        client: Hugging Face: the column with each row's client.
        encode: Hugging Face: turns one input into an array.
        lazy: Whether samples are read, and random transforms drawn anew, for every batch, instead
            of once into memory. By default they are where a torch data set is random or larger than
            half the memory, and memory maps.
        fleet: The devices on which clients are simulated: how much they differ, such as
            "lognormal(sigma=1.0)", or the keys of `[fleet]` in a dict. By default there is no
            clock.
        **settings: Any other key of `[data]`, `[train]` and `[run]` in a configuration, such as
            `momentum`, `schedule`, `minimum`, `eval_every` or `precision`, and `mean`, `std`,
            `vocabulary` and `labels` of a `DataSet`.

    Raises:
        UserError: For an argument that does not fit, with the fix.
    """
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__}; give a torch.nn.Module.")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError("model has no weights, only shapes (device 'meta'); load it onto the CPU.")
    if not isinstance(algorithm, str | Algorithm | Rule):
        raise UserError(
            f"algorithm = {algorithm!r} must be text like 'fedprox(mu=0.01)', or a sum of rules."
        )
    if on_round is not None and not callable(on_round):
        raise UserError(f"on_round = {on_round!r} must be a function of the history so far.")

    # --- data ---
    initial = copy.deepcopy(model).cpu()
    sections = _sections(settings)
    fields = {key: settings[key] for key in OF_DATASET if key in settings}
    columns: dict[str, Any] = {"input": input, "target": target, "client": client, "encode": encode}
    dataset = hashed(
        from_any(train, test, name=name, classes=classes, kind=kind, lazy=lazy, **columns, **fields)
    )

    # --- configuration ---
    sections["train"] |= {"rounds": rounds, "cohort": 1 if cohort is None else cohort}
    sections["train"] |= {"epochs": epochs, "batch_size": batch_size}
    sections["train"] |= {"lr": lr, "optimizer": optimizer}
    sections["run"] |= {"engine": engine, "device": str(device)}
    sections["data"] |= {"name": GIVEN + dataset.name, "alpha": alpha}
    sections["data"] |= _dealt(dataset, clients, partition)
    if fleet is not None:
        sections["fleet"] = {"devices": fleet} if isinstance(fleet, str) else dict(fleet)
    patterns = own if isinstance(own, str) else list(own)
    sections["model"] = {"name": GIVEN + type(model).__name__, "own": patterns}
    nested: dict[str, Any] = {"seed": _scalar(seed)}
    for section, table in sections.items():
        nested[section] = {key: _scalar(value) for key, value in table.items()}
    if isinstance(algorithm, str):
        nested["algorithm"] = algorithm
    config = resolve(nested)
    if not isinstance(algorithm, str):
        config = replace(config, algorithm=Algorithm() + algorithm)

    # --- task ---
    if clients is None or isinstance(clients, int | np.integer):
        population = divide(config, dataset)
    else:
        population = _population(clients)
    task = Task(
        initial,
        dataset,
        population,
        loss,  # type: ignore[arg-type]
        config.data.augmentation(),
        metrics,
        own=config.model.own,
    )
    if cohort is None:
        config = replace(config, train=replace(config.train, cohort=min(COHORT, len(task.clients))))
    config.train.check_cohort(len(task.clients))
    threads = torch.get_num_threads()
    try:
        return _run(config, task, _Home(out), on_round, progress)
    finally:
        torch.set_num_threads(threads)


def _run(
    config: RunConfig,
    task: Task,
    home: _Home,
    on_round: Callable[[History], bool | None] | None,
    progress: bool,
) -> History:
    folder = Folder(home.path)
    begun = (home.path / "config.toml").is_file()
    if begun:
        config = _continued(config, folder)
    elif home.path.exists() and (not home.path.is_dir() or _used(home.path)):
        raise UserError(
            f"out = {str(home.path)!r} exists and is not a run folder; choose another one."
        )
    if folder.summary().get("rounds", 0) >= config.train.rounds:
        folder.check(about_of(config, task), task)
        return History(folder.rows(), task.model, _result(config, task, folder), home, task.layout)
    with folder.locked():
        return _train(config, task, home, folder, begun, on_round, progress)


def _used(path: Path) -> bool:
    """Whether a folder has something in it but the lock of a process that is about to write."""
    return any(entry.name != NAME for entry in path.iterdir())


def _train(
    config: RunConfig,
    task: Task,
    home: _Home,
    folder: Folder,
    begun: bool,
    on_round: Callable[[History], bool | None] | None,
    progress: bool,
) -> History:
    """Begin the run, or continue it, in its locked folder."""
    if begun:
        write(folder.path / "config.toml", text_of(tables(config)))
    done = _done(folder) if begun else 0
    rows = [row for row in folder.rows() if row["round"] <= done]
    last: list[Tensor] = []

    def watch(row: dict[str, Any], x: Tensor) -> bool | None:
        while rows and rows[-1]["round"] >= row["round"]:
            rows.pop()
        rows.append(plain(row))
        last[:] = [x]
        if on_round is None:
            return None
        try:
            answer = on_round(History(list(rows), task.model, x, home, task.layout))
        except StopIteration:
            return False
        if answer is None:
            return None
        return bool(answer)

    with _shown(config, done, progress) as show, within_memory():
        folder.say = show.say if show else silent
        prepared = prepare(config, task)
        listeners: dict[str, Any] = {"notify": show, "watch": watch}
        if begun:
            folder.say(prepared.method)
            recorded = reopen(prepared, folder, **listeners)
        else:
            recorded = begin(prepared, folder, command="kairosfl.simulate", **listeners)
            folder.say(prepared.method)
        execute(recorded, prepared.engine)
    x = last[0] if last else _result(config, task, folder)
    return History(rows, task.model, x, home, task.layout)


def _continued(config: RunConfig, folder: Folder) -> RunConfig:
    """The configuration to continue the run in a folder with; refuses that of another run."""
    origin = folder.origin()
    config = pinned(config, origin)
    changed = harmful(config, origin) if origin else []
    if changed:
        raise UserError(
            f"out = {str(folder.path)!r} contains another run: {', '.join(changed)}; choose "
            "another folder, or give the arguments that it began with."
        )
    done = _done(folder)
    if done > config.train.rounds:
        raise UserError(
            f"rounds = {config.train.rounds} is less than the {done} that the run in "
            f"{str(folder.path)!r} has done; give {done} or more, or choose another out."
        )
    return config


def _done(folder: Folder) -> int:
    """Rounds done in the newest checkpoint; 0 if there is none."""
    done = folder.rounds_done()
    return 0 if done is None else done


def _result(config: RunConfig, task: Task, folder: Folder) -> Tensor:
    """The vector of the newest checkpoint."""
    setup = setup_of(config, task)
    blank = Run.start(task.start(), setup, seed=config.seed, allocate=spilling)
    return result(Checkpoints(folder.checkpoints).load(blank)[0], setup)


def _shown(config: RunConfig, done: int, progress: bool) -> AbstractContextManager[Any]:
    """The progress bar; nothing where rich is not installed."""
    if not progress:
        return nullcontext()
    try:
        from kairosfl.progress import RunProgress
    except ModuleNotFoundError:
        return nullcontext()
    return RunProgress(config.train.rounds, done=done, critical=config.follows_detector)


def _sections(settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Further keyword arguments by the section of the configuration that has the key."""
    homes = {}
    for name, cls in SECTIONS.items():
        for field in dataclasses.fields(cls):
            if name not in ("task", "fleet") and field.name not in UNAVAILABLE:
                homes[field.name] = name
    sections: dict[str, dict[str, Any]] = {name: {} for name in SECTIONS}
    for key, value in settings.items():
        if key in homes:
            sections[homes[key]][key] = value
        elif key not in OF_DATASET:
            arguments = list(inspect.signature(simulate).parameters)
            arguments.remove("settings")
            names = [*arguments, *homes, *OF_DATASET]
            raise UserError(f"simulate has no argument {key!r}; {nearest(key, names)}")
    return sections


def _scalar(value: Any) -> Any:
    """A number of NumPy as Python's, which TOML can hold."""
    if isinstance(value, np.generic):
        return value.item()
    return value


def _dealt(dataset: DataSet, clients: Any, partition: str | None) -> dict[str, Any]:
    """The keys of [data] that say who the clients are."""
    if clients is None or isinstance(clients, int | np.integer):
        keys: dict[str, Any] = {"partition": _partition(dataset, partition)}
        if clients is not None:
            keys["clients"] = clients
        elif keys["partition"] == "natural":
            keys |= {"clients": 0, "minimum": 1}  # nobody is left out
        return keys
    if partition is not None:
        raise UserError(
            f"partition = {partition!r} cannot be combined with clients that are given; leave one "
            "out."
        )
    is_list = isinstance(clients, Population | Sequence) and not isinstance(clients, str)
    if not is_list or not len(clients):
        raise UserError(
            f"clients = {clients!r} must be a number, a Population, or a list of index arrays."
        )
    return {"partition": f"{GIVEN}clients", "clients": len(clients)}


def _partition(dataset: DataSet, partition: str | None) -> str:
    """How samples are dealt: as asked for, else as suits the data."""
    if partition:
        return partition
    if dataset.keys is not None:
        return "natural"
    if dataset.labels_of_train is not None:
        return "dirichlet"
    return "iid"


def _population(clients: Any) -> Population:
    if isinstance(clients, Population):
        return clients
    return Population.from_lists(clients)
