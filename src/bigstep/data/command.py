"""`bigstep data`: show a data set on the terminal, draw its contact sheet, or pack it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigstep.data.catalog import open_data
from bigstep.data.inspect import contact_sheet, describe
from bigstep.data.names import Packing, Wanted, name_of_set
from bigstep.errors import ConfigError
from bigstep.tables import load
from bigstep.tables.datasets import DATASETS

__all__ = ["data_command", "is_sound", "pack_command"]


def data_command(
    name: str, *, sheet: Path | None, verify: bool, force: bool, quiet: bool, length: int, vocabulary: str
) -> dict[str, Any]:
    """Describe a set, print it unless `quiet`, and return what `--json` prints."""
    facts = describe(name, verify=verify, length=length, vocabulary=vocabulary)
    if sheet is not None:
        contact_sheet(open_data(*name_of_set(name)), sheet, overwrite=force)
        facts["sheet"] = str(sheet)
    if not quiet:
        _print(facts)
    return facts


def pack_command(given: str, packing: Packing, *, vocabulary: str) -> dict[str, Any]:
    """Pack a set and return what `--json` prints."""
    name, path = name_of_set(given)
    packer = DATASETS[name].packer if name in DATASETS else ""
    if packer and not path:
        raise ConfigError(f"{given} is a kind of data, not a path; give `bigstep data pack` the path of yours.")
    if not packer:
        known = ", ".join(known for known, entry in DATASETS.items() if entry.packer)
        raise ConfigError(f"{given} cannot be packed, since it would gain nothing; pack data of the kinds {known}.")
    packed: dict[str, Any] = load(packer)(Wanted(name=name, path=path, vocabulary=vocabulary), packing)
    return packed


def is_sound(facts: dict[str, Any]) -> bool:
    """Whether no damaged sample was found."""
    return not any(facts[split].get("corrupt") for split in ("train", "test"))


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.control import Control
    from rich.segment import ControlType
    from rich.table import Table
    from rich.text import Text

    console = Console()
    if console.is_terminal:
        console.control(Control((ControlType.ERASE_IN_LINE, 0)))  # the progress line
    console.print(Text(facts["name"], style="bold"), f"· {len(facts['classes'])} classes" if facts["classes"] else "")
    for split in ("train", "test"):
        part = facts[split]
        console.print(Text(f"\n{split}: {part['count']:,} {facts['unit']}", style="bold"))
        for line in _lines(part):
            console.print(f"  {line}")
        for damaged in part.get("corrupt", []):
            named = damaged["reason"].startswith(damaged["file"])
            told = damaged["reason"] if named else f"{damaged['file']}: {damaged['reason']}"
            console.print(Text(f"  corrupt: {told}", style="red"))
        if "per_class" in part:
            largest = max(part["per_class"].values(), default=0) or 1
            table = Table(box=None, show_header=False, padding=(0, 1))
            for name, count in list(part["per_class"].items())[:20]:
                table.add_row(Text(f" {name}"), f"{count:,}", "█" * round(24 * count / largest))
            console.print(table)
            if len(part["per_class"]) > 20:
                console.print(f"  … and {len(part['per_class']) - 20} more classes")
    if "baselines" in facts:
        told = facts["baselines"]
        console.print(
            f"\nTo beat on the test set: {told['unigram']} {told['unit']} with counts of single tokens, "
            f"{told['bigram']} with counts of pairs."
        )
    if "sheet" in facts:
        console.print(f"\nContact sheet: {facts['sheet']}")


def _lines(part: dict[str, Any]) -> Iterator[str]:
    """What a source says of itself, a line a fact."""
    if "sizes" in part:
        shown = ", ".join(f"{which} {width} × {height}" for which, (width, height) in part["sizes"].items())
        yield f"pixels: {shown}"
    if "checked" in part:
        yield f"read: {part['checked']:,} of {part['count']:,}, {len(part['corrupt']) or 'none'} corrupt"
    if "mean" in part:
        yield f"mean {part['mean']}  deviation {part['std']}"
    if "item" in part:
        yield f"an item: {part['item']}"
    if "tokens" in part:
        known = part["vocabulary"]
        each = f", {part['bytes_per_token']} bytes each" if "bytes_per_token" in part else ""
        yield f"{part['tokens']:,} tokens{each}, in windows of {part['length']:,}"
        yield f"vocabulary {known['name']}: {known['size']:,} tokens, of which {known['seen']:,} occur"
