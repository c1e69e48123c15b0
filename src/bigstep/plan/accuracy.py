"""Epochs to a target as a function of the batch, so that the answer is minutes to accuracy and not images a second.

Every law is E(B) = e0 + k B: with S = E samples / B steps, S = k samples + e0 samples / B, so no batch brings the
count of steps below k samples, and the critical batch, where half of the epochs are lost, is e0 / k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bigstep.errors import ConfigError
from bigstep.records import read_run

__all__ = ["IMAGENET_LARS", "ConvergenceLaw", "fit_law", "law_from_runs"]


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
        """Batch at which half of all epochs are the price of its size."""
        return self.base_epochs / self.slope if self.slope > 0 else float("inf")

    def warning(self, batch: float) -> str:
        """What to know when the batch lies outside of the points the law was fitted to; empty inside."""
        if batch > self.largest_batch:
            return f"batch {batch:,.0f} lies above the largest that the law was fitted to ({self.largest_batch:,})"
        if batch < self.smallest_batch:
            return f"batch {batch:,.0f} lies below the smallest that the law was fitted to ({self.smallest_batch:,})"
        return ""


def fit_law(points: Sequence[tuple[float, float]], target: float, source: str) -> ConvergenceLaw:
    """Fit E(B) = e0 + k B to (batch, epochs) by least squares.

    >>> law = fit_law([(512, 20), (1024, 22), (2048, 26)], 93.0, "three runs")
    >>> round(law.base_epochs, 3), round(law.epochs(4096), 3)
    (18.0, 34.0)
    """
    if len({batch for batch, _ in points}) < 2:
        raise ConfigError(
            f"A law of epochs against batch needs runs at two batches or more (got {len(points)} points)."
        )
    count = len(points)
    mean_b = sum(batch for batch, _ in points) / count
    mean_e = sum(epochs for _, epochs in points) / count
    slope = sum((b - mean_b) * (e - mean_e) for b, e in points) / sum((b - mean_b) ** 2 for b, _ in points)
    base = mean_e - slope * mean_b
    return ConvergenceLaw(
        base_epochs=base,
        slope=slope,
        target=target,
        worst_residual=max(abs(e - base - slope * b) for b, e in points),
        smallest_batch=int(min(b for b, _ in points)),
        largest_batch=int(max(b for b, _ in points)),
        source=source,
    )


def law_from_runs(folders: Iterable[Path], target: float) -> ConvergenceLaw:
    """Fit the law to own runs: the epoch at which each first reached `target` percent, against its batch.

    Args:
        folders: Run folders, or folders that hold some, as `bigstep bench` leaves them.
        target: Accuracy in percent.
    """
    points = []
    names = []
    for folder in (found for given in folders for found in _run_folders(given)):
        run = read_run(folder)
        reached = [row["epoch"] for row in run.evaluations if row["accuracy"] * 100 >= target]
        method = run.config.get("asynchronous", {}).get("method", "none")
        if reached and not run.config.get("plan") and method == "none":  # others have no single B
            # the largest: the last batch of an epoch holds what is left
            points.append((float(max(row["batch"] for row in run.train)), float(min(reached))))
            names.append(folder.name)
    more = f" and {len(names) - 6} more" if len(names) > 6 else ""
    return fit_law(points, target, f"own runs {', '.join(names[:6])}{more}")


def _run_folders(folder: Path) -> list[Path]:
    """The folder itself where it is one run's, or those under it."""
    found = [] if (folder / "run.json").exists() else sorted(path.parent for path in folder.rglob("run.json"))
    return found or [folder]


MLPERF_EPOCHS = (
    (3200, 35.0), (3264, 35.0), (13056, 45.0), (16384, 47.0), (20480, 50.0), (32256, 56.0), (35840, 58.5),
    (40448, 68.0), (57344, 77.0), (67456, 86.0),
)  # fmt: skip
"""Batch and epochs to 75.9 % of NVIDIA's closed-division ResNet-50 submissions, MLPerf Training v2.0 to v4.0."""

IMAGENET_LARS = fit_law(MLPERF_EPOCHS, 75.9, "MLPerf Training v2.0-v4.0 logs, tuned LARS, ResNet-50 on ImageNet")
"""The frontier of tuned LARS: momentum, warm-up and decay were tuned anew for each batch."""
