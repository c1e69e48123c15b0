"""Views of an image at evaluation: itself, its mirror image, both shifted by a pixel."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor

from bigstep.errors import ConfigError

__all__ = ["views_of"]


def views_of(images: Tensor, count: int) -> Iterator[tuple[float, Tensor]]:
    """Yield views of all images, each with its weight in the average of outputs.

    Args:
        images: Samples x channels x height x width.
        count: 1, 2 (the mirror image too, equal weights), or 6: the two count a half, and both of them shifted by one
            pixel, once up and left and once down and right, the other half.

    >>> import torch
    >>> [(weight, view[0, 0, 0].tolist()) for weight, view in views_of(torch.arange(9.0).view(1, 1, 3, 3), count=2)]
    [(0.5, [0.0, 1.0, 2.0]), (0.5, [2.0, 1.0, 0.0])]
    >>> sum(weight for weight, _ in views_of(torch.zeros(1, 1, 3, 3), count=6))
    1.0

    Reference: Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", 2024, section 3.5 (six views).
    """
    if images.ndim != 4 or not images.is_floating_point():
        raise ConfigError(
            f"evaluate_views is {count}, but samples of {images.dtype} and {tuple(images.shape[1:])} are no images: "
            "use evaluate_views=1."
        )
    if count == 1:
        yield 1.0, images
        return
    both = (images, images.flip(3))
    yield from ((0.5 if count == 2 else 0.25, view) for view in both)
    if count == 6:
        height, width = images.shape[2:]
        for view in both:
            padded = F.pad(view, (1, 1, 1, 1), mode="reflect")
            for place in (0, 2):
                yield 0.125, padded[:, :, place : place + height, place : place + width]
