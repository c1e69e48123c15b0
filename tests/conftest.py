"""Fixtures that many tests share: Gloo worlds whose ranks stay alive between tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from worlds import Pool, World


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def world(_pool: Pool) -> Callable[[int], World]:
    """`world(4).run(function, *args)` runs `function(*args)` on four ranks and returns their four results."""
    return _pool.world
