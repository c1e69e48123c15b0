"""From requests for samples to batches on the device: what the training loop iterates over.

Images held in memory stay on the device and are indexed and augmented there. Files, and data sets of a user's own, go
through torch's DataLoader: its processes decode, the device augments. To a GPU they travel from pinned memory in a
stream of their own, one batch ahead of the one that is computed. Either way one batch comes for each request, in order,
and what a sample looks like depends on (seed, epoch, index) alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bigstep.data.augment import Augment
from bigstep.data.folder import FolderImages, rectangle_of, rectangular_batches
from bigstep.data.images import TensorImages
from bigstep.data.loading import FolderJobs, Job, MapJobs, quiet_worker
from bigstep.errors import ConfigError, DataError, RunError

__all__ = ["Feed", "Request"]

_CHUNK = 64  # samples that a loader process sends at once: its share of /dev/shm stays small, and all share a batch
_TOGETHER = 512  # samples of memory that are prepared in one go
_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Request:
    """A batch that the loop wants: samples of one epoch, by index."""

    epoch: int
    indices: Tensor
    """int64 of one dimension, on the CPU."""


class Feed:
    """Yield (images, labels) on the device for each request.

    Args:
        source: `TensorImages`, `FolderImages`, or any map-style data set of pairs (x, y).
        train: whether to augment.
        seed: of the run.
        augment: none, flip, crop_flip or resized_crop; a user's own data set is passed on as it is.
        image_size: side of the images in pixels; 0 keeps the size of the set, and a folder has none of its own.
        device: where the batches go.
        dtype: of the images; a user's own are converted if they are floating.
        loaders: processes that load files or a user's own data set; 0 loads in this one.
        rectangular: evaluate a folder on whole images, in the batches that `evaluation_batches` gives.

    >>> tiny = TensorImages(images=torch.full((4, 1, 2, 2), 255, dtype=torch.uint8), labels=torch.tensor([0, 1, 0, 1]),
    ...                     classes=("a", "b"), mean=(0.5,), std=(0.5,), name="tiny")
    >>> feed = Feed(tiny, train=False)
    >>> [(images.shape[0], images.mean().item(), labels.tolist())
    ...  for images, labels in feed([Request(0, torch.tensor([1, 2, 3])), Request(0, torch.tensor([0]))])]
    [(3, 1.0, [1, 0, 1]), (1, 1.0, [0])]
    """

    def __init__(
        self,
        source: Any,
        *,
        train: bool,
        seed: int = 0,
        augment: str = "none",
        image_size: int = 0,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        loaders: int = 0,
        rectangular: bool = False,
    ) -> None:
        self.source = source
        self.device = torch.device(device)
        self._dtype = dtype
        self._min_scale = 0.08
        self._size = image_size
        self._augment: Augment | None = None
        kind = augment if train else "none"
        self._crop: Literal["random", "centre", "whole"] = "centre"
        if kind == "resized_crop":
            self._crop = "random"
        elif rectangular and not train and isinstance(source, FolderImages):
            self._crop = "whole"
        if isinstance(source, TensorImages):
            self._images, self._labels = source.images.to(self.device), source.labels.to(self.device)
            self._augment = Augment(
                kind=kind, seed=seed, image_size=image_size, mean=source.mean, std=source.std, dtype=dtype
            )
            return
        jobs: FolderJobs | MapJobs
        if isinstance(source, FolderImages):
            if not image_size:
                raise ConfigError(f"{source.name} has images of many sizes; set data.image_size, for example to 224.")
            # the loaders crop, because that decides how much has to be decoded; the rest is the device's
            on_device = "flip" if self._crop == "random" else kind
            self._augment = Augment(kind=on_device, seed=seed, mean=source.mean, std=source.std, dtype=dtype)
            jobs = FolderJobs(source, seed)
        else:
            jobs = MapJobs(source, seed)
        self._requests: Iterable[Request] = ()
        self._pending: deque[tuple[Request, int]] = deque()  # what the loaders are at: requests, and chunks of each
        self._turn = 0
        self._loader: DataLoader[Any] = DataLoader(
            jobs,  # type: ignore[arg-type]  # a job is no int, and torch does not ask for one
            batch_size=None,  # a job is a whole chunk already
            sampler=_Jobs(self),
            num_workers=loaders,
            pin_memory=self.device.type == "cuda",
            persistent_workers=loaders > 0,
            worker_init_fn=quiet_worker,
            generator=torch.Generator(),  # else each epoch would advance the global one
        )

    def __len__(self) -> int:
        return len(self.source)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes; empty where a user's own data set has no attribute `classes`."""
        whole = getattr(self.source, "dataset", self.source)  # of a part that was held out
        return tuple(map(str, getattr(self.source, "classes", getattr(whole, "classes", ()))))

    @property
    def num_classes(self) -> int:
        """Number of classes; 0 where a user's own data set does not tell."""
        return len(self.classes)

    @property
    def channels(self) -> int:
        """Channels of an image; of a user's own data set, the first dimension of the first x."""
        if isinstance(self.source, TensorImages | FolderImages):
            return self.source.channels
        return int(self.source[0][0].shape[0])

    @property
    def image_size(self) -> int:
        """Side of the images in pixels; of a user's own data set, the last dimension of the first x."""
        if isinstance(self.source, FolderImages) or self._size:
            return self._size
        return self.source.image_size if isinstance(self.source, TensorImages) else int(self.source[0][0].shape[-1])

    def resize(self, image_size: int, min_scale: float = 0.08) -> None:
        """Progressive resizing: from the next call on, batches have this size and crops at least this area."""
        self._size, self._min_scale = image_size, min_scale
        if isinstance(self.source, TensorImages) and self._augment is not None:
            self._augment = dataclasses.replace(self._augment, image_size=image_size, min_scale=min_scale)

    @property
    def loaders(self) -> int | None:
        """Processes that load; None where the images are in memory."""
        return None if isinstance(self.source, TensorImages) else self._loader.num_workers

    def evaluation_batches(self, batch: int) -> list[Tensor]:
        """Divide all samples into batches of at most `batch`, each sample in one: in order, or by shape if rectangular.

        Ranks that share an evaluation take batches[rank::ranks]; what a sample looks like does not depend on it.
        """
        if self._crop == "whole":
            return rectangular_batches(self.source, self._size, batch)
        return list(torch.split(torch.arange(len(self)), batch))

    def __call__(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield one batch for each request; loaders work ahead of what is consumed."""
        return self._from_memory(requests) if isinstance(self.source, TensorImages) else self._from_loader(requests)

    def close(self) -> None:
        """End the loader processes; a later call starts new ones."""
        if isinstance(self.source, TensorImages):
            return
        # torch has no public way to end persistent loaders. Left to the garbage collector, which closes their queues
        # before it tells them to end, each would be waited for in vain for five seconds.
        loaders, self._loader._iterator = self._loader._iterator, None
        if loaders is not None:
            loaders._shutdown_workers()  # type: ignore[attr-defined]

    def _from_memory(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        assert self._augment is not None
        for group in _together(requests):
            indices = self._moved(torch.cat([request.indices for request in group]))
            sizes = [len(request.indices) for request in group]
            images = self._augment(self._images.index_select(0, indices), indices, group[0].epoch)
            labels = self._labels.index_select(0, indices)
            yield from zip(torch.split(images, sizes), torch.split(labels, sizes), strict=True)

    def _from_loader(self, requests: Iterable[Request]) -> Iterator[tuple[Tensor, Tensor]]:
        batches = self._on_device(requests)
        for batch in one_ahead(batches) if self.device.type == "cuda" else batches:
            if batch.copied is not None:  # what computes must wait for the copy, and the memory for what computes
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(batch.copied)
                for tensor in (batch.images, batch.labels, batch.indices):
                    tensor.record_stream(stream)
            images, labels = batch.images, batch.labels
            if self._augment is None:
                yield (images.to(self._dtype) if images.is_floating_point() else images), labels
            else:
                yield self._augment(images, batch.indices, batch.epoch), labels

    def _on_device(self, requests: Iterable[Request]) -> Iterator[_Batch]:
        """Yield batches on their way to the device."""
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # type: ignore[no-untyped-call]  # untyped in torch
        for request, chunks in self._loaded(requests):
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                images, labels = (self._join([chunk[side] for chunk in chunks]) for side in (0, 1))
                indices = self._moved(request.indices)
                copied = None if stream is None else stream.record_event()
            yield _Batch(request.epoch, images, labels, indices, copied)

    def _loaded(self, requests: Iterable[Request]) -> Iterator[tuple[Request, list[tuple[Tensor, Tensor]]]]:
        """Yield each request with the chunks of it, as the loaders have them ready."""
        self._turn += 1
        turn = self._turn
        self._requests = requests
        self._pending.clear()
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any fork beside threads; a loader touches nothing that the threads hold
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            chunks = iter(self._loader)
        while True:
            assert turn == self._turn, "a feed serves one iteration at a time"
            first = self._next(chunks)
            if first is None:
                return
            request, count = self._pending.popleft()
            parts = [first, *(self._next(chunks) for _ in range(count - 1))]
            yield request, [part for part in parts if part is not None]

    def _join(self, parts: list[Tensor]) -> Tensor:
        moved = [part.to(self.device, non_blocking=True) for part in parts]
        return moved[0] if len(moved) == 1 else torch.cat(moved)

    def _moved(self, indices: Tensor) -> Tensor:
        """The indices on the device; from pinned memory, since the host may have to wait for any other."""
        if self.device.type == "cuda":
            indices = indices.pin_memory()
        return indices.to(self.device, non_blocking=True)

    def _next(self, chunks: Iterator[Any]) -> tuple[Tensor, Tensor] | None:
        try:
            chunk = next(chunks, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "exited unexpectedly" not in str(error):
                raise
            raise RunError(
                f"A loader process of {getattr(self.source, 'name', 'the data set')} was killed, perhaps for want of "
                "memory; use fewer data.loaders or a smaller local batch."
            ) from None
        if isinstance(chunk, str):
            raise DataError(chunk)
        return chunk


class _Batch(NamedTuple):
    """A batch that may still be on its way: it is there once `copied` has happened on the device."""

    epoch: int
    images: Tensor
    labels: Tensor
    indices: Tensor
    copied: torch.cuda.Event | None


def one_ahead(items: Iterable[_T]) -> Iterator[_T]:
    """Yield each item once the next one has been begun.

    >>> begun = []
    >>> items = one_ahead(begun.append(number) or number for number in range(3))
    >>> next(items), begun
    (0, [0, 1])
    """
    waiting: list[_T] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _together(requests: Iterable[Request]) -> Iterator[list[Request]]:
    """Group small requests of an epoch: a worker's share is often too small to pay for the calls that prepare it."""
    group: list[Request] = []
    for request in requests:
        samples = sum(len(each.indices) for each in group) + len(request.indices)
        if group and (samples > _TOGETHER or request.epoch != group[0].epoch):
            yield group
            group = []
        group.append(request)
    if group:
        yield group


class _Jobs:
    """The chunks of a feed's present requests; torch asks for them in this process, ahead of the loaders."""

    def __init__(self, feed: Feed) -> None:
        self.feed = feed

    def __iter__(self) -> Iterator[Job]:
        feed = self.feed
        for request in feed._requests:
            shape = (feed._size, feed._size)
            if feed._crop == "whole":
                width, height = feed.source.sizes[request.indices[0]].tolist()
                shape = rectangle_of(width, height, feed._size)
            parts = torch.split(request.indices, _CHUNK)
            feed._pending.append((request, len(parts)))
            for part in parts:
                yield Job(request.epoch, part.tolist(), shape, feed._crop, feed._min_scale)
