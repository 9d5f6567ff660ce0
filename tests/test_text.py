"""Algorithms as text: there and back, as a TOML list, equality, and a sentence for every mistake."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from kairosfl.core.rule import Algorithm, Rule
from kairosfl.errors import UserError
from kairosfl.rules import RULES, FedAvg, FedAvgM, FedCL, FedProx, parse
from kairosfl.runs.config import resolve


class Plain(Rule):
    """Has forgotten to be a dataclass."""


@dataclass(frozen=True, kw_only=True)
class Asks(Rule):
    size: int


@dataclass(frozen=True, kw_only=True)
class Mine(Rule):
    size: int = 5
    ids: tuple[int, ...] = ()


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_is_its_own_text(name: str) -> None:
    algorithm = parse(name)
    assert str(algorithm) == name
    assert len(algorithm.rules) == 1
    assert parse(str(algorithm)) == algorithm
    assert parse(f"{name}()") == algorithm
    assert hash(algorithm) == hash(parse(name))


@pytest.mark.parametrize(
    "text",
    [
        "fedprox(mu=0.3)",
        "fedprox(mu=1e-07) + fedavgm(beta=0.7, lr=0.5, nesterov=True)",
        "scaffold(lr=0.5, weights='samples') + fedcl(cap=0.5, once=True) + alt(threshold='fixed') + pa3fed(beta=1.5)",
        "fedmut(alpha=2.0, bound=7)",
        "fedams(option=2)",
    ],
)
def test_options_survive_the_round_trip(text: str) -> None:
    assert str(parse(text)) == text
    assert parse(str(parse(text))) == parse(text)


def test_what_is_written_differently_is_the_same() -> None:
    assert (
        parse("fedprox(mu=0.01)")
        == parse("fedprox")
        == parse(" fedavg + fedprox ")
        == Algorithm((FedProx(),))
    )
    assert parse("fedavg") == parse("fedavg()") == FedAvg() == Algorithm()
    assert str(FedAvg()) == "fedavg"
    assert parse("fedavgm(nesterov=true)") == parse("fedavgm(nesterov=True)")
    assert parse("fedprox(mu=1)") == parse("fedprox(mu=1.0)") == parse("fedprox(mu=1e+0)")
    assert parse("fedcl.released()") == parse("fedcl.released") == Algorithm((FedCL.released(),))
    assert parse("fedcl.released(cap=0.5)") == Algorithm((replace(FedCL.released(), cap=0.5),))
    assert parse(str(parse("fedcl.released()"))) == parse("fedcl.released()")
    assert parse("fedprox + fedavgm") != parse("fedavgm + fedprox")
    assert parse("fedprox(mu=0.1)") != parse("fedprox(mu=0.2)")
    assert (
        FedProx() + FedAvgM() == Algorithm((FedProx(),)) + FedAvgM() == parse("fedprox + fedavgm")
    )
    assert FedAvg() + FedProx() == FedProx() + FedAvg() == parse("fedprox")


def test_a_toml_list() -> None:
    document = """
    algorithm = [
        "fedprox(mu=0.3)",
        {rule = "fedcl.released", cap = 0.5},
        {rule = "pa3fed", beta = 1, always = true},
        "fedavg",
        {rule = "fedavg"},
    ]
    """
    made = parse(tomllib.loads(document)["algorithm"])
    assert made == parse(
        "fedprox(mu=0.3) + fedcl.released(cap=0.5) + pa3fed(beta=1.0, always=True)"
    )
    assert parse([]) == parse([{"rule": "fedavg"}]) == FedAvg()


def test_a_rule_of_ones_own_by_its_dotted_name() -> None:
    made = parse("test_text.Mine(size=3, ids=(1, 2))")
    assert made == Algorithm((Mine(size=3, ids=(1, 2)),))


def test_text_imports_only_what_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "outsider.py").write_text(
        "from dataclasses import dataclass\nfrom kairosfl import Rule\n(__import__('pathlib').Path(__file__).parent"
        " / 'imported').touch()\n@dataclass(frozen=True, kw_only=True)\nclass Mild(Rule):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outsider", raising=False)
    for text in ("outsider.Mild", [{"rule": "outsider.Mild"}], "fedprox + outsider.Mild()"):
        with pytest.raises(
            UserError, match=r'does not import unless it is allowed; write allow = \["outs'
        ):
            parse(text, allow=["outside", "outsider.inner"])
    with pytest.raises(UserError, match="does not import"):
        resolve({"run": {"detector": "outsider.Mild"}})
    assert not (tmp_path / "imported").exists()
    config = resolve({"algorithm": "outsider.Mild", "run": {"allow": ["outsider"]}})
    assert str(config.algorithm) == "outsider.Mild"
    assert (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "text",
    ["a\0b", "(" * 5000 + ")" * 5000, "fedprox(mu=" + "-" * 3000 + "1)", "fedprox(mu={[]: 1})"],
)
def test_what_python_itself_cannot_read(text: str) -> None:
    with pytest.raises(UserError):
        parse(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedprxo", "There is no rule 'fedprxo'; did you mean 'fedprox'?"),
        ("FedProx", "There is no rule 'FedProx'; did you mean 'fedprox'?"),
        ("fedprox(nu=1)", "fedprox has no option 'nu'; did you mean 'mu'?"),
        ("fedprox(0.1)", "rule = 'fedprox(0.1)': name every option, as in 'fedprox(mu=0.01)'."),
        (
            "fedprox(mu=0.1",
            "rule = 'fedprox(mu=0.1' cannot be read; write it like 'fedprox(mu=0.01) + fedavgm'.",
        ),
        ("fedprox(mu='a')", "fedprox: mu = 'a' is not a number; its default is 0.01."),
        ("fedprox(mu=true)", "fedprox: mu = True is not a number; its default is 0.01."),
        (
            "fedavgm(nesterov=1)",
            "fedavgm: nesterov = 1 is not true or false; its default is False.",
        ),
        ("fedmut(bound=2.5)", "fedmut: bound = 2.5 is not a whole number; its default is 50."),
        (
            "alt(threshold=up)",
            "rule = 'alt(threshold=up)': 'up' is not a value; use a number, a 'word' or true/false.",
        ),
        ("fedprox(mu=-0.5)", "fedprox: mu = -0.5 is not allowed; use 0 or more."),
        ("fedprox(mu=1, mu=2)", "rule = 'fedprox(mu=1, mu=2)': mu appears twice; name it once."),
        ("fedprox + fedprox(mu=1)", "fedprox appears twice in the algorithm; name it once."),
        ("fedcl.relaesed()", "fedcl has no preset 'relaesed'; did you mean 'released'?"),
        ("fedcl.released(cup=1)", "fedcl.released has no option 'cup'; did you mean 'cap'?"),
        (
            "fedcl.released(cap='x')",
            "fedcl.released: cap = 'x' is not a number; its default is 1.0.",
        ),
        (
            "nowhere.Rule",
            "The rule 'nowhere.Rule' is in the module 'nowhere', which text does not import unless it is",
        ),
        (
            "kairosfl.no.Rule",
            "The rule 'kairosfl.no.Rule' cannot be imported (No module named 'kairosfl.no'); is it on",
        ),
        (
            "test_text.Plain",
            "test_text.Plain is not a dataclass; write @dataclass(frozen=True, kw_only=True) above its class.",
        ),
        (
            "test_text.Asks",
            "test_text.Asks needs size: write test_text.Asks(size=...), or give it a default.",
        ),
        ("os.path", "'os.path' is not a rule; give the dotted name of a class derived from it."),
        ("kairosfl.detectors.FGN", "fgn is not a rule; give the name of one."),
        ("fedprox(mu=1e999)", "fedprox: mu = inf is not allowed; use a finite number."),
        (
            [{"rule": "fedprox", "mu": float("nan")}],
            "fedprox: mu = nan is not allowed; use 0 or more.",
        ),
        (
            "fedprox(mu=inf)",
            "rule = 'fedprox(mu=inf)': 'inf' is not a value; use a number, a 'word' or true/false.",
        ),
        ([{"mu": 1}], "algorithm: the entry {'mu': 1} has no rule; write {rule = 'fedprox', ...}."),
        ([0], "algorithm: the entry 0 has no rule; write {rule = 'fedprox', ...}."),
        (
            [["fedprox"]],
            "algorithm: the entry ['fedprox'] has no rule; write {rule = 'fedprox', ...}.",
        ),
        ([{"rule": "fedavg", "mu": 1}], "fedavg has no option 'mu'; it has none."),
        (
            [{"rule": "kairosfl.detectors.FGN"}],
            "kairosfl.detectors.FGN is not a rule; give the name of one.",
        ),
        (
            "scaffold + vrlsgd",
            "scaffold and vrlsgd cannot be combined: both correct the same drift, so together they correct it twice.",
        ),
    ],
)
def test_mistakes_are_answered_with_a_sentence(text: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text)
    assert str(caught.value).startswith(sentence)
