"""What the tests with real processes share: an app whose clients misbehave on order, and the same
run in-process.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairosfl import deploy
from kairosfl.deploy.local import LocalFederation
from kairosfl.engines.loop import Loop
from kairosfl.runs.experiment import execute, record
from kairosfl.runs.folder import Folder
from kairosfl.runs.prepare import prepare
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS = 4

MISCHIEF = '''\
"""Clients that misbehave on order: {faults} holds {{client: {{round: fault}}}}, rounds from 1."""

import json
import os
import time

import numpy as np
from flwr.app import ConfigRecord

from kairosfl.engines.flower.client import client_app
from kairosfl.engines.flower.wire import NUMBERS, Piece, piece_record

from federation.task import task


def update(content, array):
    content["delta.0"] = piece_record(Piece(array.dtype.name, array.shape, array.tobytes()))


def mischief(message, context, follow):
    with open({faults!r}) as file:
        orders = json.load(file)
    fault = orders.get(str(context.node_config["clients"]), {{}}).get(message.metadata.group_id)
    fault, _, number = (fault or "").partition(":")
    if fault == "raise":
        raise OSError("no battery")
    if fault == "exit":
        os._exit(1)
    if fault == "hang":
        time.sleep(10_000)
    while fault == "wait" and not os.path.exists({faults!r} + ".go"):
        time.sleep(0.2)
    reply = follow(message, context)
    content = reply.content
    if fault == "nan":
        update(content, np.full(82, np.nan, np.float32))
    if fault == "shape":
        update(content, np.zeros(81, np.float32))
    if fault == "broadcast":
        update(content, np.ones(1, np.float32))
    if fault == "norm":
        update(content, np.full(82, 1e6 / 82**0.5, np.float32))
    if fault == "round":
        content[NUMBERS]["round"] = int(message.metadata.group_id) - 2
    if fault == "id":
        content[NUMBERS]["client"] = 0
    if fault == "huge":  # megabytes in a record of their own
        content["more"] = ConfigRecord({{"more": bytes(int(number) << 20)}})
    if fault == "fat":  # megabytes among the numbers
        content[NUMBERS]["more"] = bytes(int(number) << 20)
    if fault == "keys":
        content[NUMBERS] = ConfigRecord(dict(content[NUMBERS]) | {{f"more{{i:0100}}": i for i in range(int(number))}})
    if fault == "many":
        for i in range(int(number)):
            content[f"more{{i}}"] = ConfigRecord({{"more": i}})
    return reply


app = client_app(task, mods=[mischief])
'''


class Evil(LocalFederation):
    """A federation whose nodes also fail while they upload, on order."""

    node = (sys.executable, "-P", str(Path(__file__).with_name("evil.py")))

    def __init__(self, stage: Path, folder: Path, nodes: int = CLIENTS) -> None:
        """The orders are those of the app in `folder`."""
        faults = {"KAIROSFL_FAULTS": str(folder.absolute() / "faults.json")}
        super().__init__(stage, [str(client) for client in range(nodes)], environment=faults)


def make_app(folder: Path, faults: Mapping[int, Mapping[int, str]] | None = None) -> Path:
    """The app that `kairosfl deploy new` writes; with `faults`, its clients can be told to
    misbehave.
    """
    deploy.new(folder)
    if faults is not None:
        order(folder, faults)
        path = str(folder.absolute() / "faults.json")
        (folder / "app" / "federation" / "client.py").write_text(MISCHIEF.format(faults=path))
    return folder / "app"


def order(folder: Path, faults: Mapping[int, Mapping[int, str]]) -> None:
    """Tell the clients what to do in which round."""
    (folder / "faults.json").write_text(json.dumps(faults))


def go(folder: Path) -> None:
    """Let the clients that wait go on."""
    (folder / "faults.json.go").touch()


def configure(folder: Path, name: str, **changes: object) -> Path:
    """The app's configuration with changes, in a file of this name."""
    text = (folder / "run.toml").read_text()
    for key, value in changes.items():
        text, found = re.subn(rf"(?m)^{key} = [^#\n]*", f"{key} = {json.dumps(value)} ", text)
        assert found == 1, key
    path = folder / name
    path.write_text(text)
    return path


def reference(folder: Path, run: Path, out: Path) -> Folder:
    """The same run on engine `loop`, in this process, with the data of all clients."""
    sys.path.insert(0, str(folder / "app"))
    try:
        task = import_module("federation.task").task
    finally:
        sys.path.pop(0)
        for name in [name for name in sys.modules if name.partition(".")[0] == "federation"]:
            del sys.modules[name]
    server, parts = task(None), [task(client).dataset.train for client in range(CLIENTS)]
    train = Samples(
        torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts])
    )
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in parts])])
    whole = Task(
        server.model,
        replace(server.dataset, train=train),
        Population(np.arange(len(train)), offsets),
        own=server.own,
    )
    config, _ = deploy.load(run)
    result = Folder(out)
    out.mkdir()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    prepared = prepare(config, whole, Loop(whole))
    execute(record(prepared, result), prepared.engine)
    torch.set_num_threads(threads)
    return result


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """The lines of a run folder's file, without what depends on the clock."""
    rows = [json.loads(line) for line in (folder / name).read_text().splitlines()]
    return [{key: value for key, value in row.items() if key != "seconds"} for row in rows]


def seconds(folder: Path) -> list[float]:
    """What every round of a run took."""
    return [
        json.loads(line)["seconds"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
