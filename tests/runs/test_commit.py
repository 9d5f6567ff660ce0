"""Which sources a run was made with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from kairosfl.runs import folder


def git(where: Path, *words: str) -> str:
    named = ["git", "-c", "user.name=A", "-c", "user.email=a@example.org", *words]
    return subprocess.run(
        named, cwd=where, check=True, capture_output=True, text=True
    ).stdout.strip()


def test_the_commit_and_whether_the_sources_were_edited_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KAIROSFL_COMMIT", raising=False)
    package = tmp_path / "package"
    (package / "runs").mkdir(parents=True)
    monkeypatch.setattr(folder, "__file__", str(package / "runs" / "folder.py"))
    assert folder._git() is None  # no repository
    (package / "runs" / "folder.py").write_text("one")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "first")
    git(tmp_path, "tag", "v1")
    commit = git(tmp_path, "rev-parse", "HEAD")
    (tmp_path / "results.json").write_text("not a source")
    assert folder._git() == commit
    (package / "new.py").write_text("two")
    assert folder._git() == f"{commit}-dirty"
    monkeypatch.setenv("KAIROSFL_COMMIT", "as told")
    assert folder._git() == "as told"
