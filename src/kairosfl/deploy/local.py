"""A local federation: SuperLink and SuperNodes as processes on this machine, with TLS and node
authentication.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Self

from kairosfl.deploy.certificates import authority, node_key
from kairosfl.engines.flower.roster import fingerprint, parse_ids
from kairosfl.errors import UserError

HOST, NAME = "127.0.0.1", "rehearsal"
UP = 120.0  # seconds that a process may take to start
DOWN = 5.0  # seconds that a process may take to terminate
ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    # otherwise glibc holds on to the memory of large messages in many arenas
    "MALLOC_ARENA_MAX": "2",
    "MALLOC_MMAP_THRESHOLD_": "65536",
}


class LocalFederation:
    """Everything is in one folder: `certs`, `logs`, Flower's `home`, and the SuperLink's
    `state.db`.
    """

    node = (sys.executable, "-P", "-m", "kairosfl.deploy.node")  # the program of every node

    def __init__(
        self, folder: Path, nodes: Sequence[str], *, environment: Mapping[str, str] | None = None
    ) -> None:
        """`nodes` has one entry per node: the ids of the clients that it serves, such as `0-3`."""
        self.folder, self.nodes = folder.absolute(), list(nodes)
        self.port = free_port()
        here = str(Path(sys.executable).parent)  # Flower starts its commands by name
        path = os.pathsep.join([here, os.environ.get("PATH", "")])
        home = str(self.folder / "home")
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            **(environment or {}),
            "PATH": path,
            "FLWR_HOME": home,
        }
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.keys: dict[str, bytes] = {}  # node → its public key

    @property
    def certs(self) -> Path:
        return self.folder / "certs"

    def __enter__(self) -> Self:
        for name in ("certs", "logs", "home"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        authority(self.certs, ("localhost", HOST))
        config = f'[superlink]\ndefault = "{NAME}"\n\n[superlink.{NAME}]\naddress = "{HOST}:{self.port}"\n'
        config += f'root-certificates = "{self.certs / "ca.crt"}"\n'
        (self.folder / "home" / "config.toml").write_text(config)
        try:
            self.start_superlink()
            for number, clients in enumerate(self.nodes):
                self.keys[f"node-{number}"] = node_key(self.certs / f"node-{number}")
                self.register(f"node-{number}")
                self.start_node(f"node-{number}", clients)
            for name in self.keys:
                self.wait_for(name, partial(self.connected, name))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start_superlink(self) -> None:
        """Start it, or restart it with its previous state, and wait until it answers."""
        arguments = [
            "--host",
            HOST,
            "--port",
            str(self.port),
            "--database",
            str(self.folder / "state.db"),
        ]
        arguments += [
            "--ssl-ca-certfile",
            str(self.certs / "ca.crt"),
            "--ssl-certfile",
            str(self.certs / "server.pem"),
        ]
        arguments += ["--ssl-keyfile", str(self.certs / "server.key"), "--enable-supernode-auth"]
        self.start("superlink", "flower-superlink", *arguments)
        self.wait_for("superlink", lambda: _open(self.port))

    def ensure_superlink(self) -> None:
        """Restart the SuperLink if it has exited."""
        process = self.processes.get("superlink")
        if process is None or process.poll() is not None:
            self.start_superlink()

    def connected(self, name: str) -> bool:
        """Whether a node has logged that the SuperLink accepted it."""
        return b"SuperNode ID" in self.log(name).read_bytes()

    def wait_for(self, name: str, up: Callable[[], bool]) -> None:
        """Wait until a process is up."""
        until = time.monotonic() + UP
        while not up():
            if self.processes[name].poll() is not None or time.monotonic() > until:
                raise UserError(f"The process {name} did not start; see {self.log(name)}.")
            time.sleep(0.1)

    def register(self, node: str) -> None:
        """Register a node's key with the SuperLink."""
        public = str(self.certs / f"{node}.pub")
        done = subprocess.run(
            ["flwr", "supernode", "register", public, NAME, "--name", node],
            env=self.environment,
            capture_output=True,
        )
        if done.returncode:
            raise UserError(
                f"The SuperLink rejected the key of {node}: {done.stderr.decode().strip()[-200:]}"
            )

    def start_node(self, node: str, clients: str, *more: str) -> None:
        """Start a node that serves these clients and authenticates with its key."""
        arguments = [
            "--superlink",
            f"{HOST}:{self.port}",
            "--root-certificates",
            str(self.certs / "ca.crt"),
        ]
        arguments += [
            "--auth-supernode-private-key",
            str(self.certs / node),
            "--port",
            str(free_port()),
        ]
        self.start(node, *self.node, *arguments, "--node-config", f'clients="{clients}"', *more)

    def submit(self, app: Path, run: Path, out: Path) -> subprocess.Popen[bytes]:
        """Run an app with a configuration in a run folder; the process exits with the run."""
        config = f'run="{run.absolute()}" out="{out.absolute()}"'
        return self.start("run", "flwr", "run", str(app), NAME, "--stream", "--run-config", config)

    def roster(self) -> dict[int, str]:
        """The key of each client."""
        return {
            client: fingerprint(self.keys[f"node-{number}"])
            for number, clients in enumerate(self.nodes)
            for client in parse_ids(clients)
        }

    def start(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Start a process with a log, in a new session, so that its children can be killed with it."""
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                command,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.processes[name] = process
        return process

    def log(self, name: str) -> Path:
        return self.folder / "logs" / f"{name}.log"

    def kill(self, name: str, how: signal.Signals = signal.SIGKILL) -> None:
        """Kill a process and all its children."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(DOWN)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def close(self) -> None:
        """Stop everything, nodes first, then leftovers: a server in the middle of a run outlives
        its SuperLink.
        """
        for name in sorted(self.processes, key=lambda name: name == "superlink"):
            self.kill(name, signal.SIGTERM)
        for process in self.find("flwr-"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def find(self, name: str) -> list[int]:
        """Running processes of this federation with `name` in their name or command line, Flower's
        own included.
        """
        found, home = [], f"FLWR_HOME={self.environment['FLWR_HOME']}\0".encode()
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(
                OSError
            ):  # it has exited meanwhile, or belongs to another user
                called = (entry / "comm").read_bytes() + (entry / "cmdline").read_bytes()
                if name.encode() in called and home in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
        return found


def free_port() -> int:
    """An unused port."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def _open(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((HOST, port)) == 0
