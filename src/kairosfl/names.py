"""What a configuration can name, without importing it.

So a misspelled name is answered before torch is imported. The names, and the options of data sets
and models, are written down here once more; a test compares them with the truth.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from typing import Any

from kairosfl.core.spec import EXAMPLES, heads, missing
from kairosfl.errors import UserError


def _words(text: str) -> list[str]:
    return text.split()


RULES = _words(
    "fedprox fednova vrlsgd fedmut scaffold feddyn fedcm fedsam moon fedavgm fedadagrad fedadam "
    "fedyogi fedams fedcl alt pa3fed fedaware average budget uniform privacy localprivacy "
    "bucketing nnm normclipping centeredclipping median trimmedmean geometricmedian krum limits "
    "attack overcommit deadline buffered stale fedbuff fedasync "
    "fedrep fedbabu ditto apfl"
)
DETECTORS = _words("fgn fedfim noisedfgn")
EXAMPLES["rule"] = ("fedprox(mu=0.01)", "fedavgm")
EXAMPLES["detector"] = ("fgn(delta=0.05)", "fedfim")
PARTITIONS = _words(
    "iid dirichlet quantity shards labels client_dirichlet disjoint_dirichlet counts mixed natural"
)
DATA = {  # with their options
    "digits": "",
    "mnist": "size",
    "fashion_mnist": "size",
    "cifar10": "fedlab",
    "cifar100": "coarse",
    "tinyimagenet": "",
    "shakespeare": "stride",
    "agnews": "tokens length vocabulary",
    "synthetic": "samples test_samples features classes shape separation seed",
    "folder": "path target input kind test missing categorical standardise size separator classes "
    "label",
}
MODELS = {  # with their options
    "logistic": "",
    "mlp": "hidden",
    "lenet": "",
    "cnn": "padding hidden",
    "alt_cnn": "projection",
    "aware_cnn": "hidden",
    "pfl_cnn": "hidden dropout",
    "alexnet": "width dropout",
    "vgg11": "width dropout",
    "resnet18": "width groups projection stem",
    "resnet50": "width groups projection stem",
    "char_lstm": "vocabulary embedding hidden layers dropout",
    "gpt_neox": "vocabulary hidden layers heads rotary_pct pool pad checkpoint",
}

# Where the real ones are, and the entry points of other distributions.
_KINDS: dict[str, tuple[Collection[str], str, str]] = {
    "rule": (RULES, "kairosfl.rules:RULES", "kairosfl.rules"),
    "detector": (DETECTORS, "kairosfl.detectors:DETECTORS", ""),
    "data": (DATA, "kairosfl.data:DATASETS", "kairosfl.data"),
    "model": (MODELS, "kairosfl.models:MODELS", "kairosfl.models"),
    "partition": (PARTITIONS, "kairosfl.tasks.partitions:PARTITIONS", ""),
}


def known(kind: str) -> Collection[str]:
    """All names of a kind: "rule", "detector", "data", "model" or "partition"."""
    written, _, group = _KINDS[kind]
    loaded = _loaded(kind)
    if loaded is not None:  # Python code may have added to it
        return list(loaded)
    if not group:
        return written
    from kairosfl.plugins import external

    return list(dict.fromkeys([*written, *external(group)]))


def options(kind: str, name: str) -> Collection[str] | None:
    """The options of a data set or model; None for one that must be imported to know them."""
    written: Mapping[str, str] = DATA if kind == "data" else MODELS
    if _loaded(kind) is not None or name not in written:
        return None
    return written[name].split()


def check_rules(algorithm: str | list[Any]) -> None:
    """Refuse an algorithm that names a rule that does not exist; its options are not looked at."""
    if isinstance(algorithm, str):
        algorithm = [algorithm]
    for entry in algorithm:
        if isinstance(entry, Mapping):
            _check("rule", [entry.get("rule")])
        elif isinstance(entry, str) and (text := without_fedavg(entry)):
            _check("rule", heads("rule", text))


def check_detectors(text: str) -> None:
    """Refuse a detector that does not exist; its options are not looked at."""
    _check("detector", heads("detector", text))


def _check(kind: str, names: list[Any]) -> None:
    """A dotted name is a preset of a rule, or somebody else's module: what reads it refuses it."""
    for name in names:
        if not isinstance(name, str) or "." in name or name == "fedavg":
            continue
        if name not in known(kind):
            raise missing(kind, name, known(kind))


def _loaded(kind: str) -> Collection[str] | None:
    """The real registry, if its module has been imported."""
    module, _, attribute = _KINDS[kind][1].partition(":")
    return getattr(sys.modules.get(module), attribute, None)


def without_fedavg(text: str) -> str:
    """The text of an algorithm without fedavg, which adds nothing to a sum."""
    parts = text.split("+")
    if len(parts) > 1 and not all(map(str.strip, parts)):
        raise UserError(
            f"algorithm = {text!r} cannot be read: a + has nothing next to it; "
            "write 'fedprox + fedavgm'."
        )
    return "+".join(part for part in parts if part.strip().lower().removesuffix("()") != "fedavg")
