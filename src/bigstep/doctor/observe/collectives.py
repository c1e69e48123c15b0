"""Collectives that the program calls itself: on what, in which order, for how long."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from bigstep.doctor.facts import Collective, Group, Spawn
from bigstep.doctor.observe import models, updates
from bigstep.doctor.observe.clock import now
from bigstep.doctor.observe.digest import is_plain
from bigstep.doctor.observe.recorder import Recorder, replace

__all__ = ["install"]

_OPERATIONS = (
    "all_reduce",
    "broadcast",
    "reduce",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter_tensor",
    "gather",
    "scatter",
    "barrier",
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
)
_inside: list[int] = []
ALONE = "BIGSTEP_DOCTOR_ALONE"
"""Set for the only rank of a program that would itself have started several."""


def install(recorder: Recorder) -> None:
    """Observe `torch.distributed`, if this torch was built with it."""
    if not dist.is_available():
        return
    home = dist.distributed_c10d
    for name in _OPERATIONS:
        replace(home, name, lambda original: _observed(recorder, original))
        setattr(dist, name, getattr(home, name))
    replace(home, "init_process_group", lambda original: _observed_group(recorder, original))
    dist.init_process_group = home.init_process_group
    spawning = sys.modules["torch.multiprocessing.spawn"]  # the package's attribute of this name is a function
    replace(spawning, "start_processes", lambda original: _observed_spawn(recorder, original))
    torch.multiprocessing.start_processes = spawning.start_processes  # type: ignore[attr-defined]


def _observed(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    name = original.__name__

    def collective(*arguments: Any, **named: Any) -> Any:
        given = (*arguments, *named.values())
        outside = any(a is dist.GroupMember.NON_GROUP_MEMBER for a in given)  # of a group: torch does nothing then
        if _inside or recorder.looking or outside:  # part of another collective, or called by an observer
            return original(*arguments, **named)
        tensor = next((a for a in given if isinstance(a, Tensor)), None)
        fact = None
        if not recorder.settings.only_time:
            fact = Collective(
                operation=name,
                target=_target(tensor),
                values=tensor.numel() if tensor is not None else 0,
                reduce=_reduction(given) if "reduce" in name else "",
                group=_group(given),
                line=recorder.line(),
            )
            recorder.write(fact)  # every one, in detail or not: ranks are compared call by call
            recorder.flush()
        _inside.append(1)
        began = now()
        try:
            return original(*arguments, **named)
        finally:
            _inside.pop()
            seconds = now() - began
            recorder.tally.exchange_s += seconds
            if fact is not None:
                recorder.write(dataclasses.replace(fact, done=True, seconds=seconds))
                recorder.flush()

    return collective


def _reduction(given: tuple[Any, ...]) -> str:
    found = [a for a in given if isinstance(a, dist.ReduceOp | dist.ReduceOp.RedOpType)]
    return str(found[0]).rpartition(".")[2] if found else "SUM"


def _group(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Return the global ranks of the group that was given; none if it is that of all ranks."""
    group = next((a for a in given if isinstance(a, dist.ProcessGroup)), dist.group.WORLD)
    return () if group is dist.group.WORLD else tuple(dist.get_process_group_ranks(group))


def _target(tensor: Tensor | None) -> str:
    """Tell whether a tensor is a gradient, a parameter or a buffer; by its memory, since it may be a view."""
    if tensor is None:
        return "other"
    try:
        where = tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return "other"
    for reference in updates.optimizers:
        optimizer = reference()
        parameters = [p for group in optimizer.param_groups for p in group["params"]] if optimizer is not None else []
        for parameter in parameters:
            if parameter.grad is not None and _storage(parameter.grad) == where:
                return "gradient"
            if _storage(parameter) == where:
                return "parameter"
        if tensor.numel() == sum(p.numel() for p in parameters):
            if _begins_with(tensor, parameters[0]):
                return "parameter"
            if parameters[0].grad is not None and _begins_with(tensor, parameters[0].grad):
                return "gradient"
    for module_reference in models.called.values():
        module = module_reference()
        if module is not None and any(_storage(buffer) == where for buffer in module.buffers()):
            return "buffer"
    return "other"


def _begins_with(tensor: Tensor, part: Tensor) -> bool:
    """Whether a flat tensor is a copy of several tensors, this one first; they may all be divided, for a mean."""
    if not is_plain(part) or tensor.dim() != 1 or not part.numel():
        return False
    copy, flat = tensor.detach()[: part.numel()].double(), part.detach().reshape(-1).double()
    largest = int(flat.abs().argmax())
    if flat[largest] == 0:
        return False
    return torch.allclose(copy, flat * (copy[largest] / flat[largest]), rtol=1e-2)


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):
        return 0


def _observed_group(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def init_process_group(backend: Any = None, *arguments: Any, **named: Any) -> Any:
        given = backend
        if backend is not None and "nccl" in str(backend) and not torch.cuda.is_available():
            given = "gloo"  # so that a script written for GPUs runs where there are none
        if ALONE in os.environ:
            named |= {"world_size": 1, "rank": 0}
        if "MASTER_PORT" in os.environ and recorder.settings.port:
            os.environ["MASTER_PORT"] = str(recorder.settings.port)
        line = recorder.line()
        result = original(given, *arguments, **named)
        recorder.rank, recorder.world = dist.get_rank(), dist.get_world_size()
        asked = str(backend) if given != backend else ""
        name = str(dist.get_backend())
        recorder.write(Group(rank=recorder.rank, world=recorder.world, backend=name, asked=asked, line=line))
        return result

    return init_process_group


def _observed_spawn(recorder: Recorder, original: Callable[..., Any]) -> Callable[..., Any]:
    def start_processes(fn: Any, args: Any = (), nprocs: int = 1, *more: Any, **named: Any) -> Any:
        wanted = recorder.settings.ranks
        changed = wanted == 1 and nprocs > 1
        recorder.write(Spawn(ranks=nprocs, changed=changed, line=recorder.line()))
        recorder.flush()
        if changed:  # the run on one rank: such functions are often also given the number of ranks
            args = tuple(1 if type(a) is int and a == nprocs else a for a in args)
            nprocs = 1
            os.environ[ALONE] = "1"
        return original(fn, args, nprocs, *more, **named)

    return start_processes
