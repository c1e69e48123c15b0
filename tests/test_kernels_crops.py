"""The crop kernel against its definition in float64 and against Pillow, under Triton's interpreter or on a GPU."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bigstep.data.decode import cut, cut_fast
from bigstep.gpu import backend
from bigstep.gpu.crops import Parts, crop_batch
from interpreter import DEVICE, needs_triton
from test_data_folder import photograph

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SIZES = [(12, 9), (6, 10), (7, 7), (14, 5)]
BOXES = [(2.25, 1.5, 7.5, 6.25), (0.0, 0.0, 6.0, 10.0), (1.0, 2.0, 3.0, 3.0), (4.5, 1.0, 9.5, 4.0)]
BOUNDS = [(0, 0, 12, 9), (0, 0, 6, 10), (1, 2, 4, 5), (5, 1, 14, 5)]
MIRRORED = [False, True, True, False]

pytestmark = needs_triton


@pytest.fixture(autouse=True)
def _kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", True)


def pictures() -> list[Image.Image]:
    return [photograph(width, height, seed) for seed, (width, height) in enumerate(SIZES)]


def tensors(planar: bool) -> list[Tensor]:
    """As nvJPEG gives them, channel by channel, or as Pillow does, pixel by pixel; parts of one buffer."""
    arrays = [np.asarray(picture) for picture in pictures()]
    flat = torch.cat([torch.from_numpy(a.transpose(2, 0, 1).copy() if planar else a.copy()).flatten() for a in arrays])
    found, at = [], 0
    for part, (width, height) in zip(arrays, SIZES, strict=True):
        piece = flat.to(DEVICE)[at : at + part.size]
        found.append(piece.view(3, height, width) if planar else piece.view(height, width, 3).permute(2, 0, 1))
        at += part.size
    return found


def parts() -> Parts:
    return Parts(torch.tensor(BOXES, dtype=torch.float64), torch.tensor(BOUNDS), torch.tensor(MIRRORED))


def by_definition(image: Tensor, index: int, width: int, height: int) -> np.ndarray:
    """One pixel at a time, in float64, in grey levels."""
    pixels = image.cpu().numpy().astype(np.float64)
    left, top, box_width, box_height = BOXES[index]
    x0, y0, x1, y1 = BOUNDS[index]
    out = np.empty((3, height, width))
    for i in range(height):
        for j in range(width):
            cy, cx = top + (i + 0.5) * box_height / height, left + (j + 0.5) * box_width / width
            ry, rx = max(box_height / height, 1.0), max(box_width / width, 1.0)
            total, weights = np.zeros(3), 0.0
            for y in range(y0, y1):
                for x in range(x0, x1):
                    weight = max(0.0, 1 - abs(y + 0.5 - cy) / ry) * max(0.0, 1 - abs(x + 0.5 - cx) / rx)
                    total += weight * pixels[:, y, x]
                    weights += weight
            out[:, i, width - 1 - j if MIRRORED[index] else j] = total / weights
    return out


@pytest.mark.parametrize(
    ("planar", "dtype", "layout"),
    [
        (True, torch.float32, torch.contiguous_format),
        (False, torch.float16, torch.channels_last),
        (True, torch.float64, torch.contiguous_format),  # by the twin
    ],
)
def test_a_batch_of_many_sizes_is_the_definition(planar: bool, dtype: torch.dtype, layout: torch.memory_format) -> None:
    images = tensors(planar)
    out = torch.empty((4, 3, 4, 5), dtype=dtype, device=DEVICE, memory_format=layout)
    assert crop_batch(images, parts(), out) is out
    found = out.double().cpu().numpy() * 255
    # grey levels: places in float32 are off by 1e-5 of a pixel here; fp16 keeps 11 bits of a number up to 1
    allowed = {torch.float32: 0.01, torch.float16: 0.13, torch.float64: 1e-9}[dtype]
    for index, image in enumerate(images):
        assert np.abs(found[index] - by_definition(image, index, 5, 4)).max() < allowed


def test_normalised_by_mean_and_deviation() -> None:
    image = tensors(planar=True)[2:3]
    asked = Parts(parts().boxes[2:3], parts().bounds[2:3], parts().mirrored[2:3])
    plain = crop_batch(image, asked, torch.empty(1, 3, 3, 3, device=DEVICE))
    found = crop_batch(image, asked, torch.empty(1, 3, 3, 3, device=DEVICE), MEAN, STD)
    mean, std = (torch.tensor(v, device=DEVICE).view(1, 3, 1, 1) for v in (MEAN, STD))
    torch.testing.assert_close(found, (plain - mean) / std, rtol=0, atol=2e-6)  # one rounding more or less


def test_the_cpu_path_gives_the_same_within_what_it_rounds() -> None:
    """Pillow rounds to whole grey levels after each of its two passes, torch once: half a level each."""
    images, opened = tensors(planar=False), pictures()
    size = (5, 4)
    whole = torch.tensor([[round(v) for v in (x, y, x + w, y + h)] for x, y, w, h in BOXES])
    snapped = torch.cat([whole[:, :2], whole[:, 2:] - whole[:, :2]], 1).double()
    none = torch.zeros(4, dtype=torch.bool)
    centred = crop_batch(images, Parts(parts().boxes, _all(), none), torch.empty(4, 3, 4, 5, device=DEVICE))
    random = crop_batch(images, Parts(snapped, whole, none), torch.empty(4, 3, 4, 5, device=DEVICE))
    for index, picture in enumerate(opened):
        x, y, w, h = BOXES[index]
        slow = cut(picture, (x, y, x + w, y + h), size).astype(float)
        fast = cut_fast(picture, (x, y, x + w, y + h), size).numpy().astype(float)
        for ours, theirs in ((centred, slow), (random, fast)):
            difference = np.abs(ours[index].permute(1, 2, 0).cpu().numpy() * 255 - theirs)
            assert difference.mean() < 0.5
            assert difference.max() < 1.3


def _all() -> Tensor:
    return torch.tensor([(0, 0, width, height) for width, height in SIZES])


def test_an_image_at_its_own_size_stays_as_it_is() -> None:
    image = tensors(planar=True)[0]
    asked = Parts(torch.tensor([[0.0, 0, 12, 9]]), torch.tensor([[0, 0, 12, 9]]), torch.tensor([False]))
    found = crop_batch([image], asked, torch.empty(1, 3, 9, 12, device=DEVICE))
    assert torch.equal((found[0] * 255).round().to(torch.uint8), image)
