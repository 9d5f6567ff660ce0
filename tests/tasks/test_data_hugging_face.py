"""The real `datasets` package of Hugging Face: tables, splits, formats, streams, images, texts and
tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import kairosfl
from kairosfl.data.own import from_hugging_face

datasets = pytest.importorskip("datasets")


def table(samples: int, seed: int) -> Any:
    """Points of three classes, from five people."""
    draw = np.random.default_rng(seed)
    label = draw.integers(0, 3, samples)
    x = draw.normal(size=(samples, 4))
    x[np.arange(samples), label] += 3
    columns = {
        "x": x.tolist(),
        "label": label.tolist(),
        "who": [f"person {i % 5}" for i in range(samples)],
    }
    return datasets.Dataset.from_dict(columns).cast_column(
        "label", datasets.ClassLabel(names=["cat", "dog", "cow"])
    )


TRAIN, TEST = table(200, 0), table(80, 1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def simulate(model: nn.Module, *data: Any, **options: Any) -> kairosfl.History:
    return kairosfl.simulate(model, *data, rounds=20, cohort=3, lr=0.3, progress=False, **options)


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ((datasets.DatasetDict({"train": TRAIN, "test": TEST}),), {"client": "who"}),
        (
            (datasets.DatasetDict({"train": TRAIN, "test": TEST}).with_format("torch"),),
            {"client": "who"},
        ),
        ((datasets.DatasetDict({"train": TRAIN}), TEST), {"input": "x", "clients": 6}),
        ((TRAIN.to_iterable_dataset(), TEST), {"input": "x", "client": "who"}),
        (([TRAIN.shard(4, part) for part in range(4)], TEST), {"input": "x"}),
    ],
    ids=["splits", "torch format", "a test of its own", "a stream", "a table per client"],
)
def test_tables_train(data: tuple[Any, ...], options: dict[str, Any]) -> None:
    assert simulate(nn.Linear(4, 3), *data, **options).score > 0.8


def test_people_become_clients() -> None:
    data = from_hugging_face(TRAIN, TEST, input="x", client="who")
    assert data.labels == ("cat", "dog", "cow")
    assert data.key_names == tuple(f"person {i}" for i in range(5))
    assert data.keys is not None
    assert data.keys.tolist() == [i % 5 for i in range(200)]
    torch.testing.assert_close(data.train.read(torch.arange(200))[0], torch.tensor(TRAIN["x"][:]))


def test_pictures_and_texts_train() -> None:
    image = pytest.importorskip("PIL.Image")
    pictures = [image.fromarray(np.full((4, 4), 100 * (i % 2), np.uint8)) for i in range(40)]
    seen = datasets.Dataset.from_dict({"image": pictures, "label": [i % 2 for i in range(40)]})
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    assert simulate(model, seen, seen, clients=4).score == 1.0
    read = datasets.Dataset.from_dict({"text": ["no", "ok"] * 20, "label": [0, 1] * 20})
    model = nn.Sequential(nn.Embedding(128, 4), nn.Flatten(), nn.Linear(8, 2))
    assert simulate(model, read, read, clients=4, encode=lambda text: [*text.encode()]).score == 1.0


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out: Tensor = self.head((self.embed(input_ids) * attention_mask[..., None]).mean(1))
        return out


def test_tokens_are_given_by_name() -> None:
    ids = [[1, 2, 0], [3, 4, 0]] * 20
    data = datasets.Dataset.from_dict(
        {"input_ids": ids, "attention_mask": [[1, 1, 0]] * 40, "label": [0, 1] * 20}
    )
    history = simulate(Bag(), data, data, clients=4, input=["input_ids", "attention_mask"])
    assert history.score == 1.0


@pytest.mark.parametrize(
    ("data", "options", "sentence"),
    [
        (
            TRAIN,
            {"target": "labels"},
            "the training data has no column 'labels'; did you mean 'label'?",
        ),
        (
            TRAIN,
            {},
            "the training data has the columns 'x', 'who' besides 'label'; name the input, such as input='x'.",
        ),
        (
            TRAIN.select_columns("label"),
            {},
            "the training data has no column besides 'label' to predict it from; add one.",
        ),
        (
            TRAIN.select_columns(["who", "label"]),
            {},
            "training sample 0 cannot be made a tensor: 'person 0' is text; encode it.",
        ),
        (
            datasets.DatasetDict({"train": TRAIN, "validation": TEST}),
            {"no test": True},
            "train has the splits 'train', 'validation' and no 'test'; give it one.",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(data: Any, options: dict[str, Any], sentence: str) -> None:
    test = () if options.pop("no test", False) else (TEST,)
    with pytest.raises(kairosfl.UserError) as error:
        simulate(nn.Linear(4, 3), data, *test, clients=4, **options)
    assert str(error.value) == sentence
