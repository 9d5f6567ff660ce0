"""Labels of groups as a paper writes them: `fedprox(mu=0.01) + alt` is FedProx (μ = 0.01) + ALT."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kairosfl.errors import UserError, nearest

# Where a rule's class is not called what papers call it.
_RULES = {
    "fedavg": "FedAvg",
    "vrlsgd": "VRL-SGD",
    "average": "averaging",
    "budget": "budget",
    "uniform": "uniform weights",
    "privacy": "differential privacy",
    "bucketing": "bucketing",
    "normclipping": "norm clipping",
    "centeredclipping": "centred clipping",
    "median": "median",
    "trimmedmean": "trimmed mean",
    "geometricmedian": "geometric median",
    "limits": "limits",
    "attack": "attack",
}
_SETTINGS = {
    "alpha": "α",
    "beta": "β",
    "beta1": "β₁",
    "beta2": "β₂",
    "gamma": "γ",
    "delta": "δ",
    "epsilon": "ε",
    "eps": "ε",
    "lam": "λ",
    "mu": "μ",
    "rho": "ρ",
    "sigma": "σ",
    "tau": "τ",
    "lr": "learning rate",
    "name": "data",
}


def in_words(label: str) -> str:
    """A group's label with rules by their papers' names and settings by their symbols."""
    from kairosfl.rules import RULES

    rules = {name: rule.__name__ for name, rule in RULES.items()} | _RULES

    def word(match: re.Match[str]) -> str:
        name, equals, bracket = match.groups()
        if equals:
            return f"{_SETTINGS.get(name, name.replace('_', ' '))} = "
        return rules.get(name, name) + (" (" if bracket else "")

    return re.sub(r"(?<![\w.])([a-z]\w*)(?![\w.])(?:(=)|(\())?", word, label).replace(" ()", "")


def renamed(labels: Sequence[str], names: Sequence[str], default: Sequence[str]) -> list[str]:
    """What to call each label: as asked by `LABEL=TEXT`, or by default."""
    called = dict(zip(labels, default, strict=True))
    for name in names:
        label = _label_of(name, labels)
        called[label] = name.removeprefix(f"{label}=")
    return [called[label] for label in labels]


def _label_of(name: str, labels: Sequence[str]) -> str:
    """The label in LABEL=TEXT; a label may have an equals sign itself, so the longest counts."""
    for label in sorted(labels, key=len, reverse=True):
        if name.startswith(f"{label}="):
            return label
    label = name.rpartition("=")[0]
    hint = nearest(label if label else name, labels)
    raise UserError(f"--name {name!r} is not LABEL=TEXT with a label of these runs; {hint}")
