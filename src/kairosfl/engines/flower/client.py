"""The ClientApp: it contains no algorithm. It says which clients it serves, and follows briefs."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from kairosfl.client.trainer import Trainer
from kairosfl.core.fields import Brief
from kairosfl.engines.flower.enrol import difference
from kairosfl.engines.flower.keep import Store, visit
from kairosfl.engines.flower.roster import parse_ids
from kairosfl.engines.flower.wire import (
    NUMBERS,
    VERSION,
    asked_hashes,
    mark_of_run,
    read_brief,
    report_record,
)
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import Ints
from kairosfl.tasks.function import MakeTask, for_client
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

GRACE = 30.0  # seconds between the exception and killing the process
GIVEN_UP = 70  # exit status of a process that exceeded the time limit of its brief
# 1: local noise as a simulation draws it, which protects nobody; for rehearsals
SEEDED = "KAIROSFL_SEEDED_NOISE"


class _Own(Population):
    """All samples on a device belong to its client, whatever the client's id."""

    def __getitem__(self, client: int) -> Ints:
        return self.order


def own(task: Task) -> Task:
    """A task with the data of one client accepts any client id.

    A task with the data of all is unchanged.
    """
    if len(task.clients) > 1:
        return task
    return replace(
        task, clients=_Own(np.asarray(task.clients.order), np.asarray(task.clients.offsets))
    )


def client_app(
    make: MakeTask,
    *,
    device: str = "cpu",
    threads: int = 1,
    mods: Sequence[Any] = (),
    update_clip: float = math.inf,
    update_noise: float = 0.0,
) -> ClientApp:
    """A ClientApp for the task that `make(client)` returns: the model, and the data of that client.

    The node config gives the ids of the clients that a node serves: `clients="0-3"`. `update_clip`
    and `update_noise` are what this device insists on: a brief that asks for a longer update or
    less noise is refused.
    """

    make = for_client(make)

    def introduce(message: Message, context: Context) -> Message:
        numbers = ConfigRecord({"version": VERSION, "clients": _served(context)})
        return Message(RecordDict({NUMBERS: numbers}), reply_to=message)

    def follow(message: Message, context: Context) -> Message:
        brief, packing = read_brief(message.content)
        if brief.client not in _served(context):
            return introduce(message, context)
        _insist(brief, update_clip, update_noise)
        torch.set_num_threads(threads)
        task = own(make(brief.client))
        _check_sizes(brief, task)
        if reason := difference(asked_hashes(message.content), task):
            raise UserError(reason)
        # Of this message alone: a secret that is kept would give two updates of one round the same
        # noise.
        secret = b"" if os.environ.get(SEEDED) == "1" else os.urandom(64)
        trainer = Trainer(task, torch.device(device), secret)
        run = mark_of_run(message.content)
        if run:
            store = Store(run, brief.client, task.layout.hash)
            with store.alone():
                report = visit(store, brief, task, trainer.follow)
        else:
            report = trainer.follow(brief)
        return Message(report_record(report, brief.round, packing), reply_to=message)

    app = ClientApp(mods=[in_time, *mods])
    app.query()(introduce)
    app.train()(follow)
    return app


def _check_sizes(brief: Brief, task: Task) -> None:
    """Refuse a brief about another model than this client's."""
    layout = task.layout
    sizes = [("parameters", len(brief.start), layout.size)]
    if brief.base is not None:
        sizes.append(("frozen parameters", len(brief.base), layout.base_size))
    for what, theirs, ours in sizes:
        if theirs != ours:
            raise UserError(
                f"the server's model has {theirs} {what}, but this client's has {ours}; "
                "give both the same task.py."
            )


def _insist(brief: Brief, clip: float, noise: float) -> None:
    """Refuse a brief with which this device would tell more than it wants to."""
    allowed = brief.update_clip
    added = brief.update_noise
    clipped = clip == math.inf or (allowed is not None and allowed <= clip)
    noised = not noise or (added is not None and added >= noise)
    if not (clipped and noised):
        raise UserError(
            f"this device sends updates with update_clip = {clip:g} and update_noise = {noise:g} "
            f"or stricter, and the brief has {allowed} and {added}; use a rule with more noise or "
            "a smaller clip."
        )
    if noise and brief.stop_below is not None:
        raise UserError(
            "this device adds noise, and does not stop early: how long it trained would tell about "
            "its data."
        )


def _served(context: Context) -> list[int]:
    clients = context.node_config.get("clients")
    if clients is None:
        raise UserError(
            """this node serves no client; start it with --node-config 'clients="7"'."""
        )
    return parse_ids(str(clients))


def in_time(
    message: Message, context: Context, follow: Callable[[Message, Context], Message]
) -> Message:
    """Give up once the server no longer waits for the answer.

    A client that hangs would block its node forever.

    First raise an exception, which frees the node at once; a process that does not react to it is
    killed.
    """
    seconds = message.metadata.ttl
    end = threading.Timer(seconds + GRACE, os._exit, (GIVEN_UP,))
    end.daemon = True
    end.start()
    alarmed = threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGALRM")
    if alarmed:
        before = signal.signal(signal.SIGALRM, _too_late)
        signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return follow(message, context)
    finally:
        end.cancel()
        if alarmed:
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            signal.signal(signal.SIGALRM, before)


def _too_late(*_: object) -> None:
    raise TimeoutError("not done in time")
