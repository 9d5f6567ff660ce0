"""Every base algorithm with every subset of the adaptive rules: trains, stays finite, resumes to
the bit, and acts.

Every pair of them is refused with a sentence, or was measured to train, or has its reason in the
documentation. The attacks, the rules against them (guards) and local noise are combined with every
rule: refused with a sentence, or finite and resumed to the bit.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, result, rounds
from kairosfl.core.rule import Algorithm, Rule
from kairosfl.core.run import Run, Setup
from kairosfl.data import load
from kairosfl.detectors import FGN
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse
from kairosfl.rules.attack import Attack
from kairosfl.rules.localprivacy import LocalPrivacy
from kairosfl.rules.robust import Guard
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.partitions import dirichlet
from kairosfl.tasks.task import Task

ROOT = Path(__file__).parents[1]
REFUSALS = json.loads((ROOT / "tests" / "rules" / "refused.json").read_text(encoding="utf-8"))
PAIRWISE = {frozenset(pair.split(" + ")) for pairs in REFUSALS.values() for pair in pairs}
CLIENTS, EPOCHS, ROUNDS, RESUMED = 8, 3, 5, 3
RECIPE = Recipe(rounds=ROUNDS, cohort=3, epochs=EPOCHS, batch_size=16, lr=0.1, momentum=0.5)

# Rules that need a clock are combined in rules/test_on_the_clock.py, those with models of the
# clients' own in rules/test_personal_rules.py.
CLOCKED = {
    name
    for name, rule in RULES.items()
    if issubclass(rule, Rule) and (rule().traits().clock or rule().traits().keeps)
}
# Which rules privacy can be combined with is tested in rules/test_privacy.py.
GUARDS = [name for name, rule in RULES.items() if issubclass(rule, Guard | Attack | LocalPrivacy)]
QUICK = {"limits", "fedavg", "fedavgm", "feddyn", "scaffold"}  # the others are slow tests
PUBLIC = {
    name: rule
    for name, rule in RULES.items()
    if issubclass(rule, Rule)
    and not rule().traits().private
    and name not in GUARDS
    and name not in CLOCKED
}
BASES = ["fedavg", *sorted(name for name, rule in PUBLIC.items() if not rule().traits().adapts)]
# In five rounds of a tiny model: a threshold that some clients fall below, and a score that counts
# in every period.
ADAPTIVE = {
    "fedcl": "fedcl",
    "alt": "alt(a=0.9, b=0.0995)",
    "pa3fed": "pa3fed(always=True)",
    "fedaware": "fedaware",
}
SUBSETS = [subset for size in range(5) for subset in combinations(ADAPTIVE, size)]
# Rules that leave local training and the step alone, with all of the others.
AROUND = {"average": "average(share=0.6)", "budget": "budget(share=0.7)", "uniform": "uniform"}
EQUAL = {"fedmut", "scaffold", "feddyn", "fedcm"}  # they count all clients equally by themselves
REFUSED = {("feddyn", "fedaware"): "feddyn does not follow the global gradient descent rule"}


@cache
def _task() -> Task:
    torch.manual_seed(0)
    digits = load("digits")
    part = Samples(digits.train.inputs[:96], digits.train.targets[:96])
    dataset = DataSet(
        "digits", part, Samples(digits.test.inputs[:32], digits.test.targets[:32]), classes=10
    )
    population = dirichlet(part.targets.numpy(), CLIENTS, 0, alpha=0.5, minimum=4)
    return Task(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)),
        dataset,
        population,
    )


def _start(algorithm: Algorithm) -> tuple[Run, Setup]:
    setup = Setup(algorithm, RECIPE, CLIENTS, _task().layout, detectors=(FGN(),))
    return Run.start(_task().start(), setup, seed=0), setup


def _course(algorithm: Algorithm, run: Run | None = None) -> Iterator[Run]:
    start, setup = _start(algorithm)
    return drive(rounds(run or start, setup), Loop(_task()))


@cache
def _text(base: str, subset: tuple[str, ...]) -> str:
    return " + ".join([base, *(ADAPTIVE[name] for name in subset)])


@cache
def _end(base: str, subset: tuple[str, ...]) -> np.ndarray:
    *_, run = _course(parse(_text(base, subset)))
    return run.x.numpy()


def _refusal(base: str, subset: tuple[str, ...]) -> str | None:
    return next(
        (why for (one, other), why in REFUSED.items() if one == base and other in subset), None
    )


def some_slow(names: Iterable[str]) -> list[Any]:
    """All of them, of which those that are not quick are slow tests."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


def test_there_are_fifteen_times_sixteen() -> None:
    assert len(BASES) == 15
    assert len(SUBSETS) == 16
    assert {*ADAPTIVE, *AROUND} == {name for name, rule in PUBLIC.items() if rule().traits().adapts}


@pytest.mark.parametrize("base", some_slow(BASES))
def test_all_subsets_train_and_resume(base: str, tmp_path: Path) -> None:
    for subset in SUBSETS:
        text = _text(base, subset)
        if why := _refusal(base, subset):
            with pytest.raises(UserError, match=why):
                parse(text)
            continue
        algorithm = parse(text)
        checkpoints = Checkpoints(tmp_path / "-".join(("run", *subset)))
        checkpoints.folder.mkdir()
        runs = []
        for run in _course(algorithm):
            runs.append(run)
            if run.round == RESUMED:
                checkpoints.save(run, {})
        assert all(torch.isfinite(run.x).all() for run in runs), text
        loaded, _ = checkpoints.load(_start(parse(text))[0])
        *_, resumed = _course(parse(text), loaded)
        assert torch.equal(resumed.x, runs[-1].x), text
        _check_acts(text, subset, runs)


def _check_acts(text: str, subset: tuple[str, ...], runs: list[Run]) -> None:
    """Each adaptive rule leaves its mark on the records."""
    records = [run.record for run in runs]
    if "fedcl" in subset:
        assert {record.asked for record in records} != {RECIPE.cohort}, (
            f"{text}: the cohort never changed"
        )
    epochs = torch.cat([record.reports.epochs for record in records])
    if "alt" in subset:
        assert epochs.min() < EPOCHS, f"{text}: nobody was stopped"
    else:
        assert (epochs == EPOCHS).all(), text
    uniform = parse(text).any("uniform")
    plain = [
        torch.ones_like(record.weights) if uniform else record.reports.n.double()
        for record in records
    ]
    same = [
        torch.allclose(record.weights, n / n.sum(), rtol=1e-9)
        for record, n in zip(records, plain, strict=True)
    ]
    assert same[0], f"{text}: nobody has a history in the first round"
    assert all(same) != ("pa3fed" in subset), (
        f"{text}: weights {'equal' if all(same) else 'differ from'} the plain ones"
    )


@pytest.mark.parametrize("base", BASES)
def test_averaging_changes_the_result_alone(base: str) -> None:
    subset = tuple(name for name in ADAPTIVE if (base, name) not in REFUSED)
    algorithm = parse(f"{_text(base, subset)} + {AROUND['average']}")
    *_, run = _course(algorithm)
    assert np.array_equal(run.x.numpy(), _end(base, subset))
    averaged = result(run, _start(algorithm)[1])
    assert torch.isfinite(averaged).all()
    assert not torch.equal(averaged, run.x)


@pytest.mark.parametrize("base", BASES)
def test_a_budget_holds_with_all_other_rules(base: str) -> None:
    subset = tuple(name for name in ADAPTIVE if name != "fedcl" and (base, name) not in REFUSED)
    runs = list(_course(parse(f"{_text(base, subset)} + {AROUND['budget']}")))
    assert sum(run.record.asked for run in runs) == int(0.7 * RECIPE.cohort * ROUNDS)
    assert torch.isfinite(runs[-1].x).all()


@pytest.mark.parametrize("base", BASES)
def test_uniform_weights_hold_with_all_other_rules(base: str) -> None:
    subset = tuple(name for name in ADAPTIVE if name != "pa3fed" and (base, name) not in REFUSED)
    text = f"{_text(base, subset)} + {AROUND['uniform']}"
    if base in EQUAL:
        with pytest.raises(UserError, match=f"{base} counts all clients equally already"):
            parse(text)
        text = _text(base, subset)
    if base == "fedavg":
        with pytest.raises(UserError, match="so uniform has no effect"):
            _start(parse(text))
        text = text.replace("fedaware", "fedaware(project=true)")
    for run in _course(parse(text)):
        assert torch.equal(
            run.record.weights, torch.full_like(run.record.weights, 1 / len(run.record.weights))
        )
        assert torch.isfinite(run.x).all()


@pytest.mark.parametrize("base", [base for base in BASES if base != "feddyn"])
def test_aware_turns_the_step(base: str) -> None:
    """The last step lies along the min-norm direction, not along the base method's own."""
    algorithm, plain = parse(f"{base} + fedaware"), parse(base)
    ends = []
    for made in (plain, algorithm):
        runs = list(_course(made))
        ends.append((runs[-1].x - runs[-2].x).numpy())
    cosine = ends[0] @ ends[1] / np.linalg.norm(ends[0]) / np.linalg.norm(ends[1])
    assert abs(cosine) < 0.999


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("rule", ADAPTIVE)
def test_each_adaptive_rule_changes_the_model(base: str, rule: str) -> None:
    if not _refusal(base, (rule,)):
        assert not np.array_equal(_end(base, (rule,)), _end(base, ()))


def _refused(text: str, pairwise: bool) -> Algorithm | None:
    """The sum of two rules; None if it is refused, as it must be where one of them conflicts with
    the other.
    """
    try:
        algorithm = parse(text)
        assert not pairwise, text
        algorithm.check_whole()
    except UserError as refused:
        if " cannot be combined: " not in str(refused):
            raise
        return None
    return algorithm


@pytest.mark.parametrize("guard", some_slow(GUARDS))
def test_a_guard_and_any_other_rule_train_and_resume_or_are_refused(
    guard: str, tmp_path: Path
) -> None:
    for other in RULES:
        if other == guard or other in CLOCKED:
            continue
        order = sorted(
            (guard, other), key=lambda name: (name != "attack", name == "limits")
        )  # the first, the last one
        text = " + ".join(order)
        algorithm = _refused(text, {guard, other} in PAIRWISE)
        if algorithm is None:
            continue
        checkpoints = Checkpoints(tmp_path / other)
        checkpoints.folder.mkdir()
        for run in _course(algorithm):
            assert torch.isfinite(run.x).all(), text
            if run.round == RESUMED:
                checkpoints.save(run, {})
        loaded, _ = checkpoints.load(_start(parse(text))[0])
        *_, resumed = _course(parse(text), loaded)
        assert torch.equal(resumed.x, run.x), text


MEASURED: dict[str, list[float | str]] = json.loads(
    (ROOT / "benchmarks" / "studies" / "pairs.json").read_text()
)
PAIRS = [f"{one} + {other}" for one, other in combinations(PUBLIC, 2)]
ALARM = 0.10


def test_every_rule_and_every_pair_was_measured() -> None:
    assert list(MEASURED) == ["fedavg", *PUBLIC, *PAIRS]
    assert all(len(values) == 3 for values in MEASURED.values())


@pytest.mark.parametrize("pair", PAIRS)
def test_a_pair_is_refused_or_trains_or_the_documentation_says_why_not(pair: str) -> None:
    """Within ten points of FedAvg (benchmarks/studies/pairs.py), unless docs/rules/compositions.md names
    the pair.
    """
    values = [value for value in MEASURED[pair] if not isinstance(value, str)]
    if not values:
        with pytest.raises(
            UserError, match=rf"^{pair.replace(' + ', ' and ')} cannot be combined: \w.*\.$"
        ):
            _start(parse(pair))
        return
    _start(parse(pair))
    assert len(values) == 3
    below = np.mean(values) < np.mean(np.array(MEASURED["fedavg"], dtype=float)) - ALARM
    page = (ROOT / "docs" / "rules" / "compositions.md").read_text(encoding="utf-8")
    page = page.split("\n## More than ten points below FedAvg")[1]
    assert below == (f"\n| `{pair}` |" in page), f"{pair}: {np.mean(values):.3f}"
