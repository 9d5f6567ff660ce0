"""The command as a stranger uses it: wrong input is one sentence and exit code 2."""

from __future__ import annotations

import errno
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.cli.demo import clear
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.runs.experiment import reopen
from kairosfl.runs.folder import Folder
from kairosfl.runs.lock import lock
from kairosfl.runs.prepare import build_task, prepare

SMALL = [
    "--set",
    "data.clients=10",
    "--set",
    "train.cohort=3",
    "--set",
    "train.rounds=2",
    "--quiet",
]


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def refused(result, *parts):
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in lines[0], lines[0]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("data.nmae=3", ["data.nmae", "'name'"]),
        ("trian.lr=0.1", ["trian", "'train'"]),
        ("train.learning_rate=0.1", ["train.learning_rate"]),
        ("train.lr=fast", ["train.lr", "'fast'", "number"]),
        ("train.lr=0", ["train.lr", "above 0"]),
        ("train.rounds=2.5", ["train.rounds", "2.5", "whole number"]),
        ("train.rounds=0", ["train.rounds", "1 or more"]),
        ("train.cohort=41", ["train.cohort = 41", "the 40 clients available"]),
        ("train.schedule=linear", ["train.schedule", "cosine"]),
        ("train.momentum=1", ["train.momentum", "below 1"]),
        ("data.alpha=-1", ["data.alpha", "-1"]),
        ("data.clients=100000", ["data.clients", "100000"]),
        ("data.name=digit", ["data.name", "'digits'"]),
        ("data.partition=dirichelt", ["data.partition", "'dirichlet'"]),
        ("data.partition=natural", ["natural", "digits"]),
        ("model.name=mpl", ["model.name", "'mlp'"]),
        ("algorithm=fedvag", ["rule 'fedvag'", "'fedavg'"]),
        ("model.hiden=[3]", ["model.hiden", "'hidden'"]),
        ("model.hidden=[true]", ["model.hidden"]),
        ("algorithm=fedporx", ["fedporx", "'fedprox'"]),
        ("algorithm=fedprox(nu=1)", ["nu", "'mu'"]),
        ("algorithm=fedprox(mu=-1)", ["mu", "-1"]),
        ("algorithm=fedprox(mu='a')", ["mu", "number"]),
        ("algorithm=fedprox+", ["cannot be read"]),
        ("algorithm=fedavg+", ["cannot be read"]),
        ("algorithm=fedprox+fedprox", ["twice"]),
        ("algorithm=fedcl.relased()", ["relased", "'released'"]),
        ("algorithm=no.such.Rule()", ["no.such.Rule", "text does not import unless it is allowed"]),
        ("algorithm=3", ["algorithm = 3"]),
        ("run.detector=fng", ["fng", "'fgn'"]),
        ("run.engine=lop", ["run.engine", "'loop'"]),
        ("run.device=tpu", ["run.device", "'tpu'"]),
        ("run.eval_every=0", ["run.eval_every", "1 or more"]),
        ("seed=-1", ["seed", "-1"]),
        ("seed=true", ["seed", "whole number"]),
        ("lr", ["section.key=value"]),
        ("lr=3", ["did you mean train.lr?"]),
        ("train.lr=inf", ["train.lr = inf", "finite"]),
        ("train.lr=1e300", ["train.lr = 1e+300", "at most 3.4e+38"]),
        ("train.lr=nan", ["train.lr = nan", "above 0"]),
        ("train.lr_min=nan", ["train.lr_min = nan", "0 or more"]),
        ("train.weight_decay=nan", ["train.weight_decay = nan", "0 or more"]),
        ("train.weight_decay=inf", ["train.weight_decay = inf", "finite"]),
        ("train.clip=nan", ["train.clip = nan", "0 or more"]),
        ("train.gamma=nan", ["train.gamma = nan", "above 0"]),
        ("train.momentum=nan", ["train.momentum = nan", "below 1"]),
        ("train.milestones=[10, -3]", ["train.milestones = (10, -3)", "0 or more"]),
        (f"train.epochs={2**70}", ["train.epochs", "too large"]),
        (f"train.epochs={2**31}", ["train.epochs", "at most 2147483647"]),
        (f"train.batch_size={2**70}", ["train.batch_size", "too large"]),
        (f"train.batch_size={2**62}", ["train.batch_size", "at most 2147483647"]),
        (f"run.cosines=[{2**70}]", ["run.cosines", "too large"]),
        ("run.threads=100000", ["run.threads = 100000", "1 to 1024"]),
        ("run.device=meta", ["run.device = 'meta'", "'cpu' or 'auto'"]),
        ("run.device=hpu", ["run.device = 'hpu'", "'cpu' or 'auto'"]),
        ('data.path="a\\u0000b"', ["data.path", "NUL"]),
        ('model.start="a\\u0000b"', ["model.start", "NUL"]),
        (f"model.start={'a' * 300}", ["File name too long"]),
        (f"data.name={'a' * 300}", ["data.name"]),
        (f"algorithm={'a' * 300}", ["There is no rule"]),
        (f"seed={'[' * 5000}{']' * 5000}", ["seed"]),
        (f"seed={'[' * 50}{']' * 50}", ["seed nests tables or lists too deep"]),
        ("data.clients=-3", ["data.clients = -3", "1 or more"]),
        ("data=3", ["data"]),
    ],
)
def test_a_wrong_key_or_value(change, parts, tmp_path):
    refused(call("run", "--set", change, "--out", tmp_path / "run"), *parts)


def test_a_rule_that_needs_mean_gradients_refuses_adamw_before_anything_is_written(tmp_path):
    words = [
        "--set",
        "algorithm=scaffold",
        "--set",
        "train.optimizer=adamw",
        "--out",
        tmp_path / "run",
    ]
    refused(call("run", *words), "scaffold", "train.optimizer = 'adamw'", "use 'sgd'")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("words", "nearest"), [(["rnu"], "run"), (["data", "shwo"], "show")])
def test_a_misspelt_command_is_corrected_once(words, nearest):
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert result.output.count(f"Did you mean '{nearest}'?") == 1


def test_wrong_files(tmp_path):
    refused(
        call("run", tmp_path / "none.toml", "--out", tmp_path / "run"),
        "none.toml does not exist",
        "TOML",
    )
    refused(call("run", tmp_path, "--out", tmp_path / "run"), "folder")
    (tmp_path / "bad.toml").write_text("algorithm = ")
    refused(call("run", tmp_path / "bad.toml", "--out", tmp_path / "run"), "not valid TOML")
    (tmp_path / "latin.toml").write_bytes(b'algorithm = "\xe9"')
    refused(call("run", tmp_path / "latin.toml", "--out", tmp_path / "run"), "not valid TOML")
    (tmp_path / "deep.toml").write_text(f"seed = {'[' * 5000}{']' * 5000}")
    refused(call("run", tmp_path / "deep.toml", "--out", tmp_path / "run"), "deep.toml", "too deep")
    (tmp_path / "dotted.toml").write_text("data" + ".a" * 5000 + " = 1")
    refused(
        call("run", tmp_path / "dotted.toml", "--out", tmp_path / "run"), "data nests", "too deep"
    )
    for words in (("run", "a" * 300), ("run", *SMALL, "--out", "a" * 300), ("resume", "a" * 300)):
        refused(call(*words), "File name too long")
    refused(call("resume", tmp_path), "not a run folder")
    refused(call("resume", tmp_path / "nowhere"), "does not exist; give a run folder")
    refused(call("run", *SMALL, "--out", tmp_path), "not empty")
    (tmp_path / "file").write_text("")
    refused(call("run", *SMALL, "--out", tmp_path / "file"), "not a directory")
    (tmp_path / "sweep.toml").write_bytes(
        b"\xef\xbb\xbf[sweep]\nseed = [0]\n"
    )  # as some editors write it
    refused(call("run", tmp_path / "sweep.toml", "--out", tmp_path / "run"), "kairosfl sweep")
    (tmp_path / "run.toml").write_text("seed = 1\n")
    refused(
        call("sweep", tmp_path / "run.toml", "--out", tmp_path / "run"),
        "no [sweep] section",
        "kairosfl run",
    )
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "sweep.json").write_text("{}")
    refused(call("resume", tmp_path / "many"), "is a sweep")
    refused(call("run", *SMALL, "--out", tmp_path / "file" / "run"), "Cannot write")


def test_a_sweep_after_a_run_of_the_same_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(
        "[data]\nclients = 10\n[train]\ncohort = 3\nrounds = 2\n[run]\nengine = 'loop'\n"
    )
    assert call("run", "study.toml", "--quiet").exit_code == 0
    with Path("study.toml").open("a") as file:
        file.write("[sweep]\nseed = [0, 1]\n")
    assert call("sweep", "study.toml", "--quiet").exit_code == 0
    rows = json.loads(call("compare", "runs/study-sweep", "--json").stdout)
    assert [row["seeds"] for row in rows] == [[0, 1]]
    assert rows[0]["final"].keys() == {"mean", "deviation", "count", "asked"}
    assert rows[0]["final"]["count"] == 2
    rows = json.loads(call("compare", "runs/study", "runs/study-sweep", "--json").stdout)
    assert [row["seeds"] for row in rows] == [[0, 1]]  # one of them twice
    assert rows[0]["final"]["count"] == 2
    Path("runs/empty").mkdir()
    Path("runs/file").write_text("")
    assert call("compare", *Path("runs").iterdir(), "--json").exit_code == 0


def test_a_picture_needs_a_name_that_says_its_kind(tmp_path):
    call("run", *SMALL, "--out", tmp_path / "run")
    refused(
        call("compare", tmp_path / "run", "--json", "--picture", tmp_path / "a.xyz"),
        "a.xyz does not end in .pdf, .svg or .png",
    )
    refused(call("data", "show", "digits", "--picture", tmp_path / "a.xyz"), "a.xyz is not a .png")


def test_what_was_turned_away_is_said(tmp_path):
    falling = ["train.lr=1e38", "train.schedule=steps", "train.gamma=1e-39", "train.milestones=[1]"]
    changes = [word for change in falling for word in ("--set", change)]
    result = call("run", *SMALL[:-1], *changes, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    assert (
        f"3 reports do not count; see {tmp_path / 'run' / 'log.txt'} for the reasons."
        in result.stderr
    )


def test_a_run_without_a_single_good_report_has_failed(tmp_path):
    result = call("run", *SMALL, "--set", "train.lr=1e38", "--out", tmp_path / "run")
    refused(
        result,
        "2 rounds in a row had no good report (last reason: its loss is nan)",
        "Lower train.lr",
        "loss is finite",
    )


def test_a_demonstration_deletes_its_own_runs_only(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": [{"name": "mine", "path": "mine"}]}))
    refused(call("demo", "--out", tmp_path, "--quiet"), "contains another sweep", "--out")
    for name in ("demo-0", "notes"):
        (tmp_path / name).mkdir()
    clear(tmp_path, {"mine"})
    assert (tmp_path / "notes").is_dir()


def test_a_full_disk(tmp_path, monkeypatch):
    from kairosfl.runs import files

    whole = Path.replace

    def full(self, target):
        if "state-000002" in str(target):
            raise OSError(errno.ENOSPC, "No space left on device")
        return whole(self, target)

    monkeypatch.setattr(files.Path, "replace", full)
    refused(
        call("run", *SMALL, "--out", tmp_path / "run"), "state-000002", "No space left on device"
    )
    monkeypatch.undo()
    assert not list((tmp_path / "run").rglob("*.part"))
    assert call("resume", tmp_path / "run", "--quiet").exit_code == 0


def test_a_finished_run_is_left_as_it_is(tmp_path):
    ended = call("run", *SMALL, "--out", tmp_path / "run").stdout
    assert re.fullmatch(
        r"accuracy 0\.\d{4} after 2 rounds, in .*run\n[\d,]+ images a second\n", ended
    )  # quiet is about progress
    before = {
        path: (path.stat().st_mtime_ns, path.read_bytes())
        for path in (tmp_path / "run").rglob("*.*")
    }
    assert call("resume", tmp_path / "run", "--quiet").stdout == ended
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in before} == before
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    folder = Folder(tmp_path / "run")
    assert not folder.finished()
    task = build_task(folder.config())
    course = reopen(prepare(folder.config(), task, Loop(task)), folder)
    next(course)
    course.close()
    assert not (
        tmp_path / "run" / "summary.json"
    ).exists()  # or two rounds would pass for the result of three
    assert "after 3 rounds" in call("resume", tmp_path / "run", "--quiet").stdout


def test_a_run_and_its_json(tmp_path):
    result = call(
        "run", *SMALL, "--set", "algorithm=fedavgm(beta=0.7)", "--json", "--out", tmp_path / "run"
    )
    assert result.exit_code == 0
    summary = json.loads(result.stdout)
    assert summary["rounds"] == 2
    assert 0 <= summary["accuracy"] <= 1
    rows = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    named = "round accuracy loss cohort reported rejected critical fgn elud epochs steps bytes_down bytes_up seconds"
    assert set(named.split()) <= rows[0].keys()
    about = json.loads((tmp_path / "run" / "run.json").read_text())
    assert about["seed"] == 0
    assert about["algorithm"] == "fedavgm(beta=0.7)"
    assert about["rules"] == ["FedAvgM(beta=0.7, lr=1.0, nesterov=False)"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_run_that_is_stopped_keeps_its_last_round(tmp_path, number, code):
    words = [
        "run",
        "--set",
        "train.rounds=100000",
        "--set",
        "run.checkpoint_every=100000",
        "--engine",
        "loop",
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "kairosfl", *words, "--out", str(tmp_path / "run")],
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # whoever started the tests may ignore it
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while run.poll() is None and not (
        metrics.exists() and len(metrics.read_text().splitlines()) >= 3
    ):
        time.sleep(0.05)
    run.send_signal(number)
    assert run.wait(30) == code
    done = len(metrics.read_text().splitlines())
    said = f"Stopped. {done} rounds are saved. Resume with: kairosfl resume {tmp_path / 'run'}\n"
    assert run.stderr.read().endswith(said)
    assert any((tmp_path / "run" / "checkpoint").glob(f"checkpoint-*{done}.json"))


def test_a_run_says_how_it_is_run(tmp_path):
    result = call("run", *SMALL[:-1], "--engine", "batched", "--out", tmp_path / "run")
    assert "engine batched on cpu, float32: stacked layer by layer\n" in result.stderr
    assert (
        json.loads((tmp_path / "run" / "run.json").read_text())["why"] == "stacked layer by layer"
    )


def test_per_client_accuracy_on_request(tmp_path):
    call("run", *SMALL, "--set", "run.client_accuracy=true", "--out", tmp_path / "run")
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 <= row["client_accuracy_worst"] <= row["client_accuracy_mean"] <= 1
    line = json.loads((tmp_path / "run" / "clients.jsonl").read_text().splitlines()[-1])
    assert len(line["accuracy_quantiles"]) == 21
    assert line["accuracy_quantiles"] == sorted(line["accuracy_quantiles"])


def test_cosines_between_updates_on_request(tmp_path):
    call("run", *SMALL, "--set", "run.cosines=[2]", "--out", tmp_path / "run")
    first, second = map(
        json.loads, (tmp_path / "run" / "clients.jsonl").read_text().splitlines()[:2]
    )
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[1])
    cosines, many = np.array(second["cosines"]), len(second["ids"])
    assert "cosines" not in first
    assert cosines.shape == (many, many)
    np.testing.assert_array_equal(cosines, cosines.T)
    np.testing.assert_allclose(np.diag(cosines), 1, atol=1e-4)
    assert (cosines.sum() - many) / (many * (many - 1)) == pytest.approx(row["coherence"], abs=1e-4)


@pytest.mark.parametrize("what", ["rules", "data", "models", "partitions", "detectors"])
def test_lists(what):
    plain, structured = call("list", what), call("list", what, "--json")
    assert plain.exit_code == structured.exit_code == 0
    assert all(name in plain.stdout for name in json.loads(structured.stdout))


def test_help_imports_no_torch_and_a_wrong_option_is_exit_2():
    code = "import sys; from kairosfl.cli import app\n"
    code += "app(['--help'], standalone_mode=False)\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "resume" in done.stdout
    assert call("run", "--nonsense").exit_code == 2
    assert "kairosfl 0." in call("--version").stdout


def test_the_engine_flower_is_a_rehearsal(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        "kairosfl.cli.deploy.rehearse", lambda file, **options: asked.update(options, file=file)
    )
    assert "--engine flower needs a TOML file" in call("run", "--engine", "flower").output
    assert asked == {}
    assert (
        call(
            "run", "a.toml", "--engine", "flower", "--set", "seed=3", "--out", tmp_path, "-q"
        ).exit_code
        == 0
    )
    assert asked == {
        "file": Path("a.toml"),
        "changes": ["seed=3"],
        "out": tmp_path,
        "quiet": True,
        "as_json": False,
    }


def test_a_ray_address_means_the_engine_ray(monkeypatch):
    asked = []

    def start(config, *rest, **options):
        asked.append((config.run.engine, config.run.ray_address))
        raise UserError("enough")

    monkeypatch.setattr("kairosfl.runs.experiment.start", start)
    call("run", "--ray-address", "auto")
    call("run")
    assert asked == [("ray", "auto"), ("auto", "")]


def test_two_processes_do_not_write_into_one_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(
        "[train]\nrounds = 2\ncohort = 3\n[data]\nclients = 10\n[sweep]\nseed = [0]\n"
    )
    with lock(tmp_path / "runs" / "study"):
        refused(
            call("sweep", "study.toml"), "Another process is using runs/study; wait for it, stop it"
        )
    assert call("sweep", "study.toml", "-q").exit_code == 0
    assert call("run", *SMALL, "--out", "run").exit_code == 0
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    with lock(tmp_path / "run"):
        refused(call("resume", "run"), "Another process is using run;")
    assert "after 3 rounds" in call("resume", "run", "-q").stdout


def test_compare_says_where_its_target_comes_from(tmp_path):
    for algorithm in ("fedavg", "fedprox"):
        assert (
            call(
                "run", *SMALL, "--set", f"algorithm={algorithm}", "--out", tmp_path / algorithm
            ).exit_code
            == 0
        )
    words = (
        "Target: what fedavg, the baseline, reaches in the final 10 % of its rounds, rounded; "
        "--target sets another."
    )
    assert words in call("compare", tmp_path / "fedavg", tmp_path / "fedprox").stdout
    assert (
        "Target"
        not in call("compare", tmp_path / "fedavg", tmp_path / "fedprox", "--target", "0.5").stdout
    )
    assert "Target" not in call("compare", tmp_path / "fedavg").stdout
