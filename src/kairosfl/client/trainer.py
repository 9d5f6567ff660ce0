"""One client following one brief, in plain PyTorch: the reference for every engine.

    g = scale · ∇L + pull · (w − start) + push       ∇L at w, or at w + radius · ∇L / ‖∇L‖ (SAM)
    then `optimizers`

`clip` acts on ∇L alone, or with `clip_after` on g. The weights live in one flat vector, and the
model's trained parameters are views of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial, reduce
from operator import add
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.client.fisher import fisher_trace
from kairosfl.client.local import hidden
from kairosfl.client.optimizers import Moments, Step, norms
from kairosfl.client.second import Second, flat
from kairosfl.core.fields import (
    AFTER,
    BEFORE,
    FISHER,
    FISHER_SAMPLED,
    SCORE_AFTER,
    SCORE_BEFORE,
    SQUARED_LOSS,
    Brief,
    Report,
)
from kairosfl.core.streams import Streams, stream, word
from kairosfl.core.work import epoch_of
from kairosfl.tasks.forward import attempt
from kairosfl.tasks.prepare import mislabelled, ordered, sample_keys
from kairosfl.tasks.task import Task, last_linear
from kairosfl.tasks.tree import Tree
from kairosfl.tasks.vector import replicas, trained

SCORING_BATCH = 512
SAM_EPS = 1e-12  # avoids dividing by a gradient norm of zero
LARGE = 31 << 20  # bytes; glibc adapts its threshold to blocks below 32 MiB


def batches(
    brief: Brief, n: int, streams: Streams | None = None, purpose: str = "batches"
) -> Iterator[list[np.ndarray]]:
    """The batches of every epoch, as sample numbers below n.

    Their order depends on nothing but the brief.

    Args:
        brief: What the client is told.
        n: How many samples it has.
        streams: A source of generators to use again; by default a new one.
        purpose: Of the random numbers.
    """
    source = streams or Streams()
    order = source(brief.seed, purpose, brief.round, brief.client)
    size, end, _ = map(int, epoch_of(n, brief.batch_size, drop_last=brief.drop_last))
    for _ in range(brief.epochs):
        shuffled = order.permutation(n)
        yield [shuffled[i : min(i + size, end)] for i in range(0, end, size)]


# For a batch: its loss, the cosine that a stop rule checks, and the gradients of the loss.
Derivative = tuple[Tensor, Tensor | None, tuple[Tensor, ...]]
Differentiate = Callable[[Tree, Tree, Brief, dict[str, Tensor]], Derivative]


class Fisher(NamedTuple):
    """The trace of the Fisher information, if requested, and what it took.

    Args:
        trace: The trace; none: nobody asked.
        seconds: How long it took.
        bytes: The memory that it took on a GPU.
    """

    trace: float | None = None
    seconds: float = 0.0
    bytes: int = 0

    def reported(self) -> dict[str, float | int]:
        """Its fields of a report."""
        if self.trace is None:
            return {}
        return {"fisher": self.trace, "fisher_seconds": self.seconds, "fisher_bytes": self.bytes}


class Visit(NamedTuple):
    """What a client's training came to."""

    steps: int
    epochs: float
    loss: float
    grad_sq: float
    similarity: float | None
    squared_loss: float | None


class Trainer:
    """A model on a device that follows briefs one by one, and keeps nothing between them."""

    def __init__(self, task: Task, device: torch.device, secret: bytes = b"") -> None:
        self.task = task
        self.secret = secret  # of a device, for noise that nobody else can draw
        self.device = device
        self.layout = task.layout
        self.model, self.still = replicas(task.model, device, 2)
        self.model.train()
        self.still.eval()  # runs with any vector and changes none
        self.whole = self.layout.joined()  # of w: the shared tensors, then the client's own
        by_name = trained(self.model)
        self.parameters = [by_name[entry.name] for entry in self.whole.entries]
        self.w = torch.cat([parameter.detach().reshape(-1) for parameter in self.parameters])
        for (_, view), parameter in zip(self.whole.views(self.w), self.parameters, strict=True):
            parameter.data = view.view(parameter.shape)
        own = self.w[self.layout.size :]
        self.untrained = own.clone()  # the own part before a client has trained
        self.views = [parameter.detach() for parameter in self.parameters]
        self.moments = Moments(self.views)
        # Whether the model draws random numbers; known after the first client.
        self.random: bool | None = None
        # Whether its forward pass in training does; known once features are compared.
        self.masks: bool | None = None
        self.streams = Streams()
        # An engine may substitute a faster one.
        self.differentiate: Differentiate = self._differentiate
        self.features: dict[nn.Module, Tensor] = {}
        self.base: Tensor | None = None  # how far the frozen weights are from the task's
        self.unmoved: dict[str, Tensor] = {}  # and the task's
        # Squared losses of the batches, where they are asked for.
        self.squared: list[Tensor] | None = None
        self.listening = False
        self.data = task.dataset.train.to(device)
        # Once a large block was freed, glibc keeps what a step frees instead of returning it to the
        # system, which would clear every page anew for the next step: a fifth of a small CNN's
        # time. The block is never touched.
        torch.empty(LARGE, dtype=torch.uint8)

    def follow(self, brief: Brief, delta: Tensor | None = None) -> Report:
        """Train as the brief says.

        Args:
            brief: What the client is told.
            delta: Where the change of the weights is written to; by default to a new tensor.
        """
        began = time.perf_counter()
        samples = self.task.clients[brief.client].astype(np.int64)
        rows = torch.from_numpy(samples).to(self.device)
        self._rebase(brief.base)
        choice, shared = self._chosen(brief, rows)
        d = len(shared)
        start = self.joined(shared, brief)
        second = None
        if brief.second_lr is not None:
            second = Second(brief, start)

        # --- measure before ---
        scores = self._scores(_evaluated(start, second), rows, BEFORE, brief)
        fisher = self.fisher(start, rows, brief)
        measured = {"client": brief.client, "n": len(rows), "choice": choice, **fisher.reported()}
        if not brief.epochs:  # measure only: no update, and nothing that is kept moves
            unmoved: dict[str, Any] = {}
            if delta is None:
                delta = start.new_empty(0)
            else:  # others of its cohort train
                delta.zero_()
                unmoved = self._kept(start[d:], second)
            return Report(
                steps=0,
                epochs=0.0,
                delta=delta,
                loss=0.0,
                grad_sq=0.0,
                seconds=time.perf_counter() - began,
                **unmoved,
                **measured,
                **scores,
            )

        # --- train ---
        with self._dropout(brief):
            if brief.own_epochs:
                self._train_own(brief, start, rows)
            if second is not None and brief.second_when == "before":
                self._train_second(brief, second, start, rows)
            visit = self._train(brief, start, rows, second)
            if second is not None and brief.second_when == "after":
                self._train_second(brief, second, self.w, rows)

        # --- measure after ---
        scores |= self._scores(_evaluated(self.w, second), rows, AFTER, brief)
        report = Report(
            steps=visit.steps,
            epochs=visit.epochs,
            delta=torch.sub(self.w[:d], shared, out=delta),
            loss=visit.loss,
            grad_sq=visit.grad_sq,
            seconds=time.perf_counter() - began,
            similarity=visit.similarity,
            squared_loss=visit.squared_loss,
            **self._kept(self.w[d:].clone(), second),
            **measured,
            **scores,
        )
        return hidden(report, brief, self.secret)

    def _scores(
        self, vector: Tensor, rows: Tensor, names: Iterable[str], brief: Brief
    ) -> dict[str, float]:
        """Those of these measurements that the brief asks for."""
        scores = {}
        for name in names:
            if name in brief.measure:
                scores[name] = self.score(vector, rows, name)
        return scores

    def _kept(self, own: Tensor, second: Second | None) -> dict[str, Any]:
        """What the client keeps after its visit, as fields of a report."""
        kept: dict[str, Any] = {}
        if self.layout.own:
            kept["own"] = own
        if second is not None:
            kept["second"] = second.vector
            if second.brief.mixed:
                kept["mix"] = second.mix
        return kept

    def _chosen(self, brief: Brief, rows: Tensor) -> tuple[int | None, Tensor]:
        """Which of the candidates the client starts from, and these shared weights."""
        if brief.candidates is None:
            return None, self._within(brief, brief.start.to(self.device))
        candidates = self._within(brief, brief.candidates.to(self.device))
        losses = [self.score(self.joined(candidate, brief), rows) for candidate in candidates]
        choice = int(np.argmin(losses))
        return choice, candidates[choice]

    def _within(self, brief: Brief, vectors: Tensor) -> Tensor:
        """The vectors with zeros where the client has no component of a low-rank pair.

        Both of its factors are zero there, and so are their gradients: training leaves them so.
        """
        if brief.rank is None:
            return vectors
        return vectors * self.layout.within(brief.rank).to(self.device)

    def joined(self, shared: Tensor, brief: Brief) -> Tensor:
        """All trained weights: the shared ones, then the client's own.

        Args:
            shared: Of length d, on this trainer's device.
            brief: What the client was told; its `own` is on any device.
        """
        if not self.layout.own:
            return shared
        return torch.cat([shared, brief.own.to(shared)])

    def _rebase(self, base: Tensor | None) -> None:
        """Move the frozen weights, which both copies of the model share, where rules want them."""
        if base is self.base:
            return
        frozen = _tensors(self.model)
        if self.base is None:  # the task's own tensors stay as they are
            self.unmoved = {}
            frozen_too = _tensors(self.still)
            for entry in self.layout.base:
                unmoved = frozen[entry.name].detach().clone()
                self.unmoved[entry.name] = unmoved
                shared = unmoved.clone()
                frozen[entry.name].data = shared
                frozen_too[entry.name].data = shared
        for entry in self.layout.base:
            moved = self.unmoved[entry.name]
            if base is not None:
                moved = moved.float() + entry.view(base.to(self.device))
            frozen[entry.name].data.copy_(moved)
        self.base = base

    def _train_own(self, brief: Brief, start: Tensor, rows: Tensor) -> None:
        """Train the client's own part alone; where the shared weights start does not change."""
        shared = frozenset(range(len(self.layout.entries)))
        terms = {
            "epochs": brief.own_epochs,
            "still": shared,
            "stop_below": None,
            "contrast": 0.0,
            "max_steps": None,
        }
        phase: Brief = replace(brief, **terms)  # type: ignore[type-var]
        self._train(phase, start, rows, None, "own batches")
        d = self.layout.size
        start[d:] = self.w[d:]

    def _train_second(self, brief: Brief, second: Second, w: Tensor, rows: Tensor) -> None:
        """All epochs of the second model, while the other weights stay at w."""
        held = w.clone()
        number = 0  # of the step
        for epoch in batches(brief, len(rows), self.streams, "second batches"):
            for batch in epoch:
                picked = torch.from_numpy(batch).to(self.device)
                inputs, targets = self._batch(rows[picked], brief, number)
                second.train(held, partial(self._gradient_at, inputs, targets, brief))
                number += 1
        self.w.copy_(held)

    def _gradient_at(self, inputs: Tree, targets: Tree, brief: Brief, point: Tensor) -> Tensor:
        """The gradient of the loss on this batch at other weights; w stays as it is."""
        held = self.w.clone()
        self.w.copy_(point)
        gradients = self.differentiate(inputs, targets, brief, {})[2]
        slope = flat(gradients)
        self.w.copy_(held)
        return slope

    def _train(
        self,
        brief: Brief,
        start: Tensor,
        rows: Tensor,
        second: Second | None = None,
        purpose: str = "batches",
    ) -> Visit:
        """Train w, from `start` on, on the samples `rows`."""
        # --- what is fixed for the visit ---
        self.w.copy_(start)
        moving = self._moving(brief)
        push = self._push(brief, second)
        step = self._step(brief, start, push, moving)
        references = self._references(brief, start)
        if references and self.masks is None:
            self.masks = self._draws(rows[: brief.batch_size])
        # If a sample is the same in every epoch, so are a fixed model's features of it, unless
        # dropout masks them.
        stored: dict[str, Tensor] = {}
        if not self.task.varies and not self.masks:
            for name, vector in references.items():
                stored[name] = self._all_features(vector, rows)
        most = math.inf if brief.max_steps is None else brief.max_steps

        # --- what is counted: of every step, read at the end, so that no step waits ---
        losses: list[Tensor] = []
        squares: list[Tensor] = []
        noted: list[Tensor] | None = [] if SQUARED_LOSS in brief.measure else None
        squared: Tensor | None = None
        similarity: Tensor | float = 1.0
        visited = 0  # samples
        epochs = 0.0

        # --- the epochs ---
        for epoch in batches(brief, len(rows), self.streams, purpose):
            stop: Tensor | bool = False
            done = 0
            for batch in epoch:
                if len(losses) >= most:
                    break
                picked = torch.from_numpy(batch).to(self.device)
                inputs, targets = self._batch(rows[picked], brief, len(losses))

                # The second model moves first.
                if second is not None and brief.second_when == "batch":
                    second.train(self.w, partial(self._gradient_at, inputs, targets, brief))
                if second is not None and brief.second_draw and push is not None:
                    push.copy_(second.draw(self.w, self._pushed(brief)))

                # The gradient, of which `squared` notes this pass: what SAM or a second model adds
                # is not one.
                still = self._features_of(references, stored, picked, inputs)
                masks = self._generators() if still and self.masks else None
                self.squared = noted
                loss, similar, gradients = self.differentiate(inputs, targets, brief, still)
                self.squared = None
                gradients = self._only(gradients, moving)
                if brief.radius:
                    squares.append(norms(gradients).square().sum())
                    if masks is not None:  # those that the fixed models' features have
                        self._set_generators(masks)
                    gradients = self._sharper(gradients, inputs, targets, brief, still)
                    gradients = self._only(gradients, moving)

                # The step.
                square = step(_owned([gradients[i] for i in moving]))
                if not brief.radius:
                    squares.append(square)
                losses.append(loss * len(batch))
                visited += len(batch)
                done += 1
                if similar is not None:
                    similarity = similar
                    stop = stop | (similar < brief.stop_below)
                    if brief.stop_per == "batch" and stop:
                        break

            epochs += done / len(epoch)
            if noted is not None:  # of the first epoch
                squared = torch.stack(noted).sum() / visited
                noted = None
            if (brief.stop_below is not None and stop) or len(losses) >= most:
                break

        # A plain loop: from Python 3.12 on, sum() gives a different result.
        sums = torch.stack([torch.stack(losses), torch.stack(squares)]).tolist()
        return Visit(
            steps=len(losses),
            epochs=epochs,
            loss=reduce(add, sums[0]) / visited,
            grad_sq=reduce(add, sums[1]),
            similarity=None if brief.stop_below is None else float(similarity),
            squared_loss=None if squared is None else float(squared),
        )

    def _moving(self, brief: Brief) -> list[int]:
        """The numbers of the tensors that move in this visit."""
        still = brief.still or frozenset[int]()
        return [i for i in range(len(self.views)) if i not in still]

    def _step(self, brief: Brief, start: Tensor, push: Tensor | None, moving: list[int]) -> Step:
        """The optimizer of this visit, for the tensors that move."""
        views = [self.views[i] for i in moving]
        moments = self.moments
        if len(moving) < len(self.views):
            moments = Moments(views)
        starts: list[Tensor] = []
        if brief.pull:
            starts = self._some(start, moving)
        pushes: list[Tensor] = []
        if push is not None:
            pushes = self._some(push, moving)
        return Step(brief, views, moments, starts, pushes)

    def _only(self, gradients: tuple[Tensor, ...], moving: list[int]) -> tuple[Tensor, ...]:
        """The gradients, zero for tensors that do not move."""
        if len(moving) == len(gradients):
            return gradients
        moved = list(gradients)
        for i, gradient in enumerate(gradients):
            if i not in moving:
                moved[i] = torch.zeros_like(gradient)
        return tuple(moved)

    def _differentiate(
        self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> Derivative:
        loss, similar = self._loss(inputs, targets, brief, still)
        self.features.pop(self.model, None)  # or the whole forward pass would stay in memory
        gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        return loss.detach(), similar, gradients

    def _sharper(
        self,
        gradients: tuple[Tensor, ...],
        inputs: Tree,
        targets: Tree,
        brief: Brief,
        still: dict[str, Tensor],
    ) -> tuple[Tensor, ...]:
        """The gradients at the sharpest point within `radius`, to first order (SAM).

        The weights stay as they are.
        """
        held = self.w.clone()
        length = norms(gradients).square().sum().sqrt()
        with torch.no_grad():
            factor = brief.radius / (length + SAM_EPS)
            torch._foreach_add_(self.views, torch._foreach_mul(gradients, factor))
        gradients = self.differentiate(inputs, targets, brief, still)[2]
        self.w.copy_(held)
        return gradients

    def _push(self, brief: Brief, second: Second | None) -> Tensor | None:
        """What is added to every gradient, of the length of w; None: nothing."""
        if second is not None and brief.second_draw:
            return self._pushed(brief).clone()
        if brief.push is None:
            return None
        return self._pushed(brief)

    def _pushed(self, brief: Brief) -> Tensor:
        """What the brief adds to every gradient, of the length of w; nothing to the own part."""
        if brief.push is None:
            return torch.zeros_like(self.w)
        push = self._within(brief, brief.push.to(self.device))
        if not self.layout.own:
            return push
        return torch.cat([push, push.new_zeros(self.layout.own_size)])

    def _some(self, vector: Tensor, moving: list[int]) -> list[Tensor]:
        """The tensors inside a vector of the length of w that move."""
        tensors = [view for _, view in self.whole.views(vector)]
        return [tensors[i] for i in moving]

    def _loss(
        self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """The batch's mean loss, and the cosine that a stop rule checks.

        Args:
            inputs: Of the batch.
            targets: Of the batch.
            brief: What the client is told.
            still: The fixed models' features of the batch.
        """
        outputs = attempt(self.model, inputs)
        losses = self.task.loss(outputs, targets)
        if self.squared is not None:
            self.squared.append(losses.detach().double().square().sum())
        loss = losses.mean()
        if not still:
            return loss, None
        features = self.features[self.model].flatten(1)
        if "previous" in still:
            toward = F.cosine_similarity(features, still["start"], dim=1)
            away = F.cosine_similarity(features, still["previous"], dim=1)
            logits = torch.stack([toward, away], 1) / brief.temperature
            first = logits.new_zeros(len(logits), dtype=torch.int64)
            loss = loss + brief.contrast * F.cross_entropy(logits, first)
        if brief.stop_below is None:
            return loss, None
        reference = still["stop" if "stop" in still else "start"]
        cosines = drift(features.detach(), reference, masked=bool(self.masks))
        if brief.stop_statistic == "mean":
            return loss, cosines.mean()
        return loss, cosines.min()

    def _references(self, brief: Brief, start: Tensor) -> dict[str, Tensor]:
        """The fixed models whose features this brief compares with."""
        references = {}
        if brief.stop_reference is not None:
            references["stop"] = self.joined(brief.stop_reference.to(self.device), brief)
        if brief.contrast:
            references["previous"] = self.joined(brief.previous.to(self.device), brief)
        if brief.contrast or (brief.stop_below is not None and brief.stop_reference is None):
            references["start"] = start
        if references:
            self._listen()
        return references

    def _listen(self) -> None:
        """Note the features of both models in every forward pass."""
        if self.listening:
            return
        for model in (self.model, self.still):
            last_linear(model).register_forward_pre_hook(
                lambda _, arguments, model=model: self.features.__setitem__(model, arguments[0])
            )
        self.listening = True

    def _all_features(self, vector: Tensor, rows: Tensor) -> Tensor:
        """The features that a fixed model has of these samples."""
        features = []
        for chunk in rows.split(SCORING_BATCH):
            features.append(self._still_features(vector, self._inputs(chunk)))
        return torch.cat(features)

    def _features_of(
        self,
        references: dict[str, Tensor],
        stored: dict[str, Tensor],
        picked: Tensor,
        inputs: Tree,
    ) -> dict[str, Tensor]:
        """The fixed models' features of a batch.

        Args:
            references: The fixed models.
            stored: Their features of all samples of the client; empty: they differ by batch.
            picked: Which samples of the client are in the batch.
            inputs: Of the batch.
        """
        features = {}
        for name, vector in references.items():
            if stored:
                features[name] = stored[name][picked]
            else:
                features[name] = self._still_features(vector, inputs)
        return features

    def _still_features(self, vector: Tensor, inputs: Tree) -> Tensor:
        """The features of a fixed model, with the masks of the training pass that follows."""
        if self.masks:
            return self._masked_features(vector, inputs)
        with torch.no_grad():
            self.predict(vector, inputs)
        return self.features[self.still].flatten(1)

    def _masked_features(self, vector: Tensor, inputs: Tree) -> Tensor:
        with self._forked(), torch.no_grad():
            attempt(self.model, inputs, dict(self.whole.views(vector)))
        return self.features.pop(self.model).flatten(1)

    def _draws(self, rows: Tensor) -> bool:
        """Whether a forward pass in training draws random numbers."""
        inputs = self._inputs(rows)
        with self._forked(), torch.no_grad():
            before = self._generators()
            attempt(self.model, inputs)
            return not all(map(torch.equal, before, self._generators()))

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
        with self._forked():
            torch.manual_seed(word(brief.seed, "dropout", brief.round, brief.client))
            before = self._generators() if self.random is None else []
            yield
            if self.random is None:
                self.random = not all(map(torch.equal, before, self._generators()))

    def _forked(self) -> AbstractContextManager[None]:
        """Leave the random generators as they are now."""
        devices = [self.device] if self.device.type == "cuda" else []
        return torch.random.fork_rng(devices=devices)

    def _generators(self) -> list[Tensor]:
        """The states of the random generators: the CPU's, and that of a GPU."""
        states = [torch.get_rng_state()]
        if self.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self.device))
        return states

    def _set_generators(self, states: list[Tensor]) -> None:
        torch.set_rng_state(states[0])
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(states[1], self.device)

    def predict(self, vector: Tensor, inputs: Tree) -> Tensor:
        """The outputs of the model with these weights, dropout off."""
        if len(vector) < self.whole.size:  # without an own part: with that of nobody yet
            vector = torch.cat([vector, self.untrained.to(vector)])
        return attempt(self.still, inputs, dict(self.whole.views(vector)))

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
        """Trace of the Fisher information if the brief asks for it, and what it cost.

        Args:
            vector: The weights, of both the shared and the own part.
            rows: The samples.
            brief: What the client is told.
        """
        if not brief.measure & {FISHER, FISHER_SAMPLED}:
            return Fisher()
        began = time.perf_counter()
        on_gpu = self.device.type == "cuda"
        held = 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats(self.device)
            held = torch.cuda.memory_allocated(self.device)

        draws = None
        if FISHER_SAMPLED in brief.measure:
            draws = stream(brief.seed, "fisher", brief.round, brief.client)
        trace = fisher_trace(self.still, dict(self.whole.views(vector)), self._inputs, rows, draws)

        most = 0
        if on_gpu:
            most = torch.cuda.max_memory_allocated(self.device)
        return Fisher(trace, time.perf_counter() - began, most - held)


def _evaluated(w: Tensor, second: Second | None) -> Tensor:
    """The model with which a client is evaluated that has these weights."""
    if second is None:
        return w
    return second.mixture(w)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All tensors of a model by their names."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def drift(features: Tensor, reference: Tensor, *, masked: bool) -> Tensor:
    """The cosine of every sample's features with the reference's; a stop rule looks at it.

    Where one dropout mask leaves nothing of both, the sample says nothing about drift, and its
    cosine is 1, not 0.
    """
    cosines = F.cosine_similarity(features, reference, dim=1)
    if not masked:
        return cosines
    nothing = ~(features.any(1) | reference.any(1))
    return torch.where(nothing, 1.0, cosines)


def scored(task: Task, name: str) -> Callable[[Any, Any], Tensor]:
    """What a measurement averages over the samples: the loss, or which are correct."""
    if name in (SCORE_BEFORE, SCORE_AFTER):
        return task.loss
    return task.accuracy


def _owned(gradients: list[Tensor]) -> list[Tensor]:
    """Gradients that are safe to write to.

    Autograd may return one tensor twice (a + b) or an expanded scalar (sum).
    """
    owned: list[Tensor] = []
    places: set[int] = set()
    for gradient in gradients:
        place = gradient.untyped_storage().data_ptr()
        if place in places or 0 in gradient.stride():
            gradient = gradient.clone(memory_format=torch.contiguous_format)
        owned.append(gradient)
        places.add(place)
    return owned
