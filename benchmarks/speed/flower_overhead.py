"""What a round costs beyond its training over Flower: Kairos and Flower's own FedAvg, on both kinds
of nodes.

    python benchmarks/speed/flower_overhead.py [--nodes 4] [--rounds 6] [--turns 1] [--parameters 82]
                                         [--resident] [--requests]

SuperLink and nodes are real processes on loopback with TLS and authentication. Clients of both apps
import torch and change nothing, so that what is left is transport, process starts and the server's
loop. In every turn a federation of `kairosfl deploy node` and one of `flower-supernode` are started
one after the other, and each runs both apps. A line is printed after each of these four runs, and
at the end one for each pair over all turns: the median seconds of a round, and the processor
seconds that the processes of the federation spend on a round. These depend less on what else the
machine is doing. With --parameters above a million the weights are random, since Flower sends equal
chunks only once. --resident leaves out `flower-supernode`, which takes most of the time. --requests
also prints how many requests of each kind the SuperLink answers in a round, from its log, whose
many lines cost it some time.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import re
import statistics
import subprocess
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from kairosfl.deploy import run_to_end
from kairosfl.deploy.local import NAME, LocalFederation
from kairosfl.deploy.templates import CLIENT, PYPROJECT, SERVER
from kairosfl.runs.folder import Folder

TASK = """
import numpy as np, torch
from torch import nn
from kairosfl import DataSet, Population, Samples, Task

def task(client):
    torch.manual_seed(0)
    width = {width}
    samples = Samples(torch.zeros(1, width), torch.zeros(1, dtype=torch.int64))
    return Task(nn.Linear(width, 2), DataSet("zeros", samples, samples, 2), Population(np.arange(1), np.arange(2)))
"""

THEIR_SERVER = """
import json, resource, time
from pathlib import Path
import numpy as np
from flwr.app import ArrayRecord
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()

@app.main()
def main(grid, context):
    options = json.loads(Path(str(context.run_config["run"])).read_text())
    marks = [time.time()]
    out = Path(str(context.run_config["out"]))
    out.mkdir(parents=True)
    def mark(round, arrays):
        marks.append(time.time())
        (out / f"round-{{round}}").touch()
    weights = ArrayRecord([np.random.default_rng(0).normal(size=options["parameters"]).astype(np.float32)])
    everybody = dict(min_train_nodes=options["nodes"], min_available_nodes=options["nodes"])
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **everybody)
    strategy.start(grid=grid, initial_arrays=weights, num_rounds=options["rounds"], evaluate_fn=mark)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (out / "theirs.json").write_text(json.dumps({{"marks": marks, "peak": peak}}))
"""

THEIR_CLIENT = """
import numpy as np, torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()

@app.train()
def train(message, context):
    (weights,) = message.content["arrays"].to_numpy_ndarrays()
    noise = np.random.default_rng(context.node_id % 2**32).normal(size=weights.shape).astype(np.float32)
    content = {"arrays": ArrayRecord([weights + noise]), "metrics": MetricRecord({"num-examples": 1})}
    return Message(RecordDict(content), reply_to=message)
"""

RUN = """
[train]
rounds = {rounds}
cohort = {nodes}
lr = 1.0
[run]
checkpoint_every = 1000000
eval_every = 1000000
[deploy]
clients = {nodes}
quorum = 1.0
"""


def write_app(path: Path, name: str, task: str, server: str, client: str) -> Path:
    (path / "federation").mkdir(parents=True)
    (path / "pyproject.toml").write_text(PYPROJECT.format(name=name))
    for file, content in (("__init__", ""), ("task", task), ("server", server), ("client", client)):
        (path / "federation" / f"{file}.py").write_text(content)
    return path


Measured = tuple[
    list[float], Counter[str]
]  # seconds of each round; processor seconds and requests of one, by kind
PARTS = {
    "server": "flwr-serverapp",
    "SuperLink": "flower-superlink",
    "nodes": "deploy.node",
}
PARTS |= {"clients": "flwr-clientapp", "workers": "engines.flower.resident"}
REQUEST = re.compile(r'"POST /v1/((?:fleet|runtime)/[a-z-]+) ')


def ours(stage: LocalFederation, app: Path, run: Path, out: Path) -> Measured:
    """Every round but the first, in which nodes introduce themselves."""
    marks: dict[int, Counter[str]] = {}
    run_to_end(stage, app, run, out, lambda row: marks.setdefault(row["round"], spent(stage)))
    seconds = [
        json.loads(line)["seconds"]
        for line in (Folder(out).path / "metrics.jsonl").read_text().splitlines()
    ]
    return seconds[1:], _slope(marks)


def theirs(stage: LocalFederation, app: Path, run: Path, out: Path) -> Measured:
    """Every round but the first, after which the nodes are known."""
    process: subprocess.Popen[bytes] = stage.submit(app, run, out)
    marks: dict[int, Counter[str]] = {}
    while not (out / "theirs.json").exists():
        assert process.poll() is None or (time.sleep(2), (out / "theirs.json").exists())[1], (
            stage.log("run")
        )
        marks.setdefault(
            len(list(out.glob("round-*"))) - 1, spent(stage)
        )  # round 0 is before training
        time.sleep(0.2)
    process.wait()
    times = json.loads((out / "theirs.json").read_text())["marks"]
    return [b - a for a, b in itertools.pairwise(times)][2:], _slope(marks)


def _slope(marks: dict[int, Counter[str]]) -> Counter[str]:
    """Processor seconds of a round, from those spent after each; without the first, and the last,
    when servers end.
    """
    known = sorted(number for number in marks if number > 0)[:-1]
    if len(known) < 2:
        return Counter()
    first, last = known[0], known[-1]
    return Counter(
        {part: (marks[last][part] - marks[first][part]) / (last - first) for part in marks[last]}
    )


def spent(stage: LocalFederation) -> Counter[str]:
    """Processor seconds of all processes of a federation that have not exited, and of their
    children that have.

    And the requests that the SuperLink has logged.
    """
    total: Counter[str] = Counter()
    for process in stage.find(""):
        with contextlib.suppress(OSError):
            entry = Path(f"/proc/{process}")
            called = (entry / "comm").read_text() + (entry / "cmdline").read_text()
            part = next((part for part, name in PARTS.items() if name in called), "others")
            ticks = sum(map(int, (entry / "stat").read_text().rpartition(")")[2].split()[11:15]))
            total[part] += ticks / os.sysconf("SC_CLK_TCK")
    total.update(REQUEST.findall(stage.log("superlink").read_text()))
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--parameters", type=int, default=82)
    parser.add_argument("--resident", action="store_true")
    parser.add_argument("--requests", action="store_true")
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = TASK.format(width=max(1, given.parameters // 2 - 1))
        our_app = write_app(folder / "ours", "ours", task, SERVER, CLIENT)
        their_app = write_app(folder / "theirs", "theirs", "", THEIR_SERVER.format(), THEIR_CLIENT)
        (folder / "ours.toml").write_text(RUN.format(rounds=given.rounds, nodes=given.nodes))
        (folder / "theirs.json").write_text(json.dumps(vars(given)))
        apps = {
            "Kairos": (ours, our_app, "ours.toml"),
            "Flower's FedAvg": (theirs, their_app, "theirs.json"),
        }
        seconds: dict[tuple[str, str], list[float]] = {}
        processor: dict[tuple[str, str], list[Counter[str]]] = {}
        for turn in range(given.turns):
            for nodes, resident in (("kairosfl deploy node", "1"), ("flower-supernode", "0"))[
                : 1 if given.resident else 2
            ]:
                served = [str(i) for i in range(given.nodes)]
                place = folder / f"stage-{turn}-{resident}"
                environment = {"KAIROSFL_RESIDENT": resident}
                if given.requests:
                    environment["FLWR_LOG_LEVEL"] = "DEBUG"
                with LocalFederation(place, served, environment=environment) as stage:
                    for name, (run, app, file) in apps.items():
                        taken, used = run(stage, app, folder / file, place / f"out-{file}")
                        show(f"turn {turn + 1}: {name} on {nodes}", taken, used)
                        seconds.setdefault((name, nodes), []).extend(taken)
                        processor.setdefault((name, nodes), []).append(used)
        for (name, nodes), taken in seconds.items():
            show(
                f"{name} on {nodes}",
                taken,
                sorted(processor[name, nodes], key=busy)[given.turns // 2],
            )


def busy(used: Counter[str]) -> float:
    """Processor seconds of all processes."""
    return sum(seconds for part, seconds in used.items() if "/" not in part)


def show(what: str, taken: list[float], used: Counter[str]) -> None:
    """One line, at once, and one with the requests where they were logged."""
    parts = ", ".join(
        f"{part} {seconds:.1f}"
        for part, seconds in used.most_common()
        if "/" not in part and seconds >= 0.05
    )
    print(
        f"{what}: median {statistics.median(taken):.1f} s a round, {busy(used):.1f} processor seconds ({parts}), "
        f"load {os.getloadavg()[0]:.0f}, all {[round(each, 1) for each in taken]} ({NAME})",
        flush=True,
    )
    requests = Counter({kind: each for kind, each in used.items() if "/" in kind})
    if requests.total():
        kinds = ", ".join(
            f"{kind} {each:.1f}" for kind, each in requests.most_common() if each >= 0.05
        )
        print(f"    {requests.total():.0f} requests a round: {kinds}", flush=True)


if __name__ == "__main__":
    main()
