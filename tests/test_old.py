"""Run folders and rules of earlier commits (tests/old) open, are compared, exported, resumed and
continued.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import kairosfl
from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.report.watch import LivePage

OLD = Path(__file__).parent / "old"
ALL = [
    f"{folder.parent.name}/{folder.name}"
    for folder in sorted(OLD.glob("[08]*/*"))
    if folder.is_dir()
]
RUNS = [name for name in ALL if not name.endswith(("/sweep", "/tune"))]
OF_SIMULATE = [name for name in RUNS if name.endswith(("simulated", "stopped"))]
BUILT = [
    name for name in RUNS if name not in OF_SIMULATE
]  # their models are built again by name or by a task file
COMMITS = ["0.2.0", "868bc1e"]
ROUNDS = 6
ALLOW = 'allow = ["cautious_rules"]\n'  # under [run], since a commit between the two


@pytest.fixture(autouse=True)
def _modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule and the task of a user can be imported, and are not yet."""
    monkeypatch.syspath_prepend(str(OLD))
    monkeypatch.delitem(sys.modules, "cautious_rules", raising=False)


def stored(name: str, home: Path, *, allowed: bool = True) -> Path:
    """A copy of a stored folder, with this machine's paths, and a rule's module as it is allowed
    today.
    """
    folder = home / name
    shutil.copytree(OLD / name, folder)
    for file in (*folder.rglob("*.toml"), *folder.rglob("*.json")):
        file.write_text(file.read_text().replace("/old/old_task.py", str(OLD / "old_task.py")))
    if allowed and name == "0.2.0/plugin":
        with (folder / "config.toml").open("a") as config:  # which ends with [run]
            config.write(ALLOW)
    return folder


def call(*words: object) -> Result:
    """What the command line does; it succeeds."""
    outcome = CliRunner().invoke(app, [str(word) for word in words])
    assert outcome.exit_code == 0, outcome.output
    return outcome


def refused(folder: Path, sentence: str, command: str) -> None:
    """A command ends with one sentence."""
    outcome = CliRunner().invoke(app, [command, str(folder)])
    assert outcome.exit_code == 2
    (line,) = (line for line in outcome.stderr.splitlines() if line)
    assert sentence in line


def rows(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_there_are_runs_of_every_kind() -> None:
    kinds = {"fedaware", "finished", "interrupted", "plugin", "sweep"}
    further = {"simulated", "stopped", "task", "tune"}
    assert {Path(name).name for name in ALL if name.startswith("0.2.0")} == kinds
    assert {Path(name).name for name in ALL if name.startswith("868bc1e")} == kinds | further


@pytest.mark.parametrize("name", ALL)
def test_a_report_is_written_and_watched(name: str, tmp_path: Path) -> None:
    folder = stored(name, tmp_path)
    call("report", folder, "--out", tmp_path / "report.html")
    page = LivePage(folder).newer("")
    assert page is not None
    assert "Waiting for the first round" not in page
    algorithm = "scaffold + fedcl + pa3fed" if name.endswith(("finished", "interrupted")) else "fed"
    assert algorithm in page
    assert algorithm in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("commit", COMMITS)
def test_runs_are_compared(commit: str, tmp_path: Path) -> None:
    folders = [
        stored(name, tmp_path)
        for name in ALL
        if name.startswith(commit) and not name.endswith("tune")
    ]
    table = call("compare", *folders).stdout
    for algorithm in ("scaffold + fedcl + pa3fed", "fedavgm + fedaware", "Cautious", "fedyogi"):
        assert algorithm in table


@pytest.mark.parametrize("name", BUILT)
def test_the_trained_model_is_loaded_and_exported(name: str, tmp_path: Path) -> None:
    folder = stored(name, tmp_path)
    model = kairosfl.load(folder)
    assert model(torch.eye(4)).std() > 0.05

    call("export", folder, "--out", tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    state = model.state_dict()
    assert tensors.keys() == state.keys()
    assert all(torch.equal(tensors[key], state[key]) for key in tensors)


@pytest.mark.parametrize("name", OF_SIMULATE)
def test_the_model_of_simulate_is_loaded_into_the_untrained_one(name: str, tmp_path: Path) -> None:
    import old_task

    folder = stored(name, tmp_path)
    assert kairosfl.load(folder, old_task.model())(torch.eye(4)).std() > 0.05
    refused(
        folder,
        "does not store the untrained model; in Python, give it: kairosfl.load(folder, model)",
        "export",
    )


def test_a_rule_that_text_may_not_import_is_allowed_as_the_sentence_says(tmp_path: Path) -> None:
    folder = stored("0.2.0/plugin", tmp_path, allowed=False)
    for command in ("resume", "export"):
        refused(folder, f"write {ALLOW.strip()} under [run], or import it first", command)
    with pytest.raises(UserError, match=r"under \[run\], or import it first"):
        kairosfl.load(folder)


@pytest.mark.parametrize(
    "name", [name for name in RUNS if name.endswith(("interrupted", "fedaware", "plugin", "task"))]
)
def test_an_interrupted_run_is_resumed(name: str, tmp_path: Path) -> None:
    folder = stored(name, tmp_path)
    before = rows(folder)[:4]
    call("resume", folder, "--quiet")
    after = rows(folder)
    assert [row["round"] for row in after] == list(range(1, ROUNDS + 1))
    assert after[:4] == before
    if name.endswith("interrupted"):  # as if it had not been interrupted, then
        straight = rows(OLD / name.replace("interrupted", "finished"))
        for column in ("accuracy", "loss", "train_loss", "cohort", "steps", "bytes_up"):
            ends = [row[column] for row in straight]
            assert [row[column] for row in after] == pytest.approx(ends, rel=1e-5), column


@pytest.mark.parametrize(
    "name", [name for name in RUNS if name.endswith(("finished", "simulated"))]
)
def test_a_finished_run_is_not_trained_again(name: str, tmp_path: Path) -> None:
    folder = stored(name, tmp_path)
    before = (folder / "metrics.jsonl").read_bytes()
    call("resume", folder, "--quiet")
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize("commit", COMMITS)
def test_a_sweep_is_continued(commit: str, tmp_path: Path) -> None:
    import make_old

    folder = stored(f"{commit}/sweep", tmp_path)
    ended = (folder / "fedavg-seed1" / "metrics.jsonl").read_bytes()
    (tmp_path / "sweep.toml").write_text(make_old.SETTING + make_old.SWEEP)
    call("sweep", tmp_path / "sweep.toml", "--out", folder, "--quiet")
    for name in ("fedavg-seed0", "fedavg-seed1", "fedyogi-seed0", "fedyogi-seed1"):
        assert len(rows(folder / name)) == ROUNDS
    assert (folder / "fedavg-seed1" / "metrics.jsonl").read_bytes() == ended


def test_a_search_is_continued(tmp_path: Path) -> None:
    import make_old

    pytest.importorskip("optuna")
    folder = stored("868bc1e/tune", tmp_path)
    before = (folder / "outcomes.jsonl").read_text()
    (tmp_path / "tune.toml").write_text(make_old.SETTING + make_old.TUNE)
    call("tune", tmp_path / "tune.toml", "--trials", "6", "--out", folder, "--quiet")
    assert (folder / "best.toml").exists()
    assert (folder / "outcomes.jsonl").read_text().startswith(before)


@pytest.mark.parametrize("name", ["simulated", "stopped"])
def test_simulate_continues_where_the_run_ended(name: str, tmp_path: Path) -> None:
    import make_old

    folder = stored(f"868bc1e/{name}", tmp_path)
    before = rows(folder)
    make_old.simulated(folder, None)
    after = rows(folder)
    assert len(after) == ROUNDS
    assert after[: len(before)] == before


def test_a_rule_of_a_user_keeps_the_contract_and_is_parsed_from_text() -> None:
    import cautious_rules

    kairosfl.check_rule(cautious_rules.Cautious())
    rules = kairosfl.parse(
        "cautious_rules.Cautious(share=0.25) + fedcl", allow=("cautious_rules",)
    ).rules
    assert rules[0] == cautious_rules.Cautious(share=0.25)
