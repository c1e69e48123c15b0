"""`bigstep train hogwild --data FILE.svm`: sparse linear models on a LIBSVM file, in threads."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bigstep.errors import ConfigError, nearest

__all__ = ["is_sparse_file", "sparse_command"]

SETTINGS = {"loss": str, "test": str, "n_threads": int, "seed": int}
"""What --set takes here."""


def is_sparse_file(data: str | None) -> bool:
    """Whether --data names a LIBSVM file.

    >>> is_sparse_file("news20.svm.gz"), is_sparse_file("cifar10"), is_sparse_file(None)
    (True, False, False)
    """
    name = (data or "").removesuffix(".gz")
    return name.endswith((".svm", ".libsvm", ".txt"))


def sparse_command(
    recipe: str, data: str, epochs: float | None, settings: list[str] | None, *, quiet: bool
) -> dict[str, Any]:
    """Train a sparse classifier, show its epochs and what it reports, and return the facts."""
    if recipe not in ("hogwild", "locked"):
        raise ConfigError(f"{data} is a LIBSVM file, which hogwild and locked train on, and {recipe} does not.")
    if epochs is not None and (epochs != int(epochs) or epochs < 1):
        raise ConfigError(f"--epochs is {epochs:g}, but a sparse problem takes whole epochs.")
    from bigstep.sparse import train_sparse

    def show(row: dict[str, Any]) -> None:
        print(
            f"{recipe}  epoch {row['epoch']}/{row['epochs']}  loss {row['loss']:.4f}  "
            f"{row['examples_per_s']:,.0f} examples/s",
            file=sys.stderr,
        )

    chosen = _settings(settings or []) | ({} if epochs is None else {"epochs": int(epochs)})
    facts = train_sparse(Path(data), mode=recipe, progress=None if quiet else show, **chosen)  # type: ignore[arg-type]
    if not quiet:
        report = facts["report"]
        size = f"{facts['examples']:,} examples x {facts['features']:,} features"
        accuracy, where = facts["train_accuracy"], "on its own examples"
        if facts["accuracy"] is not None:
            accuracy, where = facts["accuracy"], f"on {facts['test_examples']:,} held-out examples"
        print(
            f"{size}: accuracy {100 * accuracy:.2f} % {where}\n"
            f"{report['examples_per_s']:,.0f} examples/s with {report['n_threads']} threads\n"
            f"{report['conflicts']:,} of {report['watched']:,} watched updates met another\n{report['prediction']}"
        )
    return facts


def _settings(texts: list[str]) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in SETTINGS:
            raise ConfigError(f"A sparse problem has no field {name!r}: {nearest(name, SETTINGS)}.")
        try:
            chosen[name] = SETTINGS[name](value)
        except ValueError:
            raise ConfigError(f"{name} takes a whole number (got {value!r}).") from None
    return chosen
