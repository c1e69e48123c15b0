"""Do all ranks begin as one run? Weights, the order of parameters, and random numbers."""

from __future__ import annotations

from collections import Counter

from torch import nn

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe import Beginning, Gradient, beginning, gradients
from bigstep.check.verdict import Verdict, judged, not_applicable

__all__ = ["random_streams", "same_order", "same_start"]


def same_start(lab: Laboratory) -> Verdict:
    """Every rank of every world starts from the same weights and buffers, bit for bit."""
    seen: dict[int, list[Beginning]] = {size: lab.see(beginning, lab.trial, size) for size in lab.ranks}
    hashes = {size: [rank.weights for rank in ranks] for size, ranks in seen.items()}
    distinct = {one for ranks in hashes.values() for one in ranks}
    first = hashes[1][0]
    odd = [f"rank {rank} of {size}" for size, ranks in hashes.items() for rank, h in enumerate(ranks) if h != first]
    copied = isinstance(lab.own.model, nn.Module)
    return judged(
        len(distinct),
        1,
        "different initial weights over all ranks (SHA-256)",
        words="the module was given ready-made and copied; give the function that builds it to check that too"
        if copied
        else f"{first[:12]} everywhere",
        fault=f"weights that differ from those of one rank: on {', '.join(odd[:4])}",
        remedy="seed every rank alike before the model is built (torch.manual_seed(seed), not seed + rank), or "
        "broadcast rank 0's weights; seed by worker only what must differ, such as dropout.",
    )


def same_order(lab: Laboratory) -> Verdict:
    """Every rank meets its parameters in the same order, with the same shapes: an exchange pairs them by position."""
    seen: dict[int, list[Beginning]] = {size: lab.see(beginning, lab.trial, size) for size in lab.ranks}
    first = seen[1][0].order
    distinct = {rank.order for ranks in seen.values() for rank in ranks}
    fault = ""
    for size, ranks in seen.items():
        for rank, one in enumerate(ranks):
            if one.order != first and not fault:
                pairs = zip(one.order, first, strict=False)
                place = next((i for i, (mine, theirs) in enumerate(pairs) if mine != theirs), len(first))
                name = one.order[place][0] if place < len(one.order) else "nothing"
                there = first[place][0] if place < len(first) else "nothing"
                fault = f"rank {rank} of {size} has {name} at position {place}, where one rank alone has {there}"
    return judged(
        len(distinct),
        1,
        f"different orders of {len(first)} parameters",
        fault=fault,
        remedy="register layers in one order on every rank: no sets, no dictionaries filled in order of arrival, "
        "no branches on the rank in the model's constructor; otherwise gradients of different layers are added up.",
    )


def random_streams(lab: Laboratory) -> Verdict:
    """Dropout's numbers belong to (seed, step, worker): the same workers draw the same on any number of ranks."""
    seen: dict[int, list[list[Gradient]]] = {size: lab.see(gradients, lab.synchronous, size) for size in lab.ranks}
    drawn = {
        size: Counter(draw for rank in ranks for gradient in rank for draw in gradient.draws)
        for size, ranks in seen.items()
    }
    alone = drawn[1]
    repeated = sum(count - 1 for counts in drawn.values() for count in counts.values())
    moved = sum(sum((counts - alone).values()) for counts in drawn.values())
    if (moved or repeated) and not any(gradient.drew for ranks in seen.values() for rank in ranks for gradient in rank):
        return not_applicable("nothing in the network draws random numbers, so workers may share a forward")
    fault = (
        f"{repeated} forwards drew the same numbers as another: streams that must differ are the same"
        if repeated
        else f"{moved} forwards drew different numbers from those of the same worker on one rank"
    )
    return judged(
        repeated + moved,
        0,
        f"forwards whose random numbers are not their worker's own (of {sum(alone.values())})",
        fault=fault,
        remedy="seed torch's generator before each forward from (seed, step, worker), not from the rank, the time or "
        "where the last forward left it.",
    )
