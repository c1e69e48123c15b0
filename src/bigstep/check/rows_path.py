"""Many steps: the same path on any number of ranks, one network at evaluation, and no trace of an interruption."""

from __future__ import annotations

import math

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe import Journey, journey, resumed
from bigstep.check.subject import Trial
from bigstep.check.verdict import PATH_BOUND, Verdict, difference, judged, not_applicable

__all__ = ["resume_elsewhere", "resume_here", "same_path", "same_statistics"]


def same_path(lab: Laboratory) -> Verdict:
    """All steps of the run give the losses and the final weights of one rank."""
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    alone = _journey(lab, lab.lossless, 1)[0]
    if not all(map(math.isfinite, alone.losses)):
        return Verdict(
            status="fail",
            words="the loss of this small run is not finite on one rank already, so there is no path to compare",
            remedy="lower lr.base, or lengthen the warm-up.",
        )
    worst, fault = 0.0, ""
    for ranks in lab.several:
        seen = _journey(lab, lab.lossless, ranks)
        if len({rank.digest for rank in seen}) > 1:
            worst, fault = float("inf"), f"the {ranks} ranks end with different weights"
        apart, step = _first_apart(seen[0].losses, alone.losses)
        weights, where = difference(seen[0].weights, alone.weights)
        if max(apart, weights) > worst:
            worst = max(apart, weights)
            parted = f"part at step {step}" if step else f"agree, the weights do not ({where})"
            fault = f"on {ranks} ranks the losses {parted}"
    codec = lab.trial.config.exchange.codec
    note = "" if codec == "none" else f"; with codec none, since {codec} quantises per rank"
    if lab.trial.config.optimizer.before_exchange:
        note += "; with adagrad=after, since before scales per rank"
    return judged(
        worst,
        PATH_BOUND,
        "relative difference of losses and weights from one rank's",
        words=f"{len(alone.losses)} steps with batch plan, schedule, augmentation and incomplete batches{note}",
        fault=fault,
        remedy="mend the rows above first; if they pass, look for what differs between ranks over time: an optimizer "
        "that updates on some ranks only, buffers that are broadcast, a rate set on rank 0 alone.",
    )


def same_statistics(lab: Laboratory) -> Verdict:
    """At an evaluation every rank holds the same batch-norm statistics, those of all workers."""
    if lab.subject.evaluate is None:
        return not_applicable("the loop gives no evaluation")
    alone = _journey(lab, lab.lossless, 1)[0]
    if not alone.statistics:
        return not_applicable("the model keeps no running statistics")
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    worst, fault = 0.0, ""
    for ranks in lab.several:
        seen = _journey(lab, lab.lossless, ranks)
        distinct = len({rank.statistics_digest for rank in seen})
        if distinct > 1:
            worst, fault = float("inf"), f"the {ranks} ranks evaluate {distinct} different networks"
        apart, where = difference(seen[0].statistics, alone.statistics)
        if apart > worst:
            worst = apart
            fault = f"the {ranks} ranks agree, but not on the mean over all workers (most in {where})"
    return judged(
        worst,
        PATH_BOUND,
        "relative difference of the statistics that an evaluation uses",
        words=f"{lab.trial.config.norm.statistics} statistics, averaged over all workers",
        fault=fault,
        remedy="average running means and variances over all workers before every evaluation and checkpoint (rank 0's "
        "own describe its share of the data alone); bigstep.norm.WorkerStatistics and average_statistics do so.",
    )


def resume_here(lab: Laboratory) -> Verdict:
    """Saved half way and loaded into a fresh run on as many ranks: the same bits as without the interruption."""
    if lab.subject.save is None or lab.subject.load is None:
        return not_applicable("the loop gives no checkpoints")
    ranks = lab.several[0] if lab.several else 1
    whole, parts = _journey(lab, lab.trial, ranks), _resumed(lab, lab.trial, ranks, ranks)
    left = parts[0].losses
    apart, step = _first_apart(left, whole[0].losses[len(whole[0].losses) - len(left) :])
    weights, where = difference(parts[0].weights, whole[0].weights)
    figure = max(apart, weights)
    if not figure and [rank.digest for rank in parts] != [rank.digest for rank in whole]:
        figure = float("inf")
    soon = (
        f"the losses part at step {step} behind the checkpoint"
        if step
        else f"the last update differs (most in {where})"
    )
    codec = lab.trial.config.exchange.codec
    carried = f", residuals of {codec} included" if codec in ("onebit", "powersgd") else ""
    return judged(
        figure,
        0.0,
        f"relative difference from the uninterrupted run on {ranks} rank(s)",
        words=f"the same bits{carried}" if not figure else "",
        fault=soon,
        remedy="save all that decides the path: weights, optimizer state, position in the epoch, batch-norm averages, "
        "loss scale and the exchange's residuals; restore the position, do not begin the epoch again.",
    )


def resume_elsewhere(lab: Laboratory) -> Verdict:
    """Saved on some ranks and loaded on another number of them: the path of one rank goes on."""
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    alone = _journey(lab, lab.lossless, 1)[0]
    if lab.subject.save is None or lab.subject.load is None:
        return not_applicable("the loop gives no checkpoints")
    most = lab.ranks[-1]
    pairs = [(1, most), (most, lab.ranks[-2])]
    worst, fault = 0.0, ""
    for before, after in pairs:
        _journey(lab, lab.lossless, before)  # leaves the checkpoint
        seen = _resumed(lab, lab.lossless, before, after)
        apart, step = _first_apart(seen[0].losses, alone.losses[len(alone.losses) - len(seen[0].losses) :])
        weights, where = difference(seen[0].weights, alone.weights)
        if len({rank.digest for rank in seen}) > 1:
            apart = float("inf")
        if max(apart, weights) > worst:
            worst = max(apart, weights)
            at = f"part at step {step} behind the checkpoint" if step else f"agree, the weights do not ({where})"
            fault = f"saved on {before} rank(s) and resumed on {after}, the losses {at}"
    return judged(
        worst,
        PATH_BOUND,
        "relative difference from one rank without interruption",
        words=" and ".join(f"{before} -> {after}" for before, after in pairs) + " ranks",
        fault=fault,
        remedy="save nothing that belongs to a rank: key state by parameter, count samples (not steps of a rank's own "
        "loader), and let workers, not ranks, decide who sees what.",
    )


def _journey(lab: Laboratory, trial: Trial, ranks: int) -> list[Journey]:
    return lab.see(journey, trial, ranks, lab.folder(trial, ranks))


def _resumed(lab: Laboratory, trial: Trial, before: int, after: int) -> list[Journey]:
    return lab.see(resumed, trial, after, lab.folder(trial, before))


def _first_apart(left: tuple[float, ...], right: tuple[float, ...]) -> tuple[float, int]:
    """Return the largest relative difference, and the number of the first step beyond the bound; 0 for none."""
    if len(left) != len(right):
        return float("inf"), min(len(left), len(right)) + 1
    apart = [abs(a - b) / max(abs(b), 1e-12) for a, b in zip(left, right, strict=True)]
    first = next((number for number, value in enumerate(apart, 1) if not value <= PATH_BOUND), 0)
    return max((value if value == value else float("inf") for value in apart), default=0.0), first
