"""kairosfl tune keeps what the file demands, judges private runs as what they are, and never
exceeds its budget.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from kairosfl import UserError
from kairosfl.cli import app
from kairosfl.rules import Privacy, accounting, parse
from kairosfl.runs.checkpoint import states
from kairosfl.runs.config import resolve
from kairosfl.runs.files import append_json, read_lines
from kairosfl.runs.keys import updated
from kairosfl.tune import pricing
from kairosfl.tune import search as searching
from kairosfl.tune.budget import Budget
from kairosfl.tune.outcomes import measure
from kairosfl.tune.page import page
from kairosfl.tune.pools import Pools
from kairosfl.tune.price import price
from kairosfl.tune.result import result
from kairosfl.tune.search import Search
from kairosfl.tune.space import defaults, overridden

pytest.importorskip("optuna")
PRIVACY = "privacy(epsilon=4.0, delta=1e-05, clip=0.5)"
TABLES = {
    "data": {"clients": 12},
    "model": {"hidden": [8]},
    "train": {"rounds": 30, "cohort": 3, "lr": 0.05},
    "run": {"engine": "batched", "device": "cpu"},
}
SHORT = TABLES | {"train": {"rounds": 4, "cohort": 3, "lr": 0.05}}


class Quiet:
    """Remembers what is said; `after` rounds it is interrupted, and every round takes a second of
    `clock`.
    """

    def __init__(self, after=None):
        self.lines, self.after, self.rounds = [], after, 0

    def say(self, line):
        self.lines.append(line)

    def update(self, part, words):
        self.rounds += 1
        if self.rounds == self.after:
            raise KeyboardInterrupt


def search(out, budget, tables=TABLES, show=None, parallel=4):
    made = Search(tables, out, budget, show or Quiet(), parallel=parallel)
    made.run()
    return made


def space(algorithm, table=None, **run):
    config = resolve(
        updated(
            TABLES, {"algorithm": algorithm, **{f"run.{key}": value for key, value in run.items()}}
        )
    )
    return overridden(defaults(config, ()), table or {}, config)


def sent(folder, name=("bytes_up", "bytes_down")):
    rows = [row for path in Path(folder).rglob("metrics.jsonl") for row in read_lines(path)]
    return sum(sum(row[each] for each in name) for row in rows)


@pytest.mark.parametrize(
    ("algorithm", "plain", "adam"),
    [
        (f"fedavgm + {PRIVACY}", PRIVACY, f"fedadam + {PRIVACY}"),
        ("localprivacy + fedavgm", "localprivacy", "fedadam + localprivacy"),
        ("fedavgm + limits", "limits", "fedadam + limits"),
        ("median", "median", "fedadam + median"),
        ("krum + limits", "krum + limits", "fedadam + krum + limits"),
        ("normclipping", "normclipping", "fedadam + normclipping"),
        (
            "attack + fedavgm + bucketing + krum",
            "attack + bucketing + krum",
            "attack + fedadam + bucketing + krum",
        ),
        ("fedavgm + budget", "budget", "fedadam + budget"),
        ("fedavgm", "fedavg", "fedadam"),
    ],
)
def test_what_the_file_demands_is_in_every_proposal(algorithm, plain, adam):
    searched = space(algorithm)
    assert searched.algorithm.values[0] == plain
    assert adam in searched.algorithm.values
    demanded = {rule.name() for rule in parse(plain).rules}
    for text in searched.algorithm.values:
        for more in searched.add.values:
            assert demanded <= {rule.name() for rule in parse(searched.combined(text, more)).rules}


def test_rules_that_are_added_come_before_those_that_are_demanded():
    searched = space("attack + limits", {"add": ["fednova"]})
    assert (
        searched.combined("attack + fedadam + limits", "fednova")
        == "attack + fedadam + fednova + limits"
    )


@pytest.mark.parametrize(
    ("algorithm", "table", "sentence"),
    [
        (
            f"fedavgm + {PRIVACY}",
            {"algorithm": ["scaffold"]},
            "'scaffold' cannot be tried with what the file's alg",
        ),
        (
            f"fedavgm + {PRIVACY}",
            {"add": ["median"]},
            "tune.add: 'median' cannot be tried with what the file's alg",
        ),
        (
            f"fedavgm + {PRIVACY}",
            {"algorithm": ["fedcl"]},
            "without noise; use a detector that adds noise",
        ),
        (
            f"fedavgm + {PRIVACY}",
            {"algorithm": ["privacy(epsilon=9.0)"]},
            r"keeps the file's privacy\(epsilon=4.0",
        ),
        (
            "fedavgm",
            {"algorithm": [f"fedavgm + {PRIVACY}"]},
            "would compete with trials that are not private",
        ),
        (
            "fedavgm",
            {"add": ["", "localprivacy"]},
            "would compete with trials that are not private",
        ),
        (
            "median",
            {"algorithm": ["krum"]},
            "'krum' cannot be tried with what the file's algorithm demands, median",
        ),
        (
            PRIVACY,
            {"privacy": {"epsilon": [4.0, 8.0]}},
            "tune.privacy.epsilon is a promise to the clients",
        ),
        (
            "localprivacy",
            {"localprivacy": {"delta": [0.1]}},
            "tune.localprivacy.delta is a promise to the clients",
        ),
    ],
)
def test_what_changes_a_demand_is_refused_in_one_sentence(algorithm, table, sentence):
    with pytest.raises(UserError, match=sentence) as raised:
        space(algorithm, table)
    assert "\n" not in str(raised.value)


def test_how_a_demanded_rule_acts_can_be_searched():
    searched = space("privacy", {"privacy": {"clip": [0.1, 1.0]}})
    assert "privacy.clip" in searched.options


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    tables = SHORT | {"algorithm": f"fedavgm + {PRIVACY}"}
    return search(tmp_path_factory.mktemp("private") / "s", Budget("trials", 10), tables)


def test_a_search_of_a_private_file_is_private(private):
    found = result(private)
    for trial in found.trials:
        rules = parse(trial.settings["algorithm"]).rules
        assert Privacy(epsilon=4.0, delta=1e-5, clip=0.5) in rules
    assert found.trials[0].settings["algorithm"] == f"fedavgm + {PRIVACY}"
    assert found.trials[1].settings["algorithm"] == PRIVACY
    assert found.trials[1].plain
    assert not found.trials[0].plain
    assert found.plain() is not None
    found.write()
    assert "privacy(epsilon=4.0" in (private.out / "best.toml").read_text()
    assert {outcome.state for outcome in found.ended.values()} == {"complete"}


def test_what_a_private_search_costs_is_composed_and_said(private):
    found = result(private)
    folders = [path.parent for path in private.out.glob("*-rounds/*/config.toml")]
    spent = []
    for folder in folders:
        rules = resolve_folder(folder).algorithm.rules
        number = next(i for i, rule in enumerate(rules) if isinstance(rule, Privacy))
        spent.append(states(folder)[number]["spent"].numpy())
    epsilon = accounting.running(np.sum(spent, axis=0), 1e-5)
    (cost,) = found.costs
    assert cost.epsilon == pytest.approx(epsilon)
    assert cost.epsilon > 4
    assert found.numbers()["epsilon"] == cost.epsilon
    sentence = (
        "privacy: the 10 runs of this search trained on the same clients and together cost "
        f"epsilon = {epsilon:.3g}"
    )
    assert any(line.startswith(sentence) for line in found.sentences())
    assert sentence in page(found)


def resolve_folder(folder):
    from kairosfl.runs.folder import Folder

    return Folder(folder).config()


def test_private_trials_have_noise_of_their_own_among_the_same_clients(private):
    configs = [resolve_folder(path.parent) for path in private.out.glob("*-rounds/*/config.toml")]
    seeds = {config.seed for config in configs}
    assert len(seeds) == len(configs)
    assert 0 not in seeds  # that of the file, with which best.toml runs
    assert {config.data.partition_seed for config in configs} == {0}
    open_trials = Search(SHORT, private.out.parent / "open", Budget("trials", 6), Quiet())
    assert open_trials.trial_config({}, 4, 3).seed == 0


def test_the_reports_of_local_privacy_add_up(tmp_path):
    made = search(
        tmp_path / "s", Budget("trials", 6), SHORT | {"algorithm": "localprivacy(epsilon=8.0)"}
    )
    (cost,) = result(made).costs
    assert cost.name == "local_epsilon"
    assert cost.epsilon > 8
    assert "together cost a client at most epsilon" in result(made).sentences()[-1]


def test_a_search_without_privacy_says_nothing_of_it(tmp_path):
    made = search(tmp_path / "s", Budget("trials", 6), SHORT)
    assert result(made).costs == []


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_whose_privacy_budget_is_spent_has_finished(tmp_path, engine):
    tables = SHORT | {
        "algorithm": "privacy(noise=1.2, epsilon=1.6, delta=1e-3)",
        "data": {"clients": 20},
        "train": {"rounds": 9, "cohort": 4},
        "run": {"engine": engine, "device": "cpu"},
    }
    show = Quiet()
    made = search(tmp_path / "s", Budget("trials", 6), tables, show)
    first = made.ended[0, 9]
    assert first.rounds < 9
    assert (first.state, first.score is not None) == ("complete", True)
    assert "does not pay for one more round" in first.reason
    assert not any("diverged" in line for line in show.lines)
    assert f"{first.rounds} of 9 rounds" in show.lines[1]
    assert " of 9 rounds" in result(made).sentences()[0]


def test_a_last_round_in_which_nobody_was_drawn_is_not_divergence(tmp_path):
    cost = {"bytes_up": 1, "bytes_down": 2, "steps": 3, "seconds": 0.5}
    for number in range(1, 11):
        drawn = 0 if number > 8 else 2
        row = {"round": number, "accuracy": number / 100, "cohort": drawn, "reported": drawn}
        append_json(tmp_path / "metrics.jsonl", row | cost)
    outcome = measure(0, 10, tmp_path)
    assert (outcome.state, outcome.score, outcome.rounds) == ("complete", pytest.approx(0.08), 10)


def test_a_last_round_whose_clients_all_failed_is_divergence(tmp_path):
    cost = {"bytes_up": 1, "bytes_down": 2, "steps": 3, "seconds": 0.5}
    for number in range(1, 11):
        row = {"round": number, "accuracy": 0.5, "cohort": 2, "reported": 0 if number == 10 else 2}
        append_json(tmp_path / "metrics.jsonl", row | cost)
    outcome = measure(0, 10, tmp_path)
    assert (outcome.state, outcome.reason) == ("diverged", "the last round had no usable report")


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "scaffold", "moon", "fedcm", "alt(reference='previous')", "vrlsgd"]
)
def test_a_price_is_what_the_algorithm_sends(tmp_path, algorithm):
    from kairosfl.runs import experiment
    from kairosfl.runs.prepare import build_task

    config = resolve(
        updated(SHORT, {"algorithm": algorithm, "run.engine": "loop", "train.rounds": 6})
    )
    task = build_task(config)
    summary = experiment.start(config, tmp_path / "r")
    used = summary["bytes_up"] + summary["bytes_down"]
    most = price(config, task).most
    assert used <= most
    assert used > (0.6 if algorithm in ("moon", "alt(reference='previous')") else 0.9) * most


@pytest.mark.parametrize(
    ("algorithms", "megabytes"),
    [(["scaffold"], 4.2), (["fedcl(cap=0.5)", "scaffold + fedcl(cap=0.5)"], 6.0), ([PRIVACY], 6.0)],
)
def test_a_budget_of_bytes_is_kept_by_algorithms_that_send_more_than_others(
    tmp_path, algorithms, megabytes
):
    tables = TABLES | {"algorithm": PRIVACY}
    if algorithms != [PRIVACY]:
        tables = TABLES | {"tune": {"algorithm": algorithms, "add": ""}}
    show = Quiet()
    made = search(tmp_path / "s", Budget("bytes", megabytes * 1e6), tables, show, parallel=16)
    assert sent(made.out) == sum(
        outcome.bytes for outcome in made.ended.values()
    )  # no run was cut off
    assert 0.4 * megabytes * 1e6 < sent(made.out) <= megabytes * 1e6
    assert {rounds for _, rounds in made.ended} == {10, 30}
    more = search(tmp_path / "s", Budget("bytes", 1.5 * megabytes * 1e6), tables, parallel=16)
    assert len(more.ended) > len(made.ended)
    assert sent(more.out) <= 1.5 * megabytes * 1e6


def test_a_budget_of_bytes_is_judged_by_the_dearest_algorithm(tmp_path):
    tables = TABLES | {"tune": {"algorithm": ["scaffold"], "add": ""}}
    with pytest.raises(
        UserError, match="--bytes 3 is too small for trials of 30 rounds: give at least 4, or lower"
    ):
        search(tmp_path / "s", Budget("bytes", 3e6), tables)


def test_a_run_that_sends_more_than_its_price_stops_before_the_budget_is_exceeded(
    tmp_path, monkeypatch
):
    from kairosfl.tune.price import Price

    monkeypatch.setattr(pricing, "price", lambda config, task: Price(1.0, 1.0, varies=False))
    show = Quiet()
    made = search(tmp_path / "s", Budget("bytes", 5e5), SHORT, show)
    assert sent(made.out) <= 5e5
    assert made.unpaid
    assert any("the budget does not pay for one more" in line for line in show.lines)


@pytest.mark.parametrize("kind", ["trials", "rounds"])
def test_budgets_of_trials_and_of_rounds_are_kept_by_resumed_searches(tmp_path, kind):
    small, large = {"trials": (8, 11), "rounds": (200, 290)}[kind]

    def used(made):
        first = made.stages[0]
        if kind == "trials":
            return sum(rounds == first for _, rounds in made.ended)
        return sum(1 for path in made.out.rglob("metrics.jsonl") for _ in read_lines(path))

    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "s", Budget(kind, small), show=Quiet(45))
    made = search(tmp_path / "s", Budget(kind, small))
    before = used(made)
    assert 0.6 * small < before <= small
    again = search(tmp_path / "s", Budget(kind, small))
    assert again.ended.keys() == made.ended.keys()
    more = search(tmp_path / "s", Budget(kind, large))
    assert before < used(more) <= large


def test_a_smaller_budget_does_not_go_on_with_trials_that_it_does_not_pay_for(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        search(tmp_path / "s", Budget("trials", 30), show=Quiet(70), parallel=8)
    made = search(tmp_path / "s", Budget("trials", 8), parallel=8)
    assert sum(rounds == 10 for _, rounds in made.ended) == 8


def test_a_budget_of_minutes_is_not_exceeded(tmp_path, monkeypatch):
    seconds = [0.0]
    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=lambda: seconds[0]))

    class Ticking(Quiet):
        def update(self, part, words):
            seconds[0] += 1.0

    tables = updated(TABLES, {"run.engine": "loop"})
    made = search(tmp_path / "s", Budget("minutes", 150.0), tables, Ticking())
    before = made.clock()
    assert 100 <= before <= 150
    assert made.ended
    more = search(tmp_path / "s", Budget("minutes", 400.0), tables, Ticking())
    assert before < more.clock() <= 400
    assert len(more.ended) > len(made.ended)


def test_a_search_whose_trials_all_fail_ends_with_the_reason(tmp_path, monkeypatch):
    def refused(self, run):
        raise UserError("The clients are gone.")

    monkeypatch.setattr(Pools, "pool", refused)
    made = search(tmp_path / "s", Budget("rounds", 400))  # a trial that failed uses none of them
    assert len(made.ended) == 16 + 3
    with pytest.raises(
        UserError, match=r"No trial in .* has finished; the first ended with: The clients are gone."
    ):
        result(made).write()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--trials", "9" * 20],
            "--trials 99999999999999999999 is too many to end; give at most 100,000.",
        ),
        (
            ["--rounds", "9" * 20],
            "--rounds 99999999999999999999 is more than a search can use; give at most",
        ),
        (
            ["--minutes", "1e300"],
            "--minutes 1e+300 is more than a search can use; give at most 10000000.",
        ),
    ],
)
def test_a_budget_that_no_search_can_use_is_refused(words, sentence, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text("[train]\nrounds = 30\n")
    said = CliRunner().invoke(app, ["tune", "a.toml", *words])
    assert said.exit_code == 2
    assert said.stderr.startswith(f"kairosfl: {sentence}")
