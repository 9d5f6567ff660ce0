"""Feature noise: levels by client, in units of the images, on every part of the data."""

import numpy as np
import pytest
import torch

from kairosfl.errors import UserError
from kairosfl.runs.config import resolve
from kairosfl.runs.prepare import Shared, build_data
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.noise import noisy
from kairosfl.tasks.partitions import client_dirichlet, iid
from kairosfl.tasks.prepare import prepare

TARGETS = np.arange(60) % 3


def images(**changes) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    samples = Samples(
        torch.randint(0, 256, (60, 2, 16, 16), generator=generator, dtype=torch.uint8),
        torch.from_numpy(TARGETS),
    )
    return DataSet("images", samples, samples, 3, **changes)


@pytest.mark.parametrize("scale", [{}, {"mean": (0.5, 0.4), "std": (0.25, 0.5)}])
def test_the_noise_of_a_client_has_its_level(scale):
    data, clients = images(**scale), iid(TARGETS, 5, 0)
    made = noisy(data, clients, 0.2, 1)
    std = torch.tensor(scale.get("std", (1.0, 1.0))).view(-1, 1, 1)
    added = (prepare(made.train.inputs, made) - prepare(data.train.inputs, data)) * std
    for client, own in enumerate(clients):
        assert float(added[own].std()) == pytest.approx(0.05 * client, rel=0.05, abs=1e-6)
        assert abs(float(added[own].mean())) < 0.01
    test = (prepare(made.test.inputs, made) - prepare(data.test.inputs, data)) * std
    for level in range(5):
        assert float(test[level::5].std()) == pytest.approx(0.05 * level, rel=0.05, abs=1e-6)
    assert torch.equal(made.train.inputs, noisy(data, clients, 0.2, 1).train.inputs)
    assert not torch.equal(made.train.inputs, noisy(data, clients, 0.2, 2).train.inputs)


def test_where_noise_makes_no_sense_it_is_refused():
    with pytest.raises(
        UserError, match=r"data\.noise = 0\.1 cannot be added to samples that several clients share"
    ):
        noisy(images(), client_dirichlet(TARGETS, 5, 0, alpha=1.0), 0.1, 0)
    with pytest.raises(UserError, match=r"data\.noise = -1\.0 must be 0 or more"):
        resolve({"data": {"noise": -1.0}})


def test_runs_of_a_sweep_share_the_noisy_data():
    tables = {"data": {"name": "digits", "clients": 10, "noise": 0.5, "partition_seed": 0}}
    shared = Shared()
    first, second = (build_data(resolve(tables | {"seed": seed}), shared)[0] for seed in (0, 1))
    assert first.train is second.train
    clear = build_data(resolve({"data": {"name": "digits", "clients": 10}}))[0]
    assert not torch.equal(first.train.inputs, clear.train.inputs)


def test_images_need_not_be_normalised():
    clear = build_data(resolve({"data": {"name": "digits"}}))[0]
    plain = build_data(resolve({"data": {"name": "digits", "normalise": False}}))[0]
    assert plain.mean == plain.std == ()
    assert torch.equal(plain.train.inputs, clear.train.inputs)
