"""Task files: a Python function that makes the task of a run, named by `[task]` of its
configuration.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import importlib
import importlib.util
import inspect
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from kairosfl.data.own import from_any
from kairosfl.errors import UserError, nearest
from kairosfl.runs.config import Data, RunConfig
from kairosfl.tasks import partitions
from kairosfl.tasks.dataset import DataSet, held_out
from kairosfl.tasks.digest import hashed
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

Function = Callable[..., Any]
Divide = Callable[[RunConfig, DataSet], Population]
Once = Callable[[DataSet], DataSet]
OF_TASK = ("model", "clients", "loss", "metrics", "own")
OF_DATA = {*inspect.signature(from_any).parameters, *(each.name for each in fields(DataSet))} - {
    "fields"
}
KEYS = sorted({*OF_TASK, *OF_DATA})  # of a dict that a function returns
SETTINGS = tuple(each.name for each in fields(Data) if each.name not in ("name", "options"))
PREPARING = ("normalise", "noise")  # built-in data
DEALING = ("partition", *partitions.SETTINGS)
FORMS = "a Task, a tuple (model, train, test) or a dict of simulate's arguments"


def build(config: RunConfig, divide: Divide, once: Once, client: int | None = None) -> Task:
    """The task that the function of a configuration makes.

    Args:
        config: The configuration.
        divide: Deals samples to clients as [data] says.
        once: Replaces samples by equal ones that another run has.
        client: For a device that has the data of this client only.
    """
    path = source(config.task.file)
    if path is not None and not path.is_file():
        raise UserError(
            f"task.file = {str(path)!r} does not exist; give the path of a Python file, or a module's name."
        )
    key = (
        hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
        if path is not None
        else ""
    )
    function = _function(config.task.file, config.task.function, key)
    asked = json.dumps(_arguments(config, function, client), sort_keys=True, default=str)
    made = _make(config.task.file, config.task.function, key, asked, config.seed)
    _check_unused(config, function, made)
    task = made if isinstance(made, Task) else _task(config, made, divide)
    dataset = once(hashed(task.dataset))
    if path is not None:
        dataset = replace(dataset, hashes={**dataset.hashes, path.name: key})
    own = _own(config, task)
    task = replace(task, dataset=dataset, model=copy.deepcopy(task.model), own=own)
    task.check()
    return task


def source(file: str) -> Path | None:
    """The file of `task.file`; None for a module that is imported by name."""
    return Path(file) if file.endswith(".py") else None


@lru_cache(maxsize=8)
def _function(file: str, name: str, key: str) -> Function:
    """The function, of a file imported anew whenever it has changed."""
    with explained(file, "importing it"):
        module = _imported(file, key)
    function = getattr(module, name, None)
    if function is None or not callable(function):
        own = [
            each
            for each, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        hint = nearest(name, own) if own else "it defines none"
        raise UserError(f"task.function = {name!r} is not in {file}; {hint}")
    return function  # type: ignore[no-any-return]


def _imported(file: str, key: str) -> ModuleType:
    path = source(file)
    if path is None:
        with _importable(Path.cwd()):
            return importlib.import_module(file)
    spec = importlib.util.spec_from_file_location(f"kairosfl_task_{key}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up while they are made. Afterwards it is forgotten, so that what
    # the file defines is sent to Ray's processes by value: they could not import it.
    sys.modules[spec.name] = module
    try:
        with _importable(path.parent):
            spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


@contextlib.contextmanager
def _importable(place: Path) -> Iterator[None]:
    """What is next to the file can be imported by it."""
    sys.path.insert(0, str(place))
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            sys.path.remove(str(place))


@contextlib.contextmanager
def explained(file: str, doing: str) -> Iterator[None]:
    """What the user's code raises, as one sentence with the line; the traceback is its cause.

    Gradients, if it switched them off for good, are on again.
    """
    grad = torch.is_grad_enabled()
    try:
        yield
        if sys.stdout is not None and sys.stdout.closed:
            raise UserError(
                f"{file} closes sys.stdout, on which the results are printed; leave it open."
            )
    except (UserError, KeyboardInterrupt, MemoryError, torch.OutOfMemoryError):
        raise
    except ModuleNotFoundError as error:
        if error.name and (error.name == file or file.startswith(f"{error.name}.")):
            raise UserError(
                f"task.file = {file!r} cannot be imported; give a module's name or the path of a file."
            ) from error
        raise UserError(
            f"{_where(error, file)}: {error}, while {doing}; install it, or correct the name."
        ) from error
    except BaseException as error:  # also SystemExit, and what is the user's own
        said = str(error).strip().splitlines() or [""]
        kind = type(error).__name__
        text = f"{kind}: {said[0]}" if said[0] else kind
        raise UserError(
            f"{_where(error, file)}: {text}, while {doing}; --verbose shows the traceback."
        ) from error
    finally:
        torch.set_grad_enabled(grad)


def _where(error: BaseException, file: str) -> str:
    """The line of the user's file at which an exception was raised."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        frame
        for frame in frames
        if frame.filename == file or Path(frame.filename).stem == file.rpartition(".")[2]
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}, line {frame.lineno}"


def _arguments(config: RunConfig, function: Function, client: int | None) -> dict[str, Any]:
    """Options, and those settings of the run that the function takes by name."""
    parameters = inspect.signature(function).parameters
    more = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    name = f"{config.task.function}() in {config.task.file}"
    for option in config.task.options:
        if option not in parameters and not more:
            hint = nearest(option, parameters) if parameters else "it takes none"
            raise UserError(f"task.options.{option} is not an argument of {name}; {hint}")
    settings = {"seed": config.seed, "client": client} | {
        key: getattr(config.data, key) for key in SETTINGS
    }
    if not config.data.clients:
        del settings["clients"]  # not given
    if (
        client is None
        and "client" in parameters
        and parameters["client"].default is not inspect.Parameter.empty
    ):
        del settings["client"]
    asked = {key: value for key, value in settings.items() if key in parameters} | dict(
        config.task.options
    )
    for key, parameter in parameters.items():
        required = parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        )
        if required and key not in asked:
            raise UserError(f"task.options.{key} is missing; {name} needs it.")
    return asked


@lru_cache(maxsize=16)
def _make(file: str, name: str, key: str, arguments: str, seed: int) -> Task | dict[str, Any]:
    """What the function returns; torch draws by the seed of the run, and by nothing that came
    before.
    """
    path = source(file)
    place = path.parent if path is not None else Path.cwd()
    with (
        torch.random.fork_rng(devices=[]),
        explained(file, f"calling {name}()"),
        _importable(place),
    ):
        torch.default_generator.manual_seed(seed)
        made = _function(file, name, key)(**json.loads(arguments))
    if isinstance(made, Task):
        return made
    given = (
        dict(zip(("model", "train", "test"), made, strict=False))
        if isinstance(made, tuple)
        else made
    )
    good = (
        isinstance(given, Mapping)
        and isinstance(given.get("model"), nn.Module)
        and "train" in given
    )
    if not good or (isinstance(made, tuple) and len(made) > 3):
        raise UserError(f"{name}() in {file} returned {_returned(made)}; return {FORMS}.")
    given = dict(given)
    for key in given:
        if key not in KEYS:
            raise UserError(
                f"{name}() in {file} returned a dict with the key {key!r}; {nearest(str(key), KEYS)}"
            )
    others = {key: given.pop(key) for key in OF_TASK if key in given}
    try:
        dataset = from_any(given.pop("train"), given.pop("test", None), **given)
    except TypeError as error:
        raise UserError(
            f"{name}() in {file} returned a dict that makes no task: {error}."
        ) from error
    return {**others, "dataset": dataset}


def _returned(made: Any) -> str:
    """What a function returned that is of no use."""
    if isinstance(made, tuple) and len(made) in (2, 3):
        return f"a tuple whose first item is {_kind(made[0])}, not a torch.nn.Module"
    if isinstance(made, tuple):
        return f"a tuple of {len(made)}"
    if isinstance(made, Mapping) and "model" not in made:
        return "a dict without 'model'"
    if isinstance(made, Mapping) and not isinstance(made["model"], nn.Module):
        return f"a dict whose 'model' is {_kind(made['model'])}, not a torch.nn.Module"
    if isinstance(made, Mapping):
        return "a dict without 'train'"
    return _kind(made)


def _kind(made: Any) -> str:
    """What kind of thing a value is."""
    if made is None:
        return "None"
    name = type(made).__name__
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    return f"{article} {name}"


def _task(config: RunConfig, made: Mapping[str, Any], divide: Divide) -> Task:
    """A task from the model and the data; without clients, [data] says how the samples are divided."""
    given = dict(made)
    model, dataset, clients = given.pop("model"), given.pop("dataset"), given.pop("clients", None)
    if clients is None:
        dataset = held_out(dataset, config.data.validation) if config.data.validation else dataset
        data = replace(config.data, clients=config.data.clients or Data.clients)
        if dataset.keys is not None:
            data = replace(config.data, partition="natural", minimum=1)
        elif dataset.labels_of_train is None and data.partition == Data.partition:
            data = replace(data, partition="iid")  # without classes there is nothing to skew
        clients = divide(replace(config, data=data), dataset)
    elif not isinstance(clients, Population):
        clients = Population.from_lists(clients)
    return Task(model, dataset, clients, augment=config.data.augmentation(), **given)


def _own(config: RunConfig, task: Task) -> tuple[str, ...]:
    """Which parameters never leave a client: as [model] says, or the task itself."""
    asked, stated = config.model.own, tuple(task.own)
    if asked and stated and asked != stated:
        raise UserError(
            f"model.own = {list(asked)} contradicts {config.task.function}() in "
            f"{config.task.file}, whose task has own = {list(stated)}; leave one of them out."
        )
    return asked or stated


def _check_unused(config: RunConfig, function: Function, made: Task | Mapping[str, Any]) -> None:
    """Refuse settings of [data] that would have no effect, such as those that deal samples which
    have their clients.
    """
    if isinstance(made, Task):
        unused, what = SETTINGS, "a Task with its clients"
    elif made.get("clients") is not None:
        unused, what = (
            (*PREPARING, *DEALING, "clients", "validation", "partition_seed"),
            "data with its clients",
        )
    elif made["dataset"].keys is not None:
        unused, what = (*PREPARING, *DEALING), "data with its clients"
    else:
        unused, what = PREPARING, "data of its own"
    parameters = inspect.signature(function).parameters
    for key in unused:
        value = getattr(config.data, key)
        natural = (key, value) == ("partition", "natural") and not isinstance(made, Task)
        if value != getattr(Data(clients=0), key) and key not in parameters and not natural:
            raise UserError(
                f"data.{key} = {value!r} has no effect: {config.task.function}() in {config.task.file} returns {what}; "
                f"give it an argument {key!r}, or leave the key out."
            )
