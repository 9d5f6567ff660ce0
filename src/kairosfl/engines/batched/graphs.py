"""Steps captured once per kind and replayed, without launching single kernels or copying from the
host.
"""

from __future__ import annotations

from collections import deque
from math import inf

import torch

from kairosfl.engines.batched.captured import end_capture
from kairosfl.engines.batched.fast import timed
from kairosfl.engines.batched.schedule import Schedule
from kairosfl.engines.batched.state import Kind, State
from kairosfl.engines.batched.step import Work, step
from kairosfl.tasks.streamed import Streamed

WARM = 2  # steps without effect before the capture, which compile kernels and choose algorithms


class Steps:
    """Takes steps of any kind on one state; on a GPU by captured graphs, which share one pool of
    memory, unless the samples are read from the host."""

    def __init__(self, work: Work, state: State) -> None:
        self.work, self.state = work, state
        self._graphs: dict[Kind, torch.cuda.CUDAGraph] = {}
        self._seconds: dict[Kind, float] = {}
        self._eager: set[Kind] = set()  # kinds that cannot be captured
        self._queue: deque[tuple[torch.cuda.Event, float]] = deque()
        captures = state.device.type == "cuda" and not isinstance(
            work.data, Streamed
        )  # which the host reads
        self._pool = torch.cuda.graph_pool_handle() if captures else None

    def __call__(self, kind: Kind, count: int) -> None:
        """Take this many steps of this kind."""
        if self._pool is None:
            for _ in range(count):
                step(self.work, self.state, kind)
            return
        if kind not in self._graphs and kind not in self._eager:
            self._capture(kind)
        for _ in range(count):
            if kind in self._eager:
                step(self.work, self.state, kind)
            else:
                self._graphs[kind].replay()
        ended = torch.cuda.Event()
        ended.record()
        self._queue.append((ended, count * self._seconds[kind]))

    def queued(self) -> float:
        """Approximate seconds of work queued on the device; zero on a CPU."""
        while self._queue and self._queue[0][0].query():
            self._queue.popleft()
        return sum(seconds for _, seconds in self._queue)

    def expected(self, schedule: Schedule) -> float:
        """Approximate seconds of a cohort; zero on a CPU, infinite if steps are not captured."""
        if self._pool is None and self.state.device.type == "cuda":
            return inf
        waves = -(-len(schedule.n) // self.state.slots)
        return waves * schedule.steps * max(self._seconds.values(), default=0.0)

    def _capture(self, kind: Kind) -> None:
        if not self._seconds:  # later kinds have few kernels of their own
            self.work.rehearse(self.state, kind)
        self.state.on.fill_(False)
        for _ in range(WARM):
            step(self.work, self.state, kind)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=torch.cuda.current_stream()):
                step(self.work, self.state, kind)
            self._graphs[kind], self._seconds[kind] = graph, timed(graph.replay)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model waits for the device, as its warm steps may
            end_capture()
            self._eager.add(kind)
            self._seconds[kind] = timed(lambda: step(self.work, self.state, kind))
        self.state.on.fill_(True)
