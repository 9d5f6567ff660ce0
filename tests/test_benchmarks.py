"""The scripts in benchmarks/ work."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import golden
import pytest

from kairosfl.detectors import DETECTORS
from kairosfl.rules import RULES


@pytest.mark.parametrize("engine", golden.ENGINES)
def test_the_golden_numbers_cover_every_rule_and_detector(engine: str) -> None:
    cases = [case for case in golden.cases() if case.engine == engine]
    algorithms = {case.algorithm.split("(")[0] for case in cases}
    settings = {case.setting.split("(")[0] for case in cases}
    assert not RULES.keys() - algorithms
    assert not DETECTORS.keys() - settings


def golden_numbers(*arguments: str) -> int:
    """The exit status of the script for one of its runs."""
    sys.argv = ["golden.py", "--only", "fedprox(mu=1.0)", *arguments]
    try:
        golden.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was printed since the last call."""
    monkeypatch.setattr(sys, "argv", sys.argv)
    return lambda: capsys.readouterr().out


def test_golden_numbers_are_the_same_twice(tmp_path: Path, said: Callable[[], str]) -> None:
    stored = str(tmp_path / "golden.json")
    assert golden_numbers("--write", stored) == 0
    assert golden_numbers("--against", stored) == 0
    assert "1 the same to the bit, 0 differ as expected, 0 differ\n" in said()


def test_golden_numbers_say_what_differs_and_whether_it_was_expected(
    tmp_path: Path, said: Callable[[], str]
) -> None:
    stored = tmp_path / "golden.json"
    golden_numbers("--write", str(stored))
    text = stored.read_text()
    assert text.count('"x": "') == 1
    stored.write_text(text.replace('"x": "', '"x": "another'))

    assert golden_numbers("--against", str(stored)) == 1
    assert "DIFFERS: fedprox(mu=1.0) | loop | plain: x by 0e+00 of its length\n" in said()
    assert (
        golden_numbers("--against", str(stored), "--changed", "fedavg", "@conv", "fedprox@conv")
        == 1
    )
    said()
    for named in ("fedprox", "fedprox@plain", "@plain"):
        assert golden_numbers("--against", str(stored), "--changed", named) == 0
        assert "expected: fedprox(mu=1.0) | loop | plain" in said()


ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "benchmarks"
OUT = "OUT"  # stands for an empty folder
# How each script is tried within seconds on a CPU, and what it then prints.
SMALL: dict[str, tuple[str, str]] = {
    "speed/adapters": ("--small --device cpu --models 336M", "336M"),
    "speed/adapting": (
        "--model lenet --samples 10 --epochs 1 --batch 10 --repeats 1",
        "ALT's second pass",
    ),
    "speed/against_pfl": (
        "--device cpu --synthetic --who kairos --rounds 2 --every 1 --clients 12 --cohort 2",
        "ms a round, 2 rounds",
    ),
    "speed/anymodel": ("--small --device cpu", "images"),
    "studies/attacks": ("--rounds 3 --rules fedavg median --shares 0.3 --data iid", "median"),
    "speed/aware": (
        "--clients 20 --parameters 2000 --reports 3 --rounds 1 --threads 1",
        "duality gap",
    ),
    "studies/aware_solver": ("--seeds 1 --rounds 4 --variants exact FedAvgM", "exact"),
    "speed/client_accuracy": ("--rounds 2 --repeats 1", "loop, 2 rounds"),
    "speed/growth": (
        f"--millions 0.1 --limit 0.01 --repeats 1 --out {OUT}/growth.png",
        "| 0.1 M | batched |",
    ),
    "speed/clock": ("--small", "1 of 1000"),
    "speed/growth_rates": (f"--small --device cpu --limit 0.01 --out {OUT}/rates.png", "clients"),
    "studies/lies": ("--out benchmarks/studies/lies.json --only-print", "template"),
    "speed/loop": ("--repeats 1 --clients 1000", "1,000 clients against"),
    "studies/moment": (
        f"--tiny --seeds 1 --minutes 0.1 --out {OUT}/moment --budgets 0.4",
        ", 40 % ",
    ),
    "studies/pairs": ("--only fedavg fedavgm --rounds 10 --cohort 3", "fedavgm"),
    "speed/scale": ("--clients 100 --cohort 20", "checkpoint with all rows"),
    "speed/small_rounds": ("--rounds 3", "ms a round"),
    "studies/together": ("--data digits --model mlp --rounds 2 --device cpu", "largest difference"),
}
# Scripts of which only `--help` is tried, and why.
NOT_RUN = {
    "studies/averaging": "its 100 rounds are part of what it says; its numbers are stored",
    "speed/engines": "needs CIFAR-10",
    "speed/flower_memory": "starts a federation of processes",
    "speed/flower_overhead": "starts a federation of processes",
    "studies/precision": "compares the precisions of a GPU",
    "speed/ray_overhead": "starts a Ray cluster",
    "peers/run": "installs other frameworks",
    "studies/moment_tables": "replaces the tables of a page",
}
# Scripts that are not called alone, or only with a program that may not be installed: that they
# compile.
COMPILED = {
    "gallery",
    "golden",
    "setting",
    *(f"peers/{name}" for name in ("by_hand", "common", "fedlab", "flgo", "flower")),
} | {
    "peers/kairos",
    "peers/pfl",
}


def test_every_script_is_tried() -> None:
    names = {str(path.relative_to(SCRIPTS).with_suffix("")) for path in SCRIPTS.rglob("*.py")}
    assert names == SMALL.keys() | NOT_RUN.keys() | COMPILED


@pytest.mark.parametrize("name", SMALL)
def test_a_script_runs_in_small(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = SMALL[name]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *words.replace(OUT, str(tmp_path)).split()])
    import_module(name.rpartition("/")[2]).main()
    assert said in capsys.readouterr().out


@pytest.mark.slow  # each is a process, most of whose time is the import of torch
@pytest.mark.parametrize("name", NOT_RUN)
def test_a_script_that_is_not_run_shows_its_help(name: str) -> None:
    command = [sys.executable, str(SCRIPTS / f"{name}.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert shown.returncode == 0, shown.stderr
    assert "usage:" in shown.stdout


@pytest.mark.parametrize("name", sorted(COMPILED))
def test_a_script_that_is_not_called_alone_compiles(name: str) -> None:
    path = SCRIPTS / f"{name}.py"
    compile(path.read_text(encoding="utf-8"), path, "exec")
