"""The gradient noise scale: the batch at which a step is worth half of what an infinite batch would give.

A gradient over b samples is g_b = G + noise, with E|noise|^2 = tr(Sigma) / b. So a small batch (b) and a large one (B)
of the same step determine the two unknowns:

    |G|^2 = (B |g_B|^2 - b |g_b|^2) / (B - b)          S = (|g_b|^2 - |g_B|^2) / (1/b - 1/B)

    B_noise = mean of S / mean of |G|^2                 S estimates tr(Sigma)

Training at a batch B then takes, to the same loss, in steps and in samples

    steps(B) = steps_min (1 + B_noise / B)              samples(B) = samples_min (1 + B / B_noise)

Reference:
    McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of Large-Batch Training, 2018: section 2.2
    (the scale), section 2.3 (steps and samples), appendix A.1 (the estimates).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from bigstep.engine.meter import Flush
from bigstep.engine.methods.base import Note
from bigstep.engine.observers.base import Observer

__all__ = ["NoiseScale", "NoiseWatch", "advice"]

DECAY = 0.95
"""Of the running means, per measurement: about the last 20 count."""

SETTLED = 10
"""Measurements after which the scale is reliable enough for advice."""

FAR = 4.0
"""A batch of more than so many noise scales is far beyond them: to double it saves at most a tenth of the steps."""


class NoiseScale:
    """Running means of S and |G|^2, and their ratio.

    The means are taken separately, since a mean of ratios would be biased. Both have seen the same measurements, so the
    correction for their start at zero is the same factor in both and cancels in the ratio.

    >>> scale = NoiseScale()
    >>> signal, noise = 0.01, 5.0  # of a gradient whose noise scale is 500
    >>> scale.update(signal + noise / 32, 32, signal + noise / 1024, 1024)
    >>> round(scale.value, 6)
    500.0

    Reference: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, appendix A.1.

    Differs from the paper: none known.
    """

    def __init__(self, decay: float = DECAY) -> None:
        """`decay` of the running means, per measurement."""
        self._decay = decay
        self.count = 0
        """Measurements so far."""
        self._signal = self._noise = 0.0
        self.told = False
        """Whether advice was given during the run."""

    def update(self, small_norm2: float, small: float, big_norm2: float, big: float) -> None:
        """Take one measurement.

        Args:
            small_norm2: |g_b|^2.
            small: b, in samples.
            big_norm2: |g_B|^2; a measurement that is not finite (fp16 with too large a loss scale) is left out.
            big: B, in samples; if it equals b, one forward held the whole step and there is nothing to compare.
        """
        if small == big:
            return
        signal = (big * big_norm2 - small * small_norm2) / (big - small)
        noise = (small_norm2 - big_norm2) / (1 / small - 1 / big)
        if not (math.isfinite(signal) and math.isfinite(noise)):
            return
        self._signal = self._decay * self._signal + (1 - self._decay) * signal
        self._noise = self._decay * self._noise + (1 - self._decay) * noise
        self.count += 1

    @property
    def value(self) -> float | None:
        """The noise scale now, in samples; None as long as noise hides the gradient, or nothing was measured."""
        return max(self._noise, 0.0) / self._signal if self._signal > 0 else None

    @property
    def settled(self) -> bool:
        """Whether enough was measured to rely on it."""
        return self.count >= SETTLED

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {
            "count": self.count,
            "signal": self._signal,
            "noise": self._noise,
            "told": self.told,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.count, self.told = int(state["count"]), bool(state["told"])
        self._signal, self._noise = float(state["signal"]), float(state["noise"])


def advice(noise_scale: float | None, workers: int, local_batch: int, rule: str = "") -> str | None:
    """Say which batch would suffice if this one lies far beyond the noise scale; None if it does not.

    At four noise scales a run takes 1.25 times the fewest possible steps and five times the fewest samples. Twice that
    batch saves a tenth of the steps and takes nine times the fewest samples. The model behind this assumes that a step
    is the rate times the gradient; `rule` names an optimizer for which that is not true, so that the sentence says so.

    >>> print(advice(500.0, workers=256, local_batch=32))
    The batch of 8,192 is 16 times the gradient noise scale of about 500: by that model, 512 (workers.count=16) would \
get as far with 12 % of the samples in 1.9 times the steps.
    >>> advice(5000.0, workers=256, local_batch=32) is None
    True
    """
    batch = workers * local_batch
    if noise_scale is None or batch <= FAR * noise_scale:
        return None
    scale = max(noise_scale, 1.0)
    count = max(1, round(scale / local_batch))
    if count == workers:
        return None
    fewer = count * local_batch
    samples = (1 + fewer / scale) / (1 + batch / scale)
    steps = (1 + scale / fewer) / (1 + scale / batch)
    guide = f" A rough guide: that model is of plain SGD, and {rule}'s steps differ."
    return (
        f"The batch of {batch:,} is {batch / scale:,.0f} times the gradient noise scale of about {scale:,.0f}: by that "
        f"model, {fewer:,} (workers.count={count}) would get as far with {100 * samples:.0f} % of the samples in "
        f"{steps:.1f} times the steps.{guide if rule else ''}"
    )


class NoiseWatch(Observer):
    """Takes each measurement, puts the noise scale into the rows, and says if the batch lies far beyond it."""

    def __init__(self, epochs: float, rule: str = ""):
        """`epochs` of the whole run; `rule` names the optimizer if its steps are not proportional to the gradient."""
        self.scale = NoiseScale()
        self._epochs, self._rule = epochs, rule

    def flushed(self, flush: Flush) -> Iterable[Note]:
        """Take in the measurements; give advice once during the run, and at its end.

        A quarter of the run must be over: at the beginning of every training the noise scale is small.
        """
        scale = self.scale
        for index, row in enumerate(flush.rows):
            if index in flush.noise:
                scale.update(*flush.noise[index])
            if scale.value is not None:
                row["noise_scale"] = scale.value
        row = flush.rows[-1]
        unasked = scale.told or row["epoch"] < self._epochs / 4
        if not scale.settled or (unasked and not flush.final):
            return
        sentence = advice(scale.value, flush.step.workers, flush.step.local_batch, self._rule)
        if sentence is not None:
            scale.told = True
            yield Note(sentence, {"step": row["step"], "noise_scale": scale.value})

    def parts(self) -> dict[str, NoiseScale]:
        """The running means."""
        return {"noise": self.scale}
