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
    """Copy a checkpoint into a model, whose head stays as it is if the checkpoint has none.

    Args:
        model: A `GPTNeoX`, which is changed.
        path: A file, or a directory with files and perhaps their `config.json`.
        heads: Of the model, which shapes do not reveal.
        rotary_pct: Of the model, which shapes do not reveal.
    """
    _check_configuration(path, heads=heads, rotary_pct=rotary_pct)
    published = _strip(_read(path))
    own = model.state_dict()
    missing = own.keys() - published.keys() - {_HEAD}
    if missing:
        raise UserError(
            f"checkpoint {path} has no {_some(missing)}: set model.layers as in the checkpoint"
        )
    surplus = published.keys() - own.keys()
    if surplus:
        raise UserError(
            f"checkpoint {path} has the unexpected {_some(surplus)}: "
            "set model.layers as in the checkpoint"
        )
    for name, tensor in published.items():
        if tensor.shape != own[name].shape:
            raise UserError(
                f"checkpoint {path} has {name} of shape {tuple(tensor.shape)}, the model needs "
                f"{tuple(own[name].shape)}: set model.vocabulary and model.hidden as in the "
                "checkpoint"
            )
    model.load_state_dict(own | published)


def _read(path: Path) -> dict[str, Tensor]:
    """All tensors of a file, or of the files of a directory."""
    files = _files(path)
    if not files:
        raise UserError(
            f"model.checkpoint {str(path)!r} contains no checkpoint: give a .safetensors or .bin "
            "file, or a directory with model.safetensors or pytorch_model.bin"
        )
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _read_file(file)
    return tensors


def _files(path: Path) -> list[Path]:
    """The file itself, or a directory's safetensors files, or else its pytorch_model files."""
    if path.is_dir():
        safe = sorted(path.glob("*.safetensors"))
        return safe or sorted(path.glob("pytorch_model*.bin"))
    if path.is_file():
        return [path]
    return []


def _read_file(file: Path) -> dict[str, Tensor]:
    """The tensors of one file; pickles are read without running code."""
    try:
        if file.suffix == ".safetensors":
            state = load_file(file)
        else:
            state = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # a corrupt pickle can raise anything
        kind = type(error).__name__
        raise UserError(f"checkpoint {file} cannot be read ({kind}): download it again") from error
    if not isinstance(state, dict) or not all(isinstance(leaf, Tensor) for leaf in state.values()):
        raise UserError(
            f"checkpoint {file} is not a dictionary of tensors: save the model's state_dict"
        )
    return state


def _strip(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that a classifier uses, by their names in the model."""
    used = {}
    for published_name, tensor in tensors.items():
        name = published_name.removeprefix("gpt_neox.")
        if name not in _UNUSED and not name.endswith(_CONSTANTS):
            used[name] = tensor
    return used


def _check_configuration(path: Path, *, heads: int, rotary_pct: float) -> None:
    """Check what shapes do not reveal: the same weights with other heads are another function."""
    folder = path if path.is_dir() else path.parent
    file = folder / "config.json"
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
    """The first of the names, and how many more there are."""
    first, *others = sorted(names)
    if not others:
        return first
    return f"{first} and {len(others)} more"
