"""`docs/architecture.md` is true in what a test can check: names, paths, tables, words, files."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import kairosfl
from kairosfl.core.answers import ANSWERS
from kairosfl.core.fields import Briefs, Reports, fields
from kairosfl.core.layout import Layout
from kairosfl.core.rule import Detector, Memory, Plan, Round, Rule
from kairosfl.core.run import Run, Setup
from kairosfl.engines.protocol import Engine
from kairosfl.rules import parse
from kairosfl.tasks.columns import COLUMNS
from kairosfl.tasks.vector import layout_of

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kairosfl"
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
STAGES = "select → brief → train → receive → weigh → combine → observe → step"
BESIDE = ("record", "verdict")  # asked for numbers and a sentence; nothing flows through them


def section(title: str) -> str:
    """What is under a heading of the page."""
    _, found, rest = PAGE.partition(f"\n## {title}\n")
    assert found, title
    return rest.partition("\n## ")[0]


def cells(text: str, column: int = 0) -> list[str]:
    """One column of the tables in a text, without their heads."""
    rows = re.findall(r"^\|(.+)\|$", text, re.MULTILINE)
    table = [[cell.strip() for cell in row.split(" | ")] for row in rows]
    rules = [i for i, row in enumerate(table) if set("".join(row)) <= set("-| ")]
    heads = {i - 1 for i in rules} | set(rules)
    return [row[column] for i, row in enumerate(table) if i not in heads]


def ticked(text: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`\n]+)`", text)


# --- the rule ---


def test_the_table_of_hooks_is_the_class_rule() -> None:
    """Every hook with its arguments, in the order of the class; `record` and `verdict` are below."""
    shown = {}
    for cell in cells(section("The rule")):
        (call,) = ticked(cell)
        name, arguments = re.fullmatch(r"(\w+)\((.*)\) → .+", call).groups()  # type: ignore[union-attr]
        shown[name] = arguments.split(", ")
    hooks = {}
    for name, member in vars(Rule).items():
        parameters = list(inspect.signature(member).parameters) if callable(member) else []
        if "now" in parameters and name not in BESIDE:
            hooks[name] = parameters[1:]

    assert shown == hooks
    assert set(hooks) | set(BESIDE) == set(ANSWERS)
    assert f"{words(len(hooks))} hooks" in section("The rule")
    for name in BESIDE:
        assert f"`{name}(memory, now)`" in section("The rule")


def words(number: int) -> str:
    names = "Zero One Two Three Four Five Six Seven Eight Nine Ten Eleven Twelve Thirteen Fourteen"
    return names.split()[number]


def test_the_stages_are_those_that_the_round_calls_in_this_order() -> None:
    """The order in which a rule that notes its calls is called, in a round of a run."""
    noted: list[str] = []

    def noting(name: str) -> Callable[..., object]:
        def hook(self: Rule, *arguments: object) -> object:
            noted.append(name)
            return getattr(Rule, name)(self, *arguments)

        return hook

    hooks = ("select", "brief", "receive", "weigh", "combine", "observe", "step", "rebase")
    members = {name: noting(name) for name in hooks}
    cls = type("Noting", (Rule,), members | {"__module__": __name__})
    rule = dataclasses.dataclass(frozen=True, kw_only=True)(cls)()
    run_of(rule)

    assert f"**{STAGES}**" in PAGE
    stages = [name for name in STAGES.split(" → ") if name != "train"]
    assert noted == [*stages, "rebase"]


def run_of(rule: Rule, **settings: Any) -> kairosfl.History:
    """One round of four clients, of whom three train."""
    draw = np.random.default_rng(0)
    samples = draw.normal(size=(24, 3)).astype(np.float32), np.arange(24) % 2
    terms: dict[str, Any] = {
        "rounds": 1,
        "clients": 4,
        "cohort": 3,
        "partition": "iid",
        "engine": "loop",
    }
    return kairosfl.simulate(
        nn.Linear(3, 2), samples, samples, algorithm=rule, progress=False, **terms | settings
    )


def test_what_the_page_says_of_plans_is_in_the_plan() -> None:
    text = section("The rule")
    (sentence,) = re.findall(r"how the server waits for them\n?\s*\(([^;]+);", text)
    said = set(ticked(sentence))
    beside = {"size", "eligible", "ids", "first", "measure"}
    assert said == {field.name for field in dataclasses.fields(Plan)} - beside
    defaults = Plan(3)
    assert defaults.waiting() == ()


def test_what_the_page_says_of_rounds_and_memory_exists() -> None:
    (sentence,) = re.findall(r"`memory` holds (.+?)\. `now`", section("The rule"), re.DOTALL)
    members = {field.name for field in dataclasses.fields(Memory)}
    assert {name for name in ticked(sentence) if "." not in name} <= members


# --- briefs ---


def test_the_table_of_corrections() -> None:
    """What each algorithm writes into scale, pull and push: of μ, α and 1 − α, with numbers."""
    rows = {}
    text = section("The brief: local training as data")
    for name, scale, pull, push in zip(*(cells(text, i) for i in range(4)), strict=True):
        rows[name] = (scale, pull, push)
    written = {
        "FedProx": ("fedprox(mu=0.3)", {"μ": 0.3}),
        "SCAFFOLD": ("scaffold", {}),
        "VRL-SGD": ("vrlsgd", {}),
        "FedDyn": ("feddyn(alpha=0.3)", {"α": 0.3}),
        "FedCM": ("fedcm(alpha=0.3)", {"α": 0.3}),
    }
    plain = [name.lower() for name in re.findall(r"\w+", "FedNova FedAvgM FedAdam")]

    for name, (text_of_rule, values) in written.items():
        briefs = second_briefs(text_of_rule)
        scale, pull, push = rows[name]
        assert briefs.scale.tolist() == [float(values.get(scale, scale))] * 3, name
        assert briefs.pull.tolist() == [float(values.get(pull, pull))] * 3, name
        assert (briefs.push is None) == (push == "–"), name
    for rule in plain:
        briefs = second_briefs(rule)
        assert (briefs.scale.tolist(), briefs.pull.tolist()) == ([1.0] * 3, [0.0] * 3)
        assert briefs.push is None


def second_briefs(text: str) -> Briefs:
    """The briefs of the second round, when there is something to correct by."""
    layout = layout_of(nn.Linear(3, 2))
    recipe = kairosfl.Recipe(rounds=2, cohort=3)
    setup = Setup(parse(text), recipe, clients=4, layout=layout)
    course = kairosfl.rounds(Run.start(torch.zeros(8), setup, seed=0), setup)
    _, briefs = next(course)
    assert briefs is not None
    ones = torch.ones(3, dtype=torch.int64)
    reports = Reports(
        ids=briefs.ids,
        n=4 * ones,
        steps=ones,
        epochs=ones.double(),
        delta=torch.ones(3, 8),
        loss=ones.double(),
        grad_sq=ones.double(),
        seconds=ones.double(),
    )
    _, briefs = course.send(reports)
    assert briefs is not None
    return briefs


def test_what_briefs_can_ask_are_fields_of_the_list() -> None:
    names = {entry.name for entry in fields(Briefs)}
    asked = [
        name.partition(" ")[0]
        for cell in cells(section("One list of fields"), 1)
        for name in ticked(cell)
    ]
    for name in asked:
        if name.endswith("…"):
            assert any(known.startswith(name[:-1]) for known in names), name
        elif "." not in name:
            assert name in names, name


def test_what_batched_follows_one_client_after_another() -> None:
    """Of what the table lists, that with `alone` which the engine does not stack."""
    from kairosfl.engines.batched.engine import STACKED

    alone = {entry.name for entry in fields(Briefs) if entry.alone}
    apart = {name.partition("_")[0] for name in alone - STACKED}
    assert apart == {"second", "mixed", "mix", "candidates", "base", "rank"} & apart
    assert {"second", "candidates", "base", "rank"} <= apart


def test_every_field_is_used_by_the_trainer_and_by_batched() -> None:
    """A field that `batched` does not read would be left out without a word, as clients are stacked:
    it reads it, or the field is marked `alone`, so that its clients train one after another.
    """
    trainer = sources(SOURCE / "client")
    engine = sources(SOURCE / "engines" / "batched")
    derived = {"epochs", "seed", "n"}
    for entry in fields(Briefs):
        if entry.local or entry.name in ("counted", "owed", "owed_round", "next_lr"):
            continue  # of the server and the wire
        name = entry.row
        assert re.search(rf"\b{name}\b", trainer) or name in derived, f"client/ never reads {name}"
        if not entry.alone:
            read = re.search(rf"\b({entry.name}|{name})\b", engine)
            assert read, f"engine batched never reads {entry.name}: use it there, or mark it alone"


def sources(folder: Path) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))


# --- runs, engines, detectors ---


def test_the_state_of_a_run() -> None:
    """Every field of `Run` is in the sixth sentence, but for what its next round does not need."""
    said = {
        "rounds done": "round",
        "the time": "time",
        "`x`": "x",
        "the base": "base",
        "a state": "states",
        "a table of client rows": "tables",
        "what clients keep": "kept",
        "which of their reports counted last": "counted",
        "orders in flight": "flight",
    }
    sentence = PAGE.partition("\n6. ")[2].partition("\n7. ")[0].replace("\n   ", " ")
    for phrase in said:
        assert phrase in sentence, phrase
    others = {"seed", "signals", "idle", "record", "finished", "writes"}
    assert {field.name for field in dataclasses.fields(Run)} == set(said.values()) | others


def test_the_members_of_an_engine() -> None:
    text = section("A run is a coroutine")
    paragraph = next(part for part in text.split("\n\n") if part.startswith("An engine has"))
    said = {name.partition("(")[0] for name in ticked(paragraph)}
    members = {name for name in vars(Engine) if not name.startswith("_")} | set(
        Engine.__annotations__
    )
    assert members <= said
    assert "begin" in said
    count = re.match(r"An engine has (\w+) members", paragraph)
    assert count is not None
    assert count[1] == words(len(members)).lower()


def test_the_members_of_a_detector() -> None:
    text = section("Detectors")
    for name in Detector.__abstractmethods__ | {"client", "measure"}:
        assert f"`{name}" in text, name
    assert {field.name for field in dataclasses.fields(Setup)} >= {"detectors"}
    assert "`Setup(algorithm, recipe, clients, layout, detectors)`" in PAGE
    assert list(inspect.signature(Setup).parameters)[:5] == [
        *("algorithm", "recipe", "clients", "layout", "detectors")
    ]


def test_sums_run_in_the_order_of_client_ids() -> None:
    """Whatever order reports arrive in, the next model is the same to the bit."""
    layout = layout_of(nn.Linear(3, 2))
    setup = Setup(parse("fedavg"), kairosfl.Recipe(rounds=1, cohort=4), clients=4, layout=layout)
    draw = torch.Generator().manual_seed(0)
    delta = torch.randn(4, 8, generator=draw)
    ends = []
    for order in ([0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]):
        course = kairosfl.rounds(Run.start(torch.zeros(8), setup, seed=0), setup)
        _, briefs = next(course)
        assert briefs is not None
        ones = torch.ones(4, dtype=torch.int64)
        reports = Reports(
            ids=briefs.ids[order],
            n=torch.tensor([3, 5, 7, 11])[order],
            steps=ones,
            epochs=ones.double(),
            delta=delta[order],
            loss=ones.double(),
            grad_sq=ones.double(),
            seconds=ones.double(),
        )
        run, _ = course.send(reports)
        ends.append(run.x)
    assert all(torch.equal(end, ends[0]) for end in ends)


# --- the house ---


def test_every_room_is_in_the_layout_and_every_path_in_it_exists() -> None:
    rooms = set()
    for cell in cells(section("Layout")):
        for name in ticked(cell):
            assert (SOURCE / name).exists(), name
            rooms.add(name.rstrip("/"))
    there = {
        path.name
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    unnamed = {"__init__.py", "__main__.py", "errors.py", "names.py", "version.py"}
    others = {name for name in there if re.search(rf"\b{re.escape(name)}", section("Layout"))}
    assert there - unnamed == (rooms | others) & there
    assert not unnamed & rooms


def test_every_file_of_batched_is_in_its_table() -> None:
    text = section("Inside engine `batched`")
    folder = SOURCE / "engines" / "batched"
    for name in re.findall(r"\b(\w+\.py)\b", text):
        inside = (folder / name).exists() or (folder / "kernels" / name).exists()
        assert inside or list(SOURCE.rglob(name)), name
    files = {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    unnamed = sorted(files - set(re.findall(r"\b(\w+\.py)\b", text)))
    assert not unnamed, f"{unnamed} are missing in the table"


def test_paths_of_the_page_exist() -> None:
    for name in ticked(PAGE):
        if re.fullmatch(r"[\w./-]+\.(py|js|css|svg)", name):
            homes = (ROOT, SOURCE, SOURCE / "report" / "assets", SOURCE / "engines" / "batched")
            beside = any((home / name).exists() for home in homes)
            assert beside or list(SOURCE.rglob(name)), name
    for link in re.findall(r"\]\(([\w./-]+)(?:#[\w-]+)?\)", PAGE):
        assert (ROOT / "docs" / link).exists(), link


def test_names_of_attributes_exist() -> None:
    """`now.x`, `Run.kept`, `Briefs.work(n)` and the like."""
    classes = {
        "now": Round,
        "memory": Memory,
        "Run": Run,
        "run": Run,
        "Setup": Setup,
        "Plan": Plan,
        "Rule": Rule,
        "Briefs": Briefs,
        "Cohort": Briefs,
        "layout": Layout,
    }
    for text in ticked(PAGE):
        match = re.match(r"(\w+)\.(\w+)", text)
        if match is None or match[1] not in classes or match[2] in ("json", "py"):
            continue
        cls = classes[match[1]]
        names = set(dir(cls)) | set(inspect.signature(cls).parameters)
        assert match[2] in names, text


# --- the run folder ---


def test_the_run_folder_has_the_files_that_a_run_writes(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_of(parse("fedprox").rules[0], out=folder)
    written = {f"{path.name}/" if path.is_dir() else path.name for path in folder.iterdir()}
    said = {name for cell in cells(section("The run folder")) for name in ticked(cell)}
    at_times = {"choices.json", "log.txt", ".lock"}  # on GPUs; where there is something to say
    assert written | at_times == said


def test_the_columns_of_metrics_are_declared_in_one_place(tmp_path: Path) -> None:
    """What a run writes is declared, but for the task's metrics, by client and otherwise."""
    rows = run_of(parse("fedprox").rules[0], fleet="equal()").metrics
    undeclared = {name for row in rows for name in row} - COLUMNS.keys()
    assert undeclared == {"accuracy", "client_accuracy_mean", "client_accuracy_worst"}


# --- the changelog ---

WHOLE = 60  # more bullets than this under "Unreleased" were written before there was the rule


def test_a_line_of_the_changelog_is_short() -> None:
    """One line for each thing that a user notices; CONTRIBUTING says so."""
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    unreleased = text.partition("\n## Unreleased\n")[2].partition("\n## ")[0]
    bullets = re.split(r"^- ", unreleased, flags=re.MULTILINE)[1:]
    lengths = [len(" ".join(bullet.partition("\n\n")[0].split())) for bullet in bullets]
    if len(bullets) < WHOLE:
        too_long = [bullet[:60] for bullet, n in zip(bullets, lengths, strict=True) if n > 160]
        assert not too_long, f"at most 160 characters: {too_long}"
