"""What a host of the network laboratory runs: timed training steps, with one exchange after another.

Called as a script with one argument, a JSON list of cases; prints one JSON list of results. Cases have a `kind`:
`links` (give the links other speeds), `sync` (DDP steps through an Exchange), `server` (rank 0 serves, the others push
and pull), `collectives`, `codecs` and `workload` (what the probe measures, on all hosts at once), and `turns` (groups
of cases, repeated in turns, so that drift of the machine affects all alike).
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from bigstep.exchange import Exchange
from bigstep.lab.probe import workload_to_mapping
from bigstep.lab.probe_layers import as_it_is_trained, measure_workload
from bigstep.lab.probe_links import measure_codecs, time_collectives
from bigstep.models import build_model
from bigstep.plan.workload import Workload

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

__all__ = ["Host"]

_INPUTS = {"mlp": (1, 28, 10), "small": (1, 28, 10), "resnet9": (3, 32, 10)}
"""Channels, side and classes of the models that the laboratory trains."""
_METHOD = ("model", "collective", "codec", "grid", "bucket_mb", "local_batch")
"""What makes two cases of training the same."""


class Host:
    """One rank; every host must run the same cases in the same order."""

    def __init__(self) -> None:
        self._training: dict[str, tuple[Callable[[], None], Exchange]] = {}

    def run(self, case: dict[str, Any]) -> Any:
        """Run one case and return what was measured."""
        if case["kind"] == "links":
            return _change_links(case["commands"][dist.get_rank()])
        if case["kind"] == "collectives":
            return time_collectives(int(case["repeats"]))
        if case["kind"] == "codecs":
            return measure_codecs()
        if case["kind"] == "workload":
            return _measure_workload(case)
        if case["kind"] == "server":
            return _time_server(case)
        if case["kind"] == "turns":
            return self._take_turns(case["groups"], int(case["count"]))
        return self._time_steps(case)

    def close(self) -> None:
        """End the threads of all exchanges."""
        for _, exchange in self._training.values():
            exchange.close()

    def _take_turns(self, groups: list[list[dict[str, Any]]], count: int) -> list[list[list[list[float]]]]:
        """The steps of all turns, by group and case; each turn goes through the groups in a different order."""
        found: list[list[list[list[float]]]] = [[[] for _ in group] for group in groups]
        for turn in range(count):
            for index in random.Random(turn).sample(range(len(groups)), len(groups)):  # the same on all hosts
                for kept, case in zip(found[index], groups[index], strict=True):
                    kept += self.run(case) or []
        return found

    def _time_steps(self, case: dict[str, Any]) -> list[list[float]]:
        """Seconds of each step, and those from its last gradient to the end of its last exchange; means over ranks."""
        name = json.dumps([case[field] for field in _METHOD])
        if name not in self._training:
            ddp, step = _make_training(case)
            exchange = Exchange(case["collective"], case["codec"], tuple(case["grid"] or ()) or "auto").attach(ddp)
            self._training[name] = step, exchange
        step, exchange = self._training[name]
        _warm_up(step)
        times = []
        for _ in range(int(case["steps"])):
            start, exposed = time.perf_counter(), exchange.exposed_seconds
            step()
            times.append([time.perf_counter() - start, exchange.exposed_seconds - exposed])
        # no barrier between steps, as in training: one rank's wait is another's gain
        total = torch.tensor(times, dtype=torch.float64)
        dist.all_reduce(total)
        found: list[list[float]] = (total / dist.get_world_size()).tolist()
        return found


def _warm_up(step: Callable[[], None]) -> None:
    """Take steps for half a second, at least two: DDP rebuilds its buckets, and TCP finds the rate of the links."""
    begun, count, longest = time.perf_counter(), 0, torch.zeros(1)
    while count < 2 or longest.item() < 0.5:
        step()
        count += 1
        longest[0] = time.perf_counter() - begun
        dist.all_reduce(longest, dist.ReduceOp.MAX)  # all hosts must agree on the number of steps
    dist.barrier()


def _change_links(commands: list[list[str]]) -> None:
    """Change the speeds of links while no message is in flight."""
    dist.barrier()
    for command in commands:
        subprocess.run(command, check=True)
    dist.barrier()


def _model_and_batch(case: dict[str, Any]) -> tuple[torch.nn.Module, Tensor]:
    channels, side, classes = _INPUTS[case["model"]]
    model = build_model(case["model"], classes=classes, channels=channels, image_size=side)
    return model, torch.randn(int(case["local_batch"]), channels, side, side)


def _make_training(
    case: dict[str, Any], forward_ended: Callable[[], None] = lambda: None
) -> tuple[DistributedDataParallel, Callable[[], None]]:
    """A model under DDP, and one step of its training."""
    model, images = _model_and_batch(case)
    labels = torch.zeros(len(images), dtype=torch.int64)
    ddp = DistributedDataParallel(model, bucket_cap_mb=case["bucket_mb"] / 1.048576)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-6, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        loss: Tensor = torch.nn.functional.cross_entropy(ddp(images), labels)
        forward_ended()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's, without annotations
        optimizer.step()

    return ddp, step


def _measure_workload(case: dict[str, Any]) -> dict[str, Any]:
    """Times of the model's layers while every host computes, as a workload file has them.

    The layers are timed one by one; how long they take together, and what follows them, is measured on whole steps
    under DDP with a hook that returns each bucket at once.
    """
    model, images = _model_and_batch(case)
    dist.barrier()
    layers = measure_workload(model, images, name=case["model"], repeats=9)
    marks: list[float] = []

    def hand_back(bucket: GradBucket) -> Future[Tensor]:
        if bucket.is_last():
            marks.append(time.perf_counter())
        done: Future[Tensor] = Future()
        done.set_result(bucket.buffer())
        return done

    ddp, step = _make_training(case, lambda: marks.append(time.perf_counter()))
    ddp.register_comm_hook(None, lambda _, bucket: hand_back(bucket))
    dist.barrier()
    parts = []
    for _ in range(3 + int(case["steps"])):
        marks[:] = [time.perf_counter()]
        step()
        times = [*marks, time.perf_counter()]
        parts.append([later - sooner for sooner, later in zip(times, times[1:], strict=False)])
    forward, backward, after = (statistics.median(part) for part in zip(*parts[3:], strict=True))
    return workload_to_mapping(as_it_is_trained(layers, forward, backward, after))


def _time_server(case: dict[str, Any]) -> list[list[float]]:
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
            # posted before the weights are sent, for the reason given in `bigstep.exchange.messages.transfer`
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
    # each interval spans one update of every worker, since updates may come in pairs
    return [[(later - sooner) / workers] for sooner, later in zip(steady, steady[workers:], strict=False)]


def _receive(tensor: Tensor, source: int, *, tag: int) -> dist.Work:
    work = dist.irecv(tensor, source, tag=tag)
    assert work is not None, "this rank is in the group"
    return work


def main() -> None:
    """Join the group that the environment describes, run the cases given as argument, print the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    host = Host()
    results = [host.run(case) for case in json.loads(sys.argv[1])]
    host.close()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
