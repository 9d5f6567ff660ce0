"""The documentation is true: its Python runs, its TOML resolves, its commands exist, its tables
name every key.

Blocks of one page share a namespace and a temporary folder, as if the page were typed in from top
to bottom. A fenced block titled like a file is written into that folder under its title. Python
that is not to be run has the comment `<!-- not run: reason -->` before it; what stands below `<!--
prints -->` is what the block before it prints.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib.util
import io
import json
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import zoo
from kairosfl import presets
from kairosfl.cli import app
from kairosfl.core.fields import Briefs, Reports, table
from kairosfl.core.recipe import OPTIMIZERS, SCHEDULES
from kairosfl.data import DATASETS
from kairosfl.models import MODELS
from kairosfl.runs.config import ENGINES, PRECISIONS, SECTIONS, RunConfig, change, read
from kairosfl.runs.sweep import expand
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.partitions import PARTITIONS, iid
from kairosfl.tune.space import defaults, overridden

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Pages whose commands are run, in short.
PERFORMED = {
    "five-minutes.md",
    "index.md",
    "own-rule.md",
    "own-csv.md",
    "own-data.md",
    "sweeps.md",
    "task-files.md",
    "examples/hospitals.md",
    "examples/images.md",
    "examples/lora.md",
    "tune.md",
}
# Beyond what the tests are installed with: where one is missing, its block is compiled and not run.
OPTIONAL = {"datasets", "flwr", "flwr_datasets", "ray"}
# Where one of these is missing, a page that imports it is left out.
FOREIGN = {"PIL", "peft", "timm", "transformers"}
COMMAND = typer.main.get_command(app)
KEYS = {"algorithm", "seed", "sweep", "tune", *SECTIONS}

FENCE = re.compile(
    r"^(?P<comment><!--[^\n]*-->\n+)?"
    r"(?P<indent> *)```(?P<language>\w*)(?P<rest>[^\n]*)\n(?P<text>.*?)^(?P=indent)``` *$",
    re.MULTILINE | re.DOTALL,
)
INDENTED = re.compile(r"(?:\A|\n)\n(?P<text>(?: {4}[^\n]*\n+)+)")
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^\n]*\S) -->")
PRINTS = re.compile(r"\n*<!-- prints -->\n\n(?P<text>(?: {4}[^\n]*\n+)+)")


@dataclass(frozen=True)
class Block:
    """One block of code on a page; those that are indented instead of fenced have no language."""

    at: int
    language: str
    text: str
    title: str = ""
    left_out: bool = False
    prints: str | None = None


def blocks(text: str) -> list[Block]:
    """The blocks of code on a page, from top to bottom."""
    found = []
    for match in FENCE.finditer(text):
        title = re.search(r'title="([^"]+\.\w+)"', match["rest"])
        indent = len(match["indent"])
        code = "".join(line[indent:] or "\n" for line in match["text"].splitlines(keepends=True))
        left_out = bool(NOT_RUN.search(match["comment"] or ""))
        shown = PRINTS.match(text, match.end())
        prints = textwrap.dedent(shown["text"]).strip() if shown else None
        found.append(
            Block(
                match.start(), match["language"], code, title[1] if title else "", left_out, prints
            )
        )
    rest = FENCE.sub(lambda match: re.sub(r"[^\n]", "#", match[0]), text)
    for match in INDENTED.finditer(rest):
        found.append(
            Block(match.start("text"), "", re.sub(r"^ {4}", "", match["text"], flags=re.MULTILINE))
        )
    return sorted(found, key=lambda block: block.at)


def commands(text: str) -> list[list[str]]:
    """The arguments of every `kairosfl ...` on a page, in blocks and in running text."""
    lines = []
    for block in blocks(text):
        if block.language != "python":
            lines += re.findall(
                r"^(?:\$ )?(?:python -m )?kairosfl (.*)$",
                block.text.replace("\\\n", " "),
                re.MULTILINE,
            )
    prose = FENCE.sub("", text)
    lines += re.findall(r"`(?:python -m )?kairosfl ([^`]+)`", INDENTED.sub("\n", prose))
    return [shlex.split(line, comments=True) for line in lines]


def name(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


pages = pytest.mark.parametrize("page", PAGES, ids=name)
LONG = ("examples/images.md",)  # part of `make test-extended`


@pytest.mark.filterwarnings("ignore:.* is not the official file")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=[pytest.mark.slow] * (name(page) in LONG)) for page in PAGES],
    ids=name,
)
def test_the_page_can_be_typed_in_from_top_to_bottom(page: Path, desk: types.ModuleType) -> None:
    desk.__dict__.update(taken_for_granted(name(page)))
    for package in FOREIGN & set(
        re.findall(r"^(?:from|import) (\w+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    ):
        if zoo.library(package) is None:
            pytest.skip(f"needs {package}")
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.title:
            Path(block.title).write_text(block.text, encoding="utf-8")
        if block.language == "python" and not block.left_out and not block.title:
            perform(block, desk, page)
        elif block.language == "sh" and name(page) in PERFORMED:
            type_in(block.text)
        elif (tables := configuration(block)) is not None:
            search = tables.pop("tune", {})
            config = expand(tables)[0].config
            overridden(defaults(config, (3, 32, 32)), search, config)


def perform(block: Block, module: types.ModuleType, page: Path) -> None:
    shown = page.read_text(encoding="utf-8")
    # Where what is printed is not compared, two rounds show that the code runs.
    text = (
        block.text
        if "<!-- prints -->" in shown
        else re.sub(r"\brounds=\d+", "rounds=2", block.text)
    )
    tree = ast.parse(text)
    wanted = set(re.findall(r"^(?:from|import) (\w+)", block.text, re.MULTILINE))
    if any(importlib.util.find_spec(package) is None for package in wanted & OPTIONAL):
        return
    ast.increment_lineno(tree, shown[: block.at].count("\n") + 1)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, str(page), "exec"), module.__dict__)
    if block.prints is not None:
        assert printed.getvalue().strip() == block.prints


def type_in(lines: str) -> None:
    """Run the commands `kairosfl ...` and `python file.py`, the runs shortened."""
    for file in re.findall(r"^python (\w+\.py)$", lines, re.MULTILINE):
        runpy.run_path(file, run_name="__main__")
    short = {
        "run": ["--set", "train.rounds=2"],
        "sweep": ["--set", "train.rounds=2", "--set", "sweep.seed=[0]"],
    }
    short["tune"] = ["--set", "train.rounds=2", "--trials", "6"]
    for arguments in commands(f"```sh\n{lines}```\n"):
        result = CliRunner().invoke(app, [*arguments, *short.get(arguments[0], [])])
        assert result.exit_code == 0, f"kairosfl {shlex.join(arguments)}: {result.output}"


def configuration(block: Block) -> dict[str, Any] | None:
    """The tables of a block that is a configuration, or a part of one."""
    if block.language == "toml":
        tables = tomllib.loads(block.text)
        return (
            {key: value for key, value in tables.items() if key != "deploy"}
            if tables.keys() & KEYS
            else None
        )
    if not block.language and re.match(rf"\[({'|'.join(KEYS)})\]|(algorithm|seed) =", block.text):
        return tomllib.loads(block.text)
    return None


@pages
def test_what_is_not_run_says_why(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    said = NOT_RUN.findall(text)
    assert (
        len(said)
        == len(re.findall(r"<!-- *not run", text))
        == sum(block.left_out for block in blocks(text))
    )


@pages
def test_commands_and_their_options_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    written = {
        each.title: tomllib.loads(each.text)
        for each in blocks(text)
        if each.title.endswith(".toml")
    }
    for arguments in commands(text):
        command: Any = COMMAND
        rest = list(arguments)
        while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
            name = rest.pop(0)
            assert name in command.list_commands(None), (
                f"kairosfl {shlex.join(arguments)}: there is no command {name!r}"
            )
            command = command.get_command(None, name)
        if rest in ([], ["--version"], ["--help"]):  # running text may name a command alone
            continue
        given = command.make_context(
            command.name, rest
        ).params  # raises for an unknown option or a wrong value
        data = {"name": given["name"]} if "partition" in given else {}
        file = str(given.get("file"))
        named = (
            read(Path(file))
            if file.endswith(".py")
            else presets.read(file)
            if file in presets.names()
            else {}
        )
        if task := written.get(file, {}).get("task"):  # whose options --set may change
            named = {"task": task}
        data = {"clients": 0} | named.get("data", {}) | data
        expand(change({**named, "data": data}, given.get("changes") or ()))


@pages
def test_links_lead_somewhere(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = re.findall(r"\]\((?!https?:)([^)#\s]+)", text) + re.findall(
        r'(?:src|srcset|href)="(?!https?:)([^"#]+)"', text
    )
    for target in targets:
        assert (page.parent / target).exists(), f"{name(page)} links to {target}"


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_the_configuration_page_has_every_key_with_its_default(section: str) -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    part = next(
        p
        for p in text.split("\n## ")[1:]
        if p.startswith(f"`[{section}]`" if section else "Top level")
    )
    rows = dict(re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", part, re.MULTILINE))
    cls = SECTIONS[section] if section else RunConfig
    fields = {
        field.name: field.default
        for field in dataclasses.fields(cls)
        if field.name not in {"options", *SECTIONS}
    }
    if not section:
        fields["algorithm"] = "fedavg"  # what the empty sum prints as
    assert list(rows) == list(fields)
    assert {key: tomllib.loads(f"value = {text}")["value"] for key, text in rows.items()} == {
        key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()
    }


def test_the_configuration_page_has_every_choice() -> None:
    text = (DOCS / "configuration.md").read_text(encoding="utf-8")
    for choice in (*ENGINES, *PRECISIONS, *OPTIMIZERS, *SCHEDULES, *PARTITIONS, *DATASETS, *MODELS):
        assert f'`"{choice}"`' in text, choice


def test_configurations_beside_the_pages_resolve() -> None:
    files = sorted((DOCS / "assets").glob("*.toml"))
    assert files
    for file in files:
        assert expand(tomllib.loads(file.read_text(encoding="utf-8")))


@pytest.mark.parametrize("record", [Briefs, Reports])
def test_the_page_of_fields_is_the_list(record: type) -> None:
    text = (DOCS / "fields.md").read_text(encoding="utf-8")
    part = next(p for p in text.split("\n## ")[1:] if p.startswith(f"{record.__name__}\n"))
    shown = "".join(line for line in part.splitlines(keepends=True) if line.startswith("|"))
    assert shown == table(record), (
        "paste kairosfl.core.fields.table(Briefs) and table(Reports) into docs/fields.md"
    )


def test_the_picture_has_the_eight_stages_in_order() -> None:
    for picture in ("round.svg", "round-narrow.svg"):
        words = re.findall(
            r'class="stage"[^>]*>([a-z]+)<', (DOCS / "assets" / picture).read_text(encoding="utf-8")
        )
        assert words == [
            "select",
            "brief",
            "train",
            "receive",
            "weigh",
            "combine",
            "observe",
            "step",
        ]


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two thousand pictures of noise in the form of CIFAR-10: the examples run without a download."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "cifar-10-batches-py").mkdir()
    draw = np.random.default_rng(0)
    for batch in (
        "data_batch_1",
        "data_batch_2",
        "data_batch_3",
        "data_batch_4",
        "data_batch_5",
        "test_batch",
    ):
        pictures = draw.integers(0, 256, (400, 3072), dtype=np.uint8)
        content = {b"data": pictures, b"labels": draw.integers(0, 10, 400).tolist()}
        (folder / "cifar-10-batches-py" / batch).write_bytes(pickle.dumps(content, 2))
    names = {b"label_names": [f"class {label}".encode() for label in range(10)]}
    (folder / "cifar-10-batches-py" / "batches.meta").write_bytes(pickle.dumps(names, 2))
    return folder


@pytest.fixture
def desk(
    data_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[types.ModuleType]:
    """Where a page is typed in: an empty folder and an empty module; afterwards all is as it was."""
    models, datasets = dict(MODELS), dict(DATASETS)
    module = types.ModuleType("__main__")
    monkeypatch.setitem(sys.modules, "__main__", module)
    monkeypatch.setenv("KAIROSFL_DATA", str(data_folder))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    yield module
    torch.set_num_threads(1)  # a run chooses its own
    for registry, before in ((MODELS, models), (DATASETS, datasets)):
        registry.clear()
        registry.update(before)  # type: ignore[arg-type]


def taken_for_granted(page: str) -> dict[str, Any]:
    """What the reader of a page is taken to have: data of one's own."""
    draw = torch.Generator().manual_seed(0)
    inputs, targets = torch.rand(60, 3, 8, 8, generator=draw), torch.arange(60) % 10
    if page == "models.md":
        dataset = DataSet(
            "mine", Samples(inputs[:, 0], targets), Samples(inputs[:, 0], targets), classes=10
        )
        return {"dataset": dataset, "clients": iid(targets.numpy(), 4, 0)}
    if page == "data.md":
        rows = [
            {
                "image": image.numpy(),
                "label": int(label),
                "writer_id": int(label) % 3,
                "text": "a text",
            }
            for image, label in zip(inputs, targets, strict=True)
        ]
        return {
            "train": TensorDataset(inputs, targets),
            "test": TensorDataset(inputs, targets),
            "sets": {"train": Table(rows), "test": Table(rows)},
            "my_tokens": lambda text: [ord(letter) for letter in text],
            **{"x_train": inputs, "y_train": targets, "x_test": inputs, "y_test": targets},
            **{"mine": np.arange(20), "yours": np.arange(20, 40), "theirs": np.arange(40, 60)},
        }
    return {}


class Table:
    """As much of a Hugging Face data set as is used."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows, self.column_names = rows, list(rows[0])
        self.features = dict.fromkeys(rows[0])

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows]


def test_every_equation_is_understood_by_katex() -> None:
    """Those of fences called `math`, with the script that draws them."""
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    found = {
        f"{page.relative_to(DOCS)}, equation {number}": text
        for page in sorted(DOCS.rglob("*.md"))
        for number, text in enumerate(
            re.findall(r"^```math\n(.*?)^```$", page.read_text(), re.M | re.S), 1
        )
    }
    script = (
        "const katex = require(process.argv[1]);"
        "for (const [place, tex] of Object.entries(JSON.parse(require('fs').readFileSync(0, 'utf8')))) {"
        "  try { katex.renderToString(tex, { displayMode: true, strict: 'error' }); }"
        "  catch (error) { console.log(place + ': ' + error.message); } }"
    )
    command = [node, "-e", script, str(DOCS / "assets" / "katex" / "katex.min.js")]
    done = subprocess.run(
        command, input=json.dumps(found), capture_output=True, text=True, check=True, timeout=60
    )
    assert len(found) >= 30
    assert done.stdout == ""


def test_every_rule_has_its_paper_and_every_entry_its_braces() -> None:
    text = (DOCS / "papers.md").read_text()
    pages = {page.stem for page in (DOCS / "rules").glob("*.md")} - {"index", "compositions"}
    assert pages == set(re.findall(r"\(rules/(\w+)\.md\)", text))
    table, entries = text.split("```bibtex\n")
    keys = re.findall(r"^@\w+\{(\w+),$", entries, re.M)
    assert len(keys) == len(set(keys)) == len(re.findall(r"\]\(https://", table))
    assert entries.count("{") == entries.count("}")
