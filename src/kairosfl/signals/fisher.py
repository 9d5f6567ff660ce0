"""Trace of the Fisher information of a classifier: E_x Σ_c p_c(x) ‖∂ log p_c(x) / ∂w‖²."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, jacrev, vmap

CHUNK_NUMBERS = 1 << 25  # numbers in the gradients that are held at once


def fisher_trace(
    predict: Callable[[Tensor, Tensor], Tensor],
    vector: Tensor,
    inputs: Callable[[Tensor], Tensor],
    rows: Tensor,
    draws: np.random.Generator | None = None,
) -> float:
    """Mean over the samples `rows`. Without `draws` the sum over classes is exact; with it one label is drawn a sample.

    ∂ log p_c = (e_c − p)ᵀ J with the Jacobian J of the logits, so the exact sum is tr((diag p − p pᵀ) J Jᵀ).
    """

    def logits(w: Tensor, sample: Tensor) -> Tensor:
        return predict(w, sample[None])[0]

    def exact(w: Tensor, sample: Tensor) -> Tensor:
        jacobian, output = jacrev(lambda u: (lambda z: (z, z))(logits(u, sample)), has_aux=True)(w)
        p = output.softmax(0)
        inner = jacobian @ jacobian.T
        trace: Tensor = p @ inner.diagonal() - p @ inner @ p
        return trace

    def sampled(w: Tensor, sample: Tensor, uniform: Tensor) -> Tensor:
        def log_likelihood(u: Tensor) -> Tensor:
            log_p = logits(u, sample).log_softmax(0)
            label = (log_p.detach().exp().cumsum(0) < uniform).sum().clamp(max=len(log_p) - 1)
            return log_p.gather(0, label[None])[0]

        slope: Tensor = grad(log_likelihood)(w)
        return slope @ slope

    with torch.no_grad():
        classes = predict(vector, inputs(rows[:1])).shape[1]
    held = len(vector) * (classes if draws is None else 1)
    total = 0.0
    for chunk in rows.split(max(1, CHUNK_NUMBERS // held)):
        samples = inputs(chunk)
        if draws is None:
            traces = vmap(exact, in_dims=(None, 0))(vector, samples)
        else:
            uniform = torch.from_numpy(draws.random(len(chunk))).to(samples.device, vector.dtype)
            traces = vmap(sampled, in_dims=(None, 0, 0))(vector, samples, uniform)
        total += float(traces.double().sum())
    return total / len(rows)
