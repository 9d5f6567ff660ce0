"""Installs kairosfl without constraints, as a user does, and calls every command.

`newest` takes the newest versions that pyproject.toml admits, `engines` those that go together with
Flower and Ray, `lowest` the lower bound of every package, and `lowest-flower` that of Flower.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = {  # Flower asks for an older Typer than the newest
    "newest": ("cli", "files", "tune", "privacy"),
    "engines": ("cli", "files", "ray", "flower"),
    "lowest": ("cli", "files", "ray", "tune", "privacy"),
    "lowest-flower": ("cli", "flower"),
}
# what is installed in its lowest version; Flower's own needs newer ones of some other packages
PINNED = {
    "lowest": ("core", *EXTRAS["lowest"]),
    "lowest-flower": ("flower",),
}


def floors(extras: tuple[str, ...]) -> dict[str, str]:
    """The lower bound of every package that these extras name; "core" is what needs none of them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    requirements = []
    for extra in extras:
        requirements += (
            project["dependencies"] if extra == "core" else project["optional-dependencies"][extra]
        )
    bounds = {}
    for requirement in requirements:
        name = re.match(r"[\w.-]+", requirement)
        floor = re.search(r">=\s*([\w.]+)", requirement)
        if name and floor:
            bounds[name[0]] = floor[1]
    return bounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("which", choices=EXTRAS)
    parser.add_argument(
        "--torch", default="", help="its version; by default what pyproject.toml asks for"
    )
    chosen = parser.parse_args()

    extras = EXTRAS[chosen.which]
    pins = floors(PINNED[chosen.which]) if chosen.which in PINNED else {}
    if chosen.torch:
        pins["torch"] = chosen.torch
    wanted = [f"{name}=={version}" for name, version in pins.items()]

    environment = {
        key: value
        for key, value in os.environ.items()
        if key not in ("PIP_CONSTRAINT", "PYTHONPATH")
    }
    quiet = ["--quiet", "--no-compile", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        python = Path(folder, "bin", "python")
        packages = [f"{ROOT}[{','.join(extras)}]", str(ROOT / "reproductions"), *wanted]
        subprocess.run(
            [python, "-m", "pip", "install", *quiet, *packages], env=environment, check=True
        )
        print(f"{chosen.which}: {', '.join(wanted) or 'no pins'}", flush=True)
        subprocess.run([python, ROOT / ".ci" / "smoke.py"], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main()
