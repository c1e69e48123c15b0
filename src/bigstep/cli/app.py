"""The program: it assembles the commands, and reports every expected failure in one sentence."""

from __future__ import annotations

import errno
import functools
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

import bigstep
from bigstep.cli import bench, check, data, doctor, export, join, plan, probe, recipes, report, train
from bigstep.cli.options import command_of
from bigstep.cli.streams import fill_streams, folded_for, show_for_now
from bigstep.errors import BigstepError

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """The commands; a wrong value is reported in our own words: the value, and what is allowed."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was typed."""
        try:
            return super().invoke(ctx)
        except Exception as error:
            errors = getattr(error.__cause__, "errors", None)  # pydantic's, which typer checks values with
            if callable(errors) and hasattr(error, "message"):
                (first, *_) = errors()
                limits = first.get("ctx", {})
                allowed = next((rule.format(**limits) for kind, rule in _ALLOWED.items() if kind in first["type"]), "")
                if allowed:
                    error.message = f"{first['input']!r:.60} was given, but it must be {allowed}."
            raise


_ALLOWED = {
    "int_": "a whole number", "float_": "a number", "greater_than_equal": "{ge:g} or more",
    "less_than_equal": "{le:g} or less",
}  # fmt: skip
"""What is allowed where a value breaks a rule, by the beginning of the rule's name."""

app = typer.Typer(
    cls=_Commands,
    help="Distributed SGD for PyTorch: train with many workers, prove that N ranks give the result of one, compare "
    "the published systems side by side, and predict a run before you rent a cluster.",
    epilog="Start with `bigstep train`: it trains on data that ships with the package, in about half a minute.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich's boxes leave 18 of 80 columns for the help of an option
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


SLOW_TO_START = ("join", "check", "bench", "export", "probe", "data")
"""Commands that load torch, which takes seconds, before they print anything; `train` shows the line by itself."""


def _telling(name: str, command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command so that it reports Ctrl-C, about which typer says nothing."""

    @functools.wraps(command)
    def told(*words: Any, **options: Any) -> None:
        if name in SLOW_TO_START:
            show_for_now("starting …")
        try:
            command(*words, **options)
        except KeyboardInterrupt:
            _end(f"interrupted{'; a run that was under way continues with --resume' if name == 'train' else ''}.", 130)

    return told


for name, summary, command in (
    ("train", "Train with a published system.", command_of(train.Train, train.train)),
    ("join", "Join a Downpour run started on another machine.", join.join),
    ("doctor", "Find out what is wrong with a script on several devices.", doctor.doctor),
    ("check", "Prove that N ranks give the result of one.", check.check),
    ("bench", "Compare systems side by side.", command_of(bench.Bench, bench.bench)),
    ("plan", "Predict a run before you rent a cluster.", plan.plan),
    ("report", "Show what runs achieved.", report.report),
    ("recipes", "List the recipes, or explain one.", recipes.recipes),
    ("export", "Write a trained model for other tools.", export.export),
    ("probe", "Measure this machine for the planner.", probe.probe),
    ("data", "Inspect a data set, or pack it.", data.data),
):
    # doctor: what follows the name of a script belongs to the script
    passes_on = {"ignore_unknown_options": True, "allow_interspersed_args": False}
    settings = passes_on if name == "doctor" else None
    app.command(name, short_help=summary, context_settings=settings)(_telling(name, command))


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"bigstep {bigstep.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the program, or one rank of it; every expected failure is one sentence on stderr."""
    from bigstep.engine.job import JOB_VARIABLE

    fill_streams()
    try:
        # so that package.module:function finds the user's modules; last, so that they hide no others
        sys.path.append(os.getcwd())
    except FileNotFoundError:
        _end("The current folder no longer exists; change to another one.", 2)
    job = os.environ.pop(JOB_VARIABLE, None)
    try:
        _as_rank(Path(job)) if job else app(prog_name="bigstep")
    except BigstepError as error:
        # a rank of our own launcher always speaks: the launcher collects the output and shows what matters
        _end(str(error) if job or error.exit_status != 2 else _told_here(str(error)), error.exit_status)
    except BrokenPipeError:  # the reader closed the pipe, as `| head` does
        _print_no_more()
        sys.exit(0)
    except OSError as error:
        if error.filename is None and error.errno == errno.ENOSPC:
            _print_no_more()
            _end(f"The output cannot be written ({error.strerror}): free some space on the disk that it goes to.", 1)
        if error.filename is None:
            raise
        _end(f"{str(error.filename)[:120]!r} cannot be used ({error.strerror}).", 2)  # a path that was typed
    except KeyboardInterrupt:
        if job:  # the run handled no signals yet: dying of the signal itself tells the launcher that nothing is saved
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        _end("interrupted; a run that was under way continues with --resume.", 130)


def _print_no_more() -> None:
    """Send stdout to /dev/null, so that flushing it at exit does not fail a second time."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _as_rank(job: Path) -> None:
    from bigstep.cli.rank import train_as_rank
    from bigstep.engine.job import Job
    from bigstep.engine.launch import die_with_launcher

    die_with_launcher()
    train_as_rank(Job.read(job))
    # the result is out: a SIGTERM that asks ranks to save must not make the first one look stopped
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(0)


def _told_here(mistake: str) -> str:
    """What this rank prints: one rank of each machine speaks, since the mistake may differ between machines."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    rank, size, local_rank = (os.environ.get(name, "") for name in names)
    local_rank = local_rank or rank
    if not all(number.isdecimal() for number in (rank, size, local_rank)) or not 0 < int(rank) < int(size):
        return mistake
    return "" if int(local_rank) else f"Rank {rank}: {mistake}"


def _end(sentence: str, status: int) -> NoReturn:
    if sentence:
        readable = re.sub(r"\S{200,}", lambda word: f"{word[0][:80]}…", sentence)  # e.g. a name of 5,000 characters
        print(folded_for(sys.stderr, f"bigstep: {readable}"), file=sys.stderr)
    sys.exit(status)
