"""What the server has done from which processes of tests are forked, so that none of them does it again.

Nothing here starts a thread or looks for a GPU, so that a fork is whole.
"""

from __future__ import annotations

import atexit
import gc

import numba.core.registry
import pytest  # noqa: F401
import torch._dynamo  # noqa: F401

import bigstep.asynchronous
import bigstep.check
import bigstep.train  # noqa: F401
from bigstep.data.embedded import open_embedded

numba.core.registry.cpu_target.target_context.refresh()
open_embedded()
gc.collect()
atexit.register(gc.unfreeze)  # else extension modules tell of what they find not taken apart
gc.freeze()  # else a collection in each process walks through all of this, and copies the memory that it lies in
