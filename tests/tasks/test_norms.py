"""BatchNorm is refused; the same model with GroupNorm trains on every engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import kairosfl
from kairosfl.errors import UserError
from kairosfl.models import freeze_norms, group_norm

sys.path.append(str(Path(__file__).parents[1] / "engines"))
from test_batched import assert_equal, make_briefs, make_task

import zoo


class Block(nn.Module):
    """As people write it by hand."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs, eps=1e-3)
        self.relu = nn.ReLU()
        self.down = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.down(x))


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        Block(2, 4, 1),
        Block(4, 6, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    ]
    return nn.Sequential(*layers).double()


def test_a_hand_written_resnet_trains_once_converted():
    model = small_resnet()
    with pytest.raises(
        UserError,
        match=r"of a BatchNorm2d; use kairosfl\.models\.group_norm\(model\), or freeze_norms\(",
    ):
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
    [
        (64, 32, 32),
        (32, 32, 16),
        (48, 32, 24),
        (6, 32, 3),
        (4, 32, 2),
        (3, 32, 1),
        (7, 32, 1),
        (64, 1, 1),
        (10, 4, 2),
    ],
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

    with pytest.raises(
        UserError,
        match=r"^'0' is a Active, which is not torch's own; build the model with GroupNorm",
    ):
        group_norm(nn.Sequential(Active(4)))
    with pytest.raises(
        UserError,
        match=r"^'0\.weight' of the model has no shape yet; run the model on a batch first",
    ):
        group_norm(nn.Sequential(nn.LazyBatchNorm2d()))
    with pytest.raises(UserError, match=r"^'0' is a BatchNorm1d of one channel"):
        group_norm(nn.Sequential(nn.BatchNorm1d(1)))
    with pytest.raises(UserError, match="groups = 0 must be 1 or more"):
        group_norm(nn.BatchNorm1d(4), 0)


def with_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.uniform_(-1, 1)
            module.running_var.uniform_(0.5, 2)
    return model


def test_frozen_statistics_are_those_of_evaluation_in_training_as_well():
    model = with_statistics(small_resnet())
    model[0].bn1.bias.requires_grad_(False)
    frozen = kairosfl.models.freeze_norms(model)
    x = torch.randn(4, 2, 6, 6, dtype=torch.float64)
    assert torch.allclose(frozen.train()(x), model.eval()(x), rtol=1e-12)
    assert isinstance(model[0].bn1, nn.BatchNorm2d)
    assert frozen.state_dict().keys() == model.state_dict().keys()
    assert [p.requires_grad for p in frozen.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]


@pytest.mark.parametrize("trains", [True, False])
def test_frozen_statistics_train_on_both_engines(trains):
    model = freeze_norms(with_statistics(small_resnet()))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains or "bn" not in name)
    task = make_task(model, (2, 6, 6))
    before = {name: value.clone() for name, value in model.named_buffers()}
    briefs = make_briefs(task)
    alone, engine = kairosfl.Loop(task).train(briefs), kairosfl.Batched(task)
    assert_equal(engine.train(briefs), alone, 1e-10)
    assert engine.stacks
    assert before
    assert all(torch.equal(value, before[name]) for name, value in model.named_buffers())
    moved = {name: view.norm() > 0 for name, view in task.layout.views(alone.delta)}
    assert moved.get("0.bn1.weight", False) == trains


def test_a_norm_without_statistics_has_none_to_freeze():
    with pytest.raises(
        UserError,
        match=r"^'0' has no running statistics to freeze; use kairosfl\.models\.group_norm",
    ):
        freeze_norms(nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)))


@pytest.mark.slow
@pytest.mark.parametrize("convert", [group_norm, freeze_norms])
def test_norms_of_timm_keep_their_activation_and_dropout(convert):
    if zoo.library("timm") is None:
        pytest.skip("needs timm")
    from timm.layers import BatchNormAct2d, FrozenBatchNormAct2d

    norm = with_statistics(
        BatchNormAct2d(4, act_layer=nn.SiLU, drop_layer=lambda: nn.Dropout(1.0), inplace=False)
    )
    constant = FrozenBatchNormAct2d(4)
    made = convert(nn.Sequential(norm, constant))
    assert type(made[1]) is FrozenBatchNormAct2d
    x = torch.randn(3, 4, 5, 5)
    plain = torch.nn.functional.group_norm(x, 2, eps=norm.eps) if convert is group_norm else None
    wanted = norm.eval()(x) if plain is None else torch.nn.functional.silu(plain)
    assert torch.allclose(made.eval()[0](x), wanted, atol=1e-6)
    assert not made.train()[0](x).any()
    assert set(dict(made[0].named_parameters())) == {"weight", "bias"}
