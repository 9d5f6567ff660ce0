"""The privacy account: Rényi divergences of Poisson-sampled Gaussian rounds, and the filter that
ends a run in time.

A round at sampling rate q with noise multiplier z costs ρ_α(q, z) at order α, by Google's
dp-accounting. Rates may depend on the noised results of earlier rounds, so the account is a
*filter* (Feldman and Zrnic, "Individual Privacy Accounting via a Rényi Filter", NeurIPS 2021): a
round is run only if afterwards some order α is within its budget,

    Σ ρ_α ≤ ε − log(1/δ_α) / (α − 1),    δ_α = δ · w_α / c_α,    c_α = (1 − 1/α)^(α − 1) / α

with weights w_α that are fixed before the first round and sum to 1. Which order is within its
budget may depend on the results, too: with the privacy loss L, the runs that α admits have E (1 −
e^(ε − L))⁺ ≤ w_α δ, because (1 − e^(ε − L))⁺ ≤ c_α e^((α − 1)(L − ε)) and e^((α − 1)(L − Σ ρ_α)) is
a supermartingale. Over all orders that is δ. One order alone is dp-accounting's conversion, and w_α
= c_α is the textbook's log(1/δ) / (α − 1). Here the order that pays for most rounds of the planned
size has nine tenths; the others, for rounds of other sizes, share the last tenth.
"""

from __future__ import annotations

import logging
import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.errors import UserError

Floats = NDArray[np.float64]

# Those that dp-accounting has by default, written out so that no release changes a run.
ORDERS = (*(1 + x / 10 for x in range(1, 100)), *range(11, 64), 128, 256, 512, 1024)
# Those of the filter: coarse, because the weights are shared among them, and fast, because few are
# fractional.
COARSE = (
    *(1.5, 2, 2.5, 3, 3.5, 4, 4.5, 5, 5.5),
    *range(6, 12),
    *range(12, 22, 2),
    *(24, 28, 32, 40, 48, 63),
    *(128, 256, 512, 1024),
)
FAVOURED = 0.9


def library() -> Any:
    """dp-accounting, which is optional."""
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise UserError(
            "privacy needs the package dp-accounting, which is not installed: "
            "pip install 'kairosfl[privacy]'."
        ) from None
    return dp_accounting


@lru_cache(maxsize=4096)
def _cost(rate: float, multiplier: float, orders: tuple[float, ...]) -> Floats:
    dp = library()
    accountant = dp.rdp.RdpAccountant(orders, dp.NeighboringRelation.ADD_OR_REMOVE_ONE)
    # It warns of orders whose series does not converge, and counts them as infinite.
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        accountant.compose(dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier)))
    finally:
        logger.setLevel(level)

    costs: Floats = np.asarray(accountant.rdp, dtype=np.float64)
    costs.flags.writeable = False  # all callers share the cached one
    return costs


def cost(rate: float, multiplier: float) -> Floats:
    """ρ_α of one round, for every order of `ORDERS`."""
    return _cost(rate, multiplier, ORDERS)


def running(spent: Floats, delta: float) -> float:
    """The ε of what has been spent, by dp-accounting, as if it had been planned in advance."""
    return float(library().rdp.compute_epsilon(ORDERS, spent, delta)[0])


def budgets(rate: float, multiplier: float, epsilon: float, delta: float) -> Floats:
    """What every order of `ORDERS` may spend in a run planned with this rate and this noise."""
    # The order that pays for most of the planned rounds is favoured; the others share the rest.
    limits = _limits(epsilon, delta, FAVOURED)
    best = int(np.argmax(limits / _cost(rate, multiplier, COARSE)))
    shares = np.array([(1 - 1 / order) ** (order - 1) / order for order in COARSE])
    shares[best] = 0.0
    weights = (1 - FAVOURED) * shares / shares.sum()
    weights[best] = FAVOURED

    # An order that the filter does not have may spend nothing.
    places = [ORDERS.index(order) for order in COARSE]
    allowed = np.full(len(ORDERS), -np.inf)
    allowed[places] = _limits(epsilon, delta, weights)
    return allowed


def _limits(epsilon: float, delta: float, weights: float | Floats) -> Floats:
    """The budget of every coarse order that has these weights."""
    orders = np.array(COARSE)
    c = (1 - 1 / orders) ** (orders - 1) / orders
    limits: Floats = epsilon + np.log(delta * weights / c) / (orders - 1)
    return limits


def calibrated(rate: float, rounds: int, epsilon: float, delta: float) -> float:
    """The smallest noise multiplier, to four digits, with which the budget pays for the rounds."""
    limits = _limits(epsilon, delta, FAVOURED)

    def enough(multiplier: float) -> bool:
        return bool((rounds * _cost(rate, multiplier, COARSE) <= limits).any())

    # A power of two that is enough, then one below it that is not.
    high = 1.0
    while not enough(high):
        high *= 2
        if high > 1e6:
            raise UserError(
                f"privacy(epsilon={epsilon:g}, delta={delta:g}) is less than the account can "
                f"certify for {rounds} rounds with any noise; give a larger epsilon or delta."
            )
    low = high / 2
    while enough(low):
        high = low
        low = low / 2

    while high - low > 1e-5 * high:
        middle = (low + high) / 2
        if enough(middle):
            high = middle
        else:
            low = middle
    return math.ceil(high * 1e4) / 1e4
