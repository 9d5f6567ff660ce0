"""Task files: a Python function that makes the task of a run, named by `[task]`."""

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
OF_DATA = {*inspect.signature(from_any).parameters, *(field.name for field in fields(DataSet))}
KEYS = sorted({*OF_TASK, *OF_DATA} - {"fields"})  # of a dict that a function returns
SETTINGS = tuple(field.name for field in fields(Data) if field.name not in ("name", "options"))
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
            f"task.file = {str(path)!r} does not exist; give the path of a Python file, or a "
            "module's name."
        )
    key = ""
    if path is not None:
        key = hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()
    function = _function(config.task.file, config.task.function, key)
    arguments = json.dumps(_arguments(config, function, client), sort_keys=True, default=str)
    returned = _make(config.task.file, config.task.function, key, arguments, config.seed)
    _check_unused(config, function, returned)
    task = returned if isinstance(returned, Task) else _task(config, returned, divide)
    dataset = once(hashed(task.dataset))
    if path is not None:
        dataset = replace(dataset, hashes={**dataset.hashes, path.name: key})
    own = _own(config, task)
    task = replace(task, dataset=dataset, model=copy.deepcopy(task.model), own=own)
    task.check()
    return task


def source(file: str) -> Path | None:
    """The file of `task.file`; None for a module that is imported by name."""
    if file.endswith(".py"):
        return Path(file)
    return None


@lru_cache(maxsize=8)
def _function(file: str, name: str, key: str) -> Function:
    """The function, of a file imported anew whenever it has changed."""
    with explained(file, "importing it"):
        module = _imported(file, key)
    function = getattr(module, name, None)
    if function is None or not callable(function):
        own = []
        for member, entry in vars(module).items():
            if inspect.isfunction(entry) and entry.__module__ == module.__name__:
                own.append(member)
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
                f"task.file = {file!r} cannot be imported; give a module's name or the path of a "
                "file."
            ) from error
        raise UserError(
            f"{_where(error, file)}: {error}, while {doing}; install it, or correct the name."
        ) from error
    except BaseException as error:  # also SystemExit, and what is the user's own
        text = type(error).__name__
        lines = str(error).strip().splitlines()
        if lines and lines[0]:
            text += f": {lines[0]}"
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
    module = file.rpartition(".")[2]
    last = frames[-1]
    for frame in frames:
        if frame.filename == file or Path(frame.filename).stem == module:
            last = frame
    return f"{last.filename}, line {last.lineno}"


def _arguments(config: RunConfig, function: Function, client: int | None) -> dict[str, Any]:
    """Options, and those settings of the run that the function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    name = f"{config.task.function}() in {config.task.file}"
    for option in config.task.options:
        if option not in parameters and not takes_any:
            hint = nearest(option, parameters) if parameters else "it takes none"
            raise UserError(f"task.options.{option} is not an argument of {name}; {hint}")

    # --- settings of the run ---
    settings: dict[str, Any] = {"seed": config.seed, "client": client}
    for key in SETTINGS:
        settings[key] = getattr(config.data, key)
    if not config.data.clients:
        del settings["clients"]  # not set
    if client is None and "client" in parameters and _is_optional(parameters["client"]):
        del settings["client"]

    arguments = {key: setting for key, setting in settings.items() if key in parameters}
    arguments |= config.task.options
    for key, parameter in parameters.items():
        by_name = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if by_name and not _is_optional(parameter) and key not in arguments:
            raise UserError(f"task.options.{key} is missing; {name} needs it.")
    return arguments


def _is_optional(parameter: inspect.Parameter) -> bool:
    """Whether an argument has a default."""
    return parameter.default is not parameter.empty


@lru_cache(maxsize=16)
def _make(file: str, name: str, key: str, arguments: str, seed: int) -> Task | dict[str, Any]:
    """What the function returns; torch draws by the seed of the run, and by nothing before it."""
    path = source(file)
    place = Path.cwd() if path is None else path.parent
    with (
        torch.random.fork_rng(devices=[]),
        explained(file, f"calling {name}()"),
        _importable(place),
    ):
        torch.default_generator.manual_seed(seed)
        returned = _function(file, name, key)(**json.loads(arguments))
    if isinstance(returned, Task):
        return returned
    entries = _entries(returned)
    if entries is None:
        raise UserError(f"{name}() in {file} returned {_returned(returned)}; return {FORMS}.")
    for key in entries:
        if key not in KEYS:
            raise UserError(
                f"{name}() in {file} returned a dict with the key {key!r}; "
                f"{nearest(str(key), KEYS)}"
            )
    others = {key: entries.pop(key) for key in OF_TASK if key in entries}
    try:
        dataset = from_any(entries.pop("train"), entries.pop("test", None), **entries)
    except TypeError as error:
        raise UserError(
            f"{name}() in {file} returned a dict that makes no task: {error}."
        ) from error
    return {**others, "dataset": dataset}


def _entries(returned: Any) -> dict[str, Any] | None:
    """A tuple or dict that a function returned, as a dict; None if it makes no task."""
    if isinstance(returned, tuple) and len(returned) > 3:
        return None
    if isinstance(returned, tuple):
        returned = dict(zip(("model", "train", "test"), returned, strict=False))
    if not isinstance(returned, Mapping):
        return None
    if not isinstance(returned.get("model"), nn.Module) or "train" not in returned:
        return None
    return dict(returned)


def _returned(returned: Any) -> str:
    """What a function returned that is of no use."""
    if isinstance(returned, tuple) and len(returned) in (2, 3):
        return f"a tuple whose first item is {_kind(returned[0])}, not a torch.nn.Module"
    if isinstance(returned, tuple):
        return f"a tuple of {len(returned)}"
    if isinstance(returned, Mapping) and "model" not in returned:
        return "a dict without 'model'"
    if isinstance(returned, Mapping) and not isinstance(returned["model"], nn.Module):
        return f"a dict whose 'model' is {_kind(returned['model'])}, not a torch.nn.Module"
    if isinstance(returned, Mapping):
        return "a dict without 'train'"
    return _kind(returned)


def _kind(returned: Any) -> str:
    """What kind of thing a value is."""
    if returned is None:
        return "None"
    name = type(returned).__name__
    article = "an" if name[0] in "AEIOUaeiou" else "a"
    return f"{article} {name}"


def _task(config: RunConfig, returned: Mapping[str, Any], divide: Divide) -> Task:
    """A task from the model and the data; without clients, [data] says how to divide samples."""
    others = dict(returned)
    model = others.pop("model")
    dataset = others.pop("dataset")
    clients = others.pop("clients", None)
    if clients is None:
        if config.data.validation:
            dataset = held_out(dataset, config.data.validation)
        data = config.data
        if not data.clients:
            data = replace(data, clients=Data.clients)
        if dataset.keys is not None:
            data = replace(config.data, partition="natural", minimum=1)
        elif dataset.labels_of_train is None and data.partition == Data.partition:
            data = replace(data, partition="iid")  # without classes there is nothing to skew
        clients = divide(replace(config, data=data), dataset)
    elif not isinstance(clients, Population):
        clients = Population.from_lists(clients)
    return Task(model, dataset, clients, augment=config.data.augmentation(), **others)


def _own(config: RunConfig, task: Task) -> tuple[str, ...]:
    """Which parameters never leave a client: as [model] says, or the task itself."""
    configured = config.model.own
    stated = tuple(task.own)
    if configured and stated and configured != stated:
        raise UserError(
            f"model.own = {list(configured)} contradicts {config.task.function}() in "
            f"{config.task.file}, whose task has own = {list(stated)}; leave one of them out."
        )
    return configured if configured else stated


def _check_unused(
    config: RunConfig, function: Function, returned: Task | Mapping[str, Any]
) -> None:
    """Refuse settings of [data] without effect, as those that deal samples which have clients."""
    what = "data with its clients"
    unused: tuple[str, ...] = (*PREPARING, *DEALING)
    if isinstance(returned, Task):
        what = "a Task with its clients"
        unused = SETTINGS
    elif returned.get("clients") is not None:
        unused += ("clients", "validation", "partition_seed")
    elif returned["dataset"].keys is None:
        what = "data of its own"
        unused = PREPARING

    parameters = inspect.signature(function).parameters
    defaults = Data(clients=0)
    for key in unused:
        setting = getattr(config.data, key)
        if setting == getattr(defaults, key) or key in parameters:
            continue
        if key == "partition" and setting == "natural" and not isinstance(returned, Task):
            continue
        raise UserError(
            f"data.{key} = {setting!r} has no effect: {config.task.function}() in "
            f"{config.task.file} returns {what}; give it an argument {key!r}, or leave the key out."
        )
