"""The way out: the trained module of a run folder, and the same as a file for other programs."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from inspect import signature
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kairosfl.core.layout import Entry
from kairosfl.core.round import models, result
from kairosfl.core.run import Run, Setup
from kairosfl.errors import UserError, first_line
from kairosfl.runs.checkpoint import newest
from kairosfl.runs.config import GIVEN, RunConfig
from kairosfl.runs.files import read_json, write
from kairosfl.runs.folder import Folder, facts
from kairosfl.runs.prepare import build_task, setup_without_data
from kairosfl.tasks import vector
from kairosfl.tasks.forward import call
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import Tree, leaves


def load(
    folder: str | PathLike[str], model: nn.Module | None = None, client: int | None = None
) -> nn.Module:
    """The trained model of a run, on the CPU and in evaluation mode.

    It is the model of the newest intact checkpoint with `result` of the rules applied: what the run
    evaluates. It takes inputs as clients train on them, so uint8 images need
    `kairosfl.tasks.prepare.prepare` first.

    Args:
        folder: A run folder, as `kairosfl run` writes it.
        model: The untrained model, for a run whose model was not built by name; it is not modified.
        client: Whose model, where clients have models of their own; without it, what the server
            has, which is the model of a client that has not trained yet.
    """
    path = Path(folder)
    config = _config(path)
    if model is None:
        return _trained(path, config, _task(path, config).model, client)
    trained = _trained(path, config, copy.deepcopy(model), client)
    then = read_json(path / "run.json").get("base_hash")
    if then and then != vector.base_hash(trained):
        raise UserError(
            f"{path} was trained with other frozen parameters or buffers than the given model has; "
            "give the model that was trained, with the same base."
        )
    return trained


def export(
    folder: Path,
    out: Path | None = None,
    *,
    force: bool = False,
    onnx: bool = False,
    client: int | None = None,
) -> Path:
    """Write the trained model of a run for other programs; returns what was written.

    Args:
        folder: A run folder whose model and data are built by name or by a task file.
        out: The file, with the model's own names as safetensors, or as ONNX if it ends in ".onnx".
            For a model with peft's adapters, any other name is a directory, which gets the adapters
            alone, in peft's format. By default "adapter" for such a model, or else
            "model.safetensors" or "model.onnx".
        force: Whether to overwrite it.
        onnx: Whether to write ONNX; the first dimension of inputs and outputs, the batch, may have
        any length.
        client: Whose model, where clients have models of their own.
    """
    config = _config(folder)
    task = _task(folder, config)
    model = _trained(folder, config, task.model, client)
    if out is None:
        out = _usual_place(model, onnx=onnx)
    onnx = onnx or out.suffix == ".onnx"
    apart = has_adapters(model) and not onnx and out.suffix != ".safetensors"
    _check_place(out, onnx=onnx, apart=apart, force=force)
    if onnx:
        write(out, lambda path: _write_onnx(model, task.trial()[0], path))
    elif apart:
        save_adapters(model, out)
    else:
        save_state(model, out)
    return out


def _usual_place(model: nn.Module, *, onnx: bool) -> Path:
    """Where a model is written if no place is named."""
    if onnx:
        return Path("model.onnx")
    if has_adapters(model):
        return Path("adapter")
    return Path("model.safetensors")


def _check_place(out: Path, *, onnx: bool, apart: bool, force: bool) -> None:
    """Refuse a place that cannot be written to; adapters `apart` need a directory."""
    if out.is_dir() and not apart:
        raise UserError(
            f"{out} is a directory; give the name of a file, such as {out / 'model.safetensors'}."
        )
    if onnx and out.suffix != ".onnx":
        raise UserError(f"{out} must end in '.onnx'.")
    if not onnx and not apart and out.suffix != ".safetensors":
        raise UserError(f"{out} must end in '.safetensors', or in .onnx for ONNX.")
    is_empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not force and not is_empty:
        raise UserError(f"{out} already exists; choose another name, or overwrite it with --force.")


def has_adapters(model: nn.Module) -> bool:
    """Whether peft made adapters in the model, also through transformers' `add_adapter`."""
    return bool(getattr(model, "peft_config", None)) and hasattr(model, "save_pretrained")


def save_state(model: nn.Module, out: Path) -> None:
    """Write the whole state as safetensors, with the model's own names."""
    # Tied weights are one tensor with several names, of which safetensors would refuse all but one:
    # each is copied.
    tensors = {}
    for name, tensor in model.state_dict().items():
        tensors[name] = tensor.detach().clone().contiguous()
    write(out, lambda path: save_file(tensors, path, {"format": "pt"}))


def beyond_adapters(model: nn.Module) -> list[str]:
    """The names of trained parameters that peft's format would leave out."""
    from peft import get_peft_model_state_dict

    names: Any = model.peft_config
    saved: set[int] = set()
    for name in names:
        state = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
        saved.update(tensor.data_ptr() for tensor in state.values())

    beyond = []
    for name, parameter in vector.trained(model).items():
        if parameter.data_ptr() not in saved:
            beyond.append(name)
    return beyond


def save_adapters(model: nn.Module, out: Path) -> None:
    """Write the adapters alone to a directory that `peft.PeftModel.from_pretrained` reads."""
    beyond = beyond_adapters(model)
    if beyond:
        raise UserError(
            f"peft's format holds adapters alone, but {beyond[0]!r} was trained as well; name it "
            "in modules_to_save, or export the whole model to a file, such as "
            f"{out.with_suffix('.safetensors')}."
        )
    save: Any = model.save_pretrained
    # Embeddings are among the adapters or frozen; to find out by itself, peft would ask the Hub
    # about the base model.
    options = {}
    if "save_embedding_layers" in signature(save).parameters:
        options["save_embedding_layers"] = False
    with tempfile.TemporaryDirectory() as place:
        save(place, **options)
        for file in sorted(Path(place).rglob("*")):
            if file.is_file():
                write(out / file.relative_to(place), file.read_bytes())


def _config(path: Path) -> RunConfig:
    folder = Folder(path)
    if (path / "sweep.json").is_file():
        raise UserError(f"{path} is a sweep; name one of the run folders in it.")
    config = folder.config()
    folder.check_version()
    if folder.rounds_done() is None:
        raise UserError(
            f"{path} has no checkpoint, so there is no model to load; start the run again."
        )
    return config


def _task(path: Path, config: RunConfig) -> Task:
    """The task that the configuration names, if it is the one that was trained."""
    if not config.task.file and config.model.name.startswith(GIVEN):
        raise UserError(
            f"{path} is a run of kairosfl.simulate, which does not store the untrained model; in "
            "Python, give it: kairosfl.load(folder, model)."
        )
    about = read_json(path / "run.json")
    task = build_task(config)
    now = facts(task)
    names = ["parameters", "layout_hash", "base_hash"]
    # A Flower app may have a task of its own, of which the configuration knows nothing.
    if about.get("engine") == "flower":
        names = list(now)
    for name in names:
        if name in about and about[name] != now[name]:
            raise UserError(
                f"{path} was not trained with what its config.toml builds now ({name} "
                f"{about[name]!r} then, {now[name]!r} now); restore its data and model, or give "
                "the model: kairosfl.load(folder, model)."
            )
    return task


def _trained(
    path: Path, config: RunConfig, model: nn.Module, client: int | None = None
) -> nn.Module:
    """The model with its trained parameters set to the run's result, or to those of a client."""
    about = read_json(path / "run.json")
    tensors = vector.trained(model.cpu())
    own = [name for name in about.get("own", ()) if name in tensors]
    layout = vector.layout_of(model, own)
    if about.get("parameters", layout.size) != layout.size:
        raise UserError(
            f"{path} has a model of {about['parameters']} trained parameters, but the given one "
            f"has {layout.size}; give the model that was trained."
        )

    # --- the run as its newest checkpoint has it ---
    own_start = _flat(tensors, layout.own) if own else None
    clients = about.get("clients")
    if not clients:
        clients = config.data.clients
    setup = setup_without_data(config, layout, clients, own=own_start)
    blank = Run.start(_flat(tensors, layout.entries), setup, seed=config.seed)
    run, skipped = newest(path / "checkpoint", blank)
    for line in skipped:
        warnings.warn(f"{path}: {line}", stacklevel=3)

    # --- the model, or that of a client ---
    if client is None:
        return vector.load(model, result(run, setup), layout).eval()
    _check_client(path, client, clients, about, setup)
    (parameters,) = models(run, setup, torch.tensor([client]))
    return vector.load(model, parameters, layout.joined()).eval()


def _flat(tensors: Mapping[str, Tensor], entries: Sequence[Entry]) -> Tensor:
    """Tensors of a model as one new vector."""
    return torch.cat([tensors[entry.name].detach().reshape(-1) for entry in entries])


def _check_client(
    path: Path, client: int, clients: int, about: Mapping[str, Any], setup: Setup
) -> None:
    """Refuse a client that does not exist, or of which the server has no model."""
    if not 0 <= client < clients:
        raise UserError(f"client = {client} does not exist; {path} has clients 0 to {clients - 1}.")
    if about.get("engine") == "flower" and setup.keeps:
        raise UserError(
            f"{path} is a run of devices, which keep what is their own; only client {client}'s "
            "device has its model."
        )


class _Positional(nn.Module):
    """A model that takes the leaves of its inputs one by one and returns its output tensor."""

    def __init__(self, model: nn.Module, inputs: Tree) -> None:
        super().__init__()
        self.model = model
        self.names = list(inputs) if isinstance(inputs, dict) else []

    def forward(self, *flat: Tensor) -> Tensor:
        if self.names:
            return call(self.model, dict(zip(self.names, flat, strict=True)))
        return call(self.model, flat)


def _write_onnx(model: nn.Module, inputs: Tree, path: Path) -> None:
    flat = tuple(leaves(inputs))
    names = [f"input_{number}" for number in range(len(flat))]
    if isinstance(inputs, dict):
        names = list(inputs)
    elif len(flat) == 1:
        names = ["input"]
    shapes = (tuple({0: torch.export.Dim("batch")} for _ in flat),)
    options: dict[str, Any] = {"dynamo": True, "external_data": False, "verbose": False}
    try:
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(
                _Positional(model, inputs),
                flat,
                path,
                input_names=names,
                output_names=["output"],
                dynamic_shapes=shapes,
                **options,
            )
    except ModuleNotFoundError as error:
        raise UserError(f"--onnx needs {error.name}: pip install onnx onnxscript") from None
    except Exception as error:  # whatever the exporter does not support in this model
        cause = error.__cause__ or error  # the exporter's own message begins with advice
        reason = first_line(cause)
        raise UserError(
            f"torch cannot write this model as ONNX ({reason}); leave out --onnx."
        ) from error
