"""Whole files, wherever they are asked for."""

from __future__ import annotations

import os

import pytest

from kairosfl.errors import UserError
from kairosfl.runs.files import write


def test_a_link_stays_a_link_to_what_was_written(tmp_path):
    (tmp_path / "www").mkdir()
    (tmp_path / "link.html").symlink_to("www/real.html")
    write(tmp_path / "link.html", "page")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "www" / "real.html").read_text() == "page"
    assert sorted(os.listdir(tmp_path / "www")) == ["real.html"]


def test_into_a_pipe_it_is_written_as_it_is(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write(tmp_path / "pipe", b"page")
    assert os.read(reader, 9) == b"page"
    os.close(reader)
    assert (tmp_path / "pipe").is_fifo()


def test_a_folder_in_its_place_is_named(tmp_path):
    with pytest.raises(UserError, match=r"Cannot write .*: Is a directory"):
        write(tmp_path, "page")


def test_what_stands_where_a_folder_should_be_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    (tmp_path / "link").symlink_to(tmp_path / "file" / "below")
    for path, wrong in (
        ("file/x", "file"),
        ("file/deep/x", "file"),
        ("nowhere/x", "nowhere"),
        ("link", "file"),
    ):
        with pytest.raises(
            UserError, match=rf"{tmp_path / wrong} is not a directory; choose another place"
        ):
            write(tmp_path / path, "text")


def test_a_link_to_itself_is_replaced(tmp_path):
    path = tmp_path / "state"
    path.symlink_to("state")
    write(path, b"new")
    assert path.read_bytes() == b"new"
