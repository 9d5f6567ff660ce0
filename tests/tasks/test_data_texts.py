"""AG News and Shakespeare read from small files, and what is wrong with bad ones."""

import json
import zlib

import numpy as np
import pytest
import torch

from kairosfl.data import load
from kairosfl.data.plays import roles
from kairosfl.data.shakespeare import SYMBOLS, encode
from kairosfl.errors import UserError
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.population import own_tests

pytestmark = pytest.mark.filterwarnings("ignore:.*not the official:UserWarning")
FIX = "; delete it and run again, or replace it with an intact copy."


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KAIROSFL_DATA", str(tmp_path))
    for name in ("ag_news_csv", "shakespeare"):
        (tmp_path / name).mkdir()
    return tmp_path


def _refusal(name, **options):
    with pytest.raises(UserError) as error:
        load(name, **options)
    return str(error.value)


@pytest.fixture
def news(folder):
    train, test = folder / "ag_news_csv/train.csv", folder / "ag_news_csv/test.csv"
    train.write_text(
        '"3","Oil up","Oil, at \\$50, don\'t stop"\n"1","","A ""quoted"" word\nand a line"\n'
    )
    test.write_text('"4","Chips","Smaller"\n')
    return train


def _id(word, vocabulary):
    return 1 + zlib.crc32(word.encode()) % (vocabulary - 1)


def test_words_are_hashed_and_padded(news):
    with pytest.warns(UserWarning, match=r"train\.csv is not the official file"):
        data = load("agnews", length=7, vocabulary=1000)
    words = [
        ["oil", "up", "oil", "at", "50", "don't", "stop"],
        ["a", "quoted", "word", "and", "a", "line"],
    ]
    want = [[_id(word, 1000) for word in text] for text in words]
    assert data.train.inputs.tolist() == [want[0], [*want[1], 0]]
    assert data.train.targets.tolist() == [2, 0]
    assert data.test.targets.tolist() == [3]
    assert (data.classes, data.vocabulary, data.labels[3]) == (4, 1000, "Sci/Tech")


def test_bytes_are_cut_and_counted_from_one(news):
    data = load("agnews", tokens="bytes", length=4)
    assert data.test.inputs.tolist() == [[1 + byte for byte in b"Chip"]]
    assert data.train.inputs[1].tolist() == [
        1 + byte for byte in b'A "q'
    ]  # an empty title leaves no space
    assert data.vocabulary == 257


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('"3","a","b"\n"4","title only"\n', "line 2 has 2 columns instead of 3"),
        ('"3","a","b"\n"5","a","b"\n', "line 2 has class '5' instead of 1 to 4"),
        ('"3","a","b"\n"1","a","half a fi', "line 2 is malformed (unexpected end of data)"),
        ('"3","a","b"\n"1","a"b,"c"\n', "line 2 is malformed (',' expected after '\"')"),
        ('"3","a","b"\n\n', "line 2 has 0 columns instead of 3"),
    ],
)
def test_a_csv_with_a_broken_line_names_it(news, text, why):
    news.write_text(text)
    assert _refusal("agnews") == f"{news} is damaged: {why}{FIX}"


def test_a_csv_that_is_no_text_is_named(news):
    news.write_bytes(b'"1","a","\xff\xfe"\n')
    assert _refusal("agnews") == f"{news} is damaged: it is not UTF-8 (byte 0xff in line 1){FIX}"


def test_wrong_options_of_agnews():
    assert (
        _refusal("agnews", tokens="letters") == "data.tokens is 'letters'; give 'words' or 'bytes'."
    )
    assert _refusal("agnews", length=0) == "data.length is 0; give at least 1 token."
    assert (
        _refusal("agnews", vocabulary=1)
        == "data.vocabulary is 1; give at least 2: padding and one word."
    )


def test_the_eighty_symbols():
    assert len(SYMBOLS) == 80
    assert "".join(sorted(SYMBOLS)) == SYMBOLS
    text = "O, what’s “here”—à\t&c.\n"
    assert "".join(SYMBOLS[i] for i in encode(text)) == 'O, what\'s "here"-  &c.\n'


def _write(folder, clients):
    path = folder / "shakespeare/clients.json"
    path.write_text(json.dumps(clients))
    return path


def test_every_role_is_a_client_whose_last_part_is_its_test(folder):
    text = "".join(chr(97 + i % 26) for i in range(110))
    _write(folder, {"PLAY|A": text, "PLAY|TOO SHORT": text[:81], "PLAY|B": text[:82]})
    data = load("shakespeare", stride=1)
    # 110 characters are 30 windows of 81, the last 6 for testing; 82 are two, one of each
    assert (len(data.train), len(data.test)) == (25, 7)
    assert data.key_names == ("PLAY|A", "PLAY|B")
    assert dict(data.notes) == {"roles": 2, "characters": 192}
    assert np.bincount(data.keys).tolist() == [24, 1]
    assert np.bincount(data.test_keys).tolist() == [6, 1]
    ids = torch.from_numpy(encode(text).astype(np.int64))
    for sample in (0, 7, 23):
        assert torch.equal(data.train.inputs[sample].long(), ids[sample : sample + 80])
        assert data.train.targets[sample] == ids[sample + 80]
    assert data.test.targets[:6].tolist() == ids[104:110].tolist()
    assert (data.classes, data.vocabulary, data.shape) == (80, 80, (80,))

    population = partition(data, name="natural", clients=None, seed=0)
    assert population.sizes.tolist() == [24, 1]
    assert own_tests(data, population).sizes.tolist() == [6, 1]


def test_stride_thins_the_samples(folder):
    _write(folder, {"PLAY|A": "x" * 181, "PLAY|SHORT": "x" * 130})
    data = load("shakespeare", stride=50)
    assert (len(data.train), len(data.test), data.key_names) == (2, 1, ("PLAY|A",))
    assert _refusal("shakespeare", stride=0) == "data.stride is 0; give at least 1 character."


def test_a_file_of_roles_that_is_none_is_named(folder):
    path = _write(folder, {"A": 3})
    assert (
        _refusal("shakespeare")
        == f"{path} is damaged: it is not a JSON object that maps roles to texts{FIX}"
    )
    path.write_text('{"A": "half')
    assert _refusal("shakespeare").startswith(
        f"{path} is damaged: it is not valid JSON (Unterminated string"
    )
    _write(folder, {"A": "short"})
    assert _refusal("shakespeare") == "data set 'shakespeare' has no training samples."


PLAYS = """*** START ***

      Contents

               THE FIRST PLAY

               A SECOND PLAY

               A POEM


THE FIRST PLAY

DRAMATIS PERSONAE.
  DUKE, a duke

ACT I. SCENE 1.

Enter DUKE and FIRST LORD

  DUKE. If music be the food, [Aside] play on;
    Give me excess.
  FIRST LORD. Will you go hunt, my lord?

                 Enter CURIO
                 with a dog

    And now?
  DUKE. What, Curio?
{directions}

A SECOND PLAY:

SCENE II.

DUKE.
Who’s there?

MRS. PAGE.
Nay, answer me. [_Exit._]
Stand.

{directions}

A POEM

DUKE. Not a speech, as nobody enters.

*** END OF THE PROJECT ***
LICENCE. Not a speech.
"""


def test_plays_are_cut_by_speaker():
    text = PLAYS.replace("{directions}", "\nExeunt\n" * 20)
    assert roles(text) == {
        "THE FIRST PLAY|DUKE": "If music be the food, play on;\nGive me excess.\nWhat, Curio?",
        "THE FIRST PLAY|FIRST LORD": "Will you go hunt, my lord?\nAnd now?",
        "A SECOND PLAY|DUKE": "Who’s there?",
        "A SECOND PLAY|MRS. PAGE": "Nay, answer me.\nStand.",
    }


def test_the_complete_works_serve_where_there_is_no_file_of_roles(folder):
    path = folder / "shakespeare/100-0.txt"
    path.write_text(
        PLAYS.replace("{directions}", "\nExeunt\n" * 20).replace(
            "Give me excess.", "Give me excess. " * 20
        )
    )
    data = load("shakespeare", stride=5)
    assert data.key_names == ("THE FIRST PLAY|DUKE",)
    assert set(data.hashes) == {"shakespeare/100-0.txt"}
    path.write_text("no plays here")
    assert _refusal("shakespeare") == f"{path} is damaged: it contains no plays{FIX}"
