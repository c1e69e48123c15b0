"""What one host of the laboratory does: time collectives, or steps of training, variants taken in turns.

Arguments: one JSON object. Prints one JSON object: seconds of each repeat of each variant (of the slowest rank).
"""

from __future__ import annotations

import copy
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

from bigstep.exchange import BucketTuner, Exchange, Halving, Hierarchical, Ring, Torus, World, sum_over_ranks
from bigstep.exchange.buckets import DDP_DEFAULT_MB
from bigstep.models import build_model

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


def stepper(wrapped: Callable[[], nn.Module], inputs: torch.Tensor) -> Callable[[], None]:
    """One step of training; `wrapped` gives the DDP object to use in it."""

    def step() -> None:
        ddp = wrapped()
        for parameter in ddp.parameters():
            parameter.grad = None
        ddp(inputs).square().mean().backward()
        with torch.no_grad():
            for parameter in ddp.parameters():
                parameter.sub_(parameter.grad, alpha=1e-9)

    return step


def time_buckets(job: dict[str, Any]) -> list[dict[str, Any]]:
    """In each repeat let a tuner choose, then take steps in turns: its choice, the default twice, DDP as it comes."""
    if job["model"] == "mlp":
        widths = job["widths"]
        layers = [nn.Linear(a, b) for a, b in zip(widths, widths[1:], strict=False)]
        model, inputs = nn.Sequential(*layers), torch.randn(4, widths[0])
    else:
        model = build_model(job["model"], classes=10, channels=3, image_size=32)
        inputs = torch.randn(4, 3, 32, 32)
    exchanges: list[Exchange] = []

    def maker() -> Callable[[float], DistributedDataParallel]:
        """What wraps one copy of the model with buckets of a given size, over an exchange of its own."""
        own, exchange = copy.deepcopy(model), Exchange("ring")
        exchanges.append(exchange)

        def attached(bucket_mb: float) -> DistributedDataParallel:
            ddp = DistributedDataParallel(own, bucket_cap_mb=bucket_mb)
            exchange.attach(ddp)
            return ddp

        return attached

    fixed = {
        "25 MB": maker()(DDP_DEFAULT_MB),
        "25 MB again": maker()(DDP_DEFAULT_MB),
        "DDP alone": DistributedDataParallel(copy.deepcopy(model)),
    }
    rounds = []
    for _ in range(job["repeats"]):
        tuner = BucketTuner(maker())
        step = stepper(lambda tuner=tuner: tuner.ddp, inputs)
        while not tuner.done:
            step()
            tuner.step_ended()
        variants = {name: stepper(lambda ddp=ddp: ddp, inputs) for name, ddp in fixed.items()} | {"tuned": step}
        for _ in range(2):  # DDP's own buckets settle
            for run in variants.values():
                run()
        rounds.append({"chosen": tuner.bucket_mb, "table": tuner.table, "seconds": in_turns(variants, job["steps"])})
    for exchange in exchanges:
        exchange.close()
    return rounds


def main() -> None:
    torch.set_num_threads(1)
    job = json.loads(sys.argv[1])
    dist.init_process_group("gloo")
    kinds: dict[str, Callable[[dict[str, Any]], Any]] = {"sum": time_sums, "step": time_steps, "buckets": time_buckets}
    result = kinds[job["kind"]](job)
    dist.barrier()
    print(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
