"""Exact sums: any partition of the parts, any order, any collective gives the same bits."""

from __future__ import annotations

import functools
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.errors import ConfigError
from bigstep.exchange import Exchange
from bigstep.exchange.codecs import Sum
from bigstep.exchange.codecs.exact import Exact
from bigstep.exchange.codecs.levels import EMPTY, LEVELS, spans_of
from bigstep.exchange.codecs.piles import exact_sum_parts
from bigstep.exchange.codecs.piles_device import DevicePiles
from bigstep.exchange.codecs.piles_host import HostPiles
from bigstep.exchange.piled import Piled
from worlds import World as Ranks

SIZES = [5, 1, 0, 26]
VALUES = sum(SIZES)


def ordinary(draw: torch.Generator) -> Tensor:
    return torch.randn(VALUES, generator=draw)


def subnormal(draw: torch.Generator) -> Tensor:
    return torch.randn(VALUES, generator=draw) * 1e-43


def huge_range(draw: torch.Generator) -> Tensor:
    exponents = torch.randint(-140, 120, (VALUES,), generator=draw)
    return torch.randn(VALUES, generator=draw) * torch.pow(2.0, exponents)


def zeros(draw: torch.Generator) -> Tensor:
    return torch.zeros(VALUES)


def one_dominates(draw: torch.Generator) -> Tensor:
    values = torch.randn(VALUES, generator=draw) * 1e-20
    values[int(torch.randint(VALUES, (1,), generator=draw))] = 3e38
    return values


def all_largest(draw: torch.Generator) -> Tensor:
    return torch.full((VALUES,), torch.finfo(torch.float32).max)


KINDS = [ordinary, subnormal, huge_range, zeros, one_dominates, all_largest]


def integers(parts: list[Tensor], count: int) -> tuple[list[Tensor], Tensor]:
    codec = Exact()
    agreed = torch.stack([codec.measure(part, SIZES) for part in parts]).amax(0)
    return [codec.encode(part, SIZES, agreed, Sum(count)) for part in parts], agreed


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 4096])
def test_any_partition_and_order_gives_identical_integers(
    kind: Callable[[torch.Generator], Tensor], count: int
) -> None:
    draw, shuffle = torch.Generator().manual_seed(count), random.Random(count)
    parts = [kind(draw) for _ in range(count)]
    codes, agreed = integers(parts, count)
    expected = [sum(values) for values in zip(*(code.tolist() for code in codes), strict=True)]  # Python's integers
    assert max(map(abs, expected)) <= 2**62, "overflow is impossible"
    for _ in range(3):
        shuffle.shuffle(codes)
        ranks = shuffle.randint(1, min(count, 8))
        shares = [codes[rank::ranks] for rank in range(ranks)]
        sums = [torch.stack(share).sum(0) for share in shares]  # each rank by itself, then all of them
        assert torch.stack(sums).sum(0).tolist() == expected
    assert torch.equal(exact_sum_parts(parts, SIZES), exact_sum_parts(parts[::-1], SIZES))


def unequal(draw: torch.Generator) -> Tensor:
    """A worker's gradient that is a thousand, or a million million, times smaller than another's."""
    return torch.randn(VALUES, generator=draw) * 2.0 ** float(torch.randint(-45, 1, (1,), generator=draw))


@pytest.mark.parametrize("kind", [*KINDS, unequal], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 64, 1000, 4096])
def test_piles_on_any_ranks_and_in_any_order_hold_identical_integers(
    kind: Callable[[torch.Generator], Tensor], count: int
) -> None:
    draw, shuffle = torch.Generator().manual_seed(count), random.Random(count)
    parts = [kind(draw) for _ in range(count)]
    found = []
    for ranks in (1, shuffle.randint(1, min(count, 8)), min(count, 7)):
        shuffle.shuffle(parts)
        hosted = [HostPiles(SIZES, count) for _ in range(ranks)]
        for place, part in enumerate(parts):
            hosted[place % ranks].add(part.split_with_sizes(SIZES))
        agreed = torch.stack([piles.levels() for piles in hosted]).amax(0)
        wires = [piles.gather(agreed).tolist() for piles in hosted]
        sums, rows = [sum(values) for values in zip(*wires, strict=True)], []  # Python's integers
        assert all(abs(value) < 2**63 for value in sums), "overflow is impossible"
        for size, high, pairs in zip(SIZES, *spans_of(agreed.numpy()), strict=True):
            length = size * pairs
            total, sums = sums[:length], sums[length:]
            while total and not any(total[-size:]):  # levels that only some orders find to be too low
                del total[-size:]
            rows.append((high, total))
        assert sums == []
        found.append(rows)
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", [*KINDS[:-1], unequal], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("count", [1, 3, 100, 4096])
def test_the_sum_is_nearer_to_the_truth_than_a_float32_ring(
    kind: Callable[[torch.Generator], Tensor], count: int
) -> None:
    draw = torch.Generator().manual_seed(7 * count)
    parts = [kind(draw) / 4096 for _ in range(count)]
    truth = [sum(map(Fraction, values)) for values in zip(*(part.tolist() for part in parts), strict=True)]
    ring = functools.reduce(torch.add, parts).tolist()  # float32, one part after another
    found = exact_sum_parts(parts, SIZES).tolist()
    start = 0
    for size in SIZES:
        span = slice(start, start + size)
        largest = max((abs(Fraction(value)) for part in parts for value in part[span].tolist()), default=Fraction(0))
        # each part may be off by half of 2^(h - 55) of its largest, and the result is rounded to float32 once
        slack = count * largest / 2 ** (55 - (count - 1).bit_length())
        worst, worst_of_ring = Fraction(0), Fraction(0)
        for exact, plain, got in zip(truth[span], ring[span], found[span], strict=True):
            rounding = max(abs(exact) / 2**24, Fraction(2) ** -150)
            assert abs(Fraction(got) - exact) <= max(abs(Fraction(plain) - exact), slack + rounding)
            worst = max(worst, abs(Fraction(got) - exact))
            worst_of_ring = max(worst_of_ring, abs(Fraction(plain) - exact))
        assert worst <= worst_of_ring + slack, "the parameter as a whole"
        if size == SIZES[-1] and count >= 100 and kind in (ordinary, unequal):
            assert worst < worst_of_ring  # a sum of so many is rounded once, and not a hundred times
        start += size


def broken(draw: torch.Generator) -> Tensor:
    """Not finite now and then, and in one parameter only."""
    values = torch.randn(VALUES, generator=draw)
    values[3] = torch.tensor([torch.nan, torch.inf, 1.0])[torch.randint(3, (1,), generator=draw)]
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numba_and_torch_give_the_same_piles(dtype: torch.dtype) -> None:
    draw, chosen = torch.Generator().manual_seed(5), [3, 0]
    for kind in (ordinary, subnormal, huge_range, zeros, one_dominates, unequal, broken):
        parts = [kind(draw).to(dtype) for _ in range(6)]
        compiled, plain = HostPiles(SIZES, 9), DevicePiles(SIZES, 9)
        for part in parts:
            compiled.add(part.split_with_sizes(SIZES))
            plain.add(part.split_with_sizes(SIZES))
        for part in parts[:3]:  # some of the parameters by themselves, in another order
            some = [part.split_with_sizes(SIZES)[place] for place in chosen]
            for piles in (compiled, plain):
                piles.add(some, chosen)
                piles.add(some, chosen)
        for which in ([1, 2], chosen):
            levels = compiled.levels(which)
            assert torch.equal(levels, plain.levels(which))
            wire = compiled.gather(levels, which)
            assert torch.equal(wire, plain.gather(levels, which))
            outs = [torch.full((sum(SIZES[place] for place in which),), 7.0, dtype=dtype) for _ in range(2)]
            sizes = [SIZES[place] for place in which]
            compiled.spread(levels, [wire], outs[0].split_with_sizes(sizes), which)
            plain.spread(levels, [wire], outs[1].split_with_sizes(sizes), which)
            assert torch.equal(*(out.nan_to_num(nan=-1.0) for out in outs))
        outs = []
        for piles in (compiled, plain):
            for part in parts:
                piles.add(part.split_with_sizes(SIZES))
            outs.append(torch.full((VALUES,), 7.0, dtype=dtype))
            piles.take(outs[-1].split_with_sizes(SIZES))
        assert torch.equal(*(out.nan_to_num(nan=-1.0) for out in outs))
        assert compiled.levels().tolist() == [EMPTY] * 8, "gathered is forgotten"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_parts_that_wait_where_they_are_count_as_those_that_were_added(ranks: int, dtype: torch.dtype) -> None:
    draw, buckets = torch.Generator().manual_seed(8), [[3, 0], [1, 2]]
    for kind in (ordinary, subnormal, huge_range, zeros, one_dominates, unequal, broken):
        parts = [kind(draw).to(dtype) for _ in range(7)]
        expected = exact_sum_parts(parts, SIZES)
        found, hosted = torch.full((VALUES,), 7.0, dtype=dtype), [HostPiles(SIZES, 7) for _ in range(ranks)]
        lasts = [parts[rank::ranks][-1].split_with_sizes(SIZES) for rank in range(ranks)]
        for rank, piles in enumerate(hosted):
            for part in parts[rank::ranks][:-1]:
                piles.hold(part.split_with_sizes(SIZES))
        for which in buckets:
            mine = [[last[place] for place in which] for last in lasts]
            levels = [piles.add_last(some, which) for piles, some in zip(hosted, mine, strict=True)]
            agreed = torch.stack(levels).amax(0)
            room = torch.full((2 * LEVELS * VALUES,), 7)
            wires = [piles.gather(agreed, which, into=room.clone()) for piles in hosted]
            hosted[0].spread(agreed, wires, [found.split_with_sizes(SIZES)[place] for place in which], which)
        assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), kind.__name__
        for piles in hosted:
            assert piles.levels().tolist() == [EMPTY] * 8, "gathered is forgotten"
            assert piles._held is None
            assert not piles._last


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numba_and_torch_write_the_same_codes(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(6)
    for kind in (ordinary, subnormal, huge_range, zeros, one_dominates, unequal):
        flat, found = kind(draw).to(dtype), []
        for seen_as_device in (False, True):
            codec, out = Exact(), torch.empty(VALUES, dtype=dtype)
            with monkeypatch.context() as patch:
                patch.setattr("bigstep.exchange.codecs.exact._on_host", lambda _, plainly=seen_as_device: not plainly)
                agreed = codec.measure(flat, SIZES)
                wire = codec.encode(flat, SIZES, agreed, Sum(5))
                codec.decode(wire * 3, out, SIZES, agreed, Sum(5, divide_by=3))
            found.append((agreed.tolist(), wire.tolist(), out.tolist()))
        assert found[0] == found[1], kind.__name__


def test_piles_take_the_memory_of_a_part_however_many_are_added() -> None:
    piles = HostPiles([1000], 4096)
    for worker in range(500):
        piles.add([torch.randn(1000, generator=torch.Generator().manual_seed(worker))])
    assert piles._sums.shape[0] <= 2  # largest values of 2.5 to 5: one level, or two
    for power in range(-900, 900, 3):  # every part on a level of its own: what is too low to count gives way
        piles.add([torch.full((1000,), 2.0, dtype=torch.float64).pow(power)])
    assert piles._sums.shape[0] <= LEVELS


def test_what_is_not_finite_makes_its_parameter_nan_and_no_other() -> None:
    for bad in (torch.inf, -torch.inf, torch.nan):
        parts = [torch.ones(VALUES) for _ in range(3)]
        parts[1][7] = bad  # of the last parameter
        total = exact_sum_parts(parts, SIZES)
        assert total[:6].tolist() == [3.0] * 6
        assert total[6:].isnan().all()


def test_types_are_kept_and_double_precision_is_summed_to_its_last_bits() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert exact_sum_parts([torch.ones(3, dtype=dtype)] * 3).dtype == dtype
    parts = [torch.tensor([1.0, 1e-280], dtype=torch.float64), torch.tensor([2.0**-50, 1e-280], dtype=torch.float64)]
    assert exact_sum_parts(parts, [1, 1]).tolist() == [1 + 2.0**-50, 2e-280]


PARTS = 12
COLLECTIVES = {2: ["ring", "halving"], 3: ["torus", "halving"], 4: ["ring", "torus", "hierarchical", "halving"]}


def make_model() -> nn.Module:
    torch.manual_seed(2)
    convolution = nn.Conv2d(3, 6, 3).to(memory_format=torch.channels_last)
    return nn.Sequential(convolution, nn.Flatten(), nn.Linear(24, 30), nn.Tanh(), nn.Linear(30, 4))


def worker_batch(worker: int, base: float = 10.0) -> Tensor:
    return torch.randn(5, 3, 4, 4, generator=torch.Generator().manual_seed(worker)) * base ** (worker % 5)


def _late(waits: Iterator[float], function: Callable[..., Any], *args: Any, **more: Any) -> Any:
    time.sleep(next(waits))
    return function(*args, **more)


def gradients_of_workers(
    collective: str, first: list[int], ranks_per_node: int = 2, base: float = 10.0
) -> list[Tensor]:
    """This rank's workers one after another; `first` says with which worker each rank begins."""
    rank, size = dist.get_rank(), dist.get_world_size()
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001, gradient_as_bucket_view=True)
    exchange = Exchange(collective, "exact", parts=PARTS, ranks_per_node=ranks_per_node)
    exchange.attach(ddp)
    (piled,) = exchange._transports
    assert isinstance(piled, Piled)
    assert (piled._shared is not None) == (collective == "ring" and ranks_per_node == size)
    # in turn one rank reads late and the others write late: nobody may overtake them
    late, waits = ("spread", [0.02, 0.0]) if rank == 0 else ("gather", [0.0, 0.02])
    setattr(exchange._piles, late, functools.partial(_late, itertools.cycle(waits), getattr(exchange._piles, late)))
    if piled._shared and base == 1:  # workers differ little: none of their integers goes by the collective
        piled._collective.start = None  # type: ignore[assignment, method-assign]
    mine = range(first[rank], [*first, PARTS][rank + 1])
    for other in (
        200,
        100,
        0,
    ):  # DDP regroups its buckets after the first; what is left of a step is not the next one's
        ddp.zero_grad()
        for worker in mine[:-1]:
            with ddp.no_sync():
                (ddp(worker_batch(other + worker, base)).square().mean() / PARTS).backward()
            exchange.hold()
        (ddp(worker_batch(other + mine[-1], base)).square().mean() / PARTS).backward()
    assert size == 1 or exchange.bytes_sent > 0
    exchange.close()
    numbers = Path("/proc/self/fd").iterdir()
    assert not any("memfd:bigstep" in os.readlink(number) for number in numbers if number.is_symlink())
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def sum_of_workers(base: float = 10.0) -> tuple[Tensor, Tensor]:
    """The gradients of all workers in sum, exactly, and as float32 gives them."""
    model, flats = make_model(), []
    for worker in range(PARTS):
        model.zero_grad()
        (model(worker_batch(worker, base)).square().mean() / PARTS).backward()
        flats.append(torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]))
    return exact_sum_parts(flats, [parameter.numel() for parameter in model.parameters()]), torch.stack(flats).sum(0)


@pytest.mark.parametrize("base", [1.0, 10.0], ids=["in memory alone", "some by the collective"])
def test_ranks_of_one_host_read_each_other_and_give_the_bits_of_ranks_that_do_not(
    base: float, world: Callable[[int], Ranks]
) -> None:
    expected, _ = sum_of_workers(base)
    for ranks_per_node in (2, 1):
        for found in world(2).run(gradients_of_workers, "ring", [0, 5], ranks_per_node, base):
            assert torch.equal(torch.cat([gradient.flatten() for gradient in found]), expected), ranks_per_node


def test_workers_on_any_number_of_ranks_and_any_collective_give_the_same_bits(world: Callable[[int], Ranks]) -> None:
    expected, rounded = sum_of_workers()
    assert float((expected - rounded).abs().max()) > 0, "float32's sum has other bits"
    shares = {2: [[0, 6], [0, 1]], 3: [[0, 4, 8], [0, 1, 9]], 4: [[0, 3, 6, 9]]}
    for size, collectives in COLLECTIVES.items():
        for first in shares[size]:
            for collective in collectives:
                for found in world(size).run(gradients_of_workers, collective, first):
                    flat = torch.cat([gradient.flatten() for gradient in found])
                    assert torch.equal(flat, expected), (size, collective, first)


def mean_over_ranks() -> tuple[list[Tensor], list[Tensor]]:
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.001)
    exchange = Exchange(codec="exact")
    exchange.attach(ddp)
    ddp(worker_batch(dist.get_rank())).square().mean().backward()
    exchange.close()
    plain = make_model()
    plain(worker_batch(dist.get_rank())).square().mean().backward()
    own = [parameter.grad for parameter in plain.parameters() if parameter.grad is not None]
    return [p.grad.clone() for p in model.parameters() if p.grad is not None], own


def test_without_parts_the_result_is_the_mean_over_ranks(world: Callable[[int], Ranks]) -> None:
    results = world(3).run(mean_over_ranks)
    for index, found in enumerate(results[0][0]):
        exact = torch.stack([own[index].double() for _, own in results]).mean(0)
        torch.testing.assert_close(found.double(), exact, rtol=2**-24, atol=0)  # one rounding to float32


def test_parts_want_a_codec_that_loses_nothing() -> None:
    with pytest.raises(ConfigError, match="use codec=exact"):
        Exchange(codec="fp16", parts=4)
    with pytest.raises(ConfigError, match="say how many"):
        Exchange(codec="exact").hold()
