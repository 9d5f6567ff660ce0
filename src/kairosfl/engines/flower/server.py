"""Engine `flower`: briefs out to the nodes, checked reports back in, with a deadline and a quorum.

It pushes and pulls by itself, since Flower's own loop sleeps three seconds at a time. Every brief has one outcome: a
report, or a reason in one line.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from flwr.app import Array, Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor, nn
from torch.func import functional_call

from kairosfl.core.fields import Brief, Briefs, Report, Reports
from kairosfl.engines.evaluate import Evaluator
from kairosfl.engines.flower.checks import Trust, check
from kairosfl.engines.flower.roster import DROPPED, Reception, Roster, clean, introduced, pull, push
from kairosfl.engines.flower.updates import Updates
from kairosfl.engines.flower.wire import Malformed, Packing, brief_record, read_report
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import base, trained

POLL = (0.05, 1.0)  # seconds between two looks for answers: at first, and at most


@dataclass(frozen=True)
class Settings:
    """How rounds are held over real devices."""

    deadline: float = 600.0  # seconds that clients have, once all briefs are sent
    quorum: float = 0.5  # part of the needed reports without which a round counts for nothing
    over: float = 0.0  # part of the cohort that is asked on top, for those who will not answer
    wait: float = 300.0  # seconds to wait for a quorum of the cohort to be online
    on_disk: int = 256 << 20  # bytes of updates from which on they are kept on disk
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

    def needed(self, asked: int) -> int:
        """Reports with which a round goes on at once."""
        return math.ceil(asked / (1 + self.over) - 1e-9)


class Flower(Evaluator):
    """Follows briefs on the nodes of a Flower grid, and evaluates here."""

    def __init__(
        self,
        grid: Grid,
        task: Task,
        settings: Settings,
        log: Callable[[str], None],
        *,
        folder: Path | None = None,
        start: Tensor | None = None,
    ) -> None:
        """`folder` keeps the roster, and large updates while they are needed; `start` stands in for the task's model.

        `task` is kept without the trained numbers of its model, which live in the run.
        """
        self.grid, self.settings, self.folder = grid, settings, folder
        self._start: Tensor | None = task.start() if start is None else start
        if len(self._start) != task.layout.size:
            raise UserError(f"deploy.start holds {len(self._start)} numbers, the model {task.layout.size}.")
        super().__init__(replace(task, model=hollow(task.model)), torch.device("cpu"), self._predict_with)
        self.roster = Roster(len(task.clients), folder / "roster.json" if folder else None)
        self._updates: Updates | None = None
        self._reception = Reception(grid, self.roster, log, settings.deadline)

    def start(self) -> Tensor:
        """The model before training; handed over, not kept."""
        x, self._start = self._start, None
        assert x is not None, "it was handed over before"
        return x

    def train(self, briefs: Briefs) -> Reports:
        """Reports in client order; why there is none of a client stands in `failed`."""
        needed = self.settings.needed(len(briefs))
        quorum = math.ceil(self.settings.quorum * needed)
        self._gather(briefs.ids.tolist(), max(1, quorum))
        orders = {brief.client: brief for brief in briefs.each()}
        row = {client: i for i, client in enumerate(orders)}
        if self._updates is not None:
            self._updates.settle()  # of the last round, which its record still holds
        updates = self._updates = Updates(briefs, self.folder, self.settings.on_disk)
        flying, failed = self._push(orders)
        updates.settle()
        until = time.monotonic() + self.settings.deadline
        good: dict[int, Report] = {}
        pause = POLL[0]
        late = f"no answer in {self.settings.deadline:g} s"
        while flying and len(good) < needed and time.monotonic() < until:
            before = len(flying)
            for sent, (client, node, due) in list(flying.items()):
                outcome = self._outcome(sent, node, orders[client], updates[row[client]])
                if outcome is None:
                    continue
                del flying[sent]
                updates.settle()
                if isinstance(outcome, str):
                    overdue = outcome in DROPPED and time.monotonic() >= due
                    failed[client] = late if overdue else outcome
                else:
                    good[client] = outcome
                if len(good) == needed:
                    break
            if len(flying) == before:
                time.sleep(pause)
            pause = POLL[0] if len(flying) < before else min(1.5 * pause, POLL[1])
            self._reception.meet()
        why = "the round went on without it" if len(good) == needed else late
        failed |= {client: why for client, *_ in flying.values()}
        if len(good) < quorum:
            failed |= dict.fromkeys(good, f"{len(good)} good reports are no quorum of {quorum}")
            good = {}
        clients = sorted(good)
        delta = updates.rows([row[client] for client in clients])
        return Reports.stack([good[client] for client in clients], delta, tuple(sorted(failed.items())))

    def _predict_with(self, vector: Tensor, inputs: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self.task.model, dict(self.task.layout.views(vector)), (inputs,))
        return outputs

    def _gather(self, clients: list[int], wanted: int) -> None:
        """Wait until so many of these clients are there, or all who are about to come, as long as the settings say."""
        until = time.monotonic() + self.settings.wait
        self._reception.meet()
        while time.monotonic() < until:
            there = sum(client in self.roster.nodes for client in clients)
            if there == len(clients) or (there >= wanted and not self._reception.expecting):
                return
            time.sleep(POLL[1])
            self._reception.meet()

    def _push(self, orders: dict[int, Brief]) -> tuple[dict[str, tuple[int, int, float]], dict[int, str]]:
        """The messages on their way (id → client, node and when it is due), and why there is none for the others."""
        flying: dict[str, tuple[int, int, float]] = {}
        failed: dict[int, str] = {}
        packed: dict[int, list[Array]] = {}
        for client, brief in orders.items():
            node = self.roster.nodes.get(client)
            if node is None:
                failed[client] = "no node serves it"
                continue
            record = brief_record(brief, self.settings.packing, packed)
            due = time.monotonic() + self.settings.deadline
            message = Message(
                record, node, MessageType.TRAIN, ttl=self.settings.deadline, group_id=str(brief.round + 1)
            )
            sent = push(self.grid, message)
            if sent:
                flying[sent] = client, node, due
            else:
                failed[client] = "its brief could not be sent"
        return flying, failed

    def _outcome(self, sent: str, node: int, brief: Brief, out: Tensor) -> Report | str | None:
        """The answer to a message as a report that may be used, its update in `out`, or why not; None: none yet."""
        reply = pull(self.grid, sent)
        if not isinstance(reply, Message):
            return reply
        served = introduced(reply.content)
        if served is not None:
            self._reception.hear(node, served)
            return "its node does not serve it any more"
        try:
            report, round = read_report(reply.content, self.settings.packing, out)
        except Malformed as reason:
            return clean(str(reason))
        except Exception as error:  # as in `pull`: the form of what it sent is the client's doing
            return f"its answer cannot be read ({type(error).__name__})"
        return check(report, round, brief, self.settings.trust)


def hollow(model: nn.Module) -> nn.Module:
    """The model without the numbers that are trained, for evaluation, which brings its own."""
    shapes = {id(each): nn.Parameter(torch.empty_like(each, device="meta")) for each in trained(model).values()}
    return copy.deepcopy(model, {**shapes, **{id(each): each for each in base(model).values()}}).eval()
