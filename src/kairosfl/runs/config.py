"""The configuration of one run: TOML whose keys all have defaults, and whose mistakes are named."""

from __future__ import annotations

import dataclasses
import datetime
import inspect
import json
import re
import tomllib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from kairosfl import names
from kairosfl.core.recipe import Recipe
from kairosfl.errors import UserError, nearest, shown
from kairosfl.runs import trackers
from kairosfl.runs.keys import updated

if TYPE_CHECKING:
    from kairosfl.core.rule import Algorithm
    from kairosfl.tasks.crops import Crops

# Mistakes that can be seen without importing torch, which takes seconds, are named before it is
# imported.


@dataclass(frozen=True, kw_only=True)
class Data:
    """[data]: the data set and its clients; options of the loader are further keys."""

    name: str = "digits"
    clients: int = 40  # 0 with the natural partition: all of them
    partition: str = "dirichlet"
    alpha: float = 0.3
    minimum: int = 2
    shards: int = 2
    labels_per_client: int = 2
    class_counts: tuple[tuple[int, ...], ...] = ()
    balance: bool = False
    nearest: bool = False
    normalise: bool = True  # images by their channels' mean and deviation; else 0 to 1
    # standard deviation of the noise on the last client's features, falling to 0 for the first
    noise: float = 0.0
    augment: bool = False
    crops: float = 1.0  # with augment: the share of images that are cropped
    padding: str = "black"  # with augment: what surrounds an image, "black", "mean" or "reflect"
    # fraction of the training samples held out for evaluation instead of the test set
    validation: float = 0.0
    partition_seed: int = -1  # -1: the seed of the run
    options: Mapping[str, Any] = field(default_factory=dict)

    def augmentation(self) -> bool | Crops:
        """How images are augmented, or False."""
        from kairosfl.tasks.crops import Crops

        if not self.augment:
            return False
        return Crops(self.crops, self.padding)


@dataclass(frozen=True, kw_only=True)
class Model:
    """[model]: the model; its options are further keys."""

    name: str = "mlp"
    start: str = ""  # a run folder whose model is the starting point; empty: a new model
    own: tuple[str, ...] = ()  # patterns of the parameters that never leave a client
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TaskFile:
    """[task]: a Python function that makes the task, in place of `data.name` and [model]."""

    file: str = ""  # a Python file, or the name of a module
    function: str = "task"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Devices:
    """[fleet]: the devices on which clients are simulated; without `devices` there is no clock."""

    devices: str = ""  # how much they differ, such as "lognormal(sigma=1.0)", or a CSV or JSON file
    seconds: float = 0.01  # of training on one sample, on an average device
    down: float = 0.0  # Mbit/s that a device receives; 0: receiving takes no time
    up: float = 0.0  # Mbit/s that it sends; 0: sending takes no time
    latency: float = 0.0  # seconds that every order takes in addition
    availability: str = "always"  # or such as "bernoulli(p=0.3)" or "diurnal(hours=8.0)"
    dropout: float = 0.0  # chance that a device drops out in the middle of an order
    redraw: bool = False  # whether a device's speed is drawn anew for every order


@dataclass(frozen=True, kw_only=True)
class Execution:
    """[run]: how the run is executed and what is recorded."""

    engine: str = "auto"
    device: str = "auto"
    precision: str = "auto"
    threads: int = 0  # torch threads on the CPU; 0: one for small models, else one per core
    slots: int = 0  # batched: clients trained at the same time; 0: as many as memory allows
    # batched: fixed slots, so that results do not depend on which clients train together
    deterministic: bool = False
    actors: int = 2  # of the ray engine
    ray_address: str = ""  # of a Ray cluster; empty: start one on this machine
    detector: str = "fgn"
    eval_every: int = 1
    checkpoint_every: int = 0  # 0: 10, or more where writing one takes long
    client_accuracy: bool | Literal["auto"] = "auto"  # after the last round, where it is cheap
    # rounds for which the cosines between the clients' updates are recorded
    cosines: tuple[int, ...] = ()
    track: tuple[str, ...] = ()  # further destinations for the metrics: "tensorboard", "mlflow"
    # modules that `algorithm` and `detector` may import by dotted names
    allow: tuple[str, ...] = ()


# begins the name of data, clients and a model that were passed to `kairosfl.simulate`
GIVEN = "python:"
ENGINES = ("auto", "loop", "batched", "ray", "debug")
THREADS = 1024
DEEP = 16  # tables and lists inside each other
PRECISIONS = ("auto", "float32", "tf32", "bfloat16")


def _fedavg() -> Algorithm:
    from kairosfl.core.rule import Algorithm

    return Algorithm()


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """The whole configuration, resolved."""

    algorithm: Algorithm = field(default_factory=_fedavg)
    seed: int = 0
    data: Data = field(default_factory=Data)
    model: Model = field(default_factory=Model)
    task: TaskFile = field(default_factory=TaskFile)
    train: Recipe = field(default_factory=Recipe)
    fleet: Devices = field(default_factory=Devices)
    run: Execution = field(default_factory=Execution)

    @property
    def follows_detector(self) -> bool:
        """Whether a rule acts on the detector's answers, or the detector is not the default."""
        named = self.run.detector != Execution.detector
        return named or self.algorithm.any("periods")

    def __post_init__(self) -> None:
        _check(self.seed, self.data, self.model, self.train, self.run)
        from kairosfl.detectors import parse_detectors
        from kairosfl.tasks.crops import Crops

        Crops(self.data.crops, self.data.padding)  # refuses what they cannot be
        _check_fleet(self.fleet, self.algorithm)
        self.algorithm.check_whole()
        self.algorithm.check_mass(self.train.optimizer)
        self.algorithm.check_detectors(parse_detectors(self.run.detector, self.run.allow))


def _check(seed: int, data: Data, model: Model, train: Recipe, run: Execution) -> None:
    """Refuse names that do not exist and numbers that cannot be."""
    _one_of("data.name", data.name, names.known("data"))
    _one_of("data.partition", data.partition, names.known("partition"))
    _one_of("model.name", model.name, names.known("model"))
    _one_of("run.engine", run.engine, ENGINES)
    _one_of("run.precision", run.precision, PRECISIONS)
    names.check_detectors(run.detector)
    trackers.check(run.track)
    if run.eval_every < 1:
        raise UserError(f"run.eval_every = {run.eval_every} must be 1 or more.")
    if run.checkpoint_every < 0:
        every = run.checkpoint_every
        raise UserError(
            f"run.checkpoint_every = {every} must be 1 or more, or 0 for an automatic choice."
        )
    for round in run.cosines:
        if round < 1:
            raise UserError(f"run.cosines names round {round}; rounds count from 1.")
    if not 0 <= run.threads <= THREADS:
        raise UserError(
            f"run.threads = {run.threads} must be 1 to {THREADS}, or 0 for an automatic choice."
        )
    if seed < 0:
        raise UserError(f"seed = {seed} must be 0 or more.")
    if not 0 <= data.validation < 1:
        raise UserError(f"data.validation = {data.validation} must be at least 0 and below 1.")
    if not 0 <= data.noise < float("inf"):
        raise UserError(f"data.noise = {data.noise} must be 0 or more, and finite.")
    if data.clients < 0:
        raise UserError(
            f"data.clients = {data.clients} must be 1 or more, or 0 if the data set has its own "
            "clients."
        )
    if data.clients:
        train.check_cohort(data.clients)


def _check_fleet(fleet: Devices, algorithm: Algorithm) -> None:
    """Refuse devices that cannot be, and rules that need a clock where there is none."""
    from kairosfl import fleets

    if fleet.devices:
        fleets.check(fleet.devices, fleet.availability)
    elif fleet != Devices():
        raise UserError(
            'fleet.devices is missing; give how much devices differ, such as "equal()" or '
            '"lognormal(sigma=1.0)", or a file.'
        )
    elif clocked := algorithm.names("clock"):
        raise UserError(
            f'{clocked[0]} needs a clock: set fleet.devices, such as "lognormal(sigma=1.0)"; '
            "without one, leave it out."
        )


SECTIONS = {
    "data": Data,
    "model": Model,
    "task": TaskFile,
    "train": Recipe,
    "fleet": Devices,
    "run": Execution,
}
# Sections that other commands read, and what to do with them.
ELSEWHERE = {
    "sweep": "lists values for many runs: use `kairosfl sweep`, or remove the section.",
    "tune": "has ranges for a search: use `kairosfl tune`, or remove the section.",
    "deploy": "is for real devices: use `kairosfl deploy rehearse`, or remove the section.",
}
_hints = cache(get_type_hints)


def load(path: Path, changes: Sequence[str] = ()) -> RunConfig:
    """The configuration in a TOML file, with `section.key=value` changes on top."""
    return resolve(read(path), changes)


def read(path: Path) -> dict[str, Any]:
    """The tables of a TOML file, or those that name a task: `task.py`, or `task.py:function`."""
    if re.search(r"\.py(:\w+)?$", str(path)):
        return {"task": task_table(str(path))}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; give the path of a TOML configuration.") from None
    except IsADirectoryError:
        raise UserError(
            f"{path} is a folder; give a TOML file, such as {path}/config.toml."
        ) from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if isinstance(error, UnicodeDecodeError) and b"\0" in error.object:
            raise UserError(
                f"{path} is not a text file; give the path of a TOML configuration."
            ) from None
        raise UserError(f"{path} is not valid TOML: {error}.") from None
    except ValueError:  # Python's limit of 4,300 digits
        raise UserError(
            f"{path} contains a number that is too large; whole numbers go up to 2^63 - 1."
        ) from None
    except RecursionError:
        raise UserError(
            f"{path} nests tables or lists too deep; {DEEP} levels are allowed."
        ) from None


def task_table(text: str) -> dict[str, str]:
    """The keys of [task] from `file.py`, `file.py:function` or `package.module:function`."""
    file, colon, function = text.rpartition(":")
    if colon and function.isidentifier():
        return {"file": file, "function": function}
    return {"file": text}


def resolve(tables: Mapping[str, Any], changes: Sequence[str] = ()) -> RunConfig:
    """A configuration from nested tables."""
    algorithm, parts = checked(tables, changes)
    from kairosfl.rules import parse

    return RunConfig(algorithm=parse(algorithm, allow=parts["run"].allow), **parts)


def checked(
    tables: Mapping[str, Any], changes: Sequence[str] = ()
) -> tuple[str | list[Any], dict[str, Any]]:
    """The algorithm and the other fields of a configuration, checked without torch."""
    tables = change(tables, changes)
    for key in tables:
        _check_top(key)
    if "task" in tables:
        tables = _with_task(tables)
    parts: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        parts[name] = _section(name, cls, tables.get(name, {}))
    algorithm = tables.get("algorithm", "fedavg")
    if not isinstance(algorithm, str | list):
        raise UserError(
            f"algorithm = {algorithm!r} must be text like 'fedprox(mu=0.01)', or a list of tables."
        )
    names.check_rules(algorithm)
    parts["seed"] = _typed("seed", tables.get("seed", 0), int)
    _check(parts["seed"], parts["data"], parts["model"], parts["train"], parts["run"])
    return algorithm, parts


def _check_top(key: str) -> None:
    """Refuse a key outside the sections, or a section, that a configuration does not have."""
    if key in ELSEWHERE:
        raise UserError(f"[{key}] {ELSEWHERE[key]}")
    fields = [field.name for field in dataclasses.fields(RunConfig)]
    if key in fields:
        return
    homes = [f"{name}.{key}" for name, cls in SECTIONS.items() if key in _hints(cls)]
    if homes:
        raise UserError(f"Unknown key {key!r}; did you mean {' or '.join(homes)}?")
    raise UserError(f"Unknown key {key!r}; {nearest(key, fields)}")


def _with_task(tables: dict[str, Any]) -> dict[str, Any]:
    """The tables of a run whose task a function makes, which data and model are named after."""
    task = _section("task", TaskFile, tables["task"])
    if not task.file:
        if task.options or task.function != TaskFile.function:
            raise UserError(
                "task.file is missing; give the path of a Python file, or the name of a module."
            )
        return tables
    named = {
        "data": {"clients": 0, "name": f"{GIVEN}{Path(task.file).name}"},
        "model": {"name": GIVEN + task.function},
    }
    for name, own in named.items():
        table = tables.get(name, {})
        if not isinstance(table, Mapping):  # refused when the sections are read
            continue
        chosen = table.get("name", GIVEN)
        if not str(chosen).startswith(GIVEN):
            raise UserError(
                f"{name}.name = {chosen!r} cannot be combined with task.file = {task.file!r}, "
                "which makes data and model; leave one out."
            )
        tables = updated(tables, {name: {**own, **table, "name": own["name"]}})
    file = task.file
    if file.endswith(".py"):
        file = str(Path(file).expanduser().absolute())
    return updated(tables, {"task.file": file})


def change(tables: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """The tables with `section.key=value` changes; a value that is not TOML is taken as text."""
    _check_values(tables)  # first: copying tables inside each other takes as many calls
    changed = updated(tables, {})
    for text in changes:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not name:
            raise UserError(f"--set {text!r} is not of the form section.key=value.")
        changed = updated(changed, {name: _value(name, value)})
    _check_values(changed)
    return changed


def _value(name: str, text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, RecursionError):
        return text
    except ValueError:  # Python's limit of 4,300 digits
        raise UserError(f"{name} = {text} is too large; whole numbers go up to 2^63 - 1.") from None


def _check_values(tables: Mapping[str, Any]) -> None:
    """Refuse what no key can hold, at any level."""
    waiting: list[tuple[str, Any, int]] = [(key, value, 1) for key, value in tables.items()]
    while waiting:
        name, value, depth = waiting.pop()
        if depth > DEEP:
            key = name.partition(".")[0]
            raise UserError(f"{key} nests tables or lists too deep; {DEEP} levels are allowed.")
        _check_value(name, value)
        if isinstance(value, Mapping):
            waiting += [(f"{name}.{key}", entry, depth + 1) for key, entry in value.items()]
        elif isinstance(value, list):
            waiting += [(name, entry, depth + 1) for entry in value]


def _check_value(name: str, value: Any) -> None:
    """Refuse one value that no key can hold."""
    if isinstance(value, str) and "\0" in value:
        raise UserError(f"{name} = {value!r} contains a NUL character; remove it.")
    if isinstance(value, str) and not _is_utf8(f"{name}{value}"):
        raise UserError(
            f"{name} = {value!r} is not valid UTF-8, in which config.toml is written; rename it."
        )
    if isinstance(value, datetime.date | datetime.time):
        raise UserError(f'{name} = {value} is a date or time; write it as text, "{value}".')
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise UserError(f"{name} = {shown(value)} is too large; whole numbers go up to 2^63 - 1.")


def _is_utf8(text: str) -> bool:
    """Whether text can be written; of other bytes in an argument, Python makes surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _section(name: str, cls: type, table: Any) -> Any:
    if not isinstance(table, Mapping):
        raise UserError(f"{name} = {table!r} must be a section: write [{name}] and its keys below.")
    hints = _hints(cls)
    fields = dict(hints)
    if name != "task":  # whose options are a table of their own
        fields.pop("options", None)
    chosen: dict[str, Any] = {}
    extra: dict[str, Any] = {}
    more = _options(name, table)
    for key, value in table.items():
        if key in fields:
            chosen[key] = _typed(f"{name}.{key}", value, fields[key])
        elif key in more:
            extra[key] = value
        else:
            raise UserError(f"Unknown key {name}.{key}; {nearest(key, [*fields, *more])}")
    if "options" in hints and name != "task":
        chosen["options"] = extra
    return cls(**chosen)


def _options(section: str, table: Mapping[str, Any]) -> Collection[str]:
    """Further keys that the chosen data set or model accepts."""
    defaults = {"data": Data.name, "model": Model.name}
    if section not in defaults:
        return ()
    name = table.get("name", defaults[section])
    if not isinstance(name, str):  # its keys would be reported as unknown too
        return ()
    _one_of(f"{section}.name", name, names.known(section))
    if name not in names.known(section):
        return ()
    written = names.options(section, name)
    if written is None:
        return _imported_options(section, name)
    return written


def _imported_options(section: str, name: str) -> Collection[str]:
    if section == "model":
        from kairosfl.models import options

        return options(name)
    from kairosfl.data import DATASETS

    return inspect.signature(DATASETS[name]).parameters


def _typed(name: str, value: Any, hint: Any) -> Any:
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise UserError(f"{name} = {value!r} must be a list.")
        return tuple(_typed(name, entry, get_args(hint)[0]) for entry in value)
    if get_origin(hint) in (Union, UnionType):  # the only kind there is
        if isinstance(value, bool) or value == "auto":
            return value
        raise UserError(f"{name} = {value!r} must be true, false or 'auto'.")
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise UserError(
                f"{name} = {value!r} must be a section: write [{name}] and its keys below."
            )
        return dict(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        words = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
        raise UserError(f"{name} = {value!r} must be {words.get(hint, hint.__name__)}.")
    return value


def _one_of(name: str, value: str, choices: Collection[str]) -> None:
    if value in choices:
        return
    may_be_passed = name in ("data.name", "data.partition", "model.name")
    if not (may_be_passed and value.startswith(GIVEN)):
        raise UserError(f"{name} = {value!r} does not exist; {nearest(value, choices)}")


def tables(config: RunConfig) -> dict[str, Any]:
    """The configuration as nested tables, every key written out."""
    out: dict[str, Any] = {"algorithm": str(config.algorithm), "seed": config.seed}
    for name in SECTIONS:
        section = dataclasses.asdict(getattr(config, name))
        if name == "task":
            if config.task.file:
                out[name] = section
            continue
        if name == "fleet" and not config.fleet.devices:
            continue
        extra = section.pop("options", {})
        out[name] = section | dict(extra)
    return out


def text_of(nested: Mapping[str, Any]) -> str:
    """The tables as TOML that reads back as it is, without which no run could be resumed."""
    text = dump(nested)
    for key, value in nested.items():
        try:
            same = _plain(tomllib.loads(text)[key]) == _plain(value)
        except (ValueError, KeyError):
            same = False
        if not same:
            raise UserError(
                f"{key} = {shown(value)} cannot be written to config.toml, so the run could not be "
                "resumed; use numbers, text, true or false, and lists and tables of these."
            )
    return text


def _plain(value: Any) -> bytes:
    """A value for a comparison: tuples are lists, NaN is NaN, and the order of keys is nothing."""
    return json.dumps(value, sort_keys=True, default=repr, ensure_ascii=False).encode()


def dump(nested: Mapping[str, Any], prefix: str = "") -> str:
    """Tables as TOML: plain values first, then the sections."""
    lines = []
    for key, value in nested.items():
        if not isinstance(value, Mapping):
            lines.append(f"{_key(key)} = {_toml(value)}")
    for name, section in nested.items():
        if isinstance(section, Mapping):
            home = f"{prefix}{_key(name)}"
            lines += ["", f"[{home}]", dump(section, f"{home}.").rstrip("\n")]
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", name):
        return name
    return _quoted(name)


def _quoted(text: str) -> str:
    """Text as TOML: as in JSON, but for DEL, which TOML wants escaped too."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, Mapping):  # in a list; others are sections
        pairs = [f"{_key(key)} = {_toml(entry)}" for key, entry in value.items()]
        return "{" + ", ".join(pairs) + "}"
    return str(value)
