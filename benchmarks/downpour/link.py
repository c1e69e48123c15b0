"""Throughput of one shard between two hosts in network namespaces, against the bound of its link.

    python benchmarks/downpour/link.py [--rate 1gbit] [--megabytes 8] [--replicas 1 2 3] [--seconds 20] [--out FOLDER]

Host 0 serves one shard with AdaGrad; the replicas of host 1 push gradients and fetch weights as fast as they can, with
no computation of their own. The bound is the rate of the link in each direction, headers included; payload alone is
counted against it. Needs root. Writes link.json and link.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

GOAL = 0.9  # of the link, with the most replicas
SECRET = "only hosts of this laboratory know it"


def host() -> dict[str, Any]:
    """What each host of the laboratory runs."""
    import torch

    from bigstep.asynchronous.client import Client
    from bigstep.asynchronous.gate import Rendezvous, shared_secret
    from bigstep.asynchronous.layout import Layout
    from bigstep.asynchronous.reports import wait_until
    from bigstep.asynchronous.server import serve_shard, stop_shard
    from bigstep.asynchronous.shard import Push
    from bigstep.asynchronous.store import connect_store, host_store

    megabytes, replicas, seconds = (float(value) for value in json.loads(os.environ["LINK_CASE"]))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    size = int(megabytes * 1e6 / 4)
    layout = Layout(
        sizes=(size,), decays=(0.0,), averages=0, shards=1, dtype="float32", keep=0.9, max_staleness=0, save_every=0,
        keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 1e-8},
    )  # fmt: skip
    if os.environ["RANK"] == "0":
        store, where = host_store(address, alone=False)
        store.set("layout", layout.to_json())
        with tempfile.TemporaryDirectory() as folder:
            serve_shard(store, where, 0, Path(folder))
            wait_until(lambda: store.check(["over"]), 30, "The replicas did not end.")
            return json.loads(store.get("final/0"))
    where = Rendezvous(address, shared_secret() or b"")
    store = connect_store(where, 60)
    exchanges, gate, ends = [0] * int(replicas), threading.Barrier(int(replicas)), []

    def replica(number: int) -> None:
        client, vector, versions = Client(store, where.secret, layout), torch.randn(size), [0]
        client.fetch().result()
        gate.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            exchanges[number] += 1
            push = Push(number, exchanges[number], 0, 1e-6, 1, 1)
            versions = client.exchange(push, versions, vector, fetch=True).result().versions
        ends.append(time.perf_counter() - began)
        client.close()

    threads = [threading.Thread(target=replica, args=(number,)) for number in range(int(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop_shard(store, 0)
    store.set("over", "")
    return {"exchanges": sum(exchanges), "seconds": max(ends), "bytes_each_way": sum(exchanges) * size * 4}


def measure(rate: str, megabytes: float, replicas: int, seconds: float) -> dict[str, Any]:
    """Run one case in a laboratory of its own."""
    from bigstep.lab.hosts import Lab, bits_per_second

    environment = {"LINK_CASE": json.dumps([megabytes, replicas, seconds]), "BIGSTEP_SECRET": SECRET}
    with Lab(hosts=2, rate=rate) as lab:
        before = [each["bytes"] for each in lab.sent()]
        server, told = lab.run(__file__, timeout=seconds + 120, environment=environment)
        sent = [after - start for start, after in zip(before, [each["bytes"] for each in lab.sent()], strict=True)]
    speed, bound = told["bytes_each_way"] / told["seconds"], bits_per_second(rate) / 8
    print(f"{replicas} replicas: {speed / 1e6:.1f} MB/s each way of {bound / 1e6:.1f}: {speed / bound:.1%}", flush=True)
    return {
        "replicas": replicas,
        "updates": server["updates"],
        "staleness": server["staleness"],
        "bytes_per_s_each_way": speed,
        "share_of_link": speed / bound,
        "sent_with_headers": sent,
    }


def table(results: dict[str, Any]) -> str:
    """The result in words."""
    machine, options = results["machine"], results["options"]
    lines = [
        "# A shard of Downpour against its link",
        "",
        f"Two hosts in network namespaces at {options['rate']}; a shard of {options['megabytes']:g} MB with AdaGrad; "
        f"{options['seconds']:g} s a case; payload in each direction, both at once. "
        f"{machine['hardware']['processor']}, {machine['hardware']['cores']} cores for both hosts, torch "
        f"{machine['versions']['torch']}, commit {machine['commit']}. Made by `benchmarks/downpour/link.py`.",
        "",
        "| replicas | MB/s each way | of the link | updates |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {case['replicas']} | {case['bytes_per_s_each_way'] / 1e6:.1f} | {case['share_of_link']:.1%} | "
        f"{case['updates']} |"
        for case in results["cases"]
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    from bigstep.records import describe_machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    shown = {"rate": options.rate, "megabytes": options.megabytes, "seconds": options.seconds}
    cases = [measure(replicas=replicas, **shown) for replicas in options.replicas]
    results = {"options": shown, "cases": cases, "machine": describe_machine()}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "link.json").write_text(json.dumps(results, indent=1) + "\n")
    (options.out / "link.md").write_text(table(results))
    sys.exit(cases[-1]["share_of_link"] < GOAL)


if __name__ == "__main__":
    if "LINK_CASE" in os.environ:
        print(json.dumps(host()), flush=True)
        os._exit(0)  # threads of the shard may still wait on lines that nobody uses
    main()
