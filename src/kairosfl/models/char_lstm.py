"""FedCL's character model (Table 3): an embedding and two LSTM layers predict what comes next."""

from __future__ import annotations

from torch import Tensor, nn

from kairosfl.models import checks


class CharLSTM(nn.Module):
    """Logits of the character that follows a sequence."""

    def __init__(
        self,
        *,
        vocabulary: int,
        embedding: int,
        hidden: int,
        layers: int,
        dropout: float,
        classes: int,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        outputs, _ = self.lstm(self.embedding(tokens.long()))
        return self.classifier(self.dropout(outputs[:, -1]))  # type: ignore[no-any-return]


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
    checks.tokens("char_lstm", shape)
    if vocabulary is None:
        vocabulary = classes
    checks.positive(
        "char_lstm", vocabulary=vocabulary, embedding=embedding, hidden=hidden, layers=layers
    )
    checks.probability("char_lstm", dropout=dropout)
    return CharLSTM(
        vocabulary=vocabulary,
        embedding=embedding,
        hidden=hidden,
        layers=layers,
        dropout=dropout,
        classes=classes,
    )
