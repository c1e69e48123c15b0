"""Feeding through loader processes: they read and decode chunks of samples, the device does the rest.

Chunks are copied to a GPU from pinned memory in a stream of their own, one batch ahead of the one that is computed. A
loader keeps no state, so it can survive a change of image size and serve any epoch.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bigstep.data.device_memory import move_indices
from bigstep.data.view import Request, View
from bigstep.data.waits import Spent, Waits
from bigstep.errors import DataError, RunError
from bigstep.nested import leaves, map_tensors

__all__ = ["Batch", "Chunk", "Finish", "Job", "Jobs", "Loaded", "Loaders"]

_T = TypeVar("_T")

Chunk = tuple[Any, Tensor] | tuple[Any, Tensor, Spent] | str
"""Inputs, targets and the time they took, or the text of a DataError: torch would wrap a raised one in its own."""

Loaded = tuple[Request, list[tuple[Any, Tensor]]]
"""A request with the inputs and targets of its chunks."""

Finish = Callable[[Any, Tensor, int], Any]
"""(loaded inputs, indices, epoch) -> the network's input; all on the device."""


class Job(NamedTuple):
    """A chunk of a batch; plain numbers, because tensors would travel through shared memory."""

    epoch: int
    indices: list[int]
    look: Any
    """What `Jobs.look` returned for the whole request."""


class Jobs(Protocol):
    """What loader processes do for a source."""

    def look(self, request: Request, view: View) -> Any:
        """Return, in the main process, how the samples of a request are to be read: any plain value."""

    def __getitem__(self, job: Job, /) -> Chunk:
        """Read a chunk, in a loader process."""


class Loaders:
    """Yield batches that loader processes read.

    Args:
        view: how the samples are wanted.
        jobs: what a loader process does with a chunk.
        prepare: returns, for a view, the function that the device applies to loaded samples.
        name: of the source, for messages.
    """

    chunk = 64
    """Samples that a loader process sends at once: it uses little of /dev/shm, and all loaders share a batch."""

    def __init__(self, view: View, jobs: Jobs, prepare: Callable[[View], Finish], name: str) -> None:
        self._device, self._jobs, self._prepare, self._name = view.device, jobs, prepare, name
        self.see(view)
        self._requests: Iterable[Request] = ()
        self._pending: deque[tuple[Request, int]] = deque()  # requests that the loaders work on, and chunks of each
        self._turn = 0
        self.waits = Waits(self._device)
        self._loader: DataLoader[Any] = DataLoader(
            jobs,  # type: ignore[arg-type]  # a job is not an int, and torch does not require one
            batch_size=None,  # a job is a whole chunk already
            collate_fn=_as_it_is,
            sampler=_Chunks(self),
            num_workers=view.loaders,
            pin_memory=self._device.type == "cuda",
            persistent_workers=view.loaders > 0,
            worker_init_fn=_quiet_worker,
            generator=torch.Generator(),  # else each epoch would advance the global one
        )

    @property
    def loaders(self) -> int:
        """Processes that load; 0 loads in this one."""
        return self._loader.num_workers

    def see(self, view: View) -> None:
        """Use this view from the next call on."""
        self._view, self._finish = view, self._prepare(view)

    def __call__(self, requests: Iterable[Request]) -> Iterator[tuple[Any, Tensor]]:
        """Yield one batch for each request; loaders work ahead of what is consumed."""
        with contextlib.closing(self._arriving(requests)) as batches:
            while True:
                asked = self.waits.asked()
                batch = next(batches, None)
                if batch is None:
                    return
                if batch.ready is not None:
                    # the computing stream waits for the copy; the memory is not reused before that stream is done
                    stream = torch.cuda.current_stream(self._device)
                    stream.wait_event(batch.ready)
                    for tensor in (*leaves(batch.inputs), batch.targets, batch.indices):
                        tensor.record_stream(stream)
                self.waits.handed(asked, batch.ready)
                yield self._complete(batch), batch.targets

    def _arriving(self, requests: Iterable[Request]) -> Generator[Batch]:
        """Yield batches whose copies to the device have begun, for a GPU one ahead."""
        batches = self._on_device(requests)
        yield from one_ahead(batches) if self._device.type == "cuda" else batches

    def _complete(self, batch: Batch) -> Any:
        """Do what is left to do on the device."""
        return self._finish(batch.inputs, batch.indices, batch.epoch)

    def close(self) -> None:
        """End the loader processes; a later call starts new ones."""
        # torch has no public way to end persistent loaders. The garbage collector would close their queues before it
        # tells them to end, and would then wait five seconds for each in vain.
        loaders, self._loader._iterator = self._loader._iterator, None
        if loaders is not None:
            loaders._shutdown_workers()  # type: ignore[attr-defined]

    def jobs(self) -> Iterator[Job]:
        """Yield the chunks of the current requests; torch asks for them in this process, ahead of the loaders."""
        for request in self._requests:
            look = self._jobs.look(request, self._view)
            parts = torch.split(request.indices, self.chunk)
            self._pending.append((request, len(parts)))
            for part in parts:
                yield Job(request.epoch, part.tolist(), look)

    def _on_device(self, requests: Iterable[Request]) -> Iterator[Batch]:
        """Begin to copy each batch to the device, and yield it."""
        stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]  # untyped in torch
        for request, chunks in self._loaded(requests):
            with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
                begin = self.waits.now()
                inputs, targets = (self._join([chunk[side] for chunk in chunks]) for side in (0, 1))
                indices = move_indices(request.indices, self._device)
                ready = self.waits.now()
            self.waits.copied(begin, ready)
            yield Batch(request.epoch, inputs, targets, indices, ready)

    def _loaded(self, requests: Iterable[Request]) -> Generator[Loaded]:
        """Start the loaders, and return an iterator over the requests, each with its loaded chunks."""
        self._turn += 1
        self._requests = requests
        self._pending.clear()
        return self._gathered(self._started(), self._turn)

    def _started(self) -> Iterator[Any]:
        """Start the loader processes, if they do not run yet, and return an iterator over the chunks of `jobs`."""
        with warnings.catch_warnings():
            # Python 3.12 and later warn of any fork beside threads; a loader touches nothing that the threads hold
            warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
            # A loader must not collect garbage of this process: CUDA streams and events are invalid after a fork, and
            # destroying them would end it. So a loader starts with its collector off, and freezes all that it inherits.
            # This process freezes nothing: gc.unfreeze would also release what the program has frozen, torch included.
            collects = gc.isenabled()
            gc.disable()
            try:
                return iter(self._loader)
            finally:
                if collects:
                    gc.enable()

    def _gathered(self, chunks: Iterator[Any], turn: int) -> Generator[Loaded]:
        while True:
            assert turn == self._turn, "a feed serves one iteration at a time"
            first = self._next(chunks)
            if first is None:
                return
            request, count = self._pending.popleft()
            parts = [first, *(self._next(chunks) for _ in range(count - 1))]
            yield request, [part for part in parts if part is not None]

    def _join(self, chunks: list[Any]) -> Any:
        def move(*parts: Tensor) -> Tensor:
            moved = [part.to(self._device, non_blocking=True) for part in parts]
            return moved[0] if len(moved) == 1 else torch.cat(moved)

        return map_tensors(move, *chunks)

    def _next(self, chunks: Iterator[Any]) -> tuple[Any, Tensor] | None:
        try:
            chunk = next(chunks, None)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error) or "exited unexpectedly" not in str(error):
                raise
            raise RunError(
                f"A loader process of {self._name} was killed, perhaps because memory ran out; "
                "use fewer data.loaders or a smaller local batch."
            ) from None
        if isinstance(chunk, str):
            raise DataError(chunk)
        if chunk is None:
            return None
        inputs, targets, *spent = chunk
        for each in spent:
            self.waits.loaded(each)
        return inputs, targets


class Batch(NamedTuple):
    """A batch that may still be being copied: it is complete once the event `ready` has passed on the device."""

    epoch: int
    inputs: Any
    targets: Tensor
    indices: Tensor
    ready: torch.cuda.Event | None


class _Chunks:
    """The sampler that torch's DataLoader asks for jobs."""

    def __init__(self, loaders: Loaders) -> None:
        self._loaders = loaders

    def __iter__(self) -> Iterator[Job]:
        return self._loaders.jobs()


def one_ahead(items: Iterable[_T]) -> Iterator[_T]:
    """Yield each item once the next one has been begun; an error is raised after the items before it.

    >>> begun = []
    >>> items = one_ahead(begun.append(number) or number for number in range(3))
    >>> next(items), begun
    (0, [0, 1])
    """
    waiting: list[_T] = []
    try:
        for item in items:
            waiting.append(item)
            if len(waiting) > 1:
                yield waiting.pop(0)
    except Exception:  # of any kind: it is raised again, after the batches that were complete before it
        yield from waiting
        raise
    yield from waiting


def _as_it_is(chunk: _T) -> _T:
    """Keep torch from turning arrays into tensors, each of which would take a file descriptor to be sent."""
    return chunk


def _quiet_worker(_: int) -> None:
    """Leave Ctrl-C to the main process, which ends its loaders, and never collect the objects inherited from it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()
    gc.enable()
