"""Epochs to a target as a function of the batch, so that the answer is minutes to accuracy, not images per second.

Every law is E(B) = e0 + k B. The number of steps is then S = E samples / B = k samples + e0 samples / B, so no batch
needs fewer than k samples of them, and at the critical batch, e0 / k, half of the epochs are due to its size. A law is
fitted to runs at several batches, or drawn through runs at one batch with their gradient noise scale as the critical
batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any

from bigstep.errors import ConfigError
from bigstep.records import Run, read_run

__all__ = ["IMAGENET_LARS", "LAWS", "ConvergenceLaw", "fit_law", "law_from_noise", "law_from_runs"]

NOISE_LAW_REACH = 4.0
"""Factor above and below the noise scale within which a law drawn from it may be used: beyond, steps hardly change."""
BEYOND_LAW = 1.25
"""How far above the largest batch of a law a plan may go: as far as Fujitsu's 81,920 is above MLPerf's 67,456."""


@dataclass(frozen=True)
class ConvergenceLaw:
    """Epochs to a target accuracy: E(B) = base + slope B.

    >>> law = IMAGENET_LARS
    >>> round(law.epochs(3200)), round(law.epochs(57344)), round(law.critical_batch)
    (36, 78, 42854)
    """

    base_epochs: float
    slope: float
    target: float
    """Accuracy in percent."""
    worst_residual: float
    """Largest distance of a point from the law, in epochs."""
    smallest_batch: int
    largest_batch: int
    source: str

    def epochs(self, batch: float) -> float:
        """Epochs to the target with this global batch."""
        return self.base_epochs + self.slope * batch

    def steps(self, batch: float, samples: int) -> float:
        """Steps to the target with this global batch."""
        return self.epochs(batch) * samples / batch

    @property
    def critical_batch(self) -> float:
        """The batch at which half of all epochs are due to its size."""
        return self.base_epochs / self.slope if self.slope > 0 else float("inf")

    @property
    def furthest_batch(self) -> float:
        """The largest batch that a plan may have: beyond it nothing is known to converge."""
        return self.largest_batch * BEYOND_LAW

    def warning(self, batch: float) -> str:
        """A warning if the batch is outside the range that the law covers; empty if it is inside."""
        if batch > self.largest_batch:
            return f"batch {batch:,.0f} is above the largest that the law covers ({self.largest_batch:,})"
        if batch < self.smallest_batch:
            return f"batch {batch:,.0f} is below the smallest that the law covers ({self.smallest_batch:,})"
        return ""


def fit_law(points: Sequence[tuple[float, float]], target: float, source: str) -> ConvergenceLaw:
    """Fit E(B) = e0 + k B to (batch, epochs) by least squares, with e0 >= 0 and k >= 0.

    Without these bounds, noise alone could make a larger batch need fewer epochs, or a small one none.

    >>> law = fit_law([(512, 20), (1024, 22), (2048, 26)], 93.0, "three runs")
    >>> round(law.base_epochs, 3), round(law.epochs(4096), 3)
    (18.0, 34.0)
    """
    if len({batch for batch, _ in points}) < 2:
        raise ConfigError(
            "A law of epochs against batch needs runs that reach the target at two or more batches, or one such run "
            f"with its gradient noise scale recorded (got {len(points)} runs)."
        )
    count = len(points)
    mean_b = sum(batch for batch, _ in points) / count
    mean_e = sum(epochs for _, epochs in points) / count
    slope = max(0.0, sum((b - mean_b) * (e - mean_e) for b, e in points) / sum((b - mean_b) ** 2 for b, _ in points))
    base = mean_e - slope * mean_b
    if base < 0:
        base, slope = 0.0, sum(b * e for b, e in points) / sum(b * b for b, _ in points)
    return ConvergenceLaw(
        base_epochs=base,
        slope=slope,
        target=target,
        worst_residual=max(abs(e - base - slope * b) for b, e in points),
        smallest_batch=int(min(b for b, _ in points)),
        largest_batch=int(max(b for b, _ in points)),
        source=source,
    )


def law_from_noise(batch: float, epochs: float, noise_scale: float, target: float, source: str) -> ConvergenceLaw:
    """Draw E(B) = e0 (1 + B / B_noise) through the epochs that one batch took.

    Args:
        batch: Global batch of the run.
        epochs: Epochs that it took to the target.
        noise_scale: Its gradient noise scale B_noise, in samples.
        target: Accuracy in percent.
        source: The origin of the figures.

    >>> law = law_from_noise(512, 15.0, 1024, 93.0, "one run")
    >>> law.epochs(512), law.epochs(1024), law.critical_batch
    (15.0, 20.0, 1024.0)

    Reference: McCandlish et al., An Empirical Model of Large-Batch Training, 2018, section 2.3.

    Differs from the paper: the paper measured the loss reached; here the law is used for an accuracy.
    """
    base = epochs / (1 + batch / noise_scale)
    return ConvergenceLaw(
        base_epochs=base,
        slope=base / noise_scale,
        target=target,
        worst_residual=0.0,
        smallest_batch=max(1, int(min(batch, noise_scale / NOISE_LAW_REACH))),
        largest_batch=int(max(batch, noise_scale * NOISE_LAW_REACH)),
        source=source,
    )


def law_from_runs(folders: Iterable[Path], target: float) -> ConvergenceLaw:
    """Fit the law to your own runs: the epoch at which each first reached `target` percent, against its batch.

    Runs at one batch give a law if they recorded their gradient noise scale, which is taken as the critical batch.

    Args:
        folders: Run folders, or folders that contain some, as `bigstep bench` leaves them.
        target: Accuracy in percent.
    """
    points, scales, names = [], [], []
    for folder in (found for given in folders for found in _run_folders(given)):
        run = read_run(folder)
        # null stands for NaN or infinity
        reached = [row["epoch"] for row in run.evaluations if (row.get("accuracy") or 0.0) * 100 >= target]
        batch = max((row["batch"] for row in run.train), default=0)  # the last batch of an epoch may be smaller
        if reached and batch and _has_one_batch(run.config):
            points.append((float(batch), float(min(reached))))
            scales.append(_noise_scale(run))
            names.append(folder.name)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    source = f"own runs {', '.join(names[:6])}{more}"
    known = [scale for scale in scales if scale]
    if len({batch for batch, _ in points}) == 1 and known:
        batch, scale = points[0][0], geometric_mean(known)
        source += f" at batch {batch:,.0f} with their gradient noise scale of {scale:,.0f} as the critical batch"
        return law_from_noise(batch, fmean(epochs for _, epochs in points), scale, target, source)
    return fit_law(points, target, source)


def _has_one_batch(config: dict[str, Any]) -> bool:
    """Whether all samples of a step give one gradient, and every step has the same number of them."""
    method = config.get("asynchronous", {}).get("method", "none")
    return not config.get("plan") and method == "none" and config.get("islands", {}).get("count", 1) == 1


def _noise_scale(run: Run) -> float | None:
    """The gradient noise scale at the end of a run; None if it was not recorded."""
    recorded = [row.get("noise_scale") for row in run.train] + [run.result.get("noise_scale")]
    scales = [scale for scale in recorded if isinstance(scale, int | float) and scale > 0]
    return scales[-1] if scales else None


def _run_folders(folder: Path) -> list[Path]:
    """The folder itself if it is a run's, else the run folders below it."""
    found = [] if (folder / "run.json").exists() else sorted(path.parent for path in folder.rglob("run.json"))
    return found or [folder]


MLPERF_EPOCHS = (
    (3200, 35.0), (3264, 35.0), (13056, 45.0), (16384, 47.0), (20480, 50.0), (32256, 56.0), (35840, 58.5),
    (40448, 68.0), (57344, 77.0), (67456, 86.0),
)  # fmt: skip
"""Batch and epochs to 75.9 % of NVIDIA's closed-division ResNet-50 submissions, MLPerf Training v2.0 to v4.0."""

CIFAR10_EPOCHS = ((512, 6.5), (2048, 10.7), (8192, 26.7), (16384, 49.1))
"""Batch and epochs to 90 % test accuracy: recipe lars, preset cifar10, interpolated between two run lengths each."""

IMAGENET_LARS = fit_law(MLPERF_EPOCHS, 75.9, "MLPerf Training v2.0-v4.0 logs, tuned LARS, ResNet-50 on ImageNet")
"""The best of tuned LARS: momentum, warm-up and decay were tuned anew for each batch."""
CIFAR10_LARS = fit_law(CIFAR10_EPOCHS, 90.0, "benchmarks/cifar10, recipe lars on CIFAR-10, one H200")
"""One rule sets the hyperparameters from the batch at all batches; one seed."""
LAWS = {"resnet50": IMAGENET_LARS, "resnet9": CIFAR10_LARS}
"""The built-in laws, by workload."""
