"""Fused batch norm under Triton's interpreter against float64, and its twin against torch's own batch norm."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from bigstep.errors import ConfigError
from bigstep.gpu import backend
from bigstep.gpu.batch_norm import Norm, batch_norm_relu, fused_norm, fused_norm_pool, why_not_fused
from interpreter import DEVICE, needs_triton


@pytest.fixture
def kernels_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERPRET", True)


def norm_of(channels: int, groups: int, seed: int, dtype: torch.dtype = torch.float32) -> Norm:
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(channels, generator=g, dtype=torch.float64)
    bias = torch.randn(channels, generator=g, dtype=torch.float64) / 2
    mean, var = torch.randn(channels, generator=g, dtype=torch.float64), torch.rand(channels, generator=g).double()
    moved = [t.to(dtype).to(DEVICE) for t in (weight, bias, mean, var)]
    return Norm(moved[0].requires_grad_(), moved[1].requires_grad_(), moved[2], moved[3], groups=groups)


def image(shape: tuple[int, ...], seed: int, dtype: torch.dtype, offset: float = 0.5) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(shape, generator=g) * 2 + offset).to(dtype).to(DEVICE)
    return x.contiguous(memory_format=torch.channels_last).requires_grad_()


def error(got: Tensor, want: Tensor) -> float:
    got, want = got.detach().double(), want.detach().double()
    return float((got - want).norm() / want.norm())


def twice(shape: tuple[int, ...], groups: int, dtype: torch.dtype, branches: str, run):
    """Run the kernels in `dtype` and the twin in float64 on the same numbers; return all results of both."""
    results = []
    for exact in (False, True):
        norm = norm_of(shape[1], groups, seed=1, dtype=torch.float64 if exact else torch.float32)
        if exact:  # the same numbers, in float64
            norm = norm._replace(
                **{
                    k: getattr(norm_of(shape[1], groups, 1), k).detach().double()
                    for k in ("running_mean", "running_var")
                },
                weight=norm_of(shape[1], groups, 1).weight.detach().double().requires_grad_(),
                bias=norm_of(shape[1], groups, 1).bias.detach().double().requires_grad_(),
            )
        other = norm_of(shape[1], groups, seed=2)
        if exact:
            other = other._replace(
                weight=other.weight.detach().double().requires_grad_(),
                bias=other.bias.detach().double().requires_grad_(),
            )
        x = image(shape, 3, dtype)
        extra = image(shape, 4, dtype)
        if exact:
            x, extra = (t.detach().double().requires_grad_() for t in (x, extra))
        outputs = run(x, norm, extra, other)
        loss = sum(
            (y.double() * image(y.shape, 5 + i, torch.float32, 0.0).detach().to(dtype).double()).sum()
            for i, y in enumerate(outputs)
        )
        loss.backward()
        leaves = [x, norm.weight, norm.bias]
        if branches != "none":
            leaves.append(extra)
        if branches == "other":
            leaves += [other.weight, other.bias]
        results.append([*outputs, norm.running_mean, norm.running_var, *(leaf.grad for leaf in leaves)])
    return zip(*results, strict=True)


# fp16 rounds outputs and gradients to 2^-11 each; the sums are fp32. bf16: 2^-8.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
CASES = [
    ((4, 16, 5, 3), 1, torch.float32),  # tiles with a rest
    ((8, 64, 4, 4), 4, torch.float32),
    ((4, 64, 8, 8), 2, torch.float16),
    ((4, 24, 3, 3), 2, torch.bfloat16),  # a channel block with a rest
]


@needs_triton
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("branches", ["none", "residual", "residual/2", "other"])
@pytest.mark.parametrize("shape,groups,dtype", CASES)
def test_kernels_agree_with_float64(shape, groups, dtype, branches) -> None:
    def run(x: Tensor, norm: Norm, extra: Tensor, other: Norm) -> tuple[Tensor, ...]:
        if x.dtype != torch.float64:
            assert why_not_fused(x) is None
        if branches == "residual":
            return fused_norm(x, norm, residual=extra, fork=1)
        if branches == "residual/2":
            return fused_norm(x, norm, residual=extra, fork=2)
        if branches == "other":
            return fused_norm(x, norm, other=extra, other_norm=other, fork=1)
        return fused_norm(x, norm)[:1]

    for got, want in twice(shape, groups, dtype, branches, run):
        assert error(got, want) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("fork", [0, 1, 2])
@pytest.mark.parametrize("shape,groups,dtype", [((1, 16, 9, 6), 1, torch.float32), ((2, 8, 6, 4), 2, torch.float16)])
def test_pool_kernels_agree_with_float64(shape, groups, dtype, fork) -> None:
    def run(x: Tensor, norm: Norm, extra: Tensor, other: Norm) -> tuple[Tensor, ...]:
        outputs = fused_norm_pool(x, norm, fork=fork)
        return outputs if fork else outputs[:1]

    for got, want in twice(shape, groups, dtype, "none", run):
        assert error(got, want) < TOLERANCE[dtype]


@needs_triton
@pytest.mark.usefixtures("kernels_run")
def test_statistics_survive_a_mean_far_from_zero() -> None:
    # Deviation 2 about mean 3,000: E[x^2] - E[x]^2 in fp32 would keep no digit of the variance.
    x = image((4, 8, 6, 6), 0, torch.float32, offset=3000.0)
    norm = Norm(torch.ones(8, device=DEVICE), torch.zeros(8, device=DEVICE), None, None)
    y, _ = fused_norm(x, norm, relu=False)
    want = F.batch_norm(x.double(), None, None, training=True)
    assert error(y, want) < 1e-4  # x itself carries 3000 * 2^-24 / 2


@needs_triton
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", ["alone", "residual", "pool"])
def test_a_channel_that_is_no_number_stays_so(form: str, wrong: float) -> None:
    """On a GPU the loss tells that a run has diverged; torch's ReLU and pooling hide it from nobody."""
    x = image((2, 16, 6, 6), 0, torch.float32).detach()
    x[1, 3, 2, 2] = wrong
    norm = norm_of(16, 1, 0)
    y = (
        fused_norm_pool(x, norm)[0]
        if form == "pool"
        else fused_norm(x, norm, residual=x if form == "residual" else None)[0]
    )
    assert y.isnan().sum((0, 2, 3)).tolist() == [y[:, 3].numel() if channel == 3 else 0 for channel in range(16)]


@needs_triton
@pytest.mark.usefixtures("kernels_run")
def test_no_relu_and_an_unused_output() -> None:
    x = image((2, 8, 4, 4), 0, torch.float32)
    norm = norm_of(8, 1, 0)
    main, skip = fused_norm(x, norm, residual=x.detach(), relu=False, fork=1)
    assert main.data_ptr() == skip.data_ptr()
    skip.pow(3).sum().backward()
    twin = x.detach().double().requires_grad_()
    exact = norm_of(8, 1, 0)
    y = F.batch_norm(twin, None, None, exact.weight.double(), exact.bias.double(), training=True) + twin.detach()
    y.pow(3).sum().backward()
    assert error(x.grad, twin.grad) < 1e-5


@needs_triton
@pytest.mark.usefixtures("kernels_run")
def test_only_the_subsampled_output_is_used() -> None:
    x, norm = image((2, 8, 5, 4), 0, torch.float32), norm_of(8, 1, 0)
    fused_norm(x, norm, fork=2)[1].pow(3).sum().backward()
    twin, exact = x.detach().double().requires_grad_(), norm_of(8, 1, 0)
    y = F.batch_norm(twin, None, None, exact.weight.double(), exact.bias.double(), training=True).relu()
    y[:, :, ::2, ::2].pow(3).sum().backward()
    assert error(x.grad, twin.grad) < 1e-5


@pytest.mark.parametrize("training", [True, False])
def test_twin_with_one_group_is_torch_batch_norm(training) -> None:
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    ours, theirs = ([torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)] for _ in range(2))
    weight, bias = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    got = batch_norm_relu(x, weight, bias, *ours, relu=False, training=training)
    want = F.batch_norm(x, *theirs, weight, bias, training=training)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(ours, theirs)


def test_groups_are_separate_calls_and_the_buffers_their_mean() -> None:
    x, residual = torch.randn(6, 3, 4, 4, dtype=torch.float64), torch.randn(6, 3, 4, 4, dtype=torch.float64)
    weight, bias = torch.randn(3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    together = batch_norm_relu(x, weight, bias, mean, var, residual, groups=3)
    apart, means, variances = [], [], []
    for k in range(0, 6, 2):
        m, v = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        z = F.batch_norm(x[k : k + 2], m, v, weight, bias, training=True) + residual[k : k + 2]
        apart.append(torch.relu(z))
        means.append(m)
        variances.append(v)
    torch.testing.assert_close(together, torch.cat(apart))
    torch.testing.assert_close(mean, torch.stack(means).mean(0))
    torch.testing.assert_close(var, torch.stack(variances).mean(0))


@pytest.mark.parametrize(
    "shape,settings,words",
    [
        ((4, 2), {}, "2 dimensions"),
        ((4, 2, 3, 3), {"groups": 3}, "must divide"),
        ((4, 2, 1, 1), {"groups": 4}, "at least two"),
        ((4, 2, 3, 3), {"training": False}, "without buffers"),
    ],
)
def test_mistakes_are_named(shape, settings, words) -> None:
    norm = Norm(torch.ones(2), torch.zeros(2), None, None, **settings)
    with pytest.raises(ConfigError, match=f"^A batch norm was given .*{words}"):
        batch_norm_relu(torch.zeros(shape), torch.ones(2), torch.zeros(2), None, None, **settings)
    for function in (fused_norm, fused_norm_pool):
        with pytest.raises(ConfigError, match=f"^A batch norm was given .*{words}"):
            function(torch.zeros(shape), norm)


@needs_triton
@pytest.mark.usefixtures("kernels_run")
@pytest.mark.parametrize("missing", ["running_mean", "running_var"])
def test_one_buffer_is_kept_without_the_other(missing: str) -> None:
    shape, kept = (2, 8, 3, 3), {"running_mean", "running_var"} - {missing}
    norm, twin = (
        norm_of(8, 1, seed=1, dtype=dtype)._replace(**{missing: None}) for dtype in (torch.float32, torch.float64)
    )
    fused_norm(image(shape, 2, torch.float32), norm)
    fused_norm(image(shape, 2, torch.float32).double(), twin)
    for name in kept:
        torch.testing.assert_close(getattr(norm, name).double(), getattr(twin, name), rtol=1e-5, atol=1e-5)  # fp32
