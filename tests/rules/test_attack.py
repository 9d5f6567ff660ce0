"""The attacks against numpy, and against byzfl where it has the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest
import torch
from test_robust import _byzfl, aggregate

from kairosfl.core.streams import stream
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.rules.attack import liars, quantile
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.hostile import flip_labels
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

VECTORS = np.random.default_rng(5).standard_normal((10, 12))
LYING = np.isin(np.arange(10), liars(0, 10, 0.3))


def mean_with(lies: np.ndarray) -> np.ndarray:
    told = VECTORS.copy()
    told[LYING] = lies
    return np.asarray(told.mean(0))


def test_a_third_lies_and_always_the_same_ones() -> None:
    assert LYING.sum() == 3
    assert len(liars(0, 40, 0.0)) == 0
    assert set(liars(7, 1000, 0.1)) < set(liars(7, 1000, 0.2))


@pytest.mark.parametrize(
    ("lie", "lies"),
    [
        ("sign", -VECTORS[LYING]),
        ("scaled", 10 * VECTORS[LYING]),
        ("inner", -0.5 * VECTORS[~LYING].mean(0)),
        (
            "little",
            VECTORS[~LYING].mean(0)
            + NormalDist().inv_cdf((7 - 3) / 7) * VECTORS[~LYING].std(0, ddof=1),
        ),
        (
            "random",
            np.stack(
                [stream(0, "attack", 0, i).standard_normal(12) for i in np.flatnonzero(LYING)]
            ),
        ),
    ],
)
def test_what_is_sent(lie: str, lies: np.ndarray) -> None:
    text = f"attack(lie='{lie}', share=0.3)"
    np.testing.assert_allclose(aggregate(text, VECTORS), mean_with(lies), atol=1e-14)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_swapped_updates_are_those_of_other_liars(share: float) -> None:
    lying = np.isin(np.arange(10), liars(0, 10, share))
    told = VECTORS.copy()
    told[lying] = VECTORS[lying][stream(0, "swap").permutation(lying.sum())]
    assert not np.array_equal(told, VECTORS)
    weights = np.arange(1, 11)
    found = aggregate(f"attack(lie='swapped', share={share})", VECTORS, n=weights)
    np.testing.assert_allclose(found, weights @ told / weights.sum(), atol=1e-14)


@pytest.mark.parametrize(
    ("lie", "theirs"), [("inner", "InnerProductManipulation"), ("little", "ALittleIsEnough")]
)
def test_the_same_as_byzfl(lie: str, theirs: str) -> None:
    found = getattr(_byzfl("attacks"), theirs)(tau=1.5)(VECTORS[~LYING])
    text = f"attack(lie='{lie}', share=0.3, strength=1.5)"
    np.testing.assert_allclose(aggregate(text, VECTORS), mean_with(found), atol=1e-13)


def test_z_max_is_that_of_the_paper() -> None:
    """50 workers, 24 of them corrupted: s = ⌊50 / 2 + 1⌋ − 24 = 2, z_max = Φ⁻¹((26 − 2) / 26) =
    1.43 (Section 3).
    """
    assert quantile(50, 24) == pytest.approx(NormalDist().inv_cdf(24 / 26))
    assert quantile(1, 1) == pytest.approx(0)


def test_nobody_lies_without_a_share() -> None:
    assert np.array_equal(aggregate("attack(share=0)", VECTORS), aggregate("fedavg", VECTORS))


def test_an_unknown_lie_is_refused() -> None:
    with pytest.raises(UserError, match="attack: lie = 'flip' is not allowed; use one of 'sign'"):
        parse("attack(lie='flip')")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "attack(share=1.0)",
            "attack: share = 1.0 is not allowed; use at least 0 and below 1; only with lie='swapped'",
        ),
        ("attack(lie='swapped', share=1.1)", "share = 1.1 is not allowed"),
        (
            "attack(lie='swapped', strength=2.0)",
            "strength = 2.0 is not allowed; leave it out: swapped updates stay",
        ),
    ],
)
def test_options_that_make_no_sense(text: str, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse(text)


def test_it_comes_first() -> None:
    with pytest.raises(
        UserError, match="attack must be written before normclipping, which acts on reports too"
    ):
        aggregate("normclipping + attack", VECTORS)
    aggregate("fedavgm + attack + normclipping", VECTORS)


def test_a_deployed_server_refuses_it(tmp_path: Path) -> None:
    deploy = pytest.importorskip("flwr") and pytest.importorskip("kairosfl.deploy")
    (tmp_path / "run.toml").write_text('algorithm = "fedavg + attack"\n[deploy]\nclients = 10\n')
    with pytest.raises(UserError, match="attack is for simulations only"):
        deploy.load(tmp_path / "run.toml")


def test_flipped_labels_are_those_of_the_liars_alone() -> None:
    samples = Samples(torch.zeros(8, 2), torch.tensor([0, 1, 2, 3, 0, 1, 2, 3]))
    clients = Population.from_lists([np.array([0, 5]), np.array([1, 2, 3]), np.array([4, 6, 7])])
    task = Task(torch.nn.Linear(2, 4), DataSet("own", samples, samples, classes=4), clients)
    flipped = flip_labels(task, [0, 2])
    assert flipped.dataset.train.targets.tolist() == [3, 1, 2, 3, 3, 2, 1, 0]
    assert (
        flipped.dataset.test.targets.tolist()
        == samples.targets.tolist()
        == [0, 1, 2, 3, 0, 1, 2, 3]
    )
    assert replace(flipped, dataset=task.dataset).clients is task.clients
