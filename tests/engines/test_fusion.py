"""Activations fused into the layer before them: which, and that clients get the updates that they
get alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from test_batched import assert_equal, make_briefs, make_task
from torch import Tensor, nn

from kairosfl.engines.batched import Batched
from kairosfl.engines.batched.dropout import StackedDropout
from kairosfl.engines.batched.layers import StackedConv2d, StackedGroupNorm
from kairosfl.engines.batched.pool import ReluPool
from kairosfl.engines.batched.traced import Traced
from kairosfl.engines.loop import Loop


class Net(nn.Module):
    """Convolution, GroupNorm and what follows it; `twice`: the norm runs twice, or its output has
    two readers.
    """

    def __init__(self, *follow: nn.Module, twice: str = "") -> None:
        super().__init__()
        self.conv, self.norm, self.follow = (
            nn.Conv2d(2, 8, 3),
            nn.GroupNorm(4, 8),
            nn.Sequential(*follow),
        )
        self.out, self.twice = nn.Linear(8, 3), twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        y = self.norm(self.norm(x) if self.twice == "run" else x)
        y = self.follow(y) + y if self.twice == "read" else self.follow(y)
        return self.out(y.mean((2, 3)))


# model, activation that is fused, whether the norm finds the gradient of the convolution's bias
CASES = {
    "none": (lambda: Net(), "", True),
    "relu": (lambda: Net(nn.ReLU(inplace=True)), "relu", True),
    "silu": (lambda: Net(nn.SiLU()), "silu", True),
    "silu in place": (lambda: Net(nn.SiLU(inplace=True)), "silu", True),
    "gelu": (lambda: Net(nn.GELU()), "gelu", True),
    "gelu by tanh": (lambda: Net(nn.GELU("tanh")), "", True),
    "only the first": (lambda: Net(nn.SiLU(), nn.GELU()), "silu", True),
    "run twice": (lambda: Net(nn.SiLU(), twice="run"), "", False),
    "read twice": (lambda: Net(nn.SiLU(), twice="read"), "", False),
}


@pytest.mark.parametrize("name", CASES)
def test_what_follows_a_group_norm(name: str) -> None:
    make, activation, biased = CASES[name]
    torch.manual_seed(0)
    model = make().double()
    (norm,) = (
        module
        for module in Traced(model, torch.device("cpu")).model.modules()
        if isinstance(module, StackedGroupNorm)
    )
    assert norm.activation == activation
    assert norm.before == (1 if biased else None)
    task = make_task(model, (2, 6, 6))
    engine = Batched(task)
    assert engine.why == "stacked layer by layer"
    briefs = make_briefs(task)
    assert_equal(engine.train(briefs), Loop(task).train(briefs), 1e-9)


class Branched(nn.Module):
    """Two convolutions; `twice`: the output of the first, that of its ReLU, or the second
    convolution has two uses.
    """

    def __init__(self, twice: str) -> None:
        super().__init__()
        self.one, self.two, self.relu = nn.Conv2d(2, 4, 3), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()
        self.out, self.twice = nn.Linear(4, 3), twice

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        y = self.relu(x)
        z = self.relu(self.two(y))
        if self.twice == "convolution":
            z = z + x
        elif self.twice == "relu":
            z = z + y
        elif self.twice == "reader":
            z = self.two(z - 0.1)
        return self.out(z.mean((2, 3)))


def chain(
    between: nn.Module | None = None, two: nn.Module | None = None, **changes: nn.Module
) -> nn.Sequential:
    """Convolution, ReLU, convolution, ReLU, and a head that reads it."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(one=nn.Conv2d(2, 4, 3), first=nn.ReLU())
    if between is not None:
        layers["between"] = between
    layers |= {"two": two or nn.Conv2d(4, 5, 3, 2), "last": nn.ReLU(inplace=True)}
    return nn.Sequential(layers | changes | OrderedDict(flat=nn.Flatten(), out=nn.Linear(5, 3)))


def frozen(*names: str) -> nn.Sequential:
    model = chain()
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    return model


def hooked(name: str, heard: list[Tensor]) -> nn.Sequential:
    model = chain()
    model.get_submodule(name).register_forward_hook(lambda _, __, y: heard.append(y))
    return model


RELUS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    # of every convolution: r, it has a ReLU; d, whose mask its reader applies; m, it applies that
    # of the one before
    "chain": (chain, "rd rm"),
    "without bias": (lambda: chain(one=nn.Conv2d(2, 4, 3, bias=False)), "rd rm"),
    "grouped reader": (
        lambda: chain(two=nn.Conv2d(4, 6, 3, 2, groups=2), more=nn.Conv2d(6, 5, 1)),
        "rd rdm m",
    ),
    "another activation": (lambda: chain(first=nn.ReLU6()), "- r"),
    "two in a row": (lambda: chain(nn.ReLU()), "rd rm"),
    "a pool reads it": (lambda: chain(nn.MaxPool2d(2), nn.Conv2d(4, 5, 1)), "- r"),
    "another pool reads it": (lambda: chain(nn.AvgPool2d(2, 1), nn.Conv2d(4, 5, 2)), "r r"),
    "frozen bias": (lambda: frozen("one.bias"), "- r"),
    "frozen weight": (lambda: frozen("two.weight"), "r -"),
    "frozen reader": (lambda: frozen("two.weight", "two.bias"), "r"),
    "one module": (lambda: Branched(""), "rd rm"),
    "convolution read twice": (lambda: Branched("convolution"), "- r"),
    "relu read twice": (lambda: Branched("relu"), "- r"),
    "reader runs twice": (lambda: Branched("reader"), "r -"),
    "hooked": (lambda: hooked("first", []), "- r"),
}


@pytest.mark.parametrize("name", RELUS)
def test_a_relu_after_a_convolution(name: str) -> None:
    make, flags = RELUS[name]
    torch.manual_seed(0)
    model = make().double()
    convolutions = [
        each
        for each in Traced(model, torch.device("cpu")).model.modules()
        if isinstance(each, StackedConv2d)
    ]
    found = ["r" * each.relu + "d" * each.masked + "m" * each.masks or "-" for each in convolutions]
    assert " ".join(found) == flags
    task = make_task(model, (2, 5, 5))
    engine = Batched(task)
    assert engine.why == "stacked layer by layer"
    # MOON's and ALT's features are what the head reads, here what a fused ReLU returned.
    near = task.start() + 0.05 * torch.randn(4, task.layout.size, dtype=torch.float64)
    contrast = {
        "contrast": 1.0,
        "temperature": 0.5,
        "previous": near,
        "stop_below": 0.9,
        "stop_statistic": "mean",
    }
    for briefs in (
        make_briefs(task),
        make_briefs(task, **contrast),
        make_briefs(task, radius=0.05),
    ):
        assert_equal(engine.train(briefs), Loop(task).train(briefs), 1e-9)


FLAT = {
    "flattened": (nn.Sequential(nn.Flatten()), True),
    "dropped and flattened": (nn.Sequential(nn.Dropout(0.0), nn.Flatten()), True),
    "convolved": (nn.Sequential(nn.Conv2d(4, 4, 1), nn.Flatten()), False),
    "dropped and convolved": (
        nn.Sequential(nn.Dropout(0.0), nn.Conv2d(4, 4, 1), nn.Flatten()),
        False,
    ),
}


@pytest.mark.parametrize("name", FLAT)
def test_a_pooling_is_written_in_the_order_in_which_it_is_read(name: str) -> None:
    follow, flat = FLAT[name]
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), *follow, nn.Linear(4, 3)
    ).double()
    (pool,) = (
        each
        for each in Traced(model, torch.device("cpu")).model.modules()
        if isinstance(each, ReluPool)
    )
    assert pool.flat == flat
    task = make_task(model, (2, 5, 5))
    assert_equal(Batched(task).train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-9)


def dropping(p: float) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(p), nn.Flatten()),
        *(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Dropout(p), nn.Linear(8, 3)),
    ).double()


def test_dropout_is_fused_with_what_comes_before_it() -> None:
    modules = list(Traced(dropping(0.3), torch.device("cpu")).model.modules())
    (pool,) = (module for module in modules if isinstance(module, ReluPool))
    assert pool.before == 1  # the number of the convolution's bias
    assert pool.drop is not None
    assert [
        drop.relu for drop in modules if isinstance(drop, StackedDropout) and drop is not pool.drop
    ] == [True]
    assert not any(isinstance(module, (nn.ReLU, nn.MaxPool2d)) for module in modules)
    task = make_task(dropping(0.0), (2, 6, 6))
    assert_equal(Batched(task).train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-9)
    plain = dropping(0.3)
    for layer in plain:
        layer.register_forward_hook(lambda *_: None)  # a hook of the user's: nothing is fused
    fused, apart = (make_task(model, (2, 6, 6)) for model in (dropping(0.3), plain))
    briefs = make_briefs(fused)
    assert_equal(Batched(fused).train(briefs), Batched(apart).train(briefs), 1e-9)  # the same masks


@pytest.mark.parametrize("twice", ["the convolution", "the ReLU", "the pooling"])
def test_what_is_read_twice_is_not_fused(twice: str) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool, self.relu, self.drop = (
                nn.Conv2d(2, 4, 3),
                nn.MaxPool2d(2),
                nn.ReLU(),
                nn.Dropout(0.3),
            )
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x)
            z = self.relu(y)
            pooled = self.pool(z)
            more = {"the convolution": y, "the ReLU": z, "the pooling": pooled}[twice]
            return self.out(self.drop(pooled).mean((2, 3)) + more.mean((2, 3)))

    torch.manual_seed(0)
    modules = list(Traced(Model(), torch.device("cpu")).model.modules())
    pools = [module for module in modules if isinstance(module, ReluPool)]
    assert [pool.before for pool in pools] == {
        "the convolution": [None],
        "the ReLU": [],
        "the pooling": [1],
    }[twice]
    assert all((pool.drop is None) == (twice == "the pooling") for pool in pools)
    model = Model().double()
    model.drop.p = 0.0
    task = make_task(model, (2, 6, 6))
    assert_equal(Batched(task).train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-9)


def test_names_of_the_model_s_own_stay_as_they_are() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.flat, self.dropout_2, self.dropout_1 = (
                nn.Flatten(),
                nn.Dropout(0.1),
                nn.Dropout(0.5),
            )
            self.out = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.dropout_2(self.dropout_1(self.flat(x))))

    modules = Traced(Model(), torch.device("cpu")).model.modules()
    assert [module.p for module in modules if isinstance(module, StackedDropout)] in (
        [0.1, 0.5],
        [0.5, 0.1],
    )


def test_a_hook_on_an_activation_is_called() -> None:
    heard: list[Tensor] = []
    model = hooked("first", heard)
    task = make_task(model.double(), (2, 5, 5))
    engine = Batched(task)
    heard.clear()
    engine.train(make_briefs(task))
    assert heard
    assert all((y >= 0).all() for y in heard)


def test_a_fused_relu_in_bfloat16_is_one_that_is_not_fused() -> None:
    torch.manual_seed(0)
    fused, apart = (make_task(chain(), (2, 5, 5)) for _ in range(2))
    apart.model.load_state_dict(fused.model.state_dict())
    for name in ("first", "last"):
        apart.model.get_submodule(name).register_forward_hook(lambda _, __, y: None)
    found, wanted = (
        Batched(task, precision="bfloat16").train(make_briefs(task)) for task in (fused, apart)
    )
    assert torch.equal(found.delta, wanted.delta)


class Reads(nn.Module):
    """A convolution, and whatever else reads the images."""

    def __init__(self, conv: nn.Module, other: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.other, self.out = conv, other, nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out((self.conv(x) + self.other(x)).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "last"),
    [
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)), True),
        (Reads(nn.Conv2d(2, 4, 3), nn.Conv2d(2, 4, 3)), True),
        (
            Reads(nn.Conv2d(2, 4, 3), lambda x: x.view(-1, 2, 36, 1).mean((1, 2), keepdim=True)),
            False,
        ),
        (nn.Sequential(nn.Conv2d(2, 4, 3, groups=2), nn.Flatten(), nn.Linear(64, 3)), False),
        (
            nn.Sequential(nn.Conv2d(2, 4, 3).requires_grad_(False), nn.Flatten(), nn.Linear(64, 3)),
            False,
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), False),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 3)), False),
    ],
)
def test_images_are_channels_last_where_convolutions_alone_read_them(
    model: nn.Module, last: bool
) -> None:
    assert Traced(model, torch.device("cpu")).frame.last == last
