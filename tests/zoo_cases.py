"""Models and tasks that nobody here wrote, in tiny shapes and with random weights and data: one `Case` each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from kairosfl.tasks.models import freeze_norms, group_norm
from zoo import CLASSES, LENGTH, SIDE, VOCABULARY, library, tiny_hugging, tiny_timm

SAMPLES = 24


@dataclass(frozen=True)
class Case:
    """A model and what it learns.

    Args:
        make: The model.
        inputs: Of all samples.
        targets: Of all samples.
        kind: Of the task.
        needs: The library that the model is from.
        way: How `engine.why` begins.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    targets: Callable[[], Tensor]
    kind: str = "classification"
    needs: str | None = None
    way: str = "stacked by lifting its parameters"


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, *shape, generator=_generator())


def _whole(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, (SAMPLES, *shape), generator=_generator())


IMAGES, SMALL, LABELS = _numbers(3, SIDE, SIDE), _numbers(3, 8, 8), _whole(CLASSES)
TOKENS = _whole(VOCABULARY, LENGTH)


def _masked() -> dict[str, Tensor]:
    """Texts of different lengths, as a tokenizer returns them."""
    tokens = _whole(VOCABULARY, LENGTH)()
    lengths = 2 + torch.arange(SAMPLES) % (LENGTH - 1)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _next() -> Tensor:
    """The next token, the last of each text not counted."""
    return torch.cat([TOKENS()[:, 1:], torch.full((SAMPLES, 1), -100)], 1)


def _hugging(kind: str, head: str = "ForSequenceClassification", **options: Any) -> Callable[[], nn.Module]:
    return lambda: tiny_hugging(kind, head, **options)


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: tiny_timm(name, **options)


def _of(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    """The class or function of another library."""
    return lambda: getattr(library(module), name)(**options)


def _vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return _of("torchvision.models", name, num_classes=CLASSES, **options)


def _segmenting(model: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """torchvision's head on the first layers of its smallest backbone; the answer is a dict with `out`."""

    def make() -> nn.Module:
        models = library("torchvision.models")
        parts = library(f"torchvision.models.segmentation.{model.lower()}")
        layers = models._utils.IntermediateLayerGetter(models.mobilenet_v3_small().features, {"3": "out"})
        made: nn.Module = getattr(parts, model)(layers, getattr(parts, head)(24, CLASSES, **options))
        return made

    return make


def _peft(make: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        peft = library("peft")
        adapted: nn.Module = peft.get_peft_model(make(), getattr(peft, config)(**options))
        return adapted

    return made


def _lora(make: Callable[[], nn.Module], *targets: str, **options: Any) -> Callable[[], nn.Module]:
    return _peft(make, "LoraConfig", r=2, target_modules=list(targets), init_lora_weights=False, **options)


def _still(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Without dropout, whose masks are each engine's own."""

    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return model

    return made


def _grouped(make: Callable[[], nn.Module], groups: int = 4) -> Callable[[], nn.Module]:
    """A few groups: two numbers alone, as 32 groups leave of one pixel, would be normalised to ±1."""
    return lambda: group_norm(make(), groups)


def _frozen(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """With statistics as after pre-training."""

    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean.uniform_(-0.1, 0.1)
                module.running_var.uniform_(0.5, 1.5)
        return freeze_norms(model)

    return made


class UNet(nn.Module):
    """Two levels, a skip connection, BatchNorm as in the original."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.deep = self.block(3, 4), self.block(4, 8)
        self.up, self.out = nn.ConvTranspose2d(8, 4, 2, 2), nn.Sequential(self.block(8, 4), nn.Conv2d(4, CLASSES, 1))

    def block(self, inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(x)
        return self.out(torch.cat([y, self.up(self.deep(F.max_pool2d(y, 2)))], 1))


class Speech(nn.Module):
    """A 1-D CNN on two inputs, a signal and who speaks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(2, 8, 5, 2), nn.Conv1d(8, 8, 3, groups=2)
        self.norm, self.who, self.head = nn.GroupNorm(2, 8), nn.Embedding(5, 8), nn.Linear(8, 1)

    def forward(self, signal: Tensor, speaker: Tensor) -> Tensor:
        x = F.gelu(self.norm(self.conv2(F.gelu(self.conv1(signal)))))
        return self.head(x.amax(2) + self.who(speaker))


class Reader(nn.Module):
    """An LSTM that answers with the score of its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, 6), nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def _tabular(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, outputs))


_TEXT: dict[str, Any] = {"inputs": _masked, "targets": LABELS, "needs": "transformers"}
_LANGUAGE: dict[str, Any] = {"inputs": TOKENS, "targets": _next, "kind": "language", "needs": "transformers"}
_IMAGE: dict[str, Any] = {"inputs": IMAGES, "targets": LABELS, "needs": "timm"}
_VISION: dict[str, Any] = {"inputs": IMAGES, "targets": LABELS, "needs": "torchvision"}
_PIXELS: dict[str, Any] = {"inputs": IMAGES, "targets": _whole(CLASSES, SIDE, SIDE), "kind": "segmentation"}
_LAYERS = {"way": "stacked layer by layer"}
_VIT = zoo._VIT


def _half_lora() -> nn.Module:
    """Adapters in float32 on a base in bfloat16, as large models are loaded."""
    return _lora(lambda: tiny_hugging("Llama", "ForCausalLM").bfloat16(), "q_proj", "v_proj")()


CASES: dict[str, Case] = {
    "timm vit": Case(_timm("vit_tiny_patch16_224", **_VIT), **_IMAGE),
    "timm deit (distilled)": Case(_timm("deit_tiny_distilled_patch16_224", **_VIT), **_IMAGE),
    "timm deit III": Case(zoo.IMAGES["DeiT III"], **_IMAGE),
    "timm beit": Case(_timm("beit_base_patch16_224", init_values=0.1, **_VIT), **_IMAGE),
    "timm convnext": Case(zoo.IMAGES["ConvNeXt"], **_IMAGE),
    "timm swin": Case(zoo.IMAGES["Swin"], **_IMAGE),
    "timm mlp_mixer": Case(
        _of("timm.models.mlp_mixer", "MlpMixer", num_classes=CLASSES, img_size=SIDE, patch_size=8, embed_dim=12,
            num_blocks=2),
        **_IMAGE | _LAYERS,
    ),
    "timm resnet, timm's GroupNorm": Case(zoo.IMAGES["ResNet"], **_IMAGE),
    "timm resnet, group_norm": Case(_grouped(_timm("test_resnet")), **_IMAGE | _LAYERS),
    "timm resnet, freeze_norms": Case(_frozen(_timm("test_resnet")), **_IMAGE),
    "timm efficientnet, group_norm": Case(_grouped(_timm("test_efficientnet")), **_IMAGE),
    "timm efficientnet, freeze_norms": Case(_frozen(_timm("test_efficientnet")), **_IMAGE),
    "timm mobilenetv3, group_norm": Case(_grouped(_timm("mobilenetv3_small_050")), **_IMAGE),
    "timm regnet, group_norm": Case(_grouped(_timm("regnetx_002")), **_IMAGE),
    "timm nfnet": Case(_timm("test_nfnet"), **_IMAGE),
    "timm vit, multilabel": Case(
        _timm("vit_tiny_patch16_224", **_VIT), IMAGES, lambda: _whole(2, CLASSES)().float(), "multilabel", "timm"
    ),
    "torchvision resnet18, group_norm": Case(_grouped(_vision("resnet18"), 32), **_VISION | _LAYERS),
    "torchvision shufflenet, freeze_norms": Case(_frozen(_vision("shufflenet_v2_x0_5")), **_VISION),
    "torchvision mobilenet_v3, group_norm": Case(
        _still(_grouped(_vision("mobilenet_v3_small"))), **_VISION | _LAYERS
    ),
    "torchvision vit": Case(
        _vision(
            "VisionTransformer", image_size=SIDE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=16
        ),
        **_VISION,
    ),
    "torchvision fcn, group_norm": Case(
        _still(_grouped(_segmenting("FCN", "FCNHead"))), needs="torchvision", **_PIXELS | _LAYERS
    ),
    "torchvision deeplab, freeze_norms": Case(
        _still(_frozen(_segmenting("DeepLabV3", "DeepLabHead", atrous_rates=(2, 3)))), needs="torchvision", **_PIXELS
    ),
    "bert classification": Case(_hugging("Bert"), **_TEXT),
    "distilbert classification": Case(_hugging("DistilBert"), **_TEXT),
    "roberta classification": Case(_hugging("Roberta"), **_TEXT),
    "gpt2 classification": Case(_hugging("GPT2"), **_TEXT),
    "bert regression": Case(_hugging("Bert", num_labels=1), _masked, _numbers(), "regression", "transformers"),
    "bert token classification": Case(
        _hugging("Bert", "ForTokenClassification"), _masked, _whole(CLASSES, LENGTH), "language", "transformers"
    ),
    "bert masked language model": Case(_hugging("Bert", "ForMaskedLM"), **_LANGUAGE),
    "gpt2 language model": Case(_hugging("GPT2", "LMHeadModel"), **_LANGUAGE),
    "gpt_neox language model": Case(_hugging("GPTNeoX", "ForCausalLM"), **_LANGUAGE),
    "llama language model": Case(_hugging("Llama", "ForCausalLM"), **_LANGUAGE),
    "t5 summaries": Case(
        _hugging("T5", "ForConditionalGeneration"),
        lambda: {"input_ids": TOKENS(), "decoder_input_ids": TOKENS().flip(1)},
        _next, "language", "transformers",
    ),
    "transformers vit": Case(zoo.IMAGES["ViT of Hugging Face"], IMAGES, LABELS, needs="transformers"),
    "bert with lora": Case(_lora(_hugging("Bert"), "query", "value", task_type="SEQ_CLS"), **_TEXT | {"needs": "peft"}),
    "gpt2 with lora": Case(_lora(_hugging("GPT2", "LMHeadModel"), "c_attn"), **_LANGUAGE | {"needs": "peft"}),
    "llama with lora": Case(
        _lora(_hugging("Llama", "ForCausalLM"), "q_proj", "v_proj"), **_LANGUAGE | {"needs": "peft"}
    ),
    "llama with dora": Case(
        _lora(_hugging("Llama", "ForCausalLM"), "q_proj", "v_proj", use_dora=True), **_LANGUAGE | {"needs": "peft"}
    ),
    "llama in bfloat16 with lora": Case(_half_lora, **_LANGUAGE | {"needs": "peft"}),
    "bert with ia3": Case(
        _peft(
            _hugging("Bert"), "IA3Config", target_modules=["key", "value", "output.dense"],
            feedforward_modules=["output.dense"], init_ia3_weights=False,
        ),
        **_TEXT | {"needs": "peft"},
    ),
    "bert with prompt tuning": Case(
        _peft(_hugging("Bert"), "PromptTuningConfig", task_type="SEQ_CLS", num_virtual_tokens=3),
        **_TEXT | {"needs": "peft", "way": "one client after another"},
    ),
    "u-net, group_norm": Case(_grouped(UNet), **_PIXELS),
    "u-net, freeze_norms": Case(_frozen(UNet), **_PIXELS),
    "lstm": Case(Reader, TOKENS, LABELS, **_LAYERS),
    "1-d cnn, two inputs, one logit": Case(
        Speech, lambda: (_numbers(2, 20)(), _whole(5)()), lambda: _whole(2)().float(), "binary"
    ),
    "tabular regression": Case(_tabular(2), _numbers(5), _numbers(2), "regression", **_LAYERS),
    "tabular multilabel": Case(_tabular(4), _numbers(5), lambda: _whole(2, 4)().float(), "multilabel", **_LAYERS),
}  # fmt: skip


class Embedded(nn.Module):
    """Means of embeddings."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY - 1, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))


def _late() -> Tensor:
    """A token that is not in the vocabulary, only in the last texts."""
    tokens = _whole(VOCABULARY - 1, LENGTH)()
    tokens[-8:] = VOCABULARY - 1
    return tokens


def _flat(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), layer())


def _linear() -> nn.Module:
    return nn.Linear(192, CLASSES)


def _meta() -> nn.Module:
    with torch.device("meta"):
        return _flat(_linear)()


_BATCHNORM = r"changes '.*running_mean' of a BatchNorm\w+; use kairosfl\.models\.group_norm\(model\), or freeze_norms"
REFUSED: dict[str, tuple[Case, str]] = {
    "timm resnet": (Case(_timm("test_resnet"), **_IMAGE), _BATCHNORM),
    "timm efficientnet": (Case(_timm("test_efficientnet"), **_IMAGE), _BATCHNORM),
    "torchvision in evaluation mode": (
        Case(lambda: _vision("shufflenet_v2_x0_5")().eval(), **_VISION),
        _BATCHNORM,
    ),
    "timm vit, images of another size": (
        Case(_timm("vit_tiny_patch16_224", **_VIT), SMALL, LABELS, needs="timm"),
        r"VisionTransformer fails on training inputs of shape \[4, 3, 8, 8\]: Input height",
    ),
    "torchvision detection": (
        Case(
            _grouped(
                _of(
                    "torchvision.models.detection", "ssdlite320_mobilenet_v3_large", weights=None, weights_backbone=None
                )
            ),
            **_VISION,
        ),
        r"^The model SSD fails on training inputs of shape \[4, 3, 32, 32\]: targets",
    ),
    "bert without a head": (
        Case(_hugging("Bert", "Model"), **_TEXT),
        r"returns a BaseModelOutput\w+ with 'last_hidden_state', 'pooler_output'; wrap it to return a tensor",
    ),
    "bert, a column of another name": (
        Case(_hugging("Bert"), lambda: {"ids": TOKENS()}, LABELS, needs="transformers"),
        r"fails on training inputs of shape \{'ids': \[4, 9\]\}: You must specify exactly one of input_ids",
    ),
    "bert in bfloat16": (
        Case(lambda: tiny_hugging("Bert").bfloat16(), **_TEXT),
        r"^The trained parameters are torch\.bfloat16, .*: use model\.float\(\)",
    ),
    "gpt2 language model, classes as targets": (
        Case(_hugging("GPT2", "LMHeadModel"), TOKENS, LABELS, needs="transformers"),
        r"outputs of shape \[4, 9, 31\], but the data has 3 classes",
    ),
    "t5 without texts to write": (
        Case(_hugging("T5", "ForConditionalGeneration"), **_LANGUAGE),
        r"^The model T5\w+ fails on training inputs of shape \[4, 9\]: You must specify",
    ),
    "a token out of range": (
        Case(Embedded, _late, LABELS),
        r"^The model Embedded fails on a batch of shape \[\d, 9\], whole numbers from 0 to 30: index out of range",
    ),
    "sparse gradients": (
        Case(lambda: Embedded(sparse=True), TOKENS, LABELS),
        r"^'embed' of the model has sparse gradients; set its `sparse` to False",
    ),
    "spectral norm": (
        Case(_flat(lambda: nn.utils.parametrizations.spectral_norm(_linear())), SMALL, LABELS),
        r"changes '1\.parametrizations\.weight\.0\._u' of a _SpectralNorm; make it a constant",
    ),
    "lazy layers": (
        Case(_flat(lambda: nn.LazyLinear(3)), SMALL, LABELS),
        r"^'1\.weight' of the model has no shape yet",
    ),
    "no weights": (Case(_meta, SMALL, LABELS), r"^model has no weights, only shapes \(device 'meta'\)"),
    "a scripted model": (
        Case(lambda: torch.jit.script(_flat(_linear)()), SMALL, LABELS),
        r"^The model is a RecursiveScriptModule; give the module that it was made from",
    ),
    "data parallel": (
        Case(lambda: nn.DataParallel(_flat(_linear)()), SMALL, LABELS),
        r"^The model is a DataParallel; give the module that it was made from",
    ),
}
