"""Messages between all ranks: short ones at once, long ones in turns, and the same arrives either way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from bigstep.exchange import World
from bigstep.exchange.collectives.phases import all_gather, all_to_all
from bigstep.exchange.messages import _InTurns
from worlds import World as Ranks

SHORT, LONG = 100, 50_000
"""Values of eight bytes: well below and well above the length from which messages take turns."""


def message(sender: int, receiver: int, length: int) -> Tensor:
    return torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * sender + receiver))


def trade(length: int) -> list[bool]:
    """Trade with everybody, three times without waiting in between; return whether the right values arrived."""
    group = dist.group.WORLD
    assert group is not None
    world = World.join(group)
    rank, everyone = world.rank, world.everyone()
    own = world.new_group(everyone)
    pieces = torch.cat([message(rank, other, length) for other in everyone])
    handed_out = [torch.empty_like(pieces) for _ in range(2)]
    gathered = torch.empty_like(pieces)
    under_way = [all_to_all(into, pieces, world, everyone, own, tag) for tag, into in enumerate(handed_out)]
    under_way.append(all_gather(gathered, message(rank, rank, length), world, everyone, own, len(handed_out)))
    for works in under_way:
        for work in works:
            work.wait()
    expected = torch.cat([message(other, rank, length) for other in everyone])
    return [
        *(torch.equal(each, expected) for each in handed_out),
        torch.equal(gathered, torch.cat([message(other, other, length) for other in everyone])),
    ]


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_everybody_gets_what_was_sent(world: Callable[[int], Ranks], size: int, length: int) -> None:
    assert world(size).run(trade, length) == [[True] * 3] * size


def test_in_turns_each_message_leaves_when_the_one_before_has_been_received() -> None:
    happened: list[str] = []

    class Work:
        def __init__(self, name: str):
            self.name = name

        def wait(self) -> None:
            happened.append(f"{self.name} ended")

    def sending(name: str) -> Callable[[], Work]:
        def begin() -> Work:
            happened.append(f"{name} began")
            return Work(name)

        return begin

    under_way = _InTurns([Work("receive 1"), Work("receive 2")], [sending("send 1"), sending("send 2")])
    assert happened == ["send 1 began"]
    under_way.wait()
    assert happened[1:4] == ["receive 1 ended", "send 2 began", "receive 2 ended"]
    assert happened[4:] == ["send 1 ended", "send 2 ended"]

    happened.clear()
    alone = _InTurns([], [sending("send 1"), sending("send 2")])
    alone.wait()
    alone.wait()
    assert [each for each in happened if each.endswith("began")] == ["send 1 began", "send 2 began"], "each once"
