"""`bigstep ...` as a process of its own whose ranks are processes of their own, all forked instead of started.

A process that imports torch takes two seconds of a core before it does anything. What these programs are for lies
behind that: signals, locks, records, who waits for whom. How a command starts its ranks is left to test_launch.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from worlds import forked_context


class Program:
    """What a `subprocess.Popen[str]` with pipes would be, as far as tests ask for it."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        err: Path | None = None,
    ) -> None:
        files = Path(tempfile.mkdtemp(prefix="bigstep-program-"))
        weakref.finalize(self, shutil.rmtree, files, ignore_errors=True)
        self._out, self._err = files / "out", err or files / "err"
        environment = dict(os.environ if env is None else env)
        given = (list(arguments), environment, cwd or Path.cwd(), self._out, self._err)
        # daemonic: whatever a test forgets ends with the tests
        self._out.touch()
        self._err.touch()
        self._process = forked_context().Process(target=_become, args=given, daemon=True)
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        status: int | None = self._process.exitcode
        return status

    def send_signal(self, number: signal.Signals) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("bigstep", timeout or 0.0, stderr=self._err.read_bytes())
        return int(self._process.exitcode)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        return self._out.read_text(), self._err.read_text()


def run_script(script: Path, *arguments: str) -> str:
    """What a script prints that runs in its folder, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="bigstep-script-") as folder:
        out = Path(folder, "out")
        process = forked_context().Process(target=_run_script, args=(script, arguments, dict(os.environ), out))
        process.start()
        process.join()
        assert process.exitcode == 0, out.read_text()
        return out.read_text()


def _run_script(script: Path, arguments: Sequence[str], environment: dict[str, str], out: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(script.parent)
    _print_to(out, 1, 2)
    # a script begins with the start method that Python has by itself, not with that of its fork server
    multiprocessing.set_start_method(None, force=True)
    sys.argv = [str(script), *arguments]
    runpy.run_path(str(script), run_name="__main__")
    sys.stdout.flush()


def _become(arguments: list[str], environment: dict[str, str], folder: Path, out: Path, err: Path) -> None:
    from bigstep.__main__ import program
    from bigstep.engine import launch

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # it may have children
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    _print_to(out, 1)
    _print_to(err, 2)
    sys.argv = ["bigstep", *arguments]
    launch._start = _fork  # type: ignore[assignment]
    program()


def _print_to(path: Path, *descriptors: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in descriptors:
        os.dup2(file, number)
    os.close(file)


def _fork(rank: int, procs: int, scratch: Path) -> _Rank:
    """Stands for `launch._start`."""
    from bigstep.__main__ import program
    from bigstep.engine.launch import rank_environment

    environment = rank_environment(rank, procs, scratch)
    sys.stdout.flush()
    sys.stderr.flush()
    number = os.fork()
    if number:
        return _Rank(number)
    try:
        os.setpgid(0, 0)
        Path("/proc/self/comm").write_text(f"rank-{rank}")  # how `programs.rank_processes` knows it
        for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # the launcher's own are not for its ranks
            signal.signal(signal_number, signal.SIG_DFL)
        os.environ.update(environment)
        if rank:
            _print_to(scratch / f"rank-{rank}.log", 1, 2)
        program()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


class _Rank:
    """What the launcher asks of a rank's process."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(ChildProcessError):
                number, status = os.waitpid(self.pid, os.WNOHANG)
                if number:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)
