"""How fast LoRA adapters of many clients train beside one frozen language model.

    python benchmarks/speed/adapters.py --device cuda

Random tokens, rank 8: on the query, key, value and output projections of a decoder like Llama, or
on query and value of one like GPT-2, as in LoRA's paper. `eager`, `batched` and `ceiling` (one
adapter on one batch as large as all clients' together) as in `anymodel.py`.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from anymodel import Case, arguments, table
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

RANK = 8


class Adapted(nn.Module):
    """A frozen linear layer and a trained product of two small matrices."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.b.weight)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base(x) + 2.0 * self.b(self.a(x))
        return y


class Norm(nn.Module):
    """RMSNorm, frozen."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), 1e-5)


class Block(nn.Module):
    """A decoder layer with a gated MLP of about 8/3 of the width, and rotary positions."""

    def __init__(self, width: int, heads: int, groups: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.norm1, self.norm2 = Norm(width), Norm(width)
        self.q, self.o = Adapted(width, width), Adapted(width, width)
        self.k, self.v = Adapted(width, groups * self.size), Adapted(width, groups * self.size)
        self.gate, self.up = (
            nn.Linear(width, hidden, bias=False).requires_grad_(False) for _ in range(2)
        )
        self.down = nn.Linear(hidden, width, bias=False).requires_grad_(False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        n, length, width = x.shape
        y = self.norm1(x)
        q = self.q(y).view(n, length, self.heads, self.size).transpose(1, 2)
        k, v = (
            each(y).view(n, length, self.groups, self.size).transpose(1, 2)
            for each in (self.k, self.v)
        )
        q, k = (
            each * cos
            + torch.cat([-each[..., self.size // 2 :], each[..., : self.size // 2]], -1) * sin
            for each in (q, k)
        )
        if self.groups != self.heads:
            k, v = (each.repeat_interleave(self.heads // self.groups, 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, length, width))
        y = self.norm2(x)
        z: Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return z


class Decoder(nn.Module):
    """A frozen language model with adapters and a trained head; `again` computes activations twice
    to store fewer.
    """

    def __init__(
        self,
        width: int,
        depth: int,
        heads: int,
        groups: int,
        hidden: int,
        length: int,
        words: int,
        again: bool = False,
    ) -> None:
        super().__init__()
        self.again = again
        self.embed = nn.Embedding(words, width).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(width, heads, groups, hidden) for _ in range(depth))
        self.norm, self.head = Norm(width), nn.Linear(width, 10)
        size = width // heads
        angles = torch.arange(length)[:, None] * 10000 ** (-torch.arange(0, size, 2) / size)
        self.register_buffer("cos", torch.cat([angles, angles], 1).cos())
        self.register_buffer("sin", torch.cat([angles, angles], 1).sin())

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            if self.again:
                x = checkpoint(block, x, cos, sin, use_reentrant=False, preserve_rng_state=False)
            else:
                x = block(x, cos, sin)
        y: Tensor = self.head(self.norm(x)[:, -1])
        return y


class Plain(nn.Module):
    """A decoder layer as in GPT-2."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width).requires_grad_(False) for _ in range(2))
        self.q, self.v = Adapted(width, width), Adapted(width, width)
        self.k, self.o = (nn.Linear(width, width).requires_grad_(False) for _ in range(2))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        for each in (self.up, self.down):
            each.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        y = self.norm1(x)
        q, k, v = (
            each(y).view(n, length, self.heads, -1).transpose(1, 2)
            for each in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, length, width))
        z: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return z


class PlainDecoder(nn.Module):
    """A frozen language model as GPT-2, with adapters and a trained head."""

    def __init__(self, width: int, depth: int, heads: int, length: int, words: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width).requires_grad_(False)
        self.position = nn.Parameter(torch.randn(length, width) / 50, requires_grad=False)
        self.blocks = nn.Sequential(*(Plain(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width).requires_grad_(False), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        y: Tensor = self.head(self.norm(self.blocks(x + self.position.to(x.dtype)))[:, -1])
        return y


WORDS = 32_000
LOW = ("bfloat16",)
CASES = {
    "27M": Case(partial(Decoder, 512, 8, 8, 8, 1376, 128, 2_000), (128,), 2_000, 10, 8, 16, LOW),
    "27M gpt2": Case(partial(PlainDecoder, 512, 8, 8, 128, 2_000), (128,), 2_000, 10, 8, 16, LOW),
    "336M": Case(
        partial(Decoder, 1024, 24, 16, 16, 2752, 128, WORDS), (128,), WORDS, 32, 8, 8, LOW
    ),
    "336M gpt2": Case(
        partial(PlainDecoder, 1024, 24, 16, 128, WORDS), (128,), WORDS, 32, 8, 8, LOW
    ),
    "1.1B": Case(partial(Decoder, 2048, 22, 32, 4, 5632, 512, WORDS), (512,), WORDS, 8, 4, 8, LOW),
    "1.1B again": Case(
        partial(Decoder, 2048, 22, 32, 4, 5632, 512, WORDS, True), (512,), WORDS, 8, 4, 8, LOW
    ),
}


def main() -> None:
    chosen = arguments(list(CASES))
    cases = {name: CASES[name] for name in chosen.models}
    if chosen.small:
        for name in cases:
            tiny = partial(Decoder, 32, 2, 4, 2, 48, 8, 50, name.endswith("again"))
            plain = partial(PlainDecoder, 32, 2, 4, 8, 50)
            cases[name] = Case(plain if name.endswith("gpt2") else tiny, (8,), 50, 3, 2, 2, LOW)
    table(cases, torch.device(chosen.device), "tokens")


if __name__ == "__main__":
    main()
