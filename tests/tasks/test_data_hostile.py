"""Files that would take all memory, never end, or become something else without a word."""

import io
import os
import struct
import zipfile

import numpy as np
import pytest
from files_fuzz import declaring, zipped
from PIL import Image

from kairosfl.data import intake, load
from kairosfl.errors import UserError

GOOD = "a,label\n1,0\n2,1\n3,0\n4,1\n5,0\n"


@pytest.fixture
def place(tmp_path):
    """A directory with one client."""
    (tmp_path / "ann.csv").write_text(GOOD)
    return tmp_path


@pytest.fixture
def little_memory(monkeypatch):
    """A machine with two megabytes, of which data may take one."""
    monkeypatch.setattr(intake, "memory", lambda: 2_000_000)


def refused(place, **options):
    with pytest.raises(UserError) as error:
        load("folder", path=place, **options)
    return str(error.value)


def test_latin_1_is_refused_and_not_read_as_other_letters(place):
    for name in ("ann", "bob"):
        rows = "".join(f"{number},{'Malmö' if number % 2 else 'Malmø'}\n" for number in range(20))
        (place / f"{name}.csv").write_bytes(f"a,label\n{rows}".encode("latin-1"))
    assert (
        refused(place)
        == f"{place / 'ann.csv'} is not UTF-8 (byte 0xf8 in line 2); save it as UTF-8."
    )
    (place / "ann.csv").write_bytes(b"\xef\xbb\xbfa,label\r1,0\r2,\xf6\r")
    assert (
        refused(place)
        == f"{place / 'ann.csv'} is not UTF-8 (byte 0xf6 in line 3); save it as UTF-8."
    )
    for name in ("ann", "bob"):
        (place / f"{name}.csv").write_text("a,label\n1,Malmö\n2,Malmø\n", encoding="utf-8-sig")
    assert load("folder", path=place, test=0.0).labels == ("Malmö", "Malmø")


@pytest.mark.parametrize("text", ["Größe,label\n1,0\n", "a,label\nweiß,0\n"])
def test_column_names_and_categories_in_latin_1(place, text):
    (place / "bob.csv").write_bytes(text.encode("latin-1"))
    assert "bob.csv is not UTF-8 (byte 0x" in refused(place, categorical=["a"])


def test_utf_16_without_a_mark_is_not_a_text(place):
    (place / "bob.csv").write_bytes(GOOD.encode("utf-16-le"))
    assert refused(place) == (
        f"{place / 'bob.csv'} is not a text (byte 0x00 in line 1); save it as UTF-8."
    )


def test_files_that_never_end_are_not_opened(place):
    pipe = place / "bob.csv"
    os.mkfifo(pipe)
    assert (
        refused(place)
        == f"{pipe} is a named pipe, not a regular file; replace it with one, or remove it."
    )
    pipe.unlink()
    pipe.symlink_to("/dev/zero")
    assert (
        refused(place)
        == f"{pipe} is a device, not a regular file; replace it with one, or remove it."
    )
    pipe.unlink()
    pipe.symlink_to(place / "nowhere")
    assert refused(place) == (
        f"{pipe} cannot be read (No such file or directory); make it readable, or remove it."
    )
    pipe.unlink()
    (place / "ann.csv").unlink()
    picture = place / "eve" / "cat" / "1.png"
    picture.parent.mkdir(parents=True)
    os.mkfifo(picture)
    assert refused(place).startswith(f"{picture} is a named pipe, not a regular file; ")


def test_a_file_larger_than_memory_is_not_read(place, little_memory):
    with (place / "bob.csv").open("wb") as file:
        file.truncate(10**12)  # takes no space on disk
    assert refused(place) == (
        f"{place / 'bob.csv'} would take 1,000.0 GB of memory, and 1.0 MB are left for data; leave it out, or use a "
        "machine with more memory."
    )
    (place / "bob.csv").write_text("a,label\n" + 20_000 * "1,0\n")
    assert refused(place).startswith(f"{place / 'bob.csv'} would take 2.6 MB of memory, and ")


def test_an_archive_that_unpacks_to_more_than_memory(place, little_memory):
    path = place / "bob.npz"
    np.savez_compressed(
        path,
        inputs=np.zeros((1_000_000, 2)),
        targets=np.zeros(1_000_000, int),
        other=np.zeros(10**7),
    )
    assert path.stat().st_size < 200_000
    assert refused(place).startswith(
        f"the array inputs in {path} would take 16.0 MB of memory, and 1.0 MB are left"
    )
    np.savez_compressed(
        path, inputs=np.zeros((5, 1)), targets=np.zeros(5, int), other=np.zeros(10**7)
    )
    assert len(load("folder", path=place).train) == 8  # what is not used is not unpacked


@pytest.mark.parametrize(
    "shape", ["(10**12, 100)", "(1000000000000, 100)", "(10000000000000000000, 2)"]
)
def test_a_shape_that_is_not_there(place, shape):
    path = place / "bob.npz"
    path.write_bytes(
        zipped({"inputs.npy": declaring(shape), "targets.npy": declaring("(2,)", "<i4")})
    )
    assert path.stat().st_size < 700
    assert refused(place).startswith(
        (f"{path} is damaged: ", f"{path} declares more values in inputs than memory has")
    )


DIRECTORY = b"PK\x01\x02"  # the first entry of the list of files at the end of an archive


@pytest.mark.parametrize(
    ("begin", "shift", "value", "reason"),
    [
        (b"inputs.npy", 100, 255, "Error -3 while decompressing data"),
        (DIRECTORY, 6, 130, "zip file version 13.0"),
        (DIRECTORY, 8, 1, "File 'inputs.npy' is encrypted"),
        (DIRECTORY, 10, 99, "That compression method is not supported"),
    ],
)
def test_a_damaged_archive(place, begin, shift, value, reason):
    path = place / "bob.npz"
    numbers = np.random.default_rng(0).normal(size=(200, 2))
    np.savez_compressed(path, inputs=numbers, targets=np.arange(200) % 2)
    content = bytearray(path.read_bytes())
    position = content.find(begin) + shift
    content[position : position + (4 if shift == 100 else 1)] = [value] * (4 if shift == 100 else 1)
    path.write_bytes(content)
    sentence = refused(place)
    assert sentence.startswith(f"{path} is damaged: it cannot be read as .npz ({reason}")
    assert sentence.endswith("; write it again.")


def test_archives_of_other_things(place):
    path = place / "bob.npz"
    np.save(path.with_suffix(".npy"), np.zeros(3))
    path.with_suffix(".npy").rename(path)
    assert refused(place) == f"{path} is a single array; write inputs and targets with numpy.savez."
    times = np.arange(3).astype("M8[D]").reshape(3, 1)
    np.savez(path, inputs=times, targets=np.arange(3))
    assert refused(place) == (
        f"{path} has inputs of type datetime64[D]; give numbers, such as float32 or int64."
    )
    np.savez(path, inputs=1.0, targets=2.0)
    assert refused(place, kind="regression") == (
        f"{path} has a single value as inputs; give an array with one row for each sample."
    )
    path.write_bytes(zipped({"inputs": b"text", "targets": b"text"}, zipfile.ZIP_STORED))
    assert (
        refused(place)
        == f"{path} has inputs, which is not an array; write it again with numpy.savez."
    )


def test_arrays_of_another_byte_order(tmp_path):
    np.savez(
        tmp_path / "ann.npz",
        x=np.arange(6, dtype=">i4").reshape(3, 2),
        y=np.arange(3, dtype=">u2") % 2,
    )
    samples = load("folder", path=tmp_path, test=0.0).train
    assert samples.inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert samples.targets.tolist() == [0, 1, 0]


def test_labels_too_large_for_a_class(place):
    (place / "bob.csv").write_text("a,label\n1,1e30\n")
    assert refused(place) == (
        f"{place / 'bob.csv'}, line 2, column 'label' has the label '1e+30', which is too large for a class; number "
        "the classes from 0, or give them names."
    )
    (place / "bob.csv").write_text("a,label\n1,9007199254740993\n2,9007199254740994\n")
    assert "has the label '9007199254740994', which is too large for a class" in refused(place)
    (place / "bob.csv").unlink()
    np.savez(place / "bob.npz", x=np.zeros((2, 1)), y=np.array([0, 2**63], np.uint64))
    assert (
        refused(place)
        == f"{place / 'bob.npz'} has label 9223372036854775808; labels must be integers from 0."
    )


def test_long_cells_and_wide_tables_are_repeated_in_part(place):
    (place / "ann.csv").write_text(f"a,label\n{'x' * 5000},0\n")
    assert f"has {'x' * 60!r}… (5,000 characters), which is not a finite number" in refused(place)
    (place / "ann.csv").write_text(f"a,label\n{'9' * 5000},0\n")
    assert "line 2, column 'a' has 'inf', which is not a finite number" in refused(place)
    names = ",".join(f"gene{number}" for number in range(20_000))
    (place / "ann.csv").write_text(f"{names}\n")
    assert "gene10, gene100, " in (sentence := refused(place))
    assert "and 19,940 more)" in sentence
    assert len(sentence) < 1000


def test_names_that_are_not_utf_8_can_be_recorded(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    for kind in ("cat", name):
        path = tmp_path / name / kind / "1.png"
        path.parent.mkdir(parents=True)
        Image.new("L", (4, 4)).save(path)
    data = load("folder", path=tmp_path, test=0.0)
    assert (data.key_names, data.labels, list(data.hashes)) == (
        ("caf\\xe9",),
        ("caf\\xe9", "cat"),
        ["caf\\xe9"],
    )


def test_twenty_thousand_columns_take_time_in_proportion(tmp_path, monkeypatch):
    """Each name is compared with the others by hash alone: `count` of a list would compare all
    pairs.
    """
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other):
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

        def strip(self):
            return self

    from kairosfl.data import tables

    header = [Name(f"gene{number}") for number in range(20_000)]
    tables._check_header(tmp_path / "x.csv", header)
    assert compared < 20_000
    names = [str(name) for name in header]
    row = ",".join("1" for _ in names)
    (tmp_path / "ann.csv").write_text(f"{','.join(names)},label\n{row},0\n{row},1\n{row},1\n")
    assert load("folder", path=tmp_path).shape == (20_000,)


def test_a_picture_of_too_many_pixels(tmp_path):
    path = tmp_path / "ann" / "cat" / "1.png"
    path.parent.mkdir(parents=True)
    Image.new("1", (15_000, 15_000)).save(path)
    assert refused(tmp_path) == f"{path} has more than 178,956,970 pixels; scale it down."
    Image.new("1", (10_000, 10_000)).save(path)


def test_pictures_that_would_fill_the_memory(tmp_path, little_memory):
    path = tmp_path / "ann" / "cat" / "1.png"
    path.parent.mkdir(parents=True)
    Image.new("L", (10, 10)).save(path)
    for size in ([100_000, 100_000], [2**40, 2]):
        assert refused(tmp_path, size=size).startswith(
            f"1 picture in {path.parent.parent} with data.size = {size} would take "
        )
        assert refused(tmp_path, size=size).endswith("are left for data; give a smaller size.")
    Image.new("1", (1000, 1000)).save(path)
    assert refused(tmp_path, size=[4, 4]) == (
        f"{path} would take 3.0 MB of memory, and 1.0 MB are left for data; scale it down."
    )


def test_a_header_that_declares_more_pixels_than_there_are(tmp_path):
    path = tmp_path / "ann" / "cat" / "1.png"
    path.parent.mkdir(parents=True)
    Image.new("L", (10, 10)).save(path)
    content = path.read_bytes()
    path.write_bytes(content[:16] + struct.pack(">II", 2**31 - 1, 2**31 - 1) + content[24:])
    assert refused(tmp_path).startswith(f"{path} ")


def test_a_picture_of_a_format_that_runs_programs(tmp_path):
    path = tmp_path / "ann" / "cat" / "1.png"
    path.parent.mkdir(parents=True)
    stream = io.BytesIO()
    Image.new("RGB", (4, 4)).save(stream, "EPS")
    path.write_bytes(stream.getvalue())
    assert refused(tmp_path).startswith(
        f"{path} cannot be read as a picture (cannot identify image file"
    )


@pytest.fixture
def write_table():
    """Writes columns to a .parquet file."""
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(path, **columns):
        parquet.write_table(arrow.table(columns), path)
        return arrow

    return write


def test_a_table_without_rows_is_not_read_as_csv(tmp_path, write_table):
    import pyarrow as arrow

    write_table(tmp_path / "bob.parquet", a=[1.0, 2.0], label=[0, 1])
    none = {"a": arrow.array([], "int64"), "label": arrow.array([], "string")}
    write_table(tmp_path / "bob.test.parquet", **none)
    data = load("folder", path=tmp_path)
    assert (len(data.train), len(data.test)) == (2, 0)
    (tmp_path / "bob.test.parquet").unlink()
    write_table(tmp_path / "bob.parquet", **none)
    assert refused(tmp_path).startswith("client 'bob' has no data: ")


def test_columns_of_other_types_in_tables(tmp_path, write_table):
    import pyarrow as arrow

    path = tmp_path / "bob.parquet"
    late = arrow.array([2**52, 0, 1], arrow.timestamp("us"))
    prices = arrow.array(["1.5", "2", "3"]).cast(arrow.decimal128(9, 2))
    digits = ["0.5", None, "2"]
    write_table(path, when=late, price=prices, digits=digits, label=["0", "1", "1"])
    sentence = refused(tmp_path, missing="mean")
    assert (
        "row 1, column 'when' has '2112-09-17 23:53:47.370496', which is not a finite number"
        in sentence
    )
    data = load("folder", path=tmp_path, input=["price", "digits"], missing="mean", test=0.0)
    assert data.train.inputs.tolist() == [[1.5, 0.5], [2, 1.25], [3, 2]]
    assert (data.train.targets.tolist(), data.labels) == ([0, 1, 1], ())
    write_table(path, when=arrow.array([2**60] * 3, arrow.timestamp("us")), label=[0, 1, 1])
    assert (
        refused(tmp_path)
        == f"{path} cannot be read as .parquet (a date is out of range); write it again."
    )
    write_table(path, name=arrow.array([b"a", b"\xf6", None]), label=[0, 1, 1])
    assert refused(tmp_path).startswith(f"{path} cannot be read as .parquet (Invalid UTF8")


def test_a_table_whose_columns_share_a_name(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = [arrow.array([1, 2]), arrow.array([3, 4]), arrow.array([0, 1])]
    parquet.write_table(
        arrow.Table.from_arrays(columns, names=["a", "a", "label"]), tmp_path / "bob.parquet"
    )
    assert refused(tmp_path) == f"{tmp_path / 'bob.parquet'} has two columns 'a'; rename one."


def test_a_small_table_of_many_values(tmp_path, write_table, little_memory):
    path = tmp_path / "bob.parquet"
    write_table(path, a=np.zeros(1_000_000), label=np.zeros(1_000_000, int))
    assert path.stat().st_size < 100_000
    assert refused(tmp_path).startswith(
        f"{path} would take 16.0 MB of memory, and 1.0 MB are left for data; "
    )


def test_a_damaged_text_in_a_table(tmp_path, write_table):
    path = tmp_path / "bob.parquet"
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    columns = arrow.table({"a": [1.0, 2.0], "label": ["Malmo", "Lund"]})
    parquet.write_table(
        columns, path, compression="none", use_dictionary=False, write_statistics=False
    )
    path.write_bytes(path.read_bytes().replace(b"Malmo", b"Malm\xf6"))
    assert refused(tmp_path).startswith(
        f"{path} cannot be read as .parquet ('utf-8' codec can't decode byte 0xf6"
    )


def test_a_lack_of_memory_that_was_not_foreseen(place, monkeypatch):
    def fail(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr(np, "concatenate", fail)
    assert (
        refused(place)
        == "data set 'folder' takes more memory than there is; use less data, or a larger machine."
    )


def test_memory_is_what_a_process_may_take(tmp_path, monkeypatch):
    before = intake.memory()
    assert before > 2**20
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(intake, "GROUP_LIMITS", (str(limit),))
    limit.write_text("1048576\n")
    assert intake.memory() == 2**20
    limit.write_text("max\n")
    assert intake.memory() >= before
    monkeypatch.setattr(intake, "_address_space", lambda: 12345)
    assert intake.memory() == 12345


def test_categories_that_would_fill_the_memory(tmp_path, little_memory):
    rows = "".join(f"name{number},{number % 2}\n" for number in range(2000))
    (tmp_path / "ann.csv").write_text(f"a,label\n{rows}")
    assert refused(tmp_path, categorical=["a"]).startswith(
        "2,000 rows of 2,000 inputs would take 32.0 MB of memory"
    )


def test_reading_is_by_one_room_for_all_clients(tmp_path, little_memory):
    for number in range(3):
        np.savez_compressed(
            tmp_path / f"{number}.npz", x=np.zeros((25_000, 1)), y=np.zeros(25_000, int)
        )
    assert refused(tmp_path).startswith(
        f"the array x in {tmp_path / '2.npz'} would take 0.2 MB of memory, and 0.2 MB"
    )
