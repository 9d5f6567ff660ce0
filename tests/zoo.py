"""Models of other libraries in tiny shapes; a library that is not installed, or does not load, has
none here.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

VOCABULARY, LENGTH, CLASSES, SIDE = 31, 9, 3, 32


@cache
def library(name: str) -> Any:
    """timm, transformers or peft; None if it does not load."""
    try:
        _torchvision()
        return import_module(name)
    except Exception:  # an optional dependency may be missing or broken
        return None


@cache
def _torchvision() -> object:
    """All of them import torchvision, whose compiled operators may not load: their names are
    enough.
    """
    try:
        return import_module("torchvision")
    except Exception:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        operators = torch.library.Library("torchvision", "DEF")  # they live as long as it
        operators.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        operators.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return operators, import_module("torchvision")


def tiny_timm(name: str, **options: Any) -> nn.Module:
    """A model of timm for images 3 × 32 × 32."""
    model: nn.Module = library("timm").create_model(name, num_classes=CLASSES, **options)
    return model


def tiny_hugging(kind: str, head: str = "ForSequenceClassification", **options: Any) -> nn.Module:
    """A model of transformers for texts (or, a ViT, for images), without dropout."""
    transformers = library("transformers")
    config = getattr(transformers, f"{kind}Config")(
        **{**SHAPES[kind], "num_labels": CLASSES, **options}
    )
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, 0)
    model: nn.Module = getattr(transformers, kind + head)(config)
    return model


_OPTIONS = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_size": 8,
}
_STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SHAPES: dict[str, dict[str, Any]] = {
    "Bert": {**_OPTIONS, **_STILL, "intermediate_size": 12, "max_position_embeddings": 16},
    "Roberta": {**_OPTIONS, **_STILL, "intermediate_size": 12, "max_position_embeddings": 16},
    "T5": {
        "vocab_size": VOCABULARY,
        "d_model": 8,
        "d_kv": 4,
        "d_ff": 12,
        "num_layers": 2,
        "num_heads": 2,
    }
    | {"dropout_rate": 0.0, "decoder_start_token_id": 0},
    "GPTNeoX": {**_OPTIONS, "intermediate_size": 12, "max_position_embeddings": 16},
    "Llama": {
        **_OPTIONS,
        "intermediate_size": 12,
        "max_position_embeddings": 16,
        "num_key_value_heads": 1,
    },
    "GPT2": {"vocab_size": VOCABULARY, "n_layer": 2, "n_head": 2, "n_embd": 8, "n_positions": 16}
    | dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    "DistilBert": {
        "vocab_size": VOCABULARY,
        "n_layers": 2,
        "n_heads": 2,
        "dim": 8,
        "hidden_dim": 12,
    }
    | {
        "max_position_embeddings": 16,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "ViT": {**{k: v for k, v in _OPTIONS.items() if k != "vocab_size"}, **_STILL}
    | {"intermediate_size": 12, "image_size": SIDE, "patch_size": 8},
}


def timm_group_norm(channels: int, **_: Any) -> nn.Module:
    made: nn.Module = import_module("timm.layers").GroupNorm(channels, 2)
    return made


VIT = {"img_size": SIDE, "patch_size": 8, "embed_dim": 12, "depth": 2, "num_heads": 2}
SWIN = {
    "img_size": SIDE,
    "window_size": 4,
    "embed_dim": 8,
    "depths": (2, 1),
    "num_heads": (2, 2),
    "drop_path_rate": 0.0,
}
RESNET = {"layers": (1, 1, 1, 1), "channels": (4, 4, 8, 8), "stem_width": 4}
