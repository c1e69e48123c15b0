"""The transports of an exchange: what its codec's table entry asks for."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from bigstep.exchange.bucket import Transport
from bigstep.exchange.codecs.dense import Whole
from bigstep.exchange.collectives import Ring
from bigstep.exchange.gathered import Gathered
from bigstep.exchange.piled import Piled
from bigstep.exchange.summed import Summed
from bigstep.exchange.world import World
from bigstep.tables import load
from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import COLLECTIVES

__all__ = ["make_transports"]


def make_transports(
    world: World,
    collective: str,
    codec: str,
    settings: Mapping[str, float],
    shapes: Mapping[str, torch.Size],
    *,
    warmup_steps: int,
    error_feedback: bool,
    shared: int | None,
) -> list[Transport]:
    """Return the transport of the warm-up and that of the steps after it, which may be the same one.

    Hazard: makes process groups, so every rank must come here, with the same settings.

    Args:
        world: The ranks.
        collective: A name of `bigstep.tables.collectives`.
        codec: A name of `bigstep.tables.codecs`.
        settings: Of all codecs, by name.
        shapes: Of the model's gradients, by name.
        warmup_steps: Dense steps before the first one that loses information.
        error_feedback: Carry what a lossy codec lost into the next step.
        shared: If the sum has parts, the number of values that ranks of one host may sum through shared memory; None if
            each rank adds one gradient per step.
    """
    entry = CODECS[codec]
    if entry.own_rounds:
        return [load(entry.home)(world, settings, warmup_steps, error_feedback)]
    code, way = load(entry.home)(settings), load(COLLECTIVES[collective].home)(world)
    if shared is not None:
        return [Piled(world, way, shared)]
    if entry.blocks is None:
        return [Summed(world, way, code, agrees=0 < entry.agree_from <= world.size)]
    own = {name: settings[name] for name in entry.settings}
    return [
        Summed(world, Ring(world), Whole()),
        Gathered(world, way, code, entry.blocks, shapes, own, error_feedback=error_feedback),
    ]
