"""What pytest has where bigstep is installed: the fixture `same_on_ranks` and the marker `ranks`.

    @pytest.mark.ranks(1, 2, 3)
    def test_my_training_does_not_depend_on_ranks(same_on_ranks):
        same_on_ranks(MyModel, my_data, my_loss)

Nothing is imported and no process starts until a test asks for the fixture; then the ranks live as long as the session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bigstep.check import Pool, Report

__all__ = ["bigstep_pool", "same_on_ranks"]


def pytest_configure(config: pytest.Config) -> None:
    """Tell pytest of the marker."""
    config.addinivalue_line("markers", "ranks(*sizes): the worlds that same_on_ranks compares, such as 1, 2, 3")


@pytest.fixture(scope="session")
def bigstep_pool() -> Iterator[Pool]:
    """Processes that are joined into worlds, kept from test to test."""
    from bigstep.check import Pool

    with Pool() as pool:
        yield pool


@pytest.fixture
def same_on_ranks(request: pytest.FixtureRequest, bigstep_pool: Pool) -> Callable[..., Report]:
    """`bigstep.testing.assert_same_on_ranks` in processes that stay alive, on the worlds of the marker `ranks`."""
    from bigstep.testing import assert_same_on_ranks

    marker = request.node.get_closest_marker("ranks")
    worlds = {"ranks": marker.args} if marker is not None else {}

    def same(*args: Any, **settings: Any) -> Report:
        return assert_same_on_ranks(*args, **{"pool": bigstep_pool, **worlds, **settings})

    return same
