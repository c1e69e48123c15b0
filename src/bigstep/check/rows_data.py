"""Which samples are seen, how often, and what they look like."""

from __future__ import annotations

import math
from collections import Counter
from itertools import zip_longest

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe import EPOCHS, Beginning, Journey, beginning, journey
from bigstep.check.verdict import Verdict, judged, not_applicable
from bigstep.engine.evaluate import Evaluation

__all__ = ["augmentation", "epoch_once", "evaluation_once"]


def epoch_once(lab: Laboratory) -> Verdict:
    """The ranks of a world together see each sample once an epoch, in the same batches as one rank, in a new order."""
    wrong, fault = 0, ""
    alone: Beginning = lab.see(beginning, lab.trial, 1)[0]
    size = alone.sizes[0]
    for ranks in lab.ranks:
        seen: list[Beginning] = lab.see(beginning, lab.trial, ranks)
        for epoch in range(EPOCHS):
            batches = [Counter(i for part in step for i in part) for step in _by_step(seen, epoch)]
            times: Counter[int] = sum(batches, Counter())
            repeated = sum(count - 1 for count in times.values() if count > 1)
            missing = size - len(times)
            apart = sum(
                sum((Counter(mine) - Counter(theirs)).values())
                for mine, theirs in zip_longest(batches, alone.epochs[epoch], fillvalue=())
            )
            if not fault and repeated + missing:
                fault = f"on {ranks} rank(s) {repeated} samples come twice and {missing} never in epoch {epoch}"
            elif not fault and apart:
                fault = f"on {ranks} ranks {apart} samples of epoch {epoch} are in a different batch than on one rank"
            wrong += repeated + missing + apart
            if not wrong and lab.own.data is None and (shared := max(rank.shared for rank in seen)):
                wrong, fault = shared, f"neighbouring windows of the text overlap by {shared} tokens on {ranks} rank(s)"
    orders = {tuple(i for step in epoch for i in step) for epoch in alone.epochs}
    if not wrong and len(orders) == 1 and size > 2:  # two samples may keep their order by chance
        wrong, fault = size, f"all {EPOCHS} epochs have the samples in the same order"
    return judged(
        wrong,
        0,
        f"samples of {size} seen twice, never, in a different batch or in the same order, in {EPOCHS} epochs",
        fault=fault,
        remedy="shuffle by the epoch and a seed that all ranks share (set_epoch), divide each batch by workers, and "
        "let the last one be short: "
        "no padding to equal shares (DistributedSampler's default) and no drop_last. bigstep.data.sampler does so. Cut "
        "a text once, the same on all ranks, into windows that begin where the last one ended.",
    )


def _by_step(seen: list[Beginning], epoch: int) -> list[tuple[tuple[int, ...], ...]]:
    """For each step, the samples of each rank; none for a rank that has ended the epoch before the others."""
    return list(zip_longest(*(rank.epochs[epoch] for rank in seen), fillvalue=()))


def augmentation(lab: Laboratory) -> Verdict:
    """A sample looks the same on whichever rank loads it; if augmented, it looks different in another epoch."""
    alone: Beginning = lab.see(beginning, lab.trial, 1)[0]
    different, fault = 0, ""
    for ranks in lab.several:
        for rank, seen in enumerate(lab.see(beginning, lab.trial, ranks)):
            count = sum(
                mine != theirs
                for epoch in (0, 1)
                for mine, theirs in zip(seen.pictures[epoch], alone.pictures[epoch], strict=True)
            )
            if count and not fault:
                fault = f"rank {rank} of {ranks} sees {count} samples differently from one rank alone"
            different += count
    changing = sum(a != b for a, b in zip(*alone.pictures, strict=True))
    return judged(
        different,
        0,
        "samples that look different on another rank",
        words=f"{changing} of {len(alone.pictures[0])} change from epoch to epoch"
        if changing
        else "no sample changes from epoch to epoch: nothing about them is random",
        fault=fault,
        remedy="draw what augmentation needs from (seed, epoch, sample), not from a generator seeded by rank or "
        "loader: bigstep.data.augment.sample_uniform does so.",
    )


def evaluation_once(lab: Laboratory) -> Verdict:
    """An evaluation sees each sample once, so its loss and its accuracy are those of one rank."""
    if lab.subject.evaluate is None:
        return not_applicable("the loop has no evaluation")
    size = lab.see(beginning, lab.trial, 1)[0].sizes[1]
    expected = {**_figures(_evaluations(lab, 1)[0]), "number of samples": size}
    figure, fault = 0.0, ""
    for ranks in lab.ranks:
        for seen in _evaluations(lab, ranks):
            told = _figures(seen)
            apart = {name: _apart(told.get(name, math.nan), value) for name, value in expected.items()}
            if max(apart.values()) > figure:
                figure = max(apart.values())
                name = next((name for name, value in apart.items() if value > lab.path_bound), "loss")
                mine = told.get(name, math.nan)
                fault = f"on {ranks} rank(s) the {name} is {mine:.9g} instead of {expected[name]:.9g}"
    return judged(
        figure,
        lab.path_bound,
        f"relative difference in samples ({size}), loss and accuracy of an evaluation",
        fault=fault,
        remedy="share the evaluation set without padding (batches[rank::ranks]), add up sums and counts over ranks, "
        "and divide once at the end.",
    )


def _evaluations(lab: Laboratory, ranks: int) -> list[Evaluation]:
    seen: list[Journey] = lab.see(journey, lab.lossless, ranks, lab.folder(lab.lossless, ranks))
    return [rank.evaluation for rank in seen if rank.evaluation is not None]


def _figures(evaluation: Evaluation) -> dict[str, float]:
    """The figures of an evaluation; outputs that are not class scores have no accuracy."""
    figures = {"number of samples": evaluation.samples, "loss": evaluation.loss}
    return figures if evaluation.accuracy is None else {**figures, "accuracy": evaluation.accuracy}


def _apart(value: float, expected: float) -> float:
    """The relative difference; infinite if one of the two is NaN."""
    apart = abs(value - expected) / max(abs(expected), 1e-12)
    return apart if apart == apart else math.inf
