"""Beyond the papers: in each paper's setting the best composition that a search finds, at no more rounds or bytes.

A search scores on a tenth of the training samples that is held out; the test set is not seen. Every algorithm gets
every recipe, so that no baseline is tuned less than what it is compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kairosfl.papers.item import Cell, Item

HELD_OUT = {"data.validation": 0.1}
AUGMENT = {"data.augment": True}
CROPS = "crops and flips"


def _cosine(lr: float, **more: Any) -> dict[str, Any]:
    return {"train.schedule": "cosine", "train.lr": lr, **{f"train.{key}": value for key, value in more.items()}}


@dataclass(frozen=True, kw_only=True)
class Search:
    """A paper's setting, and what is tried in it: every algorithm with every recipe, for fewer rounds."""

    preset: str
    measure: str
    rounds: int
    recipes: Mapping[str, tuple[str, Mapping[str, Any]]]
    algorithms: Mapping[str, str]

    def cells(self) -> dict[str, Cell]:
        """Of the search, scored on what is held out."""
        return {
            f"{name}-{recipe}": Cell(
                preset=self.preset,
                settings={**HELD_OUT, "train.rounds": self.rounds, **settings, "algorithm": algorithm},
                reading=words,
                baseline="" if name == "fedavg" else f"fedavg-{recipe}",
            )
            for recipe, (words, settings) in self.recipes.items()
            for name, algorithm in self.algorithms.items()
        }


SEARCHES = {
    "fedaware": Search(
        preset="fedaware-cifar10-cnn",
        measure="last_tenth",
        rounds=200,
        recipes={
            "paper": ("lr 0.01", {}),
            "lr0.03": ("lr 0.03, cosine", _cosine(0.03)),
            "lr0.1": ("lr 0.1, cosine", _cosine(0.1)),
            "lr0.03-augment": (f"lr 0.03, cosine, {CROPS}", _cosine(0.03) | AUGMENT),
            "lr0.1-augment": (f"lr 0.1, cosine, {CROPS}", _cosine(0.1) | AUGMENT),
        },
        algorithms={
            "fedavg": "fedavg",
            "fedaware": "fedaware",
            "fedavgm": "fedavgm(beta=0.9)",
            "fedavgm-aware": "fedavgm(beta=0.9) + fedaware(project=True)",
            "fedavgm-pa3fed": "fedavgm(beta=0.9) + pa3fed",
            "fedyogi": "fedyogi(lr=0.01, tau=1e-4)",
        },
    ),
    "pa3fed": Search(
        preset="pa3fed-cifar10-alexnet",
        measure="final",
        rounds=40,
        recipes={
            "cosine": ("lr 0.01, cosine", _cosine(0.01)),
            "cosine-augment": (f"lr 0.01, cosine, {CROPS}", _cosine(0.01) | AUGMENT),
        },
        algorithms={
            "fedavg": "fedavg",
            "fedavgm": "fedavgm(beta=0.7)",
            "fedavgm-pa3fed": "fedavgm(beta=0.7) + pa3fed",
        },
    ),
    "fedcl": Search(
        preset="fedcl-cifar10-alexnet",
        measure="final",
        rounds=60,
        recipes={
            "cosine": ("lr 0.01, cosine", _cosine(0.01)),
            "cosine-augment": (f"lr 0.01, cosine, {CROPS}", _cosine(0.01) | AUGMENT),
        },
        algorithms={
            "fedavg": "fedavg",
            "fedavgm": "fedavgm(beta=0.7)",
            "fedavgm-pa3fed": "fedavgm(beta=0.7) + pa3fed",
        },
    ),
    "alt": Search(
        preset="alt-cifar10-cnn",
        measure="last_tenth",
        rounds=100,
        recipes={
            "paper": ("lr 0.01", {}),
            "cosine": ("lr 0.01, cosine", _cosine(0.01)),
            "cosine-decay": ("lr 0.01, cosine, weight decay 0.001", _cosine(0.01, weight_decay=1e-3)),
        },
        algorithms={"fedavg": "fedavg", "alt": "alt", "fedavgm-alt": "fedavgm(beta=0.7) + alt"},
    ),
}

ITEMS = tuple(
    Item(
        paper="beyond",
        name=f"{paper}-search",
        title=f"Search in the setting of {search.preset}, on a validation split",
        cells=search.cells(),
        measures=(search.measure, "megabytes"),
        seeds=1,
        note=f"{search.rounds} rounds. Accuracy on a tenth of the training samples, held out from training.",
    )
    for paper, search in SEARCHES.items()
)
