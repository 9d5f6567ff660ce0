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
    "data": "name clients partition alpha minimum shards labels_per_client class_counts balance "
    "nearest normalise noise augment crops padding validation partition_seed",
    "model": "name start own",
    "task": "file function",
    "train": "rounds cohort epochs batch_size drop_last optimizer lr momentum beta1 beta2 eps "
    "weight_decay clip clip_after schedule gamma milestones lr_min",
    "fleet": "devices seconds down up latency availability dropout redraw",
    "run": "engine device precision threads slots deterministic actors ray_address detector "
    "eval_every checkpoint_every client_accuracy cosines track allow",
}
VALUES = {
    "algorithm": " ".join(["fedavg", *names.RULES]),
    "data.name": " ".join(names.DATA),
    "data.partition": " ".join(names.PARTITIONS),
    "model.name": " ".join(names.MODELS),
    "run.detector": " ".join(names.DETECTORS),
    "run.engine": "auto loop batched ray debug",
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
    for section, keys in KEYS.items():
        if name in keys.split():
            return f"{section}.{name}"
    return None


def preset(incomplete: str) -> list[str]:
    """Names of presets."""
    from kairosfl import presets

    return _from(presets.names(), incomplete)


def file(incomplete: str) -> list[str]:
    """Names of presets, TOML files, and task files."""
    values = after_equals(incomplete)
    if values is not None:
        return values
    head, tail = os.path.split(incomplete)
    try:
        paths = list(Path(head).iterdir())
    except OSError:
        paths = []
    texts = []
    for path in paths:
        if not path.name.startswith(tail) or path.name.startswith("."):
            continue
        if path.is_dir():
            texts.append(f"{path}/")
        elif path.suffix in (".toml", ".py"):
            texts.append(str(path))
    return [*preset(incomplete), *sorted(texts)]


def change(incomplete: str) -> list[str]:
    """`section.key=`, or `section.key=value` where the values have names."""
    key, equals, value = incomplete.partition("=")
    if equals:
        return [f"{key}={choice}" for choice in _values(key, value)]
    keys = ["algorithm", "seed"]
    for section, words in KEYS.items():
        keys += [f"{section}.{word}" for word in words.split()]
    return [f"{key}=" for key in _from(keys, incomplete)]


def after_equals(incomplete: str) -> list[str] | None:
    """The values of the key in `--set key=`, which bash passes on as three words; else None."""
    try:
        words = shlex.split(os.environ.get("COMP_WORDS", ""))
        words = words[: int(os.environ.get("COMP_CWORD", "0"))]
    except ValueError:  # an open quotation
        return None
    if words[-1:] == ["="]:
        words = words[:-1]
    if words[-2:-1] != ["--set"]:
        return None
    return _values(words[-1], incomplete)


def listed(incomplete: str) -> list[str]:
    """What `kairosfl list` can list."""
    return _from(LISTED, incomplete)


def dataset(incomplete: str) -> list[str]:
    """Names of data sets."""
    return _values("data.name", incomplete)


def _values(key: str, incomplete: str) -> list[str]:
    """For a sum of rules, the last one."""
    from kairosfl.plugins import external

    choices = VALUES.get(key, "").split()
    if key in GROUPS:
        choices += external(GROUPS[key])
    begun = incomplete
    if key == "algorithm":
        begun = incomplete.rpartition("+")[2]
    begun = begun.lstrip()
    before = incomplete[: len(incomplete) - len(begun)]
    return [f"{before}{choice}" for choice in _from(choices, begun.rstrip())]


def _from(names: list[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]
