"""Activations fused into the GroupNorm before them: which, and that clients get the updates that they get alone."""

from __future__ import annotations

import pytest
import torch
from test_batched import assert_equal, make_briefs, make_task
from torch import Tensor, nn

from kairosfl.engines.batched import Batched
from kairosfl.engines.batched.layers import StackedGroupNorm
from kairosfl.engines.batched.traced import Traced
from kairosfl.engines.loop import Loop


class Net(nn.Module):
    """Convolution, GroupNorm and what follows it; `twice`: the norm runs twice, or its output has two readers."""

    def __init__(self, *follow: nn.Module, twice: str = "") -> None:
        super().__init__()
        self.conv, self.norm, self.follow = nn.Conv2d(2, 8, 3), nn.GroupNorm(4, 8), nn.Sequential(*follow)
        self.out, self.twice = nn.Linear(8, 3), twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = self.norm(self.norm(x) if self.twice == "run" else x)
        y = self.follow(y) + y if self.twice == "read" else self.follow(y)
        return self.out(y.mean((2, 3)))


CASES = {  # model, activation that is fused, whether the norm finds the gradient of the convolution's bias
    "none": (lambda: Net(), "", True),
    "relu": (lambda: Net(nn.ReLU(inplace=True)), "relu", True),
    "silu": (lambda: Net(nn.SiLU()), "silu", True),
    "silu in place": (lambda: Net(nn.SiLU(inplace=True)), "silu", True),
    "gelu": (lambda: Net(nn.GELU()), "gelu", True),
    "gelu by tanh": (lambda: Net(nn.GELU("tanh")), "", True),
    "only the first": (lambda: Net(nn.SiLU(), nn.GELU()), "silu", True),
    "run twice": (lambda: Net(nn.SiLU(), twice="run"), "", False),
    "read twice": (lambda: Net(nn.SiLU(), twice="read"), "", False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_group_norm(name: str) -> None:
    make, activation, biased = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    (norm,) = (
        module for module in Traced(model, torch.device("cpu")).model.modules() if isinstance(module, StackedGroupNorm)
    )
    assert norm.activation == activation
    assert norm.before == (1 if biased else None)
    task = make_task(model, (2, 6, 6))
    engine = Batched(task)
    assert engine.why == "stacked layer by layer"
    briefs = make_briefs(task)
    assert_equal(engine.train(briefs), Loop(task).train(briefs), 1e-9)
