"""The engines of a search: one for all runs that can train together, one each for the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kairosfl.runs.pool import InTurn, Pending, Together

Pool = Together | InTurn


class Pools:
    """The runs that train, by the engine that they share.

    Args:
        parallel: Runs that share an engine at a time.
        command: The command line, which runs record.
        say: Tells the user how an engine trains, once for each way.
    """

    def __init__(self, parallel: int, command: str, say: Callable[[str], None]) -> None:
        self.parallel = parallel
        self.command = command
        self.by_kind: dict[str, Pool] = {}
        self._say = say
        self._methods: set[str] = set()

    def pool(self, run: Pending) -> Pool:
        """The runs that share an engine with this one."""
        kind = run.ready.kind
        if kind not in self.by_kind:
            self.by_kind[kind] = self._together(run) if kind else InTurn(self._alone, self.command)
        return self.by_kind[kind]

    def drop(self, kind: str) -> list[Pending]:
        """Give up an engine that failed, with which none of its runs can continue."""
        pool = self.by_kind.pop(kind)
        pool.close()
        return [*pool.active, *pool.waiting]

    def close(self) -> None:
        """Stop what trains."""
        for pool in self.by_kind.values():
            pool.close()

    def _together(self, run: Pending) -> Together:
        from kairosfl.engines.batched import Batched

        engine = run.ready.build([run.ready.largest] * self.parallel)
        assert isinstance(engine, Batched)
        self._say_once(run.ready.on(engine).method)
        return Together(engine, self.command)

    def _alone(self, run: Pending) -> Any:
        engine = run.ready.build()
        self._say_once(run.ready.on(engine).method)
        return engine

    def _say_once(self, method: str) -> None:
        if method not in self._methods:
            self._methods.add(method)
            self._say(method)
