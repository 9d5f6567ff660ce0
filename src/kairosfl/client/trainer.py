"""One client following one brief, in plain PyTorch: the reference for every engine.

    g = scale · ∇L + pull · (w − start) + push       ∇L at w, or at w + radius · ∇L / ‖∇L‖ (SAM)
    then `optimizers`

`clip` acts on ∇L alone, or with `clip_after` on g. The weights live in one flat vector, and the model's trained
parameters are views of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.client.fisher import fisher_trace
from kairosfl.client.local import hidden
from kairosfl.client.optimizers import Moments, Step, norms
from kairosfl.core.fields import AFTER, BEFORE, FISHER, FISHER_SAMPLED, SCORE_AFTER, SCORE_BEFORE, Brief, Report
from kairosfl.core.streams import Streams, stream, word
from kairosfl.tasks.forward import attempt
from kairosfl.tasks.prepare import mislabelled, ordered, sample_keys
from kairosfl.tasks.task import Task, last_linear
from kairosfl.tasks.tree import Tree
from kairosfl.tasks.vector import flatten, replicas, trained

SCORING_BATCH = 512
SAM_EPS = 1e-12  # avoids dividing by a gradient norm of zero
LARGE = 31 << 20  # bytes; glibc adapts its threshold to blocks below 32 MiB


def batches(brief: Brief, n: int, streams: Streams | None = None) -> Iterator[list[np.ndarray]]:
    """The batches of every epoch, as sample numbers below n, in an order that depends on nothing but the brief."""
    order = (streams or Streams())(brief.seed, "batches", brief.round, brief.client)
    size = min(brief.batch_size, n)
    end = n - n % size if brief.drop_last else n
    for _ in range(brief.epochs):
        shuffled = order.permutation(n)
        yield [shuffled[i : min(i + size, end)] for i in range(0, end, size)]


# For a batch: its loss, the cosine that a stop rule checks, and the gradients of the loss.
Derivative = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]
Differentiate = Callable[[Tree, Tree, Brief, dict[str, Tensor]], Derivative]


class Fisher(NamedTuple):
    """The trace of the Fisher information, if requested, with the seconds and, on a GPU, the bytes it took."""

    trace: float | None = None
    seconds: float = 0.0
    bytes: int = 0

    def reported(self) -> dict[str, float | int]:
        """Its fields of a report."""
        if self.trace is None:
            return {}
        return {"fisher": self.trace, "fisher_seconds": self.seconds, "fisher_bytes": self.bytes}


class Trainer:
    """A model on a device that follows briefs, one after another, and keeps nothing between them."""

    def __init__(self, task: Task, device: torch.device, secret: bytes = b"") -> None:
        self.task = task
        self.secret = secret  # of a device, for noise that nobody else can draw
        self.device = device
        self.layout = task.layout
        self.model, self.still = replicas(task.model, device, 2)
        self.model.train()
        self.still.eval()  # runs with any vector and changes none
        self.parameters = list(trained(self.model).values())
        self.w = flatten(self.model)
        for (_, view), parameter in zip(self.layout.views(self.w), self.parameters, strict=True):
            parameter.data = view.view(parameter.shape)
        self.views = [parameter.detach() for parameter in self.parameters]
        self.moments = Moments(self.views)
        self.random: bool | None = None  # whether the model draws random numbers; known after the first client
        self.streams = Streams()
        self.differentiate: Differentiate = self._differentiate  # an engine may substitute a faster one
        self.features: dict[nn.Module, Tensor] = {}
        self.listening = False
        self.data = task.dataset.train.to(device)
        # Once a large block was freed, glibc keeps what a step frees instead of returning it to the system, which
        # would clear every page anew for the next step: a fifth of a small CNN's time. The block is never touched.
        torch.empty(LARGE, dtype=torch.uint8)

    def follow(self, brief: Brief, delta: Tensor | None = None) -> Report:
        """Train as the brief says; the report holds the change of the weights, written to `delta` if given."""
        began = time.perf_counter()
        mine = torch.from_numpy(self.task.clients[brief.client].astype(np.int64)).to(self.device)
        start = brief.start.to(self.device)
        scores = {name: self.score(start, mine, name) for name in BEFORE if name in brief.measure}
        fisher = self.fisher(start, mine, brief)
        with self._dropout(brief):
            steps, epochs, loss, grad_sq, similarity = self._train(brief, start, mine)
        scores |= {name: self.score(self.w, mine, name) for name in AFTER if name in brief.measure}
        report = Report(
            client=brief.client,
            n=len(mine),
            steps=steps,
            epochs=epochs,
            delta=torch.sub(self.w, start, out=delta),
            loss=loss,
            grad_sq=grad_sq,
            seconds=time.perf_counter() - began,
            similarity=similarity,
            **scores,
            **fisher.reported(),
        )
        return hidden(report, brief, self.secret)

    def _train(self, brief: Brief, start: Tensor, mine: Tensor) -> tuple[int, float, float, float, float | None]:
        self.w.copy_(start)
        starts = self._tensors(start) if brief.pull else []
        step = Step(brief, self.views, self.moments, starts, self._push(brief))
        references = self._references(brief, start)
        # If a sample is the same in every epoch, so are a fixed model's features of it.
        known = {} if self.task.varies else {name: self._all_features(v, mine) for name, v in references.items()}
        losses: list[Tensor] = []  # of every step; read at the end, so that no step waits for the device
        squares: list[Tensor] = []
        similarity: Tensor | float = 1.0
        samples, epochs = 0, 0.0
        for epoch in batches(brief, len(mine), self.streams):
            stop: Tensor | bool = False
            done = 0
            for batch in epoch:
                picked = torch.from_numpy(batch).to(self.device)
                rows = mine[picked]
                inputs, targets = self._batch(rows, brief, len(losses))
                still = {
                    name: known[name][picked] if known else self._still_features(vector, inputs)
                    for name, vector in references.items()
                }
                loss, similar, gradients = self.differentiate(inputs, targets, brief, still)
                if brief.radius:
                    squares.append(norms(gradients).square().sum())
                    gradients = self._sharper(gradients, inputs, targets, brief, still)
                square = step(_owned(gradients))
                if not brief.radius:
                    squares.append(square)
                losses.append(loss * len(batch))
                samples += len(batch)
                done += 1
                if similar is not None:
                    similarity = similar
                    stop = stop | (similar < brief.stop_below)
                    if brief.stop_per == "batch" and stop:
                        break
            epochs += done / len(epoch)
            if brief.stop_below is not None and stop:
                break
        # A plain loop: from Python 3.12 on, sum() gives a different result.
        loss_sum, grad_sq = (
            reduce(add, each) for each in torch.stack([torch.stack(losses), torch.stack(squares)]).tolist()
        )
        seen = None if brief.stop_below is None else float(similarity)
        return len(losses), epochs, loss_sum / samples, grad_sq, seen

    def _differentiate(self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]) -> Derivative:
        loss, similar = self._loss(inputs, targets, brief, still)
        self.features.pop(self.model, None)  # or the whole forward pass would stay in memory
        return loss.detach(), similar, torch.autograd.grad(loss, self.parameters, materialize_grads=True)

    def _sharper(
        self, gradients: tuple[Tensor, ...], inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> tuple[Tensor, ...]:
        """The gradients at the sharpest point within `radius`, to first order (SAM); the weights stay as they are."""
        here = self.w.clone()
        length = norms(gradients).square().sum().sqrt()
        with torch.no_grad():
            torch._foreach_add_(self.views, torch._foreach_mul(gradients, brief.radius / (length + SAM_EPS)))
        gradients = self.differentiate(inputs, targets, brief, still)[2]
        self.w.copy_(here)
        return gradients

    def _push(self, brief: Brief) -> list[Tensor]:
        return [] if brief.push is None else self._tensors(brief.push)

    def _tensors(self, vector: Tensor) -> list[Tensor]:
        return [view for _, view in self.layout.views(vector.to(self.device))]

    def _loss(
        self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The batch's mean loss, and the cosine that a stop rule checks; `still` holds the fixed models' features."""
        outputs = attempt(self.model, inputs)
        loss = self.task.loss(outputs, targets).mean()
        if not still:
            return loss, None
        features = self.features[self.model].flatten(1)
        if "previous" in still:
            toward = F.cosine_similarity(features, still["start"], dim=1)
            away = F.cosine_similarity(features, still["previous"], dim=1)
            logits = torch.stack([toward, away], 1) / brief.temperature
            loss = loss + brief.contrast * F.cross_entropy(logits, logits.new_zeros(len(logits), dtype=torch.int64))
        if brief.stop_below is None:
            return loss, None
        cosines = F.cosine_similarity(features.detach(), still["stop" if "stop" in still else "start"], dim=1)
        return loss, cosines.mean() if brief.stop_statistic == "mean" else cosines.min()

    def _references(self, brief: Brief, start: Tensor) -> dict[str, Tensor]:
        """The fixed models whose features this brief compares with."""
        references = {}
        if brief.stop_reference is not None:
            references["stop"] = brief.stop_reference.to(self.device)
        if brief.contrast:
            references["previous"] = brief.previous.to(self.device)
        if brief.contrast or (brief.stop_below is not None and brief.stop_reference is None):
            references["start"] = start
        if references:
            self._listen()
        return references

    def _listen(self) -> None:
        if self.listening:
            return
        for model in (self.model, self.still):
            last_linear(model).register_forward_pre_hook(
                lambda _, arguments, model=model: self.features.__setitem__(model, arguments[0])
            )
        self.listening = True

    def _all_features(self, vector: Tensor, rows: Tensor) -> Tensor:
        return torch.cat([self._still_features(vector, self._inputs(chunk)) for chunk in rows.split(SCORING_BATCH)])

    def _still_features(self, vector: Tensor, inputs: Tree) -> Tensor:
        with torch.no_grad():
            self.predict(vector, inputs)
        return self.features[self.still].flatten(1)

    def _batch(self, rows: Tensor, brief: Brief, step: int) -> tuple[Any, Any]:
        """Inputs and targets of a training step."""
        keys = None
        if self.task.varies:
            seed = word(brief.seed, "augment", brief.round)
            keys = sample_keys(rows, seed=seed, round=0, client=brief.client, step=step)
        inputs, targets = self.data.read(rows, keys)
        if keys is not None:
            inputs = self.task.augmented(inputs, keys)
        if brief.label_noise:
            seed = word(brief.seed, "labels")
            keys = sample_keys(rows, seed=seed, round=0, client=brief.client, step=0)
            targets = mislabelled(targets, keys, brief.label_noise, self.task.dataset)
        return self._prepare(inputs), targets

    def _samples(self, rows: Tensor) -> tuple[Any, Any]:
        """Inputs and targets as they are."""
        inputs, targets = self.data.read(rows)
        return self._prepare(inputs), targets

    def _inputs(self, rows: Tensor) -> Any:
        return self._samples(rows)[0]

    def _prepare(self, inputs: Tree) -> Any:
        return ordered(self.task.prepared(inputs, self.w.dtype))

    @contextmanager
    def _dropout(self, brief: Brief) -> Iterator[None]:
        """Make dropout a function of the brief, independent of the clients that trained before."""
        if self.random is False:
            yield
            return
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(word(brief.seed, "dropout", brief.round, brief.client))
            before = self._generators() if self.random is None else []
            yield
            if self.random is None:
                self.random = not all(map(torch.equal, before, self._generators()))

    def _generators(self) -> list[Tensor]:
        on_device = [torch.cuda.get_rng_state(self.device)] if self.device.type == "cuda" else []
        return [torch.get_rng_state(), *on_device]

    def predict(self, vector: Tensor, inputs: Tree) -> Tensor:
        """The outputs of the model with these weights, dropout off."""
        return attempt(self.still, inputs, dict(self.layout.views(vector)))

    @torch.no_grad()
    def score(self, vector: Tensor, rows: Tensor, name: str = SCORE_AFTER) -> float:
        """Mean loss, or accuracy, on these training samples."""
        of = scored(self.task, name)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for chunk in rows.split(SCORING_BATCH):
            inputs, targets = self._samples(chunk)
            total += of(self.predict(vector, inputs), targets).double().sum()
        return float(total) / len(rows)

    def fisher(self, vector: Tensor, rows: Tensor, brief: Brief) -> Fisher:
        """Trace of the Fisher information on these samples if the brief asks for it, and what it cost."""
        if not brief.measure & {FISHER, FISHER_SAMPLED}:
            return Fisher()
        began, counts = time.perf_counter(), self.device.type == "cuda"
        if counts:
            torch.cuda.reset_peak_memory_stats(self.device)
        held = torch.cuda.memory_allocated(self.device) if counts else 0
        draws = stream(brief.seed, "fisher", brief.round, brief.client) if FISHER_SAMPLED in brief.measure else None
        trace = fisher_trace(self.still, dict(self.layout.views(vector)), self._inputs, rows, draws)
        most = torch.cuda.max_memory_allocated(self.device) if counts else 0
        return Fisher(trace, time.perf_counter() - began, most - held)


def scored(task: Task, name: str) -> Callable[[Any, Any], Tensor]:
    """What a measurement averages over the samples: the loss, or which are correct."""
    return task.loss if name in (SCORE_BEFORE, SCORE_AFTER) else task.accuracy


def _owned(gradients: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients that are safe to write to: autograd may return one tensor twice (a + b) or an expanded scalar (sum)."""
    owned: list[Tensor] = []
    places: set[int] = set()
    for gradient in gradients:
        place = gradient.untyped_storage().data_ptr()
        shared = place in places or 0 in gradient.stride()
        owned.append(gradient.clone(memory_format=torch.contiguous_format) if shared else gradient)
        places.add(place)
    return owned
