"""Kinds of tasks: losses and metrics against scikit-learn and numpy, training, and what is refused."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch import Tensor, nn

from kairosfl import simulate
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.metrics import Metric
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

N, TOKENS, WORDS, SIDE, CLASSES = 700, 5, 7, 4, 3  # more than one batch of an evaluation
RANDOM = torch.Generator().manual_seed(3)


class Words(nn.Module):
    """Tokens `[n, L]` → scores of the next one `[n, L, words]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.embedding(tokens))
        return out


FEATURES = torch.randn(N, 6, generator=RANDOM)
IMAGES = torch.randn(N, 2, SIDE, SIDE, generator=RANDOM)
SENTENCES = torch.randint(WORDS, (N, TOKENS), generator=RANDOM)
NEXT = torch.where(
    torch.rand(N, TOKENS, generator=RANDOM) < 0.2,
    -100,
    torch.randint(WORDS, (N, TOKENS), generator=RANDOM),
)
MASK = torch.where(
    torch.rand(N, SIDE, SIDE, generator=RANDOM) < 0.1,
    -100,
    torch.randint(CLASSES, (N, SIDE, SIDE), generator=RANDOM),
)
NUMBERS = torch.randn(N, 2, generator=RANDOM)
BITS = (torch.rand(N, 4, generator=RANDOM) < 0.4).float()
YES = torch.randint(2, (N,), generator=RANDOM)

# Name: model, inputs, targets, kind.
TASKS: dict[str, tuple[Any, Tensor, Tensor, str]] = {
    "classes": (lambda: nn.Linear(6, 2), FEATURES, YES, "classification"),
    "one logit": (lambda: nn.Linear(6, 1), FEATURES, YES, "classification"),
    "zeros and ones": (lambda: nn.Linear(6, 1), FEATURES, YES.float(), "binary"),
    "zeros and ones in a column": (
        lambda: nn.Linear(6, 1),
        FEATURES,
        YES.float()[:, None],
        "binary",
    ),
    "labels": (lambda: nn.Linear(6, 4), FEATURES, BITS, "multilabel"),
    "whole labels": (lambda: nn.Linear(6, 4), FEATURES, BITS.long(), "multilabel"),
    "numbers": (lambda: nn.Linear(6, 2), FEATURES, NUMBERS, "regression"),
    "a number": (lambda: nn.Linear(6, 1), FEATURES, NUMBERS[:, 0], "regression"),
    "a mask": (lambda: nn.Conv2d(2, CLASSES, 1), IMAGES, MASK, "segmentation"),
    "tokens": (Words, SENTENCES, NEXT, "language"),
}


def task(name: str, **more: Any) -> Task:
    make, inputs, targets, _ = TASKS[name]
    torch.manual_seed(1)
    samples = Samples(inputs, targets)
    halves = Population.from_lists([np.arange(N // 2), np.arange(N // 2, N)])
    return Task(make(), DataSet("own", samples, samples, **more), halves)


def expected(name: str) -> dict[str, float]:
    """The metrics by scikit-learn and numpy, in float64."""
    made = task(name)
    with torch.no_grad():
        z = made.model(TASKS[name][1]).double().numpy()
    y, kind = TASKS[name][2].numpy(), TASKS[name][3]
    if kind in ("classification", "binary"):
        logit = z[:, 0] if z.shape[1] == 1 else z[:, 1] - z[:, 0]
        p = 1 / (1 + np.exp(-logit))
        found = {"loss": reference.log_loss(y, p), "accuracy": reference.accuracy_score(y, p > 0.5)}
        return found | ({"f1": reference.f1_score(y, p > 0.5)} if kind == "binary" else {})
    if kind == "multilabel":
        p = 1 / (1 + np.exp(-z))
        return {
            "loss": -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p)),
            "f1": reference.f1_score(y, z > 0, average="micro"),
            "exact_match": reference.accuracy_score(y, z > 0),
        }
    if kind == "regression":
        y = y.reshape(len(y), -1)
        return {
            "loss": np.mean((z - y) ** 2),
            "rmse": math.sqrt(reference.mean_squared_error(y, z)),
            "mae": reference.mean_absolute_error(y, z),
            "r2": reference.r2_score(y, z),
        }
    z = z.transpose(0, 2, 3, 1).reshape(N, -1, CLASSES) if kind == "segmentation" else z
    y = y.reshape(N, -1)
    nll = np.log(np.exp(z).sum(2)) - np.take_along_axis(z, np.maximum(y, 0)[..., None], 2)[..., 0]
    counts = y != -100
    loss = np.mean([nll[i][counts[i]].mean() if counts[i].any() else 0.0 for i in range(N)])
    right = reference.accuracy_score(y[counts], z.argmax(2)[counts])
    if kind == "language":
        return {"loss": loss, "perplexity": math.exp(nll[counts].mean()), "token_accuracy": right}
    return {
        "loss": loss,
        "iou": reference.jaccard_score(y[counts], z.argmax(2)[counts], average="macro"),
        "pixel_accuracy": right,
    }


@pytest.mark.parametrize("make", [Loop, Batched])
@pytest.mark.parametrize("name", TASKS)
def test_metrics_are_those_of_scikit_learn(name: str, make: Any) -> None:
    made = task(name)
    assert made.dataset.kind == TASKS[name][3]
    made.check()
    found = make(made).evaluate(made.start())
    wanted = expected(name)
    assert ["loss", *found.metrics] == list(wanted)
    assert [found.loss, *found.metrics.values()] == pytest.approx(list(wanted.values()), rel=1e-5)
    assert found.main == found.metrics[made.main[0]]


@pytest.mark.parametrize("name", ["one logit", "labels", "a number", "a mask", "tokens"])
def test_the_main_metric_of_each_client(name: str) -> None:
    made = task(name)
    found = Loop(made).evaluate_clients(made.start())
    for client, value in enumerate(found):
        rows = torch.from_numpy(made.clients[client].astype(np.int64))
        alone = Task(
            made.model,
            DataSet("own", made.dataset.train, made.dataset.train.take(rows)),
            made.clients,
        )
        assert value == pytest.approx(Loop(alone).evaluate(made.start()).main, rel=1e-6)


@pytest.mark.parametrize("name", TASKS)
def test_every_kind_trains_alike_on_loop_and_batched(name: str) -> None:
    make, inputs, targets, _ = TASKS[name]
    vectors = []
    for engine in ("loop", "batched"):
        torch.manual_seed(2)
        small = (inputs[:60], targets[:60])
        history = simulate(
            make(),
            small,
            small,
            clients=4,
            partition="iid",
            rounds=2,
            lr=0.05,
            batch_size=4,
            engine=engine,
            progress=False,
        )
        assert history.metric in history.metrics[-1]
        assert math.isfinite(history.score)
        vectors.append(history.x)
    assert torch.allclose(*vectors, rtol=1e-5, atol=1e-6)


def test_the_loss_falls_and_the_summary_follows_the_direction() -> None:
    torch.manual_seed(0)
    y = FEATURES @ torch.randn(6, 1, generator=RANDOM)
    history = simulate(
        nn.Linear(6, 1), (FEATURES, y), (FEATURES, y), clients=5, rounds=8, lr=0.05, progress=False
    )
    rmse = [row["rmse"] for row in history.metrics]
    assert rmse == sorted(rmse, reverse=True)
    assert history.last("r2") > 0.9
    with pytest.raises(UserError, match="the history has no 'accuracy'"):
        history.accuracy  # noqa: B018
    import json

    summary = json.loads((history.folder / "summary.json").read_text())
    assert (summary["metric"], summary["best_rmse"], summary["best_round"]) == (
        "rmse",
        min(rmse),
        8,
    )


class Pair(nn.Module):
    """Two inputs by name or by position; an answer like those of transformers."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.left, self.right, self.answer = nn.Linear(6, 3), nn.Linear(2, 3), answer

    def forward(self, left: Tensor, right: Tensor) -> Any:
        logits = self.left(left) + self.right(right)
        return {"tuple": (logits, left), "dict": {"hidden": left, "logits": logits}}.get(
            self.answer, logits
        )


@pytest.mark.parametrize("answer", ["tensor", "tuple", "dict"])
@pytest.mark.parametrize("form", [dict, tuple])
def test_several_inputs_and_any_answer_train_alike(form: type, answer: str) -> None:
    targets, other = torch.randint(3, (60,), generator=RANDOM), NUMBERS[:60]
    inputs: Any = (
        {"right": other, "left": FEATURES[:60]} if form is dict else (FEATURES[:60], other)
    )
    vectors = []
    for engine, kind in (("loop", answer), ("batched", answer), ("loop", "tensor")):
        torch.manual_seed(2)
        settings: Any = {
            "clients": 4,
            "rounds": 2,
            "batch_size": 4,
            "engine": engine,
            "progress": False,
        }
        vectors.append(simulate(Pair(kind), (inputs, targets), (inputs, targets), **settings).x)
    assert torch.allclose(vectors[0], vectors[1], rtol=1e-5, atol=1e-6)
    assert torch.equal(vectors[0], vectors[2])


def test_metrics_and_losses_of_ones_own() -> None:
    def off(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs[:, 0] - targets).abs()

    settings: Any = {"clients": 4, "rounds": 1, "progress": False, "loss": off}
    small = (FEATURES[:60], NUMBERS[:60, 0])
    own = simulate(
        nn.Linear(6, 1), small, small, metrics={"off": Metric(off, better="lower")}, **settings
    )
    assert (own.metric, own.score) == ("off", pytest.approx(own.last("loss")))
    none = simulate(nn.Linear(6, 1), small, small, metrics={}, **settings)
    assert (none.metric, none.score) == ("loss", none.last("loss"))

    def tree(outputs: Tensor, targets: Any) -> Tensor:
        return (outputs[:, 0] - targets["a"]).square() * targets["b"]

    line, targets = nn.Linear(6, 1), {"a": NUMBERS[:60, 0], "b": torch.rand(60, generator=RANDOM)}
    both = [
        simulate(
            line,
            (FEATURES[:60], targets),
            (FEATURES[:60], targets),
            engine=engine,
            **(settings | {"loss": tree}),
        )
        for engine in ("loop", "batched")
    ]
    assert both[0].metric == "loss"
    assert both[0].score == pytest.approx(both[1].score, rel=1e-4)


def refuse(words: str, model: nn.Module, x: Any, y: Any, **more: Any) -> None:
    with pytest.raises(UserError, match=words):
        simulate(model, (x, y), (x, y), **{"clients": 2, "rounds": 1, "progress": False} | more)


def test_what_does_not_fit_is_refused_before_training() -> None:
    line = nn.Linear(6, 1)
    refuse(
        r"loss returned \[\] for outputs of shape \[4, 1\] and targets of shape \[4\]",
        line,
        FEATURES,
        NUMBERS[:, 0],
        loss=nn.MSELoss(),
    )
    refuse(
        r"metrics\['bad'\] returned \[\]",
        line,
        FEATURES,
        NUMBERS[:, 0],
        metrics={"bad": lambda o, t: o.mean()},
    )
    refuse(
        "cannot have the name 'steps'",
        line,
        FEATURES,
        NUMBERS[:, 0],
        metrics={"steps": Metric(lambda o, t: o[:, 0])},
    )
    refuse(
        "better = 'up'",
        line,
        FEATURES,
        NUMBERS[:, 0],
        metrics={"a": lambda o, t: Metric(line, "up")},
    )  # type: ignore[arg-type]
    refuse(
        "kind = 'regresion' of data set 'own' is unknown; did you mean 'regression'",
        line,
        FEATURES,
        NUMBERS[:, 0],
        kind="regresion",
    )
    refuse(
        "'dirichlet', which deals samples by their class, but data set 'own' is for regression",
        line,
        FEATURES,
        NUMBERS[:, 0],
        partition="dirichlet",
    )
    missing = NUMBERS[:, 0].clone()
    missing[5] = float("nan")
    refuse(
        "training sample 5 of data set 'own' has a target that is not a finite number",
        line,
        FEATURES,
        missing,
    )
    refuse(
        "are torch.float32; language needs whole numbers",
        Words(),
        SENTENCES,
        NEXT.float(),
        kind="language",
    )
    refuse("returns a dict with 'hidden', 'other'", Named(), FEATURES, YES)
    refuse("data set 'own' is of no known kind; give its task a loss", line, FEATURES, {"a": YES})


def test_rules_and_detectors_say_where_they_are_not_defined() -> None:
    conv = nn.Conv2d(2, CLASSES, 1)
    refuse(
        "has no nn.Linear, whose input would be the features that rules compare",
        conv,
        IMAGES,
        MASK,
        algorithm="alt",
    )
    refuse(
        r"moon compares features.* is given \[2, 4, 8\] for 4 samples",
        Across(),
        FEATURES,
        NUMBERS[:, 0],
        algorithm="moon",
    )
    refuse(
        "Fisher information of class probabilities, but data set 'own' is for regression",
        nn.Linear(6, 1),
        FEATURES,
        NUMBERS[:, 0],
        detector="fedfim",
    )
    settings: Any = {"clients": 3, "rounds": 2, "epochs": 2, "batch_size": 8, "progress": False}
    for algorithm in ("alt", "moon", "pa3fed", "scaffold + fedcl + alt + pa3fed"):
        vectors = []
        for engine in ("loop", "batched"):
            torch.manual_seed(0)
            small = (SENTENCES[:60], NEXT[:60])
            vectors.append(
                simulate(Words(), small, small, algorithm=algorithm, engine=engine, **settings).x
            )
        assert torch.allclose(*vectors, rtol=1e-4, atol=1e-5), algorithm


class Across(nn.Module):
    """Its last layer sees the samples of a batch in pairs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x).view(-1, 4, 8)).view(-1, 2).mean(1)[: len(x)]  # type: ignore[no-any-return]


class Named(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 2)

    def forward(self, x: Tensor) -> Any:
        return {"hidden": x, "other": super().forward(x)}


def test_outputs_that_no_sample_needs_are_mentioned() -> None:
    """Such as the thousand of a model for ImageNet."""
    made = task("classes")
    with pytest.warns(
        UserWarning,
        match=r"shape \[\d+, 5\], but the data has 2 classes: .* give its last layer 2\.",
    ):
        replace(made, model=nn.Linear(6, 5)).check()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.check()
