"""What the exchange carries: conserved over steps, through checkpoints, and over a change of the number of ranks."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigstep.engine.checkpoint import load_checkpoint
from bigstep.errors import ConfigError, RunError
from bigstep.exchange import Exchange, sum_owed
from bigstep.exchange.residuals import Residuals
from bigstep.models import build_model
from bigstep.tables.codecs import encoded_bytes
from bigstep.tables.collectives import collective_traffic
from test_comm_hook import BUCKET_MB, batch_of, largest_difference, make_model, train
from worlds import Pool
from worlds import World as Ranks

DATA = Path(__file__).parent / "data" / "v0.1"

CODECS: dict[str, dict[str, Any]] = {
    "none": {"collective": "torus"},
    "fp16": {"collective": "ring", "codec": "fp16"},
    "onebit": {"collective": "gather", "codec": "onebit", "warmup_steps": 2},
    "onebit, double buffer": {"collective": "gather", "codec": "onebit", "double_buffer": True},
    "exact": {"collective": "halving", "codec": "exact"},
    "int8": {"codec": "int8", "warmup_steps": 1},
    "int4": {"codec": "int4", "double_buffer": True},
    "topk": {"codec": "topk", "keep": 100},
    "powersgd": {"codec": "powersgd", "rank": 1},
}


def saved(state: Any) -> Any:
    """Through a file, as a checkpoint would go, read without running any code in it."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def resume_every_codec() -> dict[str, float]:
    differences = {}
    for name, settings in CODECS.items():
        whole = Exchange(**settings)
        expected = train(whole, 8)
        first = Exchange(**settings)
        model = make_model()
        train(first, 5, model=model)
        states = [saved(first.gather_state())]
        dist.broadcast_object_list(states, 0)
        second = Exchange(**settings)
        second.load_state_dict(states[0])
        differences[name] = largest_difference(train(second, 3, start=5, model=model), expected)
        for exchange in (whole, first, second):
            exchange.close()
    return differences


def test_resuming_takes_the_same_path_with_every_codec(world: Callable[[int], Ranks]) -> None:
    """Two ranks: a sum of two has no order, so the path is the same to the bit although DDP's buckets differ."""
    for differences in world(2).run(resume_every_codec):
        # PowerSGD's matrix products round by where in memory the bucket lies
        assert differences.pop("powersgd") <= 1e-7
        assert differences == dict.fromkeys([codec for codec in CODECS if codec != "powersgd"], 0.0)


def gradients(rank: int, step: int, model: torch.nn.Module) -> list[Tensor]:
    generator = torch.Generator().manual_seed(31 * step + rank)
    return [torch.randn(p.shape, generator=generator) for p in model.parameters()]


def exchange_known_gradients(exchange: Exchange, steps: Iterable[int]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums over steps, in float64, of what this rank put in and of what came back, by parameter."""
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    exchange.attach(ddp)
    names = [name for name, _ in model.named_parameters()]
    put_in = {name: torch.zeros(p.shape, dtype=torch.float64) for name, p in model.named_parameters()}
    came_back = {name: total.clone() for name, total in put_in.items()}
    for step in steps:
        ddp.zero_grad()
        known = gradients(dist.get_rank(), step, model)
        outputs = ddp(batch_of(0, 0)).sum() * 0  # DDP wants a forward
        loss = outputs + sum((p * g).sum() for p, g in zip(model.parameters(), known, strict=True))
        loss.backward()
        for name, p, g in zip(names, model.parameters(), known, strict=True):
            assert p.grad is not None
            put_in[name] += g
            came_back[name] += p.grad
    return put_in, came_back


def onebit_over_steps(steps: int) -> tuple[dict[str, Tensor], dict[str, Tensor], Any, float, list[Any]]:
    exchange = Exchange("gather", "onebit")
    put_in, came_back = exchange_known_gradients(exchange, range(steps))
    state = exchange.gather_state()
    exchange.close()
    shapes = [p.shape for p in make_model().parameters()]
    return put_in, came_back, state, exchange.bytes_sent, shapes


def owed(state: Any) -> dict[str, Tensor]:
    """What the model has not yet got of the mean gradients: the owners' residuals plus the mean of the ranks'."""
    by_rank = list(state["carried"]["sent_by_rank"].values())
    owners = state["carried"]["owned_by_all"]
    return {n: sum(s[n].double() for s in by_rank) / len(by_rank) + owners[n].double() for n in owners}


def carry_on(state: Any) -> tuple[Any, dict[str, Tensor], dict[str, Tensor], Any]:
    exchange = Exchange("gather", "onebit")
    exchange.load_state_dict(state)
    exchange.attach(DistributedDataParallel(make_model()))
    loaded = exchange.gather_state()
    put_in, came_back = exchange_known_gradients(exchange, range(20, 25))
    after = exchange.gather_state()
    exchange.close()
    return loaded, put_in, came_back, after


def mean_of(sums: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(one[name] for one in sums) / len(sums) for name in sums[0]}


def test_onebit_owes_exactly_what_it_has_not_delivered_also_on_other_numbers_of_ranks(
    world: Callable[[int], Ranks],
) -> None:
    """sum of results + owners' residuals + mean of ranks' residuals = sum of mean gradients; 3, then 2, 4, 3 ranks."""
    results = world(3).run(onebit_over_steps, 20)
    state = results[0][2]
    assert all(result[2] is None for result in results[1:])
    came_back, put_in = results[0][1], mean_of([result[0] for result in results])
    assert all(torch.equal(results[1][1][name], total) for name, total in came_back.items()), "all ranks got the same"
    for name, total in put_in.items():
        missing = owed(state)[name].view_as(total)
        # float32 roundings of values of order 10 in 20 steps, at four places each
        assert float((came_back[name] + missing - total).abs().max()) <= 20 * 4 * 2**-24 * 16
        assert float(missing.abs().max()) > 0.1

    shapes, sent = results[0][4], results[0][3]
    expected = 20 * collective_traffic("gather", encoded_bytes("onebit", shapes), 3).bytes_sent
    # each of 6 parameters may give one owner a block (of at most 600 values) more than the others, in both rounds
    assert expected <= sent <= expected + 20 * 2 * 2 * 6 * (600 / 8 + 8 + 4)

    for size in (2, 4, 3):
        after = world(size).run(carry_on, state)
        loaded, _, delivered, state_after = after[0]
        for name, before in owed(state).items():
            torch.testing.assert_close(owed(loaded)[name], before, rtol=1e-6, atol=1e-6)
            new = mean_of([result[1] for result in after])[name]
            balance = before.view_as(new) + new - delivered[name] - owed(state_after)[name].view_as(new)
            assert float(balance.abs().max()) <= 6 * 4 * 2**-24 * 16
        if size == 3:
            assert all(
                torch.equal(loaded["carried"]["sent_by_rank"][r][n], state["carried"]["sent_by_rank"][r][n])
                for r in "012"
                for n in put_in
            ), "the same number of ranks: each takes its own"


def load_version_0_1(state: Any) -> Any:
    exchange = Exchange(codec="onebit")
    exchange.load_state_dict(state)
    exchange.attach(DistributedDataParallel(_Net()))
    loaded = exchange.gather_state()
    exchange.close()
    return loaded


class _Net(torch.nn.Module):
    """The network of the saved run, under the name that it had inside its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = build_model("small", classes=10, channels=1, image_size=28)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)


def test_residuals_of_version_0_1_are_taken_over_by_any_number_of_ranks(world: Callable[[int], Ranks]) -> None:
    checkpoint = load_checkpoint(DATA / "onebit" / "checkpoints" / "step-000000006.ckpt")
    state = checkpoint["exchange"]
    assert set(state["carried"]) == {"sent_by_rank", "owned_by_all"}, "as 0.1.0 wrote it"
    before = owed(state)
    assert max(float(missing.abs().max()) for missing in before.values()) > 0
    assert all(torch.equal(missing, before[name]) for name, missing in sum_owed(state).items())
    for size in (2, 3):
        loaded = world(size).run(load_version_0_1, state)[0]
        assert loaded["step"] == state["step"] == 6
        for name, missing in owed(loaded).items():
            # the mean of two float32 residuals is rounded once
            torch.testing.assert_close(
                missing, before[name], rtol=0 if size == 2 else 1e-6, atol=0 if size == 2 else 1e-9
            )
        if size == 2:
            for rank, pieces in state["carried"]["sent_by_rank"].items():
                assert all(
                    torch.equal(piece, loaded["carried"]["sent_by_rank"][rank][n]) for n, piece in pieces.items()
                )


def test_powersgd_of_version_0_1_is_translated() -> None:
    """PowerSGD had words of its own: its error is what a rank has not sent, P and Q are alike everywhere."""
    error, factor = torch.tensor([1.0, -3.0]), torch.tensor([2.0])
    old = {"error_by_rank": {"0": {"w": error}, "1": {"w": 3 * error}}, "p": {"w": factor}, "q": {"w": 2 * factor}}
    for ranks, own in ((2, 3 * error), (5, 2 * error)):
        residuals = Residuals(1, ranks, shared=("p", "q"))
        residuals.load(old)
        state = residuals.state_dict()
        assert torch.equal(state["sent"]["w"], own)
        assert torch.equal(state["shared"]["p"]["w"], factor)
        assert torch.equal(state["shared"]["q"]["w"], 2 * factor)
    assert sum_owed({"carried": old, "late": {}})["w"].tolist() == [2.0, -6.0]


def with_and_without_feedback() -> tuple[float, float]:
    """Distance of the summed results from the summed mean gradients of 40 steps with the same gradients."""
    distances = []
    for feedback in (True, False):
        exchange = Exchange("gather", "onebit", error_feedback=feedback)
        put_in, came_back = exchange_known_gradients(exchange, [0] * 40)
        exchange.close()
        total = torch.cat([t.view(-1) for t in put_in.values()])
        dist.all_reduce(total)
        got = torch.cat([t.view(-1) for t in came_back.values()])
        distances.append(float((got - total / dist.get_world_size()).norm() / total.norm()))
    return distances[0], distances[1]


def test_without_error_feedback_the_same_error_is_made_again_and_again(world: Callable[[int], Ranks]) -> None:
    for with_feedback, without in world(2).run(with_and_without_feedback):
        assert with_feedback < 0.2 * without


def double_buffered() -> float:
    """A gradient comes back one step late: steps 0 .. 4 and a flush give what five plain steps give."""
    model = make_model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
    exchange = Exchange("ring", double_buffer=True)
    exchange.attach(ddp)
    plain = make_model()
    worst = 0.0
    late: list[Tensor] = [torch.zeros_like(p) for p in plain.parameters()]
    for step in range(4):
        ddp.zero_grad()
        ddp(batch_of(dist.get_rank(), step)).square().mean().backward()
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        worst = max(worst, largest_difference(got, late))
        plain.zero_grad()
        plain(batch_of(dist.get_rank(), step)).square().mean().backward()
        late = [p.grad.clone() / dist.get_world_size() for p in plain.parameters() if p.grad is not None]
        for gradient in late:
            dist.all_reduce(gradient)
    assert exchange.flush()
    worst = max(worst, largest_difference([p.grad for p in model.parameters() if p.grad is not None], late))
    assert not exchange.flush()
    exchange.close()
    return worst


def test_double_buffering_hands_back_each_gradient_exactly_one_step_late(world: Callable[[int], Ranks]) -> None:
    assert max(world(2).run(double_buffered)) <= 1e-7


def lose_a_rank(collective: str, codec: str) -> str:
    exchange = Exchange(collective, codec, grid=(3, 1), timeout=6)
    ddp = DistributedDataParallel(make_model(), bucket_cap_mb=BUCKET_MB)
    exchange.attach(ddp)
    ddp(batch_of(dist.get_rank(), 0)).sum().backward()
    loss = ddp(batch_of(dist.get_rank(), 1)).sum()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with exchange.guard():
            loss.backward()
    except RunError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("collective", "codec"), [("torus", "fp16"), pytest.param("gather", "onebit", marks=pytest.mark.slow)]
)
def test_a_killed_rank_ends_the_others_with_an_error_that_names_it(collective: str, codec: str) -> None:
    pool = Pool()  # of its own: the others' stays alive
    try:
        pool.world(3)
        connections = [connection for _, connection in pool.ranks]
        for connection in connections:
            connection.send(("run", lose_a_rank, (collective, codec)))
        for survivor in (0, 2):
            assert connections[survivor].poll(40), "a rank is still waiting for the dead one"
            status, message = connections[survivor].recv()
            assert status == "ok", message
            assert f"The {collective} exchange ({codec}) of step 1 failed on rank {survivor}" in message
            assert "rank 1 has ended" in message
    finally:
        pool.replace()
        pool.close()


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"collective": "ring", "codec": "onebit"}, "onebit codes cannot be summed on the wire"),
        ({"collective": "gather", "codec": "fp16"}, "carries codes that cannot be summed"),
        ({"collective": "torus", "codec": "powersgd"}, "brings its own all-reduce"),
        ({"collective": "rings"}, "did you mean 'ring'"),
        ({"codec": "fp61"}, "did you mean 'fp16'"),
        ({"codec": "exact", "parts": 4, "double_buffer": True}, "A sum of 4 parts needs .* no double buffering"),
        ({"codec": "fp16", "parts": 4}, "use codec=exact"),
        ({"codec": "topk", "keep": 0}, "keep is 0, but it must be from 1 to 4096"),
        ({"codec": "powersgd", "rank": 0}, "rank is 0, but it must be greater than 0"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        Exchange(**settings)
    assert str(refused.value).count(". ") == 0
