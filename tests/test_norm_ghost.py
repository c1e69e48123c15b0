"""Ghost batch norm equals one batch norm per worker, forward and backward, in every memory format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.norm import GhostBatchNorm2d, ghost_batch_norm, set_workers
from bigstep.norm.ghost import normalize_by_worker

FORMATS = [torch.contiguous_format, torch.channels_last]


def images(workers: int, n: int, channels: int = 4, size: tuple[int, int] = (5, 3)) -> Tensor:
    generator = torch.Generator().manual_seed(workers)
    x = torch.randn(workers, n, channels, *size, generator=generator, dtype=torch.float64)
    scale = torch.arange(1.0, workers + 1, dtype=torch.float64).reshape(workers, 1, 1, 1, 1)
    return (x * scale + scale).flatten(0, 1)  # every worker has statistics of its own


def pair(workers: int, **settings: object) -> tuple[nn.BatchNorm2d, GhostBatchNorm2d]:
    plain = nn.BatchNorm2d(4, **settings).double()
    if plain.affine:
        nn.init.normal_(plain.weight, generator=torch.Generator().manual_seed(1))
        nn.init.normal_(plain.bias, generator=torch.Generator().manual_seed(2))
    ghost = GhostBatchNorm2d(4, workers, **settings).double()
    ghost.load_state_dict(plain.state_dict())
    return plain, ghost


@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize(("workers", "n"), [(1, 6), (2, 3), (3, 1), (6, 2)])
@pytest.mark.parametrize("affine", [True, False])
def test_one_forward_equals_one_forward_per_worker(
    memory_format: torch.memory_format, workers: int, n: int, affine: bool
) -> None:
    plain, ghost = pair(workers, affine=affine)
    x = images(workers, n).to(memory_format=memory_format)
    together, apart = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = ghost(together)
    separate = torch.cat([plain(part) for part in apart.chunk(workers)])
    torch.testing.assert_close(y, separate, rtol=1e-12, atol=1e-12)  # float64, order of sums
    upstream = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(3))
    y.backward(upstream)
    separate.backward(upstream)
    torch.testing.assert_close(together.grad, apart.grad, rtol=1e-11, atol=1e-11)
    for ours, theirs in zip(ghost.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("memory_format", FORMATS)
def test_the_memory_format_is_kept(memory_format: torch.memory_format) -> None:
    _, ghost = pair(2)
    x = images(2, 3).to(memory_format=memory_format).requires_grad_()
    y = ghost(x)
    assert y.is_contiguous(memory_format=memory_format)
    (grad,) = torch.autograd.grad(y.square().sum(), x)
    assert grad.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("momentum", [0.1, 1.0, None])
def test_running_statistics_take_the_mean_over_workers(momentum: float | None) -> None:
    _, ghost = pair(3, momentum=momentum)
    mean, variance = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    for step in (1, 2):
        x = images(3, 2) * step
        ghost(x)
        own = x.unflatten(0, (3, 2))
        factor = 1 / step if momentum is None else momentum
        mean = (1 - factor) * mean + factor * own.mean((1, 3, 4)).mean(0)
        variance = (1 - factor) * variance + factor * own.var((1, 3, 4)).mean(0)
    torch.testing.assert_close(ghost.running_mean, mean, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ghost.running_var, variance, rtol=1e-12, atol=1e-12)
    assert ghost.num_batches_tracked == 2


def test_evaluation_is_that_of_plain_batch_norm_for_any_number_of_samples() -> None:
    plain, ghost = pair(4)
    x = images(1, 7)
    assert torch.equal(ghost.eval()(x), plain.eval()(x))
    assert list(ghost.state_dict()) == list(plain.state_dict())


def test_without_running_statistics_none_are_kept() -> None:
    plain, ghost = pair(2, track_running_stats=False)
    x = images(2, 3)
    torch.testing.assert_close(ghost(x), torch.cat([plain(part) for part in x.chunk(2)]), rtol=1e-12, atol=1e-12)
    assert ghost.running_mean is None


@pytest.mark.parametrize("memory_format", FORMATS)
def test_gradients_are_those_of_finite_differences(memory_format: torch.memory_format) -> None:
    x = images(2, 2, channels=2, size=(2, 1)).to(memory_format=memory_format).requires_grad_()
    weight = torch.tensor([0.7, -1.2], dtype=torch.float64, requires_grad=True)
    bias = torch.tensor([0.1, 0.4], dtype=torch.float64, requires_grad=True)
    arguments = (x, weight, bias)
    assert torch.autograd.gradcheck(lambda x, w, b: normalize_by_worker(x, 2, w, b, 1e-3)[0], arguments)
    assert torch.autograd.gradgradcheck(lambda x, w, b: normalize_by_worker(x, 2, w, b, 1e-3)[0], arguments)


@pytest.mark.parametrize("affine", [True, False])
def test_half_precision_activations_keep_float32_statistics(affine: bool) -> None:
    ghost = GhostBatchNorm2d(4, 2, affine=affine, momentum=1.0)
    x = images(2, 3).to(torch.bfloat16)
    assert ghost(x).dtype == torch.bfloat16
    expected = x.double().unflatten(0, (2, 3)).mean((1, 3, 4)).mean(0)
    torch.testing.assert_close(ghost.running_mean.double(), expected, rtol=1e-5, atol=1e-5)  # sums in float32


def test_a_converted_model_keeps_its_parameters_and_equals_the_plain_one_per_worker() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.BatchNorm2d(6)).double()
    x = images(3, 2)
    separate = torch.cat([model(part) for part in x.chunk(3)])
    before = list(model.parameters())
    assert ghost_batch_norm(model, 3) is model
    assert all(one is two for one, two in zip(before, model.parameters(), strict=True))
    torch.testing.assert_close(model(x), separate, rtol=1e-12, atol=1e-12)
    assert set_workers(model, 2) == 2
    assert [model[1].workers, model[3].workers] == [2, 2]


class Activated(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4), nn.SyncBatchNorm(4), Activated(4)])
def test_norms_that_would_mix_workers_are_refused_and_nothing_is_changed(norm: nn.Module) -> None:
    model = nn.Sequential(nn.BatchNorm2d(4), norm)
    with pytest.raises(ConfigError, match=f"1 is a {type(norm).__name__}"):
        ghost_batch_norm(model, 2)
    assert type(model[0]) is nn.BatchNorm2d


def test_a_batch_that_cannot_be_divided_is_refused() -> None:
    with pytest.raises(ConfigError, match="5 samples cannot be split evenly among 2 workers"):
        GhostBatchNorm2d(4, 2)(torch.randn(5, 4, 2, 2))
    with pytest.raises(ConfigError, match="0 workers"):
        set_workers(GhostBatchNorm2d(4), 0)


@pytest.mark.gpu
@pytest.mark.parametrize("memory_format", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpu_normalises_like_the_cpu_in_float64(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    _, ghost = pair(3)
    x = images(3, 8).to(dtype).to(memory_format=memory_format)
    expected = ghost(x.double())
    there = GhostBatchNorm2d(4, 3).cuda()
    there.load_state_dict(pair(3)[0].state_dict())
    y = there(x.cuda())
    assert y.dtype == dtype
    assert y.is_contiguous(memory_format=memory_format)
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]  # one rounding of the output
    torch.testing.assert_close(y.double().cpu(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(there.running_var.double().cpu(), ghost.running_var, rtol=1e-5, atol=1e-5)
