"""What is mutated, and what reads it: each kind makes whole content once, and reads a mutated copy in this process."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml

from bigstep import recipes
from bigstep.asynchronous import server
from bigstep.asynchronous.gate import Gate, Rendezvous, connect, new_secret
from bigstep.asynchronous.layout import Layout
from bigstep.asynchronous.line import FETCH, PUSH, Call, view_of
from bigstep.asynchronous.shard import Push, Shard
from bigstep.asynchronous.store import HostedStore, StoreGoneError, _RemoteStore
from bigstep.bench.own_suite import read_suite
from bigstep.bench.suites import Options
from bigstep.config.edit import make_exact, stretch
from bigstep.config.text import config_from_yaml, config_to_yaml
from bigstep.engine.build import build
from bigstep.engine.checkpoint import load_checkpoint, save_checkpoint
from bigstep.engine.ranks import Ranks
from bigstep.engine.rates import learning_rate
from bigstep.engine.resume import restore
from bigstep.plan import cli_result
from bigstep.plan.cluster import FOLDER
from bigstep.records import RunWriter, read_run
from bigstep.report.html import render
from bigstep.report.study import study_of
from bigstep.report.table import to_csv, to_markdown
from bigstep.sparse import read_libsvm

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from test_data_fuzz import KINDS as DATA
from test_data_fuzz import mutate, read_all

__all__ = ["KINDS", "Kind"]

Kind = Callable[[Path], Callable[[random.Random], None]]
"""Makes what is whole in a folder, and returns what mutates and reads it once."""

STRANGE: list[Any] = [
    None, True, -1, 0, 2**31, 10**30, 1e308, -1e308, float("nan"), float("inf"), "", "x" * 100_000, "../../etc", "²",
    [], {}, [[]], {"a": {"b": []}}, [1] * 1000, 10**400, "2020-01-01", "os:system", "\x00\x1b[31m",
]  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested dicts and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def strange(value: Any, chance: random.Random, more: list[Any] | None = None) -> Any:
    """Put something strange somewhere, take something out, or copy one place to another."""
    path = chance.choice(places(value)[1:] or [()])
    if not path:
        return copy.deepcopy(chance.choice(STRANGE))
    place = value
    for key in path[:-1]:
        place = place[key]
    action = chance.random()
    if action < 0.15:
        del place[path[-1]]
    elif action < 0.3 and isinstance(place, dict):
        place[f"{path[-1]}x"] = place.pop(path[-1])
    else:
        place[path[-1]] = copy.deepcopy(chance.choice(STRANGE + (more or [])))
    return value


def mutated_yaml(text: str, chance: random.Random) -> str:
    """Other bytes, or other values."""
    if chance.random() < 0.4:
        return mutate(text.encode(), chance).decode(errors="replace")
    value = strange(yaml.safe_load(text), chance)
    return yaml.safe_dump(strange(value, chance) if chance.random() < 0.3 else value)


def configs(folder: Path) -> Callable[[random.Random], None]:
    whole = [config_to_yaml(recipes.load(name)) for name in ("plain", "sony", "adamw", "diloco", "downpour", "onebit")]

    def case(chance: random.Random) -> None:
        config = config_from_yaml(mutated_yaml(chance.choice(whole), chance), "run.yaml")
        config_to_yaml(config)
        rate = learning_rate(config.lr, config.batch, config.plan)
        for epoch in (0.0, config.epochs / 2, config.epochs):
            rate(epoch, config.batch)
        stretch(config, 1.0)
        make_exact(config)

    return case


def suites(folder: Path) -> Callable[[random.Random], None]:
    whole = [
        {"recipe": "sony", "name": "larger", "set": {"workers.count": 64, "lr.base": 3.0}, "seeds": 2, "epochs": 2},
        {"recipe": "plain", "preset": "mini", "procs": 1, "finish_on_one": 0.5, "seeds": 1},
        {"recipe": "downpour", "seeds": 3},
    ]

    def case(chance: random.Random) -> None:
        path = folder / "suite.yaml"
        path.write_text(mutated_yaml(yaml.safe_dump(whole), chance), encoding="utf-8")
        read_suite(path, Options())

    return case


def clusters(folder: Path) -> Callable[[random.Random], None]:
    whole = [path.read_text() for path in sorted(FOLDER.glob("*.yaml"))]

    def case(chance: random.Random) -> None:
        path = folder / "cluster.yaml"
        path.write_text(mutated_yaml(chance.choice(whole), chance), encoding="utf-8")
        cli_result(cluster=str(path), gpus=chance.choice((4, 64)), batch=8192, collective="ring")

    return case


def records(folder: Path) -> Callable[[random.Random], None]:
    run = folder / "run"
    config = {"recipe": "plain", "workers": {"count": 8, "local_batch": 4}, "epochs": 2, "exact": True, "seed": 0}
    more = {"data": {"name": "embedded"}, "lr": {"base": 0.1}}
    writer = RunWriter(run, {**config, **more}, ranks=2, device="cpu")
    shared = {"epoch": 0.5, "samples": 32, "seconds": 0.5}
    writer.add([{"kind": "train", "step": step, **shared, "loss": 2.0, "lr": 0.1, "batch": 32, "compute_s": 0.4,
                 "exchange_s": 0.1, "data_s": 0.1} for step in range(1, 9)])  # fmt: skip
    writer.add([{"kind": "eval", "step": 8, **shared, "accuracy": 0.5, "eval_loss": 1.0}])
    writer.note("a remark")
    writer.finish({"accuracy": 0.5, "loss": 1.0, "seconds": 1.0, "steps": 8, "weights_sha256": "ab" * 32})
    writer.close()
    whole = {name: (run / name).read_bytes() for name in ("run.json", "metrics.jsonl")}

    def case(chance: random.Random) -> None:
        for name, content in whole.items():
            (run / name).write_bytes(content)
        name = chance.choice(list(whole))
        if chance.random() < 0.4:
            (run / name).write_bytes(mutate(whole[name], chance))
        elif name == "run.json":
            (run / name).write_text(json.dumps(strange(json.loads(whole[name]), chance)))
        else:
            lines = whole[name].decode().splitlines()
            at = chance.randrange(len(lines))
            lines[at] = json.dumps(strange(json.loads(lines[at]), chance))
            (run / name).write_text("\n".join(lines) + "\n")
        study = study_of([read_run(run)])
        study.sentences()
        to_csv(study)
        to_markdown(study)
        if chance.random() < 0.1:
            render(study)

    return case


def checkpoints(folder: Path) -> Callable[[random.Random], None]:
    config = config_from_yaml(
        "model: mlp\nworkers: {count: 2, local_batch: 8}\nepochs: 1\nlr: {base: 0.1}\ndata: {holdout: 0.98}\n", "c"
    )
    run = build(config, Ranks())
    path = save_checkpoint(folder, 1, run.state.capture(), keep=2)
    whole = path.read_bytes()
    tensors = [torch.zeros(0), torch.full((3, 3), float("nan")), torch.zeros(1).expand(10**6), torch.zeros(2).byte()]

    def case(chance: random.Random) -> None:
        kind = chance.choice(("bytes", "sealed", "values"))
        if kind == "bytes":
            path.write_bytes(mutate(whole, chance))
        elif kind == "sealed":
            payload = mutate(whole[40:], chance)
            path.write_bytes(b"bigstep1" + hashlib.sha256(payload).digest() + payload)
        else:
            path.write_bytes(whole)
            state = strange(load_checkpoint(path), chance, tensors)
            save_checkpoint(folder, 1, state, keep=2)
        restore(run, load_checkpoint(path), folder)

    return case


def data_files(kinds: tuple[str, ...]) -> Kind:
    def prepare(folder: Path) -> Callable[[random.Random], None]:
        for kind in kinds:
            (folder / kind).mkdir()
            DATA[kind][0](folder / kind)
        whole = {kind: (folder / kind / DATA[kind][1]).read_bytes() for kind in kinds}

        def case(chance: random.Random) -> None:
            kind = chance.choice(kinds)
            _, file, name, path = DATA[kind]
            (folder / kind / file).write_bytes(mutate(whole[kind], chance))
            for sentence in read_all(name, str(folder / kind / path)):
                assert sentence.isprintable(), repr(sentence)
                assert len(sentence) < 600, sentence

        return case

    return prepare


def libsvm(folder: Path) -> Callable[[random.Random], None]:
    whole = b"".join(b"%d %d:1.5 %d:-2 %d:0.25\n" % (n % 2, n + 1, n + 7, n + 900) for n in range(60))

    def case(chance: random.Random) -> None:
        (folder / "a.svm").write_bytes(mutate(whole, chance))
        read_libsvm(folder / "a.svm")

    return case


@contextmanager
def serving(serve: Callable[[socket.socket], object]) -> Iterator[socket.socket]:
    """Somebody who speaks to `serve`, which must end when he leaves, and without an error."""
    failures: list[BaseException] = []
    ours, theirs = socket.socketpair()
    ours.settimeout(5)

    def run() -> None:
        try:
            serve(theirs)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    with ours:
        yield ours
    thread.join(10)
    assert not thread.is_alive(), "the server does not end"
    if failures:
        raise failures[0]


def talk(line: socket.socket, message: bytes) -> None:
    try:
        line.sendall(message)
        line.shutdown(socket.SHUT_WR)
        while line.recv(1 << 16):
            pass
    except OSError:
        return


def store_messages(folder: Path) -> Callable[[random.Random], None]:
    requests = [["add", "counter", 3], ["set", "key", "value"], ["get", "key"], ["check", ["key", "other"]],
                ["delete_key", "key"]]  # fmt: skip

    def framed(value: Any) -> bytes:
        text = json.dumps(value).encode()
        return len(text).to_bytes(4, "big") + text

    def case(chance: random.Random) -> None:
        if chance.random() < 0.5:
            message = b"".join(framed(strange(json.loads(json.dumps(each)), chance)) for each in requests)
        else:
            message = mutate(b"".join(map(framed, requests)), chance)
        if chance.random() < 0.6:
            with serving(HostedStore()._serve) as line:
                talk(line, message)
            return
        with serving(lambda line: answers(_RemoteStore(line))) as line:  # a server that answers nonsense
            talk(line, message)

    def answers(store: _RemoteStore) -> None:
        try:
            store.add("counter", 1)
            store.check(["key"])
            store.delete_key("key")
        except StoreGoneError:
            pass
        finally:
            store.close()

    return case


def calls(folder: Path) -> Callable[[random.Random], None]:
    layout = Layout(sizes=(40, 24), decays=(0.0, 0.0), averages=0, shards=1, dtype="float32", keep=0.9, max_staleness=0,
                    save_every=0, keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 1e-8})  # fmt: skip
    gave_up: list[BaseException] = []
    push = Push(replica=0, sequence=1, read_at=0, lr=0.1, steps=1, samples=4)
    whole = bytes(view_of(Call(PUSH | FETCH, push).encode())) + bytes(view_of(torch.ones(64)))
    numbers = [0.0, -1.0, 1e300, float("nan"), float("inf"), 2.0**53, 0.5, 15.0, 7.0]

    def case(chance: random.Random) -> None:
        gave_up.clear()
        shard = Shard(layout, 0)
        message = whole + whole
        if chance.random() < 0.5:
            message = mutate(message, chance)
        else:
            words = torch.frombuffer(bytearray(message[:56]), dtype=torch.float64).clone()
            words[chance.randrange(7)] = chance.choice(numbers)
            message = bytes(view_of(words)) + message[56:]
        lines = server._Lines(HostedStore(), shard, server._Keeper(shard, folder))
        with (
            patch.object(server, "_give_up", lambda index, error: gave_up.append(error)),
            serving(lines._answer) as line,
        ):
            talk(line, message)
        if gave_up:
            raise gave_up[0]

    return case


def handshakes(folder: Path) -> Callable[[random.Random], None]:
    secret, let_in = new_secret(), []
    gate = Gate("127.0.0.1", 0, secret, let_in.append)
    where = Rendezvous(gate.address, secret)
    count = [0]

    def case(chance: random.Random) -> None:
        host, _, port = gate.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=5) as line:
            line.recv(40)
            line.sendall(mutate(chance.randbytes(64), chance)[: chance.choice((0, 1, 63, 64, 500))] or b"\0")
        assert not let_in, "a stranger was let in"
        count[0] += 1
        if count[0] % 25 == 0:  # friends still are
            connect(where, 5).close()
            while not let_in:
                pass
            let_in.pop().close()

    return case


IMAGES = ("idx images", "idx labels", "cifar pickle", "cifar binary", "jpeg")
PACKED = ("pack index", "pack records", "pack names", "pack tar", "tokens", "npy")
KINDS: dict[str, tuple[Kind, int]] = {
    "configurations": (configs, 400),
    "suites": (suites, 250),
    "clusters": (clusters, 250),
    "records": (records, 300),
    "checkpoints": (checkpoints, 250),
    "images": (data_files(IMAGES), 150),
    "text": (data_files(("gzip text", "xz text")), 50),
    "LIBSVM": (libsvm, 100),
    "packed files": (data_files(PACKED), 200),
    "store messages": (store_messages, 200),
    "calls of replicas": (calls, 150),
    "handshakes": (handshakes, 100),
}
"""With the number of cases of each: 2,400 in all."""
