"""Block codes: what is sent and what is kept add up to what came in, for every codec of the table that has blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigstep.exchange import Exchange, sum_owed
from bigstep.exchange.codecs import Blocks
from bigstep.exchange.codecs.layout import lay_out
from bigstep.tables import load
from bigstep.tables.codecs import CODECS, BlockCode, encoded_bytes, fill_settings
from bigstep.tables.collectives import collective_traffic
from test_comm_hook import BUCKET_MB, make_model
from test_comm_state import exchange_known_gradients, mean_of
from worlds import World as Ranks

BLOCK_CODECS = [name for name, entry in CODECS.items() if not entry.summable]
SHAPES = [(3, 5000), (64,), (1,), (9000,), (7, 513), (10, 10)]


def code_of(codec: str) -> BlockCode:
    code = CODECS[codec].blocks
    assert code is not None
    return code


def layout(codec: str, **given: float) -> tuple[Blocks, int, int]:
    """Blocks of all shapes one behind the other, heads before bodies; how many values, and the bytes of the message."""
    code, settings = code_of(codec), fill_settings(given)
    lengths = [length for shape in SHAPES for length in code.cut(shape).lengths]
    blocks, nbytes = lay_out(code, lengths, settings, torch.device("cpu"))
    assert 0 <= nbytes - encoded_bytes(codec, SHAPES, **given) < 4, "filled up to whole float32"
    return blocks, sum(lengths), nbytes


def gradient(count: int, step: int) -> Tensor:
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) + 0.2


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_sent_and_kept_add_up_to_what_came_in(codec: str) -> None:
    """In float64, over 30 steps: nothing is lost and nothing invented."""
    blocks, count, nbytes = layout(codec)
    coder = load(CODECS[codec].home)({})
    kept, out = torch.zeros(count, dtype=torch.float64), torch.empty(count, dtype=torch.float64)
    came_in, sent = torch.zeros_like(kept), torch.zeros_like(kept)
    for step in range(30):
        values = gradient(count, step)
        message = torch.zeros(nbytes, dtype=torch.uint8)
        coder.encode(values, kept, blocks, message)
        coder.decode(message, blocks, out)
        came_in += values
        sent += out
        # sums of order 30 in float64, rounded at a few places in each step
        assert float((sent + kept - came_in).abs().max()) <= 30 * 4 * 2**-53 * 64
    assert float(kept.abs().max()) > 0, "it loses something"
    error = float((sent - came_in).norm() / came_in.norm())
    assert error < (0.95 if codec == "topk" else 0.3), "most of it has arrived"


@pytest.mark.parametrize("codec", BLOCK_CODECS)
def test_decoding_adds_copies_in_their_order(codec: str) -> None:
    blocks, count, nbytes = layout(codec)
    coder = load(CODECS[codec].home)({})
    messages, outs = [], []
    for step in range(3):
        message, out = torch.zeros(nbytes, dtype=torch.uint8), torch.empty(count)
        coder.encode(gradient(count, step).float(), torch.zeros(count), blocks, message)
        coder.decode(message, blocks, out)
        messages.append(message)
        outs.append(out)
    total = torch.empty(count)
    coder.decode(torch.cat(messages), blocks, total, copies=3, stride=nbytes, scale=0.25)
    assert torch.equal(total, (outs[0] + outs[1] + outs[2]) * 0.25)


@pytest.mark.parametrize("codec", BLOCK_CODECS)
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_block_that_is_not_finite_is_seen_and_keeps_what_it_kept(codec: str, bad: float) -> None:
    blocks, count, nbytes = layout(codec)
    coder = load(CODECS[codec].home)({})
    values, kept, out = torch.ones(count), torch.full((count,), 0.5), torch.empty(count)
    block = range(int(blocks.starts[1]), int(blocks.starts[1] + blocks.lengths[1]))
    values[block[3]] = bad
    message = torch.zeros(nbytes, dtype=torch.uint8)
    coder.encode(values, kept, blocks, message)
    coder.decode(message, blocks, out)
    inside = torch.zeros(count, dtype=torch.bool)
    inside[block.start : block.stop] = True
    assert not torch.isfinite(out[inside]).all()
    assert torch.isfinite(out[~inside]).all()
    assert torch.equal(kept[inside], torch.full((len(block),), 0.5))
    assert torch.isfinite(kept).all()


@pytest.mark.parametrize("codec", ["int8", "int4", "topk"])
def test_a_rank_that_owns_no_block_reads_and_writes_nothing(codec: str) -> None:
    blocks, nbytes = lay_out(code_of(codec), [], fill_settings({}), torch.device("cpu"))
    coder, nothing, message = load(CODECS[codec].home)({}), torch.zeros(0), torch.zeros(nbytes, dtype=torch.uint8)
    coder.encode_reference(nothing, nothing, blocks, message)
    coder.decode_reference(message, blocks, nothing, copies=2, stride=nbytes)
    assert nbytes == 0


@pytest.mark.parametrize(("codec", "bits"), [("int8", 7), ("int4", 3)])
def test_integers_are_within_half_a_step_of_their_block(codec: str, bits: int) -> None:
    blocks, count, nbytes = layout(codec)
    coder = load(CODECS[codec].home)({})
    values, kept = gradient(count, 1), torch.zeros(count, dtype=torch.float64)
    coder.encode(values, kept, blocks, torch.zeros(nbytes, dtype=torch.uint8))
    for start, length in zip(blocks.starts.tolist(), blocks.lengths.tolist(), strict=True):
        largest = float(values[start : start + length].abs().max())
        # half a step, and float32's rounding of the scale
        assert float(kept[start : start + length].abs().max()) <= largest / (2**bits - 1) / 2 * (1 + 1e-5)


@pytest.mark.parametrize("keep", [1, 64, 4096])
def test_topk_sends_the_largest_of_each_chunk(keep: int) -> None:
    blocks, count, nbytes = layout("topk", keep=keep)
    coder = load(CODECS["topk"].home)({"keep": keep})
    values, kept, out = gradient(count, 1), torch.zeros(count, dtype=torch.float64), torch.empty(count)
    message = torch.zeros(nbytes, dtype=torch.uint8)
    coder.encode(values, kept, blocks, message)
    coder.decode(message, blocks, out)
    for start, length in zip(blocks.starts.tolist(), blocks.lengths.tolist(), strict=True):
        chunk, got = values[start : start + length], out[start : start + length]
        largest = chunk.abs().topk(-(-keep * length // 4096)).indices
        assert set(got.nonzero().flatten().tolist()) == set(largest.tolist())
        torch.testing.assert_close(got[largest].double(), chunk[largest], rtol=2**-8, atol=0)


@pytest.mark.parametrize("codec", [codec for codec in BLOCK_CODECS if codec != "onebit"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_write_what_the_specification_says(codec: str, dtype: torch.dtype) -> None:
    """To the bit: steps, scales and values sent are each rounded once, in one way."""
    blocks, count, nbytes = layout(codec)
    coder = load(CODECS[codec].home)({})
    ours, theirs = (gradient(count, 2).to(dtype) for _ in range(2))
    ours[-100:], theirs[-100:] = -gradient(100, 1).to(dtype), -gradient(100, 1).to(dtype)  # a block of zeros
    values = gradient(count, 1).to(dtype)
    values[9], values[17_000], values[12] = torch.inf, 0.0, 1e-42
    message, expected = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    coder.encode(values, ours, blocks, message)
    coder.encode_reference(values, theirs, blocks, expected)
    assert torch.equal(ours, theirs)
    out, reference = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
    pair = torch.cat([message, expected])
    for half in (message, expected):
        coder.decode(half, blocks, out)
        coder.decode_reference(half, blocks, reference)
        torch.testing.assert_close(out, reference, rtol=0, atol=0, equal_nan=True)
    coder.decode(pair, blocks, out, copies=2, stride=nbytes, scale=0.5)
    torch.testing.assert_close(out, reference, rtol=0, atol=0, equal_nan=True)  # both halves say the same


def over_steps(codec: str, settings: dict[str, float], steps: int) -> tuple[Any, ...]:
    exchange = Exchange(codec=codec, **settings)
    put_in, came_back = exchange_known_gradients(exchange, range(steps))
    state = exchange.gather_state()
    sent = exchange.bytes_sent
    exchange.close()
    return put_in, came_back, state, sent


def carry_on(codec: str, settings: dict[str, float], state: Any) -> tuple[Any, ...]:
    exchange = Exchange(codec=codec, **settings)
    exchange.load_state_dict(state)
    exchange.attach(DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MB))
    put_in, came_back = exchange_known_gradients(exchange, range(20, 24))
    after = exchange.gather_state()
    exchange.close()
    return put_in, came_back, after


@pytest.mark.parametrize("codec", [codec for codec in BLOCK_CODECS if codec != "onebit"])
def test_the_model_is_owed_exactly_what_it_has_not_got_on_any_number_of_ranks(
    world: Callable[[int], Ranks], codec: str
) -> None:
    """sum of results + owners' residuals + mean of ranks' residuals = sum of mean gradients; 3, then 2 and 4 ranks."""
    settings = {"decay": 1.0} if codec == "topk" else {}
    results = world(3).run(over_steps, codec, settings, 6)
    came_back, state, sent = results[0][1:]
    put_in = mean_of([result[0] for result in results])
    assert all(torch.equal(results[1][1][name], total) for name, total in came_back.items()), "all ranks got the same"
    debt = sum_owed(state)
    for name, total in put_in.items():
        # float32 roundings of values of order 10, at four places in each step
        assert float((came_back[name] + debt[name].view_as(total) - total).abs().max()) <= 6 * 4 * 2**-24 * 16
    shapes = [parameter.shape for parameter in make_model().parameters()]
    expected = 6 * collective_traffic("gather", encoded_bytes(codec, shapes), 3).bytes_sent
    longest = max(code_of(codec).body_bytes(length, fill_settings({})) for length in (1024, 4096)) + 8
    assert expected <= sent <= expected + 6 * 2 * 2 * 6 * longest, "one owner may have a block more than the others"
    for size in (2, 4):
        after = world(size).run(carry_on, codec, settings, state)
        delivered, last = after[0][1], sum_owed(after[0][2])
        for name, before in debt.items():
            new = mean_of([result[0] for result in after])[name]
            balance = before.view_as(new) + new - delivered[name] - last[name].view_as(new)
            assert float(balance.abs().max()) <= 5 * 4 * 2**-24 * 16


def one_step_and_another(decay: float) -> tuple[Any, ...]:
    exchange = Exchange(codec="topk", decay=decay)
    exchange_known_gradients(exchange, range(1))
    before = exchange.gather_state()
    put_in, came_back = exchange_known_gradients(exchange, range(1, 2))
    after = exchange.gather_state()
    exchange.close()
    return before, put_in, came_back, after


def test_what_topk_carries_decays(world: Callable[[int], Ranks]) -> None:
    """With decay d: what comes back + what is owed = the mean gradient + d x what was owed before."""
    results = world(2).run(one_step_and_another, 0.5)
    before, _, came_back, after = results[0]
    put_in = mean_of([result[1] for result in results])
    for name, old in sum_owed(before).items():
        found = came_back[name].flatten() + sum_owed(after)[name]
        # float32 roundings of values of order 8 at four places
        assert float((found - put_in[name].flatten() - 0.5 * old).abs().max()) <= 4 * 2**-24 * 8
        assert float(old.abs().max()) > 0.1
