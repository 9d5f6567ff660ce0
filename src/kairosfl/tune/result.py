"""What a search found: the best trial as a configuration, what plain averaging reached, and what
mattered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.runs.config import dump
from kairosfl.runs.files import write, write_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import updated
from kairosfl.runs.score import Score
from kairosfl.tune.cost import Cost, costs
from kairosfl.tune.outcomes import Outcome
from kairosfl.tune.proposals import Trial
from kairosfl.tune.search import Search, words

NEGLIGIBLE = 0.005  # importance


@dataclass(frozen=True)
class Result:
    """Everything that a search found. Scores are higher for better trials; `show` prints them as
    the metric is.
    """

    out: Path
    metric: Score
    stages: tuple[int, ...]
    trials: list[Trial]
    ended: Mapping[tuple[int, int], Outcome]
    importances: Mapping[str, float]
    nested: Mapping[str, Any]
    costs: Sequence[Cost] = ()  # of privacy, all runs together

    def show(self, score: float | None) -> str:
        """A score as text."""
        return self.metric.measured(score if score is None or self.metric.higher else -score)

    def ranked(self) -> list[tuple[Trial, Outcome]]:
        """Every trial with its last score, those with the most rounds first, and of these the best
        first.
        """
        last = {
            trial.number: next(
                (
                    e
                    for r in reversed(self.stages)
                    if (e := self.ended.get((trial.number, r))) and e.score is not None
                ),
                None,
            )
            for trial in self.trials
        }
        found = [(self.trials[number], each) for number, each in last.items() if each is not None]
        return sorted(
            found, key=lambda pair: (-pair[1].round, -(pair[1].score or 0.0), pair[0].number)
        )

    @property
    def best(self) -> tuple[Trial, Outcome]:
        """The best trial of those with the most rounds."""
        ranked = self.ranked()
        reasons = [outcome.reason for outcome in self.ended.values() if outcome.state != "complete"]
        if not ranked and len(reasons) == len(self.ended) > 0:
            raise UserError(
                f"No trial in {self.out} has finished; the first ended with: {reasons[0]}"
            )
        if not ranked:
            raise UserError(
                f"No trial has finished in {self.out}; give a larger budget and run the same command again."
            )
        return ranked[0]

    def plain(self) -> tuple[Trial, Outcome] | None:
        """The best trial of plain averaging."""
        return next((pair for pair in self.ranked() if pair[0].plain), None)

    def of(self, number: int) -> Outcome | None:
        """How a trial ended in the last stage it was in."""
        return next(
            (e for rounds in reversed(self.stages) if (e := self.ended.get((number, rounds)))), None
        )

    def best_tables(self) -> dict[str, Any]:
        """The best trial as a configuration with the file's rounds, evaluated on the test set."""
        best = updated(self.nested, self.best[0].settings)
        data = {key: value for key, value in best.get("data", {}).items() if key != "validation"}
        return best | ({"data": data} if data else {})

    def mattered(self) -> list[dict[str, str]]:
        """The parameters as rows of text, the most important one first."""
        best, top = self.best[0], [trial for trial, _ in self.ranked()][:5]
        rows = []
        for name, share in sorted(self.importances.items(), key=lambda item: -item[1]):
            if share < NEGLIGIBLE:
                continue
            values = [trial.params[name] for trial in top if name in trial.params]
            rows.append(
                {
                    "parameter": name,
                    "importance": f"{100 * share:.0f} %",
                    "best trial": brief(best.params[name]) if name in best.params else "–",
                    "best five": _span(values),
                }
            )
        return rows

    def numbers(self) -> dict[str, Any]:
        """For a program."""
        trial, outcome = self.best
        plain = self.plain()
        return {
            "folder": str(self.out),
            "trial": trial.number,
            "settings": dict(trial.settings),
            "metric": self.metric.name,
            "validation": self._value(outcome),
            "rounds": outcome.round,
            "plain_averaging": None if plain is None else self._value(plain[1]),
            "trials": len(self.trials),
            "runs": len(self.ended),
            "importances": dict(self.importances),
            **{cost.name: cost.epsilon for cost in self.costs},
        }

    def _value(self, outcome: Outcome) -> float | None:
        return outcome.score if self.metric.higher or outcome.score is None else -outcome.score

    def sentences(self) -> list[str]:
        """The result in a few lines."""
        trial, outcome = self.best
        lines = [
            f"best: trial {trial.number}, {self.show(outcome.score)} on validation samples after "
            f"{outcome.length}: {words(trial)}"
        ]
        plain = self.plain()
        if plain is not None and plain[0] is not trial:
            text = f"{self.show(plain[1].score)} after {plain[1].length}: {words(plain[0])}"
            lines.append(f"plain averaging, best recipe: trial {plain[0].number}, {text}")
        if outcome.round < self.stages[-1]:
            lines.append(
                f"No trial has finished all {self.stages[-1]} rounds; a larger budget and the same command continue."
            )
        return [*lines, *(cost.sentence() for cost in self.costs)]

    def write(self) -> None:
        """Write best.toml and trials.json."""
        trial, outcome = self.best
        note = (
            f"# Trial {trial.number} of a search by `kairosfl tune`: {self.metric.name} {self.show(outcome.score)} on "
            f"validation samples after {outcome.length}.\n# Run as it is, it trains on all training "
            "samples and is evaluated on the test set.\n"
        )
        write(self.out / "best.toml", note + dump(self.best_tables()))
        write_json(self.out / "trials.json", [self._row(trial) for trial in self.trials])

    def _unended(self, trial: Trial) -> str:
        """Whether a trial without an outcome was stopped, or the budget did not pay for it."""
        begun = (self.out / f"{self.stages[0]}-rounds" / f"trial-{trial.number:03d}").exists()
        return "running" if begun else "not begun"

    def _row(self, trial: Trial) -> dict[str, Any]:
        mine = {
            rounds: each
            for rounds in self.stages
            if (each := self.ended.get((trial.number, rounds)))
        }
        last = list(mine.values())[-1] if mine else None
        return {
            "trial": trial.number,
            "settings": dict(trial.settings),
            "params": dict(trial.params),
            "state": last.state if last else self._unended(trial),
            "reason": last.reason if last else "",
            self.metric.name: {str(rounds): self._value(each) for rounds, each in mine.items()},
        }


def result(search: Search) -> Result:
    """What a search has found so far."""
    ended = search.ended
    folder = next(
        (search.folder(*key) for key, each in ended.items() if each.score is not None), search.out
    )
    return Result(
        search.out,
        Folder(folder).main(),
        search.stages,
        search.proposals.trials,
        ended,
        search.proposals.importances(),
        search.nested,
        costs(search.folder(*key) for key in search.begun()),
    )


def brief(value: Any) -> str:
    """A value in few characters."""
    return f"{value:.3g}" if isinstance(value, float) else "none" if value == "" else str(value)


def _span(values: list[Any]) -> str:
    if not values:
        return "–"
    if all(isinstance(each, int | float) and not isinstance(each, bool) for each in values):
        low, high = brief(min(values)), brief(max(values))
        return low if low == high else f"{low} to {high}"
    return ", ".join(f"{brief(each)} ×{values.count(each)}" for each in dict.fromkeys(values))
