"""`bigstep data`: a data set on a terminal, and its contact sheet."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bigstep.data.catalog import open_data
from bigstep.data.inspect import contact_sheet, describe
from bigstep.data.names import name_of_set
from bigstep.errors import ConfigError

__all__ = ["data_command"]


def data_command(name: str, *, sheet: Path | None, verify: bool, force: bool, quiet: bool) -> dict[str, Any]:
    """Describe a set, print it unless `quiet`, and return what `--json` prints."""
    if sheet is not None and sheet.exists() and not force:
        raise ConfigError(f"{sheet} is there already; add --force to replace it, or name another file.")
    facts = describe(name, verify=verify)
    if sheet is not None:
        contact_sheet(open_data(*name_of_set(name)), sheet, overwrite=force)
        facts["sheet"] = str(sheet)
    if not quiet:
        _print(facts)
    return facts


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    console.print(Text(facts["name"], style="bold"), f"· {len(facts['classes'])} classes")
    for split in ("train", "test"):
        part = facts[split]
        console.print(Text(f"\n{split}: {part['count']:,} samples", style="bold"))
        if "sizes" in part:
            shown = ", ".join(f"{which} {width} × {height}" for which, (width, height) in part["sizes"].items())
            console.print(f"  pixels: {shown}")
        if "mean" in part:
            console.print(f"  mean {part['mean']}  deviation {part['std']}")
        for damaged in part.get("corrupt", []):
            console.print(Text(f"  corrupt: {damaged['file']}: {damaged['reason']}", style="red"))
        if "per_class" in part:
            largest = max(part["per_class"].values(), default=0) or 1
            table = Table(box=None, show_header=False, padding=(0, 1))
            for name, count in list(part["per_class"].items())[:20]:
                table.add_row(f" {name}", f"{count:,}", "█" * round(24 * count / largest))
            console.print(table)
            if len(part["per_class"]) > 20:
                console.print(f"  … and {len(part['per_class']) - 20} more classes")
    if "sheet" in facts:
        console.print(f"\nContact sheet: {facts['sheet']}")
