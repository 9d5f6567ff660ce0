"""What the clock costs the server, and how many orders can train together, without any training.

    python benchmarks/speed/clock.py [--clients 100000] [--landings 10000] [--small]

Clients of a model with ten numbers answer at once, so that what is measured is the server: events,
drawing who is asked, availability, briefs, and the eight stages. `together` is the mean number of
orders that can train in one pass, which the clock alone decides.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Iterator

import numpy as np
import torch

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.fleets import fleet_of
from kairosfl.rules import parse

D = 10
PLANS = ((5, 10), (10, 100), (50, 500), (1, 100), (1, 1000))


class Instant:
    """An engine that answers without training, and notes how long that takes and for how many."""

    def __init__(self) -> None:
        self.seconds, self.passes = 0.0, list[int]()

    def train(self, briefs: Briefs) -> Reports:
        began = time.perf_counter()
        count = len(briefs)
        if count:
            self.passes.append(count)
        ones = torch.ones(count, dtype=torch.float64)
        reports = Reports(
            ids=briefs.ids,
            n=torch.ones(count, dtype=torch.int64),
            steps=torch.ones(count, dtype=torch.int64),
            epochs=ones,
            delta=torch.full((count, D), 1e-3),
            loss=ones,
            grad_sq=ones,
            seconds=ones,
        )
        self.seconds += time.perf_counter() - began
        return reports


def measured(clients: int, landings: int, availability: str) -> Iterator[str]:
    for k, concurrency in PLANS:
        number = max(1, landings // k)
        engine = Instant()
        setup = Setup(
            parse(f"fedbuff(k={k}, concurrency={concurrency})"),
            Recipe(rounds=number, cohort=k),
            clients,
            Layout((Entry("w", (D,), 0),)),
            sizes=np.ones(clients, dtype=np.int64),
            fleet=fleet_of("lognormal()", clients, 0, seconds=600.0, availability=availability),
        )
        began = time.perf_counter()
        *_, run = drive(rounds(Run.start(torch.zeros(D), setup, seed=0), setup), engine)
        server = time.perf_counter() - began - engine.seconds
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        yield (
            f"| {k} of {concurrency} | {availability} | {1000 * server / (number * k):.2f} "
            f"| {np.mean(engine.passes):.1f} | {run.time / 3600:,.0f} | {memory:,.0f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--landings", type=int, default=10_000)
    parser.add_argument("--small", action="store_true", help="a few hundred devices")
    chosen = parser.parse_args()
    clients = 2_000 if chosen.small else chosen.clients
    landings = 200 if chosen.small else chosen.landings
    print(f"{clients:,} devices, {landings:,} landings")
    print("| buffer | availability | server ms a landing | together | clock hours | peak MB |")
    print("|---|---|---|---|---|---|")
    for availability in ("always", "diurnal(hours=8.0)", "bernoulli(p=0.1)"):
        for line in measured(clients, landings, availability):
            print(line, flush=True)


if __name__ == "__main__":
    main()
