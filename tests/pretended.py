"""A GPU that is not there: tensors that say they are on cuda:0 and lie in the memory of the host.

What takes the way of a GPU (`device.type == "cuda"`, `is_cuda`) takes it with these, with the arithmetic of a CPU. Two
things happen as on a device: tensors of both sides do not mix, and where the host would wait for the device, that is
noted (`Machine.waits`). Kernels and graphs are not here: Triton is said to be missing, and `Tape` stands for graphs.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from bigstep.gpu import backend, graphs
from bigstep.gpu.capture import Tapes

__all__ = ["Machine", "pretended"]

DEVICE, HOST = torch.device("cuda", 0), torch.device("cpu")
SOURCE = Path(backend.__file__).parents[1]
aten = torch.ops.aten
ANSWERS = {
    aten._local_scalar_dense.default: "reads a value", aten.equal.default: "compares", aten.nonzero.default: "counts",
    aten.masked_select.default: "counts", aten._unique2.default: "counts", aten.repeat_interleave.Tensor: "counts",
    aten.unique_dim.default: "counts", aten.unique_consecutive.default: "counts", aten.bincount.default: "counts",
}  # fmt: skip
"""Operations that a device answers to the host, at least with the size of what they return."""


class OnDevice(Tensor):
    """A tensor that says it is on a GPU; for C++, and so for autograd, it is one of the host."""

    device = property(lambda self: DEVICE)  # type: ignore[assignment]  # read only, as in torch
    is_cuda = property(lambda self: True)  # type: ignore[assignment]  # as above
    is_cpu = property(lambda self: False)  # type: ignore[assignment]  # as above
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation on the host, and leave what it gives on the device."""
        assert Machine.current is not None, "a tensor of the device has outlived it"
        Machine.current.look_at(func, args, kwargs := dict(kwargs or {}))
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]  # torch's own
            result = func(*args, **kwargs)
        return tree_map(_moved, result)


def _moved(value: Any) -> Any:
    """Put a tensor on the device; what is no tensor, or there already, stays as it is."""
    if not isinstance(value, Tensor) or isinstance(value, OnDevice):
        return value
    return Tensor._make_subclass(OnDevice, value.detach(), value.requires_grad)


def _brought(value: Tensor) -> Tensor:
    """Copy a tensor of the device to the host."""
    with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]  # torch's own
        return value.detach().clone(memory_format=torch.preserve_format)


class Machine(TorchFunctionMode):
    """Takes what Python asks of torch, puts tensors on the device where that is asked for, and notes waits."""

    current: Machine | None = None

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """What the host had to wait for the device for: what it was, and where in bigstep."""

    def wait(self, what: str) -> None:
        """Note that the host waits here."""
        frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(SOURCE))]
        last = frames[-1] if frames else None
        place = f"{Path(last.filename).relative_to(SOURCE)}, {last.name}" if last else "somewhere else"
        self.waits.append(f"{place}: {what}")

    def look_at(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse an operation that mixes devices, and note one that the host waits for."""
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        there = [isinstance(tensor, OnDevice) for tensor in tensors]
        if func in ANSWERS and kwargs.get("output_size") is None:
            self.wait(ANSWERS[func])
        if func in (aten.index.Tensor, aten.index_put_.default):
            for index in args[1]:
                if index is not None and index.dtype == torch.bool:
                    self.wait("counts")
                elif index is not None and not isinstance(index, OnDevice):
                    self.wait("brings indices")
        elif func is aten.copy_.default and there[0] != there[1]:
            pinned = getattr(tensors[1 if there[0] else 0], "pinned", False)
            if not (pinned and (kwargs.get("non_blocking") or args[2:] == (True,))):
                self.wait("copies")
        elif func is not aten.copy_.default and any(
            not here and tensor.ndim for here, tensor in zip(there, tensors, strict=True)
        ):
            raise RuntimeError(f"Expected all tensors to be on the same device, but {func} got both kinds.")

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take one call."""
        kwargs = dict(kwargs or {})
        if func is Tensor.pin_memory or kwargs.pop("pin_memory", False):
            result = func(*args, **kwargs).clone() if func is not Tensor.pin_memory else args[0].clone()
            result.pinned = True
            return result
        if func in (Tensor.tolist, Tensor.numpy) and isinstance(args[0], OnDevice):
            assert func is Tensor.tolist, "a tensor of the device is no array of the host"
            self.wait("reads values")
            return _brought(args[0]).tolist()
        wanted = {leaf.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)}
        wanted |= {str(kwargs["device"]).partition(":")[0]} if isinstance(kwargs.get("device"), str) else set()
        to_host = func is Tensor.cpu or (func is Tensor.to and (wanted == {"cpu"} or "cpu" in args))
        if to_host and isinstance(args[0], OnDevice):
            self.wait("copies to the host")
            return _brought(args[0]).to(*args[1:], **kwargs) if func is Tensor.to else _brought(args[0])
        if func in (torch.device, torch._C._nn._parse_to):  # type: ignore[attr-defined]  # they only name one
            return func(*args, **kwargs)
        if "cuda" not in wanted and not (func is Tensor.cuda or (func is Tensor.to and "cuda" in args)):
            return func(*args, **kwargs)
        return self._on_device(func, args, kwargs)

    def _on_device(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Let a call that names the device make what it returns there."""
        moved = args[0] if func in (Tensor.to, Tensor.cuda, torch.as_tensor, torch.tensor) else None
        comes = not isinstance(moved, OnDevice) and moved is not None
        if comes and not (getattr(moved, "pinned", False) and kwargs.get("non_blocking")):
            self.wait("copies to the device")
        args, kwargs = tree_map(_host_for, (args, kwargs))
        if func is Tensor.cuda:
            return _moved(args[0].clone())
        if "device" in kwargs and isinstance(kwargs["device"], str):
            kwargs["device"] = HOST
        result = func(*args, **kwargs)
        return _moved(result.clone() if comes and result is moved else result)


class Queue:
    """A stream: all that it was given is done."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def synchronize(self) -> None:
        """Wait for it."""
        self._machine.wait("waits for its stream")


class Moment:
    """An event: all that was given before is done."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    def record(self) -> None:
        """Mark what the current stream was given so far."""

    def query(self) -> bool:
        """Whether it is done."""
        return True

    def synchronize(self) -> None:
        """Wait for it."""
        self._machine.wait("waits for a step")

    def elapsed_time(self, later: Moment) -> float:
        """Return milliseconds until another."""
        return 0.0


def _host_for(value: Any) -> Any:
    return HOST if value == DEVICE or (isinstance(value, (str, torch.device)) and str(value) == "cuda") else value


_group = torch._C._group_tensors_by_device_and_dtype


def _grouped(tensors: list[list[Tensor | None]], with_indices: bool = False) -> dict[tuple[torch.device, Any], Any]:
    """What torch's optimizers ask C++ for, which knows the device of none of these."""
    groups = _group(tensors, with_indices)
    return {(each[0][0][0].device, dtype): each for (_, dtype), each in groups.items()}


@contextmanager
def pretended() -> Iterator[Machine]:
    """Let torch see one GPU, for as long as this lasts."""
    machine = Machine()
    nothing: Callable[..., None] = lambda *_, **__: None  # noqa: E731
    facts = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": nothing,
        "manual_seed": nothing,  # its generator is the host's
        "get_rng_state": nothing,
        "set_rng_state": nothing,
        "is_current_stream_capturing": lambda: False,  # torch's optimizers ask in each step; newer ones ask the stream
        "synchronize": lambda *_: machine.wait("waits for all streams"),
        "current_stream": lambda *_: Queue(machine),
        "Stream": lambda *_, **__: Queue(machine),
        "Event": lambda **_: Moment(machine),
        "stream": lambda _: nullcontext(),
        "mem_get_info": lambda *_: (2**34, 2**34),
        "get_device_name": lambda *_: "no GPU",
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: SimpleNamespace(total_memory=2**34, name="no GPU", major=9, minor=0),
    }
    with pytest.MonkeyPatch.context() as patch, machine:
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)  # else `to` would keep their class
        for name, fact in facts.items():
            patch.setattr(torch.cuda, name, fact)
        patch.setattr(torch.accelerator, "current_stream", lambda *_: SimpleNamespace(is_capturing=lambda: False))
        patch.setattr(backend, "_triton_installed", lambda: False)
        patch.setattr(graphs, "CudaGraphs", lambda device: Tapes())
        patch.setattr(Machine, "current", machine)
        patch.setattr(torch._C, "_group_tensors_by_device_and_dtype", _grouped)
        yield machine
