"""Attention and Transformer encoders over stacked clients, in plain operations.

Samples come first inside, client after client: `[m·b, time, width]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.engines.batched import layers
from kairosfl.engines.batched.dropout import StackedDropout
from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import (
    Find,
    StackedLayerNorm,
    StackedLinear,
    Unstackable,
    found,
)
from kairosfl.engines.batched.recurrent import StackedRecurrent, inner


class StackedAttention(nn.Module):
    """Every client's multi-head attention; it does not return attention weights."""

    def __init__(self, layer: nn.MultiheadAttention, find: Find, frame: Frame) -> None:
        super().__init__()
        if layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn:
            raise Unstackable("an attention has keys of another width, bias_k or add_zero_attn")
        self.frame, self.first, self.heads = frame, layer.batch_first, layer.num_heads
        self.weight, self.bias = found(find(layer.in_proj_weight)), find(layer.in_proj_bias)
        self.out = StackedLinear(layer.out_proj, find, frame)
        self.drop = StackedDropout(layer.dropout, inner(find, layer), frame)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, None]:
        weights = self.frame.leaf(self.weight).to(query.dtype).chunk(3, 1)
        biases = (
            self.frame.leaf(self.bias).to(query.dtype).chunk(3, 1)
            if self.bias is not None
            else (None,) * 3
        )
        given = (query, key, value)
        q, k, v = (self._project(*each) for each in zip(given, weights, biases, strict=True))
        mask = _added(attn_mask, q.dtype)
        padding = _added(key_padding_mask, q.dtype)
        if padding is not None:  # [m·b, time] for all heads and positions
            padding = padding[:, None, None]
            mask = padding if mask is None else mask + padding
        y = self._attend(q, k, v, mask).transpose(1, 2).flatten(2)
        y = self.out(y)
        return (y if self.first else y.transpose(0, 1)), None

    def _project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Of every head: `[m·b, heads, time, width]`."""
        x = x if self.first else x.transpose(0, 1)
        rows = x.reshape(self.frame.clients, -1, x.shape[-1])
        y = (
            torch.bmm(rows, weight.mT)
            if bias is None
            else torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
        )
        return y.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if self.frame.keys is None or not self.drop.p:
            return F.scaled_dot_product_attention(q, k, v, mask)
        scores = q @ k.mT / q.shape[-1] ** 0.5
        shares: Tensor = self.drop((scores if mask is None else scores + mask).softmax(-1))
        return shares @ v


def _added(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as numbers to add to the scores; positions where a boolean mask is true are ignored."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))


class StackedEncoderLayer(nn.Module):
    """Every client's Transformer encoder layer."""

    def __init__(self, layer: nn.TransformerEncoderLayer, find: Find, frame: Frame) -> None:
        super().__init__()
        self.before, self.activation = layer.norm_first, layer.activation
        self.attention = StackedAttention(layer.self_attn, find, frame)
        self.first, self.attention.first = layer.self_attn.batch_first, True
        self.linear1, self.linear2 = (
            StackedLinear(each, find, frame) for each in (layer.linear1, layer.linear2)
        )
        self.norm1, self.norm2 = (
            StackedLayerNorm(each, find, frame) for each in (layer.norm1, layer.norm2)
        )
        number = inner(find, layer)
        self.drops = nn.ModuleList(
            StackedDropout(each.p, number + i, frame)
            for i, each in enumerate((layer.dropout, layer.dropout1, layer.dropout2), start=1)
        )

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        x = src if self.first else src.transpose(0, 1)
        if self.before:
            x = x + self._look(self.norm1(x), src_mask, src_key_padding_mask)
            x = x + self._think(self.norm2(x))
        else:
            x = self.norm1(x + self._look(x, src_mask, src_key_padding_mask))
            x = self.norm2(x + self._think(x))
        return x if self.first else x.transpose(0, 1)

    def _look(self, x: Tensor, mask: Tensor | None, padding: Tensor | None) -> Tensor:
        y: Tensor = self.drops[1](self.attention(x, x, x, padding, False, mask)[0])
        return y

    def _think(self, x: Tensor) -> Tensor:
        y: Tensor = self.drops[2](self.linear2(self.drops[0](self.activation(self.linear1(x)))))
        return y


class StackedEncoder(nn.Module):
    """Every client's Transformer encoder."""

    def __init__(self, layer: nn.TransformerEncoder, find: Find, frame: Frame) -> None:
        super().__init__()
        if any(type(each) is not nn.TransformerEncoderLayer for each in layer.layers):
            raise Unstackable("an encoder has layers of another kind")
        stacked = [StackedEncoderLayer(each, find, frame) for each in layer.layers]
        self.first = stacked[0].first
        for each in stacked:
            each.first = True
        self.layers = nn.ModuleList(stacked)
        self.norm = None if layer.norm is None else _stacked(layer.norm, find, frame)

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        x = src if self.first else src.transpose(0, 1)
        for layer in self.layers:
            x = layer(x, mask, src_key_padding_mask)
        x = x if self.norm is None else self.norm(x)
        return x if self.first else x.transpose(0, 1)


def _stacked(layer: nn.Module, find: Find, frame: Frame) -> nn.Module:
    if type(layer) not in LAYERS:
        raise Unstackable(f"it has a {type(layer).__name__}")
    return LAYERS[type(layer)](layer, find, frame)


LAYERS: dict[type[nn.Module], Callable[[Any, Find, Frame], nn.Module]] = layers.LAYERS | {
    nn.LSTM: StackedRecurrent,
    nn.GRU: StackedRecurrent,
    nn.RNN: StackedRecurrent,
    nn.MultiheadAttention: StackedAttention,
    nn.TransformerEncoderLayer: StackedEncoderLayer,
    nn.TransformerEncoder: StackedEncoder,
}
