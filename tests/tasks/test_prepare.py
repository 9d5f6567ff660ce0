"""Normalisation and augmentation: against numpy, and alike for one client and for stacked ones."""

import numpy as np
import pytest
import torch

from kairosfl.errors import UserError
from kairosfl.tasks.crops import Crops, augment
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.prepare import mislabelled, prepare, sample_keys

MASK = 2**64 - 1


def _data(inputs, **fields):
    samples = Samples(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    return DataSet("toy", samples, samples, 1, **fields)


def _images(*shape):
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, shape, dtype=np.uint8))


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.8, 1.0])
def test_a_fraction_of_the_labels_is_replaced_by_others(noise):
    """None by itself, each other class alike, the same in float32, and by the bits of the key
    alone.
    """
    n, classes = 20_000, 5
    targets = torch.arange(n) % classes
    samples = Samples(torch.zeros(n, 1), targets)
    data = DataSet("toy", samples, samples, classes)
    keys = sample_keys(torch.arange(n), seed=1, round=0, client=2, step=0)
    found = mislabelled(targets, keys, noise, data)
    bits = keys.numpy().astype(np.uint64)
    wrong = bits % 2**16 < round(noise * 2**16)
    others = 1 + (bits // 2**16 % 2**24).astype(np.int64) * (classes - 1) // 2**24
    assert np.array_equal(
        found.numpy(), np.where(wrong, (targets.numpy() + others) % classes, targets.numpy())
    )
    assert np.mean(found.numpy() != targets.numpy()) == pytest.approx(noise, abs=0.01)
    moved = np.bincount((found - targets).numpy()[wrong] % classes, minlength=classes)
    assert moved[0] == 0
    assert np.ptp(moved[1:]) <= 0.1 * n
    assert torch.equal(
        mislabelled(targets, keys, torch.full((n,), noise, dtype=torch.float32), data), found
    )
    assert torch.equal(mislabelled(targets, keys, noise, data), found)


def test_binary_labels_are_swapped_and_others_refused():
    values = torch.tensor([[0.0], [1.0], [1.0]])
    samples = Samples(torch.zeros(3, 1), values)
    binary = DataSet("toy", samples, samples, kind="binary")
    keys = sample_keys(torch.arange(3), seed=1, round=0, client=2, step=0)
    assert torch.equal(mislabelled(values, keys, 1.0, binary), 1 - values)
    numbers = Samples(torch.zeros(3, 1), torch.tensor([0.5, 2.0, 3.0]))
    with pytest.raises(
        UserError,
        match="label_noise needs one class per sample, and data set 'toy' is 'regression'",
    ):
        mislabelled(numbers.targets, keys, 1.0, DataSet("toy", numbers, numbers))


def test_uint8_images_are_normalised_per_channel():
    images = _images(5, 3, 4, 4)
    mean, std = (0.5, 0.25, 0.1), (0.2, 0.5, 1.0)
    ours = prepare(images, _data(images, mean=mean, std=std))
    want = (images.numpy() / 255 - np.reshape(mean, (3, 1, 1))) / np.reshape(std, (3, 1, 1))
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours.numpy(), want, atol=5e-7)


def test_without_statistics_uint8_is_scaled_to_one_and_floats_stay():
    images = _images(2, 1, 2, 2)
    np.testing.assert_allclose(
        prepare(images, _data(images)).numpy(), images.numpy() / 255, rtol=1e-6
    )
    floats = torch.rand(3, 4)
    assert prepare(floats, _data(floats)) is floats


def test_tokens_become_int64():
    tokens = _images(2, 7)
    ours = prepare(tokens, _data(tokens, vocabulary=256))
    assert ours.dtype == torch.int64
    assert torch.equal(ours, tokens.long())


def _mix(key):
    key = (key + 0x9E3779B97F4A7C15) & MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & MASK
    return key ^ (key >> 31)


def test_keys_are_splitmix_of_seed_round_client_step_and_sample():
    keys = sample_keys(torch.tensor([0, 7, 49_999]), seed=2**63 - 1, round=3, client=12, step=40)
    for key, sample in zip(keys.tolist(), (0, 7, 49_999), strict=True):
        want = 2**63 - 1
        for number in (3, 12, 40, sample):
            want = _mix(want ^ number)
        assert key & MASK == want


def _by_hand(image, key, padding, flip, share=1.0, colour=None, mode="constant"):
    """As one would write it for a single picture: pad, crop, mirror."""
    key &= MASK
    down, right = (((key >> shift) & 0xFFFFFF) * (2 * padding + 1) >> 24 for shift in (0, 24))
    if (key >> 49 & 0x3FFF) >= share * 2**14:
        down = right = padding
    height, width = image.shape[1:]
    sides = [(padding, padding)] * 2
    shades = [0] * len(image) if colour is None else colour
    options = [{} if mode == "reflect" else {"constant_values": shade} for shade in shades]
    padded = np.stack(
        [
            np.pad(channel, sides, mode, **given)
            for channel, given in zip(image, options, strict=True)
        ]
    )
    crop = padded[:, down : down + height, right : right + width]
    return crop[:, :, ::-1] if flip and key >> 48 & 1 else crop


@pytest.mark.parametrize(("padding", "flip"), [(4, True), (2, False), (0, True)])
def test_crop_and_flip_are_those_of_one_picture_at_a_time(padding, flip):
    images = _images(64, 3, 9, 7)
    keys = sample_keys(torch.arange(64), seed=1, round=2, client=3, step=4)
    ours = augment(images, keys, padding=padding, flip=flip)
    for image, key, got in zip(images.numpy(), keys.tolist(), ours.numpy(), strict=True):
        np.testing.assert_array_equal(got, _by_hand(image, key, padding, flip))


@pytest.mark.parametrize(
    ("crops", "mean", "by_hand"),
    [
        (Crops(0.5), (), {"share": 0.5}),
        (Crops(0.0), (), {"share": 0.0}),
        (Crops(padding="reflect"), (), {"mode": "reflect"}),
        (Crops(0.25, "reflect"), (), {"share": 0.25, "mode": "reflect"}),
        (Crops(padding="mean"), (0.4914, 0.4822, 0.4465), {"colour": (125, 123, 114)}),
        (Crops(0.5, "mean"), (), {"share": 0.5}),  # without a mean there is none to fill in
    ],
)
def test_shares_and_paddings_are_those_of_one_picture_at_a_time(crops, mean, by_hand):
    images = _images(64, 3, 9, 7)
    keys = sample_keys(torch.arange(64), seed=1, round=2, client=3, step=4)
    ours = augment(images, keys, crops, mean=mean)
    for image, key, got in zip(images.numpy(), keys.tolist(), ours.numpy(), strict=True):
        np.testing.assert_array_equal(got, _by_hand(image, key, 4, True, **by_hand))


def test_half_of_the_crops_are_left_out_whatever_their_place_and_mirror_image():
    keys = sample_keys(torch.arange(40_000), seed=0, round=0, client=0, step=0)
    cropped, mirrored = keys >> 49 & 0x3FFF < 2**13, keys >> 48 & 1 == 1
    for part in (cropped, cropped[mirrored], cropped[keys & 0xFFFFFF < 2**23]):
        assert float(part.double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / len(part) ** 0.5)


@pytest.mark.parametrize(
    ("options", "said"),
    [({"share": 1.5}, r"data.crops = 1.5 must be"), ({"padding": "white"}, r"'black', 'mean'")],
)
def test_other_crops_are_refused_with_the_fix(options, said):
    with pytest.raises(UserError, match=said):
        Crops(**options)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("side", [32, 7])
def test_one_client_alone_stacked_clients_and_every_device_give_the_same_bits(device, side):
    images, samples = _images(3, 5, 3, side, side), torch.arange(15).view(3, 5) * 17
    clients, steps = torch.tensor([5, 0, 99]), torch.tensor([0, 3, 1])
    data = _data(images[0], mean=(0.4914, 0.4822, 0.4465), std=(0.2470, 0.2435, 0.2616))
    there = [tensor.to(device) for tensor in (samples, clients[:, None], steps[:, None], images)]
    keys = sample_keys(there[0], seed=7, round=11, client=there[1], step=there[2])
    together = prepare(augment(there[3], keys), data).cpu()
    for row in range(3):
        own = sample_keys(
            samples[row], seed=7, round=11, client=int(clients[row]), step=int(steps[row])
        )
        assert torch.equal(prepare(augment(images[row], own), data), together[row])


def test_every_offset_is_as_likely_and_half_are_mirrored():
    count = 81_000
    keys = sample_keys(torch.arange(count), seed=0, round=0, client=0, step=0)
    down, right = (((keys >> shift) & 0xFFFFFF) * 9 >> 24 for shift in (0, 24))
    cells = torch.bincount(down * 9 + right, minlength=81)
    # chi-square with 80 degrees of freedom: mean 80, deviation 12.6
    assert float(((cells - 1000) ** 2 / 1000).sum()) == pytest.approx(80, abs=5 * 12.6)
    assert float((keys >> 48 & 1).double().mean()) == pytest.approx(0.5, abs=5 * 0.5 / count**0.5)


def test_floats_are_moved_as_they_are():
    images = torch.randn(10, 1, 6, 6)
    keys = sample_keys(torch.arange(10), seed=0, round=0, client=0, step=0)
    moved = augment(images, keys)
    assert moved.dtype == torch.float32
    assert set(moved.flatten().tolist()) <= {*images.flatten().tolist(), 0.0}
