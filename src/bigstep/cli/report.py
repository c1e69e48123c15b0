"""`bigstep report`: what runs achieved, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bigstep.cli.options import Json, print_json, refuse_existing
from bigstep.errors import ConfigError

__all__ = ["report"]


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one row per run to this file.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print a Markdown table instead of plots.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing output file.")] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Serve a page on this machine that follows the runs.")] = False,
    port: Annotated[int, typer.Option(help="The port of --watch; 0 takes any free one.")] = 0,
    as_json: Json = False,
) -> None:
    """Show what runs achieved, side by side: in the terminal, as a page, or as a table.

    \b
    bigstep report runs/*                     # in the terminal
    bigstep report runs --html report.html    # one page that needs no network
    bigstep report runs --watch               # a local page that follows them
    """
    if watch:
        if html or csv or markdown or as_json:
            raise ConfigError(
                "--watch serves a page of runs in progress; leave out --html, --csv, --markdown and --json."
            )
        from bigstep.report.watch import watch_command

        watch_command(runs, port)
        return
    from bigstep.report.command import report_command

    refuse_existing(html, csv, force=force)
    result = report_command(runs, html=html, csv=csv, markdown=markdown, quiet=as_json)
    if as_json:
        print_json(result)
