"""Shards and replicas of a Downpour run that come from elsewhere: whoever fails there must not hold up or spoil it."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bigstep.asynchronous import join_downpour, serve_downpour, train_downpour
from bigstep.asynchronous.gate import split_address
from bigstep.asynchronous.store import StoreGoneError, connect_store, host_store
from bigstep.config import LrConfig
from bigstep.errors import ConfigError, DataError, RunError
from bigstep.records import locked, read_run
from bigstep.train import FitResult
from test_async import Ninety, network
from test_downpour import SHARES, Gated, Stagehand, order, until
from worlds import forked_context

SECRET = "a secret of both sides"
pytestmark = pytest.mark.usefixtures("secret")


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGSTEP_SECRET", SECRET)


class Missing(Ninety):
    """A data set that is not on this machine."""

    def __len__(self) -> int:
        raise FileNotFoundError("no images here")


class Fewer(Ninety):
    """A copy that lacks a sample."""

    def __len__(self) -> int:
        return 89


class Slow(Ninety):
    """A data set that is never read to the end; it says that reading has begun."""

    def __init__(self, begun: Path):
        super().__init__()
        self.begun = begun

    def __len__(self) -> int:
        self.begun.touch()
        until(lambda: False)
        return 0


def address_of(folder: Path) -> str:
    """Where the run in a folder says that it is, once it does."""
    notes = until(lambda: (folder / "run.json").exists() and " ".join(read_run(folder).notes))
    found = re.search(r"is at (\S+:\d+)\.", notes)
    assert found is not None
    return found[1]


def beside(act: Callable[[], None], folder: Path, loss: Any = None, **settings: Any) -> FitResult:
    """Train while somebody acts beside the run."""
    stagehand, data = Stagehand(act), Ninety()
    stagehand.start()
    config = order(replicas=1, shards=1)
    result = train_downpour(config, network(), (data, data), loss, out=folder, device="cpu", **settings)
    stagehand.leave()
    return result


def test_a_run_does_not_wait_for_a_replica_that_failed_before_it_began(tmp_path: Path) -> None:
    folder, gate = tmp_path / "run", tmp_path / "gate"

    def act() -> None:
        with pytest.raises(FileNotFoundError):
            join_downpour(address_of(folder), network(), (Missing(), Missing()), device="cpu")
        gate.touch()

    result = beside(act, folder, Gated(gate, 3))
    assert result.facts["updates"] == SHARES
    assert "Replica 1 failed: FileNotFoundError: no images here at update" in " ".join(read_run(folder).notes)


def test_a_replica_whose_copy_of_the_data_is_another_does_not_take_part(tmp_path: Path) -> None:
    folder, gate = tmp_path / "run", tmp_path / "gate"

    def act() -> None:
        with pytest.raises(DataError, match="The samples here differ from those of the run"):
            join_downpour(address_of(folder), network(), (Fewer(), Ninety()), device="cpu")
        gate.touch()

    result = beside(act, folder, Gated(gate, 3))
    assert result.facts["updates"] == SHARES
    assert "Replica 1 failed: The samples here differ" in " ".join(read_run(folder).notes)


def join_slowly(address: str, begun: Path) -> None:
    os.environ["BIGSTEP_SECRET"] = SECRET  # the server that forks this process is older
    join_downpour(address, network(), (Slow(begun), Slow(begun)), device="cpu")


def test_a_run_does_not_wait_for_a_replica_that_was_killed_before_it_began(tmp_path: Path) -> None:
    folder, gate, begun = tmp_path / "run", tmp_path / "gate", tmp_path / "begun"

    def act() -> None:
        process = forked_context().Process(target=join_slowly, args=(address_of(folder), begun))
        process.start()
        until(begun.exists)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        gate.touch()

    result = beside(act, folder, Gated(gate, 3))
    assert result.facts["updates"] == SHARES
    assert "Replica 1 is gone: its connection broke at update" in " ".join(read_run(folder).notes)


def test_a_folder_serves_a_shard_of_one_run_and_one_process_at_a_time(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    results = []
    for number in range(2):
        folder = tmp_path / f"run-{number}"

        def act(folder: Path = folder, number: int = number) -> None:
            address = address_of(folder)
            if number:  # at another address, or at the same one: a run that begins has weights of its own
                with pytest.raises(ConfigError, match="keeps a shard of another run"):
                    serve_downpour(address, kept)
            with locked(kept), pytest.raises(ConfigError, match="another folder with --shard"):
                serve_downpour(address, kept)
            serve_downpour(address, tmp_path / "other" if number else kept)

        results.append(beside(act, folder, shards_elsewhere=1))
    first, second = (result.facts for result in results)
    assert (kept / "shard.json").exists()
    assert first["weights_sha256"] == second["weights_sha256"]
    assert first["updates"] == second["updates"] == SHARES
    assert first["lost_updates"] == second["lost_updates"] == 0


def test_what_a_process_leaves_is_there_when_it_has_left() -> None:
    store, where = host_store("127.0.0.1:0", alone=False)
    stranger = connect_store(where)
    stranger.leave("gone/7")
    assert stranger.add("replicas", 1) == 1
    assert not store.check(["gone/7"])
    stranger.close()
    until(lambda: store.check(["gone/7"]))
    store.close()


@pytest.mark.parametrize("nonsense", [("add", "replicas", math.inf), ("leave", ["gone/8"])])
def test_who_ends_in_nonsense_has_left_too(nonsense: tuple[Any, ...]) -> None:
    store, where = host_store("127.0.0.1:0", alone=False)
    with contextlib.closing(connect_store(where)) as stranger:
        stranger.leave("gone/7")
        with pytest.raises(StoreGoneError):
            stranger._ask(type(None), *nonsense)
        until(lambda: store.check(["gone/7"]))
    store.close()


def test_the_rate_that_broke_a_run_is_named() -> None:
    config = dataclasses.replace(order(replicas=1, shards=1), lr=LrConfig(base=1e30, scaling="none"))
    with pytest.raises(RunError, match=r"learning rate 1e\+30"):
        train_downpour(config, network(), (Ninety(), Ninety()), device="cpu")


def test_an_address_of_ipv6_is_written_as_everywhere() -> None:
    assert split_address("[fd00::1]:29500") == split_address("fd00::1:29500") == ("fd00::1", 29500)
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    store, where = host_store("[::1]:0", alone=True)
    friend = connect_store(where)
    assert friend.add("replicas", 2) == 2
    friend.close()
    store.close()
