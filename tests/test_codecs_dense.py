"""Half precision among very many ranks, emulated with the codec's own arithmetic; and what its scale can take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bigstep.exchange.codecs import Sum
from bigstep.exchange.codecs.dense import Half
from bigstep.exchange.codecs.powers import find_exponents, make_power


def exchange(parts: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """The mean as ranks would get it from a ring, which adds one after another in float16; and what each sent."""
    codec, rule = Half(), Sum(len(parts), divide_by=len(parts))
    sizes = [parts[0].numel()]
    agreed = torch.stack([codec.measure(part, sizes) for part in parts]).amax(0)
    sent = [codec.encode(part.clone(), sizes, agreed, rule) for part in parts]
    total = sent[0].clone()
    for wire in sent[1:]:
        total += wire
    out = torch.empty_like(parts[0])
    codec.decode(total, out, sizes, agreed, rule)
    return out, sent


@pytest.mark.parametrize("ranks", [2, 1024, 3456])
def test_small_gradients_of_very_many_ranks_arrive(ranks: int) -> None:
    """rms 1.5e-5 as in the last epochs of ResNet-50: divided before the sum, three of four values were sent as 0."""
    generator = torch.Generator().manual_seed(ranks)
    signal = 1.5e-6 * torch.randn(200, generator=generator)
    parts = [signal + 1.5e-5 * torch.randn(200, generator=generator) for _ in range(ranks)]
    exact = torch.stack(parts).double().mean(0)
    mean, sent = exchange(parts)
    assert float(torch.stack([(wire == 0).double().mean() for wire in sent]).mean()) < 1e-3
    # each of N additions rounds to 11 bits of a sum that grows as its square root: sqrt(N) 2^-12 at most, 1.5 %
    assert float((mean.double() - exact).norm() / exact.norm()) < 0.015
    divided = [(part / ranks).half() for part in parts]
    if ranks > 1000:
        assert float(torch.stack([(wire == 0).double().mean() for wire in divided]).mean()) > 0.5, "the old way"


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1.0, 6e4, 1e30, 3e38])
@pytest.mark.parametrize("ranks", [2, 3, 1024, 4096])
def test_no_sum_overflows(size: float, ranks: int) -> None:
    """All ranks send the same value with the same sign: the largest sum that there can be."""
    mean, _ = exchange([torch.full((4,), size)] * ranks)
    assert torch.isfinite(mean).all()
    # a thousandth of a sum of 11 bits is about its last one: such sums of equals come to rest below their end
    coarse = size < 1e-37  # below float32's normal range digits are missing from the beginning
    torch.testing.assert_close(mean, torch.full((4,), size), rtol=0.5 if ranks > 1000 or coarse else 2e-3, atol=0)


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_reaches_everybody(bad: float) -> None:
    parts = [torch.ones(4) for _ in range(3)]
    parts[1][2] = bad
    mean, _ = exchange(parts)
    assert not torch.isfinite(mean[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_gradients_of_any_type_come_back_in_it(dtype: torch.dtype) -> None:
    parts = [torch.tensor([1.0, -0.5, 3.0], dtype=dtype) * (rank + 1) for rank in range(3)]
    mean, _ = exchange(parts)
    assert mean.dtype == dtype
    torch.testing.assert_close(mean, torch.tensor([2.0, -1.0, 6.0], dtype=dtype), rtol=2e-3, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_powers_and_exponents_are_exact(dtype: torch.dtype) -> None:
    limit = 126 if dtype == torch.float32 else 1022
    exponents = torch.arange(-limit, limit + 1)
    powers = make_power(exponents, dtype)
    assert powers.tolist() == [2.0 ** int(e) for e in exponents]
    assert torch.equal(find_exponents(list(powers)), exponents.int() + 1), "2^e < 2^(e + 1)"
