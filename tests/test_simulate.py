"""`kairosfl.simulate`: every form of data gives the bits of the expert interface, and every mistake
is named.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_model
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner

import kairosfl
from kairosfl import (
    DataSet,
    History,
    Loop,
    Population,
    Recipe,
    Run,
    Samples,
    Setup,
    Task,
    UserError,
    simulate,
)
from kairosfl.cli import app
from kairosfl.detectors import FGN
from kairosfl.rules import FedAvgM, FedCL
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.vector import flatten

GENERATOR = torch.Generator().manual_seed(0)
X = torch.rand(120, 6, generator=GENERATOR)
Y = torch.randint(0, 3, (120,), generator=GENERATOR)
TRAIN, TEST = (X[:90], Y[:90]), (X[90:], Y[90:])
OWNERS = [np.arange(0, 20), np.arange(20, 50), np.arange(50, 90)]
SHORT: dict[str, Any] = {"rounds": 3, "engine": "loop", "device": "cpu", "progress": False}


def net(outputs: int = 3) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, outputs))


def expert(
    clients: Population, *, cohort: int = 3, rounds: int = 3, algorithm: str = "fedavg"
) -> Tensor:
    """The same by hand."""
    task = Task(net(), DataSet("own", Samples(*TRAIN), Samples(*TEST), 3), clients)
    engine = Loop(task)
    recipe = Recipe(rounds=rounds, cohort=cohort)
    setup = Setup(
        kairosfl.parse(algorithm),
        recipe,
        clients=len(clients),
        layout=task.layout,
        detectors=(FGN(),),
    )
    run = Run.start(engine.start(), setup, seed=0)
    for after in kairosfl.drive(kairosfl.rounds(run, setup), engine):
        run = after
    return run.x


class Table:
    """What is used of a Hugging Face data set."""

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self.columns, self.column_names = columns, list(columns)
        self.features = dict.fromkeys(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __iter__(self) -> Any:
        return (
            dict(zip(self.columns, row, strict=True))
            for row in zip(*self.columns.values(), strict=True)
        )

    def __getitem__(self, name: str) -> list[Any]:
        return self.columns[name]


def table(x: Tensor, y: Tensor, **more: list[Any]) -> Table:
    return Table({"features": x.tolist(), "label": y.tolist(), **more})


FORMS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "tensors": lambda: (TRAIN, TEST),
    "arrays": lambda: tuple(
        (x.numpy().astype(np.float64), y.numpy().astype(np.int32)) for x, y in (TRAIN, TEST)
    ),
    "floats as classes": lambda: ((X[:90], Y[:90].double()), TEST),
    "torch": lambda: (TensorDataset(*TRAIN), TensorDataset(*TEST)),
    "pairs": lambda: (list(zip(*TRAIN, strict=True)), list(zip(*TEST, strict=True))),
    "mixed": lambda: (TensorDataset(*TRAIN), TEST),
    "hugging face": lambda: (table(*TRAIN), table(*TEST)),
    "dict": lambda: ({"train": table(*TRAIN), "test": table(*TEST)}, None),
    "data set": lambda: (DataSet("own", Samples(*TRAIN), Samples(*TEST), 3), None),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_gives_the_bits_of_the_expert_interface(form: str) -> None:
    train, test = FORMS[form]()
    known = {"classes": 3} if form == "floats as classes" else {}
    history = simulate(net(), train, test, clients=5, cohort=3, minimum=2, **known, **SHORT)
    data = DataSet("own", Samples(*TRAIN), Samples(*TEST), 3)
    wanted = expert(partition(data, name="dirichlet", clients=5, seed=0, alpha=0.3, minimum=2))
    assert torch.equal(flatten(history.model), wanted)


CLIENTS: dict[str, Callable[[], tuple[Any, Any, dict[str, Any]]]] = {
    "pairs of arrays": lambda: ([(X[i], Y[i]) for i in OWNERS], TEST, {}),
    "data sets": lambda: ([TensorDataset(X[i], Y[i]) for i in OWNERS], TEST, {}),
    "tables": lambda: ([table(X[i], Y[i]) for i in OWNERS], TEST, {}),
    "indices": lambda: (TRAIN, TEST, {"clients": OWNERS}),
    "population": lambda: (TRAIN, TEST, {"clients": Population.from_lists(OWNERS)}),
    "column": lambda: (
        table(*TRAIN, who=[str(c) for c in range(3) for _ in OWNERS[c]]),
        table(*TEST, who=["0"] * 30),
        {"client": "who"},
    ),
}


@pytest.mark.parametrize("form", CLIENTS)
def test_clients_that_are_given(form: str) -> None:
    train, test, more = CLIENTS[form]()
    history = simulate(net(), train, test, **more, **SHORT)
    assert torch.equal(flatten(history.model), expert(Population.from_lists(OWNERS)))
    assert [row["cohort"] for row in history.metrics] == [3] * 3  # all, as there are fewer than 10


def test_clients_may_have_test_samples_of_their_own() -> None:
    tests = [(X[90:100], Y[90:100]), (X[:0], Y[:0]), (X[100:], Y[100:])]
    history = simulate(net(), [(X[i], Y[i]) for i in OWNERS], tests, client_accuracy=True, **SHORT)
    assert json.loads((history.folder / "run.json").read_text())["client_accuracy_on"] == "test"


def test_the_model_is_not_modified_nor_is_torch() -> None:
    model = net()
    before, threads, noise = (
        copy.deepcopy(model.state_dict()),
        torch.get_num_threads(),
        torch.get_rng_state(),
    )
    history = simulate(model, TRAIN, TEST, clients=4, **SHORT)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not torch.equal(flatten(history.model), flatten(model))
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), noise)


def test_the_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = simulate(net(), TRAIN, TEST, clients=4, **SHORT)
    right = history.model(TEST[0]).argmax(1) == TEST[1]
    assert (
        history.accuracy
        == history.metrics[-1]["accuracy"]
        == pytest.approx(float(right.double().mean()))
    )
    assert len(history.frame()) == 3
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert history.frame() == history.metrics
    assert "<html" in history.report(tmp_path / "report.html").read_text()
    saved = history.save(tmp_path / "saved")
    other = net()
    load_model(other, saved / "model.safetensors")
    assert torch.equal(flatten(other), flatten(history.model))
    assert simulate(net(), TRAIN, TEST, clients=4, out=saved, **SHORT).metrics == history.metrics
    with pytest.raises(UserError, match="not an empty directory"):
        history.save(saved)


def test_without_out_nothing_stays() -> None:
    history = simulate(net(), TRAIN, TEST, clients=4, **SHORT)
    folder = history.folder.parent
    assert folder.is_dir()
    del history
    assert not folder.exists()


def test_a_run_that_was_stopped_is_continued_to_the_same_bits(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {
        "clients": 4,
        "algorithm": "scaffold + fedavgm",
        **SHORT,
        "rounds": 6,
    }
    whole = simulate(net(), TRAIN, TEST, **arguments)
    part = simulate(
        net(), TRAIN, TEST, out=tmp_path / "run", on_round=lambda h: len(h.metrics) < 4, **arguments
    )
    assert len(part.metrics) == 4
    refused = CliRunner().invoke(app, ["resume", str(tmp_path / "run")])
    assert refused.exit_code == 2
    assert "continue the run from Python" in " ".join(refused.output.split())

    def broken(history: History) -> None:
        if len(history.metrics) == 5:
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        simulate(net(), TRAIN, TEST, out=tmp_path / "run", on_round=broken, **arguments)
    seen: list[int] = []
    rest = simulate(
        net(),
        TRAIN,
        TEST,
        out=tmp_path / "run",
        on_round=lambda h: seen.append(len(h.metrics)),
        **arguments,
    )
    assert seen == [6]
    assert torch.equal(rest.x, whole.x)
    timeless = [[{**row, "seconds": 0} for row in history.metrics] for history in (rest, whole)]
    assert timeless[0] == timeless[1]

    again = simulate(
        net(), TRAIN, TEST, out=tmp_path / "run", on_round=lambda h: seen.append(0), **arguments
    )
    assert seen == [6]
    assert again.metrics == rest.metrics
    assert torch.equal(flatten(again.model), flatten(whole.model))
    for words in (["compare"], ["report", "-o", str(tmp_path / "report.html")]):
        assert CliRunner().invoke(app, [*words, str(tmp_path / "run")]).exit_code == 0

    longer = simulate(net(), TRAIN, TEST, out=tmp_path / "run", **{**arguments, "rounds": 7})
    assert [row["round"] for row in longer.metrics] == [1, 2, 3, 4, 5, 6, 7]


def test_another_run_is_not_continued(tmp_path: Path) -> None:
    out = tmp_path / "run"
    simulate(net(), TRAIN, TEST, clients=4, out=out, **SHORT)
    with pytest.raises(
        UserError, match=r"contains another run: train.lr = 0.2 \(it began with 0.1\)"
    ):
        simulate(net(), TRAIN, TEST, clients=4, out=out, lr=0.2, **SHORT)
    with pytest.raises(UserError, match="train changed since it began"):
        simulate(net(), (1 - X[:90], Y[:90]), TEST, clients=4, out=out, **SHORT)
    with pytest.raises(UserError, match="rounds = 2 is less than the 3"):
        simulate(net(), TRAIN, TEST, clients=4, out=out, **{**SHORT, "rounds": 2})
    with pytest.raises(UserError, match="its loss was 'cross_entropy' and is 'halved'"):
        simulate(net(), TRAIN, TEST, clients=4, out=out, loss=halved, **SHORT)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    with pytest.raises(UserError, match="is not a run folder"):
        simulate(net(), TRAIN, TEST, clients=4, out=tmp_path / "notes", **SHORT)


def halved(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="none") / 2


def test_on_round_stops_early_and_keeps_the_best_model() -> None:
    kept: list[History] = []

    def watch(history: History) -> bool:
        if history.accuracy >= max([other.accuracy for other in kept], default=0):
            kept.append(history)
        return len(history.metrics) < 5

    history = simulate(net(), TRAIN, TEST, clients=4, on_round=watch, **{**SHORT, "rounds": 50})
    assert len(history.metrics) == 5
    best = kept[-1]
    assert best.accuracy == max(row["accuracy"] for row in history.metrics)
    right = best.model(TEST[0]).argmax(1) == TEST[1]
    assert best.accuracy == pytest.approx(float(right.double().mean()))

    def stop(history: History) -> None:
        raise StopIteration

    assert len(simulate(net(), TRAIN, TEST, clients=4, on_round=stop, **SHORT).metrics) == 1


def test_an_algorithm_in_python_and_one_logit() -> None:
    written, summed = (
        simulate(net(), TRAIN, TEST, clients=4, algorithm=algorithm, **SHORT)
        for algorithm in ("fedavgm + fedcl", FedAvgM() + FedCL())
    )
    assert torch.equal(written.x, summed.x)
    assert len(simulate(net(), TRAIN, TEST, clients=4, algorithm=FedAvgM(), **SHORT).metrics) == 3

    def binary(outputs: Tensor, targets: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(
            outputs.flatten(), targets.to(outputs.dtype), reduction="none"
        )

    history = simulate(
        net(1), (X[:90], Y[:90] > 0), (X[90:], Y[90:] > 0), clients=4, loss=binary, **SHORT
    )
    assert 0 <= history.accuracy <= 1


def test_it_runs_in_a_thread_without_a_terminal_or_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done: list[History] = []

    def work() -> None:
        done.append(simulate(net(), TRAIN, TEST, clients=4, **{**SHORT, "progress": True}))

    for _ in range(2):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        shown = capsys.readouterr()
        assert not shown.out
        assert ("round 3/3" in shown.err) == (len(done) == 1)
        monkeypatch.delitem(sys.modules, "kairosfl.progress", raising=False)
        monkeypatch.delattr(kairosfl, "progress", raising=False)
        for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, "rich.console", None)
    assert torch.equal(done[0].x, done[1].x)


def refuse(words: str, *data: Any, model: Any = None, **arguments: Any) -> None:
    with pytest.raises(UserError, match=words):
        simulate(model or net(), *(data or (TRAIN, TEST)), **{"clients": 4, **SHORT, **arguments})


def test_wrong_data_is_refused() -> None:
    refuse("training data has 90 inputs and 80 targets; give as many", (X[:90], Y[:80]), TEST)
    refuse(
        "training sample 0 has label 0.5; labels must be integers",
        (X[:2], [0.5, 1]),
        TEST,
        classes=3,
    )
    refuse(
        "training targets are float32 of shape .* and test targets int64", (X[:2], [0.5, 1]), TEST
    )
    refuse("training data cannot be made a tensor: .*'cat'", (X[:2], ["cat", "dog"]), TEST)
    refuse(
        r"test targets int64 of shape \[n, 1\]; give them the same", TRAIN, (X[90:], Y[90:, None])
    )
    refuse(r"test inputs have shape \[5\] and training inputs \[6\]", TRAIN, (X[90:, :5], Y[90:]))
    refuse("training data has no samples", (X[:0], Y[:0]), TEST)
    refuse(
        "made a tensor: .*'cat'.* is not a number; give", (X[:2], np.array(["cat", "dog"])), TEST
    )
    refuse("^training sample 0 is a tuple, not a pair", TensorDataset(X[:90], Y[:90], Y[:90]), TEST)
    holes = X.clone()
    holes[5, 2], holes[95, 1] = torch.nan, torch.inf
    refuse(
        "training sample 5 of data set 'own' has an input that is not a finite",
        (holes[:90], Y[:90]),
        TEST,
    )
    refuse(
        "test sample 5 of data set 'own' has an input that is not a finite number; fill",
        TRAIN,
        (holes[90:], Y[90:]),
    )
    refuse("training data cannot be made a tensor", (np.array([object()]), [0]), TEST)
    refuse("training data is a Tensor", X, TEST)
    path = r"training data is 'xray'; if this is a path, give kairosfl.data.load\('folder', path='xray'\)"
    refuse(path, "xray")
    refuse(path, Path("xray"), TEST)
    refuse("test data is 'xray'; if this is a path", TRAIN, "xray")
    refuse("^client 0: the training data is 'a.csv'; if this is a path", ["a.csv", "b.csv"], TEST)
    loader = DataLoader(TensorDataset(*TRAIN), 8)
    refuse(
        "^the training data is a DataLoader, which makes batches; give its data set, loader.dataset",
        loader,
        TEST,
    )
    refuse(
        "^client 0: the training data is a DataLoader, .* give its data set, loader.dataset",
        [loader],
        TEST,
    )
    refuse("^client 1: the training data is a NoneType; give", [TRAIN, None], TEST)
    refuse(
        "18446744073709551615 is too large for a class",
        (X[:2], np.array([0, 2**64 - 1], np.uint64)),
        TEST,
    )
    refuse(
        "^training sample 1 has label 1.*; labels must be integers",
        (X[:2], [0.0, 1e30]),
        TEST,
        classes=3,
    )
    refuse("test is missing", TRAIN)
    refuse("test must be left out", DataSet("own", Samples(*TRAIN), Samples(*TEST), 3), TEST)
    refuse(
        "has the splits 'train', 'valid' and no 'test'",
        {"train": table(*TRAIN), "valid": table(*TEST)},
    )
    refuse(
        "no column 'lable'; did you mean 'label'",
        table(*TRAIN),
        table(*TEST),
        target="lable",
        input="features",
    )
    refuse("client 1 of train has no samples", [TRAIN, (X[:0], Y[:0])], TEST)
    refuse(
        "targets of client 1 are float32 of shape .* and those of client 0 int64",
        [TRAIN, (X[:1], [0.5])],
        TEST,
    )
    refuse(
        r"inputs of client 1 have shape \[5\] and those of client 0 \[6\]",
        [TRAIN, (X[:, :5], Y)],
        TEST,
    )
    refuse("list of 2 clients and test of 1", [TRAIN, TRAIN], [TEST])
    refuse("give both per client", TRAIN, [TEST])
    refuse("client = 'who' is about columns", client="who")
    refuse("client = 'who' is about columns", table(*TRAIN), TEST, client="who")
    refuse("encode = .* is about columns", encode=len)
    refuse(
        "mean must be left out when train is a DataSet",
        DataSet("a", Samples(*TRAIN), Samples(*TEST), 3),
        mean=[0],
    )


def test_wrong_arguments_are_refused() -> None:
    refuse("simulate has no argument 'round'; did you mean 'rounds'", round=3)
    refuse("simulate has no argument 'momentun'; did you mean 'momentum'", momentun=0.9)
    refuse("algorithm = 3 must be text", algorithm=3)
    refuse("on_round = 3 must be a function", on_round=3)
    refuse("train.lr = 'fast' must be a number", lr="fast")
    refuse("train.cohort = 9 is more than the 4 clients", cohort=9)
    refuse(
        "train.cohort = 9 is more than the 3 clients",
        [(X[i], Y[i]) for i in OWNERS],
        TEST,
        cohort=9,
        clients=None,
    )
    refuse(
        "data.partition = 'dirichet' does not exist; did you mean 'dirichlet'", partition="dirichet"
    )
    refuse("cannot be combined with clients that are given", clients=OWNERS, partition="iid")
    refuse("must be a number, a Population, or a list", clients="four")
    refuse(r"clients\[0\] has bool values of shape \[90\]", clients=[np.ones(90, bool)])
    refuse("the population names sample 90", clients=[np.arange(91)])
    refuse("client 1 has no data", clients=[np.arange(9), np.arange(0)])


def test_a_model_that_does_not_fit_is_refused() -> None:
    refuse("model is a str", model="mlp")
    refuse(
        r"inputs of shape \[4, 6\] into outputs of shape \[4, 2\], but the data has 3 classes",
        model=net(2),
    )
    lines = (X[:90], 7 * torch.arange(90)), (X[90:], 7 * torch.arange(30))
    refuse(
        "as many outputs, .*, or pass kind='regression' if the targets are numbers",
        *lines,
        model=net(1),
    )
    refuse(
        r"outputs of shape \[4, 3\], but the targets have shape \[4\]",
        (X[:90], X[:90, 0]),
        (X[90:], X[90:, 0]),
    )
    refuse(r"Linear fails on training inputs of shape \[4, 6\]", model=nn.Linear(5, 3))
    refuse("returns a dict with 'a', 'b'; wrap it", model=Answers())
    refuse(
        r"use kairosfl\.models\.group_norm\(model\)",
        model=nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)),
    )
    refuse(
        r"loss returned \[\] for outputs of shape \[4, 3\] .*; return one number per sample",
        loss=nn.functional.cross_entropy,
    )
    refuse("loss has no gradient: .* detach", loss=lambda outputs, targets: outputs[:, 0].detach())
    refuse(
        r"data\.augment = true needs images \[channels, height, width\] alone as input",
        augment=True,
    )


def test_a_run_without_a_single_good_report_has_failed(tmp_path: Path) -> None:
    for why in (
        "last reason: its loss is nan",
        "log.txt says why",
    ):  # the second time it is continued
        refuse(rf"3 rounds in a row had no good report \({why}\)", loss=lost, out=tmp_path / "run")


def lost(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs[:, 0] * torch.nan


def test_the_models_of_a_history_evaluate() -> None:
    history = simulate(nn.Sequential(net(), nn.Dropout(0.5)), TRAIN, TEST, clients=4, **SHORT)
    right = history.model(TEST[0]).argmax(1) == TEST[1]
    assert history.accuracy == pytest.approx(float(right.double().mean()))


class Answers(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)

    def forward(self, x: Tensor) -> Any:
        return {"a": super().forward(x), "b": x}
