"""What clusters do to a run: signals, stopped and stuck ranks, a second run on its folder; each with one sentence."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bigstep import recipes
from bigstep.config.text import apply_settings
from bigstep.records import read_run
from bigstep.train import fit
from programs import (
    SETTINGS,
    STEPS,
    Run,
    environment,
    rank_processes,
    sentences,
    start,
    start_cold,
    wait_for_rows,
)
from warm import Program
from worlds import World


def finish(process: Run, seconds: float = 200) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=seconds)
    assert "Traceback" not in err, err
    return process.returncode, out, err


TIMEOUT_S = 3

STUCK = """
import os, time
import torch

class Stuck(torch.utils.data.Dataset):
    classes = ("a", "b")
    looks = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.looks += 1
        if os.environ.get("RANK") == "1" and self.looks == 40:
            time.sleep(600)
        return torch.full((1, 4, 4), float(index % 7)), index % 2

def pair():
    return Stuck(), Stuck()
"""


@dataclass
class Ending:
    """How a run ended that had lost a rank, and when, counted from the loss."""

    status: int
    err: str
    seconds: float
    rank_is_left: bool


def ending(process: Run, pid: int | None = None) -> Ending:
    began = time.monotonic()
    status, _, err = finish(process)
    seconds = time.monotonic() - began
    return Ending(status, err, seconds, pid is not None and Path(f"/proc/{pid}").exists())


@pytest.fixture(scope="module", autouse=True)
def endings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Ending]]:
    """Runs of two ranks that lose one; they wait out their timeouts while the other tests run."""
    place = tmp_path_factory.mktemp("lost")
    more = ["--procs", "2", "--timeout", str(TIMEOUT_S)]
    with ThreadPoolExecutor() as watchers:
        watched = {}
        for stopped in (0, 1):
            folder = place / f"stopped-{stopped}"
            process = start(folder, *more)
            wait_for_rows(process, folder, 10)
            pid = rank_processes(process.pid)[stopped]
            os.kill(pid, signal.SIGSTOP)
            watched[folder.name] = watchers.submit(ending, process, pid)
        (place / "stuck.py").write_text(STUCK)
        for setting in ("workers.count=4", "workers.local_batch=2", "data.loaders=0", "epochs=9"):
            more += ["--set", setting]
        stuck = start(place / "stuck", *more, "--data", "stuck:pair", cwd=place)
        watched["stuck"] = watchers.submit(ending, stuck)
        yield lambda name: watched[name].result()


def fit_whole(folder: Path, settings: list[str], resume: bool = False) -> str:
    """The run that nobody touches, or what is left of one, on the ranks that call this."""
    config = apply_settings(recipes.load("plain", "mini"), settings)
    return fit(config, out=folder, device="cpu", resume=resume).weights_sha256


@pytest.mark.timeout(400)
def test_signals_to_the_launcher_save_and_the_resumed_run_has_the_same_bits(
    world: Callable[[int], World], tmp_path: Path
) -> None:
    whole = world(2).run(fit_whole, tmp_path / "whole", SETTINGS)
    folder = tmp_path / "parts"
    for number, rows, more in ((signal.SIGINT, 15, []), (signal.SIGTERM, 45, ["--resume"])):
        process = start(folder, "--procs", "2", *more)
        wait_for_rows(process, folder, rows)
        os.kill(process.pid, number)
        status, out, err = finish(process)
        assert status == 128 + number, err
        assert out == ""
        (said,) = sentences(err)
        assert said.startswith(f"bigstep: Stopped by {number.name} after step ")
        assert said.endswith("; its state is saved: continue with --resume.")
    assert world(2).run(fit_whole, folder, SETTINGS, True) == whole
    losses = [(row["step"], row["loss"]) for row in read_run(folder).train]
    assert losses == [(row["step"], row["loss"]) for row in read_run(tmp_path / "whole").train]


@pytest.mark.timeout(400)
def test_a_second_run_on_a_folder_gets_one_sentence_and_the_first_is_unharmed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = start(folder)
    wait_for_rows(first, folder, 5)
    first.send_signal(signal.SIGSTOP)  # so that it cannot end before the second has tried
    try:
        status, _, err = finish(start(folder, "--resume", "--procs", "2"))
    finally:
        first.send_signal(signal.SIGCONT)
    assert status == 2, err
    assert sentences(err) == [
        f"bigstep: Another run is writing into {folder}; wait until it ends, or choose another folder with --out."
    ]
    status, out, err = finish(first)
    assert status == 0, err
    assert [row["step"] for row in read_run(folder).train] == list(range(1, json.loads(out)["steps"] + 1))


def start_logged(folder: Path, log: Path, *more: str) -> Program:
    """What the benchmark of kills starts, with its words in a file."""
    import kills

    return Program(kills.command(folder, *more)[3:], env=environment(), err=log)


@pytest.mark.timeout(400)
def test_three_killed_ranks_do_not_stop_an_elastic_run_nor_change_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent.parent / "benchmarks" / "faults")
    import kills

    monkeypatch.setattr(kills, "start", start_logged)
    monkeypatch.setattr(kills, "ranks_of", rank_processes)
    fit_whole(tmp_path / "whole", kills.SETTINGS)
    whole = kills.Whole(tmp_path / "whole", seconds=0.0)
    run = kills.run_with_kills(tmp_path / "run", ranks=2, kills=3, whole=whole, chance=random.Random(0))
    assert len(run["kills"]) == 3
    assert run["fault"] is None, run


@pytest.mark.timeout(400)
def test_torchrun_restarts_a_run_from_its_last_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "3")
    # else torchrun keeps its store through a restart, with the addresses of the ranks that died (docs/clusters.md)
    fresh_store = environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    process = start_cold(folder, "--resume", launcher=launcher, env=fresh_store)
    wait_for_rows(process, folder, 25)
    os.kill(rank_processes(process.pid)[1], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    run = read_run(folder)
    assert json.loads(out)["steps"] == STEPS
    assert [row["step"] for row in run.train] == list(range(1, STEPS + 1))
    resumed = [note for note in run.notes if note.startswith("Resumed at step")]
    assert len(resumed) == 1
    assert int(resumed[0].split()[-1].rstrip(".")) >= 4, "a checkpoint was there, and the run began anew"


@pytest.mark.timeout(400)
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_rank_is_named_with_its_step_and_the_exchange(endings: Callable[[str], Ending], stopped: int) -> None:
    ended = endings(f"stopped-{stopped}")
    assert ended.status == 1
    (said,) = sentences(ended.err)
    assert f"rank {stopped} is silent, last heard of at step " in said
    assert re.search(
        r"exchange \(none\) of step \d+ failed|failed at step \d+ in (the sum of losses|a checkpoint)", said
    )
    # 2 s to look for dead processes, 2.5 s for signs of life, 10 s for a rank 0 that does not answer
    assert ended.seconds < TIMEOUT_S + 12 + 10 * (stopped == 0)
    assert not ended.rank_is_left, "the stopped rank was left behind"


@pytest.mark.timeout(400)
def test_a_stuck_rank_is_named_with_the_place_where_it_stands(endings: Callable[[str], Ending]) -> None:
    ended = endings("stuck")
    assert ended.status == 1
    (said,) = sentences(ended.err)
    assert "rank 1 stands at step " in said
    assert "__getitem__ line " in said
