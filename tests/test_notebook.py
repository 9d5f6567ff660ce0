"""The notebooks of the documentation run in a real kernel and still show what is stored in them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[1] / "docs" / "notebooks"
COMPARED = ("deployment", "own_model", "own_rule", "sweep")


def execute(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """A notebook as it is stored, and as it is after running it in an empty folder."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for package in ("ipykernel", "pandas", "matplotlib", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )  # for `!kairosfl`
    stored, run = (nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4) for _ in range(2))
    nbclient.NotebookClient(
        run, timeout=180, resources={"metadata": {"path": str(folder)}}
    ).execute()
    return stored, run


def shape(cell: Any) -> list[str]:
    """What a cell shows, without its numbers, which differ a little between machines, and what
    depends on them.
    """
    found = []
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        text = output.get("text") or (
            output["output_type"] if "text/html" in data else data["text/plain"]
        )
        text = re.sub(r"\x1b\[[0-9;]*m|critical|/tmp/\S+|[-+−±]", "", text)
        found += re.sub(r"[\d.,]+", " ", text).split()
    return found


def test_the_list_is_complete() -> None:
    assert sorted([*COMPARED, "first_run"]) == sorted(
        path.stem for path in NOTEBOOKS.glob("*.ipynb")
    )


def test_the_first_run_in_a_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is one line that is replaced."""
    stored, notebook = execute("first_run", tmp_path, monkeypatch)
    assert [shape(cell) for cell in notebook.cells] == [shape(cell) for cell in stored.cells]
    run, table, plot, end = (
        [dict(each) for each in cell.outputs] for cell in notebook.cells if "outputs" in cell
    )
    shown = [each.get("data", {}).get("text/plain", "") for each in run]
    assert all(each["output_type"] != "stream" for each in run)  # no line per round
    bars = [text for text in shown if "█" in text]
    assert len(bars) == 1
    assert bars[0].startswith("█" * 20 + " 60/60  accuracy 0.")
    assert shown[-1].startswith("History(rounds=60, accuracy=0.")
    assert "text/html" in table[-1]["data"]
    assert "image/png" in plot[-1]["data"]
    assert end[0]["text"] == "report.html\n"
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPARED)
def test_a_notebook_shows_what_is_stored(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "deployment":
        pytest.importorskip("flwr")
    stored, run = execute(name, tmp_path, monkeypatch)
    assert any(shape(cell) for cell in stored.cells), "store its outputs: make notebooks"
    assert [shape(cell) for cell in run.cells] == [shape(cell) for cell in stored.cells]
