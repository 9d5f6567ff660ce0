"""What cannot be trained, and what a refusal says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import zoo_cases as cases
from zoo import CLASSES, LENGTH, VIT, VOCABULARY, tiny_hugging
from zoo_cases import Case


class Embedded(nn.Module):
    """Means of embeddings."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY - 1, 4, **options), nn.Linear(4, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embed(x).mean(1))


def _late() -> Tensor:
    """A token that is not in the vocabulary, only in the last texts."""
    tokens = cases.whole(VOCABULARY - 1, LENGTH)()
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
    "timm resnet": (Case(cases.of_timm("test_resnet"), **cases.IMAGE), _BATCHNORM),
    "timm efficientnet": (Case(cases.of_timm("test_efficientnet"), **cases.IMAGE), _BATCHNORM),
    "torchvision in evaluation mode": (
        Case(lambda: cases.vision("shufflenet_v2_x0_5")().eval(), **cases.VISION),
        _BATCHNORM,
    ),
    "timm vit, images of another size": (
        Case(cases.of_timm("vit_tiny_patch16_224", **VIT), cases.SMALL, cases.LABELS, needs="timm"),
        r"VisionTransformer fails on training inputs of shape \[4, 3, 8, 8\]: Input height",
    ),
    "torchvision detection": (
        Case(
            cases.grouped(
                cases.part(
                    "torchvision.models.detection",
                    "ssdlite320_mobilenet_v3_large",
                    weights=None,
                    weights_backbone=None,
                )
            ),
            **cases.VISION,
        ),
        r"^The model SSD fails on training inputs of shape \[4, 3, 32, 32\]: targets",
    ),
    "bert without a head": (
        Case(cases.hugging("Bert", "Model"), **cases.TEXT),
        r"returns a BaseModelOutput\w+ with 'last_hidden_state', 'pooler_output'; wrap it to return a tensor",
    ),
    "bert, a column of another name": (
        Case(
            cases.hugging("Bert"),
            lambda: {"ids": cases.TOKENS()},
            cases.LABELS,
            needs="transformers",
        ),
        r"fails on training inputs of shape \{'ids': \[4, 9\]\}: You must specify exactly one of input_ids",
    ),
    "bert in bfloat16": (
        Case(lambda: tiny_hugging("Bert").bfloat16(), **cases.TEXT),
        r"^The trained parameters are torch\.bfloat16, .*: use model\.float\(\)",
    ),
    "gpt2 language model, classes as targets": (
        Case(
            cases.hugging("GPT2", "LMHeadModel"), cases.TOKENS, cases.LABELS, needs="transformers"
        ),
        r"outputs of shape \[4, 9, 31\], but the data has 3 classes",
    ),
    "t5 without texts to write": (
        Case(cases.hugging("T5", "ForConditionalGeneration"), **cases.LANGUAGE),
        r"^The model T5\w+ fails on training inputs of shape \[4, 9\]: You must specify",
    ),
    "a token out of range": (
        Case(Embedded, _late, cases.LABELS),
        r"^The model Embedded fails on a batch of shape \[\d, 9\], whole numbers from 0 to 30: index out of range",
    ),
    "sparse gradients": (
        Case(lambda: Embedded(sparse=True), cases.TOKENS, cases.LABELS),
        r"^'embed' of the model has sparse gradients; set its `sparse` to False",
    ),
    "spectral norm": (
        Case(
            _flat(lambda: nn.utils.parametrizations.spectral_norm(_linear())),
            cases.SMALL,
            cases.LABELS,
        ),
        r"changes '1\.parametrizations\.weight\.0\._u' of a _SpectralNorm; make it a constant",
    ),
    "lazy layers": (
        Case(_flat(lambda: nn.LazyLinear(3)), cases.SMALL, cases.LABELS),
        r"^'1\.weight' of the model has no shape yet",
    ),
    "no weights": (
        Case(_meta, cases.SMALL, cases.LABELS),
        r"^model has no weights, only shapes \(device 'meta'\)",
    ),
    "a scripted model": (
        Case(lambda: torch.jit.script(_flat(_linear)()), cases.SMALL, cases.LABELS),
        r"^The model is a RecursiveScriptModule; give the module that it was made from",
    ),
    "data parallel": (
        Case(lambda: nn.DataParallel(_flat(_linear)()), cases.SMALL, cases.LABELS),
        r"^The model is a DataParallel; give the module that it was made from",
    ),
}
