"""Templates of a Flower app around a user's task: the files that `kairosfl deploy new` writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from kairosfl.deploy.containers import COMPOSE, CONTAINERFILE
from kairosfl.errors import UserError
from kairosfl.runs.files import write

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

# Paths of run.toml and of the run folder on the server; set with --run-config on the command line.
[tool.flwr.app.config]
run = ""
out = ""
"""

CLIENT = '''\
"""Runs on a device. It contains no algorithm, so it does not change when the algorithm does."""

from kairosfl.engines.flower.client import client_app

from federation.task import task

app = client_app(task)
'''

SERVER = '''\
"""Runs on the server."""

from kairosfl.deploy import server_app

from federation.task import task

app = server_app(task)
'''

TASK = '''\
"""The model and the data: the only file of this app that you have to write.

It is a task file, too: `kairosfl run task.py` simulates the federation on one machine.
"""

import torch
from torch import nn

from kairosfl import DataSet, Population, Samples, Task


def task(client: int | None = None) -> Task:
    """The model, and on a device the data of its client.

    None is the server, which uses only the model and the test set, and a simulation, which has all clients' data.
    """
    torch.manual_seed(0)  # only the server's initial weights are used; clients receive theirs in a brief
    model = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2))
    parts = [moons(seed + 1) for seed in (range(4) if client is None else [client])]
    train = Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))
    owner = torch.arange(len(parts)).repeat_interleave(60).numpy()
    clients = Population.from_owner(owner, len(parts))
    return Task(model, DataSet("moons", train=train, test=moons(0), classes=2), clients)


def moons(seed: int, n: int = 60) -> Samples:
    """Replace this by reading a client's own data; here: two half moons."""
    generator = torch.Generator().manual_seed(seed)
    angle = torch.rand(n, generator=generator) * torch.pi
    side = torch.randint(0, 2, (n,), generator=generator)
    x = torch.where(side == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(side == 0, angle.sin(), 0.5 - angle.sin())
    return Samples(torch.stack([x, y], 1) + 0.1 * torch.randn(n, 2, generator=generator), side)
'''

RUN = """\
# limits, the last one: what a single client may claim
algorithm = "fedavgm(beta=0.7) + fedcl(floor=1.0) + limits(weight=1.2, norm=1.25)"
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
deadline = 600.0   # seconds that clients have per round
quorum = 0.5       # fraction of the cohort that must report for a round to count
over = 0.0         # fraction of the cohort asked in addition, to make up for clients that do not answer
max_norm = 1e4     # an update with a larger norm is rejected; limits compares it with the others'
min_loss = 0.0     # a smaller loss is rejected; -inf for a loss that may be negative
# samples = [60, 60, 60, 60]   # as enrolled, by client id; a client that claims more is rejected
"""

README = """\
# {name}

Write `app/federation/task.py`: the model, and how a device reads its own data. It also runs on one machine:
`kairosfl run app/federation/task.py --set train.cohort=4`. Then run
`pip install 'kairosfl[flower]'` on every machine and `kairosfl deploy certs certs --nodes 4` (or use your own CA):

    export FLWR_TELEMETRY_ENABLED=0 FLWR_DISABLE_UPDATE_CHECK=1

On the server:

    flower-superlink --host 0.0.0.0 --port 8000 --database state.db --disable-runtime-dependency-installation \\
        --ssl-ca-certfile certs/ca.crt --ssl-certfile certs/server.pem --ssl-keyfile certs/server.key \\
        --enable-supernode-auth

Once, with the address of the server under [superlink.{name}] in ~/.flwr/config.toml:

    flwr supernode register certs/node-0.pub {name}      # and node-1, node-2, node-3

On each device, with its own key and its own client id:

    kairosfl deploy node --superlink SERVER:8000 --root-certificates ca.crt \\
        --auth-supernode-private-key node-0 --node-config 'clients="0"'

Train; if the server was stopped, the same command resumes the run:

    flwr run app {name} --stream --run-config 'run="{path}/run.toml" out="{path}/runs/first"'

What it is doing: `kairosfl deploy status runs/first`; live, in a browser: `kairosfl watch runs/first`.
`Containerfile` and `compose.yaml` run the server and a device in containers. See docs/deploy.md and docs/operate.md in
the Kairos documentation for hardening and operation.
"""


REHEARSAL_TASK = '''\
"""The data and model of a rehearsal, the same on every node."""

from pathlib import Path

from kairosfl import Task
from kairosfl.runs.config import load
from kairosfl.runs.prepare import build_task


def task(client: int | None) -> Task:
    return build_task(load(Path({path!r})), client)
'''


def rehearsal_files(path: str) -> dict[str, str]:
    """An app for the data and model configured in the TOML file at `path`."""
    return {
        "pyproject.toml": PYPROJECT.format(name="rehearsal"),
        "federation/__init__.py": "",
        "federation/task.py": REHEARSAL_TASK.format(path=path),
        "federation/client.py": CLIENT,
        "federation/server.py": SERVER,
    }


def files(name: str, path: str) -> dict[str, str]:
    """The files of a new app by relative path."""
    return {
        "README.md": README.format(name=name, path=path),
        "run.toml": RUN,
        "Containerfile": CONTAINERFILE.format(name=name),
        "compose.yaml": COMPOSE.format(name=name),
        "app/pyproject.toml": PYPROJECT.format(name=name),
        "app/federation/__init__.py": "",
        "app/federation/task.py": TASK,
        "app/federation/client.py": CLIENT,
        "app/federation/server.py": SERVER,
    }


def new(path: Path) -> list[Path]:
    """Create a directory with a Flower app, an example task, a configuration and the commands to
    run it.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} already exists and is not an empty directory; choose a new one.")
    name = re.sub(r"[^a-z0-9]+", "-", path.absolute().name.lower()).strip("-") or "federation"
    return write_all(path, files(name, str(path.absolute())))


def write_all(path: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write files by their relative path, each atomically; return where they are."""
    for name, content in contents.items():
        write(path / name, content)
    return [path / name for name in contents]
