"""Random tables, mostly wrong, from a `random.Random`: the same on every machine, whatever was
imported before.

Hypothesis, even with `derandomize`, also draws from the constants of imported modules.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import fields
from datetime import date
from pathlib import Path
from random import Random
from typing import Any, get_args, get_origin, get_type_hints

from kairosfl.data import DATASETS
from kairosfl.errors import UserError
from kairosfl.models import MODELS
from kairosfl.rules import RULES
from kairosfl.runs.config import SECTIONS, RunConfig, dump, resolve, tables
from kairosfl.runs.keys import updated
from kairosfl.runs.periods import members
from kairosfl.runs.sweep import LONGEST, expand
from kairosfl.tasks.partitions import PARTITIONS

Tables = dict[str, Any]
GOOD: Tables = {
    "data": {"clients": 6},
    "model": {"hidden": [4]},
    "train": {"rounds": 4, "cohort": 2},
    "run": {"engine": "loop", "device": "cpu"},
}
WHOLE = [0, 1, 2, 3, 10, -1, 10**6, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**70, -(2**63), 10**400]
REAL = [
    0.0,
    -0.0,
    0.1,
    0.5,
    1.0,
    1.5,
    -1.0,
    1e-320,
    1e-9,
    1e300,
    -1e300,
    math.nan,
    math.inf,
    -math.inf,
]
WORDS = [
    "",
    " ",
    "\n",
    "a\0b",
    "x" * 300,
    "../..",
    "python:x",
    "-1",
    "é",
    "'",
    '"',
    "\\",
    "#",
    "{}",
    ".",
    "/dev/null",
]
WORDS += [
    "auto",
    "cpu",
    "meta",
    "cuda:99",
    "none",
    "true",
    "1",
    "loop",
    "mlp",
    "fgn",
    "rule",
    "low",
    "high",
    "log",
]
ODD = [
    "((((",
    "(" * 300,
    "-" * 400 + "1",
    "fedprox +",
    "os.system",
    "fedprox(mu=1e999)",
    "fedprox(**{})",
    "x[0]",
]
ODD += [
    "fedprox()()",
    "lambda: 0",
    "fedprox(mu=1)*2",
    "kairosfl.errors.UserError",
    "+".join(["fedprox"] * 500),
]
CHOICES = {
    "data.name": sorted(DATASETS),
    "model.name": sorted(MODELS),
    "data.partition": sorted(PARTITIONS),
    "run.engine": ["auto", "loop", "batched", "ray"],
    "run.detector": ["fgn", "fgn.paired()", "fgn(threshold=nan)", "fgn + fgn", ""],
    "train.optimizer": ["sgd", "adamw"],
    "train.schedule": ["constant", "cosine", "exponential", "step"],
    "task.file": ["x.py", "os", "a/b.py", ".py"],
}
HINTS = {
    f"{name}.{key}": hint
    for name, cls in SECTIONS.items()
    for key, hint in get_type_hints(cls).items()
}


def value(draw: Random, depth: int = 0) -> Any:
    """Anything that TOML can hold, and numbers that it cannot."""
    kind = draw.random()
    if depth > 3 or kind < 0.75:
        plain = draw.choice([*WHOLE, *REAL, True, False, date(2020, 1, 1)])
        return draw.choice(
            [plain, draw.choice(WORDS), draw.randint(-5, 100), draw.uniform(-2.0, 3.0)]
        )
    if kind < 0.88:
        return [value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
    return {draw.choice(WORDS): value(draw, depth + 1) for _ in range(draw.randint(0, 3))}


def likely(draw: Random, key: str) -> Any:
    """A value of the type that a key has, or one of its choices."""
    hint = HINTS.get(key)
    of = get_args(hint)[0] if get_origin(hint) is tuple else hint
    each = {
        int: WHOLE[:9],
        float: [*REAL, 1, 2**62],
        bool: [True, False],
        str: CHOICES.get(key, WORDS),
    }.get(of)
    if each is None or draw.random() < 0.2:
        return value(draw)
    return (
        [draw.choice(each) for _ in range(draw.randint(0, 3))]
        if of is not hint
        else draw.choice(each)
    )


def rule(draw: Random) -> tuple[str, Tables]:
    """The name of a rule and some of its options."""
    name = draw.choice(sorted(RULES))
    known = [field.name for field in fields(RULES[name])] or ["x"]
    options = [draw.choice(known) for _ in range(draw.choice([0, 1, 1, 2]))]
    return name, {option: draw.choice([0, 1, 0.5, True, -1, value(draw)]) for option in options}


def algorithm(draw: Random) -> Any:
    """Text, or a list of tables and texts."""
    made = [rule(draw) for _ in range(draw.choice([1, 1, 2, 3]))]
    texts = [
        f"{name}({', '.join(f'{key}={each!r}' for key, each in options.items())})"
        for name, options in made
    ]
    listed = [draw.choice([{"rule": name, **options}, value(draw)]) for name, options in made]
    return draw.choice(
        [" + ".join(texts), " + ".join(texts), listed, draw.choice(ODD), value(draw)]
    )


def configuration(draw: Random, changes: int, strange: float = 0.5) -> Tables:
    """A good configuration with some changes, and with this probability another algorithm."""
    made: Tables = updated(GOOD, {})
    if draw.random() < strange:
        made["algorithm"] = algorithm(draw)
    for _ in range(changes):
        key = draw.choice(sorted(HINTS))
        section, _, name = key.partition(".")
        if draw.random() < 0.1:
            made[draw.choice([section, "seed", "sweep", "tune", "deploy", "zz"])] = value(draw)
        elif isinstance(made.setdefault(section, {}), dict):
            made[section][name] = likely(draw, key)
    return made


def check(config: RunConfig) -> None:
    """What is read is written in a way that is read as the same."""
    again = resolve(tomllib.loads(dump(tables(config))))
    assert again == config or "nan" in dump(tables(config))  # nan is not equal to itself


def resolved(draw: Random, _: Path) -> None:
    check(resolve(configuration(draw, draw.choice([1, 1, 2, 3]))))


def swept(draw: Random, _: Path) -> None:
    lists: Tables = {"seed": [0, 1]} if draw.random() < 0.5 else {}
    for _ in range(draw.choice([0, 1, 1, 2])):
        key = draw.choice([*sorted(HINTS), "algorithm", "seed"])
        values = [
            algorithm(draw) if key == "algorithm" else likely(draw, key)
            for _ in range(draw.randint(1, 3))
        ]
        lists[key] = values if draw.random() < 0.9 else value(draw)
    for member in expand(
        {**configuration(draw, 0, 0.1), "sweep": lists if draw.random() < 0.9 else value(draw)}
    ):
        check(member.config)
        assert len(member.name) <= LONGEST + 10
        assert not {"/", "\0"} & set(member.name)


def tuned(draw: Random, _: Path) -> None:
    from kairosfl.tune.space import defaults, overridden

    searched = [
        "algorithm",
        "add",
        "fedavgm.beta",
        "fedprox.mu",
        "fedcl.x",
        "train.lr",
        "train.epochs",
    ]
    table: Any = {}
    for _ in range(draw.choice([1, 2])):
        key = draw.choice(draw.choice([sorted(HINTS), searched]))
        wild = [draw.choice([*WHOLE, *REAL, "x"]) for _ in range(2)]
        low, high = draw.choice([[0.1, 0.5], [1, 3], wild, wild])
        span = {"low": low, "high": high, "log": draw.choice([True, False, 1])}
        listed = [
            algorithm(draw) if key in ("algorithm", "add") else likely(draw, key) for _ in range(2)
        ]
        table[key] = draw.choice([span, listed, value(draw)])
    config = resolve(GOOD)
    overridden(
        defaults(config, (1, 8, 8)), table if draw.random() < 0.9 else value(draw), config
    ).describe()


def studied(draw: Random, _: Path) -> None:
    members(
        configuration(draw, draw.choice([0, 0, 0, 1]), 0.2),
        number=draw.choice([2, 2, 3, 3, 4, 0, -1, 2**70]),
        deficits=[draw.choice(["cohort", "clients", "cohort", "epochs", "x"])],
        amount=draw.choice([0.2, 0.5, 0.3, 0.7, 0.9, 0, math.nan, math.inf]),
        seeds=draw.choice([1, 1, 2, 2, 0]),
        detectors=[draw.choice(["fgn", "fgn", "fgn.paired()", "fgn + fgn", "x", "\0"])],
    )


def deployed(draw: Random, folder: Path) -> None:
    from kairosfl.deploy import Deploy, load

    keys = [*(field.name for field in fields(Deploy)), "zz"]
    section = {
        draw.choice(keys): draw.choice([value(draw), [1, 2], 3, 0.5, "float16"]) for _ in range(2)
    }
    made = configuration(draw, draw.choice([0, 0, 1])) | {
        "deploy": section if draw.random() < 0.9 else value(draw)
    }
    try:
        tomllib.loads(text := dump(made))
    except (ValueError, AttributeError):  # not every value can be written
        return
    (folder / "run.toml").write_text(text, encoding="utf-8")
    load(folder / "run.toml")[1].settings()


SURFACES: dict[str, Callable[[Random, Path], None]] = {
    "run": resolved,
    "sweep": swept,
    "tune": tuned,
    "periods": studied,
    "deploy": deployed,
}


def outcome(surface: str, seed: int, folder: Path) -> str:
    """Whether a random input was read or refused; anything but a UserError is raised."""
    try:
        SURFACES[surface](Random(f"{surface} {seed}"), folder)
    except UserError:
        return "refused"
    return "read"
