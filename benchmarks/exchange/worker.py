"""What one host of the laboratory does: time collectives, or steps of training, variants taken in turns.

Arguments: one JSON object. Prints one JSON object: seconds of each repeat of each variant (of the slowest rank).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bigstep.comm import Exchange, Halving, Hierarchical, Ring, Torus, World, sum_over_ranks

COLLECTIVES = {"ring": Ring, "torus": Torus, "hierarchical": Hierarchical, "halving": Halving}


def slowest(seconds: float) -> float:
    value = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(value, op=dist.ReduceOp.MAX)
    return float(value)


def in_turns(variants: dict[str, Callable[[], None]], repeats: int) -> dict[str, list[float]]:
    """One unmeasured round, then `repeats` rounds over all variants; each starts together on all ranks."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats + 1):
        for name, run in variants.items():
            dist.barrier()
            start = time.perf_counter()
            run()
            seconds = slowest(time.perf_counter() - start)
            if repeat:
                times[name].append(seconds)
    return times


def time_sums(job: dict[str, Any]) -> dict[str, list[float]]:
    world = World.join(dist.group.WORLD)
    variants: dict[str, Callable[[], None]] = {}
    for name in job["collectives"]:
        collective = COLLECTIVES[name](world)
        for nbytes in job["nbytes"]:
            values = torch.ones(nbytes // 4)
            variants[f"{name} {nbytes}"] = lambda c=collective, v=values: sum_over_ranks(c, v)
    return in_turns(variants, job["repeats"])


def time_steps(job: dict[str, Any]) -> dict[str, Any]:
    width, layers = job["width"], job["layers"]
    variants: dict[str, Callable[[], None]] = {}
    exchanges: dict[str, Exchange] = {}
    for name, settings in job["variants"].items():
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
        ddp = DistributedDataParallel(model, bucket_cap_mb=job["bucket_mb"])
        if settings is not None:
            exchanges[name] = Exchange(**settings).attach(ddp)
        inputs = torch.randn(job["batch"], width) / width**0.5

        def step(ddp: nn.Module = ddp, inputs: torch.Tensor = inputs) -> None:
            for parameter in ddp.parameters():
                parameter.grad = None
            ddp(inputs).sum().backward()
            with torch.no_grad():
                for parameter in ddp.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-9)

        for _ in range(job.get("warm", 2)):  # DDP's own buckets settle in the second step, kernels compile in the first
            step()
        variants[name] = step
    gc.disable()
    times: dict[str, Any] = in_turns(variants, job["repeats"])
    for name, exchange in exchanges.items():
        times[f"{name}: exposed s in all"] = exchange.exposed_seconds
        times[f"{name}: bytes in all"] = exchange.bytes_sent
        exchange.close()
    return times


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    result = time_sums(job) if job["kind"] == "sum" else time_steps(job)
    dist.barrier()
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
