"""Data sets of a user's own: anything with a length whose items, by index, are pairs (x, y).

x is a tensor, or a dict, tuple or list of tensors, which the network gets as one argument; y is a tensor or number.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from bigstep.data.augment import sample_uniform
from bigstep.data.device_memory import DeviceMemory, Take
from bigstep.data.loaders import Chunk, Finish, Job, Loaders
from bigstep.data.sources.base import Source, digest, spread
from bigstep.data.view import Request, View, Way
from bigstep.errors import ConfigError, DataError
from bigstep.gpu.cross_entropy import is_counted
from bigstep.nested import is_input, kinds_of, leaves, map_tensors

__all__ = ["MapStyle", "OwnItems", "TensorItems", "widened"]

_OWN = 12  # stream of the seeds that items get
_MOST_READ = 10_000  # items that are read, at most, to count the classes
_MOST_CHANNELS = 4  # of an image: if its first dimension is larger and its last is not, the channels come last
_HASHED = 64  # samples whose content is part of a fingerprint
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}


class MapStyle(Protocol):
    """A data set with a length whose items, by index, are pairs (x, y)."""

    def __len__(self) -> int: ...  # noqa: D105

    def __getitem__(self, index: int, /) -> Any: ...  # noqa: D105


class OwnItems(Source):
    """Items of a user's own map-style data set, or some of them.

    An attribute `classes` (names) is used if there is one; otherwise the classes are counted from an attribute
    `targets`, as in torchvision's sets, or by reading the items if they are few. If y is a sequence, workers that share
    a step must know how many targets each item has: from an attribute `target_counts`, or by reading the items.

    >>> items = OwnItems([(torch.zeros(1, 4, 4), 0), (torch.ones(1, 4, 4), 1)])
    >>> len(items), items.num_classes, items.inputs(0)
    (2, 2, {'channels': 1, 'image_size': 4})
    """

    labels = None

    def __init__(self, items: MapStyle, indices: Tensor | None = None) -> None:
        self.items, self._indices = items, indices

    @property
    def name(self) -> str:
        """The class of the data set."""
        return type(self.items).__name__

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, from the data set or from the one that it is a part of."""
        within = getattr(self.items, "dataset", None)
        return tuple(map(str, getattr(self.items, "classes", getattr(within, "classes", ()))))

    def __len__(self) -> int:
        return len(self.items) if self._indices is None else len(self._indices)

    def __getitem__(self, index: int) -> Any:
        return self.items[index if self._indices is None else int(self._indices[index])]

    def subset(self, indices: Tensor) -> OwnItems:
        """Keep the samples at `indices`, in that order."""
        return type(self)(self.items, indices if self._indices is None else self._indices[indices])

    @cached_property
    def first(self) -> tuple[Any, Tensor]:
        """The first pair, taken as an example of all."""
        x, y = self._read([0])
        return map_tensors(lambda tensor: tensor[0], x), y[0]

    @property
    def has_several_inputs(self) -> bool:
        """Whether x is several tensors."""
        return not isinstance(self.first[0], Tensor)

    @property
    def is_images(self) -> bool:
        """Whether x looks like an image: (channels, height, width) of bytes or floating-point numbers."""
        x, _ = self.first
        return isinstance(x, Tensor) and x.ndim == 3 and (x.dtype == torch.uint8 or x.is_floating_point())

    @property
    def is_tokens(self) -> bool:
        """Whether x is a sequence of integers."""
        x, _ = self.first
        return isinstance(x, Tensor) and x.ndim == 1 and _is_whole(x)

    @property
    def has_many_targets(self) -> bool:
        """Whether y holds several integers, as for a language model."""
        _, y = self.first
        return y.ndim >= 1 and _is_whole(y)

    def inputs(self, image_size: int) -> dict[str, int]:
        """Return the length of sequences of tokens; for several tensors, their number and the size of the largest.

        For everything else, these are the first and the last dimension of x.
        """
        x, _ = self.first
        if self.has_several_inputs:
            sizes = [tensor.numel() for tensor in leaves(x)]
            return {"channels": len(sizes), "image_size": max(sizes)}
        shape = x.shape or (1,)
        if self.is_tokens:
            return {"length": shape[0]}
        return {"channels": shape[0], "image_size": image_size or shape[-1]}

    def input_shape(self, image_size: int) -> tuple[int, ...]:
        """Return the shape of x if it is one tensor; images that are shown at another size have that size."""
        shape = () if self.has_several_inputs else tuple(self.first[0].shape)
        return (shape[0], image_size, image_size) if image_size and self.is_images else shape

    @cached_property
    def num_classes(self) -> int:
        """Count the classes, or the tokens that occur, in the whole set, even if this is a part of it."""
        if self.classes:
            return len(self.classes)
        listed = getattr(self.items, "targets", None)
        if not self.is_tokens and isinstance(listed, Tensor | np.ndarray | list) and len(listed) == len(self.items):
            return self._count(widened(torch.as_tensor(listed)))
        x, y = self._read_all()
        return self._count(torch.cat([x.reshape(-1), y.reshape(-1)]) if self.is_tokens else y)

    def feed(self, view: View) -> Way:
        """Read items in loader processes."""
        return Loaders(view, OwnJobs(self, view.seed), self.finish, self.name)

    def finish(self, view: View) -> Finish:
        """Return what the device does with loaded items: images are augmented and resized as asked, others left alone.

        Values keep their range, because only the user's model knows what they mean.
        """
        if view.kind != "none" and not self.is_images:
            raise ConfigError(
                f"data.augment is {view.kind}, which needs images of (channels, height, width), but an item of "
                f"{self.name} is {kinds_of(self.first[0])}; set data.augment=none."
            )
        if view.kind != "none" or (view.image_size and self.is_images):
            return view.augmentation()
        dtype = view.dtype
        return lambda x, indices, epoch: map_tensors(
            lambda part: part.to(dtype) if part.is_floating_point() else part, x
        )

    def check_images(self, model: str) -> None:
        """Refuse items that are not floating-point images, or whose channels come last."""
        x, _ = self.first
        if not self.is_images or not x.is_floating_point() or x.shape[2] <= _MOST_CHANNELS < x.shape[0]:
            raise ConfigError(
                f"model: {model} takes floating-point images, (channels, height, width), but an item of "
                f"{self.name} is {kinds_of(x)}; convert x, or give a model of your own."
            )

    def targets(self, indices: Tensor) -> Tensor | None:
        """Count the targets of each sequence that are not padding; without `target_counts`, each item is read once."""
        if not self.has_many_targets:
            return None
        missing = indices[self._counted[indices] < 0]
        if len(missing):
            _, y = self._read(missing.tolist())
            self._counted[missing] = is_counted(y).flatten(1).sum(1)
        return self._counted[indices]

    @cached_property
    def _counted(self) -> Tensor:
        """Targets of each sequence, -1 if not counted yet; an attribute `target_counts` gives all."""
        told = getattr(self.items, "target_counts", None)
        if told is None:
            return torch.full((len(self),), -1, dtype=torch.int64)
        counts = torch.as_tensor(told)
        if counts.shape != (len(self.items),) or counts.is_floating_point() or int(counts.min()) < 0:
            raise DataError(
                f"{self.name}.target_counts must hold for each of its {len(self.items):,} items how many targets are "
                f"not padding, but it is {counts.dtype} of {tuple(counts.shape)}."
            )
        return counts.long() if self._indices is None else counts.long()[self._indices]

    def fingerprint(self) -> str:
        """Hash which items there are, the shape of x and, unless they change with each reading, some of the targets."""
        chosen = [[index] for index in spread(len(self), _HASHED // 8).tolist()]  # one by one: lengths may differ
        targets, again = ([self._read(index)[1] for index in chosen] for _ in range(2))
        kept = [y for y, repeated in zip(targets, again, strict=True) if torch.equal(y, repeated)]
        x, _ = self.first
        items = torch.tensor([]) if self._indices is None else self._indices
        return digest(len(self), kinds_of(x) if self.has_several_inputs else tuple(x.shape), *kept, items)

    def describe(self, verify: bool) -> dict[str, Any]:
        """Describe the first item; `verify` reads all."""
        x, y = self.first
        facts: dict[str, Any] = {"item": kinds_of((x, y))}
        if verify:
            chunks = ((index, OwnJobs(self, 0)[Job(0, [index], None)]) for index in range(len(self)))
            damaged = [{"file": f"item {index}", "reason": chunk} for index, chunk in chunks if isinstance(chunk, str)]
            facts.update(checked=len(self), corrupt=damaged)
        return facts

    def _read(self, indices: list[int]) -> tuple[Any, Tensor]:
        chunk = OwnJobs(self, 0)[Job(0, indices, None)]
        if isinstance(chunk, str):
            raise DataError(chunk)
        return chunk[0], chunk[1]

    def _read_all(self) -> tuple[Any, ...]:
        count = len(self.items)
        if count > _MOST_READ:
            raise DataError(
                f"{self.name} has {count:,} items, too many to find its classes by reading them; give it an "
                "attribute `classes` with their names, or `targets` with the label of each item."
            )
        return OwnItems(self.items)._read(list(range(count)))

    def _count(self, values: Tensor) -> int:
        kept = values[is_counted(values)]
        if not _is_whole(values) or not len(kept) or int(kept.min()) < 0:
            raise DataError(
                f"The targets of {self.name} are not class numbers (integers from 0 on), so a model by name cannot "
                "be built for it; give a model of your own, or the data set an attribute `classes`."
            )
        return int(kept.max()) + 1


def _is_whole(values: Tensor) -> bool:
    """Whether these are integers."""
    return not (values.is_floating_point() or values.is_complex())


def widened(values: Tensor) -> Tensor:
    """Return numbers in a type that torch computes with: unsigned types wider than a byte it can only store."""
    return values.to(_WIDER.get(values.dtype, values.dtype))


class OwnJobs:
    """Collate the items of a user's own data set.

    The global generators of torch, NumPy and Python are seeded for each item from (seed, epoch, index), so that random
    transforms repeat, and are restored afterwards, so that the rest of the program does not notice.
    """

    def __init__(self, source: OwnItems, seed: int) -> None:
        self.source, self.seed = source, seed

    def look(self, request: Request, view: View) -> None:
        """Items are read in one way only."""

    def __getitem__(self, job: Job) -> Chunk:
        chance = sample_uniform(self.seed, job.epoch, torch.tensor(job.indices), _OWN)
        seeds = (chance * 2**24).long().tolist()
        items: list[Any] = []
        try:
            with _generators_put_back():
                for index, seed in zip(job.indices, seeds, strict=True):
                    torch.default_generator.manual_seed(seed)
                    np.random.seed(seed)
                    random.seed(seed)
                    items.append(self.source[index])
        except DataError as error:
            return str(error)
        kind = self.source.name
        try:
            batch = default_collate(items)
        except (TypeError, RuntimeError, KeyError) as error:
            return _why_no_batch(items, job.indices, kind, error)
        if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
            return _why_no_pair(items[0], job.indices[0], kind)
        if not is_input(items[0][0]):
            return _why_no_pair(items[0], job.indices[0], kind)
        return map_tensors(widened, batch[0]), widened(batch[1])


@contextlib.contextmanager
def _generators_put_back() -> Iterator[None]:
    """Restore the global generators afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)


def _why_no_pair(item: Any, index: int, kind: str) -> str:
    """Say what an item is instead of a pair."""
    return (
        f"Item {index} of {kind} is {kinds_of(item)}, but it must be a pair (x, y): x a tensor, a number, or a dict or "
        "tuple of tensors, y a tensor or a number."
    )


def _why_no_batch(items: list[Any], indices: list[int], kind: str, error: Exception) -> str:
    """Say which items do not go together; torch's own message depends on where they are collated."""
    kinds = [kinds_of(item) for item in items]
    for index, found in zip(indices, kinds, strict=True):
        if found != kinds[0]:
            return (
                f"Items {indices[0]} and {index} of {kind} do not form a batch: {kinds[0]} and {found}; pad or cut "
                "them to one shape."
            )
    return f"Items {indices[0]} to {indices[-1]} of {kind} do not form a batch: {error}."


class TensorItems(OwnItems):
    """A user's own pairs (x, y) in two tensors, held on the device if they fit.

    >>> items = TensorItems(TensorDataset(torch.eye(3), torch.tensor([0, 2, 1])))
    >>> len(items), items.num_classes, items.subset(torch.tensor([2])).x.tolist()
    (3, 3, [[0.0, 0.0, 1.0]])
    """

    def __init__(self, items: TensorDataset, indices: Tensor | None = None) -> None:
        super().__init__(items, indices)
        self._whole = items.tensors
        self.x, self.y = items.tensors if indices is None else (tensor[indices] for tensor in items.tensors)

    def feed(self, view: View) -> Way:
        """Keep the tensors on the device; on a GPU only if they take at most half of its free memory."""
        size = self.x.nbytes + self.y.nbytes
        if view.device.type == "cuda" and size > torch.cuda.mem_get_info(view.device)[0] // 2:
            return super().feed(view)
        x, y = self.x.to(view.device), self.y.to(view.device)

        def prepare(view: View) -> Take:
            finish = self.finish(view)

            def take(indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
                return finish(x.index_select(0, indices), indices, epoch), y.index_select(0, indices)

            return take

        return DeviceMemory(view, prepare)

    def targets(self, indices: Tensor) -> Tensor | None:
        """Count the targets of each sample that are not padding; None if each has one."""
        return None if self._counts is None else self._counts[indices]

    @cached_property
    def _counts(self) -> Tensor | None:
        """The counts of all samples, on the host: targets that a user has put on the device are read only once."""
        if not _is_whole(self.y):
            return None
        counted = is_counted(self.y).reshape(len(self.y), -1).sum(1).cpu()
        return counted if self.has_many_targets or bool((counted == 0).any()) else None

    def fingerprint(self) -> str:
        """Hash the shapes and some of the samples."""
        chosen = spread(len(self), _HASHED)
        return digest(tuple(self.x.shape), tuple(self.y.shape), self.x[chosen], self.y[chosen])

    def _read_all(self) -> tuple[Tensor, ...]:
        return self._whole
