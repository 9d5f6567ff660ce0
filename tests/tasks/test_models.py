"""Models: counts by hand, one training step, features, seeds, stacking over clients, tracing,
refusals.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from kairosfl.errors import UserError
from kairosfl.models import MODELS, build, describe, options
from kairosfl.tasks.task import last_linear
from kairosfl.tasks.vector import check_state

# Every model at a size that trains in a moment: sample shape, classes, options, width of the
# features.
SMALL: dict[str, tuple[tuple[int, ...], int, dict[str, Any], int]] = {
    "logistic": ((1, 8, 8), 10, {}, 64),
    "mlp": ((20,), 5, {"hidden": (16, 12)}, 12),
    "lenet": ((3, 32, 32), 10, {}, 84),
    "cnn": ((1, 8, 8), 10, {"padding": 2, "hidden": 32}, 32),
    "alt_cnn": ((3, 32, 32), 10, {}, 256),
    "aware_cnn": ((3, 32, 32), 10, {}, 64),
    "pfl_cnn": ((3, 8, 8), 10, {"hidden": 32, "dropout": (0.0, 0.0)}, 32),
    "alexnet": ((1, 32, 32), 10, {"width": 32}, 32),
    "vgg11": ((1, 32, 32), 10, {"width": 32}, 32),
    "resnet18": ((3, 16, 16), 10, {"width": 8}, 64),
    "resnet50": ((3, 16, 16), 10, {"width": 4, "projection": 24}, 24),
    "char_lstm": ((7,), 11, {"embedding": 6, "hidden": 10}, 10),
    "gpt_neox": ((9,), 4, {"vocabulary": 13, "hidden": 32, "layers": 2, "heads": 4}, 32),
}
every_model = pytest.mark.parametrize("name", list(MODELS))
token_models = ("char_lstm", "gpt_neox")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Layers this small only wait for each other on more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(name: str, seed: int = 0) -> nn.Module:
    shape, classes, chosen, _ = SMALL[name]
    return build(name, shape=shape, classes=classes, seed=seed, **chosen)


def batch(name: str, size: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    shape, classes, chosen, _ = SMALL[name]
    generator = torch.Generator().manual_seed(seed)
    if name in token_models:
        inputs = torch.randint(
            1, chosen.get("vocabulary", classes), (size, *shape), generator=generator
        )
    else:
        inputs = torch.randn(size, *shape, generator=generator)
    return inputs, torch.arange(size) % classes


def parameters(name: str, shape: tuple[int, ...], classes: int, **chosen: Any) -> int:
    return describe(name, shape=shape, classes=classes, **chosen).parameters


def conv(inputs: int, outputs: int, side: int) -> int:
    return inputs * outputs * side * side + outputs


def fc(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


# Counts, each from its table's weight shapes, with biases as wide as their layer.


def test_alexnet_has_the_parameters_of_fedcl_table_2() -> None:
    convolutions = (
        conv(3, 64, 3)
        + conv(64, 192, 3)
        + conv(192, 384, 3)
        + conv(384, 256, 3)
        + conv(256, 256, 3)
    )
    assert convolutions == 2_251_584
    table = convolutions + fc(1024, 4096) + fc(4096, 4096) + fc(4096, 10)
    assert parameters("alexnet", (3, 32, 32), 10) == table == 23_272_266
    released = convolutions + fc(1024, 128) + fc(128, 128) + fc(128, 10)
    assert parameters("alexnet", (3, 32, 32), 10, width=128) == released == 2_400_586
    one_channel = 2 * 64 * 9
    assert parameters("alexnet", (1, 32, 32), 10) == table - one_channel == 23_271_114


def test_vgg11_has_the_parameters_of_fedcl_table_1_where_the_table_fits_its_images() -> None:
    convolutions = conv(3, 64, 3) + conv(64, 128, 3) + conv(128, 256, 3) + conv(256, 256, 3)
    convolutions += conv(256, 512, 3) + 3 * conv(512, 512, 3)
    assert convolutions == 9_220_480
    cifar = convolutions + fc(512, 512) + fc(512, 512) + fc(512, 10)
    assert parameters("vgg11", (3, 32, 32), 10) == cifar == 9_750_922
    # The printed 4096 x 512 is what 64x128 images need: 512 channels times 2 times 4.
    printed = convolutions + fc(4096, 512) + fc(512, 512) + fc(512, 10)
    assert parameters("vgg11", (3, 64, 128), 10) == printed == 11_585_930


def test_char_lstm_has_the_parameters_of_fedcl_table_3() -> None:
    # Four gates; PyTorch's LSTM has a bias for the input and one for the recurrence.
    first, second = 4 * (256 * 512 + 512 * 512 + 2 * 512), 4 * (512 * 512 + 512 * 512 + 2 * 512)
    table = 80 * 256 + first + second + fc(512, 80)
    assert parameters("char_lstm", (80,), 80) == table == 3_739_728


def test_resnets_have_the_parameters_of_their_layers() -> None:
    def basic(inputs: int, outputs: int) -> int:
        shortcut = inputs * outputs + 2 * outputs if inputs != outputs else 0
        return 9 * inputs * outputs + 9 * outputs * outputs + 4 * outputs + shortcut

    def bottleneck(inputs: int, width: int) -> int:
        shortcut = inputs * 4 * width + 2 * 4 * width if inputs != 4 * width else 0
        return (
            inputs * width
            + 9 * width * width
            + 4 * width * width
            + 2 * (width + width + 4 * width)
            + shortcut
        )

    stem = 9 * 3 * 64 + 2 * 64
    body18 = stem + sum(basic(a, b) for a, b in [(64, 64), (64, 64), (64, 128), (128, 128)])
    body18 += sum(basic(a, b) for a, b in [(128, 256), (256, 256), (256, 512), (512, 512)])
    assert parameters("resnet18", (3, 32, 32), 10) == body18 + fc(512, 10) == 11_173_962
    assert parameters("resnet18", (3, 32, 32), 100) == body18 + fc(512, 100) == 11_220_132
    original = body18 + (49 - 9) * 3 * 64
    assert (
        parameters("resnet18", (3, 32, 32), 10, stem=7) == original + fc(512, 10) == 11_181_642
    )  # as torchvision's
    body50 = stem
    for inputs, width, depth in [(64, 64, 3), (256, 128, 4), (512, 256, 6), (1024, 512, 3)]:
        body50 += bottleneck(inputs, width) + (depth - 1) * bottleneck(4 * width, width)
    assert parameters("resnet50", (3, 64, 64), 200) == body50 + fc(2048, 200) == 23_910_152
    head = fc(2048, 2048) + fc(2048, 256) + fc(256, 200)
    assert parameters("resnet50", (3, 64, 64), 200, projection=256) == body50 + head == 28_272_648


def test_small_models_have_the_parameters_of_their_layers() -> None:
    assert parameters("logistic", (1, 28, 28), 10) == fc(784, 10) == 7_850
    assert parameters("mlp", (1, 28, 28), 10) == fc(784, 64) + fc(64, 10) == 50_890
    cifar = conv(3, 32, 5) + conv(32, 64, 5) + fc(64 * 5 * 5, 512) + fc(512, 10)
    assert parameters("cnn", (3, 32, 32), 10) == cifar == 878_538
    mcmahan = conv(1, 32, 5) + conv(32, 64, 5) + fc(64 * 7 * 7, 512) + fc(512, 10)
    assert parameters("cnn", (1, 28, 28), 10, padding=2) == mcmahan == 1_663_370
    alt = (
        conv(3, 6, 5)
        + conv(6, 16, 5)
        + fc(400, 120)
        + fc(120, 84)
        + fc(84, 84)
        + fc(84, 256)
        + fc(256, 10)
    )
    assert parameters("alt_cnn", (3, 32, 32), 10) == alt == 92_626
    niid = conv(3, 6, 5) + conv(6, 16, 5) + fc(400, 120) + fc(120, 84) + fc(84, 10)
    assert parameters("lenet", (3, 32, 32), 10) == niid == 62_006
    pfl = conv(3, 32, 3) + conv(32, 64, 3) + fc(12_544, 128) + fc(128, 10)
    assert parameters("pfl_cnn", (3, 32, 32), 10) == pfl == 1_626_442
    aware = conv(3, 32, 3) + conv(32, 64, 3) + conv(64, 64, 3) + fc(1024, 64) + fc(64, 10)
    assert parameters("aware_cnn", (3, 32, 32), 10) == aware == 122_570


def test_gpt_neox_has_the_parameters_of_pythia_70m() -> None:
    block = 2 * 2 * 512 + fc(512, 3 * 512) + fc(512, 512) + fc(512, 2048) + fc(2048, 512)
    body = 6 * block + 2 * 512
    assert body == 18_915_328  # what Pythia's table prints as non-embedding parameters
    assert parameters("gpt_neox", (100,), 4) == 50_304 * 512 + body + 512 * 4 == 44_673_024


@every_model
def test_a_description_counts_what_is_built(name: str) -> None:
    shape, classes, chosen, _ = SMALL[name]
    built = sum(parameter.numel() for parameter in small(name).parameters())
    assert parameters(name, shape, classes, **chosen) == built


def test_a_description_is_one_line_and_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    for name in MODELS:
        line = str(describe(name))
        assert line.startswith(f"{name}: ")
        assert "parameters (" in line
        assert "\n" not in line
    assert torch.equal(before, torch.get_rng_state())


# Behaviour of every model.


@every_model
def test_it_learns_a_tiny_batch(name: str) -> None:
    model = small(name).train()
    inputs, targets = batch(name, 4)
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        for _ in range(6):
            loss = F.cross_entropy(model(inputs), targets)
            optimiser.zero_grad()
            torch.autograd.backward(loss)
            optimiser.step()
            losses.append(loss.item())
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@every_model
def test_state_is_parameters_and_features_enter_the_last_linear(name: str) -> None:
    _, classes, _, width = SMALL[name]
    model = small(name).eval()
    check_state(model)
    head = last_linear(model)
    assert (head.in_features, head.out_features) == (width, classes)
    seen: list[Tensor] = []
    head.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    outputs = model(batch(name, 3)[0])
    (features,) = seen
    assert features.shape == (3, width)
    torch.testing.assert_close(outputs, F.linear(features, head.weight, head.bias))


@every_model
def test_initialisation_is_a_function_of_the_seed(name: str) -> None:
    first = small(name, seed=5).state_dict()
    torch.rand(3)
    before = torch.get_rng_state()
    again = small(name, seed=5).state_dict()
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(first[key], again[key]) for key in first)
    other = small(name, seed=6).state_dict()
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", sorted({*MODELS} - {"char_lstm"}))  # which test_batched.py stacks
def test_two_stacked_clients_equal_two_clients(name: str) -> None:
    clients = [small(name, seed=seed).double().eval() for seed in (1, 2)]
    batches = [batch(name, 3, seed=seed) for seed in (3, 4)]
    inputs = torch.stack(
        [each[0] if name in token_models else each[0].double() for each in batches]
    )
    targets = torch.stack([each[1] for each in batches])
    weights, _ = stack_module_state(clients)

    def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(clients[0], parameters, (x,)), y)

    stacked = vmap(lambda p, x: functional_call(clients[0], p, (x,)))(weights, inputs)
    gradients = vmap(grad(loss))(weights, inputs, targets)
    for k, client in enumerate(clients):
        outputs = client(inputs[k])
        torch.testing.assert_close(stacked[k], outputs, rtol=1e-10, atol=1e-12)
        torch.autograd.backward(F.cross_entropy(outputs, targets[k]))
        for key, parameter in client.named_parameters():
            torch.testing.assert_close(gradients[key][k], parameter.grad, rtol=1e-9, atol=1e-12)


@every_model
def test_it_can_be_traced(name: str) -> None:
    model = small(name).eval()
    traced = torch.fx.symbolic_trace(model)
    inputs, _ = batch(name, 3)
    assert torch.equal(traced(inputs), model(inputs))
    # A batch of another size takes the same path: no size of the example was baked in.
    assert torch.equal(traced(inputs[:2]), model(inputs[:2]))


# What is particular to one model.


def test_aware_cnn_starts_as_released() -> None:
    model = build("aware_cnn", shape=(3, 32, 32), classes=10, seed=0)
    state = model.state_dict()
    assert all(not state[key].any() for key in state if key.endswith("bias"))
    assert state["fc1.weight"].std().item() == pytest.approx(0.01, rel=0.02)
    # kaiming_normal, fan_out: sqrt(2 / (64 * 3 * 3)) for both 64-channel convolutions
    for key in ("conv2.weight", "conv3.weight"):
        assert state[key].std().item() == pytest.approx((2 / 576) ** 0.5, rel=0.02)


def test_alexnet_and_vgg_drop_where_the_tables_say() -> None:
    for name, places in (("alexnet", {"fc6", "fc7"}), ("vgg11", {"fc9", "fc11"})):
        layers = list(small(name).named_children())
        after = {
            layers[k + 1][0] for k, (_, layer) in enumerate(layers) if isinstance(layer, nn.Dropout)
        }
        assert after == places
        assert {layer.p for _, layer in layers if isinstance(layer, nn.Dropout)} == {
            options(name)["dropout"]
        }


def test_group_norm_has_the_asked_groups_and_two_channels_or_more() -> None:
    def groups(width: int) -> list[int]:
        model = build("resnet18", shape=(3, 8, 8), classes=2, seed=0, width=width)
        return sorted({m.num_groups for m in model.modules() if isinstance(m, nn.GroupNorm)})

    assert groups(64) == [32]
    assert groups(16) == [8, 16, 32]  # 16, 32, 64 and 128 channels


def test_char_lstm_reads_bytes_and_starts_as_pytorchs_lstm() -> None:
    model = build("char_lstm", shape=(5,), classes=80, seed=0, embedding=8, hidden=16)
    tokens = torch.tensor([[1, 79, 3, 4, 5]])
    assert torch.equal(model.eval()(tokens.to(torch.uint8)), model(tokens))
    bound = max(
        p.abs().max().item() for key, p in model.named_parameters() if key.startswith("lstm")
    )
    assert 0.24 < bound <= 0.25  # 1 / sqrt(16), whatever the layer's number of inputs


def neox_by_hand(
    state: dict[str, np.ndarray], tokens: np.ndarray, heads: int, rotary: int
) -> np.ndarray:
    """Features of one text without padding, head by head, with rotations as complex numbers."""

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
        return np.asarray(scaled * state[f"{name}.weight"] + state[f"{name}.bias"])

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.asarray(x @ state[f"{name}.weight"].T + state[f"{name}.bias"])

    def turn(x: np.ndarray) -> np.ndarray:
        half = rotary // 2
        speeds = 10_000.0 ** (-np.arange(half) / half)
        turned = (x[:, :half] + 1j * x[:, half:rotary]) * np.exp(
            1j * np.outer(np.arange(len(x)), speeds)
        )
        return np.concatenate([turned.real, turned.imag, x[:, rotary:]], axis=1)

    erf = np.vectorize(math.erf)
    x = state["embed_in.weight"][tokens]
    size = x.shape[1] // heads
    for k in range(2):
        qkv = linear(
            norm(x, f"layers.{k}.input_layernorm"), f"layers.{k}.attention.query_key_value"
        )
        mixed = []
        for head in range(heads):
            own = qkv[:, 3 * size * head : 3 * size * (head + 1)]
            scores = turn(own[:, :size]) @ turn(own[:, size : 2 * size]).T / np.sqrt(size)
            weights = np.tril(np.exp(scores))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ own[:, 2 * size :])
        attended = linear(np.concatenate(mixed, axis=1), f"layers.{k}.attention.dense")
        wide = linear(
            norm(x, f"layers.{k}.post_attention_layernorm"), f"layers.{k}.mlp.dense_h_to_4h"
        )
        x = (
            x
            + attended
            + linear(wide * (1 + erf(wide / np.sqrt(2))) / 2, f"layers.{k}.mlp.dense_4h_to_h")
        )
    return norm(x, "final_layer_norm")


@pytest.mark.parametrize("pool", ["last", "mean"])
def test_gpt_neox_equals_the_definition(pool: str) -> None:
    shape, classes, chosen, _ = SMALL["gpt_neox"]
    model = (
        build("gpt_neox", shape=shape, classes=classes, seed=3, pool=pool, **chosen).double().eval()
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in (
            model.parameters()
        ):  # biases and norms off their neutral start, or they would go untested
            parameter.add_(
                torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
            )
    state = {key: value.numpy() for key, value in model.state_dict().items()}
    tokens = np.array([5, 2, 7, 7, 1, 12])
    hidden = neox_by_hand(state, tokens, heads=4, rotary=2)
    features = hidden[-1] if pool == "last" else hidden.mean(0)
    padded = torch.tensor([[*tokens.tolist(), 0, 0, 0]])
    # The rotary table is float32 by intention, as in the published model.
    np.testing.assert_allclose(
        model(padded).detach().numpy()[0], state["score.weight"] @ features, rtol=1e-5
    )


def test_gpt_neox_counts_every_token_when_nothing_is_padding() -> None:
    shape, classes, chosen, _ = SMALL["gpt_neox"]
    model = build("gpt_neox", shape=shape, classes=classes, seed=3, pad=-1, **chosen).eval()
    head, tail = model(torch.tensor([[5, 2, 0]])), model(torch.tensor([[5, 2, 7]]))
    assert not torch.allclose(head, tail)


# A local checkpoint.


def published(seed: int = 9) -> dict[str, Tensor]:
    """A checkpoint of the small gpt_neox as published: prefixed, in half precision, with extras."""
    state = small("gpt_neox", seed=seed).state_dict()
    tensors = {
        f"gpt_neox.{key}": value.half() for key, value in state.items() if key != "score.weight"
    }
    tensors["embed_out.weight"] = torch.zeros(13, 32)
    tensors["gpt_neox.layers.0.attention.bias"] = torch.ones(1, 1, 9, 9, dtype=torch.bool)
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(1)
    return tensors


def from_checkpoint(path: Path, **changes: Any) -> nn.Module:
    shape, classes, chosen, _ = SMALL["gpt_neox"]
    return build(
        "gpt_neox", shape=shape, classes=classes, seed=0, checkpoint=str(path), **(chosen | changes)
    )


@pytest.mark.parametrize("layout", ["safetensors", "bin", "shards", "folder"])
def test_a_checkpoint_fills_all_but_the_head(tmp_path: Path, layout: str) -> None:
    tensors = published()
    path = tmp_path
    if layout == "safetensors":
        path = tmp_path / "model.safetensors"
        save_file(tensors, path)
    elif layout == "bin":
        path = tmp_path / "pytorch_model.bin"
        torch.save(tensors, path)
    elif layout == "folder":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        keys = sorted(tensors)
        save_file(
            {key: tensors[key] for key in keys[:5]}, tmp_path / "model-00001-of-00002.safetensors"
        )
        save_file(
            {key: tensors[key] for key in keys[5:]}, tmp_path / "model-00002-of-00002.safetensors"
        )
    loaded = from_checkpoint(path).state_dict()
    source, fresh = small("gpt_neox", seed=9).state_dict(), small("gpt_neox", seed=0).state_dict()
    assert torch.equal(loaded["score.weight"], fresh["score.weight"])
    for key in loaded.keys() - {"score.weight"}:
        assert loaded[key].dtype == torch.float32
        assert torch.equal(loaded[key], source[key].half().float())


def test_a_checkpoints_own_head_is_used(tmp_path: Path) -> None:
    head = torch.full((4, 32), 0.5)
    save_file(published() | {"score.weight": head}, tmp_path / "model.safetensors")
    assert torch.equal(from_checkpoint(tmp_path).state_dict()["score.weight"], head)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 3}, r"has no layers\.2\.attention\.dense\.bias and 11 more: set model\.layers"),
        ({"layers": 1}, r"has the unexpected layers\.1\.attention\.dense\.bias and 11 more"),
        ({"vocabulary": 14}, r"embed_in\.weight of shape \(13, 32\), the model needs \(14, 32\)"),
        ({"heads": 2}, r"num_attention_heads = 4, the model has 2: set model\.heads=4"),
        (
            {"rotary_pct": 0.5},
            r"rotary_pct = 0\.25, the model has 0\.5: set model\.rotary_pct=0\.25",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    save_file(published(), tmp_path / "model.safetensors")
    configuration = {"num_attention_heads": 4, "rotary_pct": 0.25, "use_parallel_residual": True}
    (tmp_path / "config.json").write_text(json.dumps(configuration), encoding="utf-8")
    with pytest.raises(UserError, match=message):
        from_checkpoint(tmp_path, **changes)


def test_a_checkpoint_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="contains no checkpoint"):
        from_checkpoint(tmp_path / "nowhere")
    for name in ("model.safetensors", "pytorch_model.bin"):
        file = tmp_path / name
        file.write_bytes(b"half a file")
        with pytest.raises(UserError, match="cannot be read"):
            from_checkpoint(file)
    torch.save([torch.ones(2)], tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="not a dictionary of tensors"):
        from_checkpoint(tmp_path / "pytorch_model.bin")
    save_file(published(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"use_parallel_residual": false}', encoding="utf-8")
    with pytest.raises(
        UserError, match="use_parallel_residual = False, gpt_neox only supports True"
    ):
        from_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match="not a JSON configuration"):
        from_checkpoint(tmp_path)


# Refusals, and a model of one's own.


@pytest.mark.parametrize(
    ("name", "shape", "chosen", "message"),
    [
        ("alexnt", (3, 32, 32), {}, "model.name 'alexnt' is not a model: did you mean 'alexnet'?"),
        (
            "alexnet",
            (3, 32, 32),
            {"widht": 8},
            "model.widht is not an option of alexnet: did you mean 'width'?",
        ),
        ("logistic", (4,), {"hidden": 3}, "model.hidden is not an option of logistic: it has none"),
        (
            "alexnet",
            (3, 32, 32),
            {"width": "wide"},
            "model.width of alexnet must be an integer, got 'wide'",
        ),
        (
            "alexnet",
            (3, 32, 32),
            {"width": True},
            "model.width of alexnet must be an integer, got True",
        ),
        ("alexnet", (3, 32, 32), {"width": 0}, "model.width of alexnet must be at least 1, got 0"),
        (
            "vgg11",
            (3, 32, 32),
            {"dropout": 1},
            "model.dropout of vgg11 must be at least 0 and below 1, got 1",
        ),
        (
            "vgg11",
            (3, 32, 32),
            {"dropout": "a"},
            "model.dropout of vgg11 must be a number, got 'a'",
        ),
        ("mlp", (4,), {"hidden": 8}, "model.hidden of mlp must be a list, each an integer, got 8"),
        ("mlp", (4,), {"hidden": [8, 0]}, "model.hidden[1] of mlp must be at least 1, got 0"),
        ("cnn", (3, 32, 32), {"padding": 3}, "model.padding of cnn must be 0, 1 or 2, got 3"),
        ("resnet18", (3, 32, 32), {"width": 7}, "model.width of resnet18 must be even"),
        (
            "resnet18",
            (3, 32, 32),
            {"projection": -1},
            "model.projection of resnet18 must not be negative",
        ),
        (
            "gpt_neox",
            (9,),
            {"pool": "max"},
            "model.pool of gpt_neox must be 'last' or 'mean', got 'max'",
        ),
        (
            "gpt_neox",
            (9,),
            {"heads": 7},
            "model.hidden of gpt_neox must be a multiple of heads=7, got 512",
        ),
        (
            "gpt_neox",
            (9,),
            {"rotary_pct": 0.02},
            "must rotate an even number of a head's 64 dimensions",
        ),
        (
            "gpt_neox",
            (9,),
            {"checkpoint": 3},
            "model.checkpoint of gpt_neox must be a string, got 3",
        ),
        (
            "char_lstm",
            (9,),
            {"vocabulary": "a"},
            "model.vocabulary of char_lstm must be an integer, got 'a'",
        ),
        (
            "alexnet",
            (1, 28, 28),
            {},
            "alexnet needs 32x32 images, got 28x28: load the data with size=32",
        ),
        ("vgg11", (1, 28, 28), {}, "multiples of 32, got 28x28: load the data with size=32"),
        (
            "cnn",
            (1, 8, 8),
            {},
            "at least 16x16, got 8x8: load the data with size=16 or set model.padding=2",
        ),
        (
            "resnet18",
            (3, 32, 32),
            {"stem": 5},
            "model.stem of resnet18 must be 3, or 7 for the original stem, got 5",
        ),
        (
            "pfl_cnn",
            (3, 32, 32),
            {"dropout": (0.5,)},
            "model.dropout of pfl_cnn must be two numbers, got (0.5,)",
        ),
        ("alt_cnn", (3, 32, 15), {}, "alt_cnn needs images of at least 16x16, got 32x15"),
        ("aware_cnn", (1, 17, 17), {}, "aware_cnn needs images of at least 18x18, got 17x17"),
        (
            "resnet18",
            (80,),
            {},
            "resnet18 needs images (channels, height, width), got samples of shape (80,)",
        ),
        (
            "char_lstm",
            (3, 32, 32),
            {},
            "char_lstm needs token sequences of shape (length,), got samples of",
        ),
        ("mlp", (), {}, "model mlp needs the shape of one sample, such as (3, 32, 32), got ()"),
        ("mlp", (3, 0), {}, "model mlp needs the shape of one sample"),
    ],
)
def test_mistakes_are_named_with_their_fix(
    name: str, shape: tuple[int, ...], chosen: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError) as error:
        build(name, shape=shape, classes=10, seed=0, **chosen)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "side", "chosen"),
    [
        ("cnn", 16, {}),
        ("cnn", 10, {"padding": 1}),
        ("cnn", 4, {"padding": 2}),
        ("alt_cnn", 16, {}),
        ("lenet", 16, {}),
        ("pfl_cnn", 6, {}),
        ("aware_cnn", 18, {}),
    ],
)
def test_the_smallest_images_pass(name: str, side: int, chosen: dict[str, Any]) -> None:
    model = build(name, shape=(1, side, side + 3), classes=3, seed=0, **chosen)
    assert model(torch.zeros(2, 1, side, side + 3)).shape == (2, 3)
    with pytest.raises(UserError, match="at least"):
        build(name, shape=(1, side, side - 1), classes=3, seed=0, **chosen)


def test_no_class_is_refused() -> None:
    with pytest.raises(UserError, match="model mlp needs at least 1 class, got 0"):
        build("mlp", shape=(4,), classes=0, seed=0)


def test_options_lists_the_defaults() -> None:
    assert options("mlp") == {"hidden": (64,)}
    assert options("alexnet") == {"width": 4096, "dropout": 0.05}
    assert options("logistic") == {}
    assert set(options("gpt_neox")) >= {
        "vocabulary",
        "hidden",
        "layers",
        "heads",
        "pool",
        "checkpoint",
    }


def test_a_list_from_a_file_is_as_good_as_a_tuple() -> None:
    model = build("mlp", shape=(4,), classes=3, seed=0, hidden=[5, 6])
    assert [layer.out_features for layer in model.modules() if isinstance(layer, nn.Linear)] == [
        5,
        6,
        3,
    ]


def test_a_model_of_ones_own_is_built_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def bowl(shape: tuple[int, ...], classes: int, *, scale: float = 1.0) -> nn.Module:
        """A linear map of my own."""
        layer = nn.Linear(shape[0], classes)
        nn.init.constant_(layer.weight, scale)
        return layer

    monkeypatch.setitem(MODELS, "bowl", bowl)
    model = build("bowl", shape=(2,), classes=3, seed=0, scale=2)
    assert torch.equal(model.weight, torch.full((3, 2), 2.0))  # type: ignore[arg-type]
    assert options("bowl") == {"scale": 1.0}
    assert (
        str(describe("bowl", shape=(2,), classes=3))
        == "bowl: A linear map of my own. 9 parameters (2, 3 classes)"
    )
    monkeypatch.setitem(bowl.__annotations__, "scale", "OnlyForTypeCheckers")
    assert build("bowl", shape=(2,), classes=3, seed=0, scale=2)
    with pytest.raises(UserError, match="model bowl has no typical data: give shape and classes"):
        describe("bowl")


def test_the_original_stem_halves_the_image_twice() -> None:
    model = build("resnet18", shape=(3, 32, 32), classes=10, seed=0, stem=7, groups=2)
    x = torch.randn(2, 3, 32, 32)
    sizes = {}
    for name, layer in model.named_children():
        x = layer(x)
        sizes[name] = tuple(x.shape[1:])
    assert sizes["stem"] == (64, 16, 16)
    assert sizes["stage1"] == (64, 8, 8)
    assert sizes["stage4"] == (512, 1, 1)
    assert {norm.num_groups for norm in model.modules() if isinstance(norm, nn.GroupNorm)} == {2}
