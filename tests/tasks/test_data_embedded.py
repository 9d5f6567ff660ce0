"""Data sets that need no file: digits and synthetic."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from kairosfl.data import load
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import held_out


def test_digits_are_all_there_and_split_once_and_for_all():
    from sklearn.datasets import load_digits

    data = load("digits")
    assert (len(data.train), len(data.test), data.classes, data.shape) == (1437, 360, 10, (1, 8, 8))
    assert data.train.inputs.dtype == torch.float32
    assert float(data.train.inputs.max()) == 1.0
    images, targets = load_digits(return_X_y=True)
    order = np.random.Generator(np.random.Philox(key=0)).permutation(len(targets))
    ours = torch.cat([data.train.inputs, data.test.inputs]).flatten(1).numpy()
    assert np.array_equal(ours, images[order] / 16)
    assert np.array_equal(torch.cat([data.train.targets, data.test.targets]), targets[order])
    assert torch.equal(data.test.targets, load("digits").test.targets)
    assert data.test.targets[:6].tolist() == [9, 1, 0, 1, 0, 8]  # as the first release split them


def test_digits_without_scikit_learn_name_the_mend(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(UserError) as error:
        load("digits")
    assert str(error.value) == (
        "data set 'digits' needs scikit-learn, which is not installed; pip install \"kairosfl[cli]\""
    )


def test_synthetic_classes_lie_around_their_centres():
    data = load("synthetic", samples=20_000, features=5, classes=3, separation=4.0)
    for label in range(3):
        cloud = data.train.inputs[data.train.targets == label]
        assert cloud.mean(dim=0).norm().item() == pytest.approx(4.0, abs=0.1)
        assert cloud.std(dim=0).mean().item() == pytest.approx(1.0, abs=0.03)
    again = load("synthetic", samples=20_000, features=5, classes=3, separation=4.0)
    assert torch.equal(data.train.inputs, again.train.inputs)
    other = load("synthetic", samples=20_000, features=5, classes=3, separation=4.0, seed=1)
    assert not torch.equal(data.train.inputs, other.train.inputs)


def test_synthetic_images_are_uint8_with_the_statistics_they_claim():
    data = load("synthetic", samples=500, test_samples=10, shape=[3, 16, 16], separation=0.0)
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.inputs.shape == (500, 3, 16, 16)
    values = data.train.inputs.double() / 255
    assert values.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert values.std().item() == pytest.approx(
        0.25, abs=0.02
    )  # clipping at two deviations takes 6 %
    assert (data.mean, data.std) == ((0.5,) * 3, (0.25,) * 3)


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("digit", {}, "data.name is 'digit', which does not exist; did you mean 'digits'?"),
        (
            "synthetic",
            {"sample": 3},
            "data.sample is not an option of data set 'synthetic'; did you mean 'samples'?",
        ),
        ("digits", {"size": 32}, "data.size is not an option of data set 'digits'; it has none"),
        ("synthetic", {"classes": 0}, "data.classes is 0; give at least 1."),
        ("synthetic", {"seed": -1}, "data.seed is -1; give 0 or more."),
        ("synthetic", {"samples": "many"}, "data.samples is 'many'; give an integer."),
        ("synthetic", {"samples": True}, "data.samples is True; give an integer."),
        ("synthetic", {"separation": "far"}, "data.separation is 'far'; give a number."),
        (
            "synthetic",
            {"shape": [3, 2.5, 2]},
            "data.shape is [3, 2.5, 2]; give a list of integers.",
        ),
        ("cifar100", {"coarse": 1}, "data.coarse is 1; give true or false."),
        ("agnews", {"tokens": 1}, "data.tokens is 1; give a string."),
        ("folder", {"path": 3}, "data.path is 3; give a path."),
        ("folder", {}, "data.path is missing; data set 'folder' needs it."),
        (
            "synthetic",
            {"shape": [32, 32]},
            "data.shape is [32, 32]; give channels, height and width, such as [3, 32, 32].",
        ),
    ],
)
def test_wrong_names_and_options_are_refused_in_one_sentence(name, options, sentence):
    with pytest.raises(UserError) as error:
        load(name, **options)
    assert str(error.value) == sentence


def test_what_is_held_out_is_in_nobodys_training_data():
    whole = load("digits")
    split = held_out(whole, 0.1)
    assert (len(split.train), len(split.test)) == (1293, 144)
    parts = torch.cat([split.train.inputs, split.test.inputs]).flatten(1)
    assert sorted(map(tuple, parts.tolist())) == sorted(
        map(tuple, whole.train.inputs.flatten(1).tolist())
    )
    assert torch.equal(held_out(whole, 0.1).test.inputs, split.test.inputs)
    keyed = held_out(replace(whole, keys=np.arange(len(whole.train))), 0.1)
    assert np.array_equal(keyed.train.targets, whole.train.targets[torch.from_numpy(keyed.keys)])
    assert np.array_equal(
        keyed.test.targets, whole.train.targets[torch.from_numpy(keyed.test_keys)]
    )
    for part in (0.0001, 0.9999):
        with pytest.raises(UserError, match=r"data\.validation = 0\.\d+ leaves"):
            held_out(whole, part)
