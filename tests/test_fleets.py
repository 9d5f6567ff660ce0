"""Fleets: how long rounds last against closed forms, when devices are online, and what is refused."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kairosfl
from kairosfl.core.clock import Fleet, Variation
from kairosfl.core.fields import Briefs, Report, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Run, Setup
from kairosfl.errors import UserError
from kairosfl.fleets import (
    AVAILABILITY,
    DEVICES,
    Bernoulli,
    Distribution,
    Diurnal,
    Exponential,
    Halfnormal,
    Lognormal,
    Pareto,
    Tiers,
    fleet_of,
)
from kairosfl.rules import parse

LAYOUT = Layout((Entry("w", (1,), 0),))


class Idle:
    """An engine whose clients change nothing."""

    def train(self, briefs: Briefs) -> Reports:
        reports = [
            Report(
                client=client,
                n=1,
                steps=1,
                epochs=1.0,
                delta=torch.zeros(1),
                loss=0.0,
                grad_sq=0.0,
                seconds=0.0,
            )
            for client in briefs.ids.tolist()
        ]
        return Reports.stack(reports, torch.zeros(len(reports), 1))


def times(text: str, fleet: Fleet, number: int, cohort: int = 1) -> np.ndarray:
    """The clock after each of so many rounds; every client has one sample."""
    recipe = Recipe(rounds=number, cohort=cohort)
    sizes = np.ones(fleet.clients, dtype=np.int64)
    setup = Setup(parse(text), recipe, fleet.clients, LAYOUT, sizes=sizes, fleet=fleet)
    runs = drive(rounds(Run.start(torch.zeros(1), setup, seed=0), setup), Idle())
    return np.array([run.time for run in runs])


# --- distributions ---


@pytest.mark.parametrize(
    "distribution", [Lognormal(sigma=0.5), Lognormal(), Halfnormal(), Exponential(), Pareto(a=3.0)]
)
def test_factors_have_a_mean_of_one(distribution: Distribution) -> None:
    factors = distribution.draw(np.random.default_rng(0), 400_000)
    assert factors.mean() == pytest.approx(1, abs=0.02)
    assert factors.min() > 0


def test_pareto_has_the_quantiles_of_pareto() -> None:
    factors = Pareto(a=1.5).draw(np.random.default_rng(0), 200_000)
    for share in (0.1, 0.5, 0.9, 0.99):
        expected = 0.5 / 1.5 * (1 - share) ** (-1 / 1.5)
        assert np.quantile(factors, share) == pytest.approx(expected, rel=0.03)


def test_tiers() -> None:
    factors = Tiers(factors=(1.0, 4.0), shares=(3.0, 1.0)).draw(np.random.default_rng(0), 100_000)
    assert set(factors) == {1.0, 4.0}
    assert (factors == 4.0).mean() == pytest.approx(0.25, abs=0.01)


# --- how long rounds last ---


def longest_of(cohort: int, distribution: str) -> float:
    """The mean of the longest of so many: ∫ 1 − F(t)^m dt."""
    grid = np.concatenate([np.linspace(0, 20, 200_001), np.geomspace(20, 1e4, 100_001)[1:]])
    erf = np.vectorize(math.erf)
    below = {
        "exponential()": lambda t: 1 - np.exp(-t),
        "lognormal(sigma=1.0)": lambda t: (
            0.5 * (1 + erf((np.log(np.maximum(t, 1e-300)) + 0.5) / math.sqrt(2)))
        ),
        "halfnormal()": lambda t: erf(t / math.sqrt(math.pi)),
    }[distribution](grid)
    return float(np.trapezoid(1 - below**cohort, grid))


@pytest.mark.parametrize("cohort", [10, 20])
@pytest.mark.parametrize("devices", ["exponential()", "lognormal(sigma=1.0)", "halfnormal()"])
def test_a_synchronous_round_lasts_as_long_as_the_longest_of_its_orders(
    devices: str, cohort: int
) -> None:
    fleet = fleet_of(devices, 60, 0, seconds=1.0, redraw=True)
    lasted = np.diff(times("fedavg", fleet, 500, cohort), prepend=0.0)
    expected = longest_of(cohort, devices)
    if devices == "exponential()":  # the harmonic numbers
        assert expected == pytest.approx(sum(1 / i for i in range(1, cohort + 1)), rel=1e-3)
        assert expected == pytest.approx({10: 2.929, 20: 3.598}[cohort], abs=5e-4)
    error = 3 * lasted.std() / math.sqrt(len(lasted))
    assert lasted.mean() == pytest.approx(expected, abs=error)


@pytest.mark.parametrize(("cohort", "expected"), [(40, 4.279), (100, 5.187)])
def test_harmonic_numbers_of_larger_cohorts(cohort: int, expected: float) -> None:
    lasted = Exponential().draw(np.random.default_rng(1), 20_000 * cohort).reshape(-1, cohort)
    assert lasted.max(1).mean() == pytest.approx(expected, abs=0.03)
    fleet = fleet_of("exponential()", 150, 0, seconds=1.0, redraw=True)
    clocked = np.diff(times("fedavg", fleet, 80, cohort), prepend=0.0)
    assert clocked.mean() == pytest.approx(expected, abs=3 * clocked.std() / math.sqrt(80))


def test_the_first_ten_of_thirteen() -> None:
    """Exponential: H_13 − H_3."""
    fleet = fleet_of("exponential()", 400, 0, seconds=1.0, redraw=True)
    lasted = np.diff(times("overcommit(over=0.3)", fleet, 500, 10), prepend=0.0)
    expected = sum(1 / i for i in range(4, 14))
    assert expected == pytest.approx(1.347, abs=1e-3)
    assert lasted.mean() == pytest.approx(expected, abs=3 * lasted.std() / math.sqrt(500))


@dataclass(frozen=True)
class Normals:
    """A kind of device, drawn for every order, and the time that sending takes."""

    kinds: tuple[tuple[float, float], ...]

    def __call__(self, draw: np.random.Generator) -> float:
        mean, deviation = self.kinds[draw.integers(len(self.kinds))]
        return float(draw.normal(mean, deviation) + draw.normal(5, 1))


KINDS = ((100.0, 1.0), (200.0, 2.0), (400.0, 4.0))


def test_nvflare_publishes_what_the_clock_says_where_every_order_draws_its_device() -> None:
    """16 devices, 16 updates a cycle. Its README expects 238.3 s, and 408.4 s for the slowest of
    three; of sixteen it is 409.5 s.
    """
    varies: Variation = Normals(KINDS)
    fleet = Fleet(16, seconds=1.0, varies=varies)
    moments = times("buffered(k=1, concurrency=16)", fleet, 6_400)
    cycles = 16 * (moments[-1] - moments[1600]) / (len(moments) - 1601)
    assert cycles == pytest.approx(238.3, rel=0.02)
    lasted = np.diff(times("fedavg", fleet, 300, 16), prepend=0.0)
    assert lasted.mean() == pytest.approx(409.5, abs=3)


def test_nvflare_with_devices_that_stay_what_they_are() -> None:
    """Fast ones then answer more often: 16 updates take 16 over the sum of the rates."""
    seconds = np.array([105.0, 205.0, 405.0] * 16)
    fleet = Fleet(48, seconds=seconds)
    moments = times("buffered(k=1, concurrency=48)", fleet, 3_000)
    rate = (len(moments) - 501) / (moments[-1] - moments[500])
    assert 16 / (rate / 3) == pytest.approx(177.8, rel=0.01)


# --- availability ---


@pytest.mark.parametrize("text", ["bernoulli(p=0.3, every=100.0)", "diurnal(hours=8.0)"])
def test_devices_are_online_from_one_instant_to_another(text: str) -> None:
    fleet = fleet_of("equal()", 200, 3, availability=text)
    online, clients = fleet.availability, np.arange(200)
    share = []
    for moment in np.linspace(0, 200_000, 37):
        begins = online.next_online(clients, moment)
        assert (begins >= moment).all()
        share.append(float((begins == moment).mean()))
        for client in range(0, 200, 23):
            one = np.array([client])
            begin = float(begins[client])
            assert online.next_online(one, begin)[0] == begin
            end = float(online.online_until(one, begin)[0])
            assert end > begin
            assert online.next_online(one, (begin + end) / 2)[0] == (begin + end) / 2
            assert online.next_online(one, end + 1e-3)[0] > end
    expected = 0.3 if text.startswith("bernoulli") else 8 / 24
    assert np.mean(share) == pytest.approx(expected, abs=0.03)


def test_who_is_never_online_and_who_always_is() -> None:
    clients = np.arange(3)
    assert (Bernoulli(p=0.0).of(0).next_online(clients, 7.0) == math.inf).all()
    assert (Bernoulli(p=1.0).of(0).online_until(clients, 7.0) == math.inf).all()
    assert (Diurnal(hours=24.0).of(0).online_until(clients, 7.0) == math.inf).all()


def test_a_run_with_availability_and_dropouts_ends() -> None:
    fleet = fleet_of(
        "lognormal()", 60, 0, seconds=900.0, availability="diurnal(hours=6.0)", dropout=0.2
    )
    for text in ("fedavg", "buffered(k=3, concurrency=8) + stale", "deadline(seconds=3600.0)"):
        moments = times(text, fleet, 40, 10)
        assert len(moments) == 40
        assert (np.diff(moments) >= 0).all()


# --- in a configuration ---


def simulated(out: Path | None = None, **changes: Any) -> kairosfl.History:
    draw = np.random.default_rng(0)
    x = torch.from_numpy(draw.standard_normal((90, 4))).float()
    y = (x[:, 0] > 0).long()
    torch.manual_seed(0)
    settings: dict[str, Any] = {"rounds": 6, "clients": 9, "cohort": 3, "partition": "iid"}
    return kairosfl.simulate(
        torch.nn.Linear(4, 2), (x, y), (x, y), progress=False, out=out, **settings | changes
    )


def test_simulate_on_a_fleet() -> None:
    plain, timed = simulated(), simulated(fleet="lognormal(sigma=1.0)")
    assert "time" not in plain.metrics[0]
    assert plain.accuracy == timed.accuracy
    moments = [row["time"] for row in timed.metrics]
    assert moments == sorted(moments)
    assert moments[0] > 0
    device = sum(row["device_seconds"] for row in timed.metrics)
    assert device > moments[-1]
    settings = {"devices": "lognormal(sigma=1.0)", "latency": 2.0}
    buffered = simulated(fleet=settings, algorithm="buffered(k=2, concurrency=4) + stale")
    assert max(row["age"] for row in buffered.metrics) > 0


def test_a_run_on_a_fleet_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "fleet": {"devices": "lognormal()", "dropout": 0.1},
        "algorithm": "buffered(k=2, concurrency=5) + stale",
        "rounds": 12,
        "checkpoint_every": 1,
    }
    straight = simulated(tmp_path / "a", **settings)

    def stop(history: kairosfl.History) -> bool:
        return len(history.metrics) < 5

    simulated(tmp_path / "b", on_round=stop, **settings)
    again = simulated(tmp_path / "b", **settings)
    assert torch.equal(straight.x, again.x)
    assert [row["time"] for row in straight.metrics] == [row["time"] for row in again.metrics]
    with pytest.raises(UserError, match=r"fleet\.dropout"):
        simulated(tmp_path / "b", **settings | {"fleet": {"devices": "lognormal()"}, "rounds": 14})


@pytest.mark.parametrize(
    ("fleet", "why"),
    [
        ("lognorm()", r"There is no fleet\.devices 'lognorm'; did you mean 'lognormal'"),
        ("equal() + pareto()", r"names 2; give one of them"),
        ("pareto(a=1.0)", r"pareto: a = 1.0 is not allowed; use a number above 1"),
        ({"latency": 3.0}, r"fleet\.devices is missing"),
        ({"devices": "equal()", "availability": "never"}, r"There is no fleet\.availability"),
        ({"devices": "equal()", "speed": 2.0}, "Unknown key 'fleet.speed'|speed"),
        ({"devices": "nowhere.csv"}, r"fleet\.devices = 'nowhere\.csv' cannot be read"),
        ({"devices": "equal()", "dropout": 2.0}, r"fleet\.dropout must be between 0 and 1"),
    ],
)
def test_fleets_that_cannot_be_are_refused(fleet: Any, why: str) -> None:
    with pytest.raises(UserError, match=why):
        simulated(fleet=fleet)


def test_a_rule_that_needs_a_clock_is_refused_without_one() -> None:
    with pytest.raises(UserError, match=r"buffered needs a clock: set fleet\.devices"):
        simulated(algorithm="buffered")


def test_devices_from_a_file(tmp_path: Path) -> None:
    table = tmp_path / "phones.csv"
    table.write_text("seconds,up,latency\n0.5,8,1\n1.5,16,2\n")
    fleet = fleet_of(str(table), 2, 0)
    assert np.asarray(fleet.seconds).tolist() == [0.5, 1.5]
    assert np.asarray(fleet.up).tolist() == [1e6, 2e6]
    assert np.asarray(fleet.latency).tolist() == [1, 2]
    rows = tmp_path / "phones.json"
    rows.write_text(json.dumps([{"seconds": 0.5}, {"seconds": 1.5}]))
    assert np.asarray(fleet_of(str(rows), 2, 0).seconds).tolist() == [0.5, 1.5]
    with pytest.raises(UserError, match="has 2 devices, but there are 3 clients"):
        fleet_of(str(table), 3, 0)
    table.write_text("speed\n1\n2\n")
    with pytest.raises(UserError, match="has a column 'speed'"):
        fleet_of(str(table), 2, 0)
    table.write_text("seconds\n1\nfast\n")
    with pytest.raises(UserError, match="'seconds' is not a number in every row"):
        fleet_of(str(table), 2, 0)


def test_every_fleet_has_a_name() -> None:
    assert list(DEVICES) == ["equal", "lognormal", "halfnormal", "exponential", "pareto", "tiers"]
    assert list(AVAILABILITY) == ["always", "bernoulli", "diurnal"]
    assert Algorithm().any("clock") is False
