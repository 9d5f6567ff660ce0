"""What a round costs beyond its training over Flower, beside Flower's own FedAvg on the same nodes.

    python benchmarks/flower_overhead.py [--nodes 4] [--rounds 5] [--parameters 82]

SuperLink and SuperNodes are real processes on loopback with TLS and authentication. Clients of both apps import torch
and change nothing, so that what is left is transport, process starts and the server's loop. Rounds are taken in turn
by both, and the median of each is printed, with the ratio of each turn, which a busy machine spoils least. With
--parameters above a million the weights are random, since Flower sends equal chunks only once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from kairosfl.deploy import run_to_end
from kairosfl.engines.flower.local import NAME, LocalFederation
from kairosfl.engines.flower.templates import CLIENT, PYPROJECT, SERVER
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
    def mark(round, arrays):
        marks.append(time.time())
    weights = ArrayRecord([np.random.default_rng(0).normal(size=options["parameters"]).astype(np.float32)])
    everybody = dict(min_train_nodes=options["nodes"], min_available_nodes=options["nodes"])
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, **everybody)
    strategy.start(grid=grid, initial_arrays=weights, num_rounds=options["rounds"], evaluate_fn=mark)
    out = Path(str(context.run_config["out"]))
    out.mkdir(parents=True)
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


def ours(stage: LocalFederation, app: Path, run: Path, out: Path) -> list[float]:
    """Seconds of every round but the first, in which nodes introduce themselves."""
    run_to_end(stage, app, run, out)
    return [json.loads(line)["seconds"] for line in (Folder(out).path / "metrics.jsonl").read_text().splitlines()][1:]


def theirs(stage: LocalFederation, app: Path, run: Path, out: Path) -> list[float]:
    """Seconds of every round but the first, after which the nodes are known."""
    process: subprocess.Popen[bytes] = stage.submit(app, run, out)
    while not (out / "theirs.json").exists():
        assert process.poll() is None or (time.sleep(2), (out / "theirs.json").exists())[1], stage.log("run")
        time.sleep(0.2)
    process.wait()
    marks = json.loads((out / "theirs.json").read_text())["marks"]
    return [b - a for a, b in itertools.pairwise(marks)][2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--parameters", type=int, default=82)
    given = parser.parse_args()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        task = TASK.format(width=max(1, given.parameters // 2 - 1))
        our_app = write_app(folder / "ours", "ours", task, SERVER, CLIENT)
        their_app = write_app(folder / "theirs", "theirs", "", THEIR_SERVER.format(), THEIR_CLIENT)
        (folder / "ours.toml").write_text(RUN.format(rounds=given.rounds, nodes=given.nodes))
        (folder / "theirs.json").write_text(json.dumps(vars(given)))
        times: dict[str, list[list[float]]] = {"ours": [], "theirs": []}
        with LocalFederation(folder / "stage", [str(i) for i in range(given.nodes)]) as stage:
            for turn in range(given.turns):
                times["ours"].append(ours(stage, our_app, folder / "ours.toml", folder / f"out-ours-{turn}"))
                times["theirs"].append(theirs(stage, their_app, folder / "theirs.json", folder / f"out-theirs-{turn}"))
        for who, turns in times.items():
            everything = [round(seconds, 1) for taken in turns for seconds in taken]
            print(f"{who}: median {statistics.median(everything):.1f} s a round, all {everything} ({NAME})")
        ratios = [
            statistics.median(a) / statistics.median(b) for a, b in zip(times["ours"], times["theirs"], strict=True)
        ]
        print(f"ours / theirs, turn by turn: {[round(ratio, 2) for ratio in ratios]}")


if __name__ == "__main__":
    main()
