"""One training step of the clients in the slots; nothing in it depends on the host, so it can be
captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kairosfl.client.trainer import SAM_EPS, drift
from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.state import Kind, Real, State, Sum, Whole
from kairosfl.engines.batched.traced import Stack, Traced
from kairosfl.engines.batched.update import Optimiser, square_norms
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.kinds import cross_entropy
from kairosfl.tasks.prepare import affine, mislabelled, sample_keys
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import Tree, tree_map


@dataclass(frozen=True)
class Work:
    """What all steps share: the stacked model, the data on the device, the loss."""

    stack: Stack
    task: Task
    data: Samples | Streamed
    compute: torch.dtype  # of activations; the weights keep theirs

    def prepared(self, samples: Tensor, keys: Tensor | None = None) -> tuple[Any, Any]:
        """These samples as the model sees them, in training transformed by these keys, and their
        targets.
        """
        if keys is None and (images := self._images(samples)) is not None:
            return images, tree_map(lambda leaf: leaf[samples], self.data.targets)
        inputs, targets = self.data.read(samples, keys)
        if keys is not None:
            inputs = self.task.augmented(inputs, keys)
        return self.task.prepared(inputs, self.compute), targets

    def _images(self, samples: Tensor) -> Tensor | None:
        """The inputs, read and prepared by one kernel, where there is one for them."""
        stored, dataset = (
            self.data.inputs if isinstance(self.data, Samples) else None,
            self.task.dataset,
        )
        if (
            not isinstance(stored, Tensor)
            or stored.ndim != 4
            or stored.dtype != torch.uint8
            or dataset.vocabulary
        ):
            return None
        module: Any = (
            kernels("batch", stored.new_empty(0, dtype=self.compute))
            if stored.is_contiguous()
            else None
        )
        if module is None:
            return None
        scale, shift = affine(dataset.mean, dataset.std, stored.device)
        images: Tensor = module.images(
            stored, samples, scale, shift, self.compute, self.stack.frame.last
        )
        return images

    def rehearse(self, state: State, kind: Kind) -> None:
        """Have the kernels compiled that steps of this kind need; gradients are zeros afterwards."""
        if not isinstance(self.stack, Traced):
            return
        frame, live = (
            self.stack.frame,
            torch.zeros(kind.width, dtype=torch.bool, device=state.device),
        )
        optimiser = Optimiser(state, kind, live, frame.dot)
        surround = partial(_surround, self, state, kind, optimiser)
        self.stack.rehearsal(
            frame, state.w[: kind.width], state.g[: kind.width], kind.batch, optimiser, surround
        )

    def rehearse_one(self, rows: Tensor, samples: int) -> None:
        """Compile the kernels of a forward pass of one model on this many samples."""
        if isinstance(self.stack, Traced):
            self.stack.rehearsal(self.stack.frame, rows, None, samples)

    def features(self, rows: Tensor, inputs: Tree, keys: Tensor | None) -> Tensor:
        """The features under fixed weights, with the dropout masks of these keys."""
        with torch.no_grad():
            self.stack.frame.open(rows, keys=keys)
            self.stack(inputs)
            assert self.stack.frame.features is not None
            return self.stack.frame.features.flatten(1).to(rows.dtype)


@dataclass(frozen=True)
class Batch:
    """The samples of this step, `[a, b]`: their indices, and each one's share in the mean, 0 for
    padding.
    """

    samples: Tensor
    share: Tensor
    length: Tensor  # [a]
    live: Tensor  # [a]
    keys: Tensor  # [a] of dropout


def step(work: Work, state: State, kind: Kind) -> None:
    """Every live client takes its next batch and steps."""
    batch = _batch(state, kind)
    whole, flat = state.wholes[:, : kind.width], batch.samples.flatten()
    inputs, targets = work.prepared(flat, _sample_keys(work, batch, whole))
    if kind.mislabel:
        targets = _mislabelled(work, batch, state, kind, targets)
    keys = batch.keys[:, None] if work.stack.drops else None
    still = {
        name: work.features(rows, inputs, keys) for name, rows in _references(state, kind).items()
    }
    optimiser = Optimiser(state, kind, batch.live, work.stack.frame.dot)
    loss, features = _derive(work, state, kind, batch, (inputs, targets), keys, still, optimiser)
    with torch.no_grad():
        at_start = _climb(state, kind, batch.live) if kind.sam else None
    if at_start is not None:
        again = replace(kind, squared=False)  # the squared losses are those at w
        _derive(work, state, again, batch, (inputs, targets), keys, still, optimiser)
    with torch.no_grad():
        if at_start is not None:
            state.w[: kind.width] = state.extra["here"][: kind.width]
        squares = optimiser.finish()
        if at_start is not None:  # as reported; those of clients without a radius are as trained
            squares = torch.where(
                state.reals[Real.radius, : kind.width] > 0, at_start, squares.sum(1)
            )[:, None]
        if kind.stop and features is not None:
            reference = still["reference" if kind.reference else "anchor"]
            _stop(state, kind, batch, drift(features, reference, masked=keys is not None))
        _count(state, kind, batch, loss, squares)


def _surround(work: Work, state: State, kind: Kind, optimiser: Optimiser) -> None:
    """What a step launches before and after the model, in a rehearsal: it changes nothing but
    gradients.
    """
    batch = _batch(state, kind)
    samples = torch.zeros_like(batch.samples).flatten()
    if not work.task.varies:
        work._images(samples)
    loss = torch.zeros(kind.width, dtype=state.dtype, device=state.device)
    outputs = torch.zeros(
        len(samples), work.task.dataset.classes, dtype=state.dtype, device=state.device
    )
    if _entropy(work, kind, outputs, samples):  # another loss may not be defined for these
        loss, _ = _loss(work, kind, batch, outputs, samples)
    squares = loss[:, None] if kind.adamw else optimiser.finish()
    _count(state, kind, batch, loss, squares.sum(1)[:, None] if kind.sam else squares)


def _derive(
    work: Work,
    state: State,
    kind: Kind,
    batch: Batch,
    samples: tuple[Tree, Tree],
    keys: Tensor | None,
    still: dict[str, Tensor],
    optimiser: Optimiser,
) -> tuple[Tensor, Tensor | None]:
    """Fill the gradients at the clients' weights; returns every client's loss, and the features if
    needed.
    """
    frame, (inputs, targets) = work.stack.frame, samples
    frame.open(state.w[: kind.width], state.g[: kind.width], keys, optimiser)
    outputs = work.stack(inputs).to(state.dtype)
    loss, slope = _loss(work, kind, batch, outputs, targets)
    features = None
    if still:
        assert frame.features is not None
        features = frame.features.flatten(1).to(state.dtype)
        if kind.contrast:
            loss = loss + _contrast(state, kind, batch, features, still)
    if kind.squared:
        _square(work, state, kind, batch, outputs.detach(), targets)
    frame.backward(loss.sum() if slope is None else outputs, slope)
    with torch.no_grad():
        optimiser.forget_still()
    return loss.detach(), None if features is None else features.detach()


def _loss(
    work: Work, kind: Kind, batch: Batch, outputs: Tensor, targets: Tree
) -> tuple[Tensor, Tensor | None]:
    """Every client's loss, and the gradient of the outputs where a kernel computes both."""
    module: Any = kernels("loss", outputs) if _entropy(work, kind, outputs, targets) else None
    if module is None or outputs.shape[1] > module.CLASSES:
        return (work.task.loss(outputs, targets).view(batch.samples.shape) * batch.share).sum(
            1
        ), None
    found: tuple[Tensor, Tensor] = module.entropy(outputs, targets, batch.share)
    return found


@torch.no_grad()
def _square(
    work: Work, state: State, kind: Kind, batch: Batch, outputs: Tensor, targets: Tree
) -> None:
    """Add the squared losses of these samples, for clients that are in their first epoch."""
    whole = state.wholes[:, : kind.width]
    counts = batch.live & (whole[Whole.POSITION] < whole[Whole.BATCHES])
    losses = work.task.loss(outputs, targets).view(batch.samples.shape).double()
    squares = torch.where(batch.share > 0, losses.square(), 0.0).sum(1)
    sums = state.sums[Sum.SQUARED, : kind.width]
    sums.add_(torch.where(counts, squares, 0.0))


def _entropy(work: Work, kind: Kind, outputs: Tensor, targets: Tree) -> bool:
    """Whether the loss is cross-entropy alone, of single classes."""
    if work.task.loss is not cross_entropy or kind.contrast or not isinstance(targets, Tensor):
        return False
    classes = outputs.ndim == 2 and outputs.shape[1] > 1 and outputs.dtype == torch.float32
    return classes and targets.shape == outputs.shape[:1] and targets.dtype == torch.int64


def _climb(state: State, kind: Kind, live: Tensor) -> Tensor:
    """SAM: move every live client to the sharpest point within its radius, to first order; ‖∇L‖²
    before that.
    """
    w, g, here = (rows[: kind.width] for rows in (state.w, state.g, state.extra["here"]))
    squares = square_norms(g)
    here.copy_(w)
    w.addcmul_(
        g, (state.reals[Real.radius, : kind.width] * live / (squares.sqrt() + SAM_EPS))[:, None]
    )
    return squares


ODD = 0x1E3779B97F4A7C15  # spreads the keys of the steps


def _sample_keys(work: Work, batch: Batch, whole: Tensor) -> Tensor | None:
    if not work.task.varies:
        return None
    run, client, step = (
        whole[each, :, None] for each in (Whole.CROPS, Whole.CLIENT, Whole.POSITION)
    )
    # The seed differs between runs, so it is passed where a tensor is allowed: 0 ^ seed is seed ^
    # 0.
    return sample_keys(batch.samples, seed=0, round=run, client=client, step=step).flatten()


def _mislabelled(work: Work, batch: Batch, state: State, kind: Kind, targets: Tensor) -> Tensor:
    run, client = (state.wholes[each, : kind.width, None] for each in (Whole.LABELS, Whole.CLIENT))
    keys = sample_keys(batch.samples, seed=0, round=run, client=client, step=0)
    noise = state.reals[Real.label_noise, : kind.width, None].expand_as(keys)
    return mislabelled(targets, keys.flatten(), noise.flatten(), work.task.dataset)


def _batch(state: State, kind: Kind) -> Batch:
    module: Any = kernels("batch", state.w)
    if module is not None:
        return Batch(
            *module.batch(state.wholes, state.order, state.on, kind.width, kind.batch, state.dtype)
        )
    whole = state.wholes[:, : kind.width]
    position, size, batches = whole[Whole.POSITION], whole[Whole.SIZE], whole[Whole.BATCHES]
    live = (position < whole[Whole.TOTAL]) & state.on
    taken = position % batches * size
    length = torch.minimum(size, whole[Whole.END] - taken) * live
    places = torch.arange(kind.batch, device=state.device)
    mask = places < length[:, None]
    first = torch.div(position, batches, rounding_mode="floor") * whole[Whole.END] + taken
    samples = state.order[: kind.width].gather(1, (first[:, None] + places) * mask)
    share = mask / length.clamp(min=1)[:, None].to(state.dtype)
    return Batch(samples, share, length, live, whole[Whole.DROPS] + position * ODD)


def _count(state: State, kind: Kind, batch: Batch, loss: Tensor, squares: Tensor) -> None:
    """Add this step to what the clients have done; `squares` is `[a, pieces]`."""
    module: Any = kernels("batch", state.w)
    if module is not None:
        module.count(state.wholes, state.sums, batch.length, batch.live, loss, squares)
        return
    whole, sums = state.wholes[:, : kind.width], state.sums[:, : kind.width]
    sums[Sum.LOSS].addcmul_(loss.double(), batch.length.double())
    sums[Sum.GRAD_SQ].addcmul_(squares.sum(1).double(), batch.live.double())
    whole[Whole.SAMPLES] += batch.length
    whole[Whole.POSITION] += batch.live


def _references(state: State, kind: Kind) -> dict[str, Tensor]:
    """The fixed models whose features this step compares with."""
    wanted = {
        "anchor": kind.contrast or (kind.stop and not kind.reference),
        "reference": kind.reference,
        "previous": kind.contrast,
    }
    return {name: state.extra[name][: kind.width] for name, asked in wanted.items() if asked}


def _contrast(
    state: State, kind: Kind, batch: Batch, features: Tensor, still: dict[str, Tensor]
) -> Tensor:
    """The contrastive term of every client."""
    reals = state.reals[:, : kind.width]
    toward, away = (
        F.cosine_similarity(features, still[name], dim=1) for name in ("anchor", "previous")
    )
    heat = reals[Real.temperature][:, None].expand(-1, kind.batch).flatten()
    logits = torch.stack([toward / heat, away / heat], 1)
    terms = -logits.log_softmax(1)[:, 0].view(batch.samples.shape)
    return (terms * batch.share).sum(1) * reals[Real.contrast]


def _stop(state: State, kind: Kind, batch: Batch, cosines: Tensor) -> None:
    """A client whose features have diverged stops after this step, or after the epoch."""
    whole, sums = state.wholes[:, : kind.width], state.sums[:, : kind.width]
    cosines = cosines.view(batch.samples.shape)
    mean = (cosines * batch.share).sum(1)
    least = torch.where(batch.share > 0, cosines, torch.inf).amin(1)
    similarity = torch.where(whole[Whole.LEAST] > 0, least, mean)
    looks = batch.live & (whole[Whole.STOPS] > 0)
    sums[Sum.SIMILARITY].copy_(torch.where(looks, similarity.double(), sums[Sum.SIMILARITY]))
    flag = looks & (
        (whole[Whole.FLAG] > 0) | (similarity < state.reals[Real.stop_below, : kind.width])
    )
    last = (whole[Whole.POSITION] + 1) % whole[Whole.BATCHES] == 0  # batch of the epoch
    halt = flag & (last | (whole[Whole.AT_ONCE] > 0))
    whole[Whole.TOTAL].copy_(torch.where(halt, whole[Whole.POSITION] + 1, whole[Whole.TOTAL]))
    whole[Whole.FLAG].copy_(torch.where(looks, flag & ~last, whole[Whole.FLAG] > 0))
