"""Reads a published GPT-NeoX checkpoint, safetensors or pytorch_model.bin, into a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kairosfl.errors import UserError

_HEAD = "score.weight"
# The head that predicts tokens, and constants that older files carry along.
_UNUSED = ("embed_out.weight", "lm_head.weight")
_CONSTANTS = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")
# What the published configuration may say that shapes do not show, and that this model fixes.
_FIXED = {
    "use_parallel_residual": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10_000,
}


def load(model: nn.Module, path: Path, *, heads: int, rotary_pct: float) -> None:
    """Copies a checkpoint into `model`; one without a classification head leaves the head as it is."""
    _check_configuration(path, heads=heads, rotary_pct=rotary_pct)
    found = _strip(_read(path))
    wanted = model.state_dict()
    missing = wanted.keys() - found.keys() - {_HEAD}
    if missing:
        raise UserError(f"checkpoint {path} lacks {_some(missing)}: set model.layers as in the checkpoint")
    surplus = found.keys() - wanted.keys()
    if surplus:
        raise UserError(f"checkpoint {path} has {_some(surplus)} too many: set model.layers as in it")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"checkpoint {path} has {name} of shape {tuple(tensor.shape)}, the model needs "
                f"{tuple(wanted[name].shape)}: set model.vocabulary and model.hidden as in the checkpoint"
            )
    model.load_state_dict(wanted | found)


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of a folder's safetensors files, or else of its pytorch_model files."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UserError(
            f"model.checkpoint {str(path)!r} holds no checkpoint: give a .safetensors or .bin file, "
            "or a folder with model.safetensors or pytorch_model.bin"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            safe = file.suffix == ".safetensors"
            state = load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # a damaged pickle can fail in any way
            kind = type(error).__name__
            raise UserError(f"checkpoint {file} cannot be read ({kind}): fetch it again") from error
        if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
            raise UserError(f"checkpoint {file} is not a dictionary of tensors: save the model's state_dict")
        tensors |= state
    return tensors


def _strip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a classifier uses, by their names inside the model."""
    named = {name.removeprefix("gpt_neox."): tensor for name, tensor in tensors.items()}
    return {name: named[name] for name in named if name not in _UNUSED and not name.endswith(_CONSTANTS)}


def _check_configuration(path: Path, *, heads: int, rotary_pct: float) -> None:
    """Refuses what shapes cannot show: the same weights under other heads are another function."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    try:
        says = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        says = None
    if not isinstance(says, dict):
        raise UserError(f"{file} is not a configuration in JSON: fetch it again")
    for key, option, value in (
        ("num_attention_heads", "heads", heads),
        ("rotary_pct", "rotary_pct", rotary_pct),
    ):
        if says.get(key, value) != value:
            mend = f"set model.{option}={says[key]}"
            raise UserError(f"{file} says {key} = {says[key]}, the model has {value}: {mend}")
    for key, fixed in _FIXED.items():
        if says.get(key, fixed) != fixed:
            mend = "use another checkpoint"
            raise UserError(f"{file} says {key} = {says[key]}, gpt_neox is built with {fixed}: {mend}")


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
