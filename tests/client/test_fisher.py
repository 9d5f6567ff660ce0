"""The Fisher trace against numpy: softmax regression in closed form, a network by finite
differences, and sampling.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from kairosfl.client import fisher
from kairosfl.client.fisher import fisher_trace
from kairosfl.tasks.vector import flatten, layout_of

DRAW = np.random.default_rng(0)
INPUTS = DRAW.normal(size=(9, 5))


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(1, keepdims=True))
    return powers / powers.sum(1, keepdims=True)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def trace(model: nn.Module, rows: Tensor, draws: object = None) -> float:
    inputs = torch.from_numpy(INPUTS)
    return fisher_trace(model, weights(model), lambda chunk: inputs[chunk], rows, draws)  # type: ignore[arg-type]


def regression() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, 4).double()


def closed_form(model: nn.Linear, rows: np.ndarray) -> np.ndarray:
    """Per sample: ∂ log p_c = (e_c − p) ⊗ (x, 1), so Σ_c p_c ‖·‖² = (1 − ‖p‖²)(‖x‖² + 1)."""
    x = INPUTS[rows]
    p = softmax(x @ model.weight.detach().numpy().T + model.bias.detach().numpy())
    return (1 - (p**2).sum(1)) * ((x**2).sum(1) + 1)


def test_softmax_regression_is_exact() -> None:
    model = regression()
    rows = torch.tensor([0, 3, 4, 8])
    assert trace(model, rows) == pytest.approx(closed_form(model, rows.numpy()).mean(), rel=1e-12)


@pytest.mark.parametrize("numbers", [1, 60, 1 << 20])
def test_the_answer_does_not_depend_on_the_chunks(
    numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fisher, "CPU_NUMBERS", numbers)
    model = regression()
    assert trace(model, torch.arange(9)) == pytest.approx(
        closed_form(model, np.arange(9)).mean(), rel=1e-12
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(1, 2, batch_first=True), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x.unsqueeze(2))[0][:, -1])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(1, 2), nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        state = None
        for column in x.split(1, 1):
            state = self.cell(column, state)
        return self.out(state)


@pytest.mark.parametrize(
    "make",
    [lambda: nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 4)), Recurrent, Cell],
    ids=["dense", "recurrent", "cell"],
)
def test_a_network_by_finite_differences(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(1)
    model = make().double()
    x, inputs, step = flatten(model), torch.from_numpy(INPUTS), 1e-5

    def log_p(vector: Tensor) -> np.ndarray:
        outputs = functional_call(model, dict(layout_of(model).views(vector)), (inputs,))
        return np.log(softmax(outputs.detach().numpy()))

    total = 0.0
    for shift in step * torch.eye(len(x), dtype=torch.float64):
        slopes = (log_p(x + shift) - log_p(x - shift)) / (2 * step)
        total += float((np.exp(log_p(x)) * slopes**2).sum(1).mean())
    assert trace(model, torch.arange(9)) == pytest.approx(total, rel=1e-7)


class Middle:
    """Instead of a generator: for each sample the middle of the interval of uniform numbers that
    means this label.
    """

    def __init__(self, p: np.ndarray, label: int) -> None:
        ends = p.cumsum(1)
        self.values = ends[:, label] - p[:, label] / 2

    def random(self, count: int) -> np.ndarray:
        now, self.values = self.values[:count], self.values[count:]
        return now


def test_sampling_is_unbiased() -> None:
    """The mean over the labels that the uniform numbers stand for, by their probabilities, is the
    exact trace.
    """
    model = regression()
    p = softmax(INPUTS @ model.weight.detach().numpy().T + model.bias.detach().numpy())
    expected = 0.0
    for row in range(9):
        for label in range(4):
            found = trace(model, torch.tensor([row]), Middle(p[row : row + 1], label))
            slope = (np.eye(4)[label] - p[row])[:, None] * np.append(INPUTS[row], 1.0)
            assert found == pytest.approx((slope**2).sum(), rel=1e-12)
            expected += p[row, label] * found / 9
    assert expected == pytest.approx(trace(model, torch.arange(9)), rel=1e-12)


def test_a_sampled_trace_comes_near_the_exact_one_and_repeats() -> None:
    model = regression()
    rows = torch.arange(9).repeat(400)
    sampled = trace(model, rows, np.random.default_rng(1))
    assert sampled == trace(model, rows, np.random.default_rng(1))
    assert sampled == pytest.approx(trace(model, torch.arange(9)), rel=0.05)
