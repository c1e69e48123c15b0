"""A saved state of another version or rule: what it lacks is kept, what does not fit is refused in one sentence."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bigstep.errors import ConfigError
from bigstep.optim.adagrad import AdaGradSGD
from bigstep.optim.lamb import LAMB
from bigstep.optim.lars import LARS
from bigstep.optim.multi_tensor import MultiTensorOptimizer
from bigstep.optim.muon import Muon
from bigstep.optim.rmsprop_warmup import RMSpropWarmup, rmsprop_warmup

RULES: dict[str, Callable[[Any], MultiTensorOptimizer]] = {
    "muon": lambda params: Muon(params, lr=0.1, rest="sgd", momentum=0.8),
    "lars": lambda params: LARS(params, lr=0.1, momentum=0.8),
    "lamb": lambda params: LAMB(params, lr=0.1, betas=(0.8, 0.9)),
    "rmsprop": lambda params: RMSpropWarmup(params, lr=0.1, momentum=0.8),
    "adagrad": lambda params: AdaGradSGD(params, lr=0.1, momentum=0.8),
}


def weights() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]


def take_steps(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], count: int) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", RULES)
def test_settings_that_a_saved_state_lacks_keep_their_values(name: str) -> None:
    params = weights()
    optimizer = RULES[name](params)
    take_steps(optimizer, params, 2)
    state = copy.deepcopy(optimizer.state_dict())
    for setting in set(optimizer.defaults) - {"lr"}:
        del state["param_groups"][0][setting]
    others = [nn.Parameter(param.detach().clone()) for param in params]
    other = RULES[name](others)
    other.load_state_dict(state)
    for either, its in ((optimizer, params), (other, others)):
        take_steps(either, its, 2)
    assert all(torch.equal(one, two) for one, two in zip(params, others, strict=True))


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [("muon", "rest", "lion"), ("muon", "kind", ["matrix"]), ("lars", "momentum", 1.5), ("lamb", "betas", 0.9)],
)
def test_a_saved_setting_that_does_not_fit_is_refused_and_leaves_the_rule_as_it_was(
    name: str, setting: str, value: Any
) -> None:
    params = weights()
    optimizer = RULES[name](params)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0][setting] = value
    before = optimizer.param_groups[0][setting]
    with pytest.raises(ConfigError, match=rf"given {setting}=.*\.$"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0][setting] == before
    take_steps(optimizer, params, 1)


def test_a_state_whose_rate_has_come_to_0_is_loaded() -> None:
    for make in RULES.values():
        params = weights()
        optimizer = make(params)
        optimizer.param_groups[0]["lr"] = 0.0
        take_steps(optimizer, params, 1)
        other = make(weights())
        other.load_state_dict(optimizer.state_dict())
        assert other.param_groups[0]["lr"] == 0


def test_muon_goes_on_from_the_velocity_of_torchs_sgd() -> None:
    params = weights()
    sgd = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    take_steps(sgd, params, 2)
    muon = RULES["muon"](params)
    muon.load_state_dict(sgd.state_dict())
    assert torch.equal(muon.state[params[0]]["momentum_buffer"], sgd.state[params[0]]["momentum_buffer"])
    take_steps(muon, params, 1)


def test_another_number_of_groups_is_told_by_torch() -> None:
    params = weights()
    state = Muon([{"params": params[:1]}, {"params": params[1:]}], lr=0.1).state_dict()
    with pytest.raises(ValueError, match="different number of parameter groups"):
        Muon(params, lr=0.1).load_state_dict(state)


@pytest.mark.parametrize("blend", [1.0, 0.5, torch.tensor(1.0), torch.tensor(0.5)])
def test_rmsprop_warmup_does_not_move_at_a_rate_of_0_from_the_device(blend: float | Tensor) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    before, grads, deltas = weight.clone(), [torch.ones_like(weight)], [torch.zeros_like(weight)]
    settings = {"momentum": 0.9, "rms_decay": 0.9, "rms_lr": 0.01, "eps": 0.0, "weight_decay": 0.0}
    rmsprop_warmup([weight], grads, deltas, [weight.abs()], lr=torch.tensor(0.0), blend=blend, **settings)
    assert torch.equal(weight, before)
    assert torch.equal(deltas[0], torch.full_like(weight, -float(blend)))  # the part of SGD alone
