"""kairosfl tune: on validation samples alone, within its budget, the same again after an
interruption.
"""

from __future__ import annotations

import builtins
import json
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kairosfl import UserError
from kairosfl.cli import app, complete
from kairosfl.rules.fedavgm import FedAvgM
from kairosfl.runs.config import resolve
from kairosfl.runs.files import append_json, read_json, read_lines, write_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import updated
from kairosfl.tune.budget import Budget, stages
from kairosfl.tune.outcomes import Outcome, exploded, measure
from kairosfl.tune.page import page
from kairosfl.tune.result import result
from kairosfl.tune.search import Search, words
from kairosfl.tune.space import Choice, Range, defaults, overridden

optuna = pytest.importorskip("optuna")
TABLES = {
    "algorithm": "fedprox(mu=0.1)",
    "data": {"clients": 12},
    "model": {"hidden": [8]},
    "train": {"rounds": 30, "cohort": 3, "lr": 0.05},
    "run": {"engine": "batched", "device": "cpu"},
}
SHORT = TABLES | {"train": {"rounds": 6, "cohort": 3, "lr": 0.05}}


class Quiet:
    """Remembers what is said; `after` rounds it is interrupted."""

    def __init__(self, after=None):
        self.lines, self.after, self.rounds = [], after, 0

    def say(self, line):
        self.lines.append(line)

    def update(self, part, words):
        assert 0 <= part <= 1
        self.rounds += 1
        if self.rounds == self.after:
            raise KeyboardInterrupt


def search(out, budget, tables=TABLES, show=None, parallel=4):
    made = Search(tables, out, budget, show or Quiet(), parallel=parallel)
    made.run()
    return made


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    return search(tmp_path_factory.mktemp("tune") / "s", Budget("rounds", 240))


def test_the_test_set_is_never_used(done):
    folders = [path.parent for path in done.out.glob("*-rounds/*/config.toml")]
    assert len(folders) == len(done.ended)
    for folder in folders:
        assert tomllib.loads((folder / "config.toml").read_text())["data"]["validation"] == 0.1
    sizes = {len(task.dataset.test) for task in done.variants.tasks.values()}
    assert sizes == {round(0.1 * 1437)}  # of the 1,437 training digits


def test_the_file_plain_averaging_and_plain_averaging_with_the_best_recipe_are_among_the_trials(
    done,
):
    found = result(done)
    first, second = found.trials[:2]
    assert (first.settings, second.settings) == (
        {"algorithm": "fedprox(mu=0.1)"},
        {"algorithm": "fedavg"},
    )
    assert first.params["train.lr"] == 0.05
    best = done.ended.ranked(10)[0]
    assert any(
        trial.plain and trial.recipe == found.trials[best.trial].recipe for trial in found.trials
    )
    last = [number for number, rounds in done.ended if rounds == 30]
    assert any(found.trials[number].plain for number in last)


def test_a_budget_of_rounds_is_kept_and_nearly_used(done):
    used = sum(outcome.rounds for outcome in done.ended.values())
    assert used == sum(1 for path in done.out.rglob("metrics.jsonl") for _ in read_lines(path))
    assert 190 <= used <= 240
    assert {rounds for _, rounds in done.ended} == {10, 30}


def test_best_toml_is_the_best_trial_on_the_test_set(done, tmp_path, monkeypatch):
    found = result(done)
    found.write()
    trial, outcome = found.best
    assert outcome.round == 30
    assert outcome.score == max(
        each.score for (_, rounds), each in done.ended.items() if rounds == 30
    )
    tables = tomllib.loads((done.out / "best.toml").read_text())
    assert "validation" not in tables["data"]
    config = resolve(tables)
    assert (config.data.validation, config.train.rounds) == (0.0, 30)
    assert str(config.algorithm) == trial.settings["algorithm"]
    assert config == resolve(updated(TABLES, trial.settings))
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(
        app, ["run", str(done.out / "best.toml"), "--set", "train.rounds=2", "--quiet"]
    )
    assert said.exit_code == 0, said.output


def test_best_toml_has_no_validation_samples_where_the_file_has_nothing_else_under_data(done):
    found = replace(result(done), nested={"data": {"validation": 0.2}})
    assert found.best_tables()["data"] == {}


def test_the_page_and_the_tables(done):
    found = result(done)
    text = page(found)
    assert text.count("<circle") >= len(found.trials)
    assert "plain averaging, best recipe" in text or found.best[0].plain
    assert sum(found.importances.values()) == pytest.approx(1)
    assert "train.lr" in [row["parameter"] for row in found.mattered()]
    numbers = json.loads(json.dumps(found.numbers()))
    assert numbers["validation"] == found.best[1].score
    assert numbers["metric"] == "accuracy"


def test_an_interrupted_search_goes_on_to_the_same_trials_and_scores(done, tmp_path):
    for after in (25, 100):
        with pytest.raises(KeyboardInterrupt):
            search(tmp_path / "s", Budget("rounds", 240), show=Quiet(after))
    again = search(tmp_path / "s", Budget("rounds", 240))
    assert [trial.settings for trial in again.proposals.trials] == [
        t.settings for t in done.proposals.trials
    ]
    assert again.ended.keys() == done.ended.keys()
    for key, outcome in done.ended.items():
        assert replace(again.ended[key], seconds=0) == replace(outcome, seconds=0), key
    before = len(again.ended)
    assert len(search(tmp_path / "s", Budget("rounds", 240)).ended) == before
    assert len(search(tmp_path / "s", Budget("rounds", 330)).ended) > before


def test_proposals_do_not_depend_on_which_trial_ends_first(tmp_path):
    tables = TABLES | {"train": {"rounds": 2, "cohort": 3}, "tune": {"train": {"epochs": [1, 9]}}}
    found = []
    for slots in (1, 64):
        made = search(
            tmp_path / f"{slots}", Budget("trials", 8), updated(tables, {"run.slots": slots})
        )
        rows = [row["trial"] for row in read_lines(made.out / "outcomes.jsonl")]
        found.append(([trial.settings for trial in made.proposals.trials], rows))
    assert found[0][0] == found[1][0]
    assert found[0][1] != found[1][1]


def test_another_file_does_not_continue_the_search(tmp_path):
    search(
        tmp_path / "s",
        Budget("trials", 6),
        dict(TABLES, train={"rounds": 4, "cohort": 3, "lr": 0.05}),
    )
    with pytest.raises(
        UserError,
        match=r"was begun with config.train.lr = 0.05, and now it is 0.1; give another --out",
    ):
        search(
            tmp_path / "s",
            Budget("trials", 6),
            dict(TABLES, train={"rounds": 4, "cohort": 3, "lr": 0.1}),
        )


@pytest.mark.slow
def test_budgets_of_bytes_and_of_minutes(tmp_path):
    tables = dict(TABLES, run={"engine": "loop", "device": "cpu"})
    made = search(tmp_path / "bytes", Budget("bytes", 2.7e6), tables)
    assert 2e6 < sum(outcome.bytes for outcome in made.ended.values()) <= 2.7e6
    with pytest.raises(
        UserError,
        match=r"--bytes 0.1 is too small for trials of 30 rounds: give at least \d+, or lower",
    ):
        search(tmp_path / "none", Budget("bytes", 1e5), tables)
    with pytest.raises(
        UserError, match="--rounds 100 is too small for trials of 30 rounds: give at least 180"
    ):
        search(tmp_path / "none", Budget("rounds", 100), tables)
    show = Quiet()
    made = search(tmp_path / "minutes", Budget("minutes", 1.5), tables, show)
    assert made.clock() < 10
    more = search(tmp_path / "minutes", Budget("minutes", made.clock() + 3), tables)
    assert len(more.ended) > len(made.ended)


def test_a_trial_that_diverges_is_told_so_and_the_others_go_on(tmp_path):
    tables = SHORT | {"tune": {"train": {"lr": [0.05, 1e30]}, "algorithm": ["fedavgm"]}}
    made = search(tmp_path / "s", Budget("trials", 8), tables)
    lost = [outcome for outcome in made.ended.values() if outcome.state == "diverged"]
    assert lost
    assert all(outcome.score is None and outcome.reason for outcome in lost)
    states = {trial.number: trial.state.name for trial in made.proposals.study.get_trials()}
    assert {states[outcome.trial] for outcome in lost} == {"PRUNED"}
    assert result(made).best[1].score > 0.05
    assert result(made).best[0].settings.get("train.lr", 0.05) == 0.05


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_trials_that_are_refused_or_run_out_of_memory_have_failed_with_the_reason(
    tmp_path, engine, monkeypatch
):
    def short(*everything):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(FedAvgM, "step", short)
    table = {"algorithm": ["fedavgm", "fedyogi"], "add": ["", "fedadam"]}
    tables = SHORT | {"tune": table, "run": {"engine": engine, "device": "cpu"}}
    made = search(tmp_path / "s", Budget("trials", 12), tables)
    reasons = {outcome.reason[:40] for outcome in made.ended.values() if outcome.state == "failed"}
    assert reasons >= {
        "The GPU ran out of memory: stop other pr",
        "fedyogi and fedadam cannot be combined: ",
    }
    assert result(made).best[1].score is not None
    assert all(outcome.state != "diverged" for outcome in made.ended.values())


def test_an_engine_that_fails_takes_its_runs_with_it_and_not_the_search(tmp_path, monkeypatch):
    from kairosfl.engines.batched import Batched

    whole, seen = Batched.collect, []

    def short(self):
        seen.append(None)
        if len(seen) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(self)

    monkeypatch.setattr(Batched, "collect", short)
    made = search(tmp_path / "s", Budget("trials", 10))
    states = [outcome.state for outcome in made.ended.values()]
    assert states.count("failed") == 4
    assert states.count("complete") > 6


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        (3, r"tune = 3 must be a section: write \[tune\]"),
        (
            {"trian": {"lr": [1]}},
            "tune.trian.lr cannot be searched; use algorithm, add, data.augment",
        ),
        ({"train": {"rounds": [5]}}, "tune.train.rounds cannot be searched"),
        ({"seed": [1, 2]}, "tune.seed cannot be searched"),
        ({"data": {"validation": [0.1]}}, "tune.data.validation cannot be searched"),
        (
            {"train": {"lr": {"low": 0.1}}},
            r"tune.train.lr = \{'low': 0.1\} must be like \{low = 0.01",
        ),
        ({"train": {"lr": {"low": 0.1, "high": 0.01}}}, "needs low below high"),
        ({"train": {"lr": {"low": 0, "high": 1, "log": True}}}, "and both above 0 with log"),
        ({"train": {"lr": []}}, r"tune.train.lr = \[\] must be a list of values"),
        ({"train": {"lr": [0.1, -1.0]}}, "tune.train.lr: train.lr = -1.0 must be above 0"),
        (
            {"train": {"schedule": ["cosin"]}},
            "tune.train.schedule: train.schedule = 'cosin' must be one of",
        ),
        ({"train": {"lrr": [0.1]}}, "tune.train.lrr: Unknown key train.lrr; did you mean 'lr'"),
        ({"algorithm": ["fedavg", 3]}, r"tune.algorithm = \['fedavg', 3\] must be a list of texts"),
        ({"algorithm": ["fedavgg"]}, "There is no rule 'fedavgg'"),
        (
            {"fedavgm": {"bta": [0.5]}},
            "tune.fedavgm.bta: fedavgm has no option 'bta'; did you mean 'beta'",
        ),
        ({"fedavgm": {"beta": [0.5, 2.0]}}, "fedavgm: beta = 2.0 is not allowed"),
    ],
)
def test_wrong_ranges(table, sentence):
    config = resolve(TABLES)
    with pytest.raises(UserError, match=sentence):
        overridden(defaults(config, (1, 8, 8)), table, config)


def test_default_ranges_contain_the_file_and_tune_replaces_them():
    config = resolve(updated(TABLES, {"train.lr": 2.0, "train.clip": 1.0, "train.epochs": 3}))
    space = defaults(config, (3, 32, 32))
    assert space.keys["train.lr"] == Range(0.003, 2.0, log=True)
    assert space.keys["train.epochs"] == Range(1, 8, log=True, whole=True)
    assert space.keys["train.clip"] == Choice((0.0, 10.0, 1.0))
    assert "data.augment" in space.keys
    assert "data.augment" not in defaults(config, (1, 28, 28)).keys
    assert space.algorithm.values[0] == "fedavg"
    assert "fedprox(mu=0.1)" in space.algorithm.values
    table = {
        "train": {"clip": 5.0, "epochs": {"low": 2, "high": 4}},
        "algorithm": ["scaffold"],
        "add": "fedcl",
    }
    other = overridden(space, table, config)
    assert other.fixed == {"train.clip": 5.0}
    assert other.keys["train.epochs"] == Range(2, 4, whole=True)
    assert (other.algorithm, other.add) == (Choice(("fedavg", "scaffold")), Choice(("fedcl",)))


def test_an_option_that_is_written_out_is_not_searched():
    config = resolve(TABLES)
    space = overridden(defaults(config, ()), {"algorithm": ["fedavgm(beta=0.9)"]}, config)
    given = {"algorithm": "fedavgm(beta=0.9)", "add": ""}
    trial = optuna.create_study(
        sampler=optuna.samplers.PartialFixedSampler(given, optuna.samplers.RandomSampler(0))
    ).ask()
    assert space.suggest(trial)["algorithm"] == "fedavgm"  # whose default is 0.9
    assert "fedavgm.beta" not in trial.params


def test_stages_and_who_goes_on():
    assert stages(500) == (166, 500)
    assert stages(40) == (13, 40)
    assert stages(20) == (20,)

    def ended(trial, score):
        return Outcome(trial, 10, "complete", score, "", 10, 1000, 100, 1.0)

    ranked = [ended(trial, 1 - trial / 10) for trial in range(9)]
    more = {"stage": 1, "rounds": (10, 30), "clock": 10.0, "speed": 100.0}
    used = dict.fromkeys(range(9), 10.0)
    assert Budget("trials", 9).going_on(ranked, [7, 7], earlier=used, **more) == [0, 1, 2, 7]
    assert Budget("rounds", 180).going_on(ranked, [7, 7], earlier=used, **more) == [0, 1, 7]
    assert Budget("rounds", 150).going_on(ranked, [0], earlier=used, **more) == [0, 1]
    assert Budget("bytes", 9 * 1000 + 6000).going_on(
        ranked, [8], earlier=dict.fromkeys(range(9), 1000.0), **more
    ) == [
        0,
        8,
    ]
    assert Budget("minutes", 10 + 3 / 0.8 * 2.1).going_on(ranked, [1], earlier={}, **more) == [0, 1]


def test_a_short_run_goes_through_the_whole_schedule(tmp_path):
    for schedule in ("exponential", "steps", "cosine"):
        settings = {"train.schedule": schedule, "train.gamma": 0.9, "train.milestones": [15, 24]}
        made = Search(updated(TABLES, settings), tmp_path / "s", Budget("trials", 6), Quiet())
        whole, short = made.config.train, made.trial_config({}, 10).train
        assert [short.lr_at(t) for t in range(10)] == pytest.approx(
            [whole.lr_at(3 * t) for t in range(10)]
        )


def test_the_main_metric_is_that_of_the_run(tmp_path):
    write_json(
        tmp_path / "run.json", {"metrics": [{"name": "rmse", "better": "lower", "percent": False}]}
    )
    for number in range(1, 21):
        row = {
            "round": number,
            "rmse": 5.0 / number,
            "bytes_up": 1,
            "bytes_down": 2,
            "steps": 3,
            "seconds": 0.5,
            "reported": 1,
        }
        append_json(tmp_path / "metrics.jsonl", row)
    outcome = measure(0, 20, tmp_path)
    assert outcome.score == pytest.approx(-np.mean([5 / 19, 5 / 20]))
    assert (outcome.rounds, outcome.bytes, outcome.steps, outcome.seconds) == (20, 60, 60, 10.0)
    assert Folder(tmp_path).main().measured(0.25) == "0.25"
    assert Folder(tmp_path / "nothing").main().measured(0.25) == "25.00 %"


def test_averaged_models_are_scored_after_the_last_round(tmp_path):
    cost = {"bytes_up": 1, "bytes_down": 2, "steps": 3, "seconds": 0.5, "reported": 1}
    for number in range(1, 41):  # averaged since round 38, in the final tenth
        plain = {"plain_accuracy": 0.5} if number > 37 else {}
        append_json(
            tmp_path / "metrics.jsonl", {"round": number, "accuracy": number / 100} | plain | cost
        )
    assert measure(0, 40, tmp_path).score == pytest.approx(0.4)


def test_a_metric_that_was_not_finite_at_the_end_is_not_replaced_by_earlier_rounds(tmp_path):
    write_json(
        tmp_path / "run.json", {"metrics": [{"name": "rmse", "better": "lower", "percent": False}]}
    )
    cost = {"bytes_up": 1, "bytes_down": 2, "steps": 3, "seconds": 0.5, "reported": 2}
    for number in range(1, 11):  # evaluated in every second round, and not finite in the last one
        value = {2: 3.0, 4: 2.0, 6: 1.0, 8: 0.5}.get(number)
        append_json(
            tmp_path / "metrics.jsonl",
            {"round": number, "evaluated": number % 2 == 0, "rmse": value, "loss": 1.0} | cost,
        )
    outcome = measure(0, 10, tmp_path)
    assert (outcome.state, outcome.score, outcome.reason) == (
        "diverged",
        None,
        "rmse is not finite",
    )


def test_what_counts_as_diverged():
    assert exploded({"loss": float("nan")}, None)
    assert exploded({"loss": 3000.0}, 2.3)
    assert not exploded({"loss": 300.0}, 2.3)
    assert not exploded({"loss": None}, 2.3)
    assert not exploded({}, None)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--trials", "9", "--rounds", "9"], "Give one budget, not --trials and --rounds."),
        (["--trials", "2"], "--trials 2 is too few to search; give 6 or more."),
        (["--minutes", "0"], "--minutes 0.0 must be above 0 and finite."),
        (["--minutes", "nan"], "--minutes nan must be above 0 and finite."),
        (
            ["--rounds", "9"],
            "--rounds 9 is too small for trials of 30 rounds: give at least 180, or lower train.rounds.",
        ),
        (["--set", "tune.seed=[1]"], "tune.seed cannot be searched"),
        (["--set", "train.lr=-1"], "train.lr = -1.0 must be above 0"),
    ],
)
def test_wrong_options(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("[train]\nrounds = 30\n")
    said = CliRunner().invoke(app, ["tune", "a.toml", *words])
    assert said.exit_code == 2
    assert said.stderr.startswith(f"kairosfl: {sentence}")
    assert said.stderr.count("\n") == 1
    assert not Path("runs/a-tune/tune.json").exists()


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(
        "[data]\nclients = 8\n[model]\nhidden = [4]\n[train]\nrounds = 3\ncohort = 2\n"
    )
    said = CliRunner().invoke(app, ["tune", "a.toml", "--trials", "10"])
    assert said.exit_code == 0, said.output
    assert "run it: kairosfl run runs/a-tune/best.toml" in said.stdout
    assert "parameter" in said.stdout
    folder = Path("runs/a-tune")
    names = {path.name for path in folder.iterdir()}
    assert names >= {
        "best.toml",
        "report.html",
        "trials.json",
        "tune.json",
        "study.journal",
        "outcomes.jsonl",
    }
    assert len(json.loads((folder / "trials.json").read_text())) == len(
        list(folder.glob("3-rounds/*"))
    )
    assert read_json(folder / "tune.json")["stages"] == [3]
    again = CliRunner().invoke(app, ["tune", "a.toml", "--trials", "10", "--json"])
    assert json.loads(again.stdout)["trials"] == len(list(folder.glob("3-rounds/*")))
    words = ["sweep", str(folder / "best.toml"), "--seeds", "2", "--out", "best", "--quiet"]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert {path.parent.name for path in Path("best").glob("*/summary.json")} == {"seed0", "seed1"}
    assert CliRunner().invoke(app, ["run", "a.toml", "--out", "r", "--quiet"]).exit_code == 0
    said = CliRunner().invoke(app, ["tune", "a.toml", "-o", "r"])
    assert "contains a run or a sweep, and a search needs its own folder" in said.stderr
    Path("a.toml").write_text(Path("a.toml").read_text() + "[tune]\ntrain.lr = [0.1, 0.2]\n")
    said = CliRunner().invoke(app, ["run", "a.toml"])
    assert (
        "[tune] has ranges for a search: use `kairosfl tune`, or remove the section." in said.stderr
    )
    assert "a.toml" in complete.file("a")


def test_without_optuna_it_says_what_to_install(tmp_path, monkeypatch):
    whole = builtins.__import__

    def without(name, *more):
        if name == "optuna":
            raise ImportError("No module named 'optuna'", name="optuna")
        return whole(name, *more)

    monkeypatch.setattr(builtins, "__import__", without)
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("")
    said = CliRunner().invoke(app, ["tune", "a.toml"])
    assert (said.exit_code, said.stderr) == (
        2,
        'kairosfl: tuning needs optuna: pip install "kairosfl[tune]"\n',
    )


def test_settings_in_a_few_words(done):
    trial = replace(
        done.proposals.trials[0],
        settings={
            "train.lr": 0.123456,
            "data.augment": True,
            "algorithm": "fedadam(lr=0.0123456, tau=1.23456e-05)",
        },
    )
    assert words(trial) == "fedadam(lr=0.0123, tau=1.23e-05), lr 0.123, augment True"
