"""The real data sets, where `KAIROSFL_DATA` holds them."""

import os
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from kairosfl.data import load
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.population import own_tests

FOLDERS = {
    "mnist": "mnist",
    "fashion_mnist": "fashion-mnist",
    "cifar10": "cifar-10-batches-py",
    "cifar100": "cifar-100-python",
    "tinyimagenet": "tiny-imagenet-200",
    "agnews": "ag_news_csv",
    "shakespeare": "shakespeare",
}


@pytest.fixture
def official():
    def loaded(name, **options):
        folder = os.environ.get("KAIROSFL_DATA")
        if not folder or not Path(folder, FOLDERS[name]).is_dir():
            pytest.skip(f"{name} is not in KAIROSFL_DATA")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not the official")
            return load(name, **options)

    return loaded


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "cifar10", "cifar100"])
def test_the_official_pictures_are_complete_and_their_statistics_true(official, name):
    data = official(name)
    assert (len(data.train), len(data.test)) == ((50_000 if "cifar" in name else 60_000), 10_000)
    counts = np.bincount(data.train.targets.numpy(), minlength=data.classes)
    if name != "mnist":
        assert set(counts) == {len(data.train) // data.classes}
    pixels = data.train.inputs.numpy()
    histograms = [np.bincount(pixels[:, c].ravel(), minlength=256) for c in range(pixels.shape[1])]
    levels = np.arange(256) / 255
    for histogram, mean, std in zip(histograms, data.mean, data.std, strict=True):
        share = histogram / histogram.sum()
        found = share @ levels
        assert found == pytest.approx(mean, abs=1e-4)
        assert np.sqrt(share @ (levels - found) ** 2) == pytest.approx(std, abs=1e-4)


def test_the_deviations_of_fedlabs_transforms_are_those_of_an_image_on_average(official):
    pixels = official("cifar10").train.inputs.numpy()[::10] / np.float32(255)
    single = pixels.std((2, 3)).mean(0)
    np.testing.assert_allclose(official("cifar10", fedlab=True).std, single, rtol=0, atol=3e-3)


def test_cifar10_is_ready_in_two_seconds_from_the_cache(official):
    official("cifar10")
    start = time.process_time()
    data = official("cifar10")
    assert time.process_time() - start < 2
    assert data.labels[3] == "cat"


def test_cifar10_is_cut_as_it_always_was(official):
    """Dirichlet 0.1 over 100 clients: a change means that published runs can no longer be repeated."""
    population = partition(
        official("cifar10"), name="dirichlet", clients=100, seed=0, alpha=0.1, minimum=10
    )
    population.check(50_000)
    assert population.sizes.min() >= 10
    assert population.hash() == "053b4d600fbead2ca5226d0659bc0cd6eb4770a0325be6f4b6f5c0daa2eca1a3"


def test_fashion_mnist_resized(official):
    assert official("fashion_mnist", size=32).shape == (1, 32, 32)


def test_tiny_imagenet_has_all_classes(official):
    data = official("tinyimagenet")
    assert (data.classes, data.shape) == (200, (3, 64, 64))
    assert len(set(np.bincount(data.train.targets.numpy()))) == 1
    assert data.labels[0] == "goldfish, Carassius auratus"


def test_agnews(official):
    data = official("agnews")
    assert len(data.test) == 7_600
    assert np.bincount(data.test.targets.numpy()).tolist() == [1900] * 4
    assert int(data.train.inputs.max()) < data.vocabulary


def test_every_role_of_shakespeare_has_training_and_test_data(official):
    data = official("shakespeare")
    population = partition(data, name="natural", clients=None, seed=0)
    tests = own_tests(data, population)
    assert len(population) == len(data.key_names) == data.notes["roles"]
    assert population.sizes.min() >= 1
    assert tests.sizes.min() >= 1
    assert len(data.key_names) > 1000
