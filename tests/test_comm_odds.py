"""Other people's models and programs under an exchange: single numbers, complex ones, zeros, groups of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.errors import BigstepError
from bigstep.exchange import Exchange, sum_owed
from worlds import World as Ranks

LOSSY: dict[str, dict[str, Any]] = {
    "onebit": {}, "int8": {}, "topk": {"decay": 1.0}, "powersgd": {}, "exact": {}, "none": {},
}  # fmt: skip


class Odd(nn.Module):
    """A number, a weight without values, complex weights, and a layer that some steps do not reach."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 4))
        self.phases = nn.Parameter(torch.randn(40, 30, dtype=torch.complex128))
        self.layer = nn.Linear(40, 30)
        self.double()

    def forward(self, inputs: Tensor, gate: float) -> Tensor:
        turned = (inputs.to(self.phases.dtype) @ self.phases).abs()
        return ((turned + gate * self.layer(inputs)) * self.factor).square().mean() + self.nothing.sum()


def gates(step: int) -> float:
    return 0.0 if step in (2, 3) else 1.0  # PowerSGD's first coded steps see a layer whose gradient is 0


def inputs_of(rank: int, step: int) -> Tensor:
    return torch.randn(8, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + rank))


def as_reals(tensor: Tensor) -> Tensor:
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def account_of(codec: str, settings: dict[str, Any], spoiled: int = -1) -> tuple[float, bool]:
    """How far what came back and what is owed are from the mean gradients; whether ranks ever had other bits.

    In a spoiled step rank 1 brings NaN into every weight; it counts for nothing.
    """
    model, twin = Odd(), Odd()
    exchange = Exchange(codec=codec, **settings)
    ddp = DistributedDataParallel(model)
    exchange.attach(ddp)
    rank, differ = dist.get_rank(), False
    total = {name: torch.zeros_like(as_reals(each)) for name, each in model.named_parameters()}
    before: Any = None
    for step in range(7):
        spoils = torch.nan if step == spoiled and rank == 1 else 1.0
        (ddp(inputs_of(rank, step), gates(step)) * spoils).backward()
        if step == spoiled:
            assert all(bool(each.grad.isnan().all()) for each in model.parameters() if each.grad is not None)
            after = exchange.state_dict()["carried"]["sent"]
            assert all(torch.equal(after[name], before[name]) for name in before), "what was owed is lost"
        else:
            twin.zero_grad()
            for name, each in model.named_parameters():
                assert each.grad is not None
                total[name] += as_reals(each.grad)
            for other in range(dist.get_world_size()):
                twin(inputs_of(other, step), gates(step)).backward()
            for name, each in twin.named_parameters():
                assert each.grad is not None
                total[name] -= as_reals(each.grad) / dist.get_world_size()
        model.zero_grad()
        before = exchange.state_dict()["carried"]["sent"]
        mine = torch.cat(list(total.values()))
        both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(both, mine)
        differ |= not torch.equal(both[0], both[1])
    states: list[Any] = [exchange.gather_state()]
    dist.broadcast_object_list(states, 0)
    exchange.load_state_dict(states[0])
    owed: dict[str, Any] = sum_owed(states[0])
    exchange.close()
    return max(float((left + owed.get(name, 0)).abs().amax()) for name, left in total.items() if left.numel()), differ


def accounts() -> dict[str, tuple[float, bool]]:
    return {codec: account_of(codec, settings) for codec, settings in LOSSY.items()}


def test_nothing_of_an_odd_model_is_lost_and_ranks_stay_alike(world: Callable[[int], Ranks]) -> None:
    for found in world(2).run(accounts):
        for codec, (off, differ) in found.items():
            assert not differ, codec
            assert off < (1e-12 if codec in ("none", "exact", "powersgd") else 1e-6), codec  # heads are float32


def spoiled_powersgd() -> tuple[float, bool]:
    return account_of("powersgd", {}, spoiled=5)


def test_a_step_of_nan_reaches_all_ranks_and_leaves_what_powersgd_carries(world: Callable[[int], Ranks]) -> None:
    for off, differ in world(2).run(spoiled_powersgd):
        # what the spoiled step carried in is still owed, and the steps behind it deliver
        assert off < 1e-12
        assert not differ


def join_behind_other_groups() -> list[float]:
    """A program whose ranks are in different numbers of groups; `new_group` is called by all, as torch asks."""
    own = dist.new_group([0, 1])
    model = nn.Linear(2, 1, bias=False)
    ddp = DistributedDataParallel(model)
    exchange = Exchange("halving", timeout=15).attach(ddp)
    ddp(torch.full((1, 2), float(dist.get_rank()))).sum().backward()
    exchange.close()
    if dist.get_rank() < 2:
        dist.destroy_process_group(own)
    assert model.weight.grad is not None
    return model.weight.grad.flatten().tolist()


def test_ranks_that_are_in_different_numbers_of_groups_can_be_joined(world: Callable[[int], Ranks]) -> None:
    assert world(3).run(join_behind_other_groups) == [[1.0, 1.0]] * 3


def rescaled_while_under_way() -> float:
    """Double the scale of the loss after each step, while a slow rank keeps the exchange under way."""
    model = nn.Linear(64, 64, bias=False)
    ddp = DistributedDataParallel(model)
    exchange = Exchange(codec="onebit", double_buffer=True).attach(ddp)
    rank, scale, left = dist.get_rank(), 1.0, torch.zeros(64, 64)
    for step in range(4):
        wanted = [torch.randn(64, 64, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(2)]
        time.sleep(0.3 * rank)
        (ddp(torch.eye(64)) * wanted[rank].T * scale).sum().backward()
        assert model.weight.grad is not None
        left += (wanted[0] + wanted[1]) / 2 - model.weight.grad / scale
        model.zero_grad()
        exchange.rescale(2.0)
        scale *= 2
    states: list[Any] = [exchange.gather_state()]
    dist.broadcast_object_list(states, 0)
    exchange.close()
    owed: Any = sum_owed(states[0])["weight"]
    return float((left - owed.view(64, 64) / scale).abs().max())


def test_a_new_loss_scale_waits_for_the_exchange_that_double_buffering_has_under_way(
    world: Callable[[int], Ranks],
) -> None:
    assert max(world(2).run(rescaled_while_under_way)) < 1e-5


def misused() -> list[str]:
    """What becomes of a backward behind `close`, of second models, and of sparse gradients."""
    model = nn.Linear(2, 1)
    ddp = DistributedDataParallel(model)
    exchange = Exchange("ring", timeout=10).attach(ddp)

    def closed() -> None:
        exchange.close()
        ddp(torch.ones(1, 2)).sum().backward()

    def another() -> None:
        first, second = (DistributedDataParallel(nn.Linear(2, outputs)) for outputs in (1, 3))
        Exchange("ring", timeout=10).attach(first).attach(second)

    def twin() -> None:
        first, second = (DistributedDataParallel(nn.Linear(2, 1)) for _ in range(2))
        Exchange("ring", timeout=10).attach(first).attach(second)
        first(torch.ones(1, 2)).sum().backward()

    def sparse() -> None:
        Exchange("ring", timeout=10).attach(DistributedDataParallel(nn.Embedding(4, 3, sparse=True)))

    said = []
    for misuse in (closed, another, twin, sparse):
        try:
            misuse()
        except BigstepError as error:
            said.append(str(error))
    return said


def test_what_an_exchange_cannot_do_is_told_in_one_sentence(world: Callable[[int], Ranks]) -> None:
    for said in world(2).run(misused, timeout=30):
        assert len(said) == 4
        expected = ("was closed", "attached to another model", "attached to another model", "is sparse")
        for sentence, words in zip(said, expected, strict=True):
            assert words in sentence
            assert sentence.count(". ") == 0
