"""Ranks that somebody else started: recognised, brought together, and told of a mistake once a machine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bigstep.engine.launchers import Place, adopt_launcher
from bigstep.engine.ranks import joined_ranks
from bigstep.errors import ConfigError
from worlds import forked_context

Bigstep = Callable[..., tuple[int, str, str]]
PATIENCE_S = 50.0

OMPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "place", "local"),
    [
        (OMPI, Place(1, 2), ("1", "2")),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MASTER_ADDR": "a"}, Place(0, 4), ("0", "4")),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}, None, None),  # the batch script itself, not a task of srun
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, None, None),
        ({}, None, None),
    ],
)
def test_ranks_of_other_launchers_are_recognised(
    environment: dict[str, str], place: Place | None, local: tuple[str, str] | None
) -> None:
    environment = dict(environment)
    assert adopt_launcher(environment) == place
    if local is not None:
        assert (environment["LOCAL_RANK"], environment["LOCAL_WORLD_SIZE"]) == local
        assert 20_000 <= int(environment["MASTER_PORT"]) < 32_768


def test_all_ranks_of_a_job_agree_on_the_port_and_other_jobs_do_not_meet_it() -> None:
    ports = []
    for rank, job in ((0, "17"), (3, "17"), (0, "18")):
        step = {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": job, "SLURM_STEP_ID": "0"}
        adopt_launcher(step)
        ports.append(step["MASTER_PORT"])
    assert ports[0] == ports[1] != ports[2]
    hydra = [{"PMI_RANK": rank, "PMI_ID": rank, "PMI_SIZE": "2", "HYDI_CONTROL_FD": f"{rank}9"} for rank in "01"]
    for process in hydra:
        adopt_launcher(process)
    assert hydra[0]["MASTER_PORT"] == hydra[1]["MASTER_PORT"]


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
        ({"WORLD_SIZE": "2"}, "RANK is not set"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "numbered from 0"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE is 0"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "-1"}, "MASTER_PORT is '-1'"),
    ],
)
def test_a_place_that_cannot_be_is_one_sentence(environment: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        adopt_launcher(environment)


@pytest.mark.parametrize(
    ("place", "begins"),
    [
        (("0", "4", "0"), "bigstep: 'no/such/folder' does not exist"),
        (("1", "4", "1"), None),  # the first rank of its machine tells
        (("2", "4", "0"), "bigstep: Rank 2: 'no/such/folder' does not exist"),  # the folder may be missing there alone
        (("1", "1", "0"), "bigstep: RANK is 1 and WORLD_SIZE 1"),  # there is no first rank
    ],
)
def test_a_mistake_is_told_once_a_machine(
    bigstep: Bigstep, monkeypatch: pytest.MonkeyPatch, place: tuple[str, str, str], begins: str | None
) -> None:
    for name, value in zip(("RANK", "WORLD_SIZE", "LOCAL_RANK"), place, strict=True):
        monkeypatch.setenv(name, value)
    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29999")):
        monkeypatch.setenv(name, value)
    status, _, err = bigstep("train", "--data", "no/such/folder", "--out", "run")
    assert status == 2
    assert err.startswith(begins) if begins else not err


JOINS = 10
"""Ranks that found each other by what an earlier group had left failed in about one join of three."""


def join_often(rank: int, port: int, told: Any) -> None:
    """As a script under torchrun that trains again and again: the store is its agent's, and outlives every group."""
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    sums = []
    for _ in range(JOINS):
        with joined_ranks("cpu", PATIENCE_S) as ranks:
            sums.append(float(ranks.sum_(torch.ones(1))))
    told.put(sums)


def test_ranks_that_have_parted_join_again_through_the_same_store() -> None:
    context, store = forked_context(), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told = context.SimpleQueue()
    ranks = [context.Process(target=join_often, args=(rank, store.port, told), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert [told.get() for _ in ranks] == [[2.0] * JOINS] * 2
