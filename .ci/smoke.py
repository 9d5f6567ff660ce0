"""Calls every command of an installed kairosfl in an empty folder; what needs a package that is
missing is left out.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

SMALL = ["--set", "data.clients=6", "--set", "train.cohort=2", "--set", "train.rounds=2", "--quiet"]
RAY = [*SMALL, "--engine", "ray", "--set", "run.actors=1"]
TUNED = ["--trials", "6", "--parallel", "6", "--out", "search", "--quiet"]
PERIODS = ["--windows", "2", "--seeds", "1", "--deficit", "cohort", "--out", "periods", "--quiet"]
TOML = """
[data]
clients = 6
[train]
cohort = 2
rounds = 3
"""

# The words of a command, and what it prints; a question mark before them: only where this package
# is installed.
WORKING = [
    ("--help", "Run one experiment."),
    ("resume --help", "Run folder."),
    ("demo --help", "Folder of the demo."),
    ("watch --help", "--port"),
    ("list", "kairosfl list models"),
    *(
        (f"list {what}", "")
        for what in ("rules", "data", "models", "partitions", "detectors", "presets")
    ),
    (["run", *SMALL, "--out", "first"], "accuracy"),
    (
        ["run", "small.toml", "--set", "algorithm=fedcl + fedavgm", "--out", "second", "--quiet"],
        "accuracy",
    ),
    ("resume first --quiet", "accuracy"),
    (["sweep", "small.toml", "--seeds", "2", "--out", "study", "--quiet"], "runs in study"),
    ("compare first second --out table.tex --picture table.png", "fedavg"),
    ("report study --figures figures --tables tables", "report: "),
    ("figure first second --out figure.svg", "caption: "),
    ("export first", "model: "),
    ("bench small.toml --seconds 0 --quiet", "batched"),
    ("data show digits --picture digits.png", "clients"),
    (["periods", "small.toml", *PERIODS], "without a deficit"),
    ("reproduce", "pa3fed/table1"),
    (["?optuna", "tune", "small.toml", *TUNED], "report: "),
    (
        ["?dp_accounting", "run", *SMALL, "--set", "algorithm=privacy", "--out", "private"],
        "accuracy",
    ),
    (
        [
            "?pyarrow",
            "run",
            *SMALL,
            "--set",
            "data.name=folder",
            "--set",
            "data.path=rows",
            "--out",
            "rows-run",
        ],
        "",
    ),
    (
        [
            "?PIL",
            "run",
            *SMALL,
            "--set",
            "data.name=folder",
            "--set",
            "data.path=pictures",
            "--out",
            "pictures-run",
        ],
        "",
    ),
    (["?ray", "run", *RAY, "--out", "ray"], "accuracy"),
    ("?flwr deploy new app", "app"),
    ("?flwr deploy certs certs", "certs"),
    ("?flwr deploy node --help", "supernode"),
    ("deploy rehearse --help", "Number of nodes."),
    ("deploy status --help", "The run folder on the server."),
]
REFUSED = [
    ("run --rounds 3", "There is no option --rounds; use --set train.rounds=VALUE."),
    ("run --otu x", "There is no option --otu; did you mean '--out'?"),
    ("rnu", "Did you mean 'run'?"),
    ("data shwo", "Did you mean 'show'?"),
    ("resume", "Missing argument"),
    ("tune small.toml --trials x", "--trials"),
    ("list rulez", "did you mean 'rules'?"),
    ("run none.toml", "none.toml does not exist"),
]


def call(words: list[str]) -> tuple[int, str]:
    """Exit status of a command and what it printed; the interpreter is the same, so that torch is
    imported once.
    """
    from typer.main import get_command

    from kairosfl.cli import app

    printed, status = io.StringIO(), 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            get_command(app).main(args=words, prog_name="kairosfl")
        except SystemExit as ended:
            status = int(ended.code or 0)
        except Exception:
            status = 1
            traceback.print_exc()
    return status, printed.getvalue()


def files() -> None:
    """What the commands read."""
    Path("small.toml").write_text(TOML)
    if importlib.util.find_spec("pyarrow"):
        import pyarrow
        from pyarrow import parquet

        for client in range(6):
            path = Path("rows", f"client{client}.parquet")
            path.parent.mkdir(exist_ok=True)
            numbers = [float(number) for number in range(20)]
            parquet.write_table(
                pyarrow.table({"x": numbers, "label": [number % 2 for number in range(20)]}), path
            )
    if importlib.util.find_spec("PIL"):
        from PIL import Image

        for number in range(120):
            path = Path("pictures", f"client{number % 6}", str(number % 4), f"{number}.png")
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("L", (8, 8), 50 * (number % 4) + number).save(path)


def main() -> None:
    failures = 0
    script = Path(sys.executable).with_name("kairosfl")
    subprocess.run([script, "--version"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        files()
        for expected, cases in ((0, WORKING), (2, REFUSED)):
            for command, sentence in cases:
                words = command.split() if isinstance(command, str) else list(command)
                if words[0].startswith("?") and not importlib.util.find_spec(words.pop(0)[1:]):
                    continue
                status, printed = call(words)
                if status != expected or sentence not in printed:
                    failures += 1
                    print(
                        f"kairosfl {' '.join(words)}: exit status {status}, without {sentence!r}:\n{printed}"
                    )
        os.chdir("/")
    if failures:
        sys.exit(f"{failures} commands failed")
    print("every command works")


if __name__ == "__main__":
    main()
