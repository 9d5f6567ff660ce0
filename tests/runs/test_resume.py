"""Runs are functions of their configuration: twice the same bits, whatever was killed or in which
order it ran.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from kairosfl.core.layout import Entry, Layout
from kairosfl.detectors import FGN
from kairosfl.runs import engines, experiment
from kairosfl.runs.config import load, resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.interrupt import undisturbed
from kairosfl.runs.prepare import build_task, prepare

TABLES = {
    "algorithm": "scaffold + fedcl + pa3fed + fedavgm",
    "data": {"clients": 24, "alpha": 0.3},
    "model": {"hidden": [16]},
    "train": {"rounds": 12, "cohort": 4, "batch_size": 16, "momentum": 0.5},
    "run": {"checkpoint_every": 2, "engine": "loop"},
}


def final(folder):
    """Bytes of the last model, states and rows, and the metrics without the clock."""
    saved = load_file(max((folder / "checkpoint").glob("state-*.safetensors")))
    state = {
        name: value.numpy().tobytes()
        for name, value in saved.items()
        if not name.startswith("table.")
    }
    for i, table in enumerate(tables(folder)):
        state |= {f"{i}.{name}": value.numpy().tobytes() for name, value in table.items()}
    rows = [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in read_lines(folder / "metrics.jsonl")
    ]
    return state, rows


def tables(folder):
    config = resolve(TABLES)
    setup = experiment.Setup(
        config.algorithm, config.train, 24, Layout((Entry("w", (1210,), 0),)), detectors=(FGN(),)
    )
    run = experiment.Run.start(torch.zeros(1210), setup, seed=0)
    loaded = experiment.Checkpoints(folder / "checkpoint").load(run)[0]
    return [
        {key: table.rows(torch.arange(24))[key] for key in table.default} for table in loaded.tables
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "run"
    experiment.start(
        resolve(TABLES, ["train.rounds=1"]), folder.with_name("warm")
    )  # what is imported is not timed
    began = time.perf_counter()
    experiment.start(resolve(TABLES), folder)
    return folder, time.perf_counter() - began


def test_the_same_run_twice_gives_the_same_bits(whole, tmp_path):
    experiment.start(resolve(TABLES), tmp_path / "again")
    assert final(tmp_path / "again") == final(whole[0])


def test_the_written_configuration_repeats_the_run(whole, tmp_path):
    experiment.start(load(whole[0] / "config.toml"), tmp_path / "again")
    assert final(tmp_path / "again") == final(whole[0])


def test_the_order_in_which_a_cohort_trains_does_not_matter(whole, tmp_path, monkeypatch):
    class Backwards(engines.Loop):
        def train(self, briefs):
            turned = super().train(briefs.take(torch.arange(len(briefs) - 1, -1, -1)))
            assert turned.ids.tolist() == sorted(turned.ids.tolist(), reverse=True)
            return turned

    monkeypatch.setattr(engines, "Loop", Backwards)
    experiment.start(resolve(TABLES), tmp_path / "turned")
    assert final(tmp_path / "turned") == final(whole[0])


@pytest.mark.parametrize("times", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments_and_resumed(times, whole, tmp_path):
    reference, seconds = whole
    chance = random.Random(5)
    for attempt in range(times):
        folder = tmp_path / f"killed{attempt}"
        child = os.fork()
        if child == 0:
            try:
                experiment.start(resolve(TABLES), folder)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0.02, 1.1 * seconds))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        if not (folder / "config.toml").exists():
            experiment.start(resolve(TABLES), folder)
        else:
            experiment.resume(folder)
        assert final(folder) == final(reference), f"attempt {attempt}"


def test_an_interrupt_keeps_the_last_round_and_resumes(whole, tmp_path):
    class Interrupted(engines.Loop):
        def train(self, briefs):
            if briefs.newest == 7:
                raise KeyboardInterrupt
            return super().train(briefs)

    config = resolve(TABLES | {"run": {"checkpoint_every": 100, "engine": "loop"}})
    task = build_task(config)
    prepared = prepare(config, task, Interrupted(task))
    folder = Folder(tmp_path / "run")
    folder.create(prepared.about, task, "")
    with pytest.raises(KeyboardInterrupt):
        experiment.execute(experiment.record(prepared, folder), prepared.engine)
    assert folder.rounds_done() == 7
    experiment.resume(folder.path)
    assert final(folder.path) == final(whole[0])


def test_resuming_cuts_the_metrics_back(whole, tmp_path):
    folder = tmp_path / "run"
    experiment.start(resolve(TABLES, ["train.rounds=6"]), folder)
    (folder / "config.toml").write_text(
        (folder / "config.toml").read_text().replace("rounds = 6", "rounds = 12")
    )
    with (folder / "metrics.jsonl").open("a") as handle:
        handle.write(json.dumps({"round": 7, "accuracy": 1.0}) + '\n{"round": 8, "accu')
    experiment.resume(folder)
    assert final(folder) == final(whole[0])


def test_ten_rounds_without_a_good_report_stop_the_run(tmp_path):
    config = resolve(TABLES, ["train.lr=1e30", "algorithm=fedavg"])
    with pytest.raises(
        experiment.UserError, match=r"10 rounds in a row had no good report.*its loss is nan"
    ):
        experiment.start(config, tmp_path / "run")
    log = (tmp_path / "run" / "log.txt").read_text()
    assert "does not count: its loss is nan" in log
    assert "the model does not change" in log
    assert (
        Folder(tmp_path / "run").rounds_done() == 10 + int(log.split("round ")[1].split(":")[0]) - 1
    )


def test_a_run_without_a_good_report_does_not_come_to_its_end_by_resuming(tmp_path):
    config = resolve(TABLES, ["train.lr=1e30", "algorithm=fedavg", "train.rounds=12"])
    with pytest.raises(experiment.UserError, match="10 rounds in a row"):
        experiment.start(config, tmp_path / "run")
    for idle in (11, 12, 12):
        with pytest.raises(
            experiment.UserError, match=rf"{idle} rounds in a row .* as after round 0\."
        ):
            experiment.resume(tmp_path / "run")
    assert not (tmp_path / "run" / "summary.json").exists()


@pytest.fixture
def interrupting():
    """Both signals interrupt, also where whoever started the tests has them ignored."""
    before = {
        n: signal.signal(n, signal.default_int_handler) for n in (signal.SIGINT, signal.SIGTERM)
    }
    yield
    for number, handler in before.items():
        assert signal.signal(number, handler) is signal.default_int_handler


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.usefixtures("interrupting")
def test_a_signal_waits_until_the_round_is_written_down(whole, tmp_path, number):
    def listen(row):
        if row["round"] == 5:
            signal.raise_signal(number)

    config = resolve(TABLES | {"run": {"checkpoint_every": 100, "engine": "loop"}})
    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "run", notify=listen)
    assert Folder(tmp_path / "run").rounds_done() == 5
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 5
    experiment.resume(tmp_path / "run")
    assert final(tmp_path / "run") == final(whole[0])


@pytest.mark.parametrize("late", [False, True])
def test_an_interrupt_on_the_way_from_training_to_recording_or_back_keeps_the_last_round(
    whole, tmp_path, monkeypatch, late
):
    times = iter(range(1, 13))

    @contextmanager
    def disturbed():
        now = next(times)
        if now == 6 and not late:
            raise KeyboardInterrupt
        with undisturbed() as held:
            yield held
        if now == 5 and late:
            raise KeyboardInterrupt

    monkeypatch.setattr(experiment, "undisturbed", disturbed)
    config = resolve(TABLES | {"run": {"checkpoint_every": 100, "engine": "loop"}})
    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "run")
    assert Folder(tmp_path / "run").rounds_done() == 5
    monkeypatch.undo()
    experiment.resume(tmp_path / "run")
    assert final(tmp_path / "run") == final(whole[0])


@pytest.mark.usefixtures("interrupting")
def test_a_second_signal_does_not_wait(whole, tmp_path):
    def impatient(row):
        if row["round"] == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second signal was held back")

    config = resolve(TABLES | {"run": {"checkpoint_every": 100, "engine": "loop"}})
    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "run", notify=impatient)
    assert Folder(tmp_path / "run").rounds_done() == 0
    experiment.resume(tmp_path / "run")
    assert final(tmp_path / "run") == final(whole[0])


@pytest.mark.usefixtures("interrupting")
def test_at_a_terminal_the_first_signal_says_what_a_second_one_does(monkeypatch):
    there, here = os.pipe()
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(isatty=lambda: True, fileno=lambda: here))
    for number in (signal.SIGTERM, signal.SIGINT):
        with undisturbed() as held:
            signal.raise_signal(number)
        assert held == [number]
    os.close(here)
    with os.fdopen(there) as told:
        assert told.read().strip() == (
            "Stopping when this round is evaluated and recorded; "
            "press Ctrl-C again to stop now, without the rounds since the last checkpoint."
        )
