"""The files of a Flower app around a user's task: what `kairosfl deploy new` writes."""

from __future__ import annotations

PYPROJECT = """\
[project]
name = "{name}"
version = "1.0.0"
description = "A Kairos federation"
license = "Apache-2.0"
dependencies = ["kairosfl[flower]"]

[tool.flwr.app]
publisher = "{name}"

[tool.flwr.app.components]
serverapp = "federation.server:app"
clientapp = "federation.client:app"

# Where the server finds run.toml and keeps the run; given with --run-config on the command line.
[tool.flwr.app.config]
run = ""
out = ""
"""

CLIENT = '''\
"""What runs on a device. It knows no algorithm, so that it need not change when the algorithm does."""

from kairosfl.engines.flower.client import client_app

from federation.task import task

app = client_app(task)
'''

SERVER = '''\
"""What runs on the server."""

from kairosfl.deploy import server_app

from federation.task import task

app = server_app(task)
'''

TASK = '''\
"""The model and the data: the one file of this app that is yours to write."""

import torch
from torch import nn

from kairosfl import DataSet, Population, Samples, Task


def task(client: int | None) -> Task:
    """The model, and the data of this client on this device; None: the server's, of which only the test set is used."""
    torch.manual_seed(0)  # the server's model is the one that counts; a client's has only its shape
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    samples = moons(0 if client is None else client + 1)
    everything = Population.from_lists([torch.arange(len(samples)).numpy()])
    return Task(model, DataSet("moons", train=samples, test=samples, classes=2), everything)


def moons(seed: int, n: int = 60) -> Samples:
    """Stands in for reading the device's own data: two half moons."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(n, generator=generator) * torch.pi
    side = torch.randint(0, 2, (n,), generator=generator)
    x = torch.where(side == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(side == 0, angle.sin(), 0.5 - angle.sin())
    return Samples(torch.stack([x, y], 1) + 0.1 * torch.randn(n, 2, generator=generator), side)
'''

RUN = """\
algorithm = "scaffold + fedcl"
seed = 0

[train]
rounds = 20
cohort = 4
epochs = 2
batch_size = 16
lr = 0.1

[run]
checkpoint_every = 1

[deploy]
clients = 4        # ids 0 to 3
deadline = 600.0   # seconds that clients have in a round
quorum = 0.5       # part of the cohort that must report for a round to count
over = 0.0         # part of the cohort that is asked on top, for those who will not answer
max_norm = 1e4     # a larger update is refused
"""

README = """\
# {name}

`app/federation/task.py` is yours to write: the model, and how a device reads its own data. Then, with
`pip install 'kairosfl[flower]'` everywhere and `kairosfl deploy certs certs --nodes 4` (or your own authority):

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

On the server:

    flower-superlink --host 0.0.0.0 --port 8000 --database state.db --disable-runtime-dependency-installation \\
        --ssl-ca-certfile certs/ca.crt --ssl-certfile certs/server.pem --ssl-keyfile certs/server.key \\
        --enable-supernode-auth

Once, with the address of the server under [superlink.{name}] in ~/.flwr/config.toml:

    flwr supernode register certs/node-0.pub {name}      # and node-1, node-2, node-3

On each device, with its own key and its own client id:

    flower-supernode --superlink SERVER:8000 --root-certificates ca.crt \\
        --auth-supernode-private-key node-0 --node-config 'clients="0"'

Train; the same line goes on where it was if the server was stopped:

    flwr run app {name} --stream --run-config 'run="{path}/run.toml" out="{path}/runs/first"'

The Kairos documentation, docs/deploy.md, says how to harden and supervise this.
"""


REHEARSED = '''\
"""The data and the model of a rehearsal, the same on every node."""

from pathlib import Path

from kairosfl import Task
from kairosfl.runs.config import load
from kairosfl.runs.experiment import build_task


def task(client: int | None) -> Task:
    return build_task(load(Path({path!r})))
'''


def rehearsal_files(path: str) -> dict[str, str]:
    """An app for the data and the model that the TOML file at `path` names."""
    return {
        "pyproject.toml": PYPROJECT.format(name="rehearsal"),
        "federation/__init__.py": "",
        "federation/task.py": REHEARSED.format(path=path),
        "federation/client.py": CLIENT,
        "federation/server.py": SERVER,
    }


def files(name: str, path: str) -> dict[str, str]:
    """The files of a new app by their relative path."""
    return {
        "README.md": README.format(name=name, path=path),
        "run.toml": RUN,
        "app/pyproject.toml": PYPROJECT.format(name=name),
        "app/federation/__init__.py": "",
        "app/federation/task.py": TASK,
        "app/federation/client.py": CLIENT,
        "app/federation/server.py": SERVER,
    }
