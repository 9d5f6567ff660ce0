"""Trace of the Fisher information of a classifier: E_x Σ_c p_c(x) ‖∂ log p_c(x) / ∂w‖²."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from kairosfl.tasks.forward import call
from kairosfl.tasks.metrics import class_scores
from kairosfl.tasks.tree import Tree, tree_map

# Gradient elements held in memory at the same time: what fits a CPU's cache, and what keeps a GPU
# busy.
CPU_NUMBERS = 1 << 23
GPU_NUMBERS = 1 << 29


def fisher_trace(
    model: nn.Module,
    weights: dict[str, Tensor],
    inputs: Callable[[Tensor], Any],
    rows: Tensor,
    draws: np.random.Generator | None = None,
) -> float:
    """Mean over the samples `rows` of a model that runs with these weights.

    Without `draws` the sum over the classes is exact; with it one label is drawn for each sample
    from the model's own distribution. The classes are taken one after another, so that a sample
    costs one gradient of memory and not one per class, and the gradients by tensor: those of one
    long vector would each be padded to its whole length.
    """

    def log_likelihood(w: dict[str, Tensor], sample: Tree, label: Tensor) -> Tensor:
        outputs = call(model, tree_map(lambda leaf: leaf[None], sample), w)
        return class_scores(outputs).log_softmax(1).gather(1, label[None, None])[0, 0]

    def square(sample: Tree, label: Tensor) -> Tensor:
        return _length(grad(log_likelihood)(weights, sample, label).values())

    def one_by_one(samples: Tree, labels: Tensor) -> Tensor:
        leaves = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
        variables = [*leaves.values()]
        lengths = []
        # cuDNN's recurrent layers have gradients in training mode only.
        with torch.backends.cudnn.flags(enabled=False):
            for k, label in enumerate(labels):
                end = log_likelihood(leaves, tree_map(itemgetter(k), samples), label)
                lengths.append(_length(torch.autograd.grad(end, variables, materialize_grads=True)))
        return torch.stack(lengths)

    # vmap supports neither of these.
    recurrent = any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules())
    squares = one_by_one if recurrent else vmap(square)
    held = CPU_NUMBERS if rows.device.type == "cpu" else GPU_NUMBERS
    total = 0.0
    numbers = sum(weight.numel() for weight in weights.values())
    for chunk in rows.split(max(1, held // numbers)):
        samples = inputs(chunk)
        with torch.no_grad():
            p = class_scores(call(model, samples, weights)).softmax(1)
        classes = p.shape[1]
        if draws is None:  # [classes, samples]
            by_class = []
            for label in torch.arange(classes, device=p.device):
                by_class.append(p[:, label] * squares(samples, label.expand(len(p))))
            traces = torch.stack(by_class)
        else:  # [samples], by the inverse of the distribution function
            uniform = torch.from_numpy(draws.random(len(chunk))).to(p)
            labels = (p.cumsum(1) < uniform[:, None]).sum(1).clamp(max=classes - 1)
            traces = squares(samples, labels)
        total += float(traces.double().sum())
    return total / len(rows)


def _length(slopes: Iterable[Tensor]) -> Tensor:
    """The squared length of a gradient."""
    return torch.stack([slope.square().sum() for slope in slopes]).sum()
