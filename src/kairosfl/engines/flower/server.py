"""Engine `flower`: briefs out to the nodes, checked reports back in, with a deadline and a quorum.

Its own push and pull loop: Flower's polls every three seconds. Every brief has one outcome, a report or a reason.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from flwr.app import Array, ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from torch import Tensor
from torch.func import functional_call

from kairosfl.briefs import Brief, Briefs, Report, Reports
from kairosfl.engines.evaluate import Evaluator
from kairosfl.engines.flower.checks import Trust, check
from kairosfl.engines.flower.roster import Roster
from kairosfl.engines.flower.updates import Updates
from kairosfl.engines.flower.wire import NUMBERS, Malformed, Packing, brief_record, read_report
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task

POLL = (0.05, 1.0)  # seconds between two looks for answers: at first, and at most
PULLED = 64 << 20  # bytes of updates that are pulled at once
KINDS = {
    1: "its app could not be loaded",
    2: "it raised an exception",
    3: "its message was lost",
    4: "its answer was lost",
    5: "its node went away",
    7: "it refused the app",
    8: "its process died",
}


@dataclass(frozen=True)
class Settings:
    """[deploy]: how rounds are held over real devices."""

    deadline: float = 600.0  # seconds a round may take
    quorum: float = 0.5  # part of the reports needed without which a round counts for nothing
    over: float = 0.0  # part of the cohort that is asked on top, for those who will not answer
    wait: float = 300.0  # seconds to wait until a quorum of clients has joined
    packing: Packing = field(default_factory=Packing)
    trust: Trust = field(default_factory=Trust)
    on_disk: int = 256 << 20  # bytes of updates above which they are kept on disk

    def __post_init__(self) -> None:
        if not self.deadline > 0 or not self.wait >= 0:
            raise UserError(f"deploy.deadline = {self.deadline} and deploy.wait = {self.wait} must be above 0.")
        if not 0 <= self.quorum <= 1:
            raise UserError(f"deploy.quorum = {self.quorum} must be between 0 and 1.")
        if not self.over >= 0:
            raise UserError(f"deploy.over = {self.over} must be 0 or more.")

    def asked(self, cohort: int, clients: int) -> int:
        """Clients that are asked so that `cohort` of them answer."""
        return min(clients, math.ceil(cohort * (1 + self.over) - 1e-9))

    def needed(self, asked: int) -> int:
        """Reports with which the round goes on at once."""
        return max(1, math.ceil(asked / (1 + self.over) - 1e-9))


class Flower(Evaluator):
    """Follows briefs on the nodes of a Flower grid."""

    def __init__(
        self,
        grid: Grid,
        task: Task,
        settings: Settings | None = None,
        *,
        folder: Path | None = None,
        log: Callable[[str], None] = logging.getLogger("kairosfl").info,
        start: Tensor | None = None,
    ) -> None:
        """`folder` keeps the roster, and large updates while they are needed; `start` replaces the task's model."""
        self.grid, self.settings, self.folder, self._log = grid, settings or Settings(), folder, log
        self.roster = Roster(len(task.clients), folder / "roster.json" if folder else None)
        self._start = task.start() if start is None else start
        if len(self._start) != task.layout.size:
            raise UserError(f"deploy.start holds {len(self._start)} numbers, the model {task.layout.size}.")
        task.model.to_empty(device="meta").eval()  # evaluation gives it the weights; it need not hold any
        super().__init__(task, torch.device("cpu"), self._forward)
        self._keys: dict[int, bytes] = {}  # online node → its key
        self._asked: dict[str, int] = {}  # query on its way → node

    def _forward(self, vector: Tensor, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.task.model, dict(self.task.layout.views(vector)), (inputs,))
        return outputs

    def start(self) -> Tensor:
        """The model before training."""
        return self._start

    def train(self, briefs: Briefs) -> Reports:
        """Reports in client order; why there is none of a client stands in `failed`."""
        rules = self.settings
        needed = rules.needed(len(briefs))
        quorum = math.ceil(rules.quorum * needed)
        self._gather(briefs.ids.tolist(), max(1, quorum))
        orders = {brief.client: brief for brief in briefs.each()}
        until = time.monotonic() + rules.deadline
        flying, failed = self._push(list(orders.values()))
        updates = Updates(
            briefs.start[-1] if briefs.start.ndim == 2 else briefs.start, len(briefs), self._spill(briefs)
        )
        row = {client: i for i, client in enumerate(orders)}
        good: dict[int, Report] = {}
        pause = POLL[0]
        while flying and len(good) < needed and time.monotonic() < until:
            replies = self._pull(flying, briefs.start.shape[-1])
            for reply in replies:
                client = flying.pop(reply.metadata.reply_to_message_id)
                outcome = self._judge(reply, orders[client])
                if isinstance(outcome, str):
                    failed[client] = outcome
                elif len(good) < needed:
                    good[client] = updates.put(row[client], outcome)
            pause = POLL[0] if replies else min(pause * 1.5, POLL[1])
            if not replies:
                time.sleep(min(pause, max(0.0, until - time.monotonic())))
                self._meet()
        late = "the round went on without it" if len(good) >= needed else f"no answer within {rules.deadline:g} s"
        failed |= dict.fromkeys(flying.values(), late)
        if len(good) < quorum:
            reason = f"{len(good)} good reports are no quorum of {quorum}"
            failed |= dict.fromkeys(good, reason)
            good = {}
        clients = sorted(good)
        delta = updates.rows([row[client] for client in clients])
        return Reports.stack([good[client] for client in clients], delta, tuple(sorted(failed.items())))

    def _spill(self, briefs: Briefs) -> Path | None:
        size = len(briefs) * briefs.start.shape[-1] * briefs.start.element_size()
        return self.folder if size > self.settings.on_disk else None

    def _push(self, orders: list[Brief]) -> tuple[dict[str, int], dict[int, str]]:
        """Messages on their way (id → client), and the clients that nobody could be sent to for."""
        flying: dict[str, int] = {}
        failed: dict[int, str] = {}
        packed: dict[int, list[Array]] = {}
        for brief in orders:
            node = self.roster.nodes.get(brief.client)
            if node is None:
                failed[brief.client] = "no node serves it"
                continue
            record = brief_record(brief, self.settings.packing, packed)
            message = Message(
                record, node, MessageType.TRAIN, ttl=self.settings.deadline, group_id=str(brief.round + 1)
            )
            (sent,) = list(self.grid.push_messages([message])) or [None]
            if sent:
                flying[sent] = brief.client
            else:
                failed[brief.client] = "its brief could not be sent"
        return flying, failed

    def _pull(self, flying: Iterable[str], size: int) -> list[Message]:
        """The answers that are there; of large models only a few at once."""
        ids, step = list(flying), max(1, PULLED // (4 * size))
        for begin in range(0, len(ids), step):
            replies = list(self.grid.pull_messages(ids[begin : begin + step]))
            if replies:
                return [reply for reply in replies if reply.metadata.reply_to_message_id in ids]
        return []

    def _judge(self, reply: Message, brief: Brief) -> Report | str:
        """The report in an answer if it may be used, or why not."""
        if reply.has_error():
            return explain(reply.error)
        try:
            report, round = read_report(reply.content, brief.start, self.settings.packing)
        except Malformed as reason:
            return clean(str(reason))
        return check(report, round, brief, self.settings.trust)

    def _gather(self, clients: list[int], wanted: int) -> None:
        """Wait until so many of these clients are there, or as long as the settings say."""
        until = time.monotonic() + self.settings.wait
        self._meet()
        while sum(client in self.roster.nodes for client in clients) < wanted and time.monotonic() < until:
            time.sleep(POLL[1])
            self._meet()

    def _meet(self) -> None:
        """Ask new nodes whom they serve, hear those who answer, and forget those who left."""
        online = {info.node_id: info.public_key for info in self.grid.get_nodes()}
        for line in self.roster.forget(self._keys.keys() - online.keys()):
            self._log(line)
        for node in online.keys() - self._keys.keys():
            question = Message(RecordDict(), node, MessageType.QUERY, ttl=self.settings.deadline)
            for sent in self.grid.push_messages([question]):
                self._asked[sent] = node
        self._keys = online
        for reply in self.grid.pull_messages(list(self._asked)) if self._asked else ():
            node = self._asked.pop(reply.metadata.reply_to_message_id)
            if node not in online:
                continue
            ids = None if reply.has_error() else introduced(reply.content)
            if ids is None:
                reason = explain(reply.error) if reply.has_error() else "its answer is no list of clients"
                self._log(f"node {node} did not introduce itself: {reason}")
                continue
            for line in self.roster.claim(node, online[node], ids):
                self._log(line)


def introduced(content: RecordDict) -> list[int] | None:
    """The clients that a node says it serves."""
    numbers = content.get(NUMBERS)
    ids = numbers.get("clients") if isinstance(numbers, ConfigRecord) else None
    return [int(i) for i in ids if isinstance(i, int)] if isinstance(ids, list) else None


def explain(error: Error) -> str:
    """An error of Flower in one line."""
    words = KINDS.get(error.code, f"it failed with code {error.code}")
    return clean(f"{words}: {error.reason}" if error.code == 2 else words)


def clean(text: str) -> str:
    """A client's words as one short line that cannot pass for another line of the log."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= 200 else line[:199] + "…"
