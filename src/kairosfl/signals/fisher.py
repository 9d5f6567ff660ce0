"""Trace of the Fisher information of a classifier: E_x Σ_c p_c(x) ‖∂ log p_c(x) / ∂w‖²."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, vmap

# Numbers in the gradients that are held at once: what a processor's cache likes, and what keeps a GPU busy.
CPU_NUMBERS, GPU_NUMBERS = 1 << 23, 1 << 29


def fisher_trace(
    predict: Callable[[Tensor, Tensor], Tensor],
    vector: Tensor,
    inputs: Callable[[Tensor], Tensor],
    rows: Tensor,
    draws: np.random.Generator | None = None,
) -> float:
    """Mean over the samples `rows`. Without `draws` the sum over classes is exact; with it one label is drawn a sample.

    The classes are taken one after another, so that a sample costs one gradient of memory and not one per class.
    """

    def log_likelihood(w: Tensor, sample: Tensor, label: Tensor) -> Tensor:
        return predict(w, sample[None]).log_softmax(1).gather(1, label[None, None])[0, 0]

    def square(sample: Tensor, label: Tensor) -> Tensor:
        slope: Tensor = grad(log_likelihood)(vector, sample, label)
        return slope @ slope

    squares = vmap(square)
    held = CPU_NUMBERS if vector.device.type == "cpu" else GPU_NUMBERS
    total = 0.0
    for chunk in rows.split(max(1, held // len(vector))):
        samples = inputs(chunk)
        with torch.no_grad():
            p = predict(vector, samples).softmax(1)
        if draws is None:
            labels = torch.arange(p.shape[1], device=p.device)
            traces = torch.stack([p[:, label] * squares(samples, label.expand(len(p))) for label in labels])
        else:
            uniform = torch.from_numpy(draws.random(len(chunk))).to(p)
            traces = squares(samples, (p.cumsum(1) < uniform[:, None]).sum(1).clamp(max=p.shape[1] - 1))
        total += float(traces.double().sum())
    return total / len(rows)
