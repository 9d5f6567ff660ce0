"""Models and tasks that nobody here wrote, in tiny shapes and with random weights and data: one
`Case` each.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.models import freeze_norms, group_norm
from zoo import (
    CLASSES,
    LENGTH,
    RESNET,
    SIDE,
    SWIN,
    VIT,
    VOCABULARY,
    library,
    timm_group_norm,
    tiny_hugging,
    tiny_timm,
)

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
        tolerance: Of updates in float32, relative to their norm.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    targets: Callable[[], Tensor]
    kind: str = "classification"
    needs: str | None = None
    way: str = "stacked by lifting its parameters"
    tolerance: float = 1e-5


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def _numbers(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(SAMPLES, *shape, generator=_generator())


def whole(high: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(high, (SAMPLES, *shape), generator=_generator())


IMAGES, SMALL, LABELS = _numbers(3, SIDE, SIDE), _numbers(3, 8, 8), whole(CLASSES)
TOKENS = whole(VOCABULARY, LENGTH)


def _masked() -> dict[str, Tensor]:
    """Texts of different lengths, as a tokenizer returns them."""
    tokens = whole(VOCABULARY, LENGTH)()
    lengths = 2 + torch.arange(SAMPLES) % (LENGTH - 1)
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return {"input_ids": tokens * mask, "attention_mask": mask}


def _next() -> Tensor:
    """The next token, the last of each text not counted."""
    return torch.cat([TOKENS()[:, 1:], torch.full((SAMPLES, 1), -100)], 1)


def hugging(
    kind: str, head: str = "ForSequenceClassification", **options: Any
) -> Callable[[], nn.Module]:
    return lambda: tiny_hugging(kind, head, **options)


def of_timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: tiny_timm(name, **options)


def part(module: str, name: str, **options: Any) -> Callable[[], nn.Module]:
    """The class or function of another library."""
    return lambda: getattr(library(module), name)(**options)


def vision(name: str, **options: Any) -> Callable[[], nn.Module]:
    return part("torchvision.models", name, num_classes=CLASSES, **options)


def _segmenting(model: str, head: str, **options: Any) -> Callable[[], nn.Module]:
    """torchvision's head on the first layers of its smallest backbone; the answer is a dict with
    `out`.
    """

    def make() -> nn.Module:
        models = library("torchvision.models")
        parts = library(f"torchvision.models.segmentation.{model.lower()}")
        layers = models._utils.IntermediateLayerGetter(
            models.mobilenet_v3_small().features, {"3": "out"}
        )
        made: nn.Module = getattr(parts, model)(
            layers, getattr(parts, head)(24, CLASSES, **options)
        )
        return made

    return make


def _peft(make: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        peft = library("peft")
        adapted: nn.Module = peft.get_peft_model(make(), getattr(peft, config)(**options))
        return adapted

    return made


def _lora(make: Callable[[], nn.Module], *targets: str, **options: Any) -> Callable[[], nn.Module]:
    return _peft(
        make, "LoraConfig", r=2, target_modules=list(targets), init_lora_weights=False, **options
    )


def _recomputed(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Its blocks compute their activations again in the backward pass, as transformers offers."""

    def made() -> nn.Module:
        model: Any = make()
        model.gradient_checkpointing_enable()
        return model  # type: ignore[no-any-return]

    return made


def _still(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Without dropout, whose masks are each engine's own."""

    def made() -> nn.Module:
        model = make()
        for module in model.modules():
            if isinstance(module, nn.modules.dropout._DropoutNd):
                module.p = 0.0
        return model

    return made


def grouped(make: Callable[[], nn.Module], groups: int = 4) -> Callable[[], nn.Module]:
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
        self.up, self.out = (
            nn.ConvTranspose2d(8, 4, 2, 2),
            nn.Sequential(self.block(8, 4), nn.Conv2d(4, CLASSES, 1)),
        )

    def block(self, inputs: int, outputs: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(True)
        )

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
        self.embed, self.lstm = (
            nn.Embedding(VOCABULARY, 6),
            nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0][:, -1])


def _tabular(outputs: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(5, 8), nn.SiLU(), nn.LayerNorm(8), nn.Linear(8, outputs))


TEXT: dict[str, Any] = {"inputs": _masked, "targets": LABELS, "needs": "transformers"}
LANGUAGE: dict[str, Any] = {
    "inputs": TOKENS,
    "targets": _next,
    "kind": "language",
    "needs": "transformers",
}
IMAGE: dict[str, Any] = {"inputs": IMAGES, "targets": LABELS, "needs": "timm"}
VISION: dict[str, Any] = {"inputs": IMAGES, "targets": LABELS, "needs": "torchvision"}
_PIXELS: dict[str, Any] = {
    "inputs": IMAGES,
    "targets": whole(CLASSES, SIDE, SIDE),
    "kind": "segmentation",
}
_LAYERS = {"way": "stacked layer by layer"}


def _half_lora() -> nn.Module:
    """Adapters in float32 on a base in bfloat16, as large models are loaded."""
    return _lora(lambda: tiny_hugging("Llama", "ForCausalLM").bfloat16(), "q_proj", "v_proj")()


CASES: dict[str, Case] = {
    "timm vit": Case(of_timm("vit_tiny_patch16_224", **VIT), **IMAGE),
    "timm deit (distilled)": Case(of_timm("deit_tiny_distilled_patch16_224", **VIT), **IMAGE),
    "timm deit III": Case(of_timm("deit3_small_patch16_224", init_values=0.1, **VIT), **IMAGE),
    "timm beit": Case(of_timm("beit_base_patch16_224", init_values=0.1, **VIT), **IMAGE),
    "timm convnext": Case(of_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 8, 8, 12)), **IMAGE),
    "timm swin": Case(of_timm("swin_tiny_patch4_window7_224", **SWIN), **IMAGE),
    "timm mlp_mixer": Case(
        part("timm.models.mlp_mixer", "MlpMixer", num_classes=CLASSES, img_size=SIDE, patch_size=8, embed_dim=12,
            num_blocks=2),
        **IMAGE | _LAYERS,
    ),
    "timm resnet, timm's GroupNorm": Case(of_timm("resnet18", norm_layer=timm_group_norm, **RESNET), **IMAGE),
    "timm efficientnet, timm's GroupNorm": Case(of_timm("test_efficientnet_gn"), **IMAGE),
    "timm resnet, group_norm": Case(grouped(of_timm("test_resnet")), **IMAGE | _LAYERS),
    "timm resnet, freeze_norms": Case(_frozen(of_timm("test_resnet")), **IMAGE),
    "timm efficientnet, group_norm": Case(grouped(of_timm("test_efficientnet")), **IMAGE),
    "timm efficientnet, freeze_norms": Case(_frozen(of_timm("test_efficientnet")), **IMAGE),
    "timm mobilenetv3, group_norm": Case(grouped(of_timm("mobilenetv3_small_050")), **IMAGE),
    "timm regnet, group_norm": Case(grouped(of_timm("regnetx_002")), **IMAGE),
    "timm nfnet": Case(of_timm("test_nfnet"), **IMAGE),
    "timm vit, multilabel": Case(
        of_timm("vit_tiny_patch16_224", **VIT), IMAGES, lambda: whole(2, CLASSES)().float(), "multilabel", "timm"
    ),
    "torchvision resnet18, group_norm": Case(grouped(vision("resnet18"), 32), **VISION | _LAYERS),
    "torchvision shufflenet, freeze_norms": Case(_frozen(vision("shufflenet_v2_x0_5")), **VISION),
    "torchvision mobilenet_v3, group_norm": Case(
        _still(grouped(vision("mobilenet_v3_small"))), **VISION | _LAYERS
    ),
    "torchvision vit": Case(
        vision(
            "VisionTransformer", image_size=SIDE, patch_size=8, num_layers=2, num_heads=2, hidden_dim=12, mlp_dim=16
        ),
        **VISION,
    ),
    "torchvision fcn, group_norm": Case(
        _still(grouped(_segmenting("FCN", "FCNHead"))), needs="torchvision", **_PIXELS | _LAYERS
    ),
    "torchvision deeplab, freeze_norms": Case(
        _still(_frozen(_segmenting("DeepLabV3", "DeepLabHead", atrous_rates=(2, 3)))), needs="torchvision", **_PIXELS
    ),
    "bert classification": Case(hugging("Bert"), **TEXT),
    "distilbert classification": Case(hugging("DistilBert"), **TEXT),
    "roberta classification": Case(hugging("Roberta"), **TEXT),
    "gpt2 classification": Case(hugging("GPT2"), **TEXT),
    "gpt_neox classification": Case(hugging("GPTNeoX"), **TEXT),
    "llama classification": Case(hugging("Llama"), **TEXT),
    "bert regression": Case(hugging("Bert", num_labels=1), _masked, _numbers(), "regression", "transformers"),
    "bert token classification": Case(
        hugging("Bert", "ForTokenClassification"), _masked, whole(CLASSES, LENGTH), "language", "transformers"
    ),
    "bert masked language model": Case(hugging("Bert", "ForMaskedLM"), **LANGUAGE),
    "gpt2 language model": Case(hugging("GPT2", "LMHeadModel"), **LANGUAGE),
    "gpt_neox language model": Case(hugging("GPTNeoX", "ForCausalLM"), **LANGUAGE),
    "llama language model": Case(hugging("Llama", "ForCausalLM"), **LANGUAGE),
    "t5 summaries": Case(
        hugging("T5", "ForConditionalGeneration"),
        lambda: {"input_ids": TOKENS(), "decoder_input_ids": TOKENS().flip(1)},
        _next, "language", "transformers",
    ),
    "transformers vit": Case(hugging("ViT", "ForImageClassification"), IMAGES, LABELS, needs="transformers"),
    "bert with lora": Case(_lora(hugging("Bert"), "query", "value", task_type="SEQ_CLS"), **TEXT | {"needs": "peft"}),
    "gpt2 with lora": Case(_lora(hugging("GPT2", "LMHeadModel"), "c_attn"), **LANGUAGE | {"needs": "peft"}),
    "llama with lora": Case(
        _lora(hugging("Llama", "ForCausalLM"), "q_proj", "v_proj"), **LANGUAGE | {"needs": "peft"}
    ),
    "gpt_neox with lora": Case(
        _lora(hugging("GPTNeoX", "ForCausalLM"), "query_key_value"), **LANGUAGE | {"needs": "peft"}
    ),
    "llama with lora, recomputed": Case(
        _recomputed(_lora(hugging("Llama", "ForCausalLM"), "q_proj", "v_proj")), **LANGUAGE | {"needs": "peft"}
    ),
    "llama with dora": Case(
        _lora(hugging("Llama", "ForCausalLM"), "q_proj", "v_proj", use_dora=True), **LANGUAGE | {"needs": "peft"}
    ),
    # bfloat16 rounds by 2^-8, twice in a square. Updates differ by 0.0036, and by 0.011 to 0.013
    # from a float32 base.
    "llama in bfloat16 with lora": Case(_half_lora, **LANGUAGE | {"needs": "peft", "tolerance": 2**-7}),
    "bert with ia3": Case(
        _peft(
            hugging("Bert"), "IA3Config", target_modules=["key", "value", "output.dense"],
            feedforward_modules=["output.dense"], init_ia3_weights=False,
        ),
        **TEXT | {"needs": "peft"},
    ),
    "bert with prompt tuning": Case(
        _peft(hugging("Bert"), "PromptTuningConfig", task_type="SEQ_CLS", num_virtual_tokens=3),
        **TEXT | {"needs": "peft", "way": "one client after another"},
    ),
    "u-net, group_norm": Case(grouped(UNet), **_PIXELS),
    "u-net, freeze_norms": Case(_frozen(UNet), **_PIXELS),
    "lstm": Case(Reader, TOKENS, LABELS, **_LAYERS),
    "1-d cnn, two inputs, one logit": Case(
        Speech, lambda: (_numbers(2, 20)(), whole(5)()), lambda: whole(2)().float(), "binary"
    ),
    "tabular regression": Case(_tabular(2), _numbers(5), _numbers(2), "regression", **_LAYERS),
    "tabular multilabel": Case(_tabular(4), _numbers(5), lambda: whole(2, 4)().float(), "multilabel", **_LAYERS),
}  # fmt: skip
