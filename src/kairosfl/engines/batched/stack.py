"""Which way a model is run for many clients at once: the first that passes a trial step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from kairosfl.engines.batched.fast import without_kernels
from kairosfl.engines.batched.layers import Unstackable, line
from kairosfl.engines.batched.lifted import Lifted, Stacked
from kairosfl.engines.batched.rows import ordered
from kairosfl.engines.batched.traced import Mapped, Stack, Traced
from kairosfl.engines.precision import Precision
from kairosfl.tasks.forward import call
from kairosfl.tasks.tree import Tree, cast, rows, tree_map
from kairosfl.tasks.vector import layout_of, replicas

SIZES = (2, 3, 5, 7, 11)  # batches in trials; odd ones are rarely sizes of something else
ROUGH = 0.25  # how far tf32 and bfloat16 may be off, or twice as far as a client alone
Way = TypeVar("Way", bound=Stack)


def stack(
    model: nn.Module,
    samples: Tree,
    precision: Precision,
    device: torch.device,
    own: Collection[str] = (),
) -> Stack:
    """The model for many clients, tested on a few prepared samples; raises `Unstackable` with the
    reason.

    Every way is tried in a training step of two clients with different weights, on the device and
    in the precision in which it will run; the first whose outputs and gradients are those of each
    client alone is used. The tensors named `own` come last in the rows.
    """
    trial = _Trial(model, samples, precision, device, own)
    try:
        return trial.whole(Traced(model, device, own), SIZES[0])
    except Unstackable as reason:
        reasons = str(reason)
    try:
        return _lifted(Lifted(model, reasons, device, own), trial)
    except Unstackable as reason:
        reasons += f"; lifted, {reason}"
    mapped = Mapped(model, reasons, device, own)
    try:
        return trial.whole(mapped, SIZES[0])
    except Unstackable as reason:
        raise Unstackable(f"{reason}; {reasons}") from reason


def _lifted(lifted: Lifted, trial: _Trial) -> Lifted:
    """Ready to run, after trials at two batch sizes; a size that happens to be that of something
    else may fail.
    """
    passed, failure = 0, Unstackable()
    for size in SIZES[1:]:
        try:
            trial.exact(lifted, size)
        except Unstackable as reason:
            failure = reason
        else:
            passed += 1
        if passed == 2:
            return trial.whole(lifted.settled(), size)
    raise failure


class _Trial:
    """Two clients with different weights must get the same outputs and gradients as each alone."""

    def __init__(
        self,
        model: nn.Module,
        samples: Tree,
        precision: Precision,
        device: torch.device,
        own: Collection[str],
    ) -> None:
        self.layout = layout_of(model, own).joined()
        self.samples = samples
        self.precision = precision
        self.device = device
        self.still = replicas(model, device, 1)[0].eval()
        for module in self.still.modules():
            if isinstance(
                module, nn.RNNBase
            ):  # cuDNN computes their gradients in training mode only
                module.train().dropout = 0.0
        self.parameters = list(ordered(self.still, self.layout).values())
        start = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        scales = torch.linspace(0.5, 1.5, len(start), dtype=start.dtype, device=device)
        self.vectors = torch.stack([start, start * scales])
        self._known: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def whole(self, stacked: Way, size: int) -> Way:
        """The stacked model, ready to run; raises `Unstackable` if it differs, or cannot compute in
        the precision.
        """
        self.exact(stacked, size)
        if isinstance(stacked, Lifted) and stacked.drops:
            self._run(
                stacked, self._known[size][0], keys=torch.arange(2, device=self.device)[:, None]
            )
        compute = self.precision.compute(self.vectors.dtype)
        if isinstance(stacked, Traced) and self.device.type == "cuda":  # again, now by the kernels
            self._rehearse(stacked, size)
            with Precision("float32")():
                self._compare(stacked, size)
        if self.precision.name == "float32" or (
            self.precision.name == "tf32" and self.device.type != "cuda"
        ):
            return stacked
        if compute != self.vectors.dtype:
            _cast(stacked, self.vectors.dtype, compute, self.device)
        stacked.frame.dot = self.precision.dot
        samples, *wanted = self._known[size]
        self._rehearse(stacked, size)
        with self.precision():
            lost = _losses(self._run(stacked, cast(samples, compute)), wanted)
            if max(lost) > ROUGH:  # a deep model loses more, stacked or not
                with self.precision.autocast(self.device):
                    alone = _losses(self._alone(size)[1:], wanted)
                if not all(
                    m <= ROUGH or m <= 2 * a < math.inf for m, a in zip(lost, alone, strict=True)
                ):
                    raise Unstackable(
                        f"{_name(stacked)} loses its accuracy in {self.precision.name}"
                    )
        return stacked

    def exact(self, stacked: Stack, size: int) -> None:
        """Compare at this batch size, in float32; layer by layer, at first without kernels, which
        must be rehearsed.
        """
        stacked.frame.compute = self.vectors.dtype
        with ExitStack() as inside:
            inside.enter_context(Precision("float32")())
            if isinstance(stacked, Traced):
                inside.enter_context(without_kernels())
                inside.enter_context(stacked.rehearsal.watching(stacked.model))
            if size not in self._known:
                try:
                    self._known[size] = self._alone(size)
                except Unstackable:
                    raise
                except Exception as error:  # such as a gradient that exists in training mode only
                    raise Unstackable(
                        f"it cannot be tried in evaluation mode ({line(error)})"
                    ) from error
            self._compare(stacked, size)

    def _compare(self, stacked: Stack, size: int) -> None:
        samples, wanted, slopes = self._known[size]
        outputs, found = self._run(stacked, samples)
        if not alike(outputs, wanted):
            raise Unstackable(
                f"{_name(stacked)} gives different outputs than one client after another"
            )
        # By tensor, since rounding may flip a ReLU: a single number says little.
        most = float(slopes.norm())
        for (_, mine), (_, theirs) in zip(
            self.layout.views(found), self.layout.views(slopes), strict=True
        ):
            if not (mine - theirs).norm() <= 0.02 * theirs.norm() + 1e-3 * most:
                raise Unstackable(
                    f"{_name(stacked)} gives different gradients than one client after another"
                )

    def _rehearse(self, stacked: Stack, size: int) -> None:
        if isinstance(stacked, Traced):
            rows = stacked.frame.layout.pack(self.vectors)
            stacked.rehearsal(stacked.frame, rows, torch.zeros_like(rows), size)

    def _alone(self, size: int) -> tuple[Any, Tensor, Tensor]:
        """Samples of two clients, and the outputs and gradients of one client after another."""
        taken = torch.arange(2 * size) % rows(self.samples)
        samples = tree_map(lambda each: each[taken].to(self.device), self.samples)
        outputs, slopes = [], []
        # The weights are loaded, not given for a call: a part that is computed again for its
        # backward needs them, too.
        for client, vector in enumerate(self.vectors):
            self._load(vector)
            outputs.append(call(self.still, _part(samples, client * size, size)))
            found = torch.autograd.grad(
                _probe(outputs[-1], 1),
                self.parameters,
                allow_unused=True,
                materialize_grads=True,
            )
            slopes.append(torch.cat([each.reshape(-1) for each in found]))
        if not self._known:
            self._separate(samples, outputs[0].detach())
        return samples, torch.cat(outputs).detach(), torch.stack(slopes)

    @torch.no_grad()
    def _load(self, vector: Tensor) -> None:
        """Let the plain model have these weights."""
        for (_, view), parameter in zip(self.layout.views(vector), self.parameters, strict=True):
            parameter.copy_(view)

    def _separate(self, samples: Tree, wanted: Tensor) -> None:
        """Refuse a model in which the samples of a batch change each other's outputs."""
        self._load(self.vectors[0])
        try:
            with torch.no_grad():
                single = torch.cat(
                    [call(self.still, _part(samples, row, 1)) for row in range(len(wanted))]
                )
        except Exception as error:  # BatchNorm without running statistics rejects a single sample
            raise Unstackable(f"it fails on a single sample ({line(error)})") from error
        if not alike(single, wanted):
            raise Unstackable(
                "the samples of a batch change each other's outputs, so that batches cannot be filled up"
            )

    def _run(
        self, stacked: Stack, samples: Tree, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        frame = stacked.frame
        weights = frame.layout.pack(self.vectors)
        gradients = torch.zeros_like(weights)
        try:
            frame.open(weights, gradients, keys)
            outputs = stacked(samples)
            frame.backward(_probe(outputs, len(weights)))
        except Exception as error:  # the user's forward may raise anything
            raise Unstackable(f"{_name(stacked)} fails on it ({line(error)})") from error
        finally:
            frame.close()
        slopes = torch.empty_like(self.vectors)
        frame.layout.unpack(gradients, slopes)
        return outputs.detach(), slopes


def _part(samples: Tree, begin: int, count: int) -> Any:
    return tree_map(lambda each: each[begin : begin + count], samples)


def _probe(outputs: Tensor, clients: int) -> Tensor:
    """A scalar that depends on every output in the same way for every client."""
    each = outputs.reshape(clients, -1)
    return (each * torch.arange(each.shape[1], device=each.device).sin().to(each.dtype)).sum()


def _losses(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[float]:
    """How far outputs and gradients are off, relative to their length; infinite where they are not
    finite.
    """
    off = [
        float(
            (mine.to(theirs.dtype) - theirs).norm()
            / theirs.norm().clamp(min=torch.finfo(theirs.dtype).tiny)
        )
        for mine, theirs in zip(found, wanted, strict=True)
    ]
    return [each if math.isfinite(each) else math.inf for each in off]


def _cast(stacked: Stack, weights: torch.dtype, compute: torch.dtype, device: torch.device) -> None:
    """Make it compute in this type, including its frozen layers.

    Buffers keep their own type, since a table or a mask could lose its meaning; activations that
    they convert to float32 are cast back where they enter the next frozen layer.
    """
    frame = stacked.frame
    frame.compute, frame.fixed = compute, [tensor.to(compute) for tensor in frame.fixed]
    if isinstance(stacked, Lifted):
        stacked.place(device)
    for module in stacked.model.modules():
        frozen = [
            each for each in module.parameters(recurse=False) if not isinstance(each, Stacked)
        ]
        own = [parameter for parameter in frozen if parameter.dtype == weights]
        for parameter in own:
            parameter.data = parameter.to(compute)
        if own:
            module.register_forward_pre_hook(_casting(compute), with_kwargs=True)


def _casting(compute: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    def cast(value: Any) -> Any:
        return (
            value.to(compute) if isinstance(value, Tensor) and value.is_floating_point() else value
        )

    return lambda _, args, named: (
        tuple(map(cast, args)),
        {name: cast(value) for name, value in named.items()},
    )


def _name(stacked: Stack) -> str:
    names = {Mapped: "vmap", Lifted: "stacking"}
    return next(
        (name for kind, name in names.items() if isinstance(stacked, kind)),
        "stacking layer by layer",
    )


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether two ways to compute something agree up to the order of sums."""
    if found.shape != wanted.shape:
        return False
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))
