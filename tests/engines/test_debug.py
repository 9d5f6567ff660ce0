"""Engine `debug`: the reference's bits, and one sentence that names what went wrong first."""

from __future__ import annotations

import math
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kairosfl
from kairosfl import Algorithm, Memory, Plan, Reports, Round, Rule, Traits
from kairosfl.core.answers import ANSWERS
from kairosfl.core.checked import checked
from kairosfl.core.recipe import Recipe
from kairosfl.core.rule import acts
from kairosfl.core.run import Setup
from kairosfl.detectors import parse_detectors
from kairosfl.errors import StageError
from kairosfl.rules import parse
from kairosfl.tasks.vector import layout_of

SIZE = 4 * 5 + 5 + 5 * 3 + 3  # of the model below


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(x)))


def samples() -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(0)
    return draw.normal(size=(48, 4)).astype(np.float32), np.arange(48) % 3


def run(
    model: nn.Module | None = None,
    algorithm: Any = "fedavg",
    engine: str = "debug",
    data: Any = None,
    **settings: Any,
) -> kairosfl.History:
    torch.manual_seed(0)
    terms: dict[str, Any] = {"rounds": 3, "cohort": 3, "clients": 6, "batch_size": 4, "epochs": 2}
    terms |= {"partition": "iid", "device": "cpu", "progress": False}
    train = data or samples()
    return kairosfl.simulate(
        model or Net(), train, samples(), algorithm=algorithm, engine=engine, **terms | settings
    )


def failure(*arguments: Any, **settings: Any) -> StageError:
    with pytest.raises(StageError) as caught:
        run(*arguments, **settings)
    return caught.value


# --- what is right stays as it is ---


@pytest.mark.parametrize(
    "text",
    [
        "fedavg",
        "scaffold + fedavgm",
        "pa3fed + fedmut",
        "fedcl + feddyn(alpha=0.1)",
        "alt + moon",
        "fedaware + fedsam",
        "privacy(epsilon=1.0)",
    ],
)
def test_a_run_has_the_bits_of_the_loop(text: str) -> None:
    """FGN decides here, so that detectors are checked as well."""
    plain, debugged = (run(algorithm=text, engine=engine) for engine in ("loop", "debug"))
    assert torch.equal(plain.x, debugged.x)
    assert [row["loss"] for row in plain.metrics] == [row["loss"] for row in debugged.metrics]


def test_a_checked_rule_is_the_rule_in_everything_that_asks() -> None:
    algorithm = parse("scaffold(divisor='steps') + fedcl + fedavgm(beta=0.7)")
    setup = Setup(
        algorithm,
        Recipe(rounds=3, cohort=2),
        clients=6,
        layout=layout_of(Net()),
        detectors=parse_detectors("fgn"),
    )
    both = list(zip(algorithm.rules, checked(setup).algorithm.rules, strict=True))

    for rule, copy in both:
        assert isinstance(copy, type(rule))
        assert str(copy) == str(rule)
        assert copy.traits() == rule.traits()
        assert vars(copy) == vars(rule)
        assert [acts(copy, hook) for hook in ANSWERS] == [acts(rule, hook) for hook in ANSWERS]
    assert str(checked(setup).algorithm) == str(algorithm)
    assert checked(setup).detector_names == setup.detector_names == ("fgn",)


def test_rules_that_declare_themselves_as_until_0_2() -> None:
    with pytest.warns(FutureWarning):
        plain = run(algorithm=Old(), engine="loop")
    assert torch.equal(run(algorithm=Old()).x, plain.x)


@dataclass(frozen=True, kw_only=True)
class Old(Rule):
    kind = "adaptive"
    sees_idle = True

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * 2


# --- rules ---


@dataclass(frozen=True, kw_only=True)
class Wrong(Rule):
    """What the tests below make of it goes wrong in the second round."""

    def late(self, now: Round) -> bool:
        return now.number == 1


class Raises(Wrong):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        if self.late(now):
            return factors * memory.state["velocity"]
        return factors


class NoWeights(Wrong):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * (0 if self.late(now) else 1)


class WrongShape(Wrong):
    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction[:-1] if self.late(now) else direction


class WrongType(Wrong):
    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction.double() if self.late(now) else direction


class Infinite(Wrong):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        direction = direction.clone()
        if self.late(now):
            direction[-2:] = math.nan  # in head.bias
        return direction, memory


class Nobody(Wrong):
    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return None if self.late(now) else plan  # type: ignore[return-value]


class Strangers(Wrong):
    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return replace(reports, ids=reports.ids + 1) if self.late(now) else reports


class FlatState(Wrong):
    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(state={"loss": 1.0}) if self.late(now) else memory  # type: ignore[dict-item]


class TwoVectors(Wrong):
    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        return torch.stack([x, x]) if self.late(now) else x


class WrongPush(Wrong):
    def brief(self, briefs: Any, memory: Memory, now: Round) -> Any:
        return briefs.pushed(now.x[:-1]) if self.late(now) else briefs


@pytest.mark.parametrize(
    ("rule", "stage", "fault"),
    [
        (Nobody, "select", "it does not return a Plan. It got a plan for 3 clients, "),
        (WrongPush, "brief", "it gives a push whose shape or type differs from x. It got briefs "),
        (Strangers, "receive", "it changes who reported; set a weight to 0 in weigh. It got 3 rep"),
        (NoWeights, "weigh", "it returns factors that are not weights: [0.0, 0.0, 0.0]. It got "),
        (
            WrongShape,
            "combine",
            f"it returns torch.float32 of shape [{SIZE - 1}] where the direction is torch.float32 "
            f"of shape [{SIZE}]. It got float32 [{SIZE}], ",
        ),
        (WrongType, "combine", "it returns torch.float64 of shape "),
        (FlatState, "observe", "it returns a state that is not a dictionary of tensors. It got "),
        (
            Infinite,
            "step",
            f"it returns a direction that is not finite (2 of {SIZE} numbers, in head.bias). It ",
        ),
        (TwoVectors, "result", f"it returns torch.float32 of shape [2, {SIZE}] where "),
    ],
)
def test_a_wrong_rule_is_named(rule: type[Rule], stage: str, fault: str) -> None:
    error = failure(algorithm=parse("fedavgm") + rule())
    name = f"{__name__}.{rule.__name__}"

    assert (error.stage, error.round, error.part) == (stage, 2, name)
    assert str(error).startswith(f"Round 2, {stage} of {name}: {fault}")
    assert f"x float32 [{SIZE}]" in str(error)
    assert str(error).count(". ") == 1  # what is wrong, and what went in and came out


def test_what_a_rule_raised_keeps_its_traceback() -> None:
    error = failure(algorithm=Raises())
    cause = error.__cause__
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    number = 1 + next(i for i, line in enumerate(lines) if 'memory.state["velocity"]' in line)

    assert isinstance(cause, KeyError)
    assert traceback.extract_tb(cause.__traceback__)[-1].lineno == number
    assert f"it fails at test_debug.py:{number} with KeyError ('velocity')" in str(error)
    assert "It got float64 [3], state {} and rows {}, 3 reports of clients " in str(error)


def test_the_first_rule_that_is_wrong_is_named() -> None:
    error = failure(algorithm=Algorithm((Infinite(), NoWeights())))
    assert error.part.endswith("NoWeights")  # weigh comes before step


@dataclass(frozen=True, kw_only=True)
class WithARow(Wrong):
    def traits(self) -> Traits:
        return Traits(adapts=True)

    def client(self, now: Round) -> dict[str, Tensor]:
        return {"turns": torch.zeros(2)}

    def observe(self, memory: Memory, now: Round) -> Memory:
        turns = memory.rows["turns"]
        return memory.replace(rows={"turns": turns[1:] if self.late(now) else turns})


def test_rows_are_counted() -> None:
    error = failure(algorithm=WithARow())
    assert "into 'turns' where 3 rows are expected" in str(error)
    assert "rows {turns: float32 [3, 2]}" in str(error)


# --- models ---


class Fails(Net):
    """Fails on a batch in which a sample is large."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.hidden(x)
        if self.training and bool((x > 50).any()):
            hidden = hidden[:, :-1]
        return self.head(hidden)


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.exp(x * x)


def large() -> tuple[np.ndarray, np.ndarray]:
    """One sample has inputs that are larger than any other's."""
    x, y = samples()
    x = x.copy()
    x[40] = 99
    return x, y


def test_a_layer_that_fails_is_named_with_client_epoch_and_batch() -> None:
    error = failure(Fails(), data=large(), rounds=9)

    assert error.stage == "train"
    assert error.part == "layer head (Linear)"
    assert isinstance(error.client, int)
    assert f"Round {error.round}, train of client {error.client}, epoch 1, batch " in str(error)
    assert ": layer head (Linear), which got float32 [4, 4] fails with RuntimeError (" in str(error)
    assert error.__cause__ is not None


def test_the_first_layer_that_overflows_is_named() -> None:
    model = nn.Sequential(nn.Linear(4, 5), Square(), nn.Linear(5, 3))
    error = failure(model, data=large(), rounds=9)

    assert error.part == "layer 1 (Square)"
    assert "the loss is nan: layer 1 (Square) turns float32 [4, 5] into float32 [4, 5]" in str(
        error
    )
    assert "on inputs float32 [4, 4] and targets int64 [4]" in str(error)


def test_infinities_that_never_reach_the_loss_are_no_failure() -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.masked_fill(x < 0, -math.inf)

    model = nn.Sequential(nn.Linear(4, 5), Masked(), nn.Sigmoid(), nn.Linear(5, 3))
    assert len(run(model).metrics) == 3


class Root(nn.Module):
    """Its slope at 0 is infinite, though its value is 0."""

    def forward(self, x: Tensor) -> Tensor:
        return (x * 0).abs().sqrt()


def test_a_gradient_that_is_not_finite_is_named() -> None:
    error = failure(nn.Sequential(nn.Linear(4, 5), Root(), nn.Linear(5, 3)))
    assert "and the gradient of 0.weight float32 [5, 4] is not finite, on inputs " in str(error)
    assert "Round 1, train of client " in str(error)


def test_a_step_that_is_too_long_is_named() -> None:
    def slope(outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.sum(1) * 1e20

    error = failure(nn.Linear(4, 3), lr=1e30, loss=slope, metrics={})
    assert "epoch 1, batch 1: the step makes weights that are not finite (" in str(error)
    assert "lower train.lr, or set train.clip" in str(error)


# --- the command line ---

CONFIG = """
algorithm = "wrong.Late"
[data]
name = "digits"
clients = 8
[model]
name = "logistic"
[train]
rounds = 3
cohort = 2
[run]
engine = "debug"
device = "cpu"
allow = ["wrong"]
"""
RULE = """
from dataclasses import dataclass
from kairosfl import Rule

@dataclass(frozen=True, kw_only=True)
class Late(Rule):
    def weigh(self, factors, memory, now):
        return factors / (1 - now.number // 1 * "1")
"""


def test_the_command_line_prints_the_traceback_and_the_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from kairosfl.cli import app

    (tmp_path / "config.toml").write_text(CONFIG)
    (tmp_path / "wrong.py").write_text(RULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    ended = CliRunner().invoke(app, ["run", "config.toml", "--out", "run"])

    assert ended.exit_code == 2
    assert "Traceback" in ended.output
    assert 'return factors / (1 - now.number // 1 * "1")' in ended.output
    assert (
        "kairosfl: Round 1, weigh of wrong.Late: it fails at wrong.py:8 with TypeError"
        in ended.output
    )
