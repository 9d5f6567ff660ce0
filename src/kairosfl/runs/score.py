"""The metric that runs are judged by: its name in words, which values are better, its digits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.errors import UserError
from kairosfl.tasks.kinds import KINDS
from kairosfl.tasks.metrics import Metric

_UPPER = ("rmse", "mse", "mae", "mape", "auc", "auroc", "f1", "bleu", "cer", "wer")
_WORDS = dict(zip(_UPPER, map(str.upper, _UPPER), strict=True))
_WORDS |= {"r2": "R²", "iou": "IoU", "miou": "mIoU", "map": "mAP"}
_SPELLED = "AEFHILMNORSX"  # letters whose names begin with a vowel


@dataclass(frozen=True)
class Score:
    """A metric as it is shown."""

    name: str  # of its column in metrics.jsonl
    higher: bool = True  # whether higher values are better
    percent: bool = False

    @property
    def words(self) -> str:
        """Its name inside a sentence: `accuracy`, `RMSE`, `token accuracy`."""
        return _WORDS.get(self.name, self.name.replace("_", " "))

    @property
    def title(self) -> str:
        """Its name at the beginning of a sentence."""
        return self.words[:1].upper() + self.words[1:]

    @property
    def with_article(self) -> str:
        """`an accuracy`, `an RMSE`, `a perplexity`."""
        article = "an" if self.words[0] in f"aeiou{_SPELLED}" else "a"
        return f"{article} {self.words}"

    @property
    def stated(self) -> str:
        """Its name where numbers without one are accuracies."""
        return "" if self.name == "accuracy" else self.words

    @property
    def best(self) -> str:
        """In words, the end of its range that is best."""
        return "highest" if self.higher else "lowest"

    @property
    def worst(self) -> str:
        """In words, the end of its range that is worst."""
        return "lowest" if self.higher else "highest"

    @property
    def direction(self) -> str:
        """Which values are better."""
        return f"{'higher' if self.higher else 'lower'} is better"

    @property
    def sign(self) -> int:
        """1 if higher is better, else -1: multiplied by it, higher is better for every metric."""
        return 1 if self.higher else -1

    @property
    def scale(self) -> float:
        """From its values to those shown."""
        return 100.0 if self.percent else 1.0

    @property
    def unit(self) -> str:
        """What follows a value that is shown."""
        return " %" if self.percent else ""

    @property
    def quantiles(self) -> str:
        """The field of clients.jsonl with the quantiles over the clients."""
        return f"{self.name}_quantiles"

    def digits(self, size: float) -> int:
        """How many decimals a value of this size has: two in per cent, else four digits in all."""
        if self.percent or not size or not math.isfinite(size):
            return 2
        before = math.floor(math.log10(abs(size)))  # the point
        if before >= 9:  # in scientific notation
            return 3
        return min(max(3 - before, 0), 12)

    def shown(self, value: float) -> str:
        """A value as short as possible, with its unit."""
        return f"{self.scale * value:g}{self.unit}"

    def measured(self, value: float | None) -> str:
        """A measured value with its digits; a dash if there is none."""
        if value is None:
            return "–"
        if self.percent:
            return f"{100 * value:.2f} %"
        return f"{value:.4g}"

    def reached(self, values: NDArray[np.float64], target: float) -> NDArray[np.bool_]:
        """Which values are at least as good as the target."""
        if self.higher:
            return values >= target
        return values <= target

    def rounded(self, value: float) -> float:
        """The nearest short number that is not better: a whole per cent, or two digits."""
        per = 1.0
        if self.percent:
            per = 100.0
        elif value:
            per = 10.0 ** (1 - math.floor(math.log10(abs(value))))
        return self.sign * math.floor(per * self.sign * value + 1e-9) / per

    def check(self, value: float) -> None:
        """Refuse a target that is not a value of it."""
        if self.percent and not 0 < value <= 1:
            raise UserError(
                f"target = {value:g} is not {self.with_article}; give a fraction, such as 0.6 for "
                "60 %."
            )
        if not math.isfinite(value):
            raise UserError(f"target = {value:g} is not {self.with_article}; give a finite number.")


def usual(name: str) -> Score:
    """A metric by its name; if no kind of task has it, higher is assumed to be better."""
    metrics: dict[str, Metric] = {}
    for kind in KINDS.values():
        metrics |= kind.metrics
    if name in metrics:
        return Score(name, metrics[name].better == "higher", metrics[name].percent)
    return Score(name, higher=name != "loss")


def scores(about: Mapping[str, Any], named: object = None) -> tuple[Score, ...]:
    """The metrics in run.json, the main one first.

    If there are none, it is the one that metrics.jsonl names, or accuracy.
    """
    metrics = about.get("metrics")
    if not metrics or not is_metrics(metrics):
        name = named if isinstance(named, str) and named else "accuracy"
        return (usual(name),)
    every = []
    for metric in metrics:
        every.append(Score(metric["name"], metric["better"] == "higher", metric["percent"]))
    return tuple(every)


def is_metrics(value: Any) -> bool:
    """Whether it is what run.json says about the metrics of a run."""
    return isinstance(value, list) and all(map(_is_metric, value))


def _is_metric(entry: Any) -> bool:
    """Whether it is what run.json says about one metric."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and entry["name"].isidentifier()
        and entry.get("better") in ("higher", "lower")
        and isinstance(entry.get("percent"), bool)
    )
