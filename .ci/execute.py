"""Runs notebooks and stores what they show: `python .ci/execute.py docs/notebooks/*.ipynb`."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbclient
import nbformat


def execute(path: Path) -> None:
    """Run a notebook in an empty folder and write it back, without what differs from run to run."""
    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        nbclient.NotebookClient(
            notebook, timeout=180, record_timing=False, resources={"metadata": {"path": folder}}
        ).execute()
        for cell in notebook.cells:
            for output in cell.get("outputs", []):
                if "text" in output:
                    output["text"] = output["text"].replace(folder, "").replace("\r", "")
    notebook.metadata = {key: notebook.metadata[key] for key in ("kernelspec", "language_info")}
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)


if __name__ == "__main__":
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for name in sys.argv[1:]:
        began = time.perf_counter()
        execute(Path(name))
        print(f"{name}: {time.perf_counter() - began:.0f} s")
