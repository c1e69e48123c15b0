"""What a run loses while strangers crowd its ports: exchanges a second with a shard, in peace and under attack.

    python benchmarks/downpour/strangers.py [--rounds 10] [--seconds 2] [--megabytes 1] [--out FOLDER]

A shard, a replica without a computation of its own, and an attacker, each in a process. The attacker has a core for
itself, where there are two. It keeps a thousand connections open to the shard and to the store, says random bytes on
some of them, and opens every one again that is closed, up to a thousand a second. In rounds of peace it does the same
to two gates of another process on its own core: what counts is the work that strangers make for a run, not that of
being strangers on the same machine. Rounds in peace and under attack take turns; the figure is the median of their
ratios. The processor time that a connection costs the server, while nobody exchanges anything, is told as well. Writes
strangers.json.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import socket
import statistics
import time
from pathlib import Path
from typing import Any

CONNECTIONS, A_SECOND = 1000, 1000


def serve(pipe: Any, elements: int, folder: str) -> None:
    """The coordinator's store, and a shard beside it."""
    from bigstep.asynchronous.layout import Layout
    from bigstep.asynchronous.server import serve_shard
    from bigstep.asynchronous.store import host_store

    layout = Layout(
        sizes=(elements,), decays=(0.0,), averages=0, shards=1, dtype="float32", keep=0.9, max_staleness=0,
        save_every=0, keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 1e-8},
    )  # fmt: skip
    store, where = host_store("127.0.0.1:0")
    store.set("layout", layout.to_json())
    pipe.send((where, layout))
    serve_shard(store, where, 0, Path(folder))


def stand_in(pipe: Any, cores: set[int]) -> None:
    """Two gates of nobody."""
    from bigstep.asynchronous.gate import Gate, new_secret

    os.sched_setaffinity(0, cores)
    gates = [Gate("127.0.0.1", 0, new_secret(), lambda line: line.close()) for _ in range(2)]
    pipe.send([gate.address for gate in gates])
    time.sleep(3600)


def attack(addresses: list[str], others: list[str], active: Any, opened: Any, cores: set[int]) -> None:
    """Crowd the ports while `active` is set, and else those of others."""
    os.sched_setaffinity(0, cores)
    rng, lines = random.Random(0), []
    was_active = False
    while True:
        if was_active != active.is_set():
            was_active = not was_active
            for line in lines:
                line.close()
            lines = []
        began = time.perf_counter()
        for address in (addresses if was_active else others) * 5:
            host, _, port = address.rpartition(":")
            with contextlib.suppress(OSError):
                line = socket.create_connection((host, int(port)), timeout=1)
                line.setblocking(False)
                if rng.random() < 0.5:
                    line.send(rng.randbytes(rng.randrange(1, 2000)))
                lines.append(line)
                opened.value += was_active
        while len(lines) > CONNECTIONS:
            lines.pop(0).close()
        time.sleep(max(0.0, 5 * len(addresses) / A_SECOND - (time.perf_counter() - began)))


def exchanges(client: Any, vector: Any, number: int, seconds: float) -> tuple[float, int]:
    """Push and fetch for so long; return exchanges a second, and the number of the last push."""
    from bigstep.asynchronous.shard import Push

    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        count, number = count + 1, number + 1
        client.exchange(Push(0, number, 0, 1e-6, 1, 1), [0], vector, fetch=True).result()
    return count / (time.perf_counter() - began), number


def processor_s(process: Any) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def cost_of_a_connection(server: Any, active: Any, opened: Any, seconds: float) -> float:
    """Processor seconds that the server spends on each stranger, less what it spends in peace."""
    spent = []
    for attacked in (False, True):
        before = processor_s(server)
        if attacked:
            active.set()
        time.sleep(seconds)
        spent.append(processor_s(server) - before)
    active.clear()
    return (spent[1] - spent[0]) / max(opened.value, 1)


def main() -> None:
    import tempfile

    import torch

    from bigstep.asynchronous.client import Client
    from bigstep.asynchronous.store import connect_store
    from bigstep.records import describe_machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--megabytes", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    *mine, last = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, mine or {last})  # of the server too, which this process starts
    ours, theirs = context.Pipe()
    active, opened = context.Event(), context.Value("q", 0)
    with tempfile.TemporaryDirectory() as folder:
        server = context.Process(target=serve, args=(theirs, int(options.megabytes * 250_000), folder), daemon=True)
        server.start()
        where, layout = ours.recv()
        store = connect_store(where, 60)
        client, vector = Client(store, where.secret, layout), torch.randn(layout.size)
        client.fetch().result()
        addresses = [where.address, store.get("shard/0")]
        decoy = context.Process(target=stand_in, args=(theirs, {last}), daemon=True)
        decoy.start()
        attacker = context.Process(target=attack, args=(addresses, ours.recv(), active, opened, {last}), daemon=True)
        attacker.start()
        _, number = exchanges(client, vector, 0, options.seconds)  # warm
        each_s = cost_of_a_connection(server, active, opened, 8.0)
        print(f"{opened.value} strangers took {1e6 * each_s:.0f} us of processor time each", flush=True)
        rounds = []
        for _ in range(options.rounds):
            peace, number = exchanges(client, vector, number, options.seconds)
            active.set()
            war, number = exchanges(client, vector, number, options.seconds)
            active.clear()
            rounds.append({"peace_per_s": peace, "attack_per_s": war, "ratio": war / peace})
            print(f"{peace:.1f} exchanges/s in peace, {war:.1f} under attack: {war / peace:.3f}", flush=True)
        for process in (attacker, decoy, server):
            process.kill()
    ratios = sorted(each["ratio"] for each in rounds)
    result = {
        "rounds": rounds,
        "median_ratio": statistics.median(ratios),
        "range": [ratios[0], ratios[-1]],
        "cores_of_the_run": len(mine) or 1,
        "connections_opened": opened.value,
        "processor_s_a_connection": each_s,
        "machine": describe_machine(),
    }
    print(f"median ratio {result['median_ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), n = {len(ratios)}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "strangers.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
