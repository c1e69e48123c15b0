"""From a LIBSVM file to a trained classifier and its run folder: what `bigstep train hogwild --data FILE.svm` runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from bigstep.records import RunWriter, locked
from bigstep.sparse.classifier import HogwildClassifier, classes_of
from bigstep.sparse.libsvm import Examples, read_libsvm_files
from bigstep.sparse.modes import ModeName
from bigstep.sparse.saving import save
from bigstep.sparse.threads import seed_of, threads_of

__all__ = ["train_sparse"]


def train_sparse(
    path: str | Path,
    *,
    test: str | Path | None = None,
    loss: Literal["hinge", "logistic"] = "hinge",
    mode: ModeName = "cached",
    n_threads: int = -1,
    epochs: int = 20,
    alpha: float = 1e-4,
    seed: int = 0,
    n_features: int | None = None,
    progress: Callable[[dict[str, Any]], None] | None = None,
    out: Path | None = None,
    facts: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a `HogwildClassifier` on a LIBSVM file.

    Args:
        path: Training examples, plain or gzipped.
        test: Examples to measure accuracy on; None measures on the training examples only.
        loss: "hinge" or "logistic".
        mode: How threads share the weights, a name of `bigstep.sparse.MODES`.
        n_threads: As in `HogwildClassifier`.
        epochs: Passes over the data.
        alpha: L2 coefficient.
        seed: Seed of the order.
        n_features: Columns; None takes the largest index.
        progress: Called after each epoch with epoch, epochs, loss, rate, examples_per_s and seconds.
        out: A run folder to make: `run.json` and `metrics.jsonl`, which `bigstep report` shows, and the estimator as
            `model.safetensors`, which `bigstep.sparse.load` reads.
        facts: Further entries of `run.json`, such as a name.

    Returns:
        Plain values: data, examples, features, nonzeros, classes, seed, accuracy (None without test), train_accuracy,
        loss, seconds, steps, samples, test_examples, the fit report's figures under `report`, and `model`, the file.
    """
    model = HogwildClassifier(loss=loss, mode=mode, n_threads=n_threads, epochs=epochs, alpha=alpha, random_state=seed)
    model._check_params()
    seed_of(seed)
    examples, *others = read_libsvm_files([path] if test is None else [path, test], n_features)
    held_out = others[0] if others else None
    threads_of(n_threads, mode, examples[0].n_rows)
    classes_of(examples[1])  # refuse what `fit` would refuse before a folder is made
    if out is None:
        return _train(model, Path(path), examples, held_out, progress or (lambda row: None))
    with locked(out, fresh=True):
        writer = RunWriter(out, _config(model, Path(path)), device="cpu", **(facts or {}))

        def tell(row: dict[str, Any]) -> None:
            writer.add([_train_row(row, len(examples[1]))])
            if progress is not None:
                progress(row)

        try:
            result = _train(model, Path(path), examples, held_out, tell)
            save(model, out / "model.safetensors")
            result["model"] = str(out / "model.safetensors")
            if held_out is not None:
                row = {name: result[name] for name in ("samples", "accuracy", "seconds")}
                writer.add([{"kind": "eval", "epoch": float(epochs), **row, "eval_loss": result["loss"]}])
            writer.finish(result)
        finally:
            writer.close()
    return result


def _train(
    model: HogwildClassifier,
    path: Path,
    examples: Examples,
    held_out: Examples | None,
    progress: Callable[[dict[str, Any]], None],
) -> dict[str, Any]:
    rows, labels = examples
    model.fit(rows, labels, progress=progress)
    report = model.fit_report_
    return {
        "data": str(path),
        "examples": rows.n_rows,
        "features": rows.n_features,
        "nonzeros": len(rows.values),
        "classes": model.classes_.tolist(),
        "seed": model.random_state,
        "train_accuracy": model.score(rows, labels),
        "train_loss": report.losses[-1],
        "accuracy": None if held_out is None else model.score(*held_out),
        "loss": None if held_out is None else model.mean_loss(*held_out),
        "test_examples": 0 if held_out is None else held_out[0].n_rows,
        "seconds": report.seconds + report.prepare_s,
        "steps": report.updates,
        "samples": report.epochs * rows.n_rows,
        "report": report.as_dict(),
    }


def _config(model: HogwildClassifier, path: Path) -> dict[str, Any]:
    """Describe the run in the fields of other runs, where they mean the same."""
    params = model.get_params()
    return {
        "recipe": "locked" if model.mode == "locked" else "hogwild",
        "preset": "sparse",
        "model": f"linear, {model.loss} loss",
        "data": {"name": path.name, "path": str(path.resolve())},
        "workers": {"count": 1, "local_batch": 1},
        "epochs": params.pop("epochs"),
        "seed": params.pop("random_state"),
        "sparse": params,
    }


def _train_row(row: dict[str, Any], examples: int) -> dict[str, Any]:
    """An epoch as a training row of the records; every example is a step."""
    seen = row["epoch"] * examples
    speed = {"images_per_s": row["examples_per_s"], "seconds": row["seconds"]}
    common = {"step": seen, "epoch": float(row["epoch"]), "samples": seen, "loss": row["loss"], "lr": row["rate"]}
    return {"kind": "train", **common, "batch": 1, **speed}
