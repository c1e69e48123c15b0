"""The ranks of a run: joining them, summing over them, and agreeing.

Everything above takes a `Ranks` as an argument; with one rank every method is free and no process group exists.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.errors import ConfigError, RunError
from bigstep.gpu.queues import ask_for_queues

__all__ = ["SAME_CODE", "STORE_VARIABLE", "AgreedError", "DeviceChoice", "Ranks", "joined_ranks"]

SAME_CODE = "give every rank the same code, seed and library versions"
"""What to change where ranks differ in what they computed from the same configuration."""

STORE_VARIABLE = "BIGSTEP_STORE"
"""Set by `bigstep train --procs N`: a file through which the ranks of one machine find each other."""

DeviceChoice = Literal["auto", "cpu", "cuda", "shared"]
"""auto is cuda where torch sees a GPU; shared lets several ranks use one GPU, with Gloo and by way of the host."""


class AgreedError(RunError):
    """What all ranks raise at the same step: none of them is missing."""


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    >>> Ranks().sum_(torch.ones(2))
    tensor([1., 1.])
    """

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")
    timeout_s: float = 600.0
    """How long a rank waits for the others in a collective."""
    group: dist.ProcessGroup | None = None
    """The processes; None for all of them."""

    @property
    def first(self) -> bool:
        """Whether this rank writes files and speaks to the user."""
        return self.rank == 0

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        """The processes as torch knows them; None for a rank alone."""
        return None if self.size == 1 else self.group or dist.group.WORLD

    def sum_(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks in place and return it; every rank must call this at the same point."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.group)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, on all ranks; every rank must call this at the same point."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def to_first(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None on the others; every rank must call this at the same point."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(value, values, group_dst=0, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on all ranks; every rank must call this at the same point."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def take_first_(self, tensor: Tensor) -> None:
        """Give all ranks rank 0's tensor, in place; every rank must call this at the same point."""
        if self.size > 1:
            dist.broadcast(tensor, group=self.group, group_src=0)

    def require_same(self, value: str, what: str, change: str) -> None:
        """Stop the run, naming the ranks that differ from rank 0 and what to change, unless all hold the same value."""
        values = self.gather(value)
        different = [rank for rank, other in enumerate(values) if other != values[0]]
        if different:
            names = ", ".join(map(str, different))
            raise AgreedError(
                f"{what} of rank {names} differ from those of rank 0 (SHA-256 {values[different[0]][:12]} instead of "
                f"{values[0][:12]}); {change}."
            )


def _device(choice: DeviceChoice, local_rank: int, local_size: int) -> torch.device:
    known = get_args(DeviceChoice)
    if choice not in known:
        raise ConfigError(f"The device is {choice!r:.60}, but it must be one of {', '.join(known)}.")
    available = torch.cuda.is_available()
    if choice == "cpu" or (choice == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(f"--device {choice} was given, but torch sees no GPU here; use --device cpu.")
    if choice == "shared":
        return torch.device("cuda", local_rank % torch.cuda.device_count())
    if local_size > torch.cuda.device_count():
        raise ConfigError(
            f"{local_size} ranks were asked for on this machine, but it has {torch.cuda.device_count()} GPU(s); "
            "start one rank a GPU (a rank hosts any number of workers), or use --device shared or cpu."
        )
    return torch.device("cuda", local_rank)


@contextlib.contextmanager
def joined_ranks(device: DeviceChoice = "auto", timeout_s: float = 600) -> Iterator[Ranks]:
    """Join the ranks that torchrun or `bigstep train --procs` started; alone, be the only rank."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ask_for_queues()  # where it is not the command that runs, but somebody's program
    chosen = _device(device, int(os.environ.get("LOCAL_RANK", "0")), local_size)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    elif "OMP_NUM_THREADS" not in os.environ:  # else the user, or torchrun, has decided
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_size))
    if dist.is_initialized():  # somebody else's program: use its group and leave it alive
        yield Ranks(dist.get_rank(), dist.get_world_size(), chosen)
        return
    if size == 1:
        yield Ranks(device=chosen)
        return
    store = os.environ.get(STORE_VARIABLE)
    if store:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own_gpu = chosen.type == "cuda" and device != "shared"  # NCCL refuses two ranks on one GPU
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        init_method=f"file://{store}" if store else "env://",
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout_s),
        device_id=chosen if own_gpu else None,
    )
    try:
        yield Ranks(rank, size, chosen, timeout_s)
    finally:
        dist.destroy_process_group()
