"""`bigstep train hogwild --data FILE.svm`: sparse linear models on a LIBSVM file, in threads."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigstep.cli.options import print_json
from bigstep.errors import ConfigError, nearest

if TYPE_CHECKING:
    from bigstep.cli.train import Train

__all__ = ["is_sparse_file", "train_sparse_file"]

SETTINGS = {"loss": str, "test": str, "n_threads": int, "seed": int}
"""What --set takes here."""


def is_sparse_file(data: str | None) -> bool:
    """Whether --data names a LIBSVM file.

    >>> is_sparse_file("news20.svm.gz"), is_sparse_file("cifar10"), is_sparse_file(None)
    (True, False, False)
    """
    name = (data or "").removesuffix(".gz")
    return name.endswith((".svm", ".libsvm", ".txt"))


def train_sparse_file(options: Train) -> None:
    """Train a sparse classifier, show its epochs and what it reports."""
    data, recipe, epochs = str(options.data), options.recipe or "plain", options.epochs
    if recipe not in ("hogwild", "locked"):
        raise ConfigError(f"{data} is a LIBSVM file, which hogwild and locked train on, and {recipe} does not.")
    if epochs is not None and not (1 <= epochs <= 1e6 and epochs == int(epochs)):
        raise ConfigError(f"--epochs is {epochs:g}, but a sparse problem takes whole epochs, 1 to 1,000,000.")
    _refuse_others(options)
    from bigstep.sparse import train_sparse

    def show(row: dict[str, Any]) -> None:
        print(
            f"{recipe}  epoch {row['epoch']}/{row['epochs']}  loss {row['loss']:.4f}  "
            f"{row['examples_per_s']:,.0f} examples/s",
            file=sys.stderr,
        )

    chosen = _settings(options) | ({} if epochs is None else {"epochs": int(epochs)})
    facts = train_sparse(Path(data), mode=recipe, progress=None if options.as_json else show, **chosen)  # type: ignore[arg-type]
    if options.as_json:
        print_json(facts)
    else:
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


_USED = {"recipe", "data", "epochs", "seed", "settings", "report", "as_json"}


def _refuse_others(options: Train) -> None:
    """Name the first option that means nothing to a sparse linear model, rather than pass over it."""
    for field in dataclasses.fields(options):
        if field.name not in _USED and getattr(options, field.name) != field.default:
            name = field.name.replace("_", "-")
            raise ConfigError(
                f"--{name} was given, but {options.data} trains a sparse linear model, which has no use for it; leave "
                "it out."
            )


def _settings(options: Train) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if options.seed is None else {"seed": options.seed}
    for text in options.settings or ():
        name, _, value = text.partition("=")
        if name not in SETTINGS:
            raise ConfigError(f"A sparse problem has no field {name!r}: {nearest(name, SETTINGS)}.")
        try:
            chosen[name] = SETTINGS[name](value)
        except ValueError:
            raise ConfigError(f"{name} takes a whole number (got {value!r}).") from None
    return chosen
