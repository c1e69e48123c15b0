"""The loss scale does what torch's GradScaler does, has a floor, and reads its state dicts."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

from bigstep.engine.methods.eager import Eager
from bigstep.engine.observers.watches import LossWatch
from bigstep.engine.precision import Precision
from bigstep.engine.ranks import AgreedError, Ranks
from bigstep.exchange import Exchange
from bigstep.gpu.loss_scale import LossScale


def optimizer_of(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=kind == "fused")


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("kind", ["plain", "fused", "adamw"])
def test_a_run_with_overflows_is_that_of_torch(kind: str, clip: float | None) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(12, 8, 3)
    inputs[4, 0, 0], inputs[5, 3, 1] = float("inf"), float("nan")
    weights, states = [], []
    ours = LossScale(scale=64.0, growth_interval=3)
    theirs = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3)
    for scaler in (ours, theirs):
        torch.manual_seed(1)
        model = nn.Linear(3, 1)
        optimizer = optimizer_of(kind, model)
        for batch in inputs:
            optimizer.zero_grad()
            scaler.scale(model(batch).square().mean()).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
        weights.append([p.detach() for p in model.parameters()])
        states.append(scaler.state_dict())
    assert states[0] == states[1]
    assert states[0]["scale"] == 64.0 * 2 / 4 * 4  # grown after three, halved twice, grown after three, and again
    torch.testing.assert_close(weights[0], weights[1], rtol=0, atol=0)


def test_the_scale_never_falls_below_its_floor() -> None:
    scale = LossScale(scale=8.0, floor=2.0)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    for _ in range(5):
        weight.grad = torch.full((1,), float("nan"))
        scale.step(optimizer)
        scale.update()
    assert (scale.get_scale(), weight.item()) == (2.0, 1.0)


def test_each_reads_the_state_of_the_other() -> None:
    theirs = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=7, growth_factor=1.5, backoff_factor=0.25)
    ours = LossScale()
    state = {**theirs.state_dict(), "_growth_tracker": 5}
    ours.load_state_dict(state)
    assert ours.state_dict() == state
    theirs.load_state_dict(ours.state_dict())
    assert theirs.get_scale() == 256.0


def test_without_a_scale_every_method_does_nothing_more() -> None:
    scale = LossScale(enabled=False)
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scale.scale(weight.sum()).backward()
    scale.step(optimizer)
    scale.update()
    assert (weight.item(), scale.state_dict(), scale.get_scale()) == (0.5, {}, 1.0)
    scale.load_state_dict(LossScale(scale=64.0).state_dict())  # of a run in another precision
    assert scale.get_scale() == 1.0


def test_two_optimizers_share_one_decision() -> None:
    scale = LossScale(scale=4.0)
    good, bad = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in (good, bad)]
    good.grad, bad.grad = torch.ones(1), torch.full((1,), float("inf"))
    for optimizer in optimizers:
        scale.unscale_(optimizer)
    for optimizer in optimizers:
        scale.step(optimizer)
    scale.update()
    assert (good.item(), bad.item(), scale.get_scale()) == (1.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("exchange", "reads"),
    [
        (Exchange("ring", "fp16"), 0),
        (Exchange("torus", "none"), 0),
        (Exchange("gather", "onebit"), 2),
        (Exchange("ring", "none", double_buffer=True), 2),
    ],
    ids=str,
)
def test_an_update_reads_the_scale_only_where_the_exchange_carries_what_is_scaled(
    exchange: Exchange, reads: int
) -> None:
    """On a GPU the host waits for the whole step to read it."""
    weight, scale = nn.Parameter(torch.ones(1)), LossScale(scale=8.0)
    learner = mock.Mock(trained=[weight], optimizer=torch.optim.SGD([weight], lr=1.0, fused=True))
    parallel = mock.Mock(exchange=exchange, counts_of=lambda counts: counts)
    passes = Eager(learner, Ranks(), Precision("float32", "cpu"), scale, parallel)
    weight.grad = torch.tensor([4.0])
    with mock.patch.object(scale, "get_scale", wraps=scale.get_scale) as read:
        passes.update()
    assert weight.item() == 0.5
    assert read.call_count == reads


def test_a_run_whose_steps_are_all_skipped_ends_and_one_that_skips_now_and_then_does_not() -> None:
    def tell(watch: LossWatch, *losses: float) -> None:
        rows = [{"loss": loss, "step": step, "epoch": 1.0, "lr": 0.1} for step, loss in enumerate(losses, 1)]
        watch.flushed(mock.Mock(rows=rows))

    nan = float("nan")
    tell(LossWatch(patience=2), nan, nan, 1.0, nan, nan, 1.0)
    tell(LossWatch(patience=float("inf")), *[nan] * 1000)
    with pytest.raises(AgreedError, match="The loss is nan at step 1 "):
        tell(LossWatch(), nan)
    watch = LossWatch(patience=2)
    tell(watch, 1.0, nan)
    with pytest.raises(
        AgreedError, match=r"The loss is nan at step 2 .*, and was not finite in the 2 steps before; low"
    ):
        tell(watch, nan, nan)
