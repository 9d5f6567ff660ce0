"""Memory of the server with a large random model over real Flower nodes, updates on disk.

    python benchmarks/speed/flower_memory.py [--parameters 25000000] [--nodes 4] [--algorithm fedavg] [--on-disk 0]
    python benchmarks/speed/flower_memory.py --limit 3     # as root: the kernel lets the server have no more

SuperLink and SuperNodes are real processes on loopback with TLS and authentication. Weights and
updates are random: Flower sends equal chunks only once. Printed is the server process's memory
beyond what it holds before the first round without the model, in models: anonymous memory, which it
really needs, and mapped pages of the updates, which the system takes back when it wants them. With
--limit the server runs in a control group (version 1 or 2) whose memory, mapped pages and file
cache included, is what it held with the small model and so many large ones.
"""

from __future__ import annotations

import argparse
import time
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from flower_overhead import write_app

from kairosfl.deploy import run_to_end
from kairosfl.deploy.local import LocalFederation
from kairosfl.deploy.templates import SERVER

TASK = """
import numpy as np, torch
from torch import nn
from kairosfl import DataSet, Population, Samples, Task

def task(client):
    torch.manual_seed(0)
    samples = Samples(torch.zeros(1, {width}), torch.zeros(1, dtype=torch.int64))
    model = nn.Sequential(nn.Linear({width}, {width}), nn.Linear({width}, 2))
    return Task(model, DataSet("zeros", samples, samples, 2), Population(np.arange(1), np.arange(2)))
"""

CLIENT = """
import numpy as np
from dataclasses import replace
from flwr.app import Message
from flwr.clientapp import ClientApp
from kairosfl.engines.flower import client
from kairosfl.core.fields import Report
import torch

class Random(client.Trainer):
    def follow(self, brief):
        random = torch.Generator().manual_seed(1000 * brief.round + brief.client)
        delta = 1e-3 * torch.randn(len(brief.start), generator=random)
        return Report(client=brief.client, n=1, steps=1, epochs=1.0, delta=delta, loss=1.0, grad_sq=1.0, seconds=0.0)

client.Trainer = Random
from federation.task import task
app = client.client_app(task)
"""

RUN = """
algorithm = "{algorithm}"
[train]
rounds = {rounds}
cohort = {nodes}
[run]
checkpoint_every = 1000000
eval_every = 1000000
[deploy]
clients = {nodes}
quorum = 1.0
on_disk = {on_disk}
"""


KINDS = {  # lines of /proc/PID/status
    "RssAnon": "needed (anonymous)",
    "RssFile": "mapped, given back when wanted",
    "VmRSS": "resident, both together",
}


class Fence:
    """A control group with a limit on memory, where the kernel counts mapped pages and file cache,
    too.
    """

    def __init__(self, limit: int) -> None:
        root = Path("/sys/fs/cgroup")
        old = (root / "memory").is_dir()
        self.folder = (root / "memory" if old else root) / "kairosfl-benchmark"
        self.folder.mkdir(exist_ok=True)
        (self.folder / ("memory.limit_in_bytes" if old else "memory.max")).write_text(str(limit))
        self.peak = self.folder / ("memory.max_usage_in_bytes" if old else "memory.peak")

    def add(self, process: int) -> None:
        """Its memory is counted and limited from now on."""
        with suppress(OSError):  # it has ended
            (self.folder / "cgroup.procs").write_text(str(process))


def watch(stage: LocalFederation, stop: Event, peaks: dict[str, int], fence: Fence | None) -> None:
    """The largest memory that the server's process is seen to hold."""
    inside: set[int] = set()
    while not stop.wait(0.02):
        for process in stage.find("flwr-serverapp"):
            if fence and process not in inside:
                fence.add(process)
                inside.add(process)
            with suppress(OSError):
                for line in Path(f"/proc/{process}/status").read_text().splitlines():
                    name, _, value = line.partition(":")
                    if name in KINDS:
                        peaks[name] = max(peaks.get(name, 0), int(value.split()[0]) * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--algorithm", default="fedavg")
    parser.add_argument("--on-disk", type=int, default=0)
    parser.add_argument(
        "--limit", type=float, help="models that the server may hold beside what it needs anyway"
    )
    given = parser.parse_args()
    found: dict[int, dict[str, int]] = {}
    fence, model = None, 4 * given.parameters
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        (folder / "run.toml").write_text(RUN.format(**vars(given)))
        with LocalFederation(folder / "stage", [str(i) for i in range(given.nodes)]) as stage:
            for parameters in (100, given.parameters):
                task = TASK.format(width=round(parameters**0.5))
                app = write_app(
                    folder / f"app{parameters}", f"app{parameters}", task, SERVER, CLIENT
                )
                stop, found[parameters] = Event(), {}
                if given.limit and parameters == given.parameters:
                    fence = Fence(int(found[100]["RssAnon"] + given.limit * model))
                thread = Thread(target=watch, args=(stage, stop, found[parameters], fence))
                thread.start()
                began = time.monotonic()
                run_to_end(stage, app, folder / "run.toml", folder / f"out{parameters}")
                took = time.monotonic() - began
                stop.set()
                thread.join()
                print(
                    f"{parameters} parameters: {took:.0f} s for {given.rounds} rounds, {found[parameters]}"
                )
    if fence:
        print(
            f"within {given.limit:g} models and {found[100]['RssAnon'] / 2**20:.0f} MiB: the rounds are done, and the"
        )
        print(f"kernel counted at most {int(fence.peak.read_text()) / 2**20:.0f} MiB")
    for name, words in KINDS.items():
        print(f"{words}: {(found[given.parameters][name] - found[100][name]) / model:.2f} models")


if __name__ == "__main__":
    main()
