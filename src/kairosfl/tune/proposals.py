"""Optuna's study of a search: which trials there are, and what they scored in their first stage.

A proposal depends on the seed, the number of the trial and the scores told so far, and on nothing
else, so a search that was interrupted goes on with the trials it would have had.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.runs.config import RunConfig
from kairosfl.tune.outcomes import Outcome
from kairosfl.tune.space import Space

if TYPE_CHECKING:
    import optuna

STARTUP = 16  # trials drawn at random before the scores guide the search
FEW = 8  # trials with a parameter, below which nothing can be said about it
TOP = 5  # trials that importance should be estimated from, at least


@dataclass(frozen=True)
class Trial:
    """One proposal: the keys in which it differs from the file, and Optuna's name for its values."""

    number: int
    settings: Mapping[str, Any]
    params: Mapping[str, Any]
    plain: bool = False  # plain averaging, with what the file demands

    @property
    def recipe(self) -> dict[str, Any]:
        """All but the algorithm."""
        return {key: value for key, value in self.settings.items() if key != "algorithm"}


def library() -> Any:
    """Optuna, or an error that says how to install it."""
    try:
        import optuna
    except ImportError as error:
        raise UserError(f'tuning needs {error.name}: pip install "kairosfl[tune]"') from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


class Proposals:
    """The trials of a search, stored in a journal file."""

    def __init__(self, journal: Path, space: Space, config: RunConfig) -> None:
        self.optuna, self.space, self.config = library(), space, config
        backend = self.optuna.storages.journal.JournalFileBackend(str(journal))
        self.study: optuna.Study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name="kairosfl",
            direction="maximize",
            load_if_exists=True,
        )
        self.trials: list[Trial] = []
        self.told: set[int] = set()
        for each in self.study.get_trials(deepcopy=False):
            unset = {"algorithm": space.demands.plain}  # killed while it was proposed
            self._add(each.number, each.user_attrs.get("settings", unset), each.params)
            if each.state.is_finished():
                self.told.add(each.number)

    def _add(self, number: int, settings: Mapping[str, Any], params: Mapping[str, Any]) -> Trial:
        self.trials.append(
            Trial(number, settings, params, self.space.demands.is_plain(settings["algorithm"]))
        )
        return self.trials[-1]

    def ask(self) -> Trial:
        """The next trial. The first is the file as it is, the second plain averaging with the
        file's recipe.
        """
        number, own = len(self.trials), str(self.config.algorithm)
        if number == 0:
            return self._ask(self.space.own(self.config), {"algorithm": own})
        plain = self.space.demands.plain
        if number == 1 and own != plain:
            return self._ask(self.space.own(self.config, plain), {"algorithm": plain})
        return self._ask()

    def plain_twin(self, best: Trial) -> Trial | None:
        """Plain averaging with the recipe of the best trial, unless it is among the trials."""
        if any(each.plain and each.recipe == best.recipe for each in self.trials):
            return None
        demands = self.space.demands
        given = {**best.params, "algorithm": demands.plain, "add": ""}
        return self._ask(
            given, {**best.recipe, "algorithm": demands.only(best.settings["algorithm"])}
        )

    def _ask(
        self, given: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> Trial:
        number = len(self.trials)
        seed = int(np.random.SeedSequence([self.config.seed, number]).generate_state(1)[0])
        samplers = self.optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            sampler = samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP, multivariate=True, group=True
            )
            self.study.sampler = (
                sampler if given is None else samplers.PartialFixedSampler(dict(given), sampler)
            )
            asked = self.study.ask()
            drawn = self.space.suggest(asked, given)
        asked.set_user_attr("settings", dict(settings or drawn))
        return self._add(asked.number, settings or drawn, asked.params)

    def tell(self, outcome: Outcome) -> None:
        """Record how the first stage of a trial ended, once. One that diverged counts as worse than
        any score.
        """
        if outcome.trial in self.told:
            return
        self.told.add(outcome.trial)
        states = self.optuna.trial.TrialState
        state = {"complete": states.COMPLETE, "diverged": states.PRUNED, "failed": states.FAIL}[
            outcome.state
        ]
        self.study.tell(
            outcome.trial, outcome.score if outcome.state == "complete" else None, state=state
        )

    def importances(self) -> dict[str, float]:
        """How much each parameter mattered for being among the best, as shares of 1; without those
        that few trials had.

        By PED-ANOVA, over the scores of the first stage, in which all trials had the same number of
        rounds; trials that diverged count like the worst of the others.
        """
        states = self.optuna.trial.TrialState
        trials = [
            each
            for each in self.study.get_trials()
            if each.state in (states.COMPLETE, states.PRUNED)
        ]
        scores = [each.value for each in trials if each.value is not None]
        if len(scores) < FEW or min(scores) == max(scores):
            return {}
        copy = self.optuna.create_study(direction="maximize")
        for each in trials:
            value = min(scores) if each.value is None else each.value
            copy.add_trial(
                self.optuna.trial.create_trial(
                    params=each.params, distributions=each.distributions, value=value
                )
            )
        share = max(0.1, min(0.5, TOP / len(trials)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = self.optuna.importance.PedAnovaImportanceEvaluator(target_quantile=share)
            seen = Counter(name for each in trials for name in each.params)
            params = [name for name, count in seen.items() if count >= FEW]
            found: dict[str, float] = self.optuna.importance.get_param_importances(
                copy, evaluator=evaluator, params=params
            )
        return found
