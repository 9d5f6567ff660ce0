"""Clients are evaluated each with its own model: by what each of these models says itself."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import kairosfl
from kairosfl.cli import app
from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Round, Rule
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.tasks import load
from kairosfl.tasks.population import Population
from kairosfl.tasks.prepare import prepare

CLIENTS = 6
DATA = load("digits")
engines = pytest.mark.parametrize("engine", ["loop", "batched"])


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 10))


def population() -> Population:
    """Clients of two classes each, and of unequal sizes; the last one has no test samples."""
    train, test = (np.asarray(part.targets) for part in (DATA.train, DATA.test))
    lists: list[list[np.ndarray]] = [[], []]
    for client in range(CLIENTS):
        for targets, into, most in (
            (train, lists[0], 15 + 9 * client),
            (test, lists[1], 7 + client),
        ):
            labels = (client % 5 * 2, client % 5 * 2 + 1)
            samples = np.flatnonzero(np.isin(targets, labels))
            into.append(samples[client // 5 :: 2][:most])
    lists[1][-1] = lists[1][-1][:0]
    return Population.from_lists(lists[0], tests=lists[1])


def simulated(engine: str = "loop", rounds: int = 3, **settings: object) -> kairosfl.History:
    settings = {"own": ["3.*"], "clients": population(), "cohort": 3, **settings}
    return kairosfl.simulate(
        model(), DATA, rounds=rounds, engine=engine, progress=False, lr=0.3, **settings
    )


def hits(trained: nn.Module, client: int, tests: Population) -> torch.Tensor:
    samples = torch.from_numpy(tests[client].astype(np.int64))
    inputs, targets = DATA.test.read(samples)
    with torch.no_grad():
        outputs: torch.Tensor = trained(prepare(inputs, DATA))
    return outputs.argmax(1) == targets


@engines
def test_the_main_metric_is_that_of_every_clients_own_model(engine: str) -> None:
    history, tests = simulated(engine), population().tests
    assert tests is not None
    correct = [hits(history.model_of(client), client, tests) for client in range(CLIENTS)]
    means = [float(each.double().mean()) for each in correct if len(each)]
    row = history.metrics[-1]
    assert row["accuracy"] == pytest.approx(float(torch.cat(correct).double().mean()))
    assert row["client_accuracy_mean"] == pytest.approx(np.mean(means))
    assert row["client_accuracy_worst"] == pytest.approx(min(means))
    assert all(row["client_accuracy_mean"] is not None for row in history.metrics)
    assert json.loads((history.folder / "run.json").read_text())["client_accuracy_on"] == "test"
    assert json.loads((history.folder / "summary.json").read_text())["verdicts"] == []


@engines
def test_whose_part_is_whose(engine: str) -> None:
    history, first = simulated(engine, rounds=1), model()
    (line,) = (history.folder / "clients.jsonl").read_text().splitlines()
    trained = json.loads(line)["ids"]
    assert 0 < len(trained) < CLIENTS
    for client in range(CLIENTS):
        own = history.model_of(client)
        assert torch.equal(own[1].weight, history.model[1].weight)
        assert torch.equal(own[3].weight, first[3].weight) == (client not in trained)
    assert torch.equal(history.model[3].weight, first[3].weight)
    assert not torch.equal(history.model[1].weight, first[1].weight)


def test_both_engines_agree_and_a_run_goes_on(tmp_path: Path) -> None:
    loop, batched = simulated("loop", 4), simulated("batched", 4)
    simulated("loop", 2, out=tmp_path / "run")
    resumed = simulated("loop", 4, out=tmp_path / "run")
    for client in range(CLIENTS):
        states = [run.model_of(client).state_dict() for run in (loop, batched, resumed)]
        for name, tensor in states[0].items():
            torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5)
            assert torch.equal(states[2][name], tensor)
    assert resumed.metrics[-1]["accuracy"] == loop.metrics[-1]["accuracy"]


def test_without_test_samples_of_their_own_it_is_said() -> None:
    history = simulated(clients=4, rounds=2)
    about, summary = (
        json.loads((history.folder / name).read_text()) for name in ("run.json", "summary.json")
    )
    assert about["client_accuracy_on"] == "train"
    assert "was evaluated on what it trained on" in summary["verdicts"][-1]


def test_during_the_run_there_may_be_no_checkpoint_yet() -> None:
    def ask(history: kairosfl.History) -> None:
        history.model_of(0)

    with pytest.raises(UserError, match=r"there is none of round 1 yet; call it when the run has"):
        simulated(on_round=ask)
    simulated(on_round=lambda history: history.model is None)


def test_the_model_of_a_client_is_exported(tmp_path: Path) -> None:
    tables = {
        "data": {"clients": 4},
        "model": {"own": ["classifier.*"]},
        "train": {"rounds": 2, "cohort": 2},
        "run": {"engine": "loop"},
    }
    run = tmp_path / "run"
    experiment.start(resolve(tables), run)
    (out, plain) = (tmp_path / "client.safetensors", tmp_path / "plain.safetensors")
    words = ["export", str(run), "-o"]
    trained = json.loads((run / "clients.jsonl").read_text().splitlines()[0])["ids"][0]
    answer = CliRunner().invoke(app, [*words, str(out), "--client", str(trained)])
    assert answer.exit_code == 0, answer.output
    assert CliRunner().invoke(app, [*words, str(plain)]).exit_code == 0

    own, shared = load_file(out), load_file(plain)
    assert torch.equal(own["fc1.weight"], shared["fc1.weight"])
    assert not torch.equal(own["classifier.weight"], shared["classifier.weight"])
    loaded = kairosfl.load(run, client=trained)
    assert torch.equal(own["classifier.weight"], loaded.state_dict()["classifier.weight"])
    with pytest.raises(UserError, match=r"client = 4 does not exist; .* has clients 0 to 3\."):
        kairosfl.load(run, client=4)


@dataclass(frozen=True, kw_only=True)
class Beside(Rule):
    """A second model."""

    def traits(self) -> Traits:
        return Traits(keeps={"second"})

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, second_lr=0.1, second_when="batch")


@engines
def test_a_second_model_beside_an_own_part_is_refused(engine: str) -> None:
    with pytest.raises(UserError, match=r"A second model beside a part that stays with each"):
        simulated(engine, algorithm=Beside())
