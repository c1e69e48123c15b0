"""Throughput of one shard between two hosts in network namespaces, against the bound of its link.

    python benchmarks/downpour/link.py [--rate 1gbit] [--megabytes 8] [--replicas 3] [--seconds 20]

Host 0 serves one shard with AdaGrad; the replicas of host 1 push gradients and fetch weights as fast as they can, with
no computation of their own. The bound is the rate of the link in each direction, headers included. Needs root. Writes
link.json beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def host() -> dict[str, Any]:
    """What each host of the laboratory runs."""
    import torch

    from bigstep.asynchronous.courier import Courier
    from bigstep.asynchronous.layout import Layout
    from bigstep.asynchronous.mail import connect_store, host_store, wait_until
    from bigstep.asynchronous.server import serve_shard, stop_shard
    from bigstep.asynchronous.shard import Push

    megabytes, replicas, seconds = (float(value) for value in json.loads(os.environ["LINK_CASE"]))
    address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    size = int(megabytes * 1e6 / 4)
    layout = Layout(
        sizes=(size,), decays=(0.0,), averages=0, shards=1, dtype="float32", keep=0.9, max_staleness=0, save_every=0,
        keep_checkpoints=1, optimizer={"name": "adagrad", "eps": 1e-8},
    )  # fmt: skip
    if os.environ["RANK"] == "0":
        store, _ = host_store(address)
        store.set("layout", layout.to_json())
        with tempfile.TemporaryDirectory() as folder:
            serve_shard(store, address, 0, Path(folder))
            wait_until(lambda: store.check(["over"]), 30, "The replicas did not end.")
            return json.loads(store.get("final/0"))
    store = connect_store(address, 60)
    exchanges, gate, ends = [0] * int(replicas), threading.Barrier(int(replicas)), []

    def replica(number: int) -> None:
        courier, vector, versions = Courier(address, layout), torch.randn(size), [0]
        courier.fetch()
        gate.wait()
        began = time.perf_counter()
        while time.perf_counter() - began < seconds:
            exchanges[number] += 1
            push = Push(number, exchanges[number], 0, 1e-6, 1, 1)
            versions = courier.carry(push, versions, vector, fetch=True).result().versions
        ends.append(time.perf_counter() - began)
        courier.close()

    threads = [threading.Thread(target=replica, args=(number,)) for number in range(int(replicas))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop_shard(store, 0)
    store.set("over", "")
    return {"exchanges": sum(exchanges), "seconds": max(ends), "bytes_each_way": sum(exchanges) * size * 4}


def main() -> None:
    from bigstep.bench.lab import Lab, bits_per_second
    from bigstep.records import describe_machine

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--megabytes", type=float, default=8.0)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    case = json.dumps([options.megabytes, options.replicas, options.seconds])
    with Lab(hosts=2, rate=options.rate) as lab:
        before = lab.sent_bytes()
        server, replicas = lab.run(__file__, timeout=options.seconds + 120, environment={"LINK_CASE": case})
        sent = [after - start for start, after in zip(before, lab.sent_bytes(), strict=True)]
    bound = bits_per_second(options.rate) / 8
    rate = replicas["bytes_each_way"] / replicas["seconds"]
    result = {
        "options": vars(options),
        "updates": server["updates"],
        "staleness": server["staleness"],
        "bytes_per_s_each_way": rate,
        "share_of_link": rate / bound,
        "sent_with_headers": sent,
        **describe_machine(),
    }
    (HERE / "link.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{rate / 1e6:.1f} MB/s each way of {bound / 1e6:.1f} MB/s: {100 * rate / bound:.1f} % of the link")


if __name__ == "__main__":
    if "LINK_CASE" in os.environ:
        print(json.dumps(host()), flush=True)
        os._exit(0)  # threads of the shard may still wait on lines that nobody uses
    main()
