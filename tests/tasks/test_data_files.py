"""Official files: found, fetched, checked, converted once; whatever is wrong with them is named in
one sentence.
"""

import gzip
import hashlib
import http.server
import io
import json
import os
import sys
import tarfile
import threading
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from kairosfl.data.fetch import Download, ensure, unpack
from kairosfl.data.files import File, check, content, data_folder
from kairosfl.data.store import arrays, cached
from kairosfl.errors import UserError

TEXT = b"what the official file holds"
MD5 = hashlib.md5(TEXT).hexdigest()

ELSEWHERE = ", or set KAIROSFL_DATA to the directory that contains them."


@pytest.fixture
def server(tmp_path):
    """A web server of the files in a folder."""
    place = tmp_path / "served"
    place.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=place)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield place, f"http://127.0.0.1:{running.server_port}"
        running.shutdown()


def test_the_folder_is_the_chosen_one_or_the_platform_cache(monkeypatch):
    monkeypatch.setenv("KAIROSFL_DATA", "~/sets")
    assert data_folder() == Path.home() / "sets"
    monkeypatch.delenv("KAIROSFL_DATA")
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/caches")
    assert data_folder() == Path("/var/caches/kairosfl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data_folder() == Path.home() / ".cache" / "kairosfl"


def test_a_missing_file_is_downloaded_and_checked(tmp_path, server):
    served, url = server
    (served / "a.txt").write_bytes(TEXT)
    ensure("toy", tmp_path, [File("toy/a.txt", MD5)], [Download(f"{url}/a.txt", MD5, "toy/a.txt")])
    assert (tmp_path / "toy/a.txt").read_bytes() == TEXT
    (served / "a.txt").unlink()  # there now: nothing is asked of the server
    ensure("toy", tmp_path, [File("toy/a.txt", MD5)], [Download(f"{url}/a.txt", MD5, "toy/a.txt")])


def test_a_download_with_the_wrong_checksum_is_refused_and_not_kept(tmp_path, server):
    served, url = server
    (served / "a.txt").write_bytes(b"something else")
    with pytest.raises(UserError) as error:
        ensure(
            "toy", tmp_path, [File("toy/a.txt", MD5)], [Download(f"{url}/a.txt", MD5, "toy/a.txt")]
        )
    assert str(error.value).startswith(
        f"the download from {url}/a.txt is corrupt or has changed (MD5 hash of downloaded file"
    )
    assert str(error.value).endswith(
        f"copy toy/a.txt to {tmp_path}, or set KAIROSFL_DATA to the directory that contains them."
    )
    assert not (tmp_path / "toy/a.txt").exists()


def test_without_a_network_the_error_says_which_files_to_put_where(tmp_path):
    files = [File("toy/a.txt"), File("toy/b.txt")]
    downloads = [
        Download(f"http://127.0.0.1:9/{name}", "", f"toy/{name}") for name in ("a.txt", "b.txt")
    ]
    with pytest.raises(UserError) as error:
        ensure("toy", tmp_path, files, downloads)
    assert str(error.value) == (
        "data set 'toy' could not be downloaded from http://127.0.0.1:9/a.txt (ConnectionError); "
        f"copy toy/a.txt, toy/b.txt to {tmp_path}{ELSEWHERE}"
    )


def test_without_pooch_the_error_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(UserError) as error:
        ensure("toy", tmp_path, [File("toy/a")], [Download("http://127.0.0.1:9/a", "", "toy/a")])
    assert str(error.value) == (
        f"data set 'toy' is not in {tmp_path}, and downloading needs pooch: "
        f'pip install "kairosfl[cli]", or copy toy/a to {tmp_path}{ELSEWHERE}'
    )


def test_a_file_that_no_address_serves_is_asked_for(tmp_path):
    with pytest.raises(UserError) as error:
        ensure("toy", tmp_path, [File(f"toy/{number}") for number in range(10)], [])
    assert str(error.value) == (
        "data set 'toy' needs toy/0, toy/1, toy/2, toy/3, toy/4, toy/5, toy/6, toy/7 and 2 more "
        f"in {tmp_path}; copy them there."
    )


def _tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, data in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            tar.addfile(entry, io.BytesIO(data))


def _zip(path, members):
    with zipfile.ZipFile(path, "w") as zipped:
        for name, data in members.items():
            zipped.writestr(name, data)


@pytest.mark.parametrize("pack", [_tar, _zip])
def test_archives_are_unpacked_inside_their_folder_only_and_what_counts_comes_last(
    tmp_path, monkeypatch, pack
):
    pack(
        tmp_path / "archive",
        {"toy/list": b"1", "toy/images/a": b"2", "other": b"3", "toy/../../evil": b"4"},
    )
    written = []
    real = os.replace
    monkeypatch.setattr(
        os, "replace", lambda part, path: (written.append(Path(path).name), real(part, path))
    )
    unpack(tmp_path / "archive", tmp_path / "data", "toy", ["toy/list"])
    assert written == ["a", "list"]
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        "archive",
        "data/toy/images/a",
        "data/toy/list",
    ]


def test_an_archive_is_downloaded_unpacked_and_removed(tmp_path, server):
    served, url = server
    _tar(served / "toy.tar.gz", {"toy/a": TEXT, "toy/b": b"b"})
    md5 = hashlib.md5((served / "toy.tar.gz").read_bytes()).hexdigest()
    ensure(
        "toy",
        tmp_path / "data",
        [File("toy/a"), File("toy/b")],
        [Download(f"{url}/toy.tar.gz", md5, "toy", True)],
    )
    assert (tmp_path / "data/toy/a").read_bytes() == TEXT
    assert not list((tmp_path / "data").rglob("*.gz"))


def _place(folder, name, data):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def test_the_official_file_passes_without_a_word(tmp_path):
    _place(tmp_path, "toy/a", TEXT)
    _place(tmp_path, "toy/b.gz", gzip.compress(TEXT, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sums = check(tmp_path, [File("toy/a", MD5, len(TEXT)), File("toy/b.gz", MD5)])
    assert sums == {"toy/a": MD5, "toy/b.gz": MD5}


def test_a_file_as_long_as_the_official_one_with_another_sum_is_damaged(tmp_path):
    path = _place(tmp_path, "toy/a", TEXT.replace(b"official", b"oFFicial"))
    found = hashlib.md5(path.read_bytes()).hexdigest()
    with pytest.raises(UserError) as error:
        check(tmp_path, [File("toy/a", MD5, len(TEXT))])
    assert str(error.value) == (
        f"{path} is damaged: it has the size of the official file, but its md5 is {found}, not {MD5}; "
        "delete it and run again, or replace it with an intact copy."
    )


def test_another_file_is_used_with_a_warning_and_its_own_sum(tmp_path):
    path = _place(tmp_path, "toy/a", TEXT[:10])
    found = hashlib.md5(TEXT[:10]).hexdigest()
    with pytest.warns(UserWarning, match=f"is not the official file \\(md5 {found}, not {MD5}\\)"):
        assert check(tmp_path, [File("toy/a", MD5, len(TEXT))]) == {"toy/a": found}
    with pytest.warns(UserWarning, match=str(path)):  # and again at the next start
        check(tmp_path, [File("toy/a", MD5, len(TEXT))])


def test_sums_are_worked_out_again_only_when_a_file_changes(tmp_path, monkeypatch):
    path = _place(tmp_path, "toy/a", TEXT)
    read = []
    monkeypatch.setattr(
        "kairosfl.data.files.content", lambda p: (read.append(p), p.read_bytes())[1]
    )
    for _ in range(2):
        check(tmp_path, [File("toy/a", MD5)])
    assert read == [path]
    path.write_bytes(TEXT + b"!")
    with pytest.warns(UserWarning, match="not the official file"):
        check(tmp_path, [File("toy/a", MD5)])
    assert read == [path, path]


def test_a_spoilt_list_of_sums_is_made_anew(tmp_path):
    _place(tmp_path, "toy/a", TEXT)
    for spoilt in ("{", "[1]", '{"toy/a": 3}'):
        _place(tmp_path, ".kairosfl/sums.json", spoilt.encode())
        assert check(tmp_path, [File("toy/a", MD5)]) == {"toy/a": MD5}
    assert json.loads((tmp_path / ".kairosfl/sums.json").read_text())["toy/a"][1] == MD5


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda data: data[: len(data) // 2], "its compressed data is truncated after "),
        (lambda data: b"no gzip at all", "it cannot be decompressed (Not a gzipped file"),
        (
            lambda data: data[:-6] + b"\0\0" + data[-4:],
            "it cannot be decompressed (CRC check failed",
        ),
    ],
)
def test_half_or_broken_gzip_files_are_named(tmp_path, spoil, why):
    path = _place(tmp_path, "a.gz", spoil(gzip.compress(TEXT * 100)))
    with pytest.raises(UserError) as error:
        content(path)
    assert str(error.value).startswith(f"{path} is damaged: {why}")


def test_arrays_are_converted_once_per_file_and_option_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setenv("KAIROSFL_DATA", str(tmp_path))
    path = _place(tmp_path, "toy/a", b"abc")
    made = []

    def convert(root):
        made.append(root)
        return {"bytes": np.frombuffer((root / "toy/a").read_bytes(), np.uint8)}

    for options, times in (({}, 1), ({}, 1), ({"size": 2}, 2), ({}, 2)):
        loaded, sums = arrays("toy", [File("toy/a")], [], convert, options)
        assert loaded["bytes"].tolist() == [97, 98, 99]
        assert isinstance(loaded["bytes"], np.memmap)
        assert sums == {"toy/a": hashlib.md5(b"abc").hexdigest()}
        assert len(made) == times
    path.write_bytes(b"abcd")
    assert len(arrays("toy", [File("toy/a")], [], convert)[0]["bytes"]) == 4
    loaded["bytes"][0] = 0  # copy on write: the file stays
    assert arrays("toy", [File("toy/a")], [], convert, {"size": 2})[0]["bytes"][0] == 97


def test_converted_arrays_that_were_cut_short_are_made_anew(tmp_path):
    def convert(_):
        return {"numbers": np.arange(1000)}

    cached(tmp_path, "toy", ["1"], convert)
    (file,) = (tmp_path / ".kairosfl").rglob("*.npy")
    file.write_bytes(file.read_bytes()[:2000])
    assert cached(tmp_path, "toy", ["1"], convert)["numbers"].sum() == 499_500
    assert len(file.read_bytes()) > 8000
    assert [p.name for p in (tmp_path / ".kairosfl").iterdir()] == [file.parent.name]


def test_a_folder_that_cannot_be_written_costs_a_warning_only(tmp_path):
    (tmp_path / ".kairosfl").write_text("a file where the folder should be")
    with pytest.warns(
        UserWarning, match="cannot be written .* toy will be converted again on every start"
    ):
        assert cached(tmp_path, "toy", ["1"], lambda _: {"a": np.ones(3)})["a"].sum() == 3
