"""Searches for the best composition in each paper's setting, at no more rounds or bytes.

A search is scored on a held-out tenth of the training samples; the test set is not used. Every
algorithm is tried with every recipe, so that no baseline is tuned less than the methods compared
with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kairosfl_reproductions.item import Cell

HELD_OUT = {"data.validation": 0.1}
AUGMENT = {"data.augment": True}
CROPS = "crops and flips"


def cosine(lr: float, **more: Any) -> dict[str, Any]:
    """Settings with a learning rate that falls from this along a cosine, and more of [train]."""
    return {
        "train.schedule": "cosine",
        "train.lr": lr,
        **{f"train.{key}": value for key, value in more.items()},
    }


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search in a paper's setting: every algorithm with every recipe, mostly for fewer rounds."""

    preset: str
    measure: str
    rounds: int
    recipes: Mapping[str, tuple[str, Mapping[str, Any]]]
    algorithms: Mapping[str, str]
    data: str = ""  # instead of the preset's

    @property
    def setting(self) -> str:
        """In words."""
        return self.preset + (f" on {self.data}" if self.data else "")

    def cells(self) -> dict[str, Cell]:
        """The cells of the search, scored on held-out samples."""
        return {
            f"{name}-{recipe}": Cell(
                preset=self.preset,
                settings={
                    **HELD_OUT,
                    **({"data.name": self.data} if self.data else {}),
                    "train.rounds": self.rounds,
                    **settings,
                    "algorithm": algorithm,
                },
                reading=words,
                baseline="" if name == "fedavg" else f"fedavg-{recipe}",
            )
            for recipe, (words, settings) in self.recipes.items()
            for name, algorithm in self.algorithms.items()
        }


AWARE: dict[str, Any] = {"preset": "fedaware-cifar10-cnn", "measure": "last_tenth", "rounds": 200}
ALEXNET: dict[str, Any] = {  # used in both settings with AlexNet
    "recipes": {
        "cosine": ("lr 0.01, cosine", cosine(0.01)),
        "cosine-augment": (f"lr 0.01, cosine, {CROPS}", cosine(0.01) | AUGMENT),
    },
    "algorithms": {
        "fedavg": "fedavg",
        "fedavgm": "fedavgm(beta=0.7)",
        "fedavgm-pa3fed": "fedavgm(beta=0.7) + pa3fed",
    },
}
AVERAGED: dict[str, Any] = {  # the same again, with averaging of models
    "recipes": {
        f"lr{lr}-augment": (
            f"lr {lr}, cosine, {CROPS}, weight decay 0.0005",
            cosine(lr, weight_decay=5e-4) | AUGMENT,
        )
        for lr in (0.01, 0.02)
    },
    "algorithms": {
        "fedavg": "average",
        "fedavgm": "fedavgm(beta=0.5) + average",
        "fedavgm-more": "fedavgm(beta=0.7) + average",
        "fedavgm-pa3fed": "fedavgm(beta=0.7) + pa3fed + average",
    },
}
ELSEWHERE: dict[str, Any] = {  # the best recipe on CIFAR-10 and its neighbours, on other data
    "recipes": {
        f"lr{lr}{'-augment' if augment else ''}": (
            f"lr {lr}, cosine, {CROPS + ', ' if augment else ''}6 epochs, gradients clipped at 10, weight decay 0.0005",
            cosine(lr, epochs=6, clip=10.0, weight_decay=5e-4) | (AUGMENT if augment else {}),
        )
        for lr in (0.1, 0.2)
        for augment in (True, False)
    },
    "algorithms": {
        "fedavg": "average",
        "fedavgm": "fedavgm(beta=0.5) + average",
        "fedavgm-more": "fedavgm(beta=0.7) + average",
    },
}

SEARCHES = {
    "fedaware": Search(
        **AWARE,
        recipes={
            "paper": ("lr 0.01", {}),
            "lr0.03": ("lr 0.03, cosine", cosine(0.03)),
            "lr0.1": ("lr 0.1, cosine", cosine(0.1)),
            "lr0.03-augment": (f"lr 0.03, cosine, {CROPS}", cosine(0.03) | AUGMENT),
            "lr0.1-augment": (f"lr 0.1, cosine, {CROPS}", cosine(0.1) | AUGMENT),
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
    # around the best of the first: adaptive servers, a high learning rate with decay, crops
    "fedaware-2": Search(
        **AWARE,
        recipes={
            "lr0.1-augment": (f"lr 0.1, cosine, {CROPS}", cosine(0.1) | AUGMENT),
            "lr0.2-augment": (f"lr 0.2, cosine, {CROPS}", cosine(0.2) | AUGMENT),
            "lr0.1-augment-decay": (
                f"lr 0.1, cosine, {CROPS}, weight decay 0.001",
                cosine(0.1, weight_decay=1e-3) | AUGMENT,
            ),
        },
        algorithms={
            "fedavg": "fedavg",
            "fedyogi": "fedyogi(lr=0.01, tau=1e-4)",
            "fedyogi-fast": "fedyogi(lr=0.02, tau=1e-4)",
            "fedyogi-pa3fed": "fedyogi(lr=0.01, tau=1e-4) + pa3fed",
            "fedams": "fedams(lr=0.01, eps=1e-8)",
        },
    ),
    # not covered by the first two, at FedAvg's bytes: gentler servers, ALT, more epochs
    "fedaware-3": Search(
        **AWARE,
        recipes={
            "lr0.05-augment": (f"lr 0.05, cosine, {CROPS}", cosine(0.05) | AUGMENT),
            "lr0.1-augment": (f"lr 0.1, cosine, {CROPS}", cosine(0.1) | AUGMENT),
            "lr0.1-augment-epochs6": (
                f"lr 0.1, cosine, {CROPS}, 6 epochs",
                cosine(0.1, epochs=6) | AUGMENT,
            ),
        },
        algorithms={
            "fedavg": "fedavg",
            "fedavgm": "fedavgm(beta=0.5)",
            "fedyogi": "fedyogi(lr=0.01, tau=1e-4)",
            "fedyogi-calm": "fedyogi(lr=0.01, tau=1e-3)",
            "fedyogi-aware": "fedyogi(lr=0.01, tau=1e-4) + fedaware(project=True)",
            "fedyogi-alt": "fedyogi(lr=0.01, tau=1e-4) + alt",
            "fedadagrad": "fedadagrad(lr=0.03, tau=1e-3)",
            "fedprox": "fedprox(mu=0.1)",
        },
    ),
    "fedaware-4": Search(  # around the best of the third: a little server momentum, more epochs
        **AWARE,
        recipes={
            "lr0.1-augment-epochs6": (
                f"lr 0.1, cosine, {CROPS}, 6 epochs",
                cosine(0.1, epochs=6) | AUGMENT,
            ),
            "lr0.1-augment-epochs10": (
                f"lr 0.1, cosine, {CROPS}, 10 epochs",
                cosine(0.1, epochs=10) | AUGMENT,
            ),
        },
        algorithms={
            "fedavg": "fedavg",
            "fedavgm": "fedavgm(beta=0.5)",
            "fedavgm-more": "fedavgm(beta=0.7)",
            "fedavgm-alt": "fedavgm(beta=0.5) + alt",
            "fedavgm-pa3fed": "fedavgm(beta=0.5) + pa3fed",
        },
    ),
    "fedaware-5": Search(  # four runs of the fourth diverged: clip gradients
        **AWARE,
        recipes={
            f"lr0.1-augment-epochs6-clip{clip}": (
                f"lr 0.1, cosine, {CROPS}, 6 epochs, gradients clipped at {clip}",
                cosine(0.1, epochs=6, clip=float(clip)) | AUGMENT,
            )
            for clip in (1, 10)
        },
        algorithms={
            "fedavg": "fedavg",
            "fedavgm": "fedavgm(beta=0.5)",
            "fedavgm-alt": "fedavgm(beta=0.5) + alt",
            "fedavgm-pa3fed": "fedavgm(beta=0.5) + pa3fed",
        },
    ),
    # around the best of the fifth: averaged models, flat minima, weight decay
    "fedaware-6": Search(
        **AWARE,
        recipes={
            f"epochs6-decay{decay}": (
                f"lr 0.1, cosine, {CROPS}, 6 epochs, gradients clipped at 10, weight decay {decay}",
                cosine(0.1, epochs=6, clip=10.0, weight_decay=float(decay)) | AUGMENT,
            )
            for decay in ("0", "0.0005")
        },
        algorithms={
            "fedavg": "average",
            "fedavgm": "fedavgm(beta=0.5) + average",
            "fedsam": "fedsam(rho=0.05) + fedavgm(beta=0.5) + average",
            "fedsam-more": "fedsam(rho=0.15) + fedavgm(beta=0.5) + average",
        },
    ),
    # around the best of the sixth: more weight decay, a higher learning rate, more momentum
    "fedaware-7": Search(
        **AWARE,
        recipes={
            f"lr{lr}-decay{decay}": (
                f"lr {lr}, cosine, {CROPS}, 6 epochs, gradients clipped at 10, weight decay {decay}",
                cosine(lr, epochs=6, clip=10.0, weight_decay=float(decay)) | AUGMENT,
            )
            for lr in (0.1, 0.2)
            for decay in ("0.0005", "0.001", "0.002")
        },
        algorithms={
            "fedavg": "average",
            "fedavgm": "fedavgm(beta=0.5) + average",
            "fedavgm-more": "fedavgm(beta=0.7) + average",
        },
    ),
    # the recipe of the seventh, with FedAWARE whose λ is drawn towards uniform
    "fedaware-8": Search(
        **AWARE,
        recipes={
            f"lr{lr}": (
                f"lr {lr}, cosine, {CROPS}, 6 epochs, gradients clipped at 10, weight decay 0.0005",
                cosine(lr, epochs=6, clip=10.0, weight_decay=5e-4) | AUGMENT,
            )
            for lr in (0.1, 0.2)
        },
        algorithms={
            "fedavg": "average",
            "fedavgm": "fedavgm(beta=0.7) + average",
            **{
                f"fedavgm-aware{ridge}": f"fedavgm(beta=0.7) + fedaware(project=True, ridge={ridge}) + average"
                for ridge in (0.1, 1.0)
            },
            "fedavgm-aware-fast": "fedavgm(beta=0.7) + fedaware(project=True, ridge=1.0, lr=2.0) + average",
        },
    ),
    "thrifty": Search(  # the recipe of the seventh, with fewer clients a round
        **AWARE,
        recipes={
            f"share{share}": (
                f"{100 * share:.0f} % of the clients, the recipe of kairos",
                cosine(0.2, epochs=6, clip=10.0, weight_decay=5e-4, cohort=round(10 * share))
                | AUGMENT,
            )
            for share in (1.0, 0.5, 0.4, 0.3, 0.2)
        },
        algorithms={
            "fedavg": "average",
            "fedavgm": "fedavgm(beta=0.5) + average",
            "fedavgm-more": "fedavgm(beta=0.7) + average",
        },
    ),
    "moment": Search(  # the recipe of the seventh, with rules that decide when clients are asked
        **AWARE,
        recipes={
            "lr0.2": (
                f"lr 0.2, cosine, {CROPS}, 6 epochs, gradients clipped at 10, weight decay 0.0005",
                {
                    **cosine(0.2, epochs=6, clip=10.0, weight_decay=5e-4),
                    **AUGMENT,
                    "run.detector": "fgn.paired()",
                },
            )
        },
        algorithms={
            "fedavg": "average",
            "fedavgm": "fedavgm(beta=0.7) + average",
            "fedavgm-plan": "fedavgm(beta=0.7) + budget(share=1.0, plan=[3, 1, 1, 3]) + average",
            "fedavgm-cl": "fedavgm(beta=0.7) + fedcl(cap=0.2, budget=1.0) + average",
            "fedavgm-even0.4": "fedavgm(beta=0.5) + budget(share=0.4) + average",
            "fedavgm-detector0.4": "fedavgm(beta=0.5) + budget(share=0.4, by='detector') + average",
            "fedavgm-cl0.4": "fedavgm(beta=0.5) + fedcl(cap=0.2, budget=0.4) + average",
        },
    ),
    "cifar100": Search(**AWARE, data="cifar100", **ELSEWHERE),
    "fashion_mnist": Search(**AWARE, data="fashion_mnist", **ELSEWHERE),
    "pa3fed": Search(
        preset="pa3fed-cifar10-alexnet",
        measure="final",
        rounds=40,
        **ALEXNET,
    ),
    "pa3fed-2": Search(preset="pa3fed-cifar10-alexnet", measure="final", rounds=40, **AVERAGED),
    "fedcl": Search(
        preset="fedcl-cifar10-alexnet",
        measure="final",
        rounds=60,
        **ALEXNET,
    ),
    "fedcl-2": Search(preset="fedcl-cifar10-alexnet", measure="final", rounds=60, **AVERAGED),
    "fedcl-3": Search(  # 60 rounds are too few to judge crops and flips: all of the setting's
        preset="fedcl-cifar10-alexnet",
        measure="final",
        rounds=200,
        recipes={
            "plain": ("lr 0.01, cosine, weight decay 0.0005", cosine(0.01, weight_decay=5e-4)),
            "augment": AVERAGED["recipes"]["lr0.01-augment"],
        },
        algorithms={
            name: AVERAGED["algorithms"][name] for name in ("fedavg", "fedavgm", "fedavgm-more")
        },
    ),
    "alt": Search(
        preset="alt-cifar10-cnn",
        measure="last_tenth",
        rounds=100,
        recipes={
            "paper": ("lr 0.01", {}),
            "cosine": ("lr 0.01, cosine", cosine(0.01)),
            "cosine-decay": (
                "lr 0.01, cosine, weight decay 0.001",
                cosine(0.01, weight_decay=1e-3),
            ),
        },
        algorithms={"fedavg": "fedavg", "alt": "alt", "fedavgm-alt": "fedavgm(beta=0.7) + alt"},
    ),
}
