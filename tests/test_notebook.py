"""The notebook of the documentation runs in a real kernel, and progress there is one line that is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebooks" / "first_run.ipynb"


@pytest.mark.slow
def test_the_first_run_in_a_kernel(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for package in ("ipykernel", "pandas", "matplotlib", "sklearn"):
        pytest.importorskip(package)
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "commit it without outputs"
    nbclient.NotebookClient(notebook, timeout=180, resources={"metadata": {"path": str(tmp_path)}}).execute()
    run, table, plot, end = ([dict(each) for each in cell.outputs] for cell in notebook.cells if "outputs" in cell)
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
