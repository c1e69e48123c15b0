"""What the server has done from which processes of tests are forked, so that none of them does it again.

Nothing here starts a thread or looks for a GPU, so that a fork is whole.
"""

from __future__ import annotations

import atexit
import gc
import tempfile
from pathlib import Path

import numba.core.registry
import pytest  # noqa: F401
import torch._dynamo
from filelock import FileLock

import bigstep.asynchronous
import bigstep.check
import bigstep.train  # noqa: F401
from bigstep.data.embedded import open_embedded
from bigstep.exchange.codecs import Sum
from bigstep.exchange.codecs.exact import Exact
from bigstep.exchange.codecs.layout import lay_out
from bigstep.exchange.codecs.piles_host import HostPiles
from bigstep.tables import load
from bigstep.tables.codecs import CODECS, fill_settings


def compile_blocks(dtype: torch.dtype) -> None:
    """Encode and decode one block with every codec that has blocks."""
    for entry in CODECS.values():
        if entry.blocks is not None:
            lengths, settings = entry.blocks.cut((8,)).lengths, fill_settings({})
            blocks, nbytes = lay_out(entry.blocks, lengths, settings, torch.device("cpu"))
            coder, values = load(entry.home)({}), torch.ones(8, dtype=dtype)
            message = torch.zeros(nbytes, dtype=torch.uint8)
            coder.encode(values, torch.zeros_like(values), blocks, message)
            coder.decode(message, blocks, values)


def compile_exact(dtype: torch.dtype) -> None:
    """Add, send and take exact sums of one parameter."""
    values, piles, exact, rule = torch.ones(8, dtype=dtype), HostPiles([8], 1), Exact(), Sum(parts=1, divide_by=1)
    piles.add([values])
    agreed = piles.levels()
    piles.spread(agreed, piles.gather(agreed), [values])
    piles.add([values])
    piles.take([values])
    exponents = exact.measure(values, [8])
    exact.decode(exact.encode(values, [8], exponents, rule), values, [8], exponents, rule)


numba.core.registry.cpu_target.target_context.refresh()
# several ranks that find nothing compiled would compile the same at the same time, and so would two servers
with FileLock(Path(tempfile.gettempdir()) / "bigstep-tests-kernels.lock"):
    for kind in (torch.float32, torch.float64):
        compile_blocks(kind)
        compile_exact(kind)
open_embedded()
gc.collect()
atexit.register(gc.unfreeze)  # else extension modules tell of what they find not taken apart
gc.freeze()  # else a collection in each process walks through all of this, and copies the memory that it lies in
