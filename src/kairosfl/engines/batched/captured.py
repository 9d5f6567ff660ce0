"""For models that cannot be stacked, on a GPU: one client after another, with forward and backward
as one graph.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kairosfl.client.trainer import Derivative, Differentiate, Trainer
from kairosfl.core.fields import SQUARED_LOSS, Brief
from kairosfl.engines.batched.layers import Unstackable, line
from kairosfl.engines.batched.stack import alike
from kairosfl.tasks.tree import Tree, leaves, tree_map

LARGEST = 32  # samples in a trial batch


def capture(trainer: Trainer) -> None:
    """Let this trainer replay captured batches, with unchanged results; `Unstackable` says why it
    cannot.
    """
    plain = trainer.differentiate
    sizes = trainer.task.clients.sizes
    client = int(np.argmin(sizes))
    size = min(max(1, int(sizes[client]) // 4), LARGEST)
    start, how = (
        trainer.task.start(),
        {"lr": 1e-3, "batch_size": size, "epochs": 2, "drop_last": True},
    )
    own = trainer.task.own_start()
    brief = Brief(seed=0, round=0, client=client, start=start, own=own, **how)
    try:
        trainer.differentiate = _unwaiting(plain)
        wanted = trainer.follow(brief)
        trainer.differentiate = Captured(plain)
        found = trainer.follow(brief)
        if not alike(found.delta, wanted.delta):
            raise Unstackable("a replayed step is not the step itself")
    except Exception as error:  # the user's forward may raise anything
        trainer.differentiate = plain
        raise error if isinstance(error, Unstackable) else Unstackable(line(error)) from error


@dataclass(frozen=True)
class Pass:
    """A captured graph, its input buffers and its outputs."""

    graph: torch.cuda.CUDAGraph
    given: tuple[Tensor, ...]
    left: Derivative


class Captured:
    """The derivative of a batch: one graph for every batch shape that recurs, as odd last batches
    rarely do.
    """

    def __init__(self, plain: Differentiate) -> None:
        self.plain = plain
        self._passes: dict[tuple[object, ...], Pass | None] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(
        self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]
    ) -> Derivative:
        if SQUARED_LOSS in brief.measure:  # noted by the host, which a replay leaves out
            return self.plain(inputs, targets, brief, still)
        stops = brief.stop_statistic if brief.stop_below is not None else None
        form = (
            tuple(leaf.shape for leaf in leaves(inputs)),
            tuple(still),
            stops,
            brief.contrast,
            brief.temperature,
        )
        if form not in self._passes:
            self._passes[form] = None
            return self.plain(inputs, targets, brief, still)
        known = self._passes[form]
        if known is None:
            known = self._passes[form] = self._capture(inputs, targets, brief, still)
        for held, given in zip(
            known.given, (*leaves(inputs), *leaves(targets), *still.values()), strict=True
        ):
            held.copy_(given)
        known.graph.replay()
        return known.left

    def _capture(self, inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]) -> Pass:
        inputs, targets = tree_map(Tensor.clone, inputs), tree_map(Tensor.clone, targets)
        still = {name: features.clone() for name, features in still.items()}
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                left = self.plain(inputs, targets, brief, still)
        except Exception:
            end_capture()
            raise
        return Pass(graph, (*leaves(inputs), *leaves(targets), *still.values()), left)


def end_capture() -> None:
    """After a failed capture the random generator believes it is still running; a successful one
    resets it.
    """
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _unwaiting(plain: Differentiate) -> Differentiate:
    """A derivative that must not synchronise with the device, which would break a capture."""

    def derive(inputs: Tree, targets: Tree, brief: Brief, still: dict[str, Tensor]) -> Derivative:
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(action="ignore"):  # torch warns that this is a prototype
            torch.cuda.set_sync_debug_mode("error")
        try:
            return plain(inputs, targets, brief, still)
        finally:
            torch.cuda.set_sync_debug_mode(before)

    return derive
