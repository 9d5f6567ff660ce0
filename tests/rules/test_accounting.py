"""The account: dp-accounting's own figures, budgets whose probabilities sum to delta, and
calibration.
"""

from __future__ import annotations

import sys

import numpy as np
import pytest

from kairosfl.errors import UserError
from kairosfl.rules import accounting

dp_accounting = pytest.importorskip("dp_accounting")  # of the extra `privacy`
rdp = pytest.importorskip("dp_accounting.rdp")


def own_figure(*rounds: tuple[float, float, int], delta: float = 1e-6) -> float:
    """The ε of dp-accounting alone, of (rate, multiplier, times)."""
    accountant = rdp.RdpAccountant()
    for rate, multiplier, times in rounds:
        event = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(multiplier))
        accountant.compose(event, times)
    return float(accountant.get_epsilon(delta))


def test_the_orders_are_those_of_dp_accounting() -> None:
    np.testing.assert_array_equal(accounting.ORDERS, rdp.RdpAccountant().orders)
    assert set(accounting.COARSE) <= set(accounting.ORDERS)


def test_a_fixed_and_a_doubled_cohort() -> None:
    spent = np.zeros(len(accounting.ORDERS))
    for _ in range(500):
        spent = spent + accounting.cost(0.05, 1.0)
    assert accounting.running(spent, 1e-6) == pytest.approx(own_figure((0.05, 1.0, 500)), abs=1e-9)
    assert round(accounting.running(spent, 1e-6), 2) == 9.26
    spent = 400 * accounting.cost(0.05, 1.0) + 100 * accounting.cost(0.1, 1.0)
    assert accounting.running(spent, 1e-6) == pytest.approx(
        own_figure((0.05, 1.0, 400), (0.1, 1.0, 100)), abs=1e-9
    )
    assert round(accounting.running(spent, 1e-6), 2) == 12.03


@pytest.mark.parametrize(("epsilon", "delta"), [(2.0, 1e-6), (8.0, 1e-5), (0.5, 1e-9)])
def test_the_budgets_of_all_orders_together_leave_delta(epsilon: float, delta: float) -> None:
    orders = np.array(accounting.ORDERS)
    budgets = accounting.budgets(0.05, 1.0, epsilon, delta)
    has = np.isfinite(budgets)
    # max over L of (1 − e^(ε − L)) / e^((α − 1)(L − ε)), on a fine grid instead of its closed form.
    excess = np.linspace(0, 20, 400_001)[1:]
    most = np.array(
        [((1 - np.exp(-excess)) * np.exp(-(order - 1) * excess)).max() for order in orders[has]]
    )
    lost = most * np.exp((orders[has] - 1) * (budgets[has] - epsilon))
    assert lost.sum() == pytest.approx(delta, rel=1e-6)
    assert lost.max() == pytest.approx(0.9 * delta, rel=1e-6)


def test_an_order_with_the_weight_one_is_the_conversion_of_dp_accounting() -> None:
    limits = accounting._limits(2.0, 1e-6, 1.0)
    for order, limit in zip(accounting.COARSE, limits, strict=True):
        if limit > 0:
            assert rdp.compute_epsilon([order], [limit], 1e-6)[0] == pytest.approx(2.0, abs=1e-9)


@pytest.mark.parametrize(("rate", "rounds"), [(0.05, 500), (0.001, 300), (1.0, 3)])
def test_calibrated_noise_pays_for_the_rounds_and_hardly_more(rate: float, rounds: int) -> None:
    z = accounting.calibrated(rate, rounds, 2.0, 1e-6)
    budgets = accounting.budgets(rate, z, 2.0, 1e-6)
    assert (rounds * accounting.cost(rate, z) <= budgets).any()
    assert not (1.01 * rounds * accounting.cost(rate, z) <= budgets).any()
    assert 1.9 < accounting.running(rounds * accounting.cost(rate, z), 1e-6) <= 2.0


def test_a_budget_that_pays_for_nothing() -> None:
    with pytest.raises(
        UserError,
        match=r"is less than the account can certify for 10 rounds with any noise; give a larger epsilon or delta\.",
    ):
        accounting.calibrated(0.5, 10, 1e-3, 1e-30)


def test_a_missing_library_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(UserError, match=r"is not installed: pip install 'kairosfl\[privacy\]'\."):
        accounting.library()
