"""Augmentation of batches of tensors, on the device; it depends on the sample and never on the rank that holds it.

Every random number is a hash of (seed, epoch, sample index), so a sample is cropped and flipped alike on a CPU and on
a GPU, in a batch of one and in a batch of thousands, on one rank and on many, and again after a resume.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor

__all__ = [
    "Augment", "alternating_flip", "mirrored", "normalise", "random_crop", "random_flip", "resize",
    "resized_crop_boxes", "sample_uniform",
]  # fmt: skip

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: the step of splitmix64
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FLIP, _CROP, _BOX = 1, 2, 3  # streams: what a number is for
_ATTEMPTS = 10  # draws of a resized crop before the largest centred one is taken


def sample_uniform(seed: int, epoch: int, indices: Tensor, stream: int, draws: int = 1) -> Tensor:
    """Draw a uniform number for each sample: a hash, not a sequence.

    z = splitmix64(key(seed, epoch, stream) + golden * (index + 2^40 * draw));  u = floor(z / 2^40) / 2^24

    Args:
        seed: of the run.
        epoch: of the pass over the data; another epoch gives other numbers.
        indices: samples, as int64 of one dimension on any device.
        stream: what the number is for; numbers of different streams are unrelated.
        draws: how many numbers each sample gets.

    Returns:
        float32 in [0, 1), of shape (draws, len(indices)); (len(indices),) for one draw. The same on every device.

    >>> sample_uniform(0, 3, torch.tensor([7, 8]), stream=0)[1] == sample_uniform(0, 3, torch.tensor([8]), stream=0)[0]
    tensor(True)

    Reference: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014 (the mixing function).
    Differs from the paper: used as a counter-based generator, so that no state has to be carried or saved.
    """
    key = 0
    for word in (seed, epoch, stream):
        key = _mix_integer((key ^ word) + _GOLDEN)
    draw = torch.arange(draws, device=indices.device).unsqueeze(1)
    z = (indices.unsqueeze(0) + (draw << 40)) * _signed(_GOLDEN) + _signed(key)
    z = (z ^ _shift(z, 30)) * _signed(_MIX1)
    z = (z ^ _shift(z, 27)) * _signed(_MIX2)
    uniform = _shift(z ^ _shift(z, 31), 40).to(torch.float32).mul(2.0**-24)
    return uniform[0] if draws == 1 else uniform


def _signed(word: int) -> int:
    """The int64 with the bits of a 64-bit word; products and sums of int64 tensors wrap as the words do."""
    return word - 2**64 if word >= 2**63 else word


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right: int64 tensors shift in copies of the sign bit, which the mask removes."""
    return torch.bitwise_and(z >> bits, 2 ** (64 - bits) - 1)


def _mix_integer(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * _MIX1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX2) & _MASK
    return z ^ (z >> 31)


def random_flip(images: Tensor, indices: Tensor, seed: int, epoch: int) -> Tensor:
    """Mirror each image, left for right, with probability one half."""
    return _mirror(images, mirrored(indices, seed, epoch))


def mirrored(indices: Tensor, seed: int, epoch: int) -> Tensor:
    """Return which samples are mirrored in an epoch."""
    return sample_uniform(seed, epoch, indices, _FLIP) < 0.5


def alternating_flip(images: Tensor, indices: Tensor, seed: int, epoch: int) -> Tensor:
    """Mirror a random half of the images in even epochs and the other half in odd ones.

    Two successive epochs show each image both ways; drawn anew each time, half of the images would be shown one way
    twice.

    >>> image = torch.tensor([[[[0, 1]]]])
    >>> [alternating_flip(image, torch.tensor([5]), seed=0, epoch=epoch)[0, 0, 0].tolist() for epoch in range(3)]
    [[1, 0], [0, 1], [1, 0]]

    Reference: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, section 3.6.
    """
    first = mirrored(indices, seed, 0)
    return _mirror(images, first != bool(epoch % 2))


def _mirror(images: Tensor, chosen: Tensor) -> Tensor:
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(-1), images)


def random_crop(images: Tensor, indices: Tensor, seed: int, epoch: int, pad: int = 4) -> Tensor:
    """Shift each image by up to `pad` pixels each way: pad it by reflection, then cut out a window of its size.

    Reflection leaves no black edge that betrays the shift; where the background is plain, as in Fashion-MNIST, it
    continues the background and so equals padding with zeros.

    Args:
        images: NCHW, any type.
        indices: the samples' indices in the data set.
        seed: of the run.
        epoch: of the pass over the data.
        pad: the largest shift, in pixels.

    Returns:
        Images of the same shape and type.

    >>> ramp = torch.arange(8.0).expand(1, 1, 8, 8)
    >>> random_crop(ramp, torch.tensor([5]), seed=0, epoch=0, pad=2)[0, 0, 0]
    tensor([1., 2., 3., 4., 5., 6., 7., 6.])

    Reference: He et al., "Deep residual learning for image recognition", 2016, section 4.2.
    Differs from the paper: reflection instead of zeros.
    """
    height, width = images.shape[-2:]
    rows = _reflected(height, pad, images.device)
    columns = _reflected(width, pad, images.device)
    padded = images.index_select(2, rows).index_select(3, columns)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)  # a view: sample, channel, top, left, row, column
    shift = (sample_uniform(seed, epoch, indices, _CROP, draws=2) * (2 * pad + 1)).long()
    sample = torch.arange(len(images), device=images.device)
    return windows[sample, :, shift[0], shift[1]]


def _reflected(length: int, pad: int, device: torch.device) -> Tensor:
    position = torch.arange(-pad, length + pad, device=device).abs()
    return (length - 1) - ((length - 1) - position).abs()


def resized_crop_boxes(
    indices: Tensor, seed: int, epoch: int, height: Tensor | int, width: Tensor | int, min_scale: float = 0.08
) -> Tensor:
    """Draw the boxes of a random resized crop: area in [min_scale, 1] of the image, aspect ratio in [3/4, 4/3].

    The first of ten draws that fits in the image counts; if none fits, it is the largest centred box of an allowed
    aspect ratio.

    Args:
        indices: the samples' indices in the data set.
        seed: of the run.
        epoch: of the pass over the data.
        height: of each image in pixels, or one number for all.
        width: of each image in pixels, or one number for all.
        min_scale: smallest area, as a fraction of the image.

    Returns:
        float64 of shape (4, len(indices)): left, top, width and height of each box in pixels.

    >>> left, top, width, height = resized_crop_boxes(torch.arange(1000), 0, 0, 32, 32, min_scale=0.25)
    >>> bool((width * height).min() >= 0.25 * 32 * 32), bool((left + width).max() <= 32)
    (True, True)

    Reference: Szegedy et al., "Going deeper with convolutions", 2015, section 6.
    Differs from the paper: boxes are not rounded to whole pixels.
    """
    u = sample_uniform(seed, epoch, indices, _BOX, draws=2 * _ATTEMPTS + 2).double()
    H = torch.as_tensor(height, dtype=torch.float64, device=indices.device).expand(len(indices))
    W = torch.as_tensor(width, dtype=torch.float64, device=indices.device).expand(len(indices))
    area = (min_scale + (1 - min_scale) * u[:_ATTEMPTS]) * H * W
    aspect = torch.exp((2 * u[_ATTEMPTS : 2 * _ATTEMPTS] - 1) * math.log(4 / 3))
    w, h = (area * aspect).sqrt(), (area / aspect).sqrt()
    fits = (w <= W) & (h <= H)
    first = fits.to(torch.uint8).argmax(0, keepdim=True)
    found = fits.any(0)
    w = torch.where(found, w.gather(0, first)[0], torch.minimum(W, H * 4 / 3))
    h = torch.where(found, h.gather(0, first)[0], torch.minimum(H, W * 4 / 3))
    across = torch.where(found, u[-2], 0.5)
    down = torch.where(found, u[-1], 0.5)
    return torch.stack([across * (W - w), down * (H - h), w, h])


def _resized_crop_flip(images: Tensor, indices: Tensor, seed: int, epoch: int, size: int, min_scale: float) -> Tensor:
    """Random resized crop and flip in one bilinear sampling; `images` are floating-point."""
    height, width = images.shape[-2:]
    left, top, w, h = resized_crop_boxes(indices, seed, epoch, height, width, min_scale)
    sign = torch.where(mirrored(indices, seed, epoch), -1.0, 1.0)
    theta = torch.zeros(len(images), 2, 3, dtype=torch.float64, device=images.device)
    theta[:, 0, 0], theta[:, 0, 2] = sign * w / width, (2 * left + w) / width - 1
    theta[:, 1, 1], theta[:, 1, 2] = h / height, (2 * top + h) / height - 1
    grid = F.affine_grid(theta.to(images.dtype), [len(images), images.shape[1], size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="border", align_corners=False)


def resize(images: Tensor, size: int) -> Tensor:
    """Resize floating-point images to `size` x `size`, with antialiasing; images of that size pass unchanged."""
    if images.shape[-2:] == (size, size):
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False, antialias=True)


@functools.lru_cache(maxsize=64)
def _scale_and_shift(
    mean: tuple[float, ...], std: tuple[float, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    # kept on the device: building them in each step would copy from the host and make it wait
    m, s = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (mean, std))
    return (1 / (255 * s)).to(device, dtype), (-m / s).to(device, dtype)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Scale floating-point images of 0..255, in place, to (x / 255 - mean) / std for each channel."""
    scale, shift = _scale_and_shift(mean, std, images.dtype, images.device)
    return images.mul_(scale).add_(shift)


@dataclass(frozen=True, kw_only=True)
class Augment:
    """Turn stored images into the network's input: augment, resize, normalise, in that order.

    Args:
        kind: none; flip (left for right); crop_flip (shift by some pixels, then flip); crop_alternate (shift, then flip
            every other epoch); resized_crop (random resized crop and flip).
        seed: of the run.
        image_size: side of the result in pixels; 0 keeps the side of the images.
        mean: of each channel, images scaled to 0..1; if empty, values keep their range, and bytes stay bytes.
        std: of each channel.
        dtype: of the result. The arithmetic is float64 for float64 and float32 otherwise.
        min_scale: smallest area of a resized crop, as a fraction of the image.
        shift: the largest shift each way, in pixels, for the kinds that shift.

    >>> flip = Augment(kind="flip", mean=(0.0,), std=(1.0,))
    >>> images = torch.tensor([[[[0, 255]]]], dtype=torch.uint8).expand(4, 1, 1, 2)
    >>> flip(images, torch.arange(4), epoch=0)[:, 0, 0].tolist()  # sample by sample: mirrored or not
    [[0.0, 1.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0]]
    """

    kind: str = "none"
    seed: int = 0
    image_size: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    dtype: torch.dtype = torch.float32
    min_scale: float = 0.08
    shift: int = 4

    def __call__(self, images: Tensor, indices: Tensor, epoch: int) -> Tensor:
        """Augment images of NCHW; `indices` are the samples' positions in the data set, on the same device."""
        if self.kind in ("crop_flip", "crop_alternate"):
            images = random_crop(images, indices, self.seed, epoch, self.shift)
        if self.kind in ("flip", "crop_flip"):
            images = random_flip(images, indices, self.seed, epoch)
        if self.kind == "crop_alternate":
            images = alternating_flip(images, indices, self.seed, epoch)
        x = images.to(torch.float64 if self.dtype == torch.float64 else torch.float32)
        size = self.image_size or x.shape[-1]
        if self.kind == "resized_crop":
            # sampling points further apart than pixels would skip some: sample at full size, then average
            x = _resized_crop_flip(x, indices, self.seed, epoch, max(size, x.shape[-1]), self.min_scale)
        if self.image_size:
            x = resize(x, size)
        if self.mean:
            return normalise(x, self.mean, self.std).to(self.dtype)
        if images.dtype == torch.uint8:
            return x.round_().clamp_(0, 255).to(torch.uint8)
        return x.to(self.dtype)
