"""Deployment without processes: the app that is written, certificates, settings, and a server that
survives.
"""

from __future__ import annotations

import json
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import yaml
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from flower_grid import FakeGrid, Node
from flwr.app import Message
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from kairosfl import deploy
from kairosfl.deploy import rehearsal
from kairosfl.deploy.server import check_private
from kairosfl.deploy.settings import check_deployable
from kairosfl.engines.flower.client import client_app
from kairosfl.engines.flower.server import Settings
from kairosfl.engines.flower.wire import Packing
from kairosfl.errors import UserError
from kairosfl.runs.config import resolve
from kairosfl.runs.experiment import start
from kairosfl.runs.prepare import build_task
from kairosfl.tasks.task import Task

pytestmark = pytest.mark.usefixtures("quick")

CONFIG = """\
algorithm = "scaffold + pa3fed"
seed = 1
[data]
name = "digits"
clients = 6
[model]
name = "mlp"
hidden = [8]
[train]
rounds = 4
cohort = 3
epochs = 1
[run]
checkpoint_every = 1
threads = 1
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "run.toml").write_text(CONFIG)
    return tmp_path / "run.toml"


@pytest.fixture
def task(config: Path) -> Task:
    return build_task(deploy.load(config)[0])


def grid_of(task: Task) -> FakeGrid:
    return FakeGrid({9 + i: Node(bytes([i]), client_app(lambda _: task), str(i)) for i in range(6)})


def test_served_like_the_loop_engine(config: Path, task: Task, tmp_path: Path) -> None:
    summary = deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "served")
    start(deploy.load(config, ["run.engine=loop"])[0], tmp_path / "loop")
    assert summary["rounds"] == 4
    assert torch.equal(deploy.model_of(tmp_path / "served"), deploy.model_of(tmp_path / "loop"))
    about = json.loads((tmp_path / "served" / "run.json").read_text())
    assert about["engine"] == "flower"
    assert about["clients"] == 6
    assert (
        deploy.serve(FakeGrid({}), lambda _: task, config, tmp_path / "served") == summary
    )  # it is over


class Stopped(BaseException):
    """As if the process had been killed."""


def test_a_server_that_is_stopped_goes_on(config: Path, task: Task, tmp_path: Path) -> None:
    class Failing(FakeGrid):
        def push_messages(self, messages: list[Message]) -> list[str]:
            if messages[0].metadata.group_id == "3":
                raise Stopped
            return super().push_messages(messages)

    with pytest.raises(Stopped):
        deploy.serve(Failing(grid_of(task).nodes), lambda _: task, config, tmp_path / "run")
    text = config.read_text()
    config.write_text(text.replace("epochs = 1", "epochs = 2"))
    with pytest.raises(
        UserError,
        match=r"asks for train\.epochs = 2, and the run in .* has 1; change it back, edit .*config\.toml",
    ):
        deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "run")
    config.write_text(text)
    deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "run")
    deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "whole")
    assert torch.equal(deploy.model_of(tmp_path / "run"), deploy.model_of(tmp_path / "whole"))
    log = (tmp_path / "run" / "log.txt").read_text().splitlines()
    assert "resumed after round 2" in log


def test_another_algorithm_goes_on_from_a_model(config: Path, task: Task, tmp_path: Path) -> None:
    deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "first")
    text = (
        CONFIG.replace("scaffold + pa3fed", "fedyogi")
        + f'[deploy]\nstart = "{tmp_path / "first"}"\nover = 0.5\n'
    )
    config.write_text(text.replace("rounds = 4", "rounds = 1"))
    deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "second")
    row = json.loads((tmp_path / "second" / "metrics.jsonl").read_text())
    assert (row["cohort"], row["reported"]) == (
        5,
        3,
    )  # a cohort of 3: half as many are asked in addition, 3 needed
    first, second = deploy.model_of(tmp_path / "first"), deploy.model_of(tmp_path / "second")
    begun = torch.linalg.vector_norm(second - first)
    assert begun < torch.linalg.vector_norm(second - task.start())
    assert json.loads((tmp_path / "second" / "run.json").read_text())["start"] == {
        "folder": str(tmp_path / "first"),
        "round": 4,
    }
    config.write_text(text.replace(f'"{tmp_path / "first"}"', f'"{tmp_path}"'))
    with pytest.raises(
        UserError, match=r"deploy\.start = .* is not a run folder with a checkpoint; name one\."
    ):
        deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "third")


@pytest.mark.parametrize(
    "algorithm", ["budget(share=0.5)", "budget(share=0.5, plan=[3, 1])", "fedcl(budget=0.5)"]
)
def test_clients_asked_in_addition_are_paid_from_the_budget(
    algorithm: str, config: Path, task: Task, tmp_path: Path
) -> None:
    text = (
        CONFIG.replace("scaffold + pa3fed", algorithm).replace("rounds = 4", "rounds = 6")
        + "[deploy]\nover = 0.5\n"
    )
    config.write_text(text)
    deploy.serve(grid_of(task), lambda _: task, config, tmp_path / "run")
    asked = [
        json.loads(line)["cohort"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(asked) == 9  # half of 3 x 6, whatever is asked in addition


def test_a_server_without_the_clients_data(config: Path, task: Task, tmp_path: Path) -> None:
    config.write_text(
        CONFIG.partition("[data]")[0] + "[train]\nrounds = 1\ncohort = 50\n[deploy]\nclients = 60\n"
    )
    grid = grid_of(task)
    grid.nodes = {1: Node(b"k", client_app(lambda _: task), "0-59")}
    with pytest.raises(
        UserError, match=r"1 round in a row had no good report .*client \d+ of a population of 6"
    ):
        deploy.serve(
            grid, lambda _: task, config, tmp_path / "run"
        )  # these clients have other data
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["clients"] == 60
    config.write_text(config.read_text() + "[run]\nclient_accuracy = true\n")
    with pytest.raises(UserError, match=r"run\.client_accuracy = true needs the clients' data"):
        deploy.serve(grid, lambda _: task, config, tmp_path / "other")


def test_the_deploy_section() -> None:
    given = deploy.Deploy.from_table(
        {"clients": 5, "deadline": 30, "update": "float16", "keep": 0.5, "max_norm": 7.0}
    )
    settings = given.settings()
    assert (given.clients, settings.deadline, settings.quorum) == (5, 30.0, 0.5)
    assert settings.packing == Packing("float16", 0.5)
    assert settings.trust.max_norm == 7.0
    with pytest.raises(UserError, match=r"Unknown key deploy\.dedline; did you mean 'deadline'\?"):
        deploy.Deploy.from_table({"dedline": 3})
    for table in (
        {"clients": 1.5},
        {"clients": True},
        {"deadline": "soon"},
        {"deadline": True},
        {"start": 3},
    ):
        with pytest.raises(UserError, match=r"deploy\.\w+ = .* must be of type"):
            deploy.Deploy.from_table(table)


def test_a_new_app(tmp_path: Path) -> None:
    written = deploy.new(tmp_path / "My Project")
    assert sorted(str(path.relative_to(tmp_path / "My Project")) for path in written) == [
        "Containerfile",
        "README.md",
        "app/federation/__init__.py",
        "app/federation/client.py",
        "app/federation/server.py",
        "app/federation/task.py",
        "app/pyproject.toml",
        "compose.yaml",
        "run.toml",
    ]
    config, section = deploy.load(tmp_path / "My Project" / "run.toml")
    assert (config.train.rounds, config.data.clients, section.clients) == (20, 4, 4)
    check = (
        "import federation.client, federation.server; print(federation.server.task(2).layout.size)"
    )
    done = subprocess.run(
        [sys.executable, "-c", check],
        cwd=tmp_path / "My Project" / "app",
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "82", done.stderr
    with pytest.raises(
        UserError, match=r"already exists and is not an empty directory; choose a new one\."
    ):
        deploy.new(tmp_path / "My Project")


def test_the_containers_of_a_new_app_run_flowers_commands_on_files_that_exist(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "hospital"
    deploy.new(folder)
    deploy.certs(folder / "certs", nodes=1)
    compose = yaml.safe_load((folder / "compose.yaml").read_text())
    superlink, node = (compose["services"][name] for name in ("superlink", "node"))
    for service in (superlink, node):
        assert service["security_opt"] == ["no-new-privileges:true"]
        for volume in service["volumes"]:
            source = volume.replace("${KEY:-certs/node-0}", "certs/node-0").partition(":")[0]
            assert source == "./data" or source in compose["volumes"] or (folder / source).exists()
    served = _parse_args_run_superlink().parse_args(superlink["command"][1:])
    assert (served.port, served.enable_supernode_auth) == (8000, True)
    assert node["command"][:3] == ["kairosfl", "deploy", "node"]
    given = _parse_args_run_supernode().parse_args(node["command"][3:])
    assert given.auth_supernode_private_key == "/srv/certs/node"
    assert tomllib.loads(given.node_config) == {"clients": "${CLIENTS:-0}"}
    flower = tomllib.loads(compose["configs"]["flower"]["content"])
    assert flower["superlink"]["hospital"]["address"] == "localhost:8000"


def test_certificates(tmp_path: Path) -> None:
    written = deploy.certs(tmp_path / "certs", nodes=2, hosts=("fl.example.org", "10.0.0.1"))
    assert [path.name for path in written] == [
        "ca.crt",
        "node-0",
        "node-0.pub",
        "node-1",
        "node-1.pub",
        "roster.json",
        "server.key",
        "server.pem",
    ]
    for path in written:
        secret = path.name in ("node-0", "node-1", "server.key")
        assert stat.S_IMODE(path.stat().st_mode) == (0o600 if secret else 0o644), path
    ca = x509.load_pem_x509_certificate((tmp_path / "certs" / "ca.crt").read_bytes())
    server_certificate = x509.load_pem_x509_certificate(
        (tmp_path / "certs" / "server.pem").read_bytes()
    )
    server_certificate.verify_directly_issued_by(ca)
    names = server_certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.1"]
    private = load_ssh_private_key((tmp_path / "certs" / "node-1").read_bytes(), password=None)
    public = load_ssh_public_key((tmp_path / "certs" / "node-1.pub").read_bytes())
    assert private.public_key() == public
    bound = json.loads((tmp_path / "certs" / "roster.json").read_text())
    assert len(set(bound.values())) == len(bound) == 2
    with pytest.raises(UserError, match="keys are never overwritten"):
        deploy.certs(tmp_path / "certs", nodes=2)
    with pytest.raises(UserError, match="--nodes 0 must be 1 or more"):
        deploy.certs(tmp_path / "more", nodes=0)


@pytest.mark.parametrize(
    "host", ["é.example", "999.1.1.1", "a\nb", "", "x" * 300, "-a.b", "a..b", "a b", "a/b", "1"]
)
def test_a_host_that_no_certificate_can_name_is_refused_before_anything_is_written(
    host: str, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError,
        match=r"--host .* (is neither a host name nor an IP address|is not ASCII; write it)",
    ):
        deploy.certs(tmp_path / "certs", nodes=1, hosts=("localhost", host))
    assert not (tmp_path / "certs").exists()


def test_a_long_host_is_an_alternative_name_alone(tmp_path: Path) -> None:
    host = ".".join(["x" * 60] * 3)
    deploy.certs(tmp_path / "certs", nodes=1, hosts=(host, "*.example.org", "::1"))
    certificate = x509.load_pem_x509_certificate((tmp_path / "certs" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [host, "*.example.org"]


@pytest.mark.parametrize(
    ("settings", "name"), [({}, "quorum"), ({"quorum": 0.0, "over": 0.5}, "over")]
)
def test_privacy_refuses_to_drop_reports_by_their_number(
    settings: dict[str, float], name: str
) -> None:
    config = resolve({"algorithm": "privacy(key='NOISE')"})
    with pytest.raises(
        UserError, match=rf"deploy\.{name} = 0\.5 cannot be used with privacy: .*set {name} = 0\."
    ):
        check_private(config, Settings(**settings))  # type: ignore[arg-type]
    check_private(config, Settings(quorum=0.0))
    check_private(resolve({}), Settings())
    with pytest.raises(UserError, match="privacy needs a key in a deployment"):
        check_deployable(resolve({"algorithm": "privacy"}).algorithm)


def test_a_configuration_for_devices_is_rehearsed_not_run() -> None:
    with pytest.raises(
        UserError, match=r"\[deploy\] is for real devices: use `kairosfl deploy rehearse`"
    ):
        resolve({"deploy": {}})


def test_a_rehearsal_ends_when_its_run_has_finished(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where Flower goes on to show the log of a run that nobody carries out."""
    monkeypatch.setattr(rehearsal, "HANDOVER", 0.1)
    out = tmp_path / "out"

    class Federation:
        killed = ""

        def ensure_superlink(self) -> None: ...

        def roster(self) -> dict[int, str]:
            return {}

        def submit(self, *_: Path) -> subprocess.Popen[bytes]:
            (out / "summary.json").write_text('{"rounds": 4, "finished": true}')
            self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            return self.process

        def kill(self, name: str) -> None:
            self.killed = name
            self.process.kill()

    federation = Federation()
    summary = deploy.run_to_end(federation, tmp_path / "app", config, out)  # type: ignore[arg-type]
    federation.process.wait()
    assert summary["rounds"] == 4
    assert federation.killed == "run"
