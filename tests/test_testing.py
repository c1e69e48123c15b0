"""A user's own tests prove that their training does not depend on ranks, or name what makes it."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bigstep.check import Pool
from bigstep.testing import assert_same_on_ranks

pytest_plugins = ["pytester"]

LIVING: list[Pool] = []  # for the session inside a test, so that it starts no processes of its own


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 2))


class NoiseByRank(Net):
    """The fault: noise from a generator that is seeded by the rank."""

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank() if dist.is_initialized() else 0
        noise = torch.rand(x.shape, generator=torch.Generator().manual_seed(rank), dtype=x.dtype)
        return super().forward(x + 0.1 * noise)


class CentredByBatch(Net):
    """The fault: a mean over whatever samples share a forward."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(0))


class MeanOfRanks(Net):
    """The fault: a mean over ranks inside the model, each rank counted alike whatever it hosts."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out if not dist.is_initialized() else out / dist.get_world_size()


def summed(output: Tensor, target: Tensor) -> Tensor:
    """The fault: a sum over samples where a mean is meant."""
    return nn.functional.cross_entropy(output, target, reduction="sum")


def samples() -> TensorDataset:
    inputs = torch.randn(160, 3, generator=torch.Generator().manual_seed(0))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class Spare(Net):
    """Nothing wrong: a layer that is not used, and state that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in list(self)[:-1]:
            x = layer(x)
        return x

    def get_extra_state(self) -> int:
        return 1

    def set_extra_state(self, state: int) -> None:
        assert state == 1


def test_parameters_without_a_gradient_and_other_state_are_no_fault(check_pool: Pool) -> None:
    report = assert_same_on_ranks(Spare, samples, ranks=[1, 2], pool=check_pool)
    assert "spare" in {row.name: row.words for row in report.rows}["steps as graphs = steps in the open"]


def test_what_is_right_passes_on_one_two_and_three_ranks(check_pool: Pool) -> None:
    only = ["same start on every rank", "same parameter order on every rank", "random numbers follow the worker",
            "path of P ranks = of one", "batch-norm statistics at evaluation"]  # fmt: skip
    report = assert_same_on_ranks(Net, samples, only=only, pool=check_pool)
    assert report.ranks == (1, 2, 3)
    assert report.row("path of P ranks = of one").status == "pass"
    assert report.row("batch-norm statistics at evaluation").status == "pass"


@pytest.mark.parametrize(
    ("model", "loss", "words"),
    [
        (NoiseByRank, None, "'gradient of P ranks = of one' fails, the gradient of .* on 2 ranks differs"),
        (MeanOfRanks, None, "'gradient of P ranks = of one' fails, the gradient of .* times as large"),
        (CentredByBatch, None, "'accumulation = big batch' fails, .* no layer but a batch norm may mix the samples"),
        (Net, summed, "'accumulation = big batch' fails, .* let the loss be a mean over samples"),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_what_is_wrong_is_named_in_one_sentence(model: type, loss: object, words: str, check_pool: Pool) -> None:
    only = ["same start on every rank", "same parameter order on every rank", "accumulation = big batch",
            "gradient of P ranks = of one"]  # fmt: skip
    with pytest.raises(AssertionError, match=words) as error:
        assert_same_on_ranks(model, samples, loss, ranks=(1, 2), only=only, pool=check_pool)
    said = str(error.value)
    assert said.startswith("Training on 1 and 2 ranks is not one and the same: ")
    assert said.endswith(".")
    assert "\n" not in said
    assert not re.search(r"\. [A-Z]", said), "one sentence"


def test_pytest_has_a_fixture_and_a_marker(pytester: pytest.Pytester, check_pool: Pool) -> None:
    LIVING[:] = [check_pool]
    pytester.makeconftest("""
        import pytest
        @pytest.fixture(scope="session")
        def bigstep_pool():
            from test_testing import LIVING
            yield LIVING[0]
    """)
    pytester.makepyfile(
        test_mine="""
        import pytest
        from test_testing import CentredByBatch, Net, samples
        ONLY = ["same start on every rank", "accumulation = big batch"]

        @pytest.mark.ranks(1, 2)
        def test_right(same_on_ranks):
            assert same_on_ranks(Net, samples, only=ONLY).ranks == (1, 2)

        @pytest.mark.ranks(1)
        def test_wrong(same_on_ranks):
            same_on_ranks(CentredByBatch, samples, only=ONLY)
    """
    )
    done = pytester.runpytest_inprocess(
        "-p", "no:bigstep", "-p", "bigstep.testing.plugin", "--strict-markers", "-p", "no:cacheprovider"
    )
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*AssertionError: Training on 1 rank is not one and the same: *"])


def test_the_plugin_costs_a_session_nothing_that_does_not_ask_for_it() -> None:
    """Read from the sources: what they import when they are loaded is small."""
    import ast
    from pathlib import Path

    import bigstep.testing

    for path in Path(bigstep.testing.__file__).parent.glob("*.py"):
        loaded = {
            name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.Import | ast.ImportFrom)
            for name in ([node.module] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names])
        }
        assert loaded <= {"__future__", "collections.abc", "typing", "pytest"}, path.name
