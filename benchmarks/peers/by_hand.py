"""FedAvg without a framework, as tight as PyTorch allows one client after another."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from peers.common import Job, measure
from torch import Tensor


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
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
            mine = parts[client]
            for batch in mine[torch.randperm(len(mine))].split(job.work.batch):
                loss = F.cross_entropy(model(inputs[batch]), targets[batch])
                gradients = torch.autograd.grad(loss, w)
                with torch.no_grad():
                    torch._foreach_add_(w, gradients, alpha=-job.work.lr)
            with torch.no_grad():
                torch._foreach_add_(total, w, alpha=1 / len(cohort))  # every client has the same number of samples
        x = total
        tick()
    return x


if __name__ == "__main__":
    measure(train)
