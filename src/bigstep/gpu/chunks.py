"""All tensors of a model cut into chunks, so that one launch walks over all of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bigstep.gpu.backend import why_not_triton
from bigstep.gpu.tensor_lists import same_memory_order

__all__ = ["Chunks", "on_device", "why_not_kernels"]

CHUNK, WARPS = 2048, 8
"""Elements and warps of a program: so few elements per thread that four programs fit the registers of a
multiprocessor."""


def why_not_kernels(params: Sequence[Tensor], *states: Sequence[Tensor]) -> str | None:
    """Return None if the update kernels can take these weights and states, else the reason in words.

    >>> why_not_kernels([torch.zeros(2)], [torch.zeros(2)])
    'the tensors are on cpu, not on a CUDA device'
    """
    for param, *state in zip(params, *states, strict=True):
        if (reason := why_not_triton(param)) is not None:
            return reason
        if param.device != params[0].device:
            return "the parameters are on several devices"
        if param.numel() >= 2**31:
            return f"a parameter has {param.numel():,} elements, and the kernels count in 32 bits"
        if any(tensor.dtype != torch.float32 for tensor in (param, *state)):
            return f"the kernels update fp32 weights and states, not {param.dtype}"
        dense = param.is_contiguous() or (param.dim() == 4 and param.is_contiguous(memory_format=torch.channels_last))
        if not dense or not all(same_memory_order(param, tensor) for tensor in state):
            return "a parameter has gaps in memory, or its state is laid out differently"
    return None


def on_device(values: object, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy host values to a tensor on the device, without waiting for the copy."""
    pinned = device.type == "cuda"
    return torch.tensor(values, dtype=dtype, pin_memory=pinned).to(device, non_blocking=pinned)


class Chunks:
    """Tables on the device: where each tensor is, and which chunk of which tensor each program works on.

    `table` is (4 + states, tensors). Its rows hold addresses, except row 3: weights, gradients, low-precision copies
    (0: none), whether the gradient is in low precision, states. It has a column per tensor rather than per chunk, so
    that it stays in the caches: a table of chunks, read once by each program, made the LARS update twice as slow on an
    H200.

    Args:
        params: fp32 weights.
        states: Lists of fp32 tensors, one for each weight, such as velocities.
        copies: For each weight its low-precision copy, or None; all of type `narrow`.
        narrow: The type of the copies, and of gradients that are not fp32.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        states: Sequence[Sequence[Tensor]],
        copies: Sequence[Tensor | None] | None = None,
        narrow: torch.dtype = torch.float16,
    ) -> None:
        self.params, self.states, self.narrow = list(params), [list(state) for state in states], narrow
        self.copies = list(copies) if copies is not None else [None] * len(params)
        for param, copy in zip(self.params, self.copies, strict=True):
            assert copy is None or (copy.dtype == narrow and same_memory_order(param, copy)), "checked by the caller"
        self.has_copies = any(copy is not None for copy in self.copies)
        self.device = self.params[0].device
        firsts = [range(0, param.numel(), CHUNK) for param in self.params]
        counts = [len(each) for each in firsts]
        self.tensors, self.chunks = len(self.params), sum(counts)
        owners = [tensor for tensor, count in enumerate(counts) for _ in range(count)]
        self.chunk_tensor = on_device(owners, torch.int32, self.device)
        self.chunk_first = on_device([first for each in firsts for first in each], torch.int32, self.device)
        self.sizes = on_device([param.numel() for param in self.params], torch.int32, self.device)
        begins = [0]
        for count in counts:
            begins.append(begins[-1] + count)
        self.first_chunk = on_device(begins, torch.int32, self.device)
        self.table = torch.zeros(4 + len(self.states), self.tensors, dtype=torch.int64, device=self.device)
        self._addresses = [[tensor.data_ptr() for tensor in row] for row in (self.params, *self.states)]
        self._bound: list[int] = []
        self.aligned = False

    def bind(self, gradients: Sequence[Tensor]) -> None:
        """Write the addresses of these gradients into the table, unless they are there already."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses == self._bound:
            return
        for param, gradient in zip(self.params, gradients, strict=True):
            assert gradient.dtype in (torch.float32, self.narrow), "checked by the caller"
            assert same_memory_order(param, gradient), "checked by the caller"
        weights, *states = self._addresses
        copies = [0 if copy is None else copy.data_ptr() for copy in self.copies]
        # allows 16-byte accesses: the compiler cannot tell the alignment of an address that is read from memory
        self.aligned = all(address % 16 == 0 for row in (*self._addresses, addresses, copies) for address in row)
        is_narrow = [int(gradient.dtype == self.narrow) for gradient in gradients]
        self.table.copy_(on_device([weights, addresses, copies, is_narrow, *states], torch.int64, self.device))
        self._bound = addresses

    @property
    def kind(self) -> dict[str, object]:
        """The compile-time arguments of the kernels."""
        import triton.language as tl

        narrow = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[self.narrow]
        return {"CHUNK": CHUNK, "NARROW": narrow, "ALIGNED": self.aligned}

    @property
    def walk(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The tables that a program needs to find its chunk."""
        return self.table, self.chunk_tensor, self.chunk_first, self.sizes
