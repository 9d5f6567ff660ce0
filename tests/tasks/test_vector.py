"""What of a model is trained, what is its base, and which models are refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kairosfl.core.layout import Layout
from kairosfl.engines.batched.rows import RowLayout
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import base, base_hash, flatten, layout_of, load, replicas


def task(model: nn.Module) -> Task:
    generator = torch.Generator().manual_seed(0)
    samples = Samples(torch.rand(8, 4, generator=generator), torch.arange(8) % 3)
    return Task(
        model, DataSet("points", samples, samples, 3), Population.from_lists([np.arange(8)])
    )


def network() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    model[0].requires_grad_(False)
    return model


class Counting(nn.Module):
    """Keeps a buffer; with `counts` every forward pass in training changes it."""

    def __init__(self, *, counts: bool, late: bool = False) -> None:
        super().__init__()
        self.out = nn.Linear(4, 3)
        self.register_buffer("seen", None if late else torch.tensor([torch.nan, 0.0]))
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        if self.counts and self.training:
            self.seen = torch.tensor([torch.nan, 0.0]) if self.seen is None else self.seen + 1
        return self.out(x)


def test_the_vector_holds_what_is_trained_in_the_models_order() -> None:
    model = network()
    model[2].bias.requires_grad_(False)
    assert [(entry.name, entry.shape, entry.offset) for entry in layout_of(model).entries] == [
        ("2.weight", (3, 5), 0)
    ]
    assert torch.equal(flatten(model), model[2].weight.detach().reshape(-1))
    before = copy.deepcopy(model)
    load(model, torch.arange(15.0))
    assert torch.equal(model[2].weight, torch.arange(15.0).view(3, 5))
    for name, tensor in base(model).items():
        assert torch.equal(tensor, before.get_parameter(name))
    assert list(base(model)) == ["0.weight", "0.bias", "2.bias"]


def test_tied_weights_are_held_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    whole = layout_of(model)
    assert [entry.name for entry in whole.entries] == ["0.weight", "0.bias", "1.bias"]
    assert len({whole.hash, Layout(whole.entries[::-1]).hash, Layout(whole.entries[:2]).hash}) == 3
    model[0].weight.requires_grad_(False)
    assert [entry.name for entry in layout_of(model).entries] == ["0.bias", "1.bias"]


class Temperature(nn.Module):
    """A parameter without axes between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.scale, self.out = (
            nn.Linear(4, 5),
            nn.Parameter(torch.tensor(1.5)),
            nn.Linear(5, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x).tanh() * self.scale)


def test_a_parameter_without_axes_is_one_number_of_the_vector_and_of_every_row() -> None:
    model = Temperature()
    layout = layout_of(model)
    scale = layout.entries[0]
    assert (scale.name, scale.shape, scale.size) == ("scale", (), 1)
    vectors = torch.arange(3.0 * layout.size).view(3, layout.size)
    assert torch.equal(scale.view(vectors[1]), vectors[1, 0])
    assert torch.equal(scale.view(vectors), vectors[:, 0])
    load(model, vectors[2])
    assert model.scale.shape == ()
    assert torch.equal(flatten(model), vectors[2])

    rows = RowLayout.of(layout)
    packed, unpacked = rows.pack(vectors), torch.empty_like(vectors)
    assert torch.equal(rows.natural(packed, 0), vectors[:, 0])
    rows.unpack(packed, unpacked)
    assert torch.equal(unpacked, vectors)
    rows.subtract(packed, vectors[0], unpacked)
    assert torch.equal(unpacked, vectors - vectors[0])


def test_replicas_share_one_base_and_have_trained_parameters_of_their_own() -> None:
    model = Counting(counts=False)
    model.out.bias.requires_grad_(False)
    first, second = replicas(model, torch.device("cpu"), 2)
    assert first.out.bias is second.out.bias
    assert first.seen is second.seen
    places = {each.out.weight.data_ptr() for each in (model, first, second)}
    assert len(places) == 3
    assert [each.requires_grad for each in first.parameters()] == [True, False]


def test_the_base_hash_is_that_of_names_types_shapes_and_bytes() -> None:
    model = network()
    assert base_hash(nn.Linear(2, 2)) is None
    known = base_hash(model)
    load(model, torch.zeros(18))
    assert base_hash(model) == known == base_hash(copy.deepcopy(model)) == task(model).base_hash
    with torch.no_grad():
        model[0].weight[0, 0] += 1e-6
    assert base_hash(model) != known
    changes = [network() for _ in range(3)]
    changes[0][0].bfloat16()
    changes[1][0].weight = nn.Parameter(
        changes[1][0].weight.detach().T.contiguous(), requires_grad=False
    )
    changes[2][2].bias.requires_grad_(False)
    assert len({known, *map(base_hash, changes)}) == 4
    assert base_hash(Counting(counts=False)) is not None


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
            "The model keeps state outside its trained parameters: a training step changes '1.running_mean' of a "
            "BatchNorm1d; use kairosfl.models.group_norm(model), or freeze_norms(model) to keep pre-trained "
            "statistics.",
        ),
        (
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3).requires_grad_(False)).eval(),
            "The model keeps state outside its trained parameters: a training step changes '1.running_mean' of a "
            "BatchNorm1d; use kairosfl.models.group_norm(model), or freeze_norms(model) to keep pre-trained "
            "statistics.",
        ),
        (
            Counting(counts=True),
            "The model keeps state outside its trained parameters: a training step changes 'seen' of a Counting; "
            "make it a constant, or a parameter that is trained.",
        ),
        (
            Counting(counts=True, late=True),
            "The model keeps state outside its trained parameters: a training step changes 'seen' of a Counting; "
            "make it a constant, or a parameter that is trained.",
        ),
        (
            nn.Sequential(nn.Linear(4, 3)).requires_grad_(False),
            "The model Sequential has only frozen parameters (requires_grad=False): leave at least one to train.",
        ),
        (nn.Tanh(), "The model Tanh has no parameters: leave at least one to train."),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3).double()),
            "The trained parameters are of several types (torch.float32, torch.float64): convert them to one.",
        ),
        (
            nn.Sequential(nn.Linear(4, 2), nn.Linear(3, 3).requires_grad_(False)),
            "The model Sequential fails on a trial batch of 4 training samples: "
            "mat1 and mat2 shapes cannot be multiplied (4x2 and 3x3)",
        ),
    ],
)
def test_models_that_cannot_be_trained_are_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        _ = task(model).layout
    assert str(error.value) == sentence


def test_a_running_statistic_without_a_known_type_is_found_by_a_step() -> None:
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    with pytest.raises(
        UserError, match=r"a training step changes '0\.parametrizations\.weight\.0\._u'"
    ):
        _ = task(model).layout


def test_a_loss_without_a_trained_parameter_is_refused() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.more = nn.Linear(4, 3).requires_grad_(False), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(x)

    with pytest.raises(UserError, match="The loss does not depend on any trained parameter"):
        _ = task(Unused()).layout


def test_the_trial_step_changes_neither_the_model_nor_the_random_numbers() -> None:
    model = nn.Sequential(network(), nn.Dropout(0.5))
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    _ = task(model).layout
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_constant_buffers_are_allowed() -> None:
    assert task(Counting(counts=False)).layout.size == 15
    assert (
        task(
            nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, track_running_stats=False))
        ).layout.size
        == 21
    )
