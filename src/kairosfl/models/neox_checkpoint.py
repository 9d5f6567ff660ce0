"""Load a published GPT-NeoX checkpoint (safetensors or pytorch_model.bin) into a model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from kairosfl.errors import UserError

_HEAD = "score.weight"
# The language-model head, and constants stored in older files.
_UNUSED = ("embed_out.weight", "lm_head.weight")
_CONSTANTS = ("attention.bias", "attention.masked_bias", "rotary_emb.inv_freq")
# Configuration values that tensor shapes do not reveal, and that are hard-coded in this model.
_FIXED = {
    "use_parallel_residual": True,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "rotary_emb_base": 10_000,
}


def load(model: nn.Module, path: Path, *, heads: int, rotary_pct: float) -> None:
    """Copy a checkpoint into `model`; without a classification head in it, the model's head is left
    unchanged.
    """
    _check_configuration(path, heads=heads, rotary_pct=rotary_pct)
    found = _strip(_read(path))
    wanted = model.state_dict()
    missing = wanted.keys() - found.keys() - {_HEAD}
    if missing:
        raise UserError(
            f"checkpoint {path} has no {_some(missing)}: set model.layers as in the checkpoint"
        )
    surplus = found.keys() - wanted.keys()
    if surplus:
        raise UserError(
            f"checkpoint {path} has the unexpected {_some(surplus)}: set model.layers as in the checkpoint"
        )
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise UserError(
                f"checkpoint {path} has {name} of shape {tuple(tensor.shape)}, the model needs "
                f"{tuple(wanted[name].shape)}: set model.vocabulary and model.hidden as in the checkpoint"
            )
    model.load_state_dict(wanted | found)


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of a directory's safetensors files, or else of its pytorch_model
    files.
    """
    if path.is_dir():
        files = sorted(path.glob("*.safetensors")) or sorted(path.glob("pytorch_model*.bin"))
    else:
        files = [path] if path.is_file() else []
    if not files:
        raise UserError(
            f"model.checkpoint {str(path)!r} contains no checkpoint: give a .safetensors or .bin file, "
            "or a directory with model.safetensors or pytorch_model.bin"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            safe = file.suffix == ".safetensors"
            state = (
                load_file(file) if safe else torch.load(file, map_location="cpu", weights_only=True)
            )
        except Exception as error:  # a corrupt pickle can raise anything
            kind = type(error).__name__
            raise UserError(
                f"checkpoint {file} cannot be read ({kind}): download it again"
            ) from error
        if not isinstance(state, dict) or not all(
            isinstance(value, Tensor) for value in state.values()
        ):
            raise UserError(
                f"checkpoint {file} is not a dictionary of tensors: save the model's state_dict"
            )
        tensors |= state
    return tensors


def _strip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a classifier uses, by their names in the model."""
    named = {name.removeprefix("gpt_neox."): tensor for name, tensor in tensors.items()}
    return {
        name: named[name] for name in named if name not in _UNUSED and not name.endswith(_CONSTANTS)
    }


def _check_configuration(path: Path, *, heads: int, rotary_pct: float) -> None:
    """Check what shapes do not reveal: the same weights with other heads are another function."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    try:
        published = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        published = None
    if not isinstance(published, dict):
        raise UserError(f"{file} is not a JSON configuration: download it again")
    for key, option, value in (
        ("num_attention_heads", "heads", heads),
        ("rotary_pct", "rotary_pct", rotary_pct),
    ):
        if published.get(key, value) != value:
            fix = f"set model.{option}={published[key]}"
            raise UserError(f"{file} has {key} = {published[key]}, the model has {value}: {fix}")
    for key, fixed in _FIXED.items():
        if published.get(key, fixed) != fixed:
            fix = "use another checkpoint"
            raise UserError(
                f"{file} has {key} = {published[key]}, gpt_neox only supports {fixed}: {fix}"
            )


def _some(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
