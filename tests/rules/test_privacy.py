"""Differential privacy: exact rounds, the account, the end of a budget, and that the noise is
really there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_accounting import own_figure

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, recorded, result, rounds, verdicts
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.core.streams import stream
from kairosfl.core.traits import Traits
from kairosfl.detectors import FGN, Detector, NoisedFGN
from kairosfl.errors import UserError
from kairosfl.rules import RULES, Privacy, accounting, parse
from kairosfl.rules.robust import Guard
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.prepare import prepare
from kairosfl.testing import check_rule

D = 3


@dataclass
class Puppet:
    """Client i reports the update `updates[i]`, or in rounds without reports nothing."""

    updates: np.ndarray
    silent: tuple[int, ...] = ()

    def train(self, briefs: Briefs) -> Reports:
        ids = briefs.ids if briefs.newest not in self.silent else briefs.ids[:0]
        m = len(ids)
        return Reports(
            ids=ids,
            n=1 + ids % 3,
            steps=torch.ones(m, dtype=torch.int64),
            epochs=torch.ones(m).double(),
            delta=torch.from_numpy(self.updates)[ids],
            loss=torch.ones(m).double(),
            grad_sq=1.0 + ids.double() / 10,
            seconds=torch.zeros(m).double(),
        )


@dataclass(frozen=True, kw_only=True)
class Sizes(Rule):
    """A cohort of another size from some round on, for some rounds."""

    size: int
    first: int = 0
    last_one: int = 10**9

    def traits(self) -> Traits:
        return Traits(reads="direction")

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, size=self.size) if self.first <= now.number <= self.last_one else plan


def updates(clients: int, d: int = D) -> np.ndarray:
    return (
        stream(7, "updates").standard_normal((clients, d)) * np.linspace(0.1, 3, clients)[:, None]
    )


def follow(
    algorithm: Algorithm,
    engine: Puppet,
    *,
    cohort: int = 4,
    number: int = 3,
    seed: int = 1,
    detectors: tuple[Detector, ...] = (FGN(),),
) -> tuple[list[Run], Setup]:
    clients, d = engine.updates.shape
    recipe = Recipe(rounds=number, cohort=cohort, lr=0.5)
    setup = Setup(algorithm, recipe, clients, Layout((Entry("w", (d,), 0),)), detectors)
    start = Run.start(torch.zeros(d, dtype=torch.float64), setup, seed=seed)
    return list(drive(rounds(start, setup), engine)), setup  # type: ignore[arg-type]


def drawn(size: float, clients: int, round: int, seed: int = 1) -> np.ndarray:
    """The cohort, by the documented stream."""
    return np.flatnonzero(stream(seed, "privacy cohort", round).random(clients) < size / clients)


def noise(round: int, d: int = D, seed: int = 1) -> np.ndarray:
    return stream(seed, "privacy update", round).standard_normal(d)


def clipped(rows: np.ndarray, clip: float) -> np.ndarray:
    return rows * np.minimum(1, clip / np.linalg.norm(rows, axis=1, keepdims=True))


def test_three_rounds_exactly() -> None:
    rows, x = updates(10), np.zeros(D)
    runs, _ = follow(Algorithm((Privacy(noise=0.8, clip=0.6, epsilon=100.0),)), Puppet(rows))
    for round, run in enumerate(runs):
        ids = drawn(4, 10, round)
        x = x + (clipped(rows[ids], 0.6).sum(0) + 0.8 * 0.6 * noise(round)) / 4
        assert run.record is not None
        assert run.record.ids.tolist() == ids.tolist()
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-14)
    assert (
        len({len(drawn(4, 10, round)) for round in range(3)}) > 1
    )  # a Poisson cohort has no fixed size


def test_the_rate_is_that_of_the_size_that_others_planned() -> None:
    rows, x = updates(20), np.zeros(D)
    algorithm = Algorithm(
        (Privacy(noise=1.0, epsilon=100.0), Sizes(size=16, first=1))
    )  # privacy is written first
    runs, _ = follow(algorithm, Puppet(rows), cohort=8)
    for round, run in enumerate(runs):
        size = 16 if round else 8
        ids = drawn(size, 20, round)
        x = x + (clipped(rows[ids], 1.0).sum(0) + noise(round)) / size
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("doubled", "figure"), [(0, 9.26), (100, 12.03)])
def test_epsilon_is_the_figure_of_dp_accounting(doubled: int, figure: float) -> None:
    rules = (Sizes(size=100, first=200, last_one=199 + doubled), Privacy(noise=1.0, epsilon=20.0))
    runs, setup = follow(Algorithm(rules), Puppet(updates(1000)), cohort=50, number=500)
    own = own_figure((0.05, 1.0, 500 - doubled), *([(0.1, 1.0, doubled)] if doubled else []))
    assert recorded(runs[-1], setup)["epsilon"] == pytest.approx(own, abs=1e-9)
    assert round(own, 2) == figure


def test_a_round_without_reports_is_like_any_other() -> None:
    """Noise through the server's momentum, the account, and no count towards the rounds that stop a
    run.
    """
    rows, x, velocity = updates(10), np.zeros(D), np.zeros(D)
    algorithm = Algorithm((Privacy(noise=0.8, epsilon=100.0), *parse("fedavgm(beta=0.5)").rules))
    runs, setup = follow(algorithm, Puppet(rows, silent=(1,)))
    for round, run in enumerate(runs):
        ids = drawn(4, 10, round) if round != 1 else []
        velocity = 0.5 * velocity + (clipped(rows[ids], 1.0).sum(0) + 0.8 * noise(round)) / 4
        x = x + velocity
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-14)
    assert [run.idle for run in runs] == [0, 1, 0]  # four were asked and none answered
    assert recorded(runs[-1], setup)["epsilon"] == pytest.approx(
        own_figure((0.4, 0.8, 3)), abs=1e-9
    )


def test_an_empty_cohort_is_not_an_idle_round() -> None:
    runs, _ = follow(
        Algorithm((Privacy(noise=1.0, epsilon=100.0),)), Puppet(updates(10)), cohort=1, number=12
    )
    sizes = [len(drawn(1, 10, round)) for round in range(12)]
    assert sizes.count(0) > 1
    for round, run in enumerate(runs):
        assert run.record is not None
        assert (run.record.asked, run.idle) == (sizes[round], 0)
        before = runs[round - 1].x if round else torch.zeros(D)
        assert not torch.equal(run.x, before)


def test_adaptive_clipping_exactly() -> None:
    rows, x, clip, z = updates(40), np.zeros(D), 0.5, 1.0
    runs, setup = follow(
        Algorithm((Privacy(noise=z, clip=clip, quantile=0.5, clip_lr=0.3, epsilon=1e3),)),
        Puppet(rows),
        cohort=30,
    )
    count = 1.5  # max(30 / 20, 1)
    both = (z**-2 - (2 * count) ** -2) ** -0.5
    for round, run in enumerate(runs):
        ids = drawn(30, 40, round)
        x = x + (clipped(rows[ids], clip).sum(0) + both * clip * noise(round)) / 30
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-13)
        short = np.linalg.norm(rows[ids], axis=1) <= clip
        extra = count * stream(1, "privacy count", round).standard_normal()
        clip *= math.exp(-0.3 * (((short - 0.5).sum() + extra) / 30 + 0.5 - 0.5))
        np.testing.assert_allclose(float(run.states[0]["clip"]), clip, rtol=1e-12)
    assert recorded(runs[-1], setup)["update_clip"] == pytest.approx(clip)
    assert recorded(runs[-1], setup)["epsilon"] == pytest.approx(
        own_figure((0.75, z, 3)), abs=1e-9
    )  # as without it


def test_adaptive_clipping_finds_the_quantile() -> None:
    rows = updates(400)
    rule = Privacy(noise=1.0, clip=20.0, quantile=0.5, epsilon=1e4)
    runs, _ = follow(Algorithm((rule,)), Puppet(rows), cohort=200, number=60)
    found = np.mean([float(run.states[0]["clip"]) for run in runs[30:]])
    assert found == pytest.approx(np.median(np.linalg.norm(rows, axis=1)), rel=0.1)


def test_a_larger_federation_is_simulated_and_called_hypothetical() -> None:
    rows = updates(10)
    rule = Privacy(noise=0.7, clip=0.4, epsilon=50.0, population=1_000_000, noise_cohort=1000)
    runs, setup = follow(Algorithm((Sizes(size=8, first=1), rule)), Puppet(rows))
    x = np.zeros(D)
    for round, run in enumerate(runs):
        size = 8 if round else 4
        ids, expected = drawn(size, 10, round), 250 * size
        x = x + clipped(rows[ids], 0.4).sum(0) / size + 0.7 * 0.4 * noise(round) / expected
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-14)
    figures = recorded(runs[-1], setup)
    assert "epsilon" not in figures
    own = own_figure((0.001, 0.7, 1), (0.002, 0.7, 2))
    assert figures["hypothetical_epsilon"] == pytest.approx(own, abs=1e-9)
    assert verdicts(runs[-1], setup) == [
        "the epsilon of privacy is hypothetical: that of cohorts of 1000 out of 1000000 clients, of which 4 out of 10 "
        "were simulated"
    ]


def test_a_larger_federation_is_larger() -> None:
    for rule, match in (
        (Privacy(population=9), "population = 9 is not allowed; 10 clients are simulated"),
        (
            Privacy(noise_cohort=1000),
            "noise_cohort = 1000 is not allowed; give a population that is larger",
        ),
    ):
        with pytest.raises(UserError, match=match):
            follow(Algorithm((rule,)), Puppet(updates(10)))


def test_a_delta_that_promises_nothing_is_named() -> None:
    runs, setup = follow(Algorithm((Privacy(delta=0.2, noise=5.0),)), Puppet(updates(10)))
    assert verdicts(runs[-1], setup)[0].startswith(
        "privacy(delta=0.2) promises little: with 10 clients"
    )


def test_the_run_ends_before_the_budget_is_overspent() -> None:
    runs, setup = follow(
        Algorithm((Privacy(noise=2.0, epsilon=3.0),)), Puppet(updates(100)), cohort=10, number=500
    )
    assert 1 < len(runs) < 500
    end = runs[-1]
    assert end.finished == (
        "the privacy budget, epsilon = 3 at delta = 1e-06, does not pay for one more round"
    )
    spent = end.states[0]["spent"].numpy()
    budgets = accounting.budgets(0.1, 2.0, 3.0, 1e-6)
    assert (spent <= budgets).any()
    assert not (spent + accounting.cost(0.1, 2.0) <= budgets).any()
    assert 2.8 < recorded(end, setup)["epsilon"] <= 3.0
    assert list(drive(rounds(end, setup), Puppet(updates(100)))) == []  # type: ignore[arg-type]


def test_a_larger_cohort_ends_the_run_earlier() -> None:
    lengths = []
    for size in (10, 20):
        rules = (Sizes(size=size, first=5), Privacy(noise=2.0, epsilon=3.0))
        runs, setup = follow(Algorithm(rules), Puppet(updates(100)), cohort=10, number=500)
        assert recorded(runs[-1], setup)["epsilon"] <= 3.0
        lengths.append(len(runs))
    assert lengths[1] < lengths[0]


def test_calibrated_noise_lasts_for_all_rounds() -> None:
    runs, setup = follow(Algorithm((Privacy(),)), Puppet(updates(100)), cohort=10, number=40)
    assert len(runs) == 40
    assert not runs[-1].finished
    assert 1.9 < recorded(runs[-1], setup)["epsilon"] <= 2.0


def test_a_budget_for_no_round_at_all_is_refused() -> None:
    with pytest.raises(UserError, match="does not pay for one more round"):
        follow(Algorithm((Privacy(noise=0.1, epsilon=0.5),)), Puppet(updates(10)))


def guesses(rule: Privacy, games: int = 400) -> float:
    """How often an attacker who knows everything else says rightly whether the canary took part, in
    one round each.
    """
    rows = np.zeros((8, D))
    rows[0] = [5.0, 0, 0]  # the canary; clipped to 1
    right = 0
    for game in range(games):
        engine = Puppet(rows if game % 2 else np.zeros((8, D)))
        runs, _ = follow(Algorithm((rule,)), engine, cohort=8, number=1, seed=game)
        seen = float(runs[0].x[0]) * 8
        right += (seen > 0.5) == bool(game % 2)
    return right / games


def test_a_canary_is_hidden_by_the_noise() -> None:
    """At rate 1 the best attack on one Gaussian of multiplier z is right with probability Φ(1 /
    2z).
    """
    assert guesses(Privacy(noise=1e-3, epsilon=1e9), games=40) == 1.0
    for z in (1.0, 4.0):
        rightly = (1 + math.erf(1 / (2 * z) / math.sqrt(2))) / 2
        assert guesses(Privacy(noise=z, epsilon=1e3)) == pytest.approx(rightly, abs=0.06)


def test_the_noise_has_the_promised_size() -> None:
    d = 20_000
    runs, _ = follow(
        Algorithm((Privacy(noise=1.5, clip=0.3, epsilon=1e3),)), Puppet(np.zeros((10, d))), number=2
    )
    for before, after in ((torch.zeros(d), runs[0].x), (runs[0].x, runs[1].x)):
        assert float((after - before).std()) == pytest.approx(1.5 * 0.3 / 4, rel=0.02)
    one, other = runs[0].x, runs[1].x - runs[0].x
    assert (
        abs(float(torch.dot(one, other) / one.norm() / other.norm())) < 0.03
    )  # drawn anew in every round


@pytest.mark.parametrize("name", sorted({*RULES} - {"privacy"}))
def test_which_rules_compose(name: str) -> None:
    composes = {
        "fedprox",
        "fedsam",
        "fedavgm",
        "fedadagrad",
        "fedadam",
        "fedyogi",
        "fedams",
        "alt",
        "fedcl",
        "average",
    }
    composes |= {"localprivacy", "deadline", "fedrep", "fedbabu", "ditto", "apfl"}
    if name in composes:
        assert len(parse(f"{name} + privacy").rules) == 2
        return
    who, why = name, "may act on reports or rows"
    if issubclass(RULES[name], Guard):
        why = f"treats a report by what others sent, .* leave {name} out, since privacy clips every update by itself"
    elif name == "budget":
        why = "plans cohorts by how many clients took part so far, a number without noise"
    elif name in ("overcommit", "buffered", "fedbuff", "fedasync"):
        who, why = "with", f"{name}, whether a client's answer counts depends on when others answer"
    elif name == "uniform":
        who, why = "privacy", "counts all clients equally already; leave uniform out"
    for text in (f"{name} + privacy", f"privacy + {name}"):
        with pytest.raises(UserError, match=f" cannot be combined: {who} {why}"):
            parse(text)


def test_options_decide_whether_a_rule_reads_clients() -> None:
    with pytest.raises(
        UserError, match=r"cannot be combined: fedcl plans cohorts by how many clients took part"
    ):
        parse("fedcl(budget=0.5) + privacy")
    with pytest.raises(
        UserError, match=r"cannot be combined: limits treats a report by what others sent"
    ):
        parse("limits(norm=0) + privacy")  # its other bounds are of the cohort, too
    assert parse("normclipping(norm=0.5) + privacy").traits[0].reads == "direction"


def test_a_fixed_length_is_clipped_before_the_noise() -> None:
    rows, x = updates(10), np.zeros(D)
    runs, _ = follow(
        parse("normclipping(norm=0.3) + privacy(noise=0.8, clip=0.6, epsilon=100.0)"), Puppet(rows)
    )
    for round, run in enumerate(runs):
        x = x + (clipped(rows[drawn(4, 10, round)], 0.3).sum(0) + 0.8 * 0.6 * noise(round)) / 4
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-14)


def test_the_average_is_of_the_noised_models() -> None:
    algorithm = parse("average(share=1.0) + privacy(noise=0.8, epsilon=100.0)")
    runs, setup = follow(algorithm, Puppet(updates(10), silent=(1,)))
    models = np.stack([run.x.numpy() for run in runs])
    np.testing.assert_allclose(result(runs[-1], setup).numpy(), models.mean(0), rtol=1e-12)


def test_a_rule_that_says_nothing_about_itself_is_refused() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Mine(Rule):
        pass

    with pytest.raises(
        UserError, match='a rule that does not says reads="direction" in its traits'
    ):
        Privacy() + Mine()
    assert parse("alt(reference='previous')").traits[0].reads == "clients"

    @dataclass(frozen=True, kw_only=True)
    class Counts(Sizes):
        def traits(self) -> Traits:
            return Traits(reads="direction", idle=True)

    Privacy() + Sizes(size=3)
    with pytest.raises(UserError, match="Counts plans cohorts by how many clients took part"):
        Privacy() + Counts(size=3)


def test_a_detector_that_decides_needs_noise() -> None:
    engine = Puppet(updates(10))
    algorithm = parse("fedcl + privacy(noise=1.0, epsilon=100.0)")
    with pytest.raises(
        UserError, match=r"fedcl and privacy cannot be combined with run\.detector = 'fgn'"
    ):
        follow(algorithm, engine, detectors=(FGN(),))
    with pytest.raises(
        UserError, match=r"fedcl and privacy cannot be combined with run\.detector = 'fgn'"
    ):
        resolve({"algorithm": str(algorithm)})
    with pytest.raises(UserError, match="'noisedfgn' needs a private rule"):
        follow(parse("fedcl"), engine, detectors=(NoisedFGN(),))
    follow(parse("fedcl.random() + privacy(noise=1.0, epsilon=100.0)"), engine)  # decides by chance
    with pytest.raises(UserError, match="has too little noise for the multiplier 2 of privacy"):
        follow(parse("privacy(noise=2.0)"), engine, detectors=(NoisedFGN(noise=1.0),))


def test_a_noised_detector_exactly() -> None:
    """FedCL's cohorts follow from noised values alone, and the updates' noise pays for the
    detector's.
    """
    rows, x, before, size = updates(40), np.zeros(D), math.nan, 8
    algorithm = parse("fedcl(cap=0.5) + privacy(noise=1.0, epsilon=1e3)")
    detectors = (NoisedFGN(clip=1.0, noise=3.0),)
    runs, setup = follow(
        algorithm, Puppet(rows, silent=(2,)), cohort=8, number=6, detectors=detectors
    )
    both = (1 - 3.0**-2) ** -0.5
    rates = []
    for round, run in enumerate(runs):
        rates.append((size / 40, 1.0, 1))
        ids = drawn(size, 40, round) if round != 2 else np.empty(0, int)
        x = x + (clipped(rows[ids], 1.0).sum(0) + both * noise(round)) / size
        np.testing.assert_allclose(run.x.numpy(), x, rtol=0, atol=1e-13)
        values = np.minimum(0.5 * (1 + ids / 10), 1.0)
        value = (
            values.sum() + 3.0 * stream(1, "privacy detector", round).standard_normal(1)[0]
        ) / size
        assert run.record is not None
        np.testing.assert_allclose([run.record.values[0], run.signals.noisedfgn], value, rtol=1e-12)
        critical = before != before or (value - before >= 0.1 * before and max(value, before) > 0)
        before, size = value, min(2 * size, 20) if critical else max(size - size // 2, 4)
        assert run.signals.critical == critical
    assert len({rate for rate, *_ in rates}) > 1
    assert recorded(runs[-1], setup)["epsilon"] == pytest.approx(own_figure(*rates), abs=1e-9)


def test_a_secret_key_takes_the_place_of_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    rule, engine = Privacy(noise=1.0, epsilon=100.0, key="NOISE_KEY"), Puppet(updates(10))
    with pytest.raises(
        UserError, match="key = 'NOISE_KEY' must name an environment variable with a secret"
    ):
        follow(Algorithm((rule,)), engine)
    ends = []
    for secret in ("a" * 32, "b" * 32, "a" * 32):
        monkeypatch.setenv("NOISE_KEY", secret)
        ends.append(follow(Algorithm((rule,)), engine)[0][-1].x)
    plain = follow(Algorithm((replace(rule, key=""),)), engine)[0][-1].x
    assert torch.equal(ends[0], ends[2])
    assert not torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], plain)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ("epsilon=0.0", "epsilon = 0.0"),
        ("delta=1.0", "delta = 1.0"),
        ("clip=0.0", "clip = 0.0"),
        ("noise=-1.0", "noise = -1.0"),
        ("quantile=1.0", "quantile = 1.0"),
        ("clip_lr=0.0", "clip_lr = 0.0"),
        ("population=-1", "population = -1"),
        ("noise_cohort=-1", "noise_cohort = -1"),
    ],
)
def test_values_that_are_refused(options: str, match: str) -> None:
    with pytest.raises(UserError, match=f"privacy: {match} is not allowed"):
        parse(f"privacy({options})")


@pytest.mark.parametrize(
    "rule", [Privacy(), Privacy(quantile=0.5, clip=0.1), Privacy(noise=1.0, epsilon=90.0)]
)
def test_the_contract(rule: Privacy) -> None:
    check_rule(rule)


TABLES: dict[str, Any] = {
    "algorithm": "privacy(noise=1.0, epsilon=6.0, clip=0.5) + fedavgm(beta=0.5)",
    "data": {"clients": 40, "alpha": 1.0},
    "model": {"hidden": [8]},
    "train": {"rounds": 60, "cohort": 4, "batch_size": 16},
    "run": {"checkpoint_every": 2, "engine": "loop"},
}


def test_a_run_folder_says_why_it_finished_and_stays_finished(tmp_path: Path) -> None:
    said: list[str] = []
    summary = experiment.start(resolve(TABLES), tmp_path / "run", say=said.append)
    assert summary["rounds"] < 60
    reason = "the privacy budget, epsilon = 6 at delta = 1e-06, does not pay for one more round"
    assert summary["finished"] == reason
    assert f"finished after round {summary['rounds']}: {reason}" in said
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    figures = [row["epsilon"] for row in rows]
    assert figures == sorted(figures)
    assert figures[-1] == summary["epsilon"] <= 6.0
    assert rows[-1]["accuracy"] is not None
    assert Folder(tmp_path / "run").finished()
    assert experiment.resume(tmp_path / "run") == summary


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = experiment.start(resolve(TABLES), tmp_path / "whole")

    def stop(row: dict[str, Any], _: torch.Tensor) -> bool:
        return row["round"] < 5

    prepared = prepare(resolve(TABLES))
    folder = Folder(tmp_path / "parts")
    experiment.execute(experiment.begin(prepared, folder, watch=stop), prepared.engine)
    assert experiment.resume(tmp_path / "parts")["rounds"] == whole["rounds"]
    ends = [experiment.model(tmp_path / name)[0] for name in ("whole", "parts")]
    assert torch.equal(*ends)
    rows = [list(read_lines(tmp_path / name / "metrics.jsonl")) for name in ("whole", "parts")]
    assert [row["epsilon"] for row in rows[0]] == [row["epsilon"] for row in rows[1]]
