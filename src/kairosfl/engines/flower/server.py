"""Engine `flower`: sends briefs to the nodes and checks their reports.

A round has a deadline and a quorum.

It pushes and pulls messages itself because Flower's own loop sleeps three seconds at a time. Every
brief has exactly one outcome: a report, or a one-line reason why there is none. A round ends at its
deadline whatever a node does.
"""

from __future__ import annotations

import copy
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.func import functional_call

from kairosfl.core.fields import Brief, Briefs, Report, Reports
from kairosfl.engines.evaluate import Evaluator
from kairosfl.engines.flower import enrol
from kairosfl.engines.flower.board import Board
from kairosfl.engines.flower.checks import Trust, check
from kairosfl.engines.flower.collect import GROWTH, POLL, Collector, Letter
from kairosfl.engines.flower.mail import DROPPED, clean, push
from kairosfl.engines.flower.pauses import Guess
from kairosfl.engines.flower.roster import NodeRegistry, Roster, claimed_ids
from kairosfl.engines.flower.updates import Updates
from kairosfl.engines.flower.wire import (
    SMALL,
    Malformed,
    Packed,
    Packing,
    brief_record,
    read_report,
    report_limit,
)
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import base, trained

BATCH = 32  # small briefs in one request


@dataclass(frozen=True)
class Settings:
    """How rounds are run over real devices."""

    deadline: float = 600.0  # seconds that clients have once all briefs are sent
    quorum: float = 0.5  # fraction of the needed reports below which a round is discarded
    over: float = (
        0.0  # fraction of the cohort asked in addition, to make up for clients that do not answer
    )
    # of the run: where there are not enough clients to ask more, a round needs as many reports
    cohort: int = 0
    wait: float = 300.0  # seconds to wait for a quorum of the cohort to be online
    on_disk: int = 256 << 20  # updates of at least this many bytes in total are kept on disk
    packing: Packing = field(default_factory=Packing)
    trust: Trust = field(default_factory=Trust)

    def __post_init__(self) -> None:
        if not self.deadline > 0:
            raise UserError(f"deploy.deadline = {self.deadline} must be above 0 seconds.")
        if not 0 <= self.quorum <= 1:
            raise UserError(f"deploy.quorum = {self.quorum} must be between 0 and 1.")
        for name in ("over", "wait", "on_disk"):
            if not getattr(self, name) >= 0:
                raise UserError(f"deploy.{name} = {getattr(self, name)} must be 0 or more.")

    def asked(self, cohort: int, clients: int) -> int:
        """How many to ask so that `cohort` of them answer."""
        return min(clients, math.ceil(cohort * (1 + self.over) - 1e-9))

    def needed(self, asked: int, clients: int) -> int:
        """The number of reports after which a round ends at once.

        `clients` is how many there are to ask.
        """
        enough = max(1, math.floor(asked / (1 + self.over) + 1e-9))
        return max(enough, min(self.cohort, asked)) if asked == clients else enough


class Flower(Evaluator):
    """Trains on the nodes of a Flower grid, and evaluates on the server."""

    def __init__(
        self,
        grid: Grid,
        task: Task,
        settings: Settings,
        log: Callable[[str], None],
        *,
        folder: Path | None = None,
        start: Tensor | None = None,
        mark: str | None = None,
    ) -> None:
        """`folder` stores the roster and, temporarily, large updates; `start` replaces the task's
        initial model; `mark` is what devices know the run by that keep something for it, None for
        a run that begins.

        `task` is kept without the trained parameters of its model, which are part of the run.
        """
        self.grid, self.settings, self.folder = grid, settings, folder
        self._start: Tensor | None = task.start() if start is None else start
        if len(self._start) != task.layout.size:
            raise UserError(
                f"deploy.start has {len(self._start)} parameters, but the model has "
                f"{task.layout.size}; give a run of the same model."
            )
        super().__init__(
            replace(task, model=hollow(task.model, task.own_names)),
            torch.device("cpu"),
            self._predict_with,
        )
        self.mark = new_mark() if mark is None else mark
        self.roster = Roster(len(task.clients), folder / "roster.json" if folder else None)
        self._updates: Updates | None = None
        self._board, self._wanted = Board(folder), enrol.wanted(self.task)
        self._checked: set[int] = set()  # nodes whose task is known to be the server's
        self._first = Guess(POLL[0], GROWTH)  # when the first answer of a round is likely
        self._registry = NodeRegistry(grid, self.roster, log, settings.deadline)

    def start(self) -> Tensor:
        """The initial model; can be called once, since it is not kept."""
        x, self._start = self._start, None
        assert x is not None, "start() was already called"
        return x

    def train(self, briefs: Briefs) -> Reports:
        """Reports in client order; `failed` gives the reason for each client without one."""
        needed = self.settings.needed(len(briefs), len(self.task.clients))
        quorum = math.ceil(self.settings.quorum * needed)
        orders = {brief.client: brief for brief in briefs.each()}
        self._board.gather(briefs.newest + 1, orders)
        self._gather(list(orders), max(1, quorum))
        row = {client: i for i, client in enumerate(orders)}
        if self._updates is not None:
            self._updates.release()  # those of the last round, to which its record still refers
        updates = self._updates = Updates(briefs, self.folder, self.settings.on_disk)
        in_flight, failed = self._push(orders)
        updates.release()
        self._board.begin(needed, self.settings.deadline, failed)
        until = time.monotonic() + self.settings.deadline
        good: dict[int, Report] = {}

        # Take what arrives until there is enough of it, or the deadline.
        collector = Collector(self.grid, self._registry, self._first, in_flight)
        collector.start()
        try:
            while in_flight and len(good) < needed:
                answer = collector.next(until)
                if answer is None:
                    break
                sent, reply = answer
                letter = in_flight.pop(sent)
                client = letter.client
                outcome = self._outcome(reply, letter.node, orders[client], updates[row[client]])
                updates.release()
                if isinstance(outcome, str):
                    if outcome in DROPPED and time.monotonic() >= letter.due:
                        outcome = self._late("no answer")
                    failed[client] = outcome
                else:
                    good[client] = outcome
                    self._checked.add(letter.node)
                self._board.outcome(client, failed.get(client))
            arriving = collector.arriving()
        finally:
            collector.close()

        # Every brief has an outcome.
        for sent, letter in in_flight.items():
            if len(good) == needed:
                failed[letter.client] = "the round ended without it"
            elif sent in arriving:
                failed[letter.client] = self._late("its answer did not arrive in full")
            else:
                failed[letter.client] = self._late("no answer")
        if len(good) < quorum:
            failed |= dict.fromkeys(
                good, f"{len(good)} accepted reports do not reach the quorum of {quorum}"
            )
            good = {}
        self._board.end(self.roster.nodes)
        clients = sorted(good)
        delta = updates.rows([row[client] for client in clients])
        return Reports.stack(
            [good[client] for client in clients], delta, tuple(sorted(failed.items()))
        )

    def _predict_with(self, vector: Tensor, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(
            self.task.model, dict(self.task.layout.views(vector)), (inputs,)
        )
        return outputs

    def _gather(self, clients: list[int], enough: int) -> None:
        """Wait until enough of these clients are online and no node is still being asked.

        It waits at most `settings.wait`.
        """
        until = time.monotonic() + self.settings.wait
        self._registry.poll()
        while time.monotonic() < until:
            there = sum(client in self.roster.nodes for client in clients)
            if there == len(clients) or (there >= enough and not self._registry.pending):
                return
            time.sleep(self._registry.rest(POLL[1]))
            self._registry.poll()

    def _late(self, what: str) -> str:
        return f"{what} in {self.settings.deadline:g} s"

    def _push(self, orders: dict[int, Brief]) -> tuple[dict[str, Letter], dict[int, str]]:
        """The messages in flight by their id, and the reason for each client that got none."""
        in_flight: dict[str, Letter] = {}
        failed: dict[int, str] = {}
        serving: dict[int, int] = {}
        together = BATCH
        for client, brief in orders.items():
            if client not in self.roster.nodes:
                failed[client] = "no node serves it"
                continue
            serving[client] = self.roster.nodes[client]
            if brief.start.nbytes > SMALL:
                together = 1  # large ones are sent one by one
        packed: Packed = {}
        for clients in batched(serving, together):
            due = time.monotonic() + self.settings.deadline
            messages = []
            for client in clients:
                messages.append(self._message(orders[client], serving[client], packed))
            for client, sent in zip(clients, push(self.grid, messages), strict=True):
                if sent:
                    start = orders[client].start
                    limit = report_limit(len(start), start.dtype, self.settings.packing)
                    in_flight[sent] = Letter(client, serving[client], due, limit)
                else:
                    failed[client] = "its brief could not be sent"
        return in_flight, failed

    def _message(self, brief: Brief, node: int, packed: Packed) -> Message:
        hashes: Mapping[str, str] = {}
        if node not in self._checked:
            hashes = self._wanted
        run = ""
        if brief.counted is not None:
            run = self._known_mark()
        record = brief_record(brief, self.settings.packing, packed, hashes, run)
        group = str(brief.round + 1)
        return Message(record, node, MessageType.TRAIN, ttl=self.settings.deadline, group_id=group)

    def _known_mark(self) -> str:
        """The mark of the run, without which devices would not find what they keep."""
        if not self.mark:
            raise UserError(
                "run.json has lost its mark, by which devices find what they keep for this run; "
                "restore the file from a backup, or begin another run."
            )
        return self.mark

    def _outcome(self, reply: Message | str, node: int, brief: Brief, out: Tensor) -> Report | str:
        """The accepted report, with its update in `out`, or why there is none."""
        if isinstance(reply, str):
            return reply
        served = claimed_ids(reply.content)
        if served is not None:
            self._registry.assign(node, served)
            return "its node no longer serves it"
        try:
            report, round = read_report(reply.content, self.settings.packing, out)
        except Malformed as reason:
            return clean(str(reason))
        except Exception as error:  # a client may send anything
            return f"its answer cannot be read ({type(error).__name__})"
        return check(report, round, brief, self.settings.trust)


def batched(clients: Iterable[int], size: int) -> Iterator[list[int]]:
    """The clients in lists of at most this size."""
    remaining = list(clients)
    while remaining:
        yield remaining[:size]
        del remaining[:size]


def hollow(model: nn.Module, own: Set[str] = frozenset()) -> nn.Module:
    """The model without its trained parameters, which evaluation passes in.

    `own` ones stay as they are before a client has trained.
    """
    copies: dict[int, Any] = {id(tensor): tensor for tensor in base(model).values()}
    for name, parameter in trained(model).items():
        copies[id(parameter)] = parameter
        if name not in own:
            copies[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    return copy.deepcopy(model, copies).eval()


def new_mark() -> str:
    """What devices know a run by that begins: another one for every run."""
    return secrets.token_hex(8)
