"""Strangers at the ports of an asynchronous run: they learn nothing, change nothing and keep nobody out."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from bigstep.asynchronous import join_downpour, serve_downpour, train_downpour, train_hogwild
from bigstep.asynchronous.gate import Gate, Rendezvous, connect, new_secret, receive, shared_secret, split_address
from bigstep.asynchronous.line import Line
from bigstep.asynchronous.store import HostedStore, connect_store, host_store
from bigstep.cli.join import join
from bigstep.cli.resolve import job_of
from bigstep.cli.train import Train
from bigstep.engine.job import Job
from bigstep.errors import BigstepError, ConfigError, RunError
from bigstep.records import read_run
from test_async import SGD as MOMENTUM
from test_async import SHARES, Ninety, network, serial
from test_async import order as serial_order
from test_downpour import PATIENCE_S, RESUMED, Gated, Stagehand, run_to_the_gate, until
from worlds import forked_context

SECRET = "a secret of both sides"


@pytest.fixture
def store() -> Iterator[tuple[HostedStore, Rendezvous]]:
    hosted, where = host_store("127.0.0.1:0")
    yield hosted, where
    hosted.close()


def stranger(where: Rendezvous) -> socket.socket:
    return socket.create_connection(split_address(where.address), timeout=10)


def closed(line: socket.socket) -> bool:
    """Whether the other side ends the connection after its greeting, having said no more than that it refuses."""
    said = b""
    with line, contextlib.suppress(ConnectionError):
        while part := line.recv(1000):
            said += part
    return said[:8] in (b"bigstep1", b"") and said[40:] in (b"", bytes(32))


def test_a_stranger_reads_and_sets_nothing(store: tuple[HostedStore, Rendezvous]) -> None:
    hosted, where = store
    hosted.set("order", "kept")
    rng = random.Random(0)
    for content in (
        b'\x00\x00\x00\x1f["set", "order", "taken over now"]' * 3,
        b"\xff" * 64,
        b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: text/html, and many other things\r\n\r\n",
        b"\x80\x04\x95" + b"\x00" * 61,
        *(rng.randbytes(rng.randrange(64, 300)) for _ in range(20)),
    ):
        line = stranger(where)
        line.sendall(content)
        assert closed(line)
    with pytest.raises(RunError, match="has another secret"):
        connect_store(Rendezvous(where.address, new_secret()))
    assert hosted.get("order") == "kept"
    with contextlib.closing(connect_store(where)) as friend:
        assert friend.get("order") == "kept"


def test_a_proof_that_was_overheard_opens_nothing_twice(store: tuple[HostedStore, Rendezvous]) -> None:
    """Somebody between two friends hears one handshake and says the same again."""
    _, where = store
    heard: list[bytes] = []

    def between(listener: socket.socket) -> None:
        client, _ = listener.accept()
        with client, stranger(where) as server:
            client.sendall(receive(server, 40))
            heard.append(receive(client, 64))
            server.sendall(heard[0])
            client.sendall(receive(server, 32))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ear = threading.Thread(target=between, args=(listener,))
        ear.start()
        connect(Rendezvous(f"127.0.0.1:{listener.getsockname()[1]}", where.secret), 10).close()
        ear.join()
    line = stranger(where)
    line.sendall(heard[0])
    assert closed(line)


def test_a_false_server_is_refused_before_it_is_told_or_believed_anything() -> None:
    said: list[bytes] = []

    def lie(listener: socket.socket) -> None:
        line, _ = listener.accept()
        with line:
            line.sendall(b"bigstep1" + b"\x00" * 32)
            said.append(receive(line, 64))
            line.sendall(b"\x00" * 32 + b'\x00\x00\x00\x02"x')
            with contextlib.suppress(ConnectionError):
                said.append(line.recv(1000))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        liar = threading.Thread(target=lie, args=(listener,))
        liar.start()
        where = Rendezvous(f"127.0.0.1:{listener.getsockname()[1]}", new_secret())
        with pytest.raises(RunError, match="has another secret"):
            connect_store(where)
        liar.join()
    assert where.secret not in said[0]
    assert said[1:] in ([], [b""])

    def greet(listener: socket.socket) -> None:
        with listener.accept()[0] as line:
            line.sendall(b"SSH-2.0-OpenSSH_9.2\r\n" * 4)
            with contextlib.suppress(ConnectionError):
                line.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = threading.Thread(target=greet, args=(listener,))
        other.start()
        with pytest.raises(RunError, match="not a run of this bigstep"):
            connect_store(Rendezvous(f"127.0.0.1:{listener.getsockname()[1]}", new_secret()))
        other.join()


def test_a_thousand_connections_that_say_nothing_keep_nobody_out(store: tuple[HostedStore, Rendezvous]) -> None:
    _, where = store
    silent: list[socket.socket] = []
    threads = threading.active_count()
    with contextlib.closing(connect_store(where)) as before, contextlib.ExitStack() as stack:
        for _ in range(1000):
            with contextlib.suppress(OSError):
                line = socket.socket()
                line.setblocking(False)
                stack.callback(line.close)
                silent.append(line)
                with contextlib.suppress(BlockingIOError):
                    line.connect(split_address(where.address))
        began = time.monotonic()
        assert before.add("shares", 1) == 1
        assert time.monotonic() - began < 4  # those who are in hardly notice: strangers are given five seconds each
        with contextlib.closing(connect_store(where, 30)) as late:
            assert late.add("shares", 1) == 2
        held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _is_open(fd)]
        # ours, and of the server's side 64 that may still prove themselves, the listener and two friends
        assert sum(name.startswith("socket:") for name in held) < len(silent) + 64 + 30
        assert threading.active_count() <= threads + 3


def test_a_knock_that_got_lost_does_not_take_all_the_time_that_there_is(
    store: tuple[HostedStore, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, where = store
    asked: list[float] = []

    def lossy(where: Rendezvous, timeout_s: float) -> socket.socket:
        asked.append(timeout_s)
        if len(asked) == 1:
            raise TimeoutError("timed out")
        return connect(where, timeout_s)

    monkeypatch.setattr("bigstep.asynchronous.store.connect", lossy)
    with contextlib.closing(connect_store(where, 30)) as late:
        assert late.add("shares", 1) == 1
    assert asked == [5, 5]


def _is_open(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


def test_a_friend_who_is_crowded_out_comes_again(
    store: tuple[HostedStore, Rendezvous], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With one place for those who prove themselves, strangers take it again and again."""
    monkeypatch.setattr("bigstep.asynchronous.gate._WAITING", 1)
    _, where = store
    over = threading.Event()

    def crowd() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), stranger(where) as line:
                line.recv(8)

    crowds = [threading.Thread(target=crowd) for _ in range(2)]
    for each in crowds:
        each.start()
    try:
        for number in range(5):
            with contextlib.closing(connect_store(where, 30)) as friend:
                assert friend.add("came", 1) == number + 1
    finally:
        over.set()
        for each in crowds:
            each.join()


def test_a_silent_connection_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bigstep.asynchronous.gate._PROOF_S", 0.3)
    gate = Gate("127.0.0.1", 0, new_secret(), lambda line: None)
    began = time.monotonic()
    line = stranger(Rendezvous(gate.address, b""))
    line.sendall(b"half a proof")
    assert closed(line)
    assert time.monotonic() - began < 5
    gate.close()


def test_a_friend_who_sends_nonsense_ends_only_its_own_line(store: tuple[HostedStore, Rendezvous]) -> None:
    hosted, where = store
    for content in (b"\xff\xff\xff\xff", b"\x00\x00\x00\x02[]", b'\x00\x00\x00\x03"x"', b"\x00\x00\x00\x05[[[[["):
        with connect(where, 10) as line:
            line.sendall(content)
            assert line.recv(1) == b""
    hosted.set("here", "still")
    with contextlib.closing(connect_store(where)) as friend:
        assert friend.get("here") == "still"
        with pytest.raises(RunError, match="no value"):
            friend.get("never set")
        assert friend.check(["here"])


class Vanishing(HostedStore):
    """The store of a run whose coordinator takes a shard's address away just behind a look at it."""

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        for key in keys:
            self.delete_key(key)
        return found


def test_the_address_of_a_shard_may_go_at_any_time() -> None:
    secret, store = new_secret(), Vanishing()
    gate = Gate("127.0.0.1", 0, secret, socket.socket.close)
    store.set("shard/0", gate.address)
    Line(store, secret, 0)._connect(time.monotonic() + PATIENCE_S).close()
    store.delete_key("shard/0")
    with pytest.raises(TimeoutError, match="did not come back"):
        Line(store, secret, 0)._connect(time.monotonic())
    gate.close()


def test_ports_are_on_the_loopback_and_others_need_a_shared_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BIGSTEP_SECRET", raising=False)
    monkeypatch.delenv("BIGSTEP_SECRET_FILE", raising=False)
    for listen, alone in (("192.0.2.1:0", True), ("127.0.0.1:0", False)):
        with pytest.raises(ConfigError, match="BIGSTEP_SECRET"):
            host_store(listen, alone=alone)
    for take_part in (join_downpour, lambda address: serve_downpour(address, tmp_path)):
        with pytest.raises(ConfigError, match="needs its secret"):
            take_part("127.0.0.1:29500")
    monkeypatch.setenv("BIGSTEP_SECRET", SECRET)
    with pytest.raises(ConfigError, match="address that the others know"):
        host_store("0.0.0.0:0", alone=False)
    hosted, where = host_store("127.0.0.1:0", alone=False)
    with contextlib.closing(connect_store(Rendezvous(where.address, shared_secret() or b""))) as friend:
        friend.set("a", "b")
    hosted.close()
    assert SECRET not in repr(where)
    assert repr(where.secret) not in repr(where)


def test_a_secret_is_long_and_its_file_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BIGSTEP_SECRET", "short")
    with pytest.raises(ConfigError, match="has 5 characters"):
        shared_secret()
    monkeypatch.delenv("BIGSTEP_SECRET")
    assert shared_secret() is None
    file = tmp_path / "secret"
    monkeypatch.setenv("BIGSTEP_SECRET_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        shared_secret()
    file.write_text(SECRET + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        shared_secret()
    file.chmod(0o600)
    from_file = shared_secret()
    monkeypatch.setenv("BIGSTEP_SECRET", SECRET)
    assert shared_secret() == from_file


def test_a_run_under_attack_gives_the_bits_of_one_in_peace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    gate, folder, model, data = tmp_path / "gate", tmp_path / "run", network(), Ninety()
    taken: list[Any] = []

    def act() -> None:
        until(lambda: list(tmp_path.glob("waiting-*")))
        host, port = re.search(r"is at (\S+):(\d+)\.", " ".join(read_run(folder).notes)).groups()  # type: ignore[union-attr]
        rng = random.Random(1)
        for _ in range(200):
            with socket.create_connection((host, int(port)), timeout=10) as line:
                line.sendall(rng.randbytes(rng.randrange(200)))
        try:  # what took a run over before: write another order for whoever comes
            limit = timedelta(seconds=2)
            attack = torch.distributed.TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=limit)  # type: ignore[attr-defined]
            attack.set("order", '{"config": {"model": "os:system"}}')
            taken.append(attack)
        except (RuntimeError, ValueError):
            pass
        gate.touch()

    stagehand = Stagehand(act)
    stagehand.start()
    result = train_downpour(RESUMED, model, (data, data), Gated(gate, 5), out=folder, device="cpu")
    stagehand.leave()
    assert not taken
    assert (result.facts["updates"], result.facts["lost_updates"]) == (SHARES, 0)
    for name, parameter in serial(RESUMED).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), f"{name} differs"


def told_by(target: Any, arguments: tuple[Any, ...], number: signal.Signals, folder: Path) -> str:
    """What a run that waits at its gate says when it gets a signal."""
    context = forked_context()
    said = context.SimpleQueue()
    run = context.Process(target=_say, args=(said, target, arguments))
    run.start()
    until(lambda: list(folder.glob("waiting-*")))
    os.kill(run.pid, number)
    run.join(PATIENCE_S)
    assert run.exitcode == 0
    return str(said.get())


def _say(said: Any, target: Any, arguments: tuple[Any, ...]) -> None:
    try:
        target(*arguments)
    except BigstepError as error:
        said.put(f"{error.exit_status}: {error}")


def test_downpour_saves_itself_when_a_signal_asks_and_goes_on_with_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder, model, data = tmp_path / "run", network(), Ninety()
    told = told_by(run_to_the_gate, (folder, tmp_path / "gate"), signal.SIGTERM, tmp_path)
    assert told == "143: Stopped by SIGTERM after step 11; its state is saved: continue with --resume."
    result = train_downpour(RESUMED, model, (data, data), out=folder, device="cpu", resume=True)
    assert "Resumed at update 11." in read_run(folder).notes
    assert (result.facts["updates"], result.facts["lost_updates"]) == (SHARES, 0)
    for name, parameter in serial(RESUMED).named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), f"{name} differs"


def hogwild_to_the_gate(folder: Path, gate: Path) -> None:
    data = Ninety()
    train_hogwild(
        serial_order(MOMENTUM, replicas=1), network(), (data, data), Gated(gate, 12), out=folder, device="cpu"
    )


def test_hogwild_keeps_its_weights_when_a_signal_asks_and_says_that_it_cannot_go_on(tmp_path: Path) -> None:
    told = told_by(hogwild_to_the_gate, (tmp_path / "run", tmp_path / "gate"), signal.SIGHUP, tmp_path)
    assert re.fullmatch(
        r"129: Stopped by SIGHUP after step \d+; its weights are in \S+, but a hogwild run cannot be resumed\.", told
    )
    assert list((tmp_path / "run" / "checkpoints").glob("step-*.ckpt"))


def test_other_machines_are_asked_for_on_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    typed = {"recipe": "downpour", "listen": "10.0.0.1:29500", "settings": ["asynchronous.shards=3"]}
    job = job_of(Train(replicas_elsewhere=1, shards_elsewhere=2, **typed), launched=False)  # type: ignore[arg-type]
    job.write(tmp_path / "job.json")
    for each in (job, Job.read(tmp_path / "job.json")):
        assert (each.listen, each.elsewhere) == ("10.0.0.1:29500", (2, 1))
    assert job_of(Train(recipe="downpour"), launched=False).listen.startswith("127.0.0.1:")
    for mistake, sentence in (
        ({"recipe": "downpour", "replicas_elsewhere": 1}, "add --listen"),
        ({"recipe": "plain", "listen": "10.0.0.1:29500"}, "only Downpour runs can be joined"),
        ({**typed, "shards_elsewhere": 4}, "4 shards and 0 replicas are to come from elsewhere"),
    ):
        with pytest.raises(ConfigError, match=sentence):
            job_of(Train(**mistake), launched=False)  # type: ignore[arg-type]
    monkeypatch.delenv("BIGSTEP_SECRET", raising=False)
    with pytest.raises(ConfigError, match="needs its secret"):
        join("10.0.0.1:29500", shard=None, device="cpu", wait=1)
