"""BatchNorm is refused; the same model with GroupNorm trains on every engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kairosfl
from kairosfl.errors import UserError
from kairosfl.tasks.models import group_norm

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from test_batched import assert_equal, make_briefs, make_task


class Block(nn.Module):
    """As people write it by hand."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-3)
        self.relu = nn.ReLU()
        self.down = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.down(x))


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    layers = [Block(2, 4, 1), Block(4, 6, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def test_a_hand_written_resnet_trains_once_converted():
    model = small_resnet()
    with pytest.raises(UserError, match=r"of a BatchNorm2d; use kairosfl\.models\.group_norm\(model\)\.$"):
        _ = make_task(model, (2, 6, 6)).layout
    task = make_task(kairosfl.models.group_norm(model), (2, 6, 6))
    briefs = make_briefs(task)
    alone = kairosfl.Loop(task).train(briefs)
    assert alone.delta.norm() > 0
    assert_equal(kairosfl.Batched(task).train(briefs), alone, 1e-10)


def test_only_the_norms_of_a_copy_change():
    model = small_resnet()
    model[0].bn1.weight.data.uniform_()
    model[0].bn1.bias.requires_grad_(False)
    model[1].bn2.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    new = group_norm(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert isinstance(model[0].bn1, nn.BatchNorm2d)
    assert {name: value.dtype for name, value in new.named_parameters()} == {
        name: value.dtype for name, value in model.named_parameters()
    }
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
    assert new[0].bn1.weight is not model[0].bn1.weight
    assert not new[0].bn1.bias.requires_grad
    assert (new[0].bn2.eps, new[0].bn1.training, new[1].bn2.training) == (1e-3, True, False)
    assert not list(new.buffers())


@pytest.mark.parametrize(
    ("channels", "groups", "expected"),
    [(64, 32, 32), (32, 32, 16), (48, 32, 24), (6, 32, 3), (4, 32, 2), (3, 32, 1), (7, 32, 1), (64, 1, 1), (10, 4, 2)],
)
def test_groups_divide_the_channels_and_are_no_single_numbers(channels, groups, expected):
    made = group_norm(nn.BatchNorm1d(channels), groups)
    assert isinstance(made, nn.GroupNorm)
    assert made.num_groups == expected
    assert made(torch.randn(5, channels)).abs().max() > 0


def test_a_shared_norm_stays_shared_and_one_without_weights_has_none():
    norm = nn.BatchNorm3d(4, affine=False)
    model = group_norm(nn.Sequential(norm, nn.Sequential(norm), norm, nn.InstanceNorm1d(3)))
    assert model[0] is model[1][0] is model[2]
    assert model[0].weight is None
    assert isinstance(model[3], nn.InstanceNorm1d)


def test_what_cannot_be_converted():
    class Active(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).relu()

    with pytest.raises(UserError, match=r"^'0' is a Active, which is not torch's own; build the model with GroupNorm"):
        group_norm(nn.Sequential(Active(4)))
    with pytest.raises(UserError, match=r"^'0\.weight' of the model has no shape yet; run the model on a batch first"):
        group_norm(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(UserError, match=r"^'0' is a BatchNorm1d of one channel"):
        group_norm(nn.Sequential(nn.BatchNorm1d(1)))
    with pytest.raises(UserError, match="groups = 0 must be 1 or more"):
        group_norm(nn.BatchNorm1d(4), 0)
