"""No sum of two rules is without effect in silence: the model, or the result, is that of neither
rule alone.

Every pair is refused with a sentence, or differs from both rules, or the run says that it does not.
The settings are those at which each rule alone differs from FedAvg.
"""

from __future__ import annotations

from functools import cache
from itertools import combinations, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, result, rounds, verdicts
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN, parse_detectors
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse
from kairosfl.rules.pairs import SAID
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.partitions import natural
from kairosfl.tasks.task import Task

SIZES = (3, 5, 7, 9, 11, 13, 16, 26)
SCALES = (3, 1, 0.5, 1, 2, 1, 1, 0.7)  # of the clients' inputs, so that updates differ in length
RECIPE = Recipe(rounds=4, cohort=5, epochs=2, batch_size=8, lr=0.1)
# Where the defaults would do nothing, or stop the run, in four rounds of a tiny model.
SETTINGS = {
    "fedprox": "fedprox(mu=0.5)",
    "moon": "moon(mu=5)",
    "alt": "alt(a=0.999, threshold='fixed')",
    "pa3fed": "pa3fed(always=True, beta=3)",
    "average": "average(share=0.8)",
    "budget": "budget(share=0.7)",
    "privacy": "privacy(epsilon=1000, delta=1e-3, noise=0.5)",
    "normclipping": "normclipping(norm=0.1)",
    "limits": "limits(weight=1.1, norm=1)",
}
# Rules with models of the clients' own leave the shared one alone, or need an own part; they are
# tested in rules/test_personal_rules.py.
UNCLOCKED = [
    name for name, rule in RULES.items() if not rule().traits().clock and not rule().traits().keeps
]
ALONE = {"bucketing"}  # without effect as long as it is alone, and the run says so
NOTICEABLE = 1e-3  # of the largest change of an entry; rounding makes 1e-7
PAGE = Path(__file__).parents[1] / "docs" / "rules" / "compositions.md"


@cache
def _task() -> Task:
    rng, count = np.random.default_rng(3), sum(SIZES)
    classes = rng.integers(0, 3, count)
    centres = 1.5 * rng.normal(size=(3, 5))
    inputs = (centres[classes] + rng.normal(size=(count, 5))) * np.repeat(SCALES, SIZES)[:, None]
    samples = Samples(torch.tensor(inputs, dtype=torch.float32), torch.tensor(classes))
    dataset = DataSet(
        "blobs", samples, Samples(samples.inputs[:20], samples.targets[:20]), classes=3
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    return Task(model, dataset, natural(np.repeat(np.arange(len(SIZES)), SIZES), None, 0))


def _text(*names: str) -> str:
    """The sum, with lies first and limits last."""
    order = sorted(names, key=lambda name: (name != "attack", name == "limits"))
    return " + ".join(SETTINGS.get(name, name) for name in order)


@cache
def _ended(
    text: str, detector: str = "fgn", engine: type[Loop | Batched] = Loop
) -> tuple[Tensor, list[str]]:
    """How far the model and the result came, and what the run says."""
    setup = Setup(parse(text), RECIPE, len(SIZES), _task().layout, parse_detectors(detector))
    *_, run = drive(rounds(Run.start(_task().start(), setup, seed=0), setup), engine(_task()))
    ends = torch.stack([run.x, result(run, setup)]).double()
    return ends - _task().start().double(), verdicts(run, setup)


def _unless_refused(text: str) -> tuple[Tensor | None, list[str]]:
    try:
        return _ended(text)
    except UserError as refused:
        if " cannot be combined" not in str(refused):
            raise
        return None, []


def _differ(one: Tensor, other: Tensor) -> bool:
    return bool((one - other).abs().max() > NOTICEABLE * other.abs().max())


@pytest.mark.parametrize("name", UNCLOCKED)
def test_each_rule_alone_acts_or_the_run_says_that_it_does_not(name: str) -> None:
    ends, remarks = _ended(_text(name))
    assert _differ(ends, _ended("fedavg")[0]) != (name in ALONE)
    assert any("equals one without it" in remark for remark in remarks) == (name in ALONE)


@pytest.mark.parametrize("name", UNCLOCKED)
def test_each_rule_acts_beside_each_other_one_or_is_refused(name: str) -> None:
    """Of every pair, once: `name` and the rules after it."""
    for other in UNCLOCKED[UNCLOCKED.index(name) + 1 :]:
        ends, remarks = _unless_refused(_text(name, other))
        if ends is None:
            continue
        for single in {name, other} - ALONE:
            assert _differ(ends, _ended(_text(single))[0]), (
                f"{name} + {other} is {single}, and nothing says so"
            )
        if {name, other} & ALONE:
            assert not any("equals one without it" in remark for remark in remarks)


def test_few_pairs_are_merely_said_and_the_page_lists_them() -> None:
    assert len(SAID) <= 10
    page = PAGE.read_text(encoding="utf-8")
    for one, other in SAID:
        assert list(RULES).index(one) < list(RULES).index(other)
    sections = {part.split("\n")[0]: part for part in page.split("\n## ")}
    rows = [
        line for line in sections["Said at the end of a run"].splitlines() if line.startswith("| `")
    ]
    assert [line.split("`")[1] for line in rows] == [f"{one} + {other}" for one, other in SAID]


@pytest.mark.parametrize(("one", "other"), SAID)
def test_what_is_merely_said_is_said_once_in_either_order(one: str, other: str) -> None:
    texts = {"alt": "alt(a=0.999, threshold='fixed', reference='previous')"}
    for names in permutations((one, other)):
        _, remarks = _ended(" + ".join(texts.get(name, name) for name in names))
        assert remarks.count(SAID[one, other]) == 1


def test_moon_and_alt_beside_the_global_model_are_not_warned_of() -> None:
    assert SAID["moon", "alt"] not in _ended(_text("moon", "alt"))[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("fednova + krum", "^fednova and krum cannot be combined: krum takes a single report"),
        ("krum + pa3fed", "^krum and pa3fed cannot be combined: krum takes a single report"),
        ("bucketing + fednova", "divides every update by its client's own steps"),
        ("nnm + fednova", "divides every update by its client's own steps"),
        (
            "scaffold + uniform",
            "^scaffold and uniform cannot be combined: scaffold counts all clients equally already",
        ),
        ("uniform + fedmut", "fedmut counts all clients equally already; leave uniform out"),
        ("krum(keep=0) + uniform", "krum counts all clients equally already"),
        ("fedaware + uniform", "so uniform has no effect; use project = true"),
        (
            "fedcl + fedaware + uniform",
            "^fedcl, fedaware and uniform cannot be combined: .*so uniform has no effect",
        ),
        ("fedavgm + uniform + fedaware(project=false)", "so fedavgm and uniform have no effect"),
        ("fednova + fedaware(project=false)", "so fednova has no effect"),
        (
            "bucketing + fedprox",
            "the mean of bucketing's means is that of all reports; add median, krum",
        ),
        ("attack + bucketing + uniform", "the mean of bucketing's means"),
    ],
)
def test_what_would_have_no_effect_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        _ended(text)


@pytest.mark.parametrize(
    "text",
    [
        "fednova + krum(keep=0)",
        "pa3fed(always=True, beta=3) + krum(keep=3)",
        "scaffold(weights='samples') + uniform",
        "fedprox + fedaware + uniform",
        "fedaware(project=true) + uniform",
        "fedaware(explore=true) + uniform",
        "bucketing + fedprox(mu=0.5) + median",
    ],
)
def test_settings_with_an_effect_are_not_refused(text: str) -> None:
    whole, parts = _ended(text)[0], text.split(" + ")
    for i in range(len(parts)):
        try:
            less = _ended(" + ".join(parts[:i] + parts[i + 1 :]))[0]
        except UserError:  # without this rule another one would have no effect
            continue
        assert _differ(whole, less), f"{text}: without effect: {parts[i]}"


@pytest.mark.parametrize(
    "options", ["", "layers=2", "clusters=3", "adaptive=false", "normalise=false"]
)
def test_pa3fed_reweighs_the_lambda_of_fedaware(options: str) -> None:
    """Of this round's clients, whose sum stays; equal on both engines."""
    text = f"pa3fed(always=True, beta=3) + fedaware({options})"
    assert _differ(_ended(text)[0], _ended(f"fedaware({options})")[0])
    assert not _differ(_ended(text)[0], _ended(text, engine=Batched)[0])


def test_with_a_base_pa3fed_changes_the_length_of_the_step_alone() -> None:
    """In the second round, the first in which clients have a history, both start from the same
    model.
    """
    steps = []
    for text in ("pa3fed(always=True, beta=3) + fedprox + fedaware", "fedprox + fedaware"):
        setup = Setup(parse(text), RECIPE, len(SIZES), _task().layout, detectors=(FGN(),))
        first, second, *_ = drive(
            rounds(Run.start(_task().start(), setup, seed=0), setup), Loop(_task())
        )
        steps.append((second.x - first.x).double())
    assert not torch.allclose(*steps, rtol=1e-3)
    assert torch.cosine_similarity(*steps, dim=0) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "detector", "remark"),
    [
        ("fedcl.released()", "fgn", "use run.detector = 'fgn.released()'"),
        ("fedcl.released()", "fgn.paired()", "use run.detector = 'fgn.released()'"),
        ("fedcl", "fgn.released()", "use fedcl.released()"),
        ("fedcl.released()", "fgn.released()", None),
        ("fedcl", "fgn", None),
        ("fedcl", "fgn.paired()", None),
        ("fedcl(cap=0.5)", "fgn.released()", None),
        ("fedcl.random()", "fgn.released()", None),
    ],
)
def test_halves_of_two_schedules_are_said(
    algorithm: str, detector: str, remark: str | None
) -> None:
    remarks = [
        sentence
        for sentence in _ended(algorithm, detector)[1]
        if "half of the authors' code" in sentence
    ]
    assert len(remarks) == (remark is not None)
    assert all(sentence.endswith(str(remark)) for sentence in remarks)
    assert FGN.released() in parse_detectors("fgn.released()")


def test_there_are_all_pairs() -> None:
    assert {*SETTINGS, *ALONE} <= {*RULES}
    assert len(list(combinations(UNCLOCKED, 2))) == len(UNCLOCKED) * (len(UNCLOCKED) - 1) // 2
