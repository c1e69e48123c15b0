"""The report of an examination, in the terminal and as one page that needs nothing else."""

from __future__ import annotations

import time
from pathlib import Path

import bigstep
from bigstep.doctor.examination import Examination
from bigstep.records import write_atomically
from bigstep.report.html import TEMPLATES as SHARED

__all__ = ["print_report", "verdict", "write_page"]

TEMPLATES = Path(__file__).parent / "templates"


def verdict(result: Examination) -> str:
    """Return the result in one sentence."""
    faults, advice = len(result.faults), len(result.advice)
    known = f"{_count(advice, 'thing')} worth knowing" if advice else ""
    if faults:
        return f"{_count(faults, 'fault')} found{f', and {known}' if known else ''}."
    looked = f"{_count(len(result.checked), 'cause')} ruled out, {len(result.unseen)} could not be checked."
    if result.trouble:
        return f"The program could not be examined to the end: {result.trouble}."
    return f"No fault found{f', but {known}' if known else ''}: {looked}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def print_report(result: Examination) -> None:
    """Print the findings, the speeds, and what could not be checked."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    for title, findings in (("", result.faults), ("Worth knowing, and perhaps intended:", result.advice)):
        if title and findings:
            console.print(Text(title, style="dim"))
        for number, finding in enumerate(findings, 1):
            style = "bold red" if finding.level == "fault" else "bold"
            console.print(Text.assemble((f"{number}. {finding.title}", style), (f"  {finding.line}", "cyan")))
            grid = Table.grid(padding=(0, 1, 0, 0))
            grid.add_column(width=8, justify="right")
            grid.add_column()
            for name, text in (("seen", finding.evidence), ("cost", finding.cost), ("change", finding.remedy)):
                grid.add_row(Text(name, style="dim"), Text(text))
            console.print(grid)
    console.print(Text(verdict(result), style="bold" if result.faults or result.trouble else "bold green"))
    for line in (*result.speeds(), *result.notes):
        console.print(Text(line))
    if result.unseen and (result.checked or result.findings):  # otherwise nothing was checked, for the reason above
        console.print(Text(f"Not checked: {'; '.join(f'{n} ({why})' for n, why in result.unseen.items())}.", "dim"))


def write_page(result: Examination, path: Path) -> None:
    """Write the page about an examination."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.get_template("doctor.html").render(
        result=result,
        verdict=verdict(result),
        css=(SHARED / "report.css").read_text(encoding="utf-8"),
        version=bigstep.__version__,
        written=time.strftime("%Y-%m-%d %H:%M"),
    )
    write_atomically(path, page.encode())
