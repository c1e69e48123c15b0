"""`bigstep train hogwild --data FILE.svm`: sparse linear models on a LIBSVM file, in threads."""

from __future__ import annotations

import dataclasses
import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bigstep.cli.options import print_json
from bigstep.config.text import parse_setting
from bigstep.errors import ConfigError, nearest
from bigstep.validate import convert

if TYPE_CHECKING:
    from bigstep.cli.train import Train

__all__ = ["is_sparse_file", "train_sparse_file"]

SETTINGS = {
    "loss": str, "test": str, "mode": str, "n_threads": int, "seed": int, "alpha": float, "n_features": int,
}  # fmt: skip
"""What --set takes here, and of which type."""


def is_sparse_file(data: str | None, recipe: str | None) -> bool:
    """Whether --data names a LIBSVM file; to recipes other than hogwild and locked a .txt file is text.

    >>> is_sparse_file("news20.svm.gz", None), is_sparse_file("news20.txt", "hogwild"), is_sparse_file("my.txt", "sony")
    (True, True, False)
    """
    name = (data or "").removesuffix(".gz")
    return name.endswith((".svm", ".libsvm")) or (name.endswith(".txt") and recipe in ("hogwild", "locked"))


def train_sparse_file(options: Train) -> None:
    """Train a sparse classifier, show its epochs and its report, and save it in a run folder."""
    data, recipe, epochs = str(options.data), options.recipe or "plain", options.epochs
    if recipe not in ("hogwild", "locked"):
        raise ConfigError(f"{data:.200} is a LIBSVM file, on which {recipe} cannot train; use hogwild or locked.")
    if epochs is not None and not (1 <= epochs <= 1e6 and epochs == int(epochs)):
        raise ConfigError(f"--epochs is {epochs:g}, but a sparse problem takes whole epochs, 1 to 1,000,000.")
    _refuse_others(options)
    from bigstep.cli.rank import show_report
    from bigstep.cli.resolve import new_folder
    from bigstep.sparse import train_sparse

    def show(row: dict[str, Any]) -> None:
        print(
            f"{recipe}  epoch {row['epoch']}/{row['epochs']}  loss {row['loss']:.4f}  "
            f"{row['examples_per_s']:,.0f} examples/s",
            file=sys.stderr,
        )

    chosen = {"mode": recipe, **_settings(options)} | ({} if epochs is None else {"epochs": int(epochs)})
    named = {"name": options.name, "tags": options.tag or None}
    facts = train_sparse(
        Path(data),
        progress=None if options.as_json else show,
        out=new_folder(options, f"{recipe}-sparse"),
        facts={key: value for key, value in named.items() if value is not None},
        **chosen,
    )
    if options.report:
        show_report(Path(facts["model"]).parent, quiet=options.as_json)
    if options.as_json:
        print_json(facts)
    else:
        _show_result(facts)


def _show_result(facts: dict[str, Any]) -> None:
    report = facts["report"]
    accuracy, where = facts["train_accuracy"], "on its own examples"
    if facts["accuracy"] is not None:
        accuracy, where = facts["accuracy"], f"on {facts['test_examples']:,} held-out examples"
    threads = "one thread" if report["n_threads"] == 1 else f"{report['n_threads']} threads"
    width = min(100, shutil.get_terminal_size().columns)
    print(f"{facts['examples']:,} examples x {facts['features']:,} features: accuracy {100 * accuracy:.2f} % {where}")
    print(f"{report['examples_per_s']:,.0f} examples/s with {threads}, mode {report['mode']}")
    print(f"{report['conflicts']:,} of {report['watched']:,} watched updates overlapped with another")
    print(textwrap.fill(report["prediction"], width))
    print(f"Model: {facts['model']} (bigstep.sparse.load reads it)")


_USED = {"recipe", "data", "epochs", "seed", "settings", "report", "as_json", "out", "name", "tag"}
_INSTEAD = {
    "procs": "it runs in threads, so write --set n_threads=2",
    "resume": "start a new run, with another --out",
    "tensorboard": "its epochs are in metrics.jsonl, which bigstep report shows",
}


def _refuse_others(options: Train) -> None:
    """Refuse the first option that means nothing to a sparse linear model, instead of ignoring it."""
    for field in dataclasses.fields(options):
        if field.name not in _USED and getattr(options, field.name) != field.default:
            instead = _INSTEAD.get(field.name, "leave it out")
            raise ConfigError(
                f"--{field.name.replace('_', '-')} was given, but {options.data} trains a sparse linear model, which "
                f"has no use for it; {instead}."
            )


def _settings(options: Train) -> dict[str, Any]:
    chosen: dict[str, Any] = {} if options.seed is None else {"seed": options.seed}
    for text in options.settings or ():
        name, value = parse_setting(text)
        if name not in SETTINGS:
            raise ConfigError(f"A sparse problem has no field {name!r:.60}: {nearest(name, SETTINGS)}")
        chosen[name] = convert(SETTINGS[name], value, name)
    return chosen
