"""One step: accumulated, spread over ranks, and sent through the exchange."""

from __future__ import annotations

from dataclasses import replace

from bigstep.check.laboratory import Laboratory
from bigstep.check.observe import Gradient, Vectors, accumulation, gradients
from bigstep.check.observe_exchange import ROUNDS, Exchanged, exchanged
from bigstep.check.verdict import ROUNDING_BOUND, Verdict, difference, judged, not_applicable
from bigstep.tables.codecs import CODECS

__all__ = ["accumulation_is_big_batch", "exchange_is_mean", "gradient_of_ranks"]

CONSERVATION_BOUND = 1e-9
"""Residuals are sums and differences in float64; what a codec drops is of the order of the gradient itself."""


def accumulation_is_big_batch(lab: Laboratory) -> Verdict:
    """On one rank, the gradient accumulated over microbatches is that of one forward over the whole batch."""
    alone = replace(lab.synchronous, independent=True)
    pairs: list[tuple[Vectors, Vectors]] = lab.see(accumulation, alone, 1)[0]
    (full, _), (uneven, where) = (difference(mine, whole) for mine, whole in pairs)
    with_norms: list[tuple[Vectors, Vectors]] = lab.see(accumulation, replace(lab.synchronous, dropout=False), 1)[0]
    norms = max(difference(mine, whole)[0] for mine, whole in with_norms)
    words = "full and uneven microbatches, in float64"
    if norms > ROUNDING_BOUND >= max(full, uneven):
        words = (
            f"measured with batch norms frozen; with them the two differ by {norms:.2g}, because each worker "
            "normalises by its own samples, as the papers do: that is part of the run, whatever the number of ranks"
        )
    if lab.precision != "float64":
        words += f"; in {lab.precision} they agree only up to its rounding"
    fault = (
        f"full microbatches agree ({full:.1g}), uneven ones do not (largest in {where})"
        if full <= ROUNDING_BOUND
        else f"even microbatches of equal size disagree (largest in {where})"
    )
    return judged(
        max(full, uneven),
        ROUNDING_BOUND,
        "relative difference between accumulated and whole-batch gradient",
        words=words,
        fault=fault,
        remedy="weight each microbatch by its number of samples over that of the whole batch, not by one over the "
        "number of microbatches; let the loss be a mean over samples, or for text over tokens that are not padding, "
        "and weight by their count; and no layer but a batch norm may mix the samples of a forward.",
    )


def gradient_of_ranks(lab: Laboratory) -> Verdict:
    """The gradient on P ranks equals that of one rank with the same workers, and has the same bits on every rank."""
    if not lab.several:
        return not_applicable("one rank only; name more with --ranks 1,2,4")
    alone: list[Gradient] = lab.see(gradients, lab.synchronous, 1)[0]
    worst, fault = 0.0, ""
    for ranks in lab.several:
        seen: list[list[Gradient]] = lab.see(gradients, lab.synchronous, ranks)
        for index, (mine, reference) in enumerate(zip(seen[0], alone, strict=True)):
            if len({rank[index].digest for rank in seen}) > 1:
                worst, fault = float("inf"), f"the {ranks} ranks end up with different gradients"
            apart, where = difference(mine.vectors, reference.vectors)
            if apart > worst:
                worst = apart
                ratio = _ratio(mine.vectors, reference.vectors)
                by = f", {ratio:.3g} times as large" if abs(ratio - 1) > 0.01 else ""
                fault = f"the gradient of {reference.samples} samples on {ranks} ranks differs{by} (most in {where})"
    return judged(
        worst,
        lab.rounding_bound,
        "relative difference between the gradient of P ranks and of one",
        words=_codec_note(lab),
        fault=fault,
        remedy="average over ranks instead of summing (DDP averages; dist.all_reduce adds): weight each sample by "
        "ranks / global batch before a mean over ranks, also where ranks have unequal shares or none; clip after it.",
    )


def _ratio(left: Vectors, right: Vectors) -> float:
    above = sum(float((left[name] * value).sum()) for name, value in right.items() if name in left)
    below = sum(float((value * value).sum()) for value in right.values())
    return above / below if below else float("nan")


def _codec_note(lab: Laboratory) -> str:
    exchange = lab.trial.config.exchange
    if CODECS[exchange.codec].loses != "nothing":
        return f"with codec none: {exchange.codec} quantises per rank, so with it the path depends on the ranks"
    return "without double_buffer: one rank has no exchange that could be late" if exchange.double_buffer else ""


def exchange_is_mean(lab: Laboratory) -> Verdict:
    """What comes out of the exchange is the mean of what came in: exactly, up to rounding, or in the long run."""
    if not lab.several:
        return not_applicable("one rank exchanges nothing")
    if lab.subject.exchange is None:
        return not_applicable("the loop has no exchange of its own: the rows on gradient and path cover it")
    config = lab.trial.config.exchange
    worlds: dict[int, list[Exchanged]] = {ranks: lab.see(exchanged, lab.trial, ranks) for ranks in lab.several}
    seen = {ranks: world[0] for ranks, world in worlds.items()}
    travels = f"{config.collective}, {config.codec}"
    entry = CODECS[config.codec]
    for ranks, world in worlds.items():
        if (different := len({rank.digest for rank in world})) > 1:
            return judged(
                different,
                1,
                f"different results on the ranks of a world ({travels})",
                fault=f"the {ranks} ranks get {different} different gradients out of the exchange",
                remedy="let every rank decode the same codes in the same order, and put nothing into the result but "
                "what all received: weights that get different updates never agree again.",
            )
    if entry.loses != "carried" and not config.double_buffer:
        worst = max(seen, key=lambda ranks: seen[ranks].error)
        return judged(
            seen[worst].error,
            worst * 2.0**-entry.digits if entry.digits else ROUNDING_BOUND,
            f"largest difference from the plain mean ({travels})",
            words=f"{entry.digits} bits are kept per value and sum; what is rounded away is not carried"
            if entry.digits
            else "",
            fault=f"on {worst} ranks the exchange returns something other than the mean",
            remedy="divide by the number of ranks once, sum every element once, and write the result to every rank.",
        )
    worst = max(seen, key=lambda ranks: seen[ranks].unaccounted)
    why = "codes depend on the number of ranks" if entry.loses == "carried" else "gradients come a step late"
    return judged(
        seen[worst].unaccounted,
        CONSERVATION_BOUND + (ROUNDS * worst * 2.0**-entry.digits if entry.digits else 0.0),
        f"|sent + kept - came in| over several steps ({travels})",
        words=f"one step is off by up to {seen[worst].error:.2g}, on purpose; {why}",
        fault=f"on {worst} ranks part of the gradient is lost for good"
        + ("" if seen[worst].carries else ": the codec carries no residual"),
        remedy="keep what a code misses and add it to the next gradient (exchange.error_feedback=true), on both sides "
        "of a two-sided exchange.",
    )
