"""Beyond the papers: the best compositions that searches find in each paper's setting, on the test
set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kairosfl_reproductions.item import Cell, Item
from kairosfl_reproductions.searches import AUGMENT, SEARCHES, cosine

# What the searches on other data chose: a recipe and an algorithm, and the recipe that was best for
# plain averaging.
CHOSEN = {
    "cifar100": ("lr0.1-augment", "fedavgm-more", "lr0.2-augment"),
    "fashion_mnist": ("lr0.2", "fedavgm", "lr0.2"),
}


def _elsewhere(data: str) -> dict[str, Cell]:
    """The preset of other data, and plain averaging tuned equally well."""
    preset, (recipe, _, own) = f"kairos-{data}", CHOSEN[data]  # the algorithm is in the preset
    (words, settings), same = SEARCHES[data].recipes[own], own == recipe
    return {
        "kairos": Cell(
            preset=preset, reading="no published value to compare with", baseline="average"
        ),
        "average": Cell(
            preset=preset,
            settings={
                **settings,
                "data.augment": "data.augment" in settings,
                "algorithm": "average",
            },
            reading=f"models averaged, with plain averaging's best recipe: {'the same' if same else words}",
            baseline="fedavg",
        ),
        **({} if same else {"average-same": _same(preset)}),
        "fedavg": Cell(
            preset=preset,
            settings={"algorithm": "fedavg"},
            reading="plain averaging with the recipe of the preset",
        ),
    }


def _same(preset: str, recipe: Mapping[str, Any] | None = None) -> Cell:
    settings = {**(recipe or {}), "algorithm": "average"}
    return Cell(
        preset=preset,
        settings=settings,
        reading="models averaged, with the recipe of the composition",
    )


def _averaging(preset: str, recipe: Mapping[str, Any]) -> Cell:
    settings = {**recipe, "algorithm": "fedavg"}
    return Cell(
        preset=preset, settings=settings, reading="plain averaging with its own best recipe"
    )


# What the searches chose, and plain averaging tuned equally well, at the paper's number of rounds,
# on the test set.
FINALS = {
    "fedaware": {
        "kairos": Cell(
            preset="kairos",
            printed={"last_tenth": 59.78},
            reading="compared with the best published value",
            baseline="fedavg",
        ),
        "thrifty": Cell(
            preset="kairos-thrifty", reading="40 % of the clients and bytes", baseline="fedavg"
        ),
        "thrifty-average": Cell(
            preset="kairos-thrifty",
            settings={"algorithm": "average"},
            reading="plain averaging with the recipe, clients and bytes of kairos-thrifty, models averaged",
        ),
        "fedavgm": Cell(
            preset="kairos",
            settings={"algorithm": "fedavgm(beta=0.7)"},
            reading="without averaging of models",
            baseline="fedavg",
        ),
        "average": Cell(
            preset="kairos",
            settings={"algorithm": "average"},
            reading="plain averaging with its own best recipe, models averaged",
            baseline="fedavg",
        ),
        "fedavg": Cell(
            preset="kairos",
            settings={"algorithm": "fedavg"},
            reading="plain averaging with the recipe of kairos",
        ),
    },
    "pa3fed": {
        "kairos": Cell(
            preset="pa3fed-cifar10-alexnet",
            settings={**cosine(0.01), **AUGMENT, "algorithm": "fedavgm(beta=0.7) + pa3fed"},
            printed={"final": 57.75},
            reading="compared with the best published value",
            baseline="fedavg",
        ),
        "fedavg": _averaging("pa3fed-cifar10-alexnet", cosine(0.01)),
        "kairos-averaged": Cell(
            preset="pa3fed-cifar10-alexnet",
            settings={
                **cosine(0.02, weight_decay=5e-4),
                **AUGMENT,
                "algorithm": "fedavgm(beta=0.7) + pa3fed + average",
            },
            printed={"final": 57.75},
            reading="searched again with models averaged",
            baseline="average",
        ),
        "average": Cell(
            preset="pa3fed-cifar10-alexnet",
            settings={**cosine(0.02, weight_decay=5e-4), **AUGMENT, "algorithm": "average"},
            reading="models averaged, with plain averaging's best recipe: the same",
        ),
    },
    "fedcl": {
        "kairos": Cell(
            preset="fedcl-cifar10-alexnet",
            settings={**cosine(0.01), "algorithm": "fedavgm(beta=0.7)"},
            reading="the paper gives no numbers",
            baseline="fedavg",
        ),
        "fedavg": _averaging("fedcl-cifar10-alexnet", cosine(0.01)),
        "kairos-averaged": Cell(
            preset="fedcl-cifar10-alexnet",
            settings={
                **cosine(0.01, weight_decay=5e-4),
                **AUGMENT,
                "algorithm": "fedavgm(beta=0.7) + average",
            },
            reading="searched again with models averaged",
            baseline="average",
        ),
        "average": Cell(
            preset="fedcl-cifar10-alexnet",
            settings={**cosine(0.01, weight_decay=5e-4), "algorithm": "average"},
            reading="models averaged, with plain averaging's best recipe: no crops and flips",
        ),
        "average-same": _same(
            "fedcl-cifar10-alexnet", {**cosine(0.01, weight_decay=5e-4), **AUGMENT}
        ),
    },
    "alt": {
        "kairos": Cell(
            preset="alt-cifar10-cnn",
            settings={**cosine(0.01, weight_decay=1e-3), "algorithm": "fedavgm(beta=0.7) + alt"},
            reading="the paper gives no numbers",
            baseline="alt",
        ),
        "alt": Cell(
            preset="alt-cifar10-cnn",
            settings={**cosine(0.01, weight_decay=1e-3), "algorithm": "alt"},
            reading="ALT with its own best recipe",
        ),
        "average-same": _same("alt-cifar10-cnn", cosine(0.01, weight_decay=1e-3)),
    },
    **{data: _elsewhere(data) for data in CHOSEN},
}


def _finals() -> Iterator[Item]:
    for paper, cells in FINALS.items():
        search = SEARCHES[paper]
        yield Item(
            paper="beyond",
            name=paper,
            title=f"The best composition found, in the setting of {search.setting}",
            cells=cells,
            measures=(search.measure, "megabytes"),
            note=f"Chosen by the searches `beyond/search-{paper}*`, with the rounds, clients and bytes of the setting.",
            beat=True,
        )


def _searches() -> Iterator[Item]:
    for paper, search in SEARCHES.items():
        yield Item(
            paper="beyond",
            name=f"search-{paper}",
            title=f"Search in the setting of {search.setting}, on a validation split",
            cells=search.cells(),
            measures=(search.measure, "megabytes"),
            seeds=1,
            note=f"{search.rounds} rounds. Accuracy on a tenth of the training samples, held out from training.",
        )


ITEMS = (*_finals(), *_searches())
