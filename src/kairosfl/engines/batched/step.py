"""One training step of the clients in the slots; nothing in it depends on the host, so it can be captured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kairosfl.client.trainer import SAM_EPS
from kairosfl.engines.batched.state import Kind, Real, State, Sum, Whole
from kairosfl.engines.batched.traced import Stack
from kairosfl.engines.batched.update import Optimiser, square_norms
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.prepare import mislabelled, sample_keys
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import Tree


@dataclass(frozen=True)
class Work:
    """What all steps share: the stacked model, the data on the device, the loss."""

    stack: Stack
    task: Task
    data: Samples | Streamed
    compute: torch.dtype  # of activations; the weights keep theirs

    def prepared(self, samples: Tensor, keys: Tensor | None = None) -> tuple[Any, Any]:
        """These samples as the model sees them, in training transformed by these keys, and their targets."""
        inputs, targets = self.data.read(samples, keys)
        if keys is not None:
            inputs = self.task.augmented(inputs, keys)
        return self.task.prepared(inputs, self.compute), targets

    def features(self, rows: Tensor, inputs: Tree) -> Tensor:
        """The features under fixed weights, dropout off."""
        with torch.no_grad():
            self.stack.frame.open(rows)
            self.stack(inputs)
            assert self.stack.frame.features is not None
            return self.stack.frame.features.flatten(1).to(rows.dtype)


@dataclass(frozen=True)
class Batch:
    """The samples of this step, `[a, b]`: their indices, which are not padding, and each one's share in the mean."""

    samples: Tensor
    mask: Tensor
    share: Tensor
    length: Tensor  # [a]
    live: Tensor  # [a]
    last: Tensor  # [a] whether the epoch ends with this batch


def step(work: Work, state: State, kind: Kind) -> None:
    """Every live client takes its next batch and steps."""
    batch = _batch(state, kind)
    whole, flat = state.wholes[:, : kind.width], batch.samples.flatten()
    inputs, targets = work.prepared(flat, _sample_keys(work, batch, whole))
    if kind.mislabel:
        targets = _mislabelled(work, batch, state, kind, targets)
    keys = (whole[Whole.DROPS] + whole[Whole.POSITION] * _ODD)[:, None] if work.stack.drops else None
    still = {name: work.features(rows, inputs) for name, rows in _references(state, kind).items()}
    optimiser = Optimiser(state, kind, batch.live, work.stack.frame.dot)
    loss, features = _derive(work, state, kind, batch, (inputs, targets), keys, still, optimiser)
    with torch.no_grad():
        at_start = _climb(state, kind, batch.live) if kind.sam else None
    if at_start is not None:
        _derive(work, state, kind, batch, (inputs, targets), keys, still, optimiser)
    with torch.no_grad():
        if at_start is not None:
            state.w[: kind.width] = state.extra["here"][: kind.width]
        squares = optimiser.finish()
        if at_start is not None:  # as reported; those of clients without a radius are as trained
            squares = torch.where(state.reals[Real.radius, : kind.width] > 0, at_start, squares)
        state.sums[Sum.LOSS, : kind.width].addcmul_(loss.double(), batch.length.double())
        state.sums[Sum.GRAD_SQ, : kind.width].addcmul_(squares.double(), batch.live.double())
        if kind.stop and features is not None:
            _stop(state, kind, batch, features, still["reference" if kind.reference else "anchor"])
        whole[Whole.SAMPLES] += batch.length
        whole[Whole.POSITION] += batch.live


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
    """Fill the gradients at the clients' weights; returns every client's loss, and the features if needed."""
    frame, (inputs, targets) = work.stack.frame, samples
    frame.open(state.w[: kind.width], state.g[: kind.width], keys, optimiser)
    outputs = work.stack(inputs).to(state.dtype)
    loss = (work.task.loss(outputs, targets).view(batch.samples.shape) * batch.share).sum(1)
    features = None
    if still:
        assert frame.features is not None
        features = frame.features.flatten(1).to(state.dtype)
        if kind.contrast:
            loss = loss + _contrast(state, kind, batch, features, still)
    frame.backward(loss.sum())
    return loss.detach(), None if features is None else features.detach()


def _climb(state: State, kind: Kind, live: Tensor) -> Tensor:
    """SAM: move every live client to the sharpest point within its radius, to first order; ‖∇L‖² before that."""
    w, g, here = (rows[: kind.width] for rows in (state.w, state.g, state.extra["here"]))
    squares = square_norms(g)
    here.copy_(w)
    w.addcmul_(g, (state.reals[Real.radius, : kind.width] * live / (squares.sqrt() + SAM_EPS))[:, None])
    return squares


_ODD = 0x1E3779B97F4A7C15  # spreads the keys of the steps


def _sample_keys(work: Work, batch: Batch, whole: Tensor) -> Tensor | None:
    if not work.task.varies:
        return None
    run, client, step = (whole[each, :, None] for each in (Whole.CROPS, Whole.CLIENT, Whole.POSITION))
    # The seed differs between runs, so it is passed where a tensor is allowed: 0 ^ seed is seed ^ 0.
    return sample_keys(batch.samples, seed=0, round=run, client=client, step=step).flatten()


def _mislabelled(work: Work, batch: Batch, state: State, kind: Kind, targets: Tensor) -> Tensor:
    run, client = (state.wholes[each, : kind.width, None] for each in (Whole.LABELS, Whole.CLIENT))
    keys = sample_keys(batch.samples, seed=0, round=run, client=client, step=0)
    noise = state.reals[Real.label_noise, : kind.width, None].expand_as(keys)
    return mislabelled(targets, keys.flatten(), noise.flatten(), work.task.dataset)


def _batch(state: State, kind: Kind) -> Batch:
    whole = state.wholes[:, : kind.width]
    position, size, batches = whole[Whole.POSITION], whole[Whole.SIZE], whole[Whole.BATCHES]
    live = (position < whole[Whole.TOTAL]) & state.on
    within = position % batches
    taken = within * size
    length = torch.minimum(size, whole[Whole.END] - taken) * live
    places = torch.arange(kind.batch, device=state.device)
    mask = places < length[:, None]
    first = torch.div(position, batches, rounding_mode="floor") * whole[Whole.END] + taken
    samples = state.order[: kind.width].gather(1, (first[:, None] + places) * mask)
    share = mask / length.clamp(min=1)[:, None].to(state.dtype)
    return Batch(samples, mask, share, length, live, within + 1 == batches)


def _references(state: State, kind: Kind) -> dict[str, Tensor]:
    """The fixed models whose features this step compares with."""
    wanted = {
        "anchor": kind.contrast or (kind.stop and not kind.reference),
        "reference": kind.reference,
        "previous": kind.contrast,
    }
    return {name: state.extra[name][: kind.width] for name, asked in wanted.items() if asked}


def _contrast(state: State, kind: Kind, batch: Batch, features: Tensor, still: dict[str, Tensor]) -> Tensor:
    """MOON's term of every client."""
    reals = state.reals[:, : kind.width]
    toward, away = (F.cosine_similarity(features, still[name], dim=1) for name in ("anchor", "previous"))
    heat = reals[Real.temperature][:, None].expand(-1, kind.batch).flatten()
    logits = torch.stack([toward / heat, away / heat], 1)
    terms = -logits.log_softmax(1)[:, 0].view(batch.samples.shape)
    return (terms * batch.share).sum(1) * reals[Real.contrast]


def _stop(state: State, kind: Kind, batch: Batch, features: Tensor, reference: Tensor) -> None:
    """ALT: a client whose features have diverged stops after this step, or after the epoch."""
    whole, sums = state.wholes[:, : kind.width], state.sums[:, : kind.width]
    cosines = F.cosine_similarity(features, reference, dim=1).view(batch.samples.shape)
    mean = (cosines * batch.share).sum(1)
    least = torch.where(batch.mask, cosines, torch.inf).amin(1)
    similarity = torch.where(whole[Whole.LEAST] > 0, least, mean)
    looks = batch.live & (whole[Whole.STOPS] > 0)
    sums[Sum.SIMILARITY].copy_(torch.where(looks, similarity.double(), sums[Sum.SIMILARITY]))
    flag = looks & ((whole[Whole.FLAG] > 0) | (similarity < state.reals[Real.stop_below, : kind.width]))
    halt = flag & (batch.last | (whole[Whole.AT_ONCE] > 0))
    whole[Whole.TOTAL].copy_(torch.where(halt, whole[Whole.POSITION] + 1, whole[Whole.TOTAL]))
    whole[Whole.FLAG].copy_(torch.where(looks, flag & ~batch.last, whole[Whole.FLAG] > 0))
