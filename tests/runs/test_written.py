"""What was read can be written, and read back: before a run trains, not when it is resumed."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.runs.combinations import MOST
from kairosfl.runs.config import (
    GIVEN,
    RunConfig,
    TaskFile,
    change,
    dump,
    read,
    resolve,
    tables,
    text_of,
)
from kairosfl.runs.sweep import expand

DIGITS = "9" * 5000
HEX = "0x" + "f" * 5000  # which Python reads, but does not print


@pytest.mark.parametrize(
    "value",
    [
        [{"a": 1}, {"b": "x"}],
        [[{"a b": [{}]}]],
        "a\x7fb",
        {"k\x7f": '"\\\n\t\x01'},
        [float("inf"), 1e300],
        [],
    ],
)
def test_what_options_hold_is_written_as_it_was_read(value: Any) -> None:
    nested = {"task": {"options": {"layers": value}}}
    assert tomllib.loads(dump(nested)) == nested


def test_a_configuration_that_would_not_read_back_is_refused_before_training() -> None:
    config = RunConfig(task=TaskFile(file="t.py", options={"layers": [object()]}))
    with pytest.raises(
        UserError, match=r"cannot be written to config\.toml, so the run could not be resumed"
    ):
        text_of(tables(config))
    config = RunConfig(task=TaskFile(file="caf\udce9.py"))
    with pytest.raises(UserError, match=r"task = .* cannot be written"):
        text_of(tables(config))


def test_nan_in_an_option_reads_back() -> None:
    config = resolve({"task": {"file": "t.py", "options": {"x": float("nan"), "y": [1, 2]}}})
    assert "x = nan" in text_of(tables(config))
    assert config.data.name.startswith(GIVEN)


@pytest.mark.parametrize("value", ["2020-01-01", "[07:32:00]", "1979-05-27T07:32:00Z"])
def test_a_date_is_refused_with_the_text_to_write(value: str) -> None:
    with pytest.raises(
        UserError, match=r"task\.options\.o = .* is a date or time; write it as text"
    ):
        change({}, [f"task.options.o={value}"])


def test_bytes_that_are_not_utf8_are_refused() -> None:
    with pytest.raises(UserError, match=r"data\.path = .* is not valid UTF-8"):
        change({}, ["data.path='caf\udce9'"])


@pytest.mark.parametrize("value", [DIGITS, HEX])
def test_a_number_of_thousands_of_digits_is_one_sentence(value: str, tmp_path: Path) -> None:
    for text in (f"seed={value}", f"train.rounds=[{value}]", f"task.options.a={{b={value}}}"):
        with pytest.raises(UserError, match="too large"):
            resolve(change({}, [text]))
    file = tmp_path / "run.toml"
    for text in (
        f"seed = {value}",
        f"[sweep]\nseed = [{value}]",
        f"[tune]\ntrain.lr = [1, {value}]",
    ):
        file.write_text(text)
        with pytest.raises(UserError, match="too large"):
            change(read(file), [])


@pytest.mark.parametrize(
    "options", [f"mu={HEX}", f"mu=[{HEX}]", f"mu={HEX}+x", f"mu={DIGITS}", f"mu=-{HEX}"]
)
def test_an_algorithm_with_such_a_number_is_one_sentence(options: str) -> None:
    with pytest.raises(UserError, match=r"too large|not a number|not a value|cannot be read"):
        parse(f"fedprox({options})")


def test_a_message_about_long_input_is_short() -> None:
    for algorithm in ("+".join(["fedprox"] * 10_000), "x" * 100_000):
        with pytest.raises(UserError) as refused:
            parse(algorithm)
        assert len(str(refused.value)) < 800
    with pytest.raises(UserError) as refused:
        resolve({"data": {"name": "x" * 100_000}})
    message = str(refused.value)
    assert len(message) < 800
    assert message.startswith("data.name = 'xxx")
    assert message.endswith("tinyimagenet")


def test_a_sweep_of_too_many_runs_is_refused_at_once() -> None:
    lists = {"seed": list(range(1000)), "train.lr": [0.1 + i for i in range(1000)]}
    with pytest.raises(UserError, match=rf"asks for 1,000,000 runs, and {MOST:,} are the most"):
        expand({"sweep": lists})


def test_equal_runs_are_refused_and_equal_names_numbered() -> None:
    with pytest.raises(UserError, match="asks twice for the same run"):
        expand({"sweep": {"algorithm": ["fedprox(mu=0.01)", "fedprox(mu=0.010)"]}})
    long = [f"fedprox(mu=0.{'0' * 60}{digit})" for digit in "123"]
    names = [member.name for member in expand({"sweep": {"algorithm": long}})]
    assert names == [names[0], f"{names[0]}~2", f"{names[0]}~3"]
