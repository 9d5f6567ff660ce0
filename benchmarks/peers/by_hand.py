"""FedAvg without a framework, one client after another: as tight as PyTorch allows or, with
--optimiser, as usual.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from peers.common import Job, measure
from torch import Tensor


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--optimiser", action="store_true", help="a torch.optim.SGD for every client"
    )
    usual = parser.parse_known_args()[0].optimiser
    inputs, targets = job.train_tensors
    parts = torch.from_numpy(job.parts)
    model = job.model()
    w = list(model.parameters())
    x = [p.detach().clone() for p in w]
    for cohort in job.cohorts.tolist():
        total = [torch.zeros_like(p) for p in x]
        for client in cohort:
            with torch.no_grad():
                torch._foreach_copy_(w, x)
            optimiser = torch.optim.SGD(w, lr=job.work.lr) if usual else None
            mine = parts[client]
            for batch in mine[torch.randperm(len(mine))].split(job.work.batch):
                loss = F.cross_entropy(model(inputs[batch]), targets[batch])
                if optimiser is not None:
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
                else:
                    gradients = torch.autograd.grad(loss, w)
                    with torch.no_grad():
                        torch._foreach_add_(w, gradients, alpha=-job.work.lr)
            with torch.no_grad():
                torch._foreach_add_(
                    total, w, alpha=1 / len(cohort)
                )  # every client has the same number of samples
        x = total
        tick()
    return x


if __name__ == "__main__":
    measure(train)
