"""LoRA by peft: only adapters are trained, sent and stored; they leave the run in peft's own
format.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner

import kairosfl
import zoo
from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.runs.export import beyond_adapters, has_adapters, save_adapters
from kairosfl.tasks.vector import base, flatten, trained

pytestmark = pytest.mark.skipif("zoo.library('peft') is None", reason="needs peft and transformers")

BERT = {
    "vocab_size": 60,
    "hidden_size": 48,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
}
BERT_BASE = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
}
TASK = """
import torch
import zoo
from test_adapters import news

def task(classifier: bool = False):
    torch.manual_seed(0)
    peft = zoo.library("peft")
    options = peft.LoraConfig(r=2, target_modules=["query", "value"], init_lora_weights=False)
    model = peft.get_peft_model(zoo.tiny_hugging("Bert"), options)
    if classifier:
        model.base_model.model.classifier.requires_grad_(True)
    inputs, targets = news(zoo.VOCABULARY)
    return model, (inputs, targets), (inputs, targets)
"""


def lora(shape: dict[str, int]) -> nn.Module:
    """LoRA on the queries and values of a BERT of this shape, with random weights; the classifier
    is trained, too.
    """
    peft, transformers = zoo.library("peft"), zoo.library("transformers")
    torch.manual_seed(0)
    bert = transformers.BertForSequenceClassification(
        transformers.BertConfig(**shape, num_labels=3)
    )
    options = peft.LoraConfig(
        task_type="SEQ_CLS", r=8, target_modules=["query", "value"], lora_dropout=0.1
    )
    made: nn.Module = peft.get_peft_model(bert, options)
    return made


def news(vocabulary: int, samples: int = 12) -> tuple[dict[str, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(1, vocabulary, (samples, 6), generator=draw)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.arange(samples) % 3


def check(shape: dict[str, int], engine: str, out: Path) -> None:
    """Two rounds of two clients each send, and checkpoints hold, the adapters; all the rest keeps
    its bits.
    """
    model, data = lora(shape), news(shape["vocab_size"])
    before, started = {name: tensor.clone() for name, tensor in base(model).items()}, flatten(model)
    adapters = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
    options = {
        "clients": 3,
        "partition": "iid",
        "cohort": 2,
        "optimizer": "adamw",
        "lr": 0.01,
        "batch_size": 2,
    }
    history = kairosfl.simulate(
        model, data, data, rounds=2, engine=engine, progress=False, out=out, **options
    )
    for row in history.metrics:
        for way in ("bytes_up", "bytes_down"):
            assert adapters <= row[way] / 2 <= 1.1 * adapters
    states = [file.stat().st_size for file in (out / "checkpoint").glob("*.safetensors")]
    assert states
    assert all(adapters <= size <= 1.1 * adapters for size in states)
    assert sum(file.stat().st_size for file in out.rglob("*.safetensors")) == sum(states)
    for trained_model in (model, history.model, kairosfl.load(out, model)):
        now = base(trained_model)
        assert now.keys() == before.keys()
        assert all(torch.equal(now[name], tensor) for name, tensor in before.items())
    assert not torch.equal(flatten(history.model), started)
    assert torch.equal(flatten(kairosfl.load(out, model)), flatten(history.model))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_only_adapters_are_trained_sent_and_stored(engine: str, tmp_path: Path) -> None:
    check(BERT, engine, tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_of_bert_base_only_adapters_are_trained_sent_and_stored(
    engine: str, tmp_path: Path
) -> None:
    check(BERT_BASE, engine, tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run of a task file whose model is BERT with adapters."""
    monkeypatch.chdir(tmp_path)
    Path("news.py").write_text(TASK)
    return trained_run("run")


def trained_run(name: str, *settings: str) -> Path:
    words = ["data.clients=3", "train.cohort=2", "train.rounds=2", "run.engine=loop", *settings]
    said = call(
        "run", "news.py", "--out", name, *(word for each in words for word in ("--set", each))
    )
    assert said.exit_code == 0, said.output
    return Path(name)


def call(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_adapters_leave_in_the_format_of_peft(run: Path) -> None:
    said = call("export", run)
    assert said.stdout == "model: adapter\n", said.output
    assert {file.name for file in Path("adapter").iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
    }
    names = set(load_file("adapter/adapter_model.safetensors"))
    prefix = "base_model.model.bert.encoder.layer.0.attention.self"
    assert f"{prefix}.query.lora_A.weight" in names
    assert all("lora_" in name for name in names)
    ours = kairosfl.load(run)
    torch.manual_seed(0)
    fresh = zoo.tiny_hugging("Bert")
    fresh.load_state_dict(unadapted(ours))
    theirs = zoo.library("peft").PeftModel.from_pretrained(fresh, "adapter").eval()
    inputs, _ = news(zoo.VOCABULARY)
    with torch.no_grad():
        assert torch.equal(theirs(**inputs).logits, ours(**inputs).logits)


def unadapted(model: nn.Module) -> dict[str, Tensor]:
    """The state of the base model, by the names that it has without adapters."""
    state = model.get_submodule("base_model.model").state_dict()
    return {
        name.replace(".base_layer", ""): value
        for name, value in state.items()
        if "lora_" not in name
    }


def test_where_adapters_are_written(run: Path) -> None:
    assert call("export", run, "-o", "here/adapter").exit_code == 0
    again = call("export", run, "-o", "here/adapter")
    assert again.exit_code == 2
    assert (
        again.stderr
        == "kairosfl: here/adapter already exists; choose another name, or overwrite it with --force.\n"
    )
    assert call("export", run, "-o", "here/adapter", "--force").exit_code == 0
    Path("empty").mkdir()
    assert call("export", run, "-o", "empty").exit_code == 0
    assert call("export", run, "-o", "whole.safetensors").exit_code == 0
    whole = kairosfl.load(run).state_dict()
    assert load_file("whole.safetensors").keys() == whole.keys()
    Path("file").write_text("mine")
    assert "file already exists" in call("export", run, "-o", "file").stderr
    forced = call("export", run, "-o", "file", "--force")
    assert forced.exit_code == 2
    assert "file is not a directory" in forced.stderr
    assert Path("file").read_text() == "mine"


def test_onnx_takes_inputs_by_name(run: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    assert call("export", run, "--onnx").output == "model: model.onnx\n"
    inputs, _ = news(zoo.VOCABULARY)
    session = runtime.InferenceSession("model.onnx")
    found = session.run(["output"], {name: value.numpy() for name, value in inputs.items()})[0]
    torch.testing.assert_close(
        torch.from_numpy(found), kairosfl.load(run)(**inputs).logits.detach()
    )


def test_what_is_trained_besides_adapters_is_not_lost(run: Path) -> None:
    more = trained_run("more", "task.options.classifier=true")
    said = call("export", more, "-o", "adapter")
    assert said.exit_code == 2
    assert (
        "'base_model.model.classifier.weight' was trained as well; name it in modules_to_save"
        in said.stderr
    )
    assert not Path("adapter").exists()
    assert call("export", more, "-o", "adapter.safetensors").exit_code == 0


class Scaled(nn.Module):
    """Multiplies by a number that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def test_a_parameter_without_axes_among_adapters(tmp_path: Path) -> None:
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), Scaled(), nn.Linear(6, 3))
    peft = zoo.library("peft")
    options = peft.LoraConfig(r=2, target_modules=["0"], modules_to_save=["2"])
    model = peft.get_peft_model(copy.deepcopy(base), options)
    data = torch.randn(40, 4), torch.arange(40) % 3
    histories = [
        kairosfl.simulate(
            model, data, data, clients=4, cohort=2, rounds=2, engine=engine, progress=False
        )
        for engine in ("loop", "batched")
    ]
    vectors = [flatten(history.model) for history in histories]
    torch.testing.assert_close(vectors[0], vectors[1])
    assert [
        shape for shape in (tuple(each.shape) for each in trained(model).values()) if not shape
    ] == [()]
    save_adapters(histories[1].model, tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    torch.testing.assert_close(again(data[0]), histories[1].model(data[0]), rtol=0, atol=0)


def test_adapters_that_transformers_added(tmp_path: Path) -> None:
    peft, model = zoo.library("peft"), zoo.tiny_hugging("Bert")
    assert not has_adapters(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["query"]))
    assert has_adapters(model)
    assert not beyond_adapters(model)
    data = news(zoo.VOCABULARY)
    history = kairosfl.simulate(
        model, data, data, clients=3, partition="iid", rounds=1, progress=False
    )
    saved = history.save(tmp_path / "saved")
    assert not (saved / "model.safetensors").exists()
    weights = load_file(saved / "adapter" / "adapter_model.safetensors")
    assert sum(map(torch.numel, weights.values())) == len(flatten(model))


def test_a_history_saves_adapters_for_peft(tmp_path: Path) -> None:
    model, data = lora(BERT | {"num_hidden_layers": 1}), news(BERT["vocab_size"])
    history = kairosfl.simulate(
        model, data, data, clients=3, partition="iid", rounds=1, progress=False
    )
    saved = history.save(tmp_path / "saved")
    assert not (saved / "model.safetensors").exists()
    names = load_file(saved / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.classifier.weight" in names
    assert len(names) == len(trained(model))
    assert (
        json.loads((saved / "adapter" / "adapter_config.json").read_text())["peft_type"] == "LORA"
    )


def test_adapters_are_not_loaded_onto_another_base(tmp_path: Path) -> None:
    model, data = lora(BERT | {"num_hidden_layers": 1}), news(BERT["vocab_size"])
    kairosfl.simulate(
        model,
        data,
        data,
        clients=3,
        partition="iid",
        rounds=1,
        progress=False,
        out=tmp_path / "run",
    )
    with torch.no_grad():
        model.get_submodule("base_model.model.bert.embeddings.word_embeddings").weight[3] += 1
    with pytest.raises(
        UserError, match="was trained with other frozen parameters or buffers than the given model"
    ):
        kairosfl.load(tmp_path / "run", model)
    said = call("export", tmp_path / "run")
    assert said.exit_code == 2
    assert "is a run of kairosfl.simulate, which does not store the untrained model" in said.stderr
