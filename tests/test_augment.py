"""Augmentation depends on (seed, epoch, sample) alone, and does what its equations say."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bigstep.data.augment import Augment, random_crop, random_flip, resize, resized_crop_boxes, sample_uniform

KINDS = ["none", "flip", "crop_flip", "crop_alternate", "resized_crop"]


def splitmix64(z: int) -> int:
    """The mixing function in Python's own integers, from Steele et al."""
    mask = 2**64 - 1
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_sample_uniform_is_the_hash_of_its_docstring() -> None:
    seed, epoch, stream, golden = 12345, 6, 7, 0x9E3779B97F4A7C15
    key = 0
    for word in (seed, epoch, stream):
        key = splitmix64(((key ^ word) + golden) % 2**64)
    indices = [0, 1, 99, 1_281_166]
    expected = [
        [(splitmix64((key + golden * (i + 2**40 * draw)) % 2**64) >> 40) / 2**24 for i in indices] for draw in range(3)
    ]
    assert sample_uniform(seed, epoch, torch.tensor(indices), stream, draws=3).tolist() == expected


def test_numbers_are_uniform_and_unrelated_between_streams_epochs_seeds_and_neighbours() -> None:
    n = 200_000
    indices = torch.arange(n)
    base = sample_uniform(0, 0, indices, 1).double()
    # five standard errors: a sound generator fails one such check in two million
    assert abs(base.mean() - 0.5) < 5 * np.sqrt(1 / 12 / n)
    counts = torch.histc(base, 64, 0, 1)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
    others = [
        sample_uniform(1, 0, indices, 1),
        sample_uniform(0, 1, indices, 1),
        sample_uniform(0, 0, indices, 2),
        base.roll(1),
    ]
    for other in others:
        assert abs(torch.corrcoef(torch.stack([base, other.double()]))[0, 1]) < 5 / np.sqrt(n)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [1, 3])
def test_a_sample_does_not_depend_on_its_batch(kind: str, channels: int) -> None:
    torch.manual_seed(0)
    images = torch.randint(0, 256, (50, channels, 32, 32), dtype=torch.uint8)
    augment = Augment(kind=kind, seed=3, mean=(0.5,) * channels, std=(0.25,) * channels, dtype=torch.float64)
    whole = augment(images, torch.arange(50), epoch=4)
    chosen = torch.tensor([41, 7, 8])
    assert torch.equal(augment(images[chosen], chosen, epoch=4), whole[chosen])
    if kind != "none":
        assert not torch.equal(augment(images, torch.arange(50), epoch=5), whole)


def test_crop_flip_matches_a_loop_over_samples() -> None:
    images = torch.randint(0, 256, (64, 3, 28, 28), dtype=torch.uint8)
    indices = torch.arange(100, 164)
    padded = np.pad(images.numpy(), ((0, 0), (0, 0), (4, 4), (4, 4)), mode="reflect")
    shift = (sample_uniform(1, 2, indices, stream=2, draws=2) * 9).long()
    mirrored = sample_uniform(1, 2, indices, stream=1) < 0.5
    expected = []
    for n in range(64):
        window = padded[n, :, shift[0, n] : shift[0, n] + 28, shift[1, n] : shift[1, n] + 28]
        expected.append(window[..., ::-1] if mirrored[n] else window)
    found = random_flip(random_crop(images, indices, 1, 2), indices, 1, 2)
    assert np.array_equal(found.numpy(), np.stack(expected))
    assert set(shift.flatten().tolist()) == set(range(9))  # every shift occurs
    assert 0 < mirrored.sum() < 64


def test_boxes_lie_in_the_image_with_the_area_and_aspect_asked_for() -> None:
    heights = torch.randint(50, 500, (5000,))
    widths = torch.randint(50, 500, (5000,))
    left, top, w, h = resized_crop_boxes(torch.arange(5000), 0, 1, heights, widths, min_scale=0.3)
    assert left.min() >= 0
    assert top.min() >= 0
    assert ((left + w) <= widths + 1e-9).all()  # rounding of a sum in float64
    assert ((top + h) <= heights + 1e-9).all()
    aspect = w / h
    assert aspect.min() >= 0.75 - 1e-12
    assert aspect.max() <= 4 / 3 + 1e-12
    moderate = (widths / heights).log().abs() < 0.2  # in very long images the largest allowed box may be too small
    assert ((w * h) / (heights * widths))[moderate].min() >= 0.3 - 1e-12
    square = resized_crop_boxes(torch.arange(20000), 0, 0, 100, 100, min_scale=0.08)
    share = square[2] * square[3] / 1e4
    assert share.min() < 0.1
    assert share.max() > 0.97


def test_a_box_of_the_whole_image_changes_nothing_but_the_side() -> None:
    images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    whole = Augment(kind="resized_crop", min_scale=1.0, mean=(0.0,) * 3, std=(1.0,) * 3, dtype=torch.float64)
    indices = torch.arange(16)
    left, top, w, h = resized_crop_boxes(indices, 0, 0, 32, 32, min_scale=1.0)
    flipped = random_flip(images, indices, 0, 0).double() / 255
    assert torch.equal(w, torch.full_like(w, 32))
    torch.testing.assert_close(whole(images, indices, 0), flipped, rtol=0, atol=1e-12)  # float64 sampling points


def test_resized_crop_samples_a_linear_ramp_exactly_where_the_box_lies() -> None:
    ramp = torch.arange(64.0, dtype=torch.float64).expand(1, 1, 64, 64).to(torch.uint8)
    augment = Augment(kind="resized_crop", min_scale=0.2, mean=(0.0,), std=(1.0,), dtype=torch.float64)
    checked = 0
    for index in torch.arange(40).split(1):
        left, _, w, _ = (x.item() for x in resized_crop_boxes(index, 0, 0, 64, 64, min_scale=0.2))
        x = left + (torch.arange(64, dtype=torch.float64) + 0.5) * w / 64 - 0.5
        expected = x.clamp(0, 63) / 255
        row = augment(ramp, index, 0)[0, 0, 10]
        mirrored = sample_uniform(0, 0, index, 1).item() < 0.5
        torch.testing.assert_close(row.flip(0) if mirrored else row, expected, rtol=0, atol=1e-12)
        checked += mirrored
    assert 0 < checked < 40


def test_normalisation_and_dtype() -> None:
    images = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.25, 2.0)
    expected = torch.tensor([(0 - 0.1) / 0.5, (0.2 - 0.2) / 0.25, (1 - 0.3) / 2], dtype=torch.float64)
    for dtype, tolerance in [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 2e-3)]:  # half an ulp
        out = Augment(mean=mean, std=std, dtype=dtype)(images, torch.tensor([0]), 0)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double().flatten(), expected, rtol=0, atol=tolerance)
    assert images.flatten().tolist() == [0, 51, 255]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [20, 32, 48])
def test_image_size_is_obeyed(kind: str, size: int) -> None:
    images = torch.full((3, 1, 32, 32), 128, dtype=torch.uint8)
    out = Augment(kind=kind, image_size=size, mean=(0.0,), std=(1.0,))(images, torch.arange(3), 0)
    assert out.shape == (3, 1, size, size)
    # a grey image stays grey; weights of the resampling sum to one within float32 rounding
    torch.testing.assert_close(out, torch.full_like(out, 128 / 255), rtol=1e-5, atol=0)


def test_shrinking_averages_instead_of_skipping() -> None:
    checker = (torch.arange(32).view(-1, 1) + torch.arange(32)).remainder(2).mul(255.0).view(1, 1, 32, 32)
    shrunk = resize(checker, 8)
    torch.testing.assert_close(shrunk[..., 1:-1, 1:-1], torch.full((1, 1, 6, 6), 127.5), rtol=0.02, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_gpu_draws_the_same_numbers_and_augments_alike(kind: str) -> None:
    images = torch.randint(0, 256, (64, 3, 32, 32), dtype=torch.uint8)
    indices = torch.arange(1000, 1064)
    assert torch.equal(sample_uniform(5, 6, indices, 7, 4), sample_uniform(5, 6, indices.cuda(), 7, 4).cpu())
    augment = Augment(kind=kind, seed=1, mean=(0.5,) * 3, std=(0.25,) * 3, dtype=torch.float64)
    here, there = augment(images, indices, 2), augment(images.cuda(), indices.cuda(), 2).cpu()
    torch.testing.assert_close(here, there, rtol=0, atol=1e-10)  # sampling points differ by float64 rounding
