"""How fast a quantity of the clients grows, in its logarithm per round, and in which period.

Cohorts differ more from each other than one round from the next, so a client is compared with
itself:

    rate      (log v_i^t − log v_i^s) / (t − s)
    growth    median of the rates of recent rounds with weights (t − s) · DECAY^(rounds ago)

where s is the round in which client i last reported. The weights t − s make it the slope that fits
all pairs best in absolute deviation: a client's two visits tell more about the trend the longer
they are apart. While there are too few pairs, as with 10 of 10,000 clients, or while their visits
are more than SPAN rounds apart in the mean with these weights, as with 10 of 1,000, so that they
would tell what the growth was long ago, the growth is that of the cohorts' medians, smoothed: a
short average minus a long one, divided by how much longer it reaches back.

The period is critical until the growth has been below the share `fall` of its own peak for PATIENCE
rounds, and again if it ever exceeds that peak. Before anything can be said, it is critical.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, State

DECAY = 0.9  # per round, of pairs and of the short average
SLOW = 0.95  # per round, of the long average
WARM_UP = 20  # rounds before smoothed levels are compared
PATIENCE = 10  # rounds below the threshold that end a period
POOL = 512  # pairs remembered
SPAN = 30  # rounds between the visits of pairs, in the mean


def begun() -> State:
    """The state before the first round."""
    return {
        # Round, rounds between, rate; the oldest first.
        "pairs": torch.zeros(POOL, 3, dtype=torch.float64),
        # Decayed sums of 1, log v and the round: short, long.
        "levels": torch.zeros(2, 3, dtype=torch.float64),
        "rounds": torch.tensor(0),
        "peak": torch.tensor(0.0, dtype=torch.float64),
        "below": torch.tensor(0),
        "critical": torch.tensor(True),
    }


def unseen() -> State:
    """A client's row before its first report."""
    return {"level": torch.tensor(float("nan"), dtype=torch.float64), "round": torch.tensor(-1)}


def logs(values: Tensor) -> Tensor:
    """Logarithms in float64; of zero, that of the smallest number."""
    return values.double().clamp_min(torch.finfo(torch.float64).tiny).log()


def pooled(levels: Tensor, memory: Memory, number: int) -> State:
    """What is known about the growth with this round's levels, `[m]`."""
    state = memory.state
    pairs = state["pairs"]
    if memory.rows:  # only then is something kept about clients
        between = number - memory.rows["round"]
        rates = (levels - memory.rows["level"]) / between
        visits = torch.stack([torch.full_like(rates, number), between.double(), rates], 1)
        reported_before = memory.rows["round"] >= 0
        pairs = torch.cat([pairs, visits[reported_before]])[-POOL:]

    decays = torch.tensor([[DECAY], [SLOW]], dtype=torch.float64)
    now = torch.tensor([1.0, float(levels.median()), number], dtype=torch.float64)
    return state | {
        "pairs": pairs,
        "levels": decays * state["levels"] + now,
        "rounds": state["rounds"] + 1,
    }


def growth(state: State, number: int, least: int) -> float:
    """Growth per round; NaN while it is not known.

    Args:
        state: What is known.
        number: Of this round.
        least: How many pairs are needed, each counted by its decay.
    """
    # The weighted median of the rates, if there are enough recent pairs.
    when, between, rates = state["pairs"].unbind(1)
    recent = torch.where(between > 0, DECAY ** (number - when), 0.0)
    weights = recent * between
    enough = float(recent.sum()) >= least
    if enough and float(weights @ between) <= SPAN * float(weights.sum()):
        order = rates.argsort(stable=True)
        total = weights[order].cumsum(0)
        return float(rates[order][torch.searchsorted(total, total[-1] / 2)])

    # Else the cohorts' medians: a short average minus a long one, and how far apart they reach.
    if int(state["rounds"]) < WARM_UP:
        return float("nan")
    sums = state["levels"]
    short, long = sums[:, 1] / sums[:, 0]
    now, then = sums[:, 2] / sums[:, 0]
    return float((short - long) / (now - then))


def decided(value: float, state: State, fall: float) -> State:
    """Whether the period is critical at this growth."""
    if value != value:
        return state
    before = float(state["peak"])
    peak = max(before, value)
    below = 0  # rounds in a row
    if not state["critical"]:
        critical = value > before
    else:
        if value < fall * peak or value <= 0:
            below = int(state["below"]) + 1
        critical = below < PATIENCE
    return state | {
        "peak": torch.tensor(peak, dtype=torch.float64),
        "below": torch.tensor(below),
        "critical": torch.tensor(critical),
    }
