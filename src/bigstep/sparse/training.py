"""From a LIBSVM file to the facts of a trained classifier: what `bigstep train hogwild --data FILE.svm` runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from bigstep.sparse.classifier import HogwildClassifier
from bigstep.sparse.libsvm import read_libsvm
from bigstep.sparse.modes import ModeName

__all__ = ["train_sparse"]


def train_sparse(
    path: str | Path,
    *,
    test: str | Path | None = None,
    loss: Literal["hinge", "logistic"] = "hinge",
    mode: ModeName = "hogwild",
    n_threads: int = -1,
    epochs: int = 20,
    seed: int = 0,
    progress: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Train a `HogwildClassifier` on a LIBSVM file.

    Args:
        path: Training examples, plain or gzipped.
        test: Examples to measure accuracy on; None measures on the training examples only.
        loss: "hinge" or "logistic".
        mode: "hogwild", "locked", "round_robin" or "serial".
        n_threads: As in `HogwildClassifier`.
        epochs: Passes over the data.
        seed: Seed of the order.
        progress: Called after each epoch with epoch, epochs, loss, rate, examples_per_s and seconds.

    Returns:
        Plain values: data, examples, features, nonzeros, classes, loss, seed, final_loss, train_accuracy, accuracy
        (None without test), test_examples, and the fit report's figures under `report`.
    """
    rows, labels = read_libsvm(path)
    held_out = None if test is None else read_libsvm(test)
    if held_out is not None:
        width = max(rows.n_features, held_out[0].n_features)
        rows = dataclasses.replace(rows, n_features=width)
        held_out = dataclasses.replace(held_out[0], n_features=width), held_out[1]
    model = HogwildClassifier(loss=loss, mode=mode, n_threads=n_threads, epochs=epochs, random_state=seed)
    model.fit(rows, labels, progress=progress)
    return {
        "data": str(path),
        "examples": rows.n_rows,
        "features": rows.n_features,
        "nonzeros": len(rows.values),
        "classes": np.unique(labels).tolist(),
        "loss": loss,
        "seed": seed,
        "final_loss": model.fit_report_.losses[-1],
        "train_accuracy": model.score(rows, labels),
        "accuracy": None if held_out is None else model.score(*held_out),
        "test_examples": 0 if held_out is None else held_out[0].n_rows,
        "report": model.fit_report_.as_dict(),
    }
