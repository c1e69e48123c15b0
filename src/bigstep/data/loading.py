"""What a loader process does: one job, a chunk of samples, at a time.

A loader keeps no state, so it can live through a change of image size and serve any epoch.
"""

from __future__ import annotations

import signal
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from bigstep.data.augment import sample_uniform
from bigstep.data.folder import FolderImages
from bigstep.data.pair import MapStyle
from bigstep.errors import DataError

__all__ = ["FolderJobs", "Job", "MapJobs", "quiet_worker"]

_OWN = 12  # stream of the seeds that a user's own data set gets


class Job(NamedTuple):
    """A chunk of a batch; plain numbers, because tensors would travel through shared memory."""

    epoch: int
    indices: list[int]
    shape: tuple[int, int]
    """Width and height in pixels."""
    crop: Literal["random", "centre", "whole"]
    min_scale: float


Chunk = tuple[Tensor, Tensor] | str
"""Images and labels, or the sentence of a DataError: torch would wrap a raised one in its own words."""


def quiet_worker(_: int) -> None:
    """Leave Ctrl-C to the main process, which ends its loaders."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class FolderJobs:
    """Decode files to uint8 images of one shape."""

    def __init__(self, source: FolderImages, seed: int) -> None:
        self.source, self.seed = source, seed

    def __getitem__(self, job: Job) -> Chunk:
        try:
            if job.crop == "random":
                images = self.source.load_random_crops(job.indices, job.shape[0], self.seed, job.epoch, job.min_scale)
            elif job.crop == "whole":
                images = self.source.load_rectangles(job.indices, job.shape)
            else:
                images = self.source.load_crops(job.indices, job.shape[0])
        except DataError as error:
            return str(error)
        return images, self.source.labels[job.indices]


class MapJobs:
    """Collate the items of a user's own data set.

    torch's generator is seeded for each item from (seed, epoch, index), so that random transforms repeat, and is put
    back afterwards, so that the rest of the program does not notice.
    """

    def __init__(self, source: MapStyle, seed: int) -> None:
        self.source, self.seed = source, seed

    def __getitem__(self, job: Job) -> Chunk:
        chance = sample_uniform(self.seed, job.epoch, torch.tensor(job.indices), _OWN)
        seeds = (chance * 2**24).long().tolist()
        items: list[Any] = []
        try:
            with torch.random.fork_rng(devices=[]):
                for index, seed in zip(job.indices, seeds, strict=True):
                    torch.default_generator.manual_seed(seed)
                    items.append(self.source[index])
        except DataError as error:
            return str(error)
        kind = type(self.source).__name__
        try:
            batch = default_collate(items)
        except (TypeError, RuntimeError, KeyError) as error:
            return f"Items {job.indices[0]} to {job.indices[-1]} of {kind} do not form a batch: {error}."
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not all(isinstance(x, Tensor) for x in batch):
            return f"Item {job.indices[0]} of {kind} must be a pair (x, y) of tensors or numbers."
        return batch[0], batch[1]
