"""Proves what `make dist` built: the right files, which work in an empty environment outside the
checkout.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"

# The core needs no extra: torch, numpy and safetensors are enough.
CORE = """import kairosfl, sys
assert "site-packages" in kairosfl.__file__, kairosfl.__file__
kairosfl.check_rule(kairosfl.rules.SCAFFOLD())
assert not {"typer", "sklearn", "matplotlib"} & set(sys.modules)
"""


def content(wheel: Path) -> dict[str, bytes]:
    """The package's files in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if name.startswith("kairosfl/")
        }


def call(*words: str | Path, cwd: Path) -> None:
    print("$", *(word.name if isinstance(word, Path) else word for word in words), flush=True)
    quiet = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    quiet |= {
        "PIP_CONSTRAINT": str(ROOT / "constraints.txt"),
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_QUIET": "1",
    }
    subprocess.run(words, cwd=cwd, env=quiet, check=True)


def refused(*words: str | Path, cwd: Path) -> None:
    """A command that says where it is, in one sentence."""
    said = subprocess.run(words, cwd=cwd, capture_output=True, text=True, check=False)
    assert said.returncode == 2, said
    assert said.stderr.endswith("run: pip install ./reproductions\n"), said
    assert said.stderr.count("\n") == 1, said


def main() -> None:
    (wheel,), (sdist,) = DIST.glob("*.whl"), DIST.glob("*.tar.gz")
    files = [
        path
        for path in (ROOT / "src" / "kairosfl").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    ]
    expected = {path.relative_to(ROOT / "src").as_posix(): path.read_bytes() for path in files}
    assert content(wheel) == expected, (
        f"the wheel is not src/: {content(wheel).keys() ^ expected.keys()}"
    )
    presets = {name for name in expected if name.startswith("kairosfl/presets/")}
    assert all(Path(name).name.startswith(("__init__", "kairos")) for name in presets), presets
    assert not any(name.startswith("kairosfl/papers/") for name in expected)
    for name in (
        "py.typed",
        "demo.toml",
        "presets/kairos.toml",
        "report/assets/page.js",
        "report/assets/page.css",
    ):
        assert f"kairosfl/{name}" in expected, name

    with tempfile.TemporaryDirectory() as place:
        empty = Path(place)
        venv.create(empty / "venv", with_pip=True)
        python, kairosfl = empty / "venv" / "bin" / "python", empty / "venv" / "bin" / "kairosfl"
        call(python, "-m", "pip", "install", wheel, cwd=empty)
        call(python, "-c", CORE, cwd=empty)
        call(python, "-m", "pip", "install", f"{wheel}[cli]", cwd=empty)
        call(kairosfl, "--help", cwd=empty)
        call(kairosfl, "list", "presets", cwd=empty)
        refused(kairosfl, "reproduce", cwd=empty)
        refused(kairosfl, "run", "fedcl-cifar10-alexnet", cwd=empty)
        call(kairosfl, "run", "--set", "train.rounds=2", "--out", "run", "--quiet", cwd=empty)
        call(kairosfl, "report", "run", cwd=empty)
        call(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", "again", sdist, cwd=empty)
        call(python, "-m", "pip", "install", ROOT / "reproductions", cwd=empty)
        call(kairosfl, "reproduce", cwd=empty)
        call(kairosfl, "run", "--preset", "fedcl-cifar10-alexnet", "--help", cwd=empty)
        (again,) = (empty / "again").glob("*.whl")
        assert content(again) == expected, "the sdist builds another wheel"
    print(f"{wheel.name} and {sdist.name} are good")


if __name__ == "__main__":
    main()
