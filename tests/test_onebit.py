"""1-bit kernels against their specification: same codes, nothing lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bigstep.exchange.codecs import Blocks
from bigstep.exchange.codecs.onebit import OneBit, decode_reference, encode_reference
from interpreter import needs_triton

encode, decode = OneBit().encode, OneBit().decode

LENGTHS = (512, 600, 1, 7, 8, 9, 63, 64, 65, 4096, 2304, 588, 1537, 3072)


def table(lengths: tuple[int, ...] = LENGTHS) -> tuple[Blocks, int]:
    """Blocks one behind the other, all means before all bits; and the bytes of the message."""
    sizes = torch.tensor(lengths)
    rows = (sizes + 7) // 8
    bits_at = 8 * len(lengths) + rows.cumsum(0) - rows
    blocks = Blocks(sizes.cumsum(0) - sizes, sizes, 2 * torch.arange(len(lengths)), bits_at)
    return blocks, int(8 * len(lengths) + rows.sum())


def gradient(dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(sum(LENGTHS), dtype=dtype, generator=generator) + 0.3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_kernels_write_what_the_specification_says(dtype: torch.dtype) -> None:
    blocks, nbytes = table()
    ours, theirs = gradient(dtype, 1), gradient(dtype, 1)
    message, expected = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    encode(gradient(dtype), ours, blocks, message)
    encode_reference(gradient(dtype), theirs, blocks, expected)
    means = 8 * len(LENGTHS)
    assert torch.equal(message[means:], expected[means:]), "bits do not depend on the order of sums"
    # means of up to 4096 values of order 1, summed in another order
    torch.testing.assert_close(
        message[:means].view(torch.float32), expected[:means].view(torch.float32), rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    copies = torch.cat([message, torch.zeros(-nbytes % 4, dtype=torch.uint8)]).repeat(3)
    stride = copies.numel() // 3
    out, reference = torch.empty_like(ours), torch.empty_like(ours)
    decode(copies, blocks, out, copies=3, stride=stride, scale=1 / 3)
    decode_reference(copies, blocks, reference, copies=3, stride=stride, scale=1 / 3)
    assert torch.equal(out, reference), "the sum over messages has one order"


def test_means_minimise_the_squared_error() -> None:
    blocks, nbytes = table((4096,))
    values = gradient(torch.float64)[:4096].clone()
    residual, message = torch.zeros_like(values), torch.zeros(nbytes, dtype=torch.uint8)
    encode(values, residual, blocks, message)
    best = float(residual.square().sum())
    means = message[:8].view(torch.float32)
    for side in (0, 1):
        for change in (-1e-3, 1e-3):
            means[side] += change
            out = torch.empty_like(values)
            decode(message, blocks, out)
            assert float((values - out).square().sum()) > best
            means[side] -= change


def test_sent_and_kept_add_up_to_what_came_in_over_many_steps() -> None:
    """In each step v - residual is what was sent, to one rounding of v; over 200 steps nothing drifts away."""
    blocks, nbytes = table()
    residual, message = torch.zeros(sum(LENGTHS)), torch.zeros(nbytes, dtype=torch.uint8)
    came_in = torch.zeros(sum(LENGTHS), dtype=torch.float64)
    sent = torch.zeros_like(came_in)
    out = torch.empty(sum(LENGTHS))
    worst = 0.0
    for step in range(200):
        values = gradient(torch.float32, step)
        v = values + residual
        encode(values, residual, blocks, message)
        decode(message, blocks, out)
        worst = max(worst, float((out.double() + residual.double() - v.double()).abs().max() / v.abs().max()))
        came_in += values
        sent += out
    assert worst <= 2**-23
    # one rounding of v (of order 10) in each of 200 steps, twice: at v = values + residual and at residual = v - sent
    assert float((sent + residual - came_in).abs().max()) <= 200 * 2 * 2**-24 * 16
    assert float((sent - came_in).abs().max()) > 0.1, "the residual is what makes the difference"


def test_a_block_that_is_not_finite_is_sent_as_nan_and_keeps_its_residual() -> None:
    for write in (encode, encode_reference):
        blocks, nbytes = table((16, 16, 16))
        values, residual = torch.ones(48), torch.full((48,), 0.5)
        values[3], values[20] = torch.inf, torch.nan
        message, out = torch.zeros(nbytes, dtype=torch.uint8), torch.zeros(48)
        write(values, residual, blocks, message)
        decode(message, blocks, out)
        assert out[:32].isnan().all()
        assert torch.equal(out[32:], torch.full((16,), 1.5))
        assert torch.equal(residual[:32], torch.full((32,), 0.5))
        assert torch.equal(residual[32:], torch.zeros(16))


@needs_triton
def test_triton_kernels_write_what_the_specification_says() -> None:
    """In a process of its own: the interpreter is chosen when triton is imported. On a GPU, the kernels themselves."""
    if os.environ.get("BIGSTEP_TEST_GPU"):
        compare_triton("cuda")
        return
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", "import test_onebit; test_onebit.compare_triton()"],
        env=environment, capture_output=True, text=True, timeout=50,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def compare_triton(device: str = "cpu") -> None:
    from bigstep.exchange.codecs import onebit_triton

    blocks, nbytes = table()
    on_device = Blocks(
        *(column.to(device) for column in (blocks.starts, blocks.lengths, blocks.heads_at, blocks.bodies_at))
    )
    values = gradient(torch.float32)
    values[5] = torch.inf
    ours, theirs = gradient(torch.float32, 1).to(device), gradient(torch.float32, 1)
    message, expected = torch.zeros(nbytes, dtype=torch.uint8, device=device), torch.zeros(nbytes, dtype=torch.uint8)
    onebit_triton.encode(values.to(device), ours, on_device, message)
    encode_reference(values, theirs, blocks, expected)
    code = message.cpu()
    means = 8 * len(LENGTHS)
    assert torch.equal(code[means + 64 :], expected[means + 64 :])
    torch.testing.assert_close(
        code[:means].view(torch.float32), expected[:means].view(torch.float32), rtol=1e-5, atol=1e-6, equal_nan=True
    )
    torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-5)
    stride = -(-nbytes // 4) * 4
    copies = torch.nn.functional.pad(code, (0, stride - nbytes)).repeat(2)
    out, reference = torch.empty_like(ours), torch.empty_like(theirs)
    onebit_triton.decode(copies.to(device), on_device, out, 2, stride, 0.5)
    decode_reference(copies, blocks, reference, copies=2, stride=stride, scale=0.5)
    torch.testing.assert_close(out.cpu(), reference, rtol=1e-6, atol=0, equal_nan=True)
