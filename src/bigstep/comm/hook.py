"""The exchange as a DDP communication hook: collective x codec, overlapped with backward."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigstep.comm.clock import Clock, Meter
from bigstep.comm.codecs import HALF_TYPES, Bucket, Codec, Dense
from bigstep.comm.collectives import Collective, Halving, Hierarchical, Ring, Torus
from bigstep.comm.line import Line, Steps
from bigstep.comm.world import World
from bigstep.errors import ConfigError, RunError, nearest

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["Exchange"]

_SUMMING: dict[str, Callable[[World], Collective]] = {
    "ring": Ring,
    "hierarchical": Hierarchical,
    "torus": Torus,
    "halving": Halving,
}


class Exchange:
    """How the gradients of a DistributedDataParallel model travel: collective x codec.

    The result is the mean over ranks, as DDP's own. Works with gradient accumulation (`no_sync`), since DDP calls its
    hook only where it would have exchanged.

    Args:
        collective: ring (the backend's all-reduce), hierarchical, torus or halving.
        codec: none, fp16 or bf16.
        grid: X and Y of the torus; auto fills nodes with X.
        warmup_steps: Dense steps before the first one that loses information.
        ranks_per_node: 0 takes torchrun's LOCAL_WORLD_SIZE, or puts all ranks on one node.
        timeout: Seconds after which a collective that does not end is an error.

    Example:
        >>> Exchange(collective="torus", codec="fp16", grid=(4, 2))
        Exchange(collective='torus', codec='fp16', grid=(4, 2))
    """

    def __init__(
        self,
        collective: str = "ring",
        codec: str = "none",
        grid: Literal["auto"] | tuple[int, int] = "auto",
        *,
        warmup_steps: int = 0,
        ranks_per_node: int = 0,
        timeout: float = 300.0,
    ) -> None:
        _check_names(collective, codec)
        self.collective, self.codec, self.grid = collective, codec, grid
        self.warmup_steps, self.ranks_per_node = warmup_steps, ranks_per_node
        self.timeout = timedelta(seconds=timeout)
        self.world: World | None = None
        """The ranks, once attached."""
        self.failure: RunError | None = None
        """What ended the exchange, once something has."""
        self._step = 0
        self._line = Line()
        self._busy, self._exposed = Meter(), Meter()
        self._backward: list[Future[Tensor]] = []  # the buckets of the backward under way

    def __repr__(self) -> str:
        return f"Exchange(collective={self.collective!r}, codec={self.codec!r}, grid={self.grid!r})"

    @property
    def bytes_sent(self) -> float:
        """Bytes this rank has put on the wire since the beginning, by the count of `bigstep.wire`."""
        return sum(codec.bytes_sent for codec in {id(c): c for c in (self._warmup, self._steady)}.values())

    @property
    def seconds(self) -> float:
        """Time since the beginning during which at least one bucket was being exchanged."""
        return self._busy.seconds

    @property
    def exposed_seconds(self) -> float:
        """Time since the beginning from a backward's last bucket being ready until its last exchange had ended."""
        return self._exposed.seconds

    def attach(self, ddp: DistributedDataParallel) -> Exchange:
        """Put this exchange under `ddp`; every rank must call it, once for each DDP object.

        A second DDP object around the same model (with other buckets, say) may be given later; state is kept.
        """
        if not isinstance(ddp, DistributedDataParallel):
            raise ConfigError(
                f"Exchange.attach takes a DistributedDataParallel object, but got {type(ddp).__name__}: wrap the model."
            )
        self._names = {parameter: name for name, parameter in ddp.module.named_parameters()}
        if self.world is None:
            device = next(iter(self._names)).device
            self._clock = Clock(device)
            self._stream = _new_stream(device) if device.type == "cuda" else None
            self.world = World.join(
                ddp.process_group, ranks_per_node=self.ranks_per_node, grid=self.grid, timeout=self.timeout
            )
            self._make_codecs(self.world)
        ddp.register_comm_hook(None, lambda _, bucket: self._on_bucket(bucket))
        return self

    def _make_codecs(self, world: World) -> None:
        self._steady: Codec = Dense(world, _SUMMING[self.collective](world), HALF_TYPES[self.codec])
        self._warmup: Codec = self._steady

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn the error that a failed exchange causes in `backward` (a RuntimeError of torch) into its RunError."""
        try:
            yield
        except RuntimeError as error:
            if self.failure is not None and error is not self.failure:
                raise self.failure from error
            raise

    def close(self) -> None:
        """End the threads of the exchange."""
        self._line.close()

    def _on_bucket(self, grad_bucket: GradBucket) -> Future[Tensor]:
        """What DDP calls for each bucket that is ready, in the same order on every rank."""
        if self.failure is not None:
            raise self.failure
        parameters = grad_bucket.parameters()
        bucket = Bucket(
            flat=grad_bucket.buffer(),
            names=tuple(self._names[parameter] for parameter in parameters),
            shapes=tuple(parameter.shape for parameter in parameters),
            step=self._step,
        )
        future = self._start(bucket)
        self._backward.append(future)
        if grad_bucket.is_last():
            self._step += 1
            self._note_exposed(self._backward)
            self._backward = []
        return future

    def _start(self, bucket: Bucket) -> Future[Tensor]:
        codec = self._warmup if bucket.step < self.warmup_steps else self._steady
        steps = codec.start(bucket)
        if self._stream is not None:
            return self._start_on_stream(steps, bucket.flat, self._stream)
        begun = self._clock.mark()
        ended: Future[Tensor] = Future()

        def done(error: BaseException | None) -> None:
            self._busy.add(begun, self._clock.mark())
            if error is not None:
                self._fail(error, bucket.step)
            ended.set_result(bucket.flat)

        def value(future: Future[Tensor]) -> Tensor:
            if self.failure is not None:
                raise self.failure
            return future.value()

        # Future.set_exception reaches only Python's wait; an error raised in `then` reaches DDP's C++ wait as well
        result = ended.then(value)
        self._line.submit(steps, done)
        return result

    def _start_on_stream(self, steps: Steps, flat: Tensor, stream: torch.cuda.Stream) -> Future[Tensor]:
        """On CUDA nothing needs a thread: a wait holds up only the exchange's own stream, and order is issue order."""
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        flat.record_stream(stream)
        with torch.cuda.stream(stream):
            begun = self._clock.mark()
            for under_way in steps:
                for work in under_way:
                    work.wait()
            self._busy.add(begun, self._clock.mark())
            future: Future[Tensor] = Future(devices=[flat.device])
            future.set_result(flat)
        return future

    def _note_exposed(self, futures: list[Future[Tensor]]) -> None:
        ready = self._clock.mark()
        if self._stream is not None:
            with torch.cuda.stream(self._stream):
                self._exposed.add(ready, self._clock.mark())
            return
        for future in futures:
            future.add_done_callback(lambda _: self._exposed.add(ready, self._clock.mark()))

    def _fail(self, error: BaseException, step: int) -> None:
        assert self.world is not None
        if self.failure is not None:
            return
        patience = time.monotonic() + 2.0  # a rank whose connections close may need a moment until it is gone
        while not (dead := self.world.dead_ranks()) and time.monotonic() < patience:
            time.sleep(0.05)
        who = f"rank {', '.join(map(str, dead))} has ended" if dead else "no rank of this host has ended"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self.failure = RunError(
            f"The {self.collective} exchange ({self.codec}) of step {step} failed on rank {self.world.rank}: "
            f"{who}; the backend says: {reason}"
        )
        self.failure.__cause__ = error


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's, without annotations


def _check_names(collective: str, codec: str) -> None:
    if collective not in _SUMMING:
        raise ConfigError(f"There is no collective {collective!r}: {nearest(collective, _SUMMING)}.")
    if codec not in HALF_TYPES:
        raise ConfigError(f"There is no codec {codec!r}: {nearest(codec, HALF_TYPES)}.")
