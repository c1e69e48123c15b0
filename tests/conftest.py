"""Fixtures that many tests share: Gloo worlds whose ranks stay alive between tests."""

from __future__ import annotations

import atexit
import gc
import os

# before torch is imported, here and in every process that a test starts: two spinning threads a process would make a
# test of four ranks on two cores wait for its own threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
# some hundred processes start, and each would compile this package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from worlds import Pool, World

if TYPE_CHECKING:
    from bigstep.check import Pool as CheckPool


def pytest_collection_finish() -> None:
    """Leave what was imported, which lives as long as the session, out of every later garbage collection."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules tell of what they find not taken apart


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def world(_pool: Pool) -> Callable[[int], World]:
    """`world(4).run(function, *args)` runs `function(*args)` on four ranks and returns their four results."""
    return _pool.world


@pytest.fixture(scope="session")
def check_pool() -> Iterator[CheckPool]:
    """Processes for checks, as bigstep keeps them."""
    from bigstep.check import Pool as CheckPool

    with CheckPool(call_timeout_s=120) as pool:
        yield pool
