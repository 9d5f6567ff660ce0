"""What a rule says about itself, and what is said of rules that say it as they did until 0.2."""

from __future__ import annotations

import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest

from kairosfl.core.refusals import FACTS, TABLE
from kairosfl.core.rule import Algorithm, Rule, about
from kairosfl.core.traits import WORDS, Traits
from kairosfl.errors import UserError
from kairosfl.rules import RULES, FedAvgM, Privacy, parse

OLD = Path(__file__).parents[1] / "old"


def test_the_defaults_say_what_is_safe() -> None:
    class Silent(Rule):
        pass

    assert about(Silent()) == Traits()
    assert Traits().reads == "clients"
    assert not Traits().sums
    assert not Traits().late


@pytest.mark.parametrize("name", list(RULES.own))
def test_every_rule_of_kairos_says_it_by_traits(name: str) -> None:
    rule = RULES.own[name]()
    assert isinstance(rule, Rule)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert about(rule) == rule.traits()


def test_who_reads_signals_follows_periods() -> None:
    assert Traits(reads="signals").periods
    assert Traits(reads="signals").measures
    assert not Traits().measures
    assert Traits(needs=frozenset({"loss"})).measures
    assert not Traits(needs=frozenset({"mass"})).measures


def test_unknown_words_are_refused() -> None:
    with pytest.raises(UserError, match="traits: changes has 'drifts'; did you mean 'drift'"):
        Traits(changes=frozenset({"drifts"}))
    with pytest.raises(UserError, match="traits: needs has 'scores_after'; did you mean 'score_a"):
        Traits(needs=frozenset({"scores_after"}))
    assert Traits(changes=frozenset({"mine.word"})).changes == {"mine.word"}


def test_every_word_of_the_table_is_known_and_every_known_word_is_in_it() -> None:
    used = frozenset[str]().union(*(row.one | row.other for row in TABLE))
    assert used == WORDS.keys() | FACTS.keys()


def test_rules_of_others_are_refused_by_what_they_say() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Corrects(Rule):
        def traits(self) -> Traits:
            return Traits(changes=frozenset({"drift", "mine.rows"}))

    @dataclass(frozen=True, kw_only=True)
    class Alone(Rule):
        def traits(self) -> Traits:
            reason = "both write my rows; leave one of them out"
            return Traits(refuses={"mine.rows": reason})

    with pytest.raises(UserError, match="both correct the same drift"):
        parse("scaffold") + Corrects()
    for pair in ((Alone(), Corrects()), (Corrects(), Alone())):
        with pytest.raises(UserError, match="both write my rows; leave one of them out"):
            Algorithm(pair)


# Rules as they were written until 0.2.


def test_a_stored_rule_is_read_with_one_warning_that_names_each_trait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(OLD))
    monkeypatch.delitem(sys.modules, "cautious_rules", raising=False)
    import cautious_rules

    with pytest.warns(FutureWarning) as caught:
        traits = [about(cautious_rules.Cautious(share=share)) for share in (0.1, 0.2, 0.3)]
    assert traits == [Traits(adapts=True)] * 3
    (warning,) = caught
    said = str(warning.message)
    for words in (
        "kind has become the trait adapts",
        "sees_idle has become the trait idle",
        "reads_rounds has become the trait horizon",
        'needs_mass has become the trait needs (needs_mass = True is needs={"mass"})',
    ):
        assert words in said


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_attribute_becomes_its_trait() -> None:
    @dataclass(frozen=True, kw_only=True)
    class All(Rule):
        kind = "adaptive"
        last: ClassVar[bool] = True
        server_optimizer = True
        needs_mass = True
        needs_features = True
        sees_idle = True
        private = True
        own_weights = True
        constraint = True

        @property
        def reads(self) -> str:
            return "direction"

        @property
        def reads_periods(self) -> bool:
            return True

        @property
        def uniform(self) -> bool:
            return True

        @property
        def reads_rounds(self) -> bool:
            return True

    assert about(All()) == Traits(
        when="last",
        adapts=True,
        server_optimizer=True,
        needs=frozenset({"mass", "features"}),
        idle=True,
        private=True,
        weighs="lambda",
        constraint=True,
        reads="direction",
        periods=True,
        uniform=True,
        horizon=True,
    )

    class Base(Rule):
        last = True

    assert about(Base()) == Traits(when="late")


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_old_rule_that_builds_on_one_of_ours_changes_what_it_names() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clipped(FedAvgM):
        needs_mass = True

    ours = about(FedAvgM())
    said = about(Clipped())
    assert said.needs == {"mass"}
    assert (said.server_optimizer, said.reads, said.changes) == (True, "direction", ours.changes)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_old_rule_refuses_others_by_itself_and_reads_what_they_say() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Shy(Rule):
        def conflicts_with(self, other: Rule) -> str | None:
            if other.uniform and other.kind == "base" and not other.private:
                return "it does not like equal weights"
            return None

    Shy() + parse("fedavgm")
    for text in ("scaffold", "fedmut"):
        with pytest.raises(UserError, match="it does not like equal weights"):
            parse(text) + Shy()
    assert Privacy.private is True  # of the class, too
    assert FedAvgM.private is False


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_old_server_optimizer_with_momentum_is_refused_beside_local_momentum() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Momentum(Rule):
        server_optimizer = True
        beta: float = 0.5

    with pytest.raises(UserError, match="both reuse the previous directions"):
        parse("fedcm") + Momentum()
    parse("fedcm") + Momentum(beta=0.0)
