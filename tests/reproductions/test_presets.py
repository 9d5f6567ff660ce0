"""Presets: every paper's task resolves, says where it comes from, and its model fits its data."""

from __future__ import annotations

import pytest

from kairosfl import models, presets
from kairosfl.errors import UserError
from kairosfl.runs.config import resolve

PAPERS = {"fedcl": "FedCL (CriticalFL, KDD 2023)", "pa3fed": "PA3Fed (AAAI 2025)"}
PAPERS |= {"alt": "ALT (Shenaj et al., 2025)", "fedaware": "FedAWARE (AISTATS 2025)"}
TASKS = {
    "alt-cifar10-cnn": 92_626,
    "alt-tinyimagenet-resnet50": 28_272_648,
    "fedaware-agnews-pythia": 18_915_328 + 8192 * 512 + 512 * 4,
    "fedaware-cifar10-cnn": 122_570,
    "fedaware-cifar100-resnet18": 11_220_132,
    "fedcl-cifar10-alexnet": 23_272_266,
    "fedcl-cifar10-vgg11": 9_750_922,
    "fedcl-fashion_mnist-alexnet": 23_271_114,
    "fedcl-fashion_mnist-vgg11": 9_750_922 - 2 * 64 * 9,
    "fedcl-shakespeare-lstm": 3_739_728,
    "pa3fed-cifar10-alexnet": 23_272_266,
    "pa3fed-cifar100-resnet18": 11_220_132,
    "pa3fed-fashion_mnist-alexnet": 23_271_114,
}
# Shape of a sample, classes and vocabulary as the loaders give them.
DATA = {
    "cifar10": ((3, 32, 32), 10, None),
    "cifar100": ((3, 32, 32), 100, None),
    "fashion_mnist": ((1, 32, 32), 10, None),
    "tinyimagenet": ((3, 64, 64), 200, None),
    "shakespeare": ((80,), 80, 80),
    "agnews": ((64,), 4, 8192),
}


def test_every_task_of_the_papers_has_a_preset():
    assert set(TASKS) <= set(presets.names())


@pytest.mark.parametrize("name", TASKS)
def test_a_preset_resolves_and_its_model_fits_its_data(name):
    config = resolve(presets.read(name))
    shape, classes, vocabulary = DATA[config.data.name]
    if config.data.name == "fashion_mnist":
        assert config.data.options == {"size": 32}
    chosen = dict(config.model.options)
    if vocabulary and "vocabulary" in models.options(config.model.name):
        chosen["vocabulary"] = vocabulary
    assert (
        models.describe(config.model.name, shape=shape, classes=classes, **chosen).parameters
        == TASKS[name]
    )


@pytest.mark.parametrize("name", TASKS)
def test_its_first_line_names_the_paper_and_the_section(name):
    line = dict(presets.descriptions())[name]
    paper = name.partition("-")[0]
    assert line.startswith(PAPERS[paper])
    assert "Section" in line or "Appendix" in line or "Setup" in line
    assert str(resolve(presets.read(name)).algorithm) == paper


def test_the_recipes_are_those_of_the_papers():
    def recipe(name):
        config = resolve(presets.read(name))
        t = config.train
        return (
            config.data.clients,
            t.cohort,
            t.rounds,
            t.epochs,
            t.batch_size,
            t.lr,
            t.momentum,
            t.weight_decay,
        )

    assert recipe("pa3fed-cifar10-alexnet") == (50, 10, 250, 5, 32, 0.01, 0.9, 1e-5)
    assert recipe("fedcl-cifar10-vgg11") == (128, 16, 200, 2, 16, 0.01, 0.9, 1e-5)
    assert recipe("alt-cifar10-cnn") == (100, 10, 1000, 10, 64, 0.01, 0.9, 1e-5)
    assert recipe("alt-tinyimagenet-resnet50") == (100, 10, 150, 10, 64, 0.01, 0.9, 1e-5)
    assert recipe("fedaware-cifar10-cnn") == (100, 10, 500, 3, 64, 0.01, 0.0, 0.0)
    assert recipe("fedaware-cifar100-resnet18") == (100, 10, 600, 3, 64, 0.01, 0.0, 0.0)
    assert recipe("fedaware-agnews-pythia") == (100, 10, 300, 3, 64, 0.0001, 0.0, 0.0)


def test_the_learning_rate_of_pa3fed_is_nil_after_forty_rounds():
    train = resolve(presets.read("pa3fed-cifar10-alexnet")).train
    assert train.lr_at(1) == pytest.approx(0.008)
    assert train.lr_at(40) < 0.01 * 1.4e-4


def test_a_misspelt_name_is_answered_with_the_right_one():
    with pytest.raises(UserError, match="did you mean 'fedcl-cifar10-alexnet'"):
        presets.read("fedcl-cifar10-alexnett")
