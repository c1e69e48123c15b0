"""Graphs of operations: CUDA graphs on a GPU, and a tape that behaves like one on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

__all__ = ["CudaGraphs", "Graph", "Tape", "Tapes"]

T = TypeVar("T")


class Graph(Protocol):
    """Operations that can be run again, reading and writing the memory that they were captured with."""

    def replay(self) -> None:
        """Run them."""
        ...


class CudaGraphs:
    """Makes CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run something on a side stream: libraries must have made their first calls before a capture."""
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]  # untyped in torch
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream(self.device).wait_stream(stream)

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Return the graph of what `run` launches, none of which has been executed yet, and the result of `run`."""
        graph = torch.cuda.CUDAGraph()
        # cuBLAS keeps a workspace for each stream. One allocated outside the graph could be freed while the graph still
        # writes to it (torch.compile's own graphs do that), so each graph allocates one from its own pool.
        torch._C._cuda_clearCublasWorkspaces()
        # "thread_local": other threads, which pin memory or let the device decode, must not invalidate the capture
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = run()
        except BaseException:
            self._free_random_numbers()
            raise
        torch._C._cuda_clearCublasWorkspaces()
        return graph, result

    def _free_random_numbers(self) -> None:
        """Make the generator usable again: a failed capture leaves it in its capturing state."""
        index = torch.cuda.current_device() if self.device.index is None else self.device.index
        generator = torch.cuda.default_generators[index]
        generator.graphsafe_set_state(generator.clone_state())


class Tapes:
    """Makes tapes; has the methods of `CudaGraphs`."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run something."""
        run()

    def capture(self, run: Callable[[], T]) -> tuple[Graph, T]:
        """Return the tape of what `run` does, with its effects undone, and the result of `run`."""
        tape = Tape()
        try:
            with tape:
                result = run()
        finally:
            tape.undo()
        return tape, result


class Tape(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Records operations while they run, and runs them again as a CUDA graph would.

    What Python computed is fixed on the tape: numbers, shapes, branches. Tensors are read and written where they were.
    CUDA cannot capture a step that reads a value on the host, so the tape refuses it too. A test with a tape, on any
    machine, therefore also holds for the graph, except for the order of kernels and their arithmetic.

    >>> x, total = torch.tensor([1.0, 2.0]), torch.zeros(2)
    >>> factor = 10
    >>> with Tape() as tape:
    ...     y = x * factor
    ...     _ = total.add_(y)
    >>> tape.undo()
    >>> total
    tensor([0., 0.])
    >>> _, factor = x.fill_(3), 1000  # the tensor is read again, the number is not
    >>> tape.replay()
    >>> y, total
    (tensor([30., 30.]), tensor([30., 30.]))
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[Tensor]]] = []
        self._before: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Record one operation."""
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the step asks the device for a value")
        kwargs = kwargs or {}
        self._before += [(tensor, tensor.clone()) for tensor in _written(func, args, kwargs)]
        result = func(*args, **kwargs)
        self._calls.append((func, args, kwargs, _tensors(result)))
        return result

    @torch.no_grad()
    def undo(self) -> None:
        """Restore the tensors that the recorded operations wrote to; call it once, after recording."""
        for tensor, before in reversed(self._before):
            tensor.copy_(before)
        self._before.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Run the operations again."""
        for func, args, kwargs, results in self._calls:
            for place, value in zip(results, _tensors(func(*args, **kwargs)), strict=True):
                if value.data_ptr() != place.data_ptr():  # neither a view nor written in place
                    place.copy_(value)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that, by its schema, an operation writes to."""
    named = zip(func._schema.arguments, args, strict=False)
    given = [*named, *((a, kwargs[a.name]) for a in func._schema.arguments if a.name in kwargs)]
    return [t for argument, value in given if argument.is_write for t in _tensors(value)]
