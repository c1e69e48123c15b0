"""Which runs a report is about: run folders, or folders that hold them, read once and thinned."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from bigstep.errors import DataError
from bigstep.records import Run, read_run

__all__ = ["gather", "run_folders"]

ROWS_IN_ALL = 400_000
"""Training rows kept over all runs: more than any chart shows, and few enough for memory with 10,000 runs."""


def gather(paths: Sequence[Path], tell: Callable[[str], None] = lambda line: None) -> list[Run]:
    """Read every run under the given paths, each once.

    Args:
        paths: Run folders (with run.json), or folders that hold run folders at any depth; of several in such a
            folder, those that cannot be read are left out.
        tell: Called with a sentence about each run that is left out.

    Returns:
        The runs in the order given; long runs keep an even selection of their training rows, and all evaluations.
    """
    folders: dict[Path, Path] = {}
    for path in paths:
        found = list(run_folders(path))
        if not found:
            what = "holds no run folder (one with run.json)" if path.is_dir() else "does not exist or is not a folder"
            raise DataError(f"{path} {what}; give the folder that `bigstep train` wrote.")
        for folder in found:
            folders.setdefault(folder.resolve(), folder)
    most = min(2_000, max(40, ROWS_IN_ALL // max(1, len(folders))))
    named = {path.resolve() for path in paths}
    runs, errors = [], []
    for whole, folder in folders.items():
        try:
            runs.append(_thin(read_run(folder), most))
        except DataError as error:
            if whole in named:
                raise
            errors.append(error)
    if errors and not runs:
        raise errors[0]
    for left_out in errors:
        tell(f"Left out: {left_out}")
    return runs


def run_folders(path: Path) -> Iterator[Path]:
    """Yield the run folders at a path or below it, in order."""
    if (path / "run.json").is_file():
        yield path
    elif path.is_dir():
        yield from sorted(found.parent for found in path.rglob("run.json"))


def _thin(run: Run, most: int) -> Run:
    """Keep `most` evenly spaced training rows, the first and the last among them."""
    train = run.train
    if len(train) <= most:
        return run
    kept = {round(position * (len(train) - 1) / (most - 1)) for position in range(most)}
    keep = {id(train[position]) for position in kept}
    rows = [row for row in run.rows if row.get("kind") != "train" or id(row) in keep]
    return Run(run.folder, run.facts, rows)
