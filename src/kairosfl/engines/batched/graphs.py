"""Steps captured once per kind and replayed: no launch of single kernels, nothing from the host."""

from __future__ import annotations

import torch

from kairosfl.engines.batched.state import Kind, State
from kairosfl.engines.batched.step import Work, step

WARM = 2  # steps that change nothing before the capture: they compile, and choose algorithms


class Steps:
    """Takes steps of any kind on one state; on a GPU by captured graphs, which share one pool of memory."""

    def __init__(self, work: Work, state: State) -> None:
        self.work, self.state = work, state
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if state.device.type == "cuda" else None

    def __call__(self, kind: Kind, count: int) -> None:
        """So many steps of this kind."""
        if self._pool is None:
            for _ in range(count):
                step(self.work, self.state, kind)
            return
        graph = self._graphs.get(kind) or self._capture(kind)
        for _ in range(count):
            graph.replay()

    def _capture(self, kind: Kind) -> torch.cuda.CUDAGraph:
        self.state.on.fill_(False)
        for _ in range(WARM):
            step(self.work, self.state, kind)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
            step(self.work, self.state, kind)
        self.state.on.fill_(True)
        self._graphs[kind] = graph
        return graph
