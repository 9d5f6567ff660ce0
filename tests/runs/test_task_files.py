"""Task files: one Python file that runs, sweeps, resumes, reports and deploys."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import kairosfl
from kairosfl.cli import app
from kairosfl.engines.batched import Batched
from kairosfl.errors import UserError
from kairosfl.runs.config import dump, load, read, resolve, tables
from kairosfl.runs.experiment import resume, start
from kairosfl.runs.folder import Folder
from kairosfl.runs.prepare import Shared, about_of, build_task
from kairosfl.runs.sweep import expand, sweep
from kairosfl.tasks.function import for_client

FILE = '''
"""A line through points, of four clients."""
from dataclasses import dataclass

import torch
from torch import nn

from kairosfl import DataSet, Population, Samples, Task


@dataclass
class Shape:
    width: "int"


def points(seed, n=12):
    draw = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 3, generator=draw)
    return x, x.sum(1)


def task(width: int = 4, noise: float = 0.0, client: int | None = None):
    """The task."""
    shape = Shape(width)
    model = nn.Sequential(nn.Linear(3, shape.width), nn.Tanh(), nn.Linear(shape.width, 1))
    x, y = points(0, 48)
    data = DataSet("line", Samples(x, y + noise), Samples(*points(1)))
    if client is not None:
        data = DataSet("line", Samples(x[client * 12:][:12], y[client * 12:][:12]), Samples(*points(1)))
        return Task(model, data, Population.from_lists([range(12)]))
    return Task(model, data, Population.from_lists([range(i * 12, i * 12 + 12) for i in range(4)]))


def dealt(clients, alpha=9.0, seed=-1):
    x, y = points(0, 48)
    assert alpha == 0.5 and seed == 3, (alpha, seed)
    return {"model": nn.Linear(3, 2), "train": (x, (y > 1.5).long()), "test": (x, (y > 1.5).long()), "name": "dealt"}


def listed():
    parts = [points(seed) for seed in range(3)]
    return nn.Linear(3, 1), parts, points(9)


def wrong():
    return {"model": nn.Linear(1, 1)}


def broken(width=3):
    return 1 / 0


def unfit():
    return nn.Linear(7, 1), points(0, 80), points(1)


def needy(path):
    return path


def indexed(alpha):
    x, y = points(0, 48)
    first = int(10 * alpha)
    return {"model": nn.Linear(3, 1), "train": (x, y), "test": (x, y), "clients": [range(first), range(first, 48)]}


def half():
    x, y = points(0, 4)
    return {"model": nn.Linear(3, 1), "train": (x, y), "test": (x, y), "clients": [[0.5, 1], [2, 3]]}


def no_model():
    return None, points(0), points(1)


def other_model():
    return {"model": "mlp", "train": points(0)}


def one():
    return (nn.Linear(3, 1),)


def misspelled():
    return {"model": nn.Linear(3, 1), "train": points(0, 80), "tset": points(1)}
'''


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "line.py").write_text(FILE)
    return tmp_path / "line.py"


def call(*arguments):
    return CliRunner().invoke(app, [*arguments])


def config(file, **more):
    given = {
        "task": {"file": str(file)},
        "train": {"rounds": 3, "cohort": 2},
        "run": {"engine": "loop", "threads": 1},
    }
    return resolve({**given, **more})


def test_a_file_runs_and_its_folder_resumes_and_loads(file, tmp_path, monkeypatch):
    said = call("run", "line.py", "--set", "task.options.width=8", "--set", "train.rounds=4", "--set", "train.cohort=2",
                "--set", "run.checkpoint_every=2", "--out", "out", "-q")  # fmt: skip
    assert said.exit_code == 0, said.output
    assert said.stdout.startswith("rmse 0.")
    about = json.loads(Path("out/run.json").read_text())
    assert (about["parameters"], about["clients"]) == (8 * 4 + 9, 4)
    assert set(about["data_hashes"]) == {"train", "test", "line.py"}
    again = load(Path("out/config.toml"))
    assert (again.task.file, again.task.function, dict(again.task.options)) == (
        str(file),
        "task",
        {"width": 8},
    )
    assert resolve(read(Path("out/config.toml"))) == again
    monkeypatch.chdir(tmp_path.parent)
    Path(tmp_path / "out/summary.json").unlink()
    for each in (tmp_path / "out/checkpoint").glob("*4*"):
        each.unlink()
    assert resume(tmp_path / "out")["rounds"] == 4
    assert kairosfl.load(tmp_path / "out")[0].out_features == 8


def test_a_changed_file_is_refused_like_changed_data(file, tmp_path):
    start(config(file), tmp_path / "out")
    text = (tmp_path / "out" / "config.toml").read_text()
    (tmp_path / "out" / "config.toml").write_text(text.replace("rounds = 3", "rounds = 5"))
    file.write_text(FILE.replace("nn.Tanh()", "nn.ReLU()"))
    with pytest.raises(
        UserError, match=r"cannot be resumed: line\.py changed since it began; restore the data"
    ):
        resume(tmp_path / "out")
    file.write_text(FILE)
    assert resume(tmp_path / "out")["rounds"] == 5


def test_weights_follow_the_seed_and_data_are_shared(file):
    shared = Shared()  # of one sweep
    one, same, other = (build_task(config(file, seed=seed), shared=shared) for seed in (0, 0, 1))
    assert torch.equal(one.start(), same.start())
    assert not torch.equal(one.start(), other.start())
    assert one.dataset.train is other.dataset.train
    assert one.model is not same.model
    changed = build_task(resolve(tables(config(file)), ["task.options.noise=0.5"]))
    assert changed.dataset.train is not one.dataset.train


def test_a_sweep_shares_engines_where_the_data_are_the_same(file, tmp_path, monkeypatch):
    made = []
    build = Batched.__init__
    monkeypatch.setattr(
        Batched, "__init__", lambda self, *args, **kw: (made.append(1), build(self, *args, **kw))[1]
    )
    given = tables(config(file, run={"engine": "batched", "device": "cpu"}))
    given["sweep"] = {"seed": [0, 1], "task": {"options": {"width": [4, 8]}}}
    given["data"].pop("clients")
    members = expand(given)
    assert [member.name for member in members] == [
        "seed0-width4",
        "seed0-width8",
        "seed1-width4",
        "seed1-width8",
    ]
    done = sweep(members, tmp_path / "sweep")
    assert len(made) == 2
    alone = start(members[2].config, tmp_path / "alone")
    assert done["seed1-width4"]["rmse"] == pytest.approx(alone["rmse"], rel=1e-5)
    assert sweep(expand(given), tmp_path / "sweep") == done  # nothing is left to do


def test_a_sweep_by_command(file):
    said = call("sweep", "line.py", "--set", "sweep.task.options.width=[2, 3]", "--set", "train.rounds=1", "--set",
                "train.cohort=2", "--out", "sweep", "-q", "--json")  # fmt: skip
    assert said.exit_code == 0, said.output
    assert list(json.loads(said.stdout)["runs"]) == ["width2", "width3"]


def test_settings_are_passed_by_name_and_clients_dealt(file):
    task = build_task(config(file, seed=3, task={"file": "line.py", "function": "dealt"},
                             data={"alpha": 0.5, "clients": 6, "partition": "iid"}))  # fmt: skip
    assert (len(task.clients), task.dataset.name, task.dataset.kind) == (
        6,
        "dealt",
        "classification",
    )
    own = build_task(config(file, task={"file": "line.py", "function": "listed"}))
    assert own.clients.sizes.tolist() == [12, 12, 12]
    assert own.dataset.kind == "regression"


@pytest.mark.parametrize(
    ("function", "dealt"),
    [("task", ""), ("listed", "natural"), ("dealt", "dirichlet"), ("regression", "iid")],
)
def test_the_folder_says_how_the_samples_came_to_the_clients(file, tmp_path, function, dealt):
    body = "x = points(0, 48)\n    return nn.Linear(3, 1), x, x"
    file.write_text(f"{file.read_text()}\n\ndef regression():\n    {body}\n")
    given = {"clients": 4, "alpha": 0.5} if function == "dealt" else {}
    made = build_task(
        config(file, task={"file": str(file), "function": function}, seed=3, data=given)
    )
    Folder(tmp_path / "run").describe(about_of(config(file), made), made, "")
    assert json.loads((tmp_path / "run" / "run.json").read_text())["partition"] == dealt


def test_modules_by_name(file):
    said = call(
        "run", "--task", "line:listed", "--set", "train.cohort=2", "--set", "train.rounds=1", "-q"
    )
    assert said.exit_code == 0, said.output
    assert Path("runs/line-listed").is_dir()
    said = call(
        "run",
        "line.py:listed",
        "--set",
        "train.cohort=2",
        "--set",
        "train.rounds=1",
        "--out",
        "b",
        "-q",
    )
    assert said.exit_code == 0, said.output


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"file": "nowhere.py"},
            "task.file = '{cwd}/nowhere.py' does not exist; give the path of a Python file, or a module's name.",
        ),
        (
            {"file": "no.where"},
            "task.file = 'no.where' cannot be imported; give a module's name or the path of a file.",
        ),
        ({"function": "tusk"}, "task.function = 'tusk' is not in {file}; did you mean 'task'?"),
        (
            {"options": {"widht": 3}},
            "task.options.widht is not an argument of task() in {file}; did you mean 'width'?",
        ),
        ({"function": "needy"}, "task.options.path is missing; needy() in {file} needs it."),
        (
            {"function": "broken"},
            "{file}, line 50: ZeroDivisionError: division by zero, while calling broken(); --verbose shows the "
            "traceback.",
        ),
        (
            {"function": "wrong"},
            "wrong() in {file} returned a dict without 'train'; return a Task, a tuple (model, train, test) or a dict "
            "of simulate's arguments.",
        ),
        (
            {"function": "points", "options": {"seed": 0}},
            "points() in {file} returned a tuple whose first item is a Tensor, not a torch.nn.Module; return a Task",
        ),
        (
            {"function": "no_model"},
            "no_model() in {file} returned a tuple whose first item is None, not a torch.nn",
        ),
        (
            {"function": "other_model"},
            "other_model() in {file} returned a dict whose 'model' is a str, not a torch.nn",
        ),
        ({"function": "one"}, "one() in {file} returned a tuple of 1; return a Task"),
        (
            {"function": "half"},
            "clients[0] has float64 values of shape [2]; give the indices of the client's samples, whole numbers of "
            "shape [n].",
        ),
        ({"function": "unfit"}, "The model Linear fails on training inputs of shape [4, 3]: "),
    ],
)
def test_mistakes_are_one_sentence(file, changes, sentence):
    with pytest.raises(UserError) as error:
        build_task(config(file, task={"file": str(file), **changes}))
    assert str(error.value).startswith(
        sentence.replace("{file}", str(file)).replace("{cwd}", str(Path.cwd()))
    )


def test_code_that_cannot_be_imported_is_named_with_its_line(file):
    file.write_text("import nonexistent_package\n")
    with pytest.raises(
        UserError,
        match=r"line\.py, line 1: No module named 'nonexistent_package', while importing it",
    ):
        build_task(config(file))
    file.write_text("x = 1\ndef task(:\n")
    with pytest.raises(UserError, match=r"line\.py, line 2: SyntaxError: "):
        build_task(config(file))


def test_code_that_ends_the_program_is_named_with_its_line(file):
    file.write_text("import sys\n\n\ndef task():\n    sys.exit('no data')\n")
    with pytest.raises(
        UserError, match=r"line\.py, line 5: SystemExit: no data, while calling task\(\)"
    ):
        build_task(config(file))


def test_what_cannot_be_combined_is_refused(file):
    with pytest.raises(
        UserError,
        match=r"data\.name = 'digits' cannot be combined with task\.file = 'line\.py', which",
    ):
        resolve({"task": {"file": "line.py"}, "data": {"name": "digits"}})
    with pytest.raises(UserError, match=r"model\.name = 'cnn' cannot be combined with task\.file"):
        resolve({"task": {"file": "line.py"}, "model": {"name": "cnn"}})
    with pytest.raises(
        UserError,
        match=r"data\.alpha = 0\.7 has no effect: task\(\) in .* give it an argument 'alpha'",
    ):
        build_task(config(file, data={"alpha": 0.7}))
    for function, key, value in (
        ("listed", "partition", "iid"),
        ("listed", "minimum", 3),
        ("listed", "noise", 0.1),
        ("dealt", "noise", 0.1),
        ("indexed", "balance", True),
        ("indexed", "validation", 0.5),
        ("indexed", "clients", 7),
    ):
        data = {key: value} | ({"clients": 4, "alpha": 0.5} if function == "dealt" else {})
        named = resolve(
            {
                "task": {"file": str(file), "function": function},
                "data": data,
                "train": {"cohort": 2},
                "seed": 3,
            }
        )
        with pytest.raises(
            UserError,
            match=rf"data\.{key} = {value!r} has no effect: {function}\(\) in .* returns data",
        ):
            build_task(named)
    natural = resolve(
        {"task": {"file": str(file), "function": "listed"}, "data": {"partition": "natural"}}
    )
    assert build_task(natural).clients.sizes.tolist() == [12, 12, 12]
    asked = resolve({"task": {"file": str(file), "function": "indexed"}, "data": {"alpha": 0.7}})
    assert build_task(asked).clients.sizes.tolist() == [7, 41]
    with pytest.raises(
        UserError, match=r"returned a dict with the key 'tset'; did you mean 'test'\?"
    ):
        build_task(resolve({"task": {"file": str(file), "function": "misspelled"}}))
    with pytest.raises(UserError, match=r"task\.file is missing"):
        resolve({"task": {"options": {"width": 3}}})
    with pytest.raises(UserError, match=r"task\.options = 3 must be a section"):
        resolve({"task": {"file": "line.py", "options": 3}})
    assert "task" not in tables(resolve({}))
    assert "[task.options]\nwidth = 3" in dump(
        tables(resolve({"task": {"file": "line.py", "options": {"width": 3}}}))
    )


def test_verbose_shows_the_traceback(file):
    said = call("run", "line.py:broken", "--verbose")
    assert said.exit_code == 2
    assert "return 1 / 0" in said.stderr
    assert "Traceback" not in call("run", "line.py:broken").stderr
    assert not Path("runs").exists()


def test_what_a_file_defines_is_sent_by_value(file):
    cloudpickle = pytest.importorskip("ray.cloudpickle")
    made = build_task(config(file))
    code = f"import pickle; print(len(pickle.loads({cloudpickle.dumps(made)!r}).clients))"
    done = subprocess.run([sys.executable, "-c", code], cwd="/", capture_output=True, text=True)
    assert done.stdout.strip() == "4", done.stderr


def test_a_device_gets_its_client(file):
    whole, own = build_task(config(file)), build_task(config(file), 2)
    assert (len(whole.clients), len(own.clients)) == (4, 1)
    assert torch.equal(own.dataset.train.inputs, whole.dataset.train.inputs[24:36])
    assert for_client(lambda client: whole)(1) is whole
    assert for_client(lambda _: whole)(1) is whole
    assert for_client(lambda: whole)(1) is whole
    with pytest.raises(UserError, match="returned a tuple; a deployment needs a Task"):
        for_client(lambda: (1, 2))(None)


def test_the_file_of_a_new_deployment_runs_as_it_is(tmp_path, monkeypatch):
    deploy = pytest.importorskip("flwr") and pytest.importorskip("kairosfl.deploy")
    monkeypatch.chdir(tmp_path)
    deploy.new(tmp_path / "hospital")
    said = call(
        "run",
        "hospital/app/federation/task.py",
        "--set",
        "train.cohort=4",
        "--set",
        "train.rounds=2",
        "-q",
    )
    assert said.exit_code == 0, said.output
