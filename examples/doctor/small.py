"""What the miniatures share: little data and little models, so that each script is about its mistake."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.utils.data import Dataset

WIDTH, CLASSES = 16, 4


class Points(Dataset):
    """Points in four clouds, the same on every rank; sample i is a pure function of i."""

    def __init__(self, count: int = 144, offset: int = 0) -> None:
        self.count, self.offset = count, offset
        centers = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(5))
        generator = torch.Generator().manual_seed(7 + offset)
        self.labels = torch.randint(0, CLASSES, (count,), generator=generator)
        self.points = centers[self.labels] + torch.randn(count, WIDTH, generator=generator)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


def mlp(width: int = 32, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


def join() -> tuple[int, int]:
    """Join the ranks that torchrun started."""
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


class Named(Points):
    """The same points as mappings, as Hugging Face's collators like them."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        point, label = super().__getitem__(index)
        return {"points": point, "labels": label}


class Sentences(Dataset):
    """Token sequences of very different lengths, padded with -100 in the targets."""

    def __init__(self, count: int = 256, length: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tokens = torch.randint(0, 32, (count, length), generator=generator)
        self.targets = self.tokens.roll(-1, 1)
        lengths = torch.where(torch.arange(count) % 3 == 0, length, 3)
        self.targets[torch.arange(length)[None, :] >= lengths[:, None]] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index], self.targets[index]
