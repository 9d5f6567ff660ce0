"""Damaged and hostile files are refused in one sentence, whatever their bytes are; what is read is
whole.
"""

import random
import signal
import warnings

import files_fuzz
import pytest
import torch

from kairosfl.data import load
from kairosfl.data.tables import LARGEST
from kairosfl.errors import UserError

SECONDS = 60  # for one file: what takes that long would take for ever


def stopped(number, frame):
    raise AssertionError("a file was still being read after a minute")


@pytest.fixture
def patience():
    """Ends a test that hangs."""
    before = signal.signal(signal.SIGALRM, stopped)
    yield lambda: signal.alarm(SECONDS)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def check(seed, kind, place):
    """Read a client's random file, and perhaps a good client's; returns whether it was refused."""
    draw = random.Random(f"{kind} {seed}")
    file = files_fuzz.client(draw, files_fuzz.KINDS[kind], place, "ann")
    if draw.random() < 0.3 and kind != "pictures":
        (place / "bob.csv").write_text("a,label\n1,0\n2,1\n3,0\n")
    options = draw.choice(files_fuzz.OPTIONS)
    try:
        data = load("folder", path=place, **options)
    except UserError as error:
        sentence = str(error)
        assert "\n" not in sentence.replace(str(file), ""), sentence
        assert len(sentence) < 1000 + 2 * len(str(file)), sentence
        return True
    for samples in (data.train, data.test):
        assert torch.isfinite(samples.inputs).all()
        assert samples.inputs.abs().max() <= LARGEST if samples.inputs.numel() else True
        assert len(samples.inputs) == len(samples.targets)
    return False


def check_all(kind, seeds, tmp_path, patience):
    """Read many files, some of which are refused and some of which are not."""
    if kind == "parquet":
        pytest.importorskip("pyarrow")
    refused = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of Pillow, about damaged files
        warnings.simplefilter("error", RuntimeWarning)  # such as a number that does not fit
        for seed in seeds:
            patience()
            refused += check(seed, kind, tmp_path / str(seed))
    assert 0 < refused < len(seeds)


@pytest.mark.parametrize("kind", files_fuzz.KINDS)
def test_a_few_damaged_files(kind, tmp_path, patience):
    check_all(kind, range(25), tmp_path, patience)


@pytest.mark.slow
@pytest.mark.parametrize("kind", files_fuzz.KINDS)
def test_many_damaged_files(kind, tmp_path, patience):
    check_all(kind, range(25, 525), tmp_path, patience)
