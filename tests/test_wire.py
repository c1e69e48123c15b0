"""The cost table of the collectives, and what each codec writes."""

from __future__ import annotations

import math

import pytest

from bigstep.errors import ConfigError
from bigstep.tables.codecs import ONEBIT_MAX_BLOCK, encoded_bytes, onebit_blocks
from bigstep.tables.collectives import RING_ROUND_BYTES, choose_grid, collective_traffic


def resnet50_shapes() -> list[tuple[int, ...]]:
    """The 161 parameters of ResNet-50: convolutions with two batch-norm vectors each, and the classifier."""
    shapes: list[tuple[int, ...]] = []

    def conv(outputs: int, inputs: int, side: int) -> None:
        shapes.extend([(outputs, inputs, side, side), (outputs,), (outputs,)])

    conv(64, 3, 7)
    inputs = 64
    for width, depth in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(depth):
            conv(width, inputs, 1)
            conv(width, width, 3)
            conv(4 * width, width, 1)
            if block == 0:
                conv(4 * width, inputs, 1)
            inputs = 4 * width
    return [*shapes, (1000, 2048), (1000,)]


@pytest.mark.parametrize(
    ("grid", "torus", "ring"),
    [((32, 32), 124, 2046), ((64, 32), 188, 4094), ((72, 48), 236, 6910), ((64, 64), 252, 8190), ((64, 34), 192, 4350)],
)
def test_torus_takes_the_rounds_of_the_published_grids(grid: tuple[int, int], torus: int, ring: int) -> None:
    ranks = grid[0] * grid[1]
    assert collective_traffic("torus", 1.0, ranks, grid=grid).messages == torus
    assert collective_traffic("ring", 1.0, ranks).messages == ring


@pytest.mark.parametrize("grid", [(2, 2), (3, 2), (2, 3), (1, 5), (5, 1), (32, 64)])
def test_torus_moves_exactly_the_bytes_of_a_ring(grid: tuple[int, int]) -> None:
    ranks = grid[0] * grid[1]
    torus = collective_traffic("torus", 1e6, ranks, grid=grid)
    assert torus.bytes_sent == pytest.approx(collective_traffic("ring", 1e6, ranks).bytes_sent, rel=1e-14)
    assert torus.inner is not None
    assert torus.outer is not None
    assert torus.outer.bytes_sent == pytest.approx(2 * 1e6 / grid[0] * (grid[1] - 1) / grid[1])


def test_leaders_send_group_times_more_between_nodes_than_a_torus_rank() -> None:
    leader = collective_traffic("hierarchical", 1e6, 32, group=4)
    torus = collective_traffic("torus", 1e6, 32, grid=(4, 8))
    assert leader.outer is not None
    assert torus.outer is not None
    assert leader.outer.bytes_sent == pytest.approx(4 * torus.outer.bytes_sent)
    assert leader.messages == 4 * 3 + 2 * 7


@pytest.mark.parametrize("group", [1, 2, 4, 8])
def test_hierarchical_bytes_of_a_whole_node_add_up(group: int) -> None:
    """Reduce-scatter, gather to the leader, all-reduce of leaders, scatter, all-gather; summed over a node."""
    nodes = 8 // group
    leader = collective_traffic("hierarchical", 1.0, 8, group=group).bytes_sent
    member = collective_traffic("hierarchical", 1.0, 8, group=group, role="member").bytes_sent
    part = (group - 1) / group
    phases = group * part + part + part + group * part
    assert leader + (group - 1) * member == pytest.approx(phases + 2 * (nodes - 1) / nodes)


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 31])
def test_halving_takes_logarithmic_rounds(ranks: int) -> None:
    power = 2 ** int(math.log2(ranks))
    extra = ranks > power
    traffic = collective_traffic("halving", 1.0, ranks)
    assert traffic.messages == 2 * int(math.log2(ranks)) + 2 * extra
    assert traffic.bytes_sent == pytest.approx(2 * (power - 1) / power + extra)
    assert collective_traffic("halving", 1.0, ranks, role="member").bytes_sent == (1.0 if extra else traffic.bytes_sent)


def test_hybrid_is_hierarchical_for_small_messages_and_a_ring_for_large_ones() -> None:
    edge = RING_ROUND_BYTES * 32
    for nbytes, name in ((edge - 1, "hierarchical"), (edge, "ring"), (0, "hierarchical"), (1e9, "ring")):
        for role in ("leader", "member"):
            expected = collective_traffic(name, nbytes, 32, group=4, role=role)
            assert collective_traffic("hybrid", nbytes, 32, group=4, role=role) == expected


def test_one_rank_sends_nothing() -> None:
    for collective in ("ring", "hierarchical", "torus", "halving", "hybrid", "gather"):
        assert collective_traffic(collective, 1e6, 1).bytes_sent == 0


def test_onebit_of_resnet50_takes_at_most_a_28th_of_float32() -> None:
    shapes = resnet50_shapes()
    assert len(shapes) == 161
    assert sum(map(math.prod, shapes)) == 25_557_032
    dense = encoded_bytes("none", shapes)
    assert dense / encoded_bytes("onebit", shapes) >= 28
    assert encoded_bytes("fp16", shapes) * 2 == dense


@pytest.mark.parametrize("shape", [(3, 5000), (64,), (), (0, 4), (2, 3, 7, 7), (1000, 2048), (1, 100_000), (7, 513)])
def test_onebit_blocks_cover_a_parameter_and_keep_to_rows(shape: tuple[int, ...]) -> None:
    blocks = onebit_blocks(shape)
    assert sum(blocks) == math.prod(shape)
    assert all(0 < block <= ONEBIT_MAX_BLOCK for block in blocks)
    assert sum(-(-block // 8) + 8 for block in blocks) == encoded_bytes("onebit", [shape])
    if len(shape) > 1 and math.prod(shape):
        row = math.prod(shape[1:])
        starts = [sum(blocks[:i]) for i in range(len(blocks))]
        crossing = [s for s, b in zip(starts, blocks, strict=True) if s // row != (s + b - 1) // row]
        assert all(start % row == 0 for start in crossing), "a block that spans rows holds whole rows"


def test_grid_fills_a_node_or_is_square() -> None:
    assert choose_grid(8, 4) == (4, 2)
    assert choose_grid(3456) == (64, 54)
    assert choose_grid(8, 8) == (4, 2)
    assert choose_grid(6, 4) == (3, 2), "nodes that do not fill up evenly give no grid"
    assert choose_grid(1) == (1, 1)


def test_mistakes_are_told_in_one_sentence() -> None:
    with pytest.raises(ConfigError, match="did you mean 'torus'"):
        collective_traffic("toros", 1.0, 4)
    with pytest.raises(ConfigError, match="did you mean 'onebit'"):
        encoded_bytes("onebits", [(3,)])
    with pytest.raises(ConfigError, match="6 places, but there are 4 ranks"):
        collective_traffic("torus", 1.0, 4, grid=(3, 2))
