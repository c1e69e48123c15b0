"""The ranks of a run: joining them, summing over them, and agreeing.

Everything above takes a `Ranks` as an argument; with one rank every method is free and no process group exists.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from bigstep.described import usable_cores
from bigstep.engine.launchers import LOOPBACK
from bigstep.errors import ConfigError, RunError
from bigstep.gpu.queues import ask_for_queues

__all__ = [
    "SAME_CODE",
    "STORE_VARIABLE",
    "AgreedError",
    "DeviceChoice",
    "Ranks",
    "cores_of_rank",
    "joined_ranks",
    "on_host",
]

SAME_CODE = "give every rank the same code, seed and library versions"
"""What to change where ranks differ in what they computed from the same configuration."""

STORE_VARIABLE = "BIGSTEP_STORE"
"""Set by `bigstep train --procs N`: a file through which the ranks of one machine find each other."""

DeviceChoice = Literal["auto", "cpu", "cuda", "shared"]
"""auto is cuda if torch sees a GPU; shared lets several ranks use one GPU and exchange through the host, with Gloo."""

_ONE_EACH = "start one rank per GPU (a rank hosts any number of workers), or use --device shared or cpu."

_joins = itertools.count()
"""How often this process has joined ranks; the number is the same in all of them."""


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
        dist.all_gather_object(values, on_host(value), group=self.group)
        return values

    def to_first(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None on the others; every rank must call this at the same point."""
        if self.size == 1:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        dist.gather_object(on_host(value), values, group_dst=0, group=self.group)
        return values

    def from_first(self, value: Any) -> Any:
        """Return rank 0's value on all ranks; every rank must call this at the same point."""
        if self.size == 1:
            return value
        box = [on_host(value) if self.first else None]
        dist.broadcast_object_list(box, group_src=0, group=self.group)
        return box[0]

    def take_first_(self, tensors: Iterable[Tensor]) -> None:
        """Give all ranks rank 0's tensors, which are contiguous, in place; every rank must call this at the same point.

        They travel as bytes: neither Gloo nor NCCL knows all types, integers of 16 bits for example.
        """
        for tensor in tensors if self.size > 1 else ():
            dist.broadcast(tensor.view(-1).view(torch.uint8), group=self.group, group_src=0)

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


def on_host(value: Any, *, copy: bool = False) -> Any:
    """Return a value whose tensors, in nested dicts, lists and tuples too, are in the memory of the host.

    A GPU tensor sent to another process lands on the GPU of the same number, which there may be another rank's or none.

    Args:
        value: Anything.
        copy: Copy tensors that are there already, so that they share no memory.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=copy)
    if isinstance(value, dict):
        return {key: on_host(each, copy=copy) for key, each in value.items()}
    return type(value)(on_host(each, copy=copy) for each in value) if type(value) in (list, tuple) else value


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
    seen = torch.cuda.device_count()
    if local_size > seen > 1:
        raise ConfigError(f"{local_size} ranks were asked for on this machine, but it has {seen} GPUs; {_ONE_EACH}")
    return torch.device("cuda", local_rank if seen > 1 else 0)  # a launcher may let each rank see only its own GPU


def _require_own_gpus(store: Store, rank: int, size: int, gpu: str) -> None:
    """Refuse ranks that share a GPU, which NCCL does not allow; every rank must call this.

    Args:
        store: Through which the ranks find each other, before they can communicate.
        rank: This one.
        size: How many there are.
        gpu: Identifies this rank's GPU among those of all machines.
    """
    store.set(f"gpu/{rank}", gpu)
    if store.add(f"ranks on {gpu}", 1) > 1:
        store.add("gpus shared", 1)
    if store.add("ranks with gpus", 1) == size:
        store.set("gpus are told", "")
    store.wait(["gpus are told"])
    if store.add("gpus shared", 0):
        gpus = store.multi_get([f"gpu/{each}" for each in range(size)])
        shared = max(gpus, key=gpus.count)
        who = " and ".join(str(each) for each, its in enumerate(gpus) if its == shared)
        raise ConfigError(f"Ranks {who} were started on one GPU; {_ONE_EACH}")


def _require_carried(device: torch.device) -> None:
    """Refuse a device whose tensors the program's own process group does not carry."""
    carried = [each.partition(":")[0] for each in dist.get_backend_config().split(",")]
    if device.type not in carried:
        raise ConfigError(
            f"The run is to train on {device.type}, but this program's process group carries only tensors on "
            f"{' and '.join(carried)}: let it call init_process_group with backend='cpu:gloo,cuda:nccl', or choose "
            f"device='{carried[0]}'."
        )


def cores_of_rank(ranks: Ranks) -> int:
    """Return how many cores this rank has for itself; every rank must call this at the same point.

    Launchers bind each rank to its own cores (srun, mpirun), or let all ranks of a machine use the same ones.
    """
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    mine = socket.gethostname(), allowed
    return max(1, usable_cores() // ranks.gather(mine).count(mine))


def _with_threads(ranks: Ranks) -> Ranks:
    """Let forwards on a CPU take as many threads as a rank has cores; every rank must call this."""
    cores = cores_of_rank(ranks)
    if ranks.device.type == "cpu" and "OMP_NUM_THREADS" not in os.environ:  # else the user, or torchrun, has decided
        torch.set_num_threads(cores)
    return ranks


@contextlib.contextmanager
def joined_ranks(device: DeviceChoice = "auto", timeout_s: float = 600) -> Iterator[Ranks]:
    """Join the ranks that torchrun or `bigstep train --procs` started; alone, be the only rank."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    ask_for_queues()  # in a user's program; the command has done so already
    chosen = _device(device, int(os.environ.get("LOCAL_RANK", "0")), local_size)
    if chosen.type == "cuda" and dist.is_initialized() and "LOCAL_RANK" not in os.environ:
        # torch.multiprocessing.spawn sets no local rank, so programs that use it choose their GPUs themselves
        chosen = torch.device("cuda", torch.cuda.current_device())
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if dist.is_initialized():  # by a user's program: use its group and leave it alive
        _require_carried(chosen)
        yield _with_threads(Ranks(dist.get_rank(), dist.get_world_size(), chosen))
        return
    if size == 1:
        yield _with_threads(Ranks(device=chosen))
        return
    file = os.environ.get(STORE_VARIABLE)
    if file:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    timeout, own_gpu = datetime.timedelta(seconds=timeout_s), chosen.type == "cuda" and device != "shared"
    meeting = rendezvous(f"file://{file}" if file else "env://", rank, size, timeout=timeout)
    # torchrun's own store outlives a group: keys that an earlier group left there must not be taken for this one's
    store = PrefixStore(f"bigstep/{next(_joins)}", next(meeting)[0])
    store.set_timeout(timeout)
    if own_gpu:
        _require_own_gpus(store, rank, size, str(torch.cuda.get_device_properties(chosen).uuid))
    dist.init_process_group(
        "nccl" if own_gpu else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timeout,
        device_id=chosen if own_gpu else None,
    )
    try:
        yield _with_threads(Ranks(rank, size, chosen, timeout_s))
    finally:
        dist.destroy_process_group()
