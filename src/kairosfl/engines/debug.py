"""Engine `debug`: one client after another, and what goes wrong first is one sentence.

Clients train as with `loop`, to the same bits. After every forward pass, backward pass and step the
numbers are looked at, so that what is not finite is named where it first appears: the client, the
epoch, the batch, the layer, and the shapes of what went in and came out. What an engine cannot see,
the rules' hooks on the server, `core/checked.py` checks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kairosfl.client.second import Second
from kairosfl.client.trainer import Derivative, Trainer, Visit
from kairosfl.core.checked import shown, spread
from kairosfl.core.fields import Brief, Report
from kairosfl.core.work import epoch_of
from kairosfl.engines.loop import Loop
from kairosfl.errors import StageError, first_line
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import Tree, leaves

PHASES = {
    "batches": "",
    "own batches": " of its own part alone",
    "second batches": " of its second model",
}


class Checking(Trainer):
    """The plain trainer, which stops at the first number that is not finite."""

    def __init__(self, task: Task, device: torch.device, secret: bytes = b"") -> None:
        super().__init__(task, device, secret)
        self.brief: Brief | None = None  # whom it trains
        self.samples = 0  # of this client
        self.phase = "batches"
        self.step = -1  # of this phase; -1: not begun
        self.doing = ""  # what would have failed if something fails now
        self.inside: list[str] = []  # layers whose forward pass has begun and not ended
        self.first = ""  # the first layer of this pass with a number that is not finite
        for model in (self.model, self.still):
            for name, layer in model.named_modules():
                self._hook(model, layer, name)

    # --- layers ---

    def _hook(self, model: nn.Module, layer: nn.Module, name: str) -> None:
        """Note which layers are being run, and the first that makes numbers that are not finite."""
        kind = type(layer).__name__
        label = f"layer {name} ({kind})" if name else f"the model ({kind})"

        def entered(layer: nn.Module, inputs: Any) -> None:
            if layer is model:
                self._forward_begins()
            self.inside.append(f"{label}, which got {_shapes(inputs)}")

        def left(layer: nn.Module, inputs: Any, outputs: Any) -> None:
            self.inside.pop()
            if layer is model:
                self.doing = "the loss"
            if not self.first and _is_bad(outputs) and not _is_bad(inputs):
                self.first = f"{label} turns {_shapes(inputs)} into {_shapes(outputs)}"

        layer.register_forward_pre_hook(entered)
        layer.register_forward_hook(left)

    def _forward_begins(self) -> None:
        self.doing = "the forward pass"
        self.inside.clear()
        self.first = ""

    # --- a visit ---

    def follow(self, brief: Brief, delta: Tensor | None = None) -> Report:
        self.brief = brief
        self.samples = len(self.task.clients[brief.client])
        self._phase("batches")
        try:
            return super().follow(brief, delta)
        except StageError:
            raise
        except Exception as error:  # the user's model, loss and samples may raise anything
            raise self._raised(error) from error

    def _train(
        self,
        brief: Brief,
        start: Tensor,
        samples: Tensor,
        second: Second | None = None,
        purpose: str = "batches",
    ) -> Visit:
        self._phase(purpose)
        visit = super()._train(brief, start, samples, second, purpose)
        self._check_weights()
        self._phase("batches")
        return visit

    def _train_second(self, brief: Brief, second: Second, w: Tensor, samples: Tensor) -> None:
        self._phase("second batches")
        super()._train_second(brief, second, w, samples)
        self._phase("batches")

    def _phase(self, purpose: str) -> None:
        self.phase = purpose
        self.step = -1
        self.doing = ""

    def _batch(self, rows: Tensor, brief: Brief, step: int) -> tuple[Any, Any]:
        if self.step >= 0:
            self._check_weights()
        self.step = step
        self.doing = "reading the samples"
        inputs, targets = super()._batch(rows, brief, step)
        if _is_bad(inputs):
            raise self._failure(
                f"its samples {_some(rows)} have inputs that are not finite: {_shapes(inputs)}"
            )
        return inputs, targets

    def _differentiate(
        self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> Derivative:
        loss, similar, gradients = super()._differentiate(inputs, targets, brief, still)
        self.doing = "the step"
        batch = f"inputs {_shapes(inputs)} and targets {_shapes(targets)}"
        if not bool(torch.isfinite(loss)):
            raise self._failure(f"the loss is {float(loss):g}{self._because()}, on {batch}")
        for (name, _), gradient in zip(self.whole.views(self.w), gradients, strict=True):
            if not bool(torch.isfinite(gradient).all()):
                raise self._failure(
                    f"the loss is {float(loss):g}, and the gradient of {name} {shown(gradient)} is "
                    f"not finite{self._because()}, on {batch}"
                )
        return loss, similar, gradients

    def _loss(
        self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        losses = super()._loss(inputs, targets, brief, still)
        self.doing = "the backward pass"
        return losses

    def _check_weights(self) -> None:
        """After a step. The first thing that is not finite there is the step's own."""
        bad = spread(self.w, self.whole)
        if bad:
            raise self._failure(
                f"the step makes weights that are not finite{bad}, though the gradient is finite; "
                "lower train.lr, or set train.clip"
            )

    def _because(self) -> str:
        if not self.first:
            return ""
        return f": {self.first}"

    # --- the sentence ---

    def _raised(self, error: Exception) -> StageError:
        """What somebody's code raised, and where the trainer was."""
        kind = type(error.__cause__ or error).__name__
        where = "training"
        if self.doing:
            where = self.doing
        if self.doing == "the forward pass" and self.inside:
            where = self.inside[-1]
        return self._failure(f"{where} fails with {kind} ({first_line(error).rstrip('.')})")

    def _failure(self, fault: str) -> StageError:
        brief = self.brief
        assert brief is not None
        place = [f"round {brief.round + 1}", f"train of client {brief.client}"]
        if self.step >= 0:
            batches = epoch_of(self.samples, brief.batch_size, drop_last=brief.drop_last).steps
            epoch, batch = divmod(self.step, int(batches))
            place += [f"epoch {epoch + 1}{PHASES[self.phase]}", f"batch {batch + 1}"]
        part = self.first.partition(" turns ")[0]
        if self.doing == "the forward pass" and self.inside:
            part = self.inside[-1].partition(", which")[0]
        return StageError(
            f"{', '.join(place)}: {fault}.",
            stage="train",
            round=brief.round + 1,
            part=part,
            client=brief.client,
        )


class Debug(Loop):
    """Trains as `Loop` does and checks every batch.

    The first thing that goes wrong is a `StageError`.

    Args:
        task: What is learnt.
        device: Where clients train.
        precision: "float32", or on a GPU "tf32".
    """

    why = "every batch and every hook is checked, which takes time"
    trains = Checking


def _is_bad(value: Any) -> bool:
    """Whether a tensor, or one in a tree, has numbers that are not finite."""
    reals = [tensor for tensor in _tensors(value) if tensor.is_floating_point()]
    return not all(bool(torch.isfinite(tensor).all()) for tensor in reals)


def _shapes(value: Any) -> str:
    """Types and shapes of all tensors in it."""
    tensors = _tensors(value)
    if not tensors:
        return "no tensor"
    return ", ".join(map(shown, tensors))


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in what a layer gets or returns."""
    if isinstance(value, Tensor | dict):
        return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]
    if not isinstance(value, tuple | list):
        return []
    tensors = []
    for part in value:
        tensors += _tensors(part)
    return tensors


def _some(rows: Tensor) -> str:
    numbers = rows.tolist()
    more = ", …" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
