"""Fixtures that many tests share: Gloo worlds whose ranks stay alive between tests."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys

# before torch is imported, here and in every process that a test starts: two spinning threads a process would make a
# test of four ranks on two cores wait for its own threads
os.environ.setdefault("OMP_NUM_THREADS", "1")
# before Triton is imported, by whomever: it decides for its own functions then, and kernels of tests need it all
if not os.environ.get("BIGSTEP_TEST_GPU"):
    os.environ["TRITON_INTERPRET"] = "1"
# some hundred processes start, and each would compile this package again
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# who starts the tests in the background of a script has Ctrl-C ignored, by every process that a test starts, too; who
# starts them with nohup, the end of the terminal
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from worlds import Pool, WarmContext, World, forked_context

if TYPE_CHECKING:
    from bigstep.check import Pool as CheckPool

collect_ignore = ["preloaded.py"]  # it is for another process, and does at once what it is for

LONGEST = tuple(
    f"test_{name}.py"
    for name in (
        "site", "examples", "check", "faults", "doctor_live", "exact", "launch", "hostile", "documented_commands",
        "report_browser", "codecs_blocks", "idle_ranks", "same_path", "codecs_exact", "hosts", "islands", "growth",
        "bench", "gate", "adagrad", "check_pool", "exact_path", "plan_page", "door", "plan", "downpour",
        "kernels_transform", "plan_ways", "bad_input", "recipes", "kernels_batch_norm", "sparse_classifier",
        "data_files", "comm", "islands_survive", "cluster_examples", "report_html", "faults_diagnosis",
        "doctor_trouble",
    )
)  # fmt: skip
"""Files of tests that take ten seconds and more, the longest first: none of them is begun when the rest is done.

Before them two that need no forked ranks, while the server that forks them gets ready.
"""

NETWORK = {"test_hosts.py", "test_lab.py", "test_validate_local.py"}
"""Files of tests that count the machine's network namespaces."""


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Two processes for the whole suite, which is how long two cores take; this one alone for a file or a test."""
    if not config.option.file_or_dir and (os.cpu_count() or 1) > 1:
        return 2
    config.option.dist = "no"
    return 0


def pytest_sessionstart() -> None:
    """Where all tests are run, the server that forks their processes gets ready while they are collected."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        forked_context()


class ByFile(LoadScopeScheduling):
    """A file's tests share a process, what they share is made once; so do all that count the network namespaces."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.split("::")[0]).name
        return "network" if file in NETWORK else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first."""
    assert all(item.path.name in NETWORK for item in items if item.get_closest_marker("netns"))
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


def pytest_collection_finish() -> None:
    """Leave what was imported, which lives as long as the session, out of every later garbage collection."""
    gc.freeze()
    atexit.register(gc.unfreeze)  # else extension modules tell of what they find not taken apart


@pytest.fixture(scope="session")
def _pool() -> Iterator[Pool]:
    pool = Pool()
    yield pool
    pool.close()


@pytest.fixture
def world(_pool: Pool) -> Callable[[int], World]:
    """`world(4).run(function, *args)` runs `function(*args)` on four ranks and returns their four results."""
    return _pool.world


@pytest.fixture(autouse=True, scope="session")
def _warm_processes() -> Iterator[None]:
    """Checks and asynchronous runs in this process get theirs from the server that has imported torch."""
    if "torch" not in sys.modules:  # a few files of tests that need none, run alone
        yield
        return
    from bigstep.asynchronous import board, processes
    from bigstep.check import pool

    with pytest.MonkeyPatch.context() as patch:
        for module in (board, processes, pool):
            patch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda method: WarmContext()))
        yield


@pytest.fixture(scope="session")
def check_pool() -> Iterator[CheckPool]:
    """Processes for checks, as bigstep keeps them."""
    from bigstep.check import Pool as CheckPool

    with CheckPool(call_timeout_s=120) as pool:
        yield pool


@pytest.fixture
def bigstep(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str, str]]:
    """Run `bigstep ARGUMENTS` in this process, in an empty folder; return status, output and what was told."""
    from bigstep.cli import main

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BIGSTEP_DATA", str(tmp_path / "cache"))

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["bigstep", *arguments])
        with pytest.raises(SystemExit) as ending:
            main()
        captured = capsys.readouterr()
        return int(ending.value.code or 0), captured.out, captured.err

    return call
