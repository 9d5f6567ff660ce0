"""A GPT-NeoX text classifier of Pythia-70M's size, in operations that can be stacked over clients.

Black et al., "GPT-NeoX-20B", 2022; Biderman et al., "Pythia", ICML 2023. Submodules are named as in
the published checkpoints. Positions, rotary tables and the causal mask are computed from the
tokens: no buffers.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from kairosfl.errors import UserError
from kairosfl.models import checks, neox_checkpoint

_ROTARY_BASE = 10_000.0


class Attention(nn.Module):
    """Causal attention with rotary positions on the first `rotary` dimensions of a head."""

    def __init__(self, hidden: int, heads: int, rotary: int) -> None:
        super().__init__()
        self.heads = heads
        self.size = hidden // heads
        self.rotary = rotary
        self.query_key_value = nn.Linear(hidden, 3 * hidden)
        self.dense = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        # The published weights store query, key and value of each head contiguously.
        heads = self.query_key_value(x).unflatten(-1, (self.heads, 3 * self.size)).transpose(-3, -2)
        query, key, value = torch.chunk(heads, 3, dim=-1)
        query = self._rotate(query, cosine, sine)
        key = self._rotate(key, cosine, sine)
        scores = query @ key.transpose(-1, -2) / math.sqrt(self.size)
        weights = torch.softmax(scores.masked_fill(future, -math.inf), dim=-1)
        attended = (weights @ value).transpose(-3, -2).flatten(-2)
        return self.dense(attended)  # type: ignore[no-any-return]

    def _rotate(self, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        half = self.rotary // 2
        first, second, rest = torch.split(x, [half, half, self.size - self.rotary], dim=-1)
        turned_first = first * cosine - second * sine
        turned_second = second * cosine + first * sine
        return torch.cat([turned_first, turned_second, rest], dim=-1)


class Block(nn.Module):
    """Parallel attention and feed-forward on one residual stream."""

    def __init__(self, hidden: int, heads: int, rotary: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.post_attention_layernorm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, rotary)
        self.mlp = nn.Sequential(
            OrderedDict(
                dense_h_to_4h=nn.Linear(hidden, 4 * hidden),
                act=nn.GELU(),
                dense_4h_to_h=nn.Linear(4 * hidden, hidden),
            )
        )

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, future: Tensor) -> Tensor:
        attended = self.attention(self.input_layernorm(x), cosine, sine, future)
        fed_forward = self.mlp(self.post_attention_layernorm(x))
        return x + attended + fed_forward  # type: ignore[no-any-return]


class GPTNeoX(nn.Module):
    """Class logits of a text, from its last token or the mean of its tokens.

    Trailing `pad` tokens are ignored.
    """

    def __init__(
        self,
        *,
        vocabulary: int,
        hidden: int,
        layers: int,
        heads: int,
        rotary: int,
        pool: Literal["last", "mean"],
        pad: int,
        classes: int,
    ) -> None:
        super().__init__()
        self.pool = pool
        self.pad = pad
        # Scalars rather than a tensor: no buffer, and no copy from the host.
        self.frequencies = tuple(_ROTARY_BASE ** (-2 * k / rotary) for k in range(rotary // 2))
        self.embed_in = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, rotary) for _ in range(layers))
        self.final_layer_norm = nn.LayerNorm(hidden)
        self.score = nn.Linear(hidden, classes, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        tokens = tokens.long()
        x = self.embed_in(tokens)
        positions = torch.cumsum(torch.ones_like(tokens), dim=-1) - 1
        places = positions.float()
        angles = torch.stack([places * frequency for frequency in self.frequencies], dim=-1)
        cosine = torch.cos(angles).type_as(x).unsqueeze(-3)
        sine = torch.sin(angles).type_as(x).unsqueeze(-3)
        future = (positions.unsqueeze(-2) > positions.unsqueeze(-1)).unsqueeze(-3)
        for layer in self.layers:
            x = layer(x, cosine, sine, future)
        x = self.final_layer_norm(x)
        weights = self._pool_weights(tokens, positions).type_as(x)
        return self.score((weights.unsqueeze(-2) @ x).squeeze(-2))  # type: ignore[no-any-return]

    def _pool_weights(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The weight of each position in the pooled embedding."""
        text = tokens != self.pad
        if self.pool == "mean":
            return text / text.sum(dim=-1, keepdim=True).clamp(min=1)
        return positions == (positions * text).amax(dim=-1, keepdim=True)


def gpt_neox(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int = 50_304,
    hidden: int = 512,
    layers: int = 6,
    heads: int = 8,
    rotary_pct: float = 0.25,
    pool: Literal["last", "mean"] = "last",
    pad: int = 0,
    checkpoint: str | Path | None = None,
) -> nn.Module:
    """GPT-NeoX of Pythia-70M's size with a classification head, newly made or from a checkpoint."""
    checks.tokens("gpt_neox", shape)
    checks.positive("gpt_neox", vocabulary=vocabulary, hidden=hidden, layers=layers, heads=heads)
    if hidden % heads:
        raise UserError(
            f"model.hidden of gpt_neox must be a multiple of heads={heads}, got {hidden}"
        )
    size = hidden // heads
    rotary = int(size * rotary_pct)
    if not 0 < rotary_pct <= 1 or rotary < 2 or rotary % 2:
        raise UserError(
            f"model.rotary_pct of gpt_neox must rotate an even number of a head's {size} "
            f"dimensions, got {rotary_pct}, which rotates {rotary}"
        )
    model = GPTNeoX(
        vocabulary=vocabulary,
        hidden=hidden,
        layers=layers,
        heads=heads,
        rotary=rotary,
        pool=pool,
        pad=pad,
        classes=classes,
    )
    if checkpoint is not None:
        neox_checkpoint.load(model, Path(checkpoint), heads=heads, rotary_pct=rotary_pct)
    return model
