"""FedAWARE: Zeng et al., "On the Power of Adaptive Weighted Aggregation in Heterogeneous FL and
Beyond", AISTATS 2025.

    m_i ← (1 − alpha) m_i + alpha Δ_i           for the clients of this round        (Eq. 3)
    λ = argmin ‖Σ λ_i m_i‖²,  λ ≥ 0, Σ λ_i = 1  over every client seen so far        (Eq. 2)
    d = Σ λ_i m_i,    x ← x + lr · d
    ×AWARE: x ← x + lr · ⟨d̃, d⟩ / ⟨d, d⟩ · d    with another method's direction d̃    (Prop. 3.1)

The released code puts m_i / ‖m_i‖ for m_i in both lines, and so does `normalise`. Beside PA3Fed the
λ_i of this round's clients become λ_i α_i, with the same sum; that is ours. The Gram matrix of the
m_i is kept and refreshed only where an m_i changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.mass import strides
from kairosfl.core.rule import Memory, Plan, Rule, State, about, acts
from kairosfl.core.run import Round
from kairosfl.core.table import Table
from kairosfl.core.traits import Traits
from kairosfl.rules.minnorm import Floats, frank_wolfe, min_norm

SOLVERS = ("active_set", "frank_wolfe")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Of the longest average: a mean shorter than this is rounding error without a direction.
NOWHERE = 1e-5
# Columns at a time, for products and for sums: a piece of a block stays in a core's cache.
NARROW = 1 << 13
WIDE = 1 << 16
LARGE = 1 << 20  # on a GPU, which is fastest with few large pieces
TOGETHER = 16  # rows: a block has a single one if the model is large


@dataclass(frozen=True, kw_only=True)
class FedAWARE(Rule):
    """Steps along the shortest mean of all clients' moving averages.

    That direction has a positive product with each of them. `layers`, `clusters`, `dtype` and
    `store` trade memory for precision.

    Args:
        alpha: Weight of the newest update in a client's average, above 0 and at most 1.
        lr: The server's learning rate.
        normalise: Whether vectors in the problem and in the step are unit vectors, as released.
        adaptive: Whether λ is solved for; otherwise averages are weighted by samples, as in Figure
            4.
        explore: Whether to visit every client once, and take plain averages until then.
        project: Whether to project the base algorithm's direction; none: if there is one.
        solver: "active_set" or the released "frank_wolfe".
        ridge: Adds ridge · ‖λ − uniform‖² to the objective, in units of the mean squared norm: 0 is
            the shortest mean, a large one the plain mean.
        layers: Keep averages of only this many of the last tensors; 0: all.
        clusters: Number of clusters that share an average; 0: one average per client.
        dtype: Of the averages: "float32" or "bfloat16".
        store: Where they are stored: "device" or "cpu".
    """

    alpha: float = 0.5
    lr: float = 1.0
    normalise: bool = True
    adaptive: bool = True
    explore: bool = False
    project: bool | None = None
    solver: str = "active_set"
    ridge: float = 0.0
    layers: int = 0
    clusters: int = 0
    dtype: str = "float32"
    store: str = "device"

    def __post_init__(self) -> None:
        self.check("alpha", 0 < self.alpha <= 1, "use above 0 and at most 1; the paper uses 0.5")
        self.check("lr", self.lr > 0, "use a number above 0")
        self.check(
            "project",
            self.project in (None, True, False),
            "use true, false, or none to decide by the rules",
        )
        self.check(
            "solver", self.solver in SOLVERS, "use 'active_set' or 'frank_wolfe' (released code)"
        )
        self.check(
            "ridge",
            0 <= self.ridge < float("inf"),
            "use 0 for the shortest mean or more, and finite",
        )
        self.check(
            "ridge", not self.ridge or self.solver == "active_set", "use solver='active_set', or 0"
        )
        self.check(
            "layers",
            self.layers >= 0,
            "use 0 for all parameters or how many of the last tensors to keep",
        )
        self.check(
            "clusters",
            self.clusters >= 0,
            "use 0 for an average per client or the number of clusters",
        )
        self.check("dtype", self.dtype in DTYPES, "use 'float32' or 'bfloat16'")
        self.check("store", self.store in ("device", "cpu"), "use 'device' or 'cpu'")

    def traits(self) -> Traits:
        changes = {"direction", "histories"}
        if self.explore:
            changes.add("visits")
        return Traits(
            when="last",
            adapts=True,
            weighs="lambda",
            late=True,
            changes=changes,
            instead={
                "mean": "use centeredclipping or normclipping",
                "total": "use explore = false",
            },
        )

    def conflicts_among(self, rules: Sequence[Rule]) -> str | None:
        if self.explore or self._projects(rules):
            return None
        lost = []
        for rule in rules:
            if rule is not self and _makes_directions_only(rule):
                lost.append(rule.name())
        if not lost:
            return None
        has = "has" if len(lost) == 1 else "have"
        return (
            "FedAWARE puts a direction of its own in the place of the round's, so "
            f"{' and '.join(lost)} {has} no effect; use project = true, or leave one of them out"
        )

    def server(self, now: Round) -> State:
        slot = {
            "gram": torch.zeros(0, 0, dtype=torch.float64),
            "lambda": torch.zeros(0, dtype=torch.float64),
        }
        if self.explore:
            slot["seen"] = torch.zeros(now.population, dtype=torch.bool)
        if self.clusters:
            slot["averages"] = self._zeros(now.x, 0, 0)
        return slot

    def client(self, now: Round) -> State:
        row: State = {}
        if self.clusters:
            row["cluster"] = torch.tensor(-1)
        else:
            row["average"] = self._zeros(now.x)
        if not self.adaptive:
            row["n"] = torch.tensor(0.0, dtype=torch.float64)
        return row

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if not self.explore or plan.ids is not None:
            return plan
        pool = np.arange(now.population) if plan.eligible is None else plan.eligible
        seen = memory.state["seen"].cpu().numpy()
        unseen = pool[~seen[pool]]
        if len(unseen) == 0:
            return plan
        others = np.setdiff1d(pool, unseen)
        rng = now.stream("explore")
        if len(others) and seen.sum() < min(now.population, now.number * now.cohort):
            # A round had no report, perhaps because of these clients: include one of the others.
            most = max(plan.size - 1, 1)
            again = rng.choice(unseen, min(len(unseen), most), replace=False)
            return replace(plan, ids=np.append(again, rng.choice(others)))
        if len(unseen) >= plan.size:
            return replace(plan, eligible=unseen)
        more = min(plan.size - len(unseen), len(others))
        filled = np.append(unseen, rng.choice(others, more, replace=False))
        return replace(plan, ids=filled)

    def observe(self, memory: Memory, now: Round) -> Memory:
        rows = memory.rows
        reports = now.reports
        own = strides(now)

        # "changed" and "updates" are there until the step, which removes them.
        state = dict(memory.state)
        state["changed"] = reports.ids
        if self.layers:
            state["updates"] = own
        if self.explore:
            # A failed client counts as visited: one dead client must not prolong the exploration.
            seen = state["seen"].clone()
            seen[reports.ids] = True
            seen[[client for client, _ in reports.failed]] = True
            state["seen"] = seen

        # The averages are of the last `layers` tensors: the columns from this offset on.
        tensors = now.layout.entries
        self.check("layers", self.layers <= len(tensors), f"the model has {len(tensors)} tensors")
        offset = tensors[-self.layers].offset if self.layers else 0
        written: State = {}
        if not self.adaptive:
            written["n"] = reports.n.double()
        if self.clusters:
            updates = own[:, offset:].to(state["averages"].device, torch.float32)
            state["averages"], written["cluster"] = self._clustered(
                state["averages"], rows["cluster"], updates, reports.ids.argsort()
            )
        else:
            updates = own[:, offset:].to(rows["average"].device, torch.float32)
            averages = rows["average"].float().reshape(len(reports), -1)
            written["average"] = averages.lerp(updates, self.alpha)
        return memory.replace(state=state, rows=written)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        state = dict(memory.state)
        ids = state.pop("changed")
        updates = state.pop("updates", None)

        # --- the Gram matrix, where an average changed ---
        table = memory.table
        slots = table.slots(ids).numpy()
        groups = self._groups(table, len(table))
        if self.clusters:
            blocks = [state["averages"]]
            changed = np.unique(groups[slots])
            rows = state["averages"][changed]
        else:
            blocks = list(table.column("average"))
            changed = slots
            rows = table.rows(ids)["average"]
        gram = refreshed(state["gram"].cpu().numpy(), products(rows, blocks), changed)
        state["gram"] = torch.from_numpy(gram)
        if self.explore and not state["seen"].all():
            return direction, memory.replace(state=state)

        # --- λ: `shares` of the averages, `weights` of the clients ---
        lengths = np.sqrt(np.diag(gram))
        shares = self._shares(gram, lengths, groups, state, table)
        weights = shares[groups] / np.bincount(groups)[groups]
        projects = self._projects(now.rules)
        if not projects and not bool((now.factors == now.factors[0]).all()):
            weights = reweighed(weights, slots, now.factors.cpu().numpy())
            shares = np.bincount(groups, weights, len(shares)).astype(np.float64)
        state["lambda"] = torch.from_numpy(weights)

        # --- the direction ---
        if updates is not None:  # the averages lack the first layers
            aware = self._over_reporters(torch.from_numpy(weights[slots]), updates)
        elif self.normalise:
            aware = weighted_sum(shares / np.where(lengths > 0, lengths, 1), blocks)
        else:
            aware = weighted_sum(shares, blocks)
        aware = aware.to(direction)
        if projects:
            longest = 1.0 if self.normalise else float(lengths.max())
            aware = projected(direction, aware, NOWHERE * longest)
        return self.lr * aware, memory.replace(state=state)

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        """Local update diversity (Definition 4.1) and χ² to uniform weights (Corollary 4.1)."""
        weights: Floats = memory.state["lambda"].cpu().numpy()
        clients = len(weights)
        if not clients:  # still exploring
            return {}
        gram = memory.state["gram"].cpu().numpy()
        if self.normalise:
            lengths = np.sqrt(np.diag(gram))
            lengths[lengths == 0] = 1
            gram = gram / lengths / lengths[:, None]
        shares = np.bincount(self._groups(memory.table, clients), weights)
        square = float(shares @ gram @ shares)
        diversity = float("inf")
        if square > 0:
            diversity = float(np.sqrt(shares @ np.diag(gram) / square))
        chi_square = float(clients * ((weights - 1 / clients) ** 2).sum())
        return {"lud": diversity, "chi_square": chi_square}

    def _groups(self, table: Table, clients: int) -> np.ndarray:
        """Which average is that of each client, by its slot in the table."""
        if not self.clusters:
            return np.arange(clients)
        clusters: np.ndarray = torch.cat(list(table.column("cluster"))).numpy()
        return clusters

    def _shares(
        self, gram: Floats, lengths: Floats, groups: np.ndarray, state: State, table: Table
    ) -> Floats:
        """λ for every average. Averages of length zero carry no information and are left out."""
        if not self.adaptive:
            n = torch.cat(list(table.column("n"))).numpy()
            samples: Floats = np.bincount(groups, n).astype(np.float64)
            samples /= samples.sum()
            return samples

        shares: Floats = np.zeros(len(gram))
        live = np.flatnonzero(lengths > 0)
        if len(live) == 0:
            return shares
        problem = gram[np.ix_(live, live)]
        if self.normalise:
            problem = problem / lengths[live] / lengths[live, None]
        if self.ridge:  # on the simplex, ‖λ − uniform‖² is ‖λ‖² up to a constant
            problem = problem + self.ridge * np.diag(problem).mean() * np.eye(len(live))
        if self.solver == "frank_wolfe":
            shares[live] = frank_wolfe(problem)
            return shares

        # The last round's λ is the first guess; clients that are new may count.
        start = np.ones(len(gram))
        if not self.clusters:
            start[: len(state["lambda"])] = state["lambda"].cpu().numpy()
        shares[live] = min_norm(problem, start[live])
        return shares

    def _over_reporters(self, shares: Tensor, updates: Tensor) -> Tensor:
        """Σ λ_i over this round's full updates, λ renormalised, or uniform where it is zero."""
        if shares.sum() > 0:
            shares = shares / shares.sum()
        else:
            shares = torch.full_like(shares, 1 / len(shares))
        if self.normalise:
            lengths = torch.stack([row.norm() for row in updates]).cpu().double()
            shares = shares / torch.where(lengths > 0, lengths, 1.0)
        return shares.to(updates) @ updates

    def _projects(self, rules: Sequence[Rule]) -> bool:
        if self.project is not None:
            return self.project
        return any(not about(rule).adapts for rule in rules)

    def _clustered(
        self, averages: Tensor, clusters: Tensor, updates: Tensor, order: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The clusters' new averages, and the clients' clusters, after this round's updates.

        Args:
            averages: Of the clusters so far, `[k, d]`.
            clusters: Of the reporters, `[m]`; −1: not yet in one.
            updates: Of the reporters, `[m, d]`.
            order: In which new clients, by their rows, start a cluster or join the nearest.
        """
        clusters = clusters.clone()
        centres = averages.to(torch.float32, copy=True).reshape(len(averages), updates.shape[1])
        before = len(centres)
        for row in order[clusters[order] < 0].tolist():
            if len(centres) < self.clusters:
                clusters[row] = len(centres)
                centres = torch.cat([centres, updates[row : row + 1]])
            else:
                clusters[row] = torch.argmax(torch.nn.functional.normalize(centres) @ updates[row])

        # A new cluster's average starts at zero, as a client's does.
        for cluster in clusters.unique().tolist():
            mean = updates[(clusters == cluster).to(updates.device)].mean(0)
            old = centres[cluster] if cluster < before else torch.zeros_like(mean)
            centres[cluster] = old.lerp(mean, self.alpha)
        return centres.to(averages.dtype), clusters

    def _zeros(self, x: Tensor, *shape: int) -> Tensor:
        device = torch.device("cpu") if self.store == "cpu" else x.device
        return torch.zeros(shape, dtype=DTYPES[self.dtype], device=device)


def _makes_directions_only(rule: Rule) -> bool:
    """Whether a rule changes only the cohort's direction, or weights that λ does not know."""
    makes = about(rule).uniform or acts(rule, "combine") or acts(rule, "step")
    hooks = ("select", "brief", "receive", "weigh", "result")
    return makes and not any(acts(rule, hook) for hook in hooks)


def reweighed(shares: Floats, slots: np.ndarray, factors: Floats) -> Floats:
    """λ with the part of this round's reporters, which stays as large, dealt by their factors."""
    part = shares[slots] * factors
    if not part.sum() > 0:
        return shares
    changed = shares.copy()
    changed[slots] = part * (shares[slots].sum() / part.sum())
    return changed


def projected(direction: Tensor, onto: Tensor, least: float) -> Tensor:
    """⟨direction, onto⟩ / ⟨onto, onto⟩ · onto; the direction itself if `onto` is below `least`."""
    square = onto @ onto
    if not float(square) > least**2:
        return direction
    return onto * ((direction @ onto) / square)


def pieces(
    blocks: Iterable[Tensor], width: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Blocks of rows in pieces of so many columns, small blocks together.

    Yields which rows and columns a piece has, and the piece, on this device.
    """
    first = 0
    for group in grouped(blocks):
        rows = slice(first, first + sum(map(len, group)))
        for begin in range(0, group[0].shape[1], width):
            columns = slice(begin, begin + width)
            parts = [block[:, columns].to(device, dtype) for block in group]
            piece = parts[0]
            if len(parts) > 1:
                piece = torch.cat(parts)
            yield rows, columns, piece
        first = rows.stop


def grouped(blocks: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive blocks in groups of at least `TOGETHER` rows, but for the last."""
    group: list[Tensor] = []
    for block in blocks:
        group.append(block)
        if sum(map(len, group)) >= TOGETHER:
            yield group
            group = []
    if group:
        yield group


def products(rows: Tensor, blocks: list[Tensor]) -> Floats:
    """Inner products of rows `[m, d]` with all rows of the blocks, `[m, K]`, summed in float64."""
    width = LARGE
    dtype = torch.float64  # a GPU multiplies float32 with ten bits when TF32 is on
    if rows.device.type == "cpu":
        width = NARROW
        dtype = torch.float32
    count = sum(map(len, blocks))
    inner = torch.zeros(len(rows), count, dtype=torch.float64, device=rows.device)
    for where, columns, piece in pieces(blocks, width, rows.device, dtype):
        inner[:, where] += rows[:, columns].to(dtype) @ piece.T
    return inner.cpu().numpy()


def refreshed(gram: Floats, inner: Floats, changed: np.ndarray) -> Floats:
    """The Gram matrix with the products of the changed rows updated, enlarged for new rows.

    Args:
        gram: Before, `[k, k]`.
        inner: Products of the changed rows with all of them, `[m, K]`; it is written to.
        changed: Which rows changed, `[m]`.
    """
    # Products of float32 pieces are not symmetric.
    inner[:, changed] = (inner[:, changed] + inner[:, changed].T) / 2
    fresh = np.zeros((inner.shape[1], inner.shape[1]))
    fresh[: len(gram), : len(gram)] = gram
    fresh[changed] = inner
    fresh[:, changed] = inner.T
    return fresh


def weighted_sum(weights: Floats, blocks: list[Tensor]) -> Tensor:
    """Σ weight · row over the blocks."""
    total = torch.zeros(blocks[0].shape[1], device=blocks[0].device)
    factors = torch.from_numpy(weights).to(total)
    width = WIDE if total.device.type == "cpu" else LARGE
    for rows, columns, piece in pieces(blocks, width, total.device, torch.float32):
        total[columns] += factors[rows] @ piece
    return total
