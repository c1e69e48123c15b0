"""LARS and the RMSprop warm-up: equal to their equations, to each other's loops, and to themselves after a reload."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bigstep.errors import ConfigError
from bigstep.gpu.lamb import LambSettings, lamb_twin
from bigstep.gpu.lars import LarsSettings, lars_twin
from bigstep.optim import LAMB, LARS, AdaGradSGD, Muon, RMSpropWarmup
from bigstep.optim.lamb import lamb
from bigstep.optim.lars import lars
from bigstep.optim.rmsprop_warmup import rmsprop_warmup, rmsprop_warmup_reference

SHAPES = [(4, 3, 3, 3), (10, 7), (5,), (1, 1), ()]


def tensors(seed: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype) for shape in SHAPES]


def parameters(dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[nn.Parameter]:
    return [nn.Parameter(tensor) for tensor in tensors(0, dtype, device)]


def take_step(optimizer: Optimizer, params: list[nn.Parameter], seed: int) -> None:
    for param, grad in zip(params, tensors(seed, params[0].dtype, params[0].device.type), strict=True):
        param.grad = grad
    optimizer.step()


def make_lars(params: Any, **settings: Any) -> LARS:
    return LARS(params, lr=0.7, weight_decay=0.01, trust_coefficient=0.02, **settings)


def make_rmsprop(params: Any) -> RMSpropWarmup:
    optimizer = RMSpropWarmup(params, lr=0.7, rms_lr=0.01, weight_decay=0.01)
    for group in optimizer.param_groups:
        group["blend"] = 0.3
    return optimizer


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "lars": make_lars,
    "lars_nesterov": lambda params: make_lars(params, nesterov=True),
    "rmsprop_warmup": make_rmsprop,
    "lamb": lambda params: LAMB(params, lr=0.7, weight_decay=0.01),
    "muon": lambda params: Muon(params, lr=0.7, weight_decay=0.01),
    "muon_sgd": lambda params: Muon(params, lr=0.7, weight_decay=0.01, rest="sgd", renormalise=True),
}


def test_lars_is_algorithm_1_of_the_paper() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, -4.0]], dtype=torch.float64))
    optimizer = LARS([weight], lr=2.0, momentum=0.9, weight_decay=0.1, trust_coefficient=0.5, eps=0.0)
    w, v = [3.0, -4.0], [0.0, 0.0]
    for g in ([6.0, 8.0], [1.0, -2.0], [0.3, 0.4]):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        norm_w, norm_g = (w[0] ** 2 + w[1] ** 2) ** 0.5, (g[0] ** 2 + g[1] ** 2) ** 0.5
        local = 0.5 * norm_w / (norm_g + 0.1 * norm_w)
        v = [0.9 * v_i + 2.0 * local * (g_i + 0.1 * w_i) for v_i, g_i, w_i in zip(v, g, w, strict=True)]
        w = [w_i - v_i for w_i, v_i in zip(w, v, strict=True)]
        assert weight.tolist()[0] == pytest.approx(w, rel=1e-12)  # float64 in another order of operations


def test_lars_carries_the_rate_inside_the_velocity() -> None:
    """After the rate drops to 0 the old velocity still moves the weights, as in the paper and unlike torch's SGD."""
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([weight], lr=1.0, trust_coefficient=0.1)
    weight.grad = torch.ones(2, 2)
    optimizer.step()
    first = 1 - weight.detach()
    optimizer.param_groups[0]["lr"] = 0.0
    before = weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(before - weight.detach(), 0.9 * first)


def test_lars_takes_the_plain_rate_where_a_norm_is_zero() -> None:
    zero_weight, zero_grad = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = LARS([zero_weight, zero_grad], lr=0.5, weight_decay=0.1, eps=0.0)
    zero_weight.grad, zero_grad.grad = torch.full((2, 2), 3.0), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(zero_weight.detach(), torch.full((2, 2), -1.5))
    torch.testing.assert_close(zero_grad.detach(), torch.full((2, 2), 1 - 0.5 * 0.1))


@pytest.mark.parametrize("nesterov", [False, True])
def test_lars_without_adaptation_is_momentum_sgd_at_a_constant_rate(nesterov: bool) -> None:
    ours, theirs = parameters(), parameters()
    optimizer = make_lars([{"params": ours, "adapt": False}], nesterov=nesterov)
    sgd = torch.optim.SGD(theirs, lr=0.7, momentum=0.9, weight_decay=0.01, nesterov=nesterov)
    for step in range(1, 5):
        take_step(optimizer, ours, step)
        take_step(sgd, theirs, step)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # the rate is multiplied in at another place


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_lars_together_equals_lars_one_by_one(
    adapt: bool, nesterov: bool, dtype: torch.dtype, tolerance: float
) -> None:
    settings = {"weight_decay": 0.01, "trust_coefficient": 0.02, "eps": 1e-9, "adapt": adapt}
    each, lr = [LarsSettings(**settings)] * len(SHAPES), torch.tensor([0.7], dtype=dtype)
    together, one_by_one = (tensors(0, dtype), tensors(9, dtype)), (tensors(0, dtype), tensors(9, dtype))
    for step in range(1, 5):
        grads = tensors(step, dtype)
        grads[1].zero_()
        lars(together[0], grads, together[1], lr=0.7, momentum=0.9, nesterov=nesterov, **settings)
        lars_twin(one_by_one[0], grads, one_by_one[1], each, lr=lr, momentum=0.9, nesterov=nesterov)
    torch.testing.assert_close(together, one_by_one, rtol=tolerance, atol=tolerance)  # order of roundings


def test_lamb_is_algorithm_2_of_the_paper() -> None:
    weight = nn.Parameter(torch.tensor([[3.0, -4.0]], dtype=torch.float64))
    optimizer = LAMB([weight], lr=0.2, betas=(0.8, 0.9), eps=0.01, weight_decay=0.1)
    w, m, v = [3.0, -4.0], [0.0, 0.0], [0.0, 0.0]
    for t, g in enumerate(([6.0, 8.0], [1.0, -2.0], [0.3, 0.4]), start=1):
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        m = [0.8 * m_i + 0.2 * g_i for m_i, g_i in zip(m, g, strict=True)]
        v = [0.9 * v_i + 0.1 * g_i**2 for v_i, g_i in zip(v, g, strict=True)]
        hats = [(m_i / (1 - 0.8**t), v_i / (1 - 0.9**t)) for m_i, v_i in zip(m, v, strict=True)]
        u = [m_hat / (v_hat**0.5 + 0.01) + 0.1 * w_i for (m_hat, v_hat), w_i in zip(hats, w, strict=True)]
        norm_w, norm_u = (w[0] ** 2 + w[1] ** 2) ** 0.5, (u[0] ** 2 + u[1] ** 2) ** 0.5
        w = [w_i - 0.2 * norm_w / norm_u * u_i for w_i, u_i in zip(w, u, strict=True)]
        assert weight.tolist()[0] == pytest.approx(w, rel=1e-12)  # float64 in another order of operations


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_lamb_together_equals_lamb_one_by_one(adapt: bool, dtype: torch.dtype, tolerance: float) -> None:
    settings = {"weight_decay": 0.01, "betas": (0.9, 0.99), "eps": 1e-6, "adapt": adapt}
    each, lr = [LambSettings(**settings)] * len(SHAPES), torch.tensor([0.1], dtype=dtype)

    def state() -> list[list[Tensor]]:
        squares, steps = [t.square() for t in tensors(8, dtype)], [torch.zeros((), dtype=dtype) for _ in SHAPES]
        return [tensors(0, dtype), tensors(9, dtype), squares, steps]

    together, one_by_one = state(), state()
    for step in range(1, 5):
        grads = tensors(step, dtype)
        grads[1].zero_()
        lamb(together[0], grads, *together[1:], lr=0.1, **settings)
        lamb_twin(one_by_one[0], grads, *one_by_one[1:], each, lr=lr)
    torch.testing.assert_close(together, one_by_one, rtol=tolerance, atol=tolerance)  # order of roundings


def test_lamb_takes_a_gradient_whose_memory_has_another_order() -> None:
    """A kernel that goes by address would take it for the transposed one."""
    ended = []
    for transposed in (False, True):
        weight = torch.nn.Parameter(torch.arange(6.0).view(2, 3) + 1)
        gradient = torch.arange(6.0).view(2, 3) - 2
        weight.grad = gradient.t().contiguous().t() if transposed else gradient
        optimizer = LAMB([weight], lr=0.1)
        for _ in range(3):
            optimizer.step()
        ended.append(weight.detach())
    assert torch.equal(*ended)


def test_lamb_without_adaptation_is_adamw() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = LAMB([{"params": ours, "adapt": False}], lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    adamw = torch.optim.AdamW(theirs, lr=0.05, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    for step in range(1, 6):
        take_step(optimizer, ours, step)
        take_step(adamw, theirs, step)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)  # another order of roundings


def test_lamb_takes_the_plain_rate_where_a_norm_is_zero() -> None:
    zero_weight, zero_grad = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = LAMB([zero_weight, zero_grad], lr=0.5)
    zero_weight.grad, zero_grad.grad = torch.full((2, 2), 3.0), torch.zeros(2, 2)
    optimizer.step()
    torch.testing.assert_close(zero_weight.detach(), torch.full((2, 2), -0.5))
    torch.testing.assert_close(zero_grad.detach(), torch.ones(2, 2))


@pytest.mark.parametrize("blend", [0.0, 0.3, 1.0, torch.tensor(0.3, dtype=torch.float64)])
def test_rmsprop_warmup_together_equals_one_by_one(blend: float | Tensor) -> None:
    settings = {"lr": 0.7, "momentum": 0.9, "rms_decay": 0.9, "rms_lr": 0.01, "eps": 1e-8, "weight_decay": 0.01}
    together, one_by_one = [tensors(0), tensors(9), tensors(8)], [tensors(0), tensors(9), tensors(8)]
    for state in (together, one_by_one):
        state[2] = [tensor.abs() for tensor in state[2]]
    for step in range(1, 5):
        grads = tensors(step)
        rmsprop_warmup(together[0], grads, together[1], together[2], blend=blend, **settings)
        rmsprop_warmup_reference(one_by_one[0], grads, one_by_one[1], one_by_one[2], blend=blend, **settings)
    torch.testing.assert_close(together, one_by_one, rtol=1e-12, atol=1e-12)  # order of roundings


def test_rmsprop_warmup_follows_the_equations_of_the_paper() -> None:
    weight = nn.Parameter(torch.tensor([2.0], dtype=torch.float64))
    optimizer = RMSpropWarmup([weight], lr=0.5, momentum=0.8, rms_decay=0.9, rms_lr=0.02, eps=0.1)
    theta, delta, m = 2.0, 0.0, 0.0
    for g, a_sgd in ((3.0, 0.1), (-1.0, 0.5), (0.5, 1.0)):
        optimizer.param_groups[0]["blend"] = a_sgd
        weight.grad = torch.tensor([g], dtype=torch.float64)
        optimizer.step()
        m = 0.9 * m + 0.1 * g**2
        a_rms = (1 - a_sgd) * 0.02 / 0.5
        delta = 0.8 * delta - (a_sgd + a_rms / (m**0.5 + 0.1)) * g
        theta += 0.5 * delta
        assert weight.item() == pytest.approx(theta, rel=1e-12)


def test_rmsprop_warmup_at_blend_1_is_momentum_sgd_and_that_is_the_default() -> None:
    ours, theirs = parameters(), parameters()
    optimizer = RMSpropWarmup(ours, lr=0.3, weight_decay=0.01)
    sgd = torch.optim.SGD(theirs, lr=0.3, momentum=0.9, weight_decay=0.01)
    for step in range(1, 5):
        for either in (optimizer, sgd):  # a schedule may end at zero
            either.param_groups[0]["lr"] = 0.4 - 0.1 * step
        take_step(optimizer, ours, step)
        take_step(sgd, theirs, step)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_rmsprop_warmup_at_blend_0_does_not_depend_on_lr() -> None:
    ends = []
    for lr in (0.1, 12.8):
        params = parameters()
        optimizer = RMSpropWarmup(params, lr=lr)
        optimizer.param_groups[0]["blend"] = 0.0
        for step in range(1, 4):
            take_step(optimizer, params, step)
        ends.append(params)
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradients_are_left_as_they_are(name: str) -> None:
    params = parameters()
    take_step(OPTIMIZERS[name](params), params, seed=1)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(params, tensors(1), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_reload_goes_on_along_exactly_the_same_path(name: str) -> None:
    params = parameters(torch.float32)
    optimizer = OPTIMIZERS[name]([{"params": params[:2]}, {"params": params[2:]}])
    for step in range(1, 4):
        take_step(optimizer, params, step)
    file = io.BytesIO()
    torch.save((optimizer.state_dict(), [param.data for param in params]), file)
    file.seek(0)
    state, values = torch.load(file, weights_only=True)
    others = [nn.Parameter(value) for value in values]
    other = type(optimizer)([{"params": others[:2]}, {"params": others[2:]}], lr=99.0)
    other.load_state_dict(state)
    for step in range(4, 7):
        take_step(optimizer, params, step)
        take_step(other, others, step)
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lr_may_be_a_tensor_that_is_changed_in_place(name: str) -> None:
    by_number, by_tensor = parameters(), parameters()
    one, two = OPTIMIZERS[name](by_number), OPTIMIZERS[name](by_tensor)
    two.param_groups[0]["lr"] = rate = torch.tensor(0.7, dtype=torch.float64)
    for step in range(1, 4):
        one.param_groups[0]["lr"] = 0.7 / step
        rate.fill_(0.7 / step)
        take_step(one, by_number, step)
        take_step(two, by_tensor, step)
    torch.testing.assert_close(by_number, by_tensor, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_gradient_are_skipped_and_sparse_gradients_count_like_dense_ones(name: str) -> None:
    unused, ends = nn.Parameter(torch.ones(3, 3)), []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(6, 3, sparse=sparse)
        optimizer = OPTIMIZERS[name]([table.weight, unused])
        for _ in range(2):
            optimizer.zero_grad()
            table(torch.tensor([1, 1, 4])).square().sum().backward()  # a row twice: its parts must be summed first
            assert table.weight.grad.is_sparse == sparse
            optimizer.step()
        ends.append(table.weight.detach())
    torch.testing.assert_close(*ends)
    assert torch.equal(unused, torch.ones(3, 3))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closure_is_run_with_gradients_on_and_its_loss_returned(name: str) -> None:
    weight = nn.Parameter(torch.tensor([[1.0, 2.0]]))
    optimizer = OPTIMIZERS[name]([weight])

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = weight.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 5.0
    assert float(closure().detach()) < 5.0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_precisions_may_be_mixed_in_one_group(name: str) -> None:
    mixed = [*parameters(torch.float32), *parameters(torch.float64)]
    alone = copy.deepcopy(mixed)
    optimizer, singly = OPTIMIZERS[name](mixed), [OPTIMIZERS[name]([param]) for param in alone]
    for param, twin in zip(mixed, alone, strict=True):
        param.grad, twin.grad = torch.ones_like(param), torch.ones_like(twin)
    optimizer.step()
    for single in singly:
        single.step()
    torch.testing.assert_close(mixed, alone)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
@pytest.mark.parametrize("tensor_lr", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gpu_takes_the_path_of_the_cpu_and_is_never_waited_for(name: str, tensor_lr: bool) -> None:
    here, there = parameters(torch.float64), parameters(torch.float64, "cuda")
    one, two = OPTIMIZERS[name](here), OPTIMIZERS[name](there)
    if tensor_lr:
        two.param_groups[0]["lr"] = torch.tensor(0.7, device="cuda")
    for step in range(1, 4):
        take_step(one, here, step)
        for param, grad in zip(there, tensors(step), strict=True):
            param.grad = grad.to("cuda")
        torch.cuda.set_sync_debug_mode("error")
        try:
            two.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    # float32 where the rate is a float32 tensor
    tolerance = 1e-6 if tensor_lr else 1e-12
    torch.testing.assert_close([p.cpu() for p in there], [p.detach() for p in here], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    "mistake",
    [
        lambda p: LARS(p, lr=-1),
        lambda p: LARS(p, lr=0.1, momentum=1.0),
        lambda p: LARS(p, lr=0.1, trust_coefficient=0.0),
        lambda p: LARS(p, lr=0.1, trust_coefficient="large"),
        lambda p: LARS(p, lr=0.1, trust_coefficient=float("inf")),
        lambda p: LARS(p, lr=0.1, eps=-1.0),
        lambda p: LARS(p, lr=0.1, momentum=0.0, nesterov=True),
        lambda p: LAMB(p, lr=-0.1),
        lambda p: LAMB(p, lr=0.1, betas=(0.9, 1.0)),
        lambda p: LAMB(p, lr=0.1, betas=(0.9,)),
        lambda p: LAMB(p, lr=0.1, eps=-1e-6),
        lambda p: RMSpropWarmup(p, lr=0.0),
        lambda p: RMSpropWarmup(p, lr=0.1, rms_decay=1.0),
        lambda p: RMSpropWarmup(p, lr=0.1, rms_lr=-1.0),
        lambda p: LARS(p, lr=float("nan")),
        lambda p: LARS([{"params": p, "momentum": 1.5}], lr=0.1),
        lambda p: LARS([{"params": p, "trust_coefficient": -1.0}], lr=0.1),
        lambda p: LAMB([{"params": p, "betas": (0.9, 1.1)}], lr=0.1),
        lambda p: LAMB([{"params": p, "lr": -1.0}], lr=0.1),
        lambda p: LAMB(p, lr=torch.ones(2)),
        lambda p: LAMB([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))], lr=0.1),
        lambda p: RMSpropWarmup([{"params": p, "lr": 0.0}], lr=0.1),
        lambda p: AdaGradSGD([{"params": p, "weight_decay": -1.0}], lr=0.1),
        lambda p: AdaGradSGD(p, lr="fast"),
    ],
)
def test_settings_out_of_range_are_refused_in_one_sentence(mistake: Callable[[Any], Optimizer]) -> None:
    with pytest.raises(ConfigError, match=r"given .*\.$"):
        mistake(parameters())


def test_a_rate_of_zero_while_rmsprop_has_weight_is_told() -> None:
    params = parameters()
    optimizer = RMSpropWarmup(params, lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: float(epoch))  # a warm-up that begins at 0
    optimizer.param_groups[0]["blend"] = 0.5
    with pytest.raises(ConfigError, match="divides by lr, which is 0 at blend=0.5"):
        take_step(optimizer, params, 1)
