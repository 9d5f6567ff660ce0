"""What a round of FedAWARE costs the server: many clients of many parameters, a few of which
report.

    python benchmarks/speed/aware.py [--clients 1000] [--parameters 1000000] [--reports 10] \
        [--options "dtype='bfloat16'"]

Prints the seconds of a round's observe, write and step, of its parts, and the peak memory against
the table's.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from kairosfl.core.fields import Briefs, Report, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import brief, conclude
from kairosfl.core.run import Run, Setup, upcoming
from kairosfl.detectors import FGN
from kairosfl.rules import parse
from kairosfl.rules.fedaware import products, weighted_sum
from kairosfl.rules.minnorm import gap, min_norm


def cohort(briefs: Briefs, common: torch.Tensor, seed: int) -> Reports:
    """Updates that share a direction, as those of real clients do, and are mostly their own."""
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(len(briefs), len(common), generator=generator)
    delta.add_(common, alpha=0.3).mul_(1e-2)
    reports = [
        Report(
            client=client,
            n=10 + client % 90,
            steps=10,
            epochs=1.0,
            delta=common,
            loss=1.0,
            grad_sq=1.0,
            seconds=0,
        )
        for client in briefs.ids.tolist()
    ]
    return Reports.stack(reports, delta)


@dataclass
class Spent:
    """Seconds on the clock, and of processor time: on a busy machine the second is what the work
    costs.
    """

    wall: float = 0.0
    cpu: float = 0.0

    def __str__(self) -> str:
        return f"{self.wall:6.2f} s  (processor {self.cpu:.2f} s)"


@contextmanager
def clock() -> Iterator[Spent]:
    spent, wall, cpu = Spent(), time.perf_counter(), time.process_time()
    yield spent
    spent.wall, spent.cpu = time.perf_counter() - wall, time.process_time() - cpu


def best(times: Iterable[Spent]) -> Spent:
    """The fastest of several tries."""
    return min(times, key=lambda spent: spent.wall)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    parser.add_argument("--reports", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--options", default="")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    n, d = args.clients, args.parameters
    algorithm = parse(f"fedaware({args.options})")
    layout = Layout((Entry("body", (d - 1000,), 0), Entry("head", (1000,), d - 1000)))
    setup = Setup(
        algorithm, Recipe(rounds=100, cohort=args.reports, lr=0.1), n, layout, detectors=(FGN(),)
    )
    common = torch.randn(d, generator=torch.Generator().manual_seed(0))
    run = Run.start(torch.zeros(d), setup, seed=0)

    def one(ids: np.ndarray) -> Spent:
        nonlocal run
        now = upcoming(run, setup)
        briefs, _ = brief(run, setup, now, torch.from_numpy(ids))
        reports = cohort(briefs, common, run.round)
        with clock() as spent:
            run = conclude(run, setup, now, briefs, reports)
        return spent

    for ids in np.array_split(np.arange(n), max(1, n // 50)):
        one(ids)
    table, state = run.tables[0], run.states[0]
    size = sum(value.nbytes for block in table.blocks for value in block.values())
    print(
        f"{n} clients x {d:,} parameters, {args.reports} reports a round, {algorithm}, {args.threads} threads"
    )
    draw = np.random.default_rng(0)
    rounds = [one(np.sort(draw.choice(n, args.reports, replace=False))) for _ in range(args.rounds)]
    print(f"the server's whole round   {best(rounds)}")

    def part(name: str, work: Callable[[], object]) -> None:
        times = []
        for _ in range(3):
            with clock() as spent:
                work()
            times.append(spent)
        print(f"{name:26s} {best(times)}")

    gram = run.states[0]["gram"].numpy()
    lengths = np.sqrt(np.diag(gram))
    problem, weights = gram / lengths / lengths[:, None], state["lambda"].numpy()
    if "average" in table.default:
        blocks = list(table.column("average"))
        rows = table.rows(torch.arange(args.reports))["average"]
        part("  products of changed rows", lambda: products(rows, blocks))
        part("  the direction", lambda: weighted_sum(weights, blocks))
    part("  weights, warm", lambda: min_norm(problem, weights))
    part("  weights, cold", lambda: min_norm(problem))
    print(
        f"duality gap                {gap(problem, min_norm(problem)):.1e} of the largest squared norm"
    )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"memory: table {size / 2**30:.2f} GiB, peak of the process {peak / 2**30:.2f} GiB")


if __name__ == "__main__":
    main()
