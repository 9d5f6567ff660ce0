"""Language models whose targets are their inputs, which would learn to copy."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import kairosfl
from kairosfl.errors import UserError
from kairosfl.runs.config import resolve
from kairosfl.runs.prepare import build_task
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

WORDS = 11
IDS = torch.randint(WORDS, (20, 8), generator=torch.Generator().manual_seed(0))
SHIFTED = IDS[:, :-1], IDS[:, 1:]
FIX = (
    "a causal model predicts the next token: give ids[:, :-1] and ids[:, 1:], or a loss and metrics of your own if "
    "copies are meant."
)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))


def copying(outputs, targets):
    return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none").mean(1)


def refused(train, test=SHIFTED, **arguments):
    settings = {"clients": 2, "rounds": 1, "progress": False, "engine": "loop", **arguments}
    with pytest.raises(UserError) as error:
        kairosfl.simulate(words(), train, test, **settings)
    return str(error.value)


def padded():
    """The labels that Hugging Face's collators make: padding does not count."""
    labels = IDS.clone()
    labels[:, 5:] = -100
    return labels


class Lines(Dataset):
    """Tokens that are read when they are needed."""

    def __len__(self):
        return len(IDS)

    def __getitem__(self, number):
        return {"input_ids": IDS[number], "mask": torch.ones(8)}, IDS[number]


@pytest.mark.parametrize(
    "train",
    [
        (IDS, IDS),
        (IDS, padded()),
        ({"mask": torch.ones(20, 8), "ids": IDS}, IDS),
        [(IDS, IDS), (IDS, IDS)],
    ],
    ids=["arrays", "padded", "dict", "clients"],
)
def test_targets_that_are_the_inputs_are_refused(train):
    test = train[0] if isinstance(train, list) else train
    clients = {"clients": None} if isinstance(train, list) else {}
    assert (
        refused(train, test, **clients)
        == f"the training targets of data set 'own' equal the inputs; {FIX}"
    )


def test_samples_that_are_read_when_they_are_needed():
    assert "the training targets of data set 'own' equal the inputs" in refused(
        Lines(), Lines(), lazy=True
    )


def test_a_test_set_that_copies_is_refused():
    longer = torch.cat([IDS, IDS[:, :1]], 1)
    assert refused((longer[:, :-1], longer[:, 1:]), (IDS, IDS)) == (
        f"the test targets of data set 'own' equal the inputs; {FIX}"
    )


def test_a_task_file_is_refused(tmp_path: Path):
    file = tmp_path / "lm.py"
    file.write_text(
        "import torch\nfrom torch import nn\n\n\ndef task():\n    ids = torch.arange(48).reshape(6, 8) % 11\n"
        "    return nn.Sequential(nn.Embedding(11, 4), nn.Linear(4, 11)), (ids, ids), (ids, ids)\n"
    )
    given = {"data": {"clients": 2}, "train": {"cohort": 2}, "task": {"file": str(file)}}
    with pytest.raises(UserError, match="targets of data set 'own' equal the inputs"):
        build_task(resolve(given))


def task(inputs, targets, **more):
    samples = Samples(inputs, targets)
    lists = [list(range(0, 10)), list(range(10, 20))]
    return Task(
        words(), DataSet("own", samples, samples, WORDS), Population.from_lists(lists), **more
    )


def test_copies_that_are_meant():
    with pytest.raises(UserError, match="equal the inputs"):
        task(IDS, IDS, loss=copying)  # perplexity would still compare each token with itself
    meant = task(
        IDS,
        IDS,
        loss=copying,
        metrics={"right": lambda out, ids: (out.argmax(2) == ids).float().mean(1)},
    )
    meant.check()
    history = kairosfl.simulate(
        words(),
        (IDS, IDS),
        (IDS, IDS),
        kind="",
        loss=copying,
        clients=2,
        rounds=1,
        progress=False,
        engine="loop",
    )
    assert history.metric == "loss"


def test_targets_that_may_equal_the_inputs():
    same = torch.full((20, 8), 3)
    task(same, same)  # shifted or not
    task(*SHIFTED)
    task(IDS, torch.where(torch.arange(8) == 2, IDS, (IDS + 1) % WORDS))
    some = torch.full_like(IDS, -100)
    some[0, 2] = IDS[0, 2]
    task(IDS, some)  # one of the tokens to predict was left as it is
