"""What a search found: the best trial as a configuration, plain averaging, and what mattered."""

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
    """Everything that a search found.

    Scores are higher for better trials; `show` prints them as the metric is.
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
        return self.metric.measured(self._measured(score))

    def _measured(self, score: float | None) -> float | None:
        """A score as the metric that was measured."""
        if score is None or self.metric.higher:
            return score
        return -score

    def outcomes(self, number: int) -> dict[int, Outcome]:
        """How a trial ended, by the rounds of the stages that it was in."""
        outcomes = {}
        for rounds in self.stages:
            if (number, rounds) in self.ended:
                outcomes[rounds] = self.ended[number, rounds]
        return outcomes

    def ranked(self) -> list[tuple[Trial, Outcome]]:
        """Every trial with its last score: those with the most rounds first, then by score."""
        ranked = []
        for trial in self.trials:
            last_scored = None
            for outcome in self.outcomes(trial.number).values():
                if outcome.score is not None:
                    last_scored = outcome
            if last_scored is not None:
                ranked.append((trial, last_scored))
        return sorted(ranked, key=_rank)

    @property
    def best(self) -> tuple[Trial, Outcome]:
        """The best trial of those with the most rounds."""
        ranked = self.ranked()
        if ranked:
            return ranked[0]
        reasons = [outcome.reason for outcome in self.ended.values() if outcome.state != "complete"]
        if reasons and len(reasons) == len(self.ended):
            raise UserError(
                f"No trial in {self.out} has finished; the first ended with: {reasons[0]}"
            )
        raise UserError(
            f"No trial has finished in {self.out}; give a larger budget and run the same command "
            "again."
        )

    def plain(self) -> tuple[Trial, Outcome] | None:
        """The best trial of plain averaging."""
        for trial, outcome in self.ranked():
            if trial.plain:
                return trial, outcome
        return None

    def of(self, number: int) -> Outcome | None:
        """How a trial ended in the last stage it was in."""
        outcomes = list(self.outcomes(number).values())
        return outcomes[-1] if outcomes else None

    def best_tables(self) -> dict[str, Any]:
        """The best trial as a configuration with the file's rounds, evaluated on the test set."""
        best = updated(self.nested, self.best[0].settings)
        if "data" in best:
            data = dict(best["data"])
            data.pop("validation", None)
            best = best | {"data": data}
        return best

    def mattered(self) -> list[dict[str, str]]:
        """The parameters as rows of text, the most important one first."""
        best = self.best[0]
        top = self.ranked()[:5]
        rows = []
        for name in sorted(self.importances, key=lambda name: -self.importances[name]):
            if self.importances[name] < NEGLIGIBLE:
                continue
            values = [trial.params[name] for trial, _ in top if name in trial.params]
            rows.append(
                {
                    "parameter": name,
                    "importance": f"{100 * self.importances[name]:.0f} %",
                    "best trial": brief(best.params[name]) if name in best.params else "–",
                    "best five": _span(values),
                }
            )
        return rows

    def numbers(self) -> dict[str, Any]:
        """For a program."""
        trial, outcome = self.best
        plain = self.plain()
        numbers = {
            "folder": str(self.out),
            "trial": trial.number,
            "settings": dict(trial.settings),
            "metric": self.metric.name,
            "validation": self._measured(outcome.score),
            "rounds": outcome.round,
            "plain_averaging": None if plain is None else self._measured(plain[1].score),
            "trials": len(self.trials),
            "runs": len(self.ended),
            "importances": dict(self.importances),
        }
        for cost in self.costs:
            numbers[cost.name] = cost.epsilon
        return numbers

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
                f"No trial has finished all {self.stages[-1]} rounds; a larger budget and the same "
                "command continue."
            )
        for cost in self.costs:
            lines.append(cost.sentence())
        return lines

    def write(self) -> None:
        """Write best.toml and trials.json."""
        trial, outcome = self.best
        score = f"{self.metric.name} {self.show(outcome.score)}"
        note = (
            f"# Trial {trial.number} of a search by `kairosfl tune`: {score} on "
            f"validation samples after {outcome.length}.\n"
            "# Run as it is, it trains on all training samples and is evaluated on the test set.\n"
        )
        write(self.out / "best.toml", note + dump(self.best_tables()))
        write_json(self.out / "trials.json", [self._row(trial) for trial in self.trials])

    def _unended(self, trial: Trial) -> str:
        """Whether a trial without an outcome was stopped, or the budget did not pay for it."""
        begun = (self.out / f"{self.stages[0]}-rounds" / f"trial-{trial.number:03d}").exists()
        return "running" if begun else "not begun"

    def _row(self, trial: Trial) -> dict[str, Any]:
        state = self._unended(trial)
        reason = ""
        measured = {}
        for rounds, outcome in self.outcomes(trial.number).items():
            state = outcome.state
            reason = outcome.reason
            measured[str(rounds)] = self._measured(outcome.score)
        return {
            "trial": trial.number,
            "settings": dict(trial.settings),
            "params": dict(trial.params),
            "state": state,
            "reason": reason,
            self.metric.name: measured,
        }


def _rank(pair: tuple[Trial, Outcome]) -> tuple[int, float, int]:
    trial, outcome = pair
    assert outcome.score is not None
    return -outcome.round, -outcome.score, trial.number


def result(search: Search) -> Result:
    """What a search has found so far."""
    folder = search.out
    for key, outcome in search.ended.items():
        if outcome.score is not None:
            folder = search.folder(*key)
            break
    return Result(
        out=search.out,
        metric=Folder(folder).main(),
        stages=search.stages,
        trials=search.proposals.trials,
        ended=search.ended,
        importances=search.proposals.importances(),
        nested=search.nested,
        costs=costs(search.folder(*key) for key in search.begun()),
    )


def brief(value: Any) -> str:
    """A value in few characters."""
    if value == "":
        return "none"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _span(values: list[Any]) -> str:
    """The values in words: from the least to the largest, or how often there is each."""
    if not values:
        return "–"
    if not all(map(_is_number, values)):
        return ", ".join(f"{brief(kind)} ×{values.count(kind)}" for kind in dict.fromkeys(values))
    low = brief(min(values))
    high = brief(max(values))
    return low if low == high else f"{low} to {high}"
