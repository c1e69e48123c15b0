"""`bigstep report`: run folders in, tables, plots and pages out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bigstep.errors import ConfigError
from bigstep.records import write_atomically
from bigstep.report.gather import gather
from bigstep.report.html import write_html
from bigstep.report.study import study_of
from bigstep.report.table import as_rows, standings_of, to_csv, to_markdown
from bigstep.report.terminal import print_summary

__all__ = ["report_command"]


def report_command(
    paths: Sequence[Path], *, html: Path | None, csv: Path | None, markdown: bool, quiet: bool
) -> dict[str, Any]:
    """Report on runs and return what `--json` prints.

    Args:
        paths: Run folders, or folders that hold some.
        html: Where to write a page.
        csv: Where to write one row per run.
        markdown: Print a Markdown table instead of plots.
        quiet: Print nothing.
    """
    runs = study_of(gather(paths, lambda line: print(line, file=sys.stderr)))
    if csv is not None:
        _write(csv, to_csv(runs))
    if html is not None:
        write_html(runs, html)
    if not quiet:
        if markdown:
            print(to_markdown(runs), end="")
        else:
            print_summary(runs)
        for target in (html, csv):
            if target is not None:
                print(f"Written: {target}")
    return {
        "summary": runs.sentences(),
        "target": runs.target,
        "standings": standings_of(runs),
        "runs": as_rows(runs),
        "html": str(html) if html else None,
        "csv": str(csv) if csv else None,
    }


def _write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error.strerror}); name another file.") from None
