"""Completion by tab: presets, keys and their values.

What can be completed is written down here once more, because importing it would take seconds and
load torch; a test compares it with the truth.
"""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from kairosfl import names

KEYS = {
    "data": "name clients partition alpha minimum shards labels_per_client class_counts balance nearest normalise "
    "noise augment crops padding validation partition_seed",
    "model": "name start own",
    "task": "file function",
    "train": "rounds cohort epochs batch_size drop_last optimizer lr momentum beta1 beta2 eps weight_decay clip "
    "clip_after schedule gamma milestones lr_min",
    "fleet": "devices seconds down up latency availability dropout redraw",
    "run": "engine device precision threads slots deterministic actors ray_address detector eval_every "
    "checkpoint_every client_accuracy cosines track allow",
}
VALUES = {
    "algorithm": " ".join(["fedavg", *names.RULES]),
    "data.name": " ".join(names.DATA),
    "data.partition": " ".join(names.PARTITIONS),
    "model.name": " ".join(names.MODELS),
    "run.detector": " ".join(names.DETECTORS),
    "run.engine": "auto loop batched ray",
    "run.precision": "auto float32 tf32 bfloat16",
    "train.optimizer": "sgd adamw",
    "train.schedule": "constant exponential steps cosine",
}
LISTED = ["rules", "data", "models", "partitions", "detectors", "presets"]
GROUPS = {
    "algorithm": "kairosfl.rules",
    "data.name": "kairosfl.data",
    "model.name": "kairosfl.models",
}


def key(name: str) -> str | None:
    """The key of the configuration with this name: `rounds` is `train.rounds`."""
    if name in ("algorithm", "seed"):
        return name
    return next(
        (f"{section}.{name}" for section, names in KEYS.items() if name in names.split()), None
    )


def preset(incomplete: str) -> list[str]:
    """Names of presets."""
    from kairosfl import presets

    return _from(presets.names(), incomplete)


def file(incomplete: str) -> list[str]:
    """Names of presets, TOML files, and task files."""
    if (values := after_equals(incomplete)) is not None:
        return values
    head, tail = os.path.split(incomplete)
    try:
        near = [path for path in Path(head).iterdir() if path.name.startswith(tail)]
    except OSError:
        near = []
    found = [
        path
        for path in near
        if (path.suffix in (".toml", ".py") or path.is_dir()) and not path.name.startswith(".")
    ]
    return [
        *preset(incomplete),
        *sorted(f"{path}/" if path.is_dir() else str(path) for path in found),
    ]


def change(incomplete: str) -> list[str]:
    """`section.key=`, or `section.key=value` where the values have names."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={each}" for each in _values(key, value)]
    keys = [
        "algorithm",
        "seed",
        *(f"{section}.{key}" for section, names in KEYS.items() for key in names.split()),
    ]
    return [f"{each}=" for each in _from(keys, incomplete)]


def after_equals(incomplete: str) -> list[str] | None:
    """The values of the key in `--set key=`, which bash passes on as three words; None if this is
    not the case.
    """
    try:
        words = shlex.split(os.environ.get("COMP_WORDS", ""))
        words = words[: int(os.environ.get("COMP_CWORD", "0"))]
    except ValueError:  # an open quotation
        return None
    words = words[:-1] if words[-1:] == ["="] else words
    return _values(words[-1], incomplete) if words[-2:-1] == ["--set"] else None


def listed(incomplete: str) -> list[str]:
    """What `kairosfl list` can list."""
    return _from(LISTED, incomplete)


def dataset(incomplete: str) -> list[str]:
    """Names of data sets."""
    return _values("data.name", incomplete)


def _values(key: str, incomplete: str) -> list[str]:
    """For a sum of rules, the last one."""
    from kairosfl.plugins import external

    known = [*VALUES.get(key, "").split(), *(external(GROUPS[key]) if key in GROUPS else ())]
    head, plus, tail = incomplete.rpartition("+") if key == "algorithm" else ("", "", incomplete)
    space = tail[: len(tail) - len(tail.lstrip())]
    return [f"{head}{plus}{space}{each}" for each in _from(known, tail.strip())]


def _from(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
