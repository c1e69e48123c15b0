"""What the coordinator writes down: updates as they are reported, evaluations of snapshots, and the result."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from bigstep.asynchronous.resume import Progress
from bigstep.config.text import config_to_mapping
from bigstep.engine.build import Run
from bigstep.engine.checkpoint import save_checkpoint, weights_hash
from bigstep.engine.evaluate import Evaluation
from bigstep.engine.observers.base import Audience
from bigstep.engine.run import Order
from bigstep.errors import RunError
from bigstep.records import RunWriter, median_of_last_epochs

__all__ = ["Ledger"]

_SECONDS_BETWEEN_FLUSHES = 0.5


class Ledger:
    """Counts updates and samples, writes rows, and knows when an evaluation is due.

    A step of an asynchronous run is one accepted update. Rows come in the order in which reports arrive, which is not
    exactly the order in which updates were made.
    """

    def __init__(self, run: Run, writer: RunWriter, audience: Audience, saved: Progress | None = None):
        """`saved` is where a resumed run goes on."""
        self.run, self._writer, self._audience = run, writer, audience
        self.updates, self.samples = (saved.updates, saved.samples) if saved else (0, 0)
        self.lost = 0
        self.staleness: Counter[int] = Counter()
        self._loss = math.nan
        self._rows: list[dict[str, Any]] = []
        self._started = self._flushed = time.perf_counter()
        self._evaluated_at = self._saved_at = self.samples
        self._seconds_before = saved.seconds if saved else 0.0

    def begin(self) -> None:
        """Start the clock: every process is ready."""
        self._flushed = time.perf_counter()
        self._started = self._flushed - self._seconds_before

    @property
    def seconds(self) -> float:
        """Seconds since `begin`, and those before a run was resumed."""
        return time.perf_counter() - self._started

    @property
    def epoch(self) -> float:
        """Passes over the training set, as reported so far."""
        return self.samples / self.run.sampler.size

    def note(self, text: str) -> None:
        """Write a remark into the records and show it."""
        self._audience.noted(text)

    def take(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Take in what a replica reports: one row per update, refused ones included."""
        for told in rows:
            if not told["accepted"]:
                self.lost += 1
                continue
            self.updates += 1
            self.samples += told["batch"]
            self.lost += told.get("overlapped", 0)
            self.staleness[told["staleness"]] += 1
            row = {"kind": "train", "step": self.updates, "epoch": self.epoch, "samples": self.samples, **told}
            del row["accepted"]
            self._loss = _finite(row)
            self._rows.append(row)
        if time.perf_counter() - self._flushed > _SECONDS_BETWEEN_FLUSHES:
            self.flush()

    def flush(self) -> None:
        """Write the rows that have accumulated."""
        now = time.perf_counter()
        images_per_s = sum(row["batch"] for row in self._rows) / max(now - self._flushed, 1e-9)
        for row in self._rows:
            row |= {"images_per_s": images_per_s, "seconds": now - self._started}
            self._audience.row(row)
        self._rows, self._flushed = [], now

    @property
    def evaluation_due(self) -> bool:
        """Whether the updates have gone past a multiple of `evaluate_every`; the end of a run is left to `finish`."""
        return self._crossed(self.run.config.evaluate_every, self._evaluated_at)

    @property
    def save_due(self) -> bool:
        """Whether the updates have gone past a multiple of `checkpoint.every`."""
        return self._crossed(self.run.config.checkpoint.every, self._saved_at)

    def _crossed(self, every: float, since: int) -> bool:
        size = self.run.sampler.size
        if not every or self.samples >= self.run.config.epochs * size:
            return False
        # 1e-9 forgives the rounding of fractions
        return math.floor(self.samples / (every * size) + 1e-9) > math.floor(since / (every * size) + 1e-9)

    def evaluate(self, take_snapshot: Callable[[], None]) -> Evaluation:
        """Evaluate the network as it is now; replicas go on meanwhile."""
        where = {"step": self.updates, "epoch": self.epoch, "samples": self.samples, "seconds": self.seconds}
        self._evaluated_at = self.samples
        take_snapshot()
        evaluation = self.run.evaluate()
        self._audience.evaluated({"kind": "eval", **where, **evaluation.facts()})
        return evaluation

    def save(self, folder: Path, take_snapshot: Callable[[], None]) -> None:
        """Write the weights as they are now: a network to use, not a state to resume; a full disk is only noted."""
        self._saved_at = self.samples
        take_snapshot()
        config = self.run.config
        state = {
            "config": config_to_mapping(config),
            "position": {
                "epoch": int(self.epoch),
                "offset": self.samples % self.run.sampler.size,
                "step": self.updates,
            },
            "seconds": self.seconds,
            "model": self.run.learner.model.state_dict(),
        }
        try:
            save_checkpoint(folder / "checkpoints", self.updates, state, config.checkpoint.keep)
        except OSError as error:
            self.note(f"The weights of update {self.updates} could not be written to {folder} ({error.strerror}).")

    def finish(self, order: Order, take_snapshot: Callable[[], None], seconds: float, **facts: Any) -> dict[str, Any]:
        """Evaluate the final weights and return the result of the run; `facts` override what the rows add up to."""
        self.flush()
        evaluation = self.evaluate(take_snapshot)
        self.save(order.folder, lambda: None)
        config = order.config
        result = {
            **evaluation.facts(),
            "accuracy_last5": median_of_last_epochs(self._writer.evaluations),
            "loss": self._loss,
            "seconds": seconds,
            "steps": self.updates,
            "samples": self.samples,
            "batch": config.workers.local_batch,
            "workers": config.workers.count,
            "ranks": config.asynchronous.replicas,
            "weights_sha256": weights_hash(self.run.learner.model),
            "run": str(order.folder),
            "updates": self.updates,
            "lost_updates": self.lost,
            "staleness": self.staleness,
        } | facts
        result["updates_per_s"] = result["updates"] / max(seconds, 1e-9)
        result["staleness"] = {str(lag): count for lag, count in sorted(result["staleness"].items())}
        self._writer.finish(result)
        return result


def _finite(row: Mapping[str, Any]) -> float:
    loss = row["loss"]
    if loss is None or not math.isfinite(loss):
        raise RunError(
            f"The loss of replica {row['replica']} is {loss} at update {row['step']} (epoch {row['epoch']:.2f}, "
            f"learning rate {row['lr']:.4g}); lower lr.base or use fewer replicas."
        )
    return float(loss)
