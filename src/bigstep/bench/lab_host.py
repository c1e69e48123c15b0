"""What a host of the network laboratory runs: training steps with one exchange after another, timed.

Called as a script with one argument, a JSON list of cases; prints one JSON list of results. Cases have a `kind`:
`sync` (DDP steps through an Exchange), `server` (rank 0 serves, the others push and pull), `collectives`, `codecs` and
`workload` (what the probe measures, on all hosts at once).
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bigstep.bench.probe import workload_to_mapping
from bigstep.bench.probe_layers import measure_workload
from bigstep.bench.probe_links import measure_codecs, time_collectives
from bigstep.comm import Exchange
from bigstep.models import build_model
from bigstep.plan.workload import Workload

__all__ = ["run_case"]

_INPUTS = {"mlp": (1, 28, 10), "small": (1, 28, 10), "resnet9": (3, 32, 10)}
"""Channels, side and classes of the models that the laboratory trains."""


def run_case(case: dict[str, Any]) -> Any:
    """Run one case on this host; every host must run the same cases in the same order."""
    if case["kind"] == "collectives":
        return time_collectives(int(case["repeats"]))
    if case["kind"] == "codecs":
        return measure_codecs()
    if case["kind"] == "workload":
        return _measure_workload(case)
    if case["kind"] == "server":
        return _time_server(case)
    return _time_steps(case)


def _model_and_batch(case: dict[str, Any]) -> tuple[torch.nn.Module, Tensor]:
    channels, side, classes = _INPUTS[case["model"]]
    model = build_model(case["model"], classes=classes, channels=channels, image_size=side)
    return model, torch.randn(int(case["local_batch"]), channels, side, side)


def _measure_workload(case: dict[str, Any]) -> dict[str, Any]:
    """Times of the model's layers while every host computes, as a workload file has them."""
    model, images = _model_and_batch(case)
    dist.barrier()
    return workload_to_mapping(measure_workload(model, images, name=case["model"], repeats=9))


def _time_steps(case: dict[str, Any]) -> dict[str, float]:
    """Median seconds of a step."""
    model, images = _model_and_batch(case)
    labels = torch.zeros(len(images), dtype=torch.int64)
    ddp = DistributedDataParallel(model, bucket_cap_mb=case["bucket_mb"] / 1.048576)
    exchange = Exchange(collective=case["collective"], codec=case["codec"], grid=tuple(case["grid"] or ()) or "auto")
    exchange.attach(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = torch.nn.functional.cross_entropy(ddp(images), labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's, without annotations
        optimizer.step()

    # DDP groups its buckets anew after the first step; the second is the first with the final ones
    seconds, spread = _timed(step, warm=3, count=int(case["steps"]))
    exchange.close()
    return {"seconds": seconds, "spread": spread}


def _timed(function: Callable[[], None], *, warm: int, count: int) -> tuple[float, float]:
    """Median and interquartile range of a step's time, averaged over ranks."""
    times = []
    for index in range(warm + count):
        if index == warm:
            dist.barrier()
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    # steps follow one another without a barrier, as in training: what one rank waits, another gains
    total = torch.tensor(times[warm:], dtype=torch.float64)
    dist.all_reduce(total)
    each = [float(value) / dist.get_world_size() for value in total]
    quarters = statistics.quantiles(each, n=4) if len(each) > 1 else [each[0]] * 3
    return statistics.median(each), quarters[2] - quarters[0]


def _time_server(case: dict[str, Any]) -> dict[str, float]:
    """Seconds between two updates of a server that adds what workers push and sends the weights back.

    The server has a thread for each worker, so that one may push while another pulls.
    """
    values = Workload.load(case["model"]).parameters
    rounds, workers = int(case["steps"]), dist.get_world_size() - 1
    weights, ends, lock = torch.zeros(values), [], threading.Lock()

    def serve(worker: int) -> None:
        gradient = torch.empty(values)
        coming = _receive(gradient, worker, tag=worker)
        for index in range(rounds):
            coming.wait()
            with lock:
                weights.add_(gradient, alpha=-1e-6)
                fresh = weights.clone()
            # before the weights leave, for the reason given in `bigstep.comm.collectives.Halving`
            if index + 1 < rounds:
                coming = _receive(gradient, worker, tag=worker)
            dist.send(fresh, worker, tag=worker)
            ends.append(time.perf_counter())

    dist.barrier()
    rank = dist.get_rank()
    if rank > 0:
        gradient = torch.ones(values)
        for _ in range(rounds):
            coming = _receive(weights, 0, tag=rank)
            dist.send(gradient, 0, tag=rank)
            coming.wait()
    else:
        threads = [threading.Thread(target=serve, args=(worker,)) for worker in range(1, workers + 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    # the steady state: without the first update of each worker, and before the first worker stops
    steady = sorted(ends)[workers : len(ends) - workers + 1]
    # one update of every worker at a time, since workers may come in pairs
    gaps = [(later - sooner) / workers for sooner, later in zip(steady, steady[workers:], strict=False)] or [1.0]
    quarters = statistics.quantiles(gaps, n=4) if len(gaps) > 1 else [gaps[0]] * 3
    found = torch.tensor([statistics.median(gaps), quarters[2] - quarters[0]], dtype=torch.float64)
    dist.broadcast(found, 0)
    return {"seconds": float(found[0]), "spread": float(found[1])}


def _receive(tensor: Tensor, source: int, *, tag: int) -> dist.Work:
    work = dist.irecv(tensor, source, tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def main() -> None:
    """Join the group that the environment describes, run the cases of the argument, print the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = [run_case(case) for case in json.loads(sys.argv[1])]
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
