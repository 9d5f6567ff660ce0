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
    """One proposal: the keys in which it differs from the file, and Optuna's names for them."""

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
        self.optuna = library()
        self.space = space
        self.config = config
        backend = self.optuna.storages.journal.JournalFileBackend(str(journal))
        self.study: optuna.Study = self.optuna.create_study(
            storage=self.optuna.storages.JournalStorage(backend),
            study_name="kairosfl",
            direction="maximize",
            load_if_exists=True,
        )
        self.trials: list[Trial] = []
        self.told: set[int] = set()
        for stored in self.study.get_trials(deepcopy=False):
            unset = {"algorithm": space.demands.plain}  # killed while it was proposed
            self._add(stored.number, stored.user_attrs.get("settings", unset), stored.params)
            if stored.state.is_finished():
                self.told.add(stored.number)

    def _add(self, number: int, settings: Mapping[str, Any], params: Mapping[str, Any]) -> Trial:
        is_plain = self.space.demands.is_plain(settings["algorithm"])
        trial = Trial(number, settings, params, is_plain)
        self.trials.append(trial)
        return trial

    def ask(self) -> Trial:
        """The next trial: first the file as it is, then plain averaging with the file's recipe."""
        algorithm = str(self.config.algorithm)
        plain = self.space.demands.plain
        if not self.trials:
            return self._ask(self.space.own(self.config), {"algorithm": algorithm})
        if len(self.trials) == 1 and algorithm != plain:
            return self._ask(self.space.own(self.config, plain), {"algorithm": plain})
        return self._ask()

    def plain_twin(self, best: Trial) -> Trial | None:
        """Plain averaging with the recipe of the best trial, unless it is among the trials."""
        if any(trial.plain and trial.recipe == best.recipe for trial in self.trials):
            return None
        demands = self.space.demands
        params = {**best.params, "algorithm": demands.plain, "add": ""}
        algorithm = demands.only(best.settings["algorithm"])
        return self._ask(params, {**best.recipe, "algorithm": algorithm})

    def _ask(
        self, params: Mapping[str, Any] | None = None, settings: Mapping[str, Any] | None = None
    ) -> Trial:
        """The next trial; with these parameters and settings, where they are given."""
        number = len(self.trials)
        seed = int(np.random.SeedSequence([self.config.seed, number]).generate_state(1)[0])
        samplers = self.optuna.samplers
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self.optuna.exceptions.ExperimentalWarning)
            sampler = samplers.TPESampler(
                seed=seed, n_startup_trials=STARTUP, multivariate=True, group=True
            )
            self.study.sampler = sampler
            if params is not None:
                self.study.sampler = samplers.PartialFixedSampler(dict(params), sampler)
            proposal = self.study.ask()
            drawn = self.space.suggest(proposal, params)
        if settings is None:
            settings = drawn
        proposal.set_user_attr("settings", dict(settings))
        return self._add(proposal.number, settings, proposal.params)

    def tell(self, outcome: Outcome) -> None:
        """Record how the first stage of a trial ended, once.

        One that diverged counts as worse than any score.
        """
        if outcome.trial in self.told:
            return
        self.told.add(outcome.trial)
        states = self.optuna.trial.TrialState
        if outcome.state == "complete":
            self.study.tell(outcome.trial, outcome.score, state=states.COMPLETE)
        elif outcome.state == "diverged":
            self.study.tell(outcome.trial, None, state=states.PRUNED)
        else:
            self.study.tell(outcome.trial, None, state=states.FAIL)

    def importances(self) -> dict[str, float]:
        """How much each parameter mattered for being among the best, as shares of 1.

        By PED-ANOVA, over the scores of the first stage, in which all trials had the same number of
        rounds; trials that diverged count like the worst of the others. Parameters that few trials
        had are left out.
        """
        states = self.optuna.trial.TrialState
        ended = (states.COMPLETE, states.PRUNED)
        trials = []
        scores = []
        for trial in self.study.get_trials():
            if trial.state in ended:
                trials.append(trial)
                if trial.value is not None:
                    scores.append(trial.value)
        if len(scores) < FEW or min(scores) == max(scores):
            return {}

        copy = self.optuna.create_study(direction="maximize")
        counts: Counter[str] = Counter()
        for trial in trials:
            counts.update(trial.params.keys())
            copy.add_trial(
                self.optuna.trial.create_trial(
                    params=trial.params,
                    distributions=trial.distributions,
                    value=min(scores) if trial.value is None else trial.value,
                )
            )
        share = max(0.1, min(0.5, TOP / len(trials)))
        params = [name for name, count in counts.items() if count >= FEW]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            evaluator = self.optuna.importance.PedAnovaImportanceEvaluator(target_quantile=share)
            importances: dict[str, float] = self.optuna.importance.get_param_importances(
                copy, evaluator=evaluator, params=params
            )
        return importances
