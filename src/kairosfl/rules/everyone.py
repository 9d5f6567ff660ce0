"""The mean of one vector per client over all clients, exact while cohorts come and go.

    mean = (seen / N) · Σ n_i v_i / Σ n_i      over the clients seen

n_i = 1 where the models are averaged uniformly. A client never seen counts as zeros of average
size; once all have been, it is Σ p_i v_i. Adding (|S| / N) Σ p_i (v_i⁺ − v_i) in every round, with
p_i over the cohort S, is the same for uniform weights; for sample weights it drifts away, and the
run converges to a wrong point.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, State
from kairosfl.core.run import Round


def no_clients(now: Round) -> State:
    """The server's state before the first round."""
    zero = torch.tensor(0.0, dtype=torch.float64)
    return {"sum": torch.zeros_like(now.x), "n": zero, "seen": zero.clone()}


def unseen(now: Round) -> State:
    """A client's row before it was seen: its vector and its weight."""
    return {"vector": torch.zeros_like(now.x), "n": torch.tensor(0.0, dtype=torch.float64)}


def mean(memory: Memory, now: Round) -> Tensor:
    """The mean over all clients."""
    total = memory.state["sum"]
    n = float(memory.state["n"])
    seen = float(memory.state["seen"])
    if not n:
        return total
    return total * (seen / (n * now.population))


def changed(memory: Memory, vectors: Tensor, now: Round, counts: Tensor | None = None) -> Memory:
    """After the reporters' vectors became `vectors`, `[m, d]`.

    Args:
        memory: Of a rule whose state and rows are those of this file.
        vectors: The new vectors, in the order of the reports.
        now: The round.
        counts: How much each of them counts; by default as much as its model does.
    """
    n = now.counts() if counts is None else counts
    before = memory.rows["n"]
    added = n.to(vectors) @ vectors
    removed = before.to(vectors) @ memory.rows["vector"]
    state = {
        "sum": memory.state["sum"] + added - removed,
        "n": memory.state["n"] + (n - before).sum(),
        "seen": memory.state["seen"] + (before == 0).sum(),
    }
    return memory.replace(state=state, rows={"vector": vectors, "n": n})
