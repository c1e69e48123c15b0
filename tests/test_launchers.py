"""Ranks that somebody else started: recognised, brought together, and told of a mistake once a machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from bigstep.engine.launchers import Place, adopt_launcher
from bigstep.errors import ConfigError

Bigstep = Callable[..., tuple[int, str, str]]

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
        (("0", "4", "0"), "bigstep: 'no/such/folder' is "),
        (("1", "4", "1"), None),  # the first rank of its machine tells
        (("2", "4", "0"), "bigstep: Rank 2: 'no/such/folder' is "),  # the folder may be missing there alone
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
