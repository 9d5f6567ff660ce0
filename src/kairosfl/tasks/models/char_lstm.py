"""FedCL's character model (Table 3 of the paper): an embedding and two LSTM layers predict the next character.

The LSTM is written in basic operations because the fused kernels of nn.LSTM cannot be stacked over clients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from kairosfl.tasks.models import checks


class LSTMLayer(nn.Module):
    """One LSTM layer over sequences of a fixed length; weights, gates and initialisation as in nn.LSTM."""

    def __init__(self, inputs: int, width: int, length: int) -> None:
        super().__init__()
        self.width = width
        self.length = length
        self.input = nn.Linear(inputs, 4 * width)
        self.recurrent = nn.Linear(width, 4 * width)
        bound = 1 / math.sqrt(width)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, length, inputs] to [batch, length, width]; any other length fails in `torch.split`."""
        # The input part of the gates needs no recurrence: one matrix product for all steps.
        steps = torch.split(self.input(x), [1] * self.length, dim=-2)
        cell = hidden = torch.zeros_like(steps[0][..., : self.width])
        outputs = []
        for step in range(self.length):
            gates = steps[step] + self.recurrent(hidden)
            input_gate, forget_gate, candidate, output_gate = torch.chunk(gates, 4, dim=-1)
            cell = torch.sigmoid(forget_gate) * cell + torch.sigmoid(input_gate) * torch.tanh(candidate)
            hidden = torch.sigmoid(output_gate) * torch.tanh(cell)
            outputs.append(hidden)
        return torch.cat(outputs, dim=-2)


class CharLSTM(nn.Module):
    """Logits of the character that follows a sequence."""

    def __init__(
        self,
        *,
        length: int,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        widths = [embedding] + [hidden] * layers
        self.lstm = nn.Sequential(*(LSTMLayer(width, hidden, length) for width in widths[:-1]))
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs = self.lstm(self.embedding(tokens.long()))
        return self.classifier(self.dropout(outputs[..., -1, :]))  # type: ignore[no-any-return]


def char_lstm(
    shape: tuple[int, ...],
    classes: int,
    *,
    vocabulary: int | None = None,
    embedding: int = 256,
    hidden: int = 512,
    layers: int = 2,
    dropout: float = 0.05,
) -> nn.Module:
    """FedCL's character LSTM (Table 3): 80-256-512x2-80; the vocabulary defaults to the classes."""
    length = checks.tokens("char_lstm", shape)
    vocabulary = classes if vocabulary is None else vocabulary
    checks.positive("char_lstm", vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers)
    checks.probability("char_lstm", dropout=dropout)
    return CharLSTM(
        length=length,
        vocabulary=vocabulary,
        embedding=embedding,
        hidden=hidden,
        layers=layers,
        dropout=dropout,
        classes=classes,
    )
