"""Random configurations and random damage to run folders: one sentence or a result, never a
traceback.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import tomllib
from pathlib import Path
from typing import Any

import fuzz
import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.rules import RULES
from kairosfl.runs import experiment
from kairosfl.runs.config import SECTIONS, RunConfig, dump, resolve, tables
from kairosfl.runs.sweep import expand

FEW, MANY = 30, 500
FOLDERS = 200


def _configurations() -> Any:
    st = pytest.importorskip("hypothesis.strategies")
    number = st.one_of(
        st.integers(-3, 50),
        st.integers(),
        st.floats(),
        st.sampled_from([0, -1, 1e300, -1e300, 2**31, 2**63, 2**70, math.nan, math.inf, 1e-320]),
    )
    word = st.one_of(
        st.text(max_size=8),
        st.sampled_from(
            [
                "",
                "auto",
                "cpu",
                "meta",
                "cuda:99",
                "a\0b",
                "x" * 300,
                "../..",
                "\ud800",
                "python:x",
                "-1",
            ]
        ),
    )
    algorithm = st.one_of(
        st.sampled_from(
            [
                *RULES,
                "fedavg",
                "fedcl.released()",
                "os.system",
                "fedprox(mu=1e999)",
                "fedprox +",
                "(((",
            ]
        ),
        st.lists(st.sampled_from(sorted(RULES)), min_size=1, max_size=3).map(" + ".join),
        st.builds("{}({}={})".format, st.sampled_from(sorted(RULES)), word, number),
        word,
    )
    plain = st.one_of(number, word, st.booleans(), st.none())
    value = st.recursive(
        plain, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(word, inner))
    )
    sections = {}
    for name, cls in SECTIONS.items():
        keys = [key for key in cls.__dataclass_fields__ if key != "options"]
        sections[name] = st.dictionaries(st.one_of(st.sampled_from(keys), word), value, max_size=3)
    return st.fixed_dictionaries(
        {},
        optional={
            **{name: st.one_of(section, value) for name, section in sections.items()},
            "algorithm": st.one_of(algorithm, st.lists(algorithm, max_size=2), value),
            "seed": value,
            "sweep": value,
        },
    )


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*register_random")  # frozen objects have no known referrers
def test_many_configurations_are_read_or_refused() -> None:
    """By hypothesis, which tries others every time, and prints the one that fails."""
    hypothesis = pytest.importorskip("hypothesis")

    @hypothesis.settings(
        max_examples=MANY,
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(_configurations())
    def fuzzed(nested: dict[str, Any]) -> None:
        try:
            config = resolve(nested)
        except UserError:
            return
        assert isinstance(config, RunConfig)
        assert resolve(tomllib.loads(dump(tables(config)))) == config

    fuzzed()


def _check_surface(surface: str, seeds: range, folder: Path) -> None:
    if surface == "deploy":
        pytest.importorskip("flwr")
    outcomes = {fuzz.outcome(surface, seed, folder) for seed in seeds}
    assert outcomes == {"read", "refused"}  # or these inputs would test little


@pytest.mark.parametrize("surface", fuzz.SURFACES)
def test_some_inputs_are_read_or_refused(surface: str, tmp_path: Path) -> None:
    _check_surface(surface, range(FEW), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("surface", fuzz.SURFACES)
def test_many_inputs_are_read_or_refused(surface: str, tmp_path: Path) -> None:
    _check_surface(surface, range(FEW, MANY), tmp_path)


def test_inputs_do_not_depend_on_what_was_imported() -> None:
    drawn = [fuzz.configuration(random.Random("x 1"), 3) for _ in range(2)]
    assert repr(drawn[0]) == repr(drawn[1])


@pytest.mark.parametrize(
    ("tables", "refused"),
    [
        ({"algorithm": "-" * 400 + "1"}, "cannot be read; write it like"),
        ({"algorithm": "+".join(["fedprox"] * 3000)}, "cannot be read; write it like"),
        ({"algorithm": f"fedprox(mu={10**400})"}, "fedprox: mu = 1000"),
        ({"algorithm": [0]}, "the entry 0 has no rule"),
    ],
)
def test_what_fuzzing_found(tables: dict[str, Any], refused: str) -> None:
    with pytest.raises(UserError, match=refused):
        resolve(tables)


def test_a_sentence_is_one_line_without_control_characters(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[train]\n"a\\u001b[31m\\nb" = 1\n')
    result = CliRunner().invoke(
        app, ["run", str(tmp_path / "config.toml"), "--out", str(tmp_path / "run")]
    )
    assert result.exit_code == 2
    assert result.output.startswith("kairosfl: Unknown key train.a\\x1b[31m\\nb; ")
    assert len(result.output.splitlines()) == 1


def test_sections_that_are_not_tables() -> None:
    with pytest.raises(
        UserError, match=r"^sweep = 5 must be a section: write \[sweep\] and its lists below\.$"
    ):
        expand({"sweep": 5})
    deploy = pytest.importorskip("flwr") and pytest.importorskip("kairosfl.deploy")
    with pytest.raises(
        UserError, match=r"^deploy = 'x' must be a section: write \[deploy\] and its keys below\.$"
    ):
        deploy.Deploy.from_table("x")


@pytest.mark.parametrize("section", ["data", "model"])
def test_a_name_that_is_a_list(section: str) -> None:
    with pytest.raises(UserError, match=f"{section}.name = "):
        resolve({section: {"name": ["x"]}})


TABLES = {
    "algorithm": "fedavgm + fedcl",
    "data": {"clients": 6},
    "model": {"hidden": [4]},
    "train": {"rounds": 4, "cohort": 2},
    "run": {"engine": "loop", "checkpoint_every": 1, "device": "cpu"},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A finished run, and one that was stopped after its third round."""
    home = tmp_path_factory.mktemp("good")

    def stop(row: dict[str, Any]) -> None:
        if row["round"] == 3:
            raise KeyboardInterrupt

    experiment.start(resolve(TABLES), home / "finished")
    with pytest.raises(KeyboardInterrupt):
        experiment.start(resolve(TABLES), home / "stopped", notify=stop)
    return {"finished": home / "finished", "stopped": home / "stopped"}


def _damage(path: Path, how: str, draw: random.Random) -> None:
    content = path.read_bytes()
    if how == "truncate":
        path.write_bytes(content[: draw.randrange(len(content) + 1)])
    elif how == "flip" and content:
        place = draw.randrange(len(content))
        path.write_bytes(
            content[:place]
            + bytes([content[place] ^ (1 << draw.randrange(8))])
            + content[place + 1 :]
        )
    elif how == "wrong type":
        path.write_bytes(
            draw.choice([b"null", b"[1]", b'"x"', b"7", b"{}", b"seed = [1]", b"\n" * 9])
        )
    elif how == "not UTF-8":
        path.write_bytes(b"\xff\xfe\x00" + content)
    else:
        path.unlink()
        if how == "directory":
            path.mkdir()
        elif how == "link":
            path.symlink_to(draw.choice(["nowhere", path.name, "/dev/null", "."]))


HOW = ("truncate", "flip", "delete", "wrong type", "not UTF-8", "directory", "link")


def _files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.is_symlink()
    }


def _check_folder(good: Path, place: Path, seed: int) -> None:
    draw = random.Random(seed)
    folder = shutil.copytree(good, place)
    victims = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    ]
    victim, how = draw.choice(victims), HOW[seed % len(HOW)]
    _damage(victim, how, draw)
    told = f"seed {seed}: {how} {victim.relative_to(folder)}"
    before = _files(folder)
    outcome = 0
    for words in (
        ["report", "--out", str(place.parent / "page.html")],
        ["compare"],
        ["resume", "--quiet"],
    ):
        result = CliRunner().invoke(app, [words[0], str(folder), *words[1:]])
        fault = result.exception
        assert fault is None or isinstance(fault, SystemExit), f"{told}: {words[0]}: {fault!r}"
        assert result.exit_code in (0, 2), f"{told}: {words[0]}: {result.output}"
        assert "Traceback" not in result.output, told
        outcome = result.exit_code
    after = {name.removesuffix(".broken"): content for name, content in _files(folder).items()}
    assert any(name.startswith("checkpoint") and name.endswith(".json") for name in after), (
        told
    )  # old ones may go
    for name, content in before.items():
        assert name in after or name.startswith("checkpoint"), f"{told}: {name} is gone"
        if outcome == 2:
            assert after.get(name) == content or name in ("log.txt", ".lock"), (
                f"{told}: {name} was changed"
            )
        elif name.endswith(
            ".jsonl"
        ):  # resuming cuts off, and then repeats, what came after the last good checkpoint
            lost = content.count(b"\n") - after[name].count(b"\n")
            assert lost <= 2 or str(victim.relative_to(folder)) == name, (
                f"{told}: {name} lost {lost} lines"
            )


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "clients.jsonl", "log.txt", "run.json", "partition.json"]
)
def test_a_directory_in_place_of_a_file_is_found_before_anything_is_changed(
    folders: dict[str, Path], name: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["stopped"], tmp_path / "run")
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    if name == "partition.json":  # written only where nothing was trained yet
        shutil.rmtree(folder / "checkpoint")
    before = _files(folder)
    result = CliRunner().invoke(app, ["resume", "--quiet", str(folder)])
    assert result.exit_code == 2
    assert f"{name} is a directory, where a file is needed; move it away." in " ".join(
        result.output.split()
    )
    assert _files(folder) | {".lock": b""} == before | {".lock": b""}


def test_an_old_checkpoint_that_is_a_directory_is_left_alone(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = shutil.copytree(folders["stopped"], tmp_path / "run")
    for old in ("checkpoint-000001.json", "state-000001.safetensors"):
        (folder / "checkpoint" / old).unlink()
        (folder / "checkpoint" / old).mkdir()
    result = CliRunner().invoke(app, ["resume", "--quiet", str(folder)])
    assert result.exit_code == 0, result.output
    assert (folder / "checkpoint" / "checkpoint-000001.json").is_dir()
    assert json.loads((folder / "summary.json").read_text())["rounds"] == 4


@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_some_damaged_folders(folders: dict[str, Path], state: str, tmp_path: Path) -> None:
    for seed in range(len(HOW)):
        _check_folder(folders[state], tmp_path / str(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("state", ["finished", "stopped"])
def test_many_damaged_folders(folders: dict[str, Path], state: str, tmp_path: Path) -> None:
    for seed in range(100, 100 + FOLDERS // 2):
        _check_folder(folders[state], tmp_path / str(seed), seed)


def test_the_run_of_a_fuzzed_folder_is_whole(folders: dict[str, Path]) -> None:
    assert json.loads((folders["finished"] / "summary.json").read_text())["rounds"] == 4
