"""Inputs and targets of samples: a tensor, or a tuple or dict of tensors that are as long."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Tree = Tensor | tuple[Tensor, ...] | dict[str, Tensor]


def leaves(tree: Tree) -> list[Tensor]:
    """The tensors, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, dict):
        return list(tree.values())
    return list(tree)


def tree_map(change: Callable[[Tensor], Any], tree: Tree) -> Any:
    """The same structure with every tensor changed."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, dict):
        return {name: change(leaf) for name, leaf in tree.items()}
    return tuple(change(leaf) for leaf in tree)


def cast(tree: Tree, dtype: torch.dtype) -> Any:
    """The tree with its floating-point tensors of this type."""

    def converted(leaf: Tensor) -> Tensor:
        return leaf.to(dtype) if leaf.is_floating_point() else leaf

    return tree_map(converted, tree)


def rows(tree: Tree) -> int:
    """The number of samples."""
    return len(leaves(tree)[0])


def join(change: Callable[[list[Tensor]], Tensor], trees: list[Any]) -> Any:
    """One tree from several of the same structure, such as by `torch.cat` or `torch.stack`."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: change([tree[name] for tree in trees]) for name in first}
    if isinstance(first, tuple):
        return tuple(change(list(parts)) for parts in zip(*trees, strict=True))
    return change(trees)


def shapes(tree: Tree) -> Any:
    """The shapes, as messages show them."""
    return tree_map(lambda leaf: list(leaf.shape), tree)
