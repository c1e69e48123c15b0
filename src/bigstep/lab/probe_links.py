"""Cost of collectives and codecs on this machine: ranks over loopback, and the codecs of one rank."""

from __future__ import annotations

import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from bigstep.engine.launchers import LOOPBACK
from bigstep.engine.scratch import scratch_folder
from bigstep.exchange import World, sum_over_ranks
from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs import BlockCodec, Sum, SummableCodec
from bigstep.exchange.codecs.layout import lay_out
from bigstep.exchange.codecs.onebit import OneBit
from bigstep.exchange.collectives import Gather
from bigstep.exchange.gathered import Gathered
from bigstep.tables import load
from bigstep.tables.codecs import CODECS, BlockCode, encoded_bytes, fill_settings
from bigstep.tables.collectives import RUNNABLE, collective_traffic

__all__ = ["fit_cost", "measure_codecs", "measure_collectives", "time_collectives", "without_codec"]

SIZES = (1_024, 65_536, 1_048_576, 4_194_304, 16_777_216)
"""Bytes of float32 at which a collective is timed."""


def measure_collectives(ranks: int, *, repeats: int = 5) -> dict[str, list[tuple[int, float]]]:
    """Time every collective over `ranks` processes of this machine; returns (bytes, seconds) by name."""
    with scratch_folder() as folder:
        mp.start_processes(_serve, args=(ranks, repeats, str(folder)), nprocs=ranks, start_method="spawn")  # type: ignore[attr-defined,no-untyped-call]  # torch's
        found: dict[str, list[tuple[int, float]]] = torch.load(folder / "result.pt", weights_only=True)
    return found


def _serve(rank: int, ranks: int, repeats: int, folder: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks, timeout=timedelta(seconds=60)
    )
    found = time_collectives(repeats)
    if rank == 0:
        torch.save(found, Path(folder) / "result.pt")
    dist.destroy_process_group()


def time_collectives(repeats: int, sizes: Sequence[int] = SIZES) -> dict[str, list[tuple[int, float]]]:
    """Time every collective in the default process group; every rank must call this."""
    group = dist.group.WORLD
    assert group is not None
    world = World.join(group, ranks_per_node=1)  # over loopback there is only one kind of link
    found: dict[str, list[tuple[int, float]]] = {}
    for name, entry in RUNNABLE.items():
        if not entry.sums or entry.joins:  # one that joins others costs what they cost
            continue
        collective = load(entry.home)(world)
        buffers = [torch.zeros(size // 4) for size in sizes]
        found[name] = [
            (flat.nbytes, _timed(functools.partial(sum_over_ranks, collective, flat), repeats)) for flat in buffers
        ]
    found["gather"] = [(size, _timed_onebit(world, size, repeats)) for size in sizes]
    return found


def _timed(function: Callable[[], object], repeats: int) -> float:
    """Median seconds; every rank must call this."""
    times = []
    for repeat in range(repeats + 1):
        dist.barrier()
        start = time.perf_counter()
        function()
        if repeat:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _timed_onebit(world: World, size: int, repeats: int) -> float:
    shape = (max(1, size // 4096), min(1024, size // 4))
    code = CODECS["onebit"].blocks
    assert code is not None
    gathered = Gathered(world, Gather(world), OneBit(), code, {"weight": shape}, {})
    flat = torch.randn(shape[0] * shape[1])

    def exchange() -> None:
        for under_way in gathered.start(Bucket(flat=flat, names=("weight",), shapes=(torch.Size(shape),), step=0)):
            for work in under_way:
                work.wait()

    return _timed(exchange, repeats)


def fit_cost(name: str, points: Sequence[tuple[int, float]], ranks: int, ranks_per_node: int = 1) -> dict[str, float]:
    """Fit seconds = rounds x latency + bytes_sent x cost to measured points, by least squares of relative errors.

    Returns:
        `latency_us` of a round and `copy_gbyte_s`, as a cluster file names them.

    Example:
        >>> points = [(n, 6 * 50e-6 + 2 * n * 3 / 4 * 1e-9) for n in SIZES]
        >>> {key: round(value, 3) for key, value in fit_cost("ring", points, 4).items()}
        {'latency_us': 50.0, 'copy_gbyte_s': 1.0}
    """
    rows = []
    for size, seconds in points:
        wire = encoded_bytes("onebit", [(max(1, size // 4096), min(1024, size // 4))]) if name == "gather" else size
        traffic = collective_traffic(name, wire, ranks, group=ranks_per_node if name == "hierarchical" else None)
        rows.append((traffic.messages / seconds, traffic.bytes_sent / seconds))
    # minimise sum of (a x + b y - 1)^2 over both costs a, b >= 0
    xx, xy, yy = (sum(p * q for p, q in pairs) for pairs in (
        [(x, x) for x, _ in rows], rows, [(y, y) for _, y in rows]))  # fmt: skip
    sx, sy = sum(x for x, _ in rows), sum(y for _, y in rows)
    determinant = xx * yy - xy * xy
    latency = max(0.0, (sx * yy - sy * xy) / determinant)
    per_byte = max(1e-15, (sy * xx - sx * xy) / determinant)
    return {"latency_us": latency * 1e6, "copy_gbyte_s": 1e-9 / per_byte}


def without_codec(points: Sequence[tuple[int, float]], speed: Mapping[str, float]) -> list[tuple[int, float]]:
    """Subtract encoding and decoding from the times of an exchange of codes, but leave a tenth of each at least."""
    per_byte = 1e-9 / speed["encode_gbyte_s"] + 1e-9 / speed["decode_gbyte_s"]
    return [(size, max(seconds / 10, seconds - size * per_byte)) for size, seconds in points]


def measure_codecs(values: int = 4_194_304, repeats: int = 5) -> dict[str, Mapping[str, float]]:
    """Speed of every codec that has no rounds of its own, on one rank, in bytes of float32."""
    seconds = {}
    for name, entry in CODECS.items():
        if name == "none" or entry.own_rounds:
            continue
        shape, codec = (values // 4096, 4096), load(entry.home)()
        if entry.blocks is None:
            seconds[name] = _time_summable(codec, torch.randn(shape).view(-1), entry.agree_from == 1, repeats)
        else:
            seconds[name] = _time_blocks(codec, entry.blocks, torch.randn(shape), repeats)
    return {
        name: {"encode_gbyte_s": 4e-9 * values / max(e, 1e-9), "decode_gbyte_s": 4e-9 * values / max(d, 1e-9)}
        for name, (e, d) in seconds.items()
    }


def _time_summable(codec: SummableCodec, flat: torch.Tensor, agrees: bool, repeats: int) -> tuple[float, float]:
    """Seconds to encode and to decode, beyond the division that float32 needs too."""
    sizes, rule = [flat.numel()], Sum(2, divide_by=2)
    agreed = codec.measure(flat, sizes) if agrees else None
    wire = codec.encode(flat.clone(), sizes, agreed, rule)

    def encode() -> None:
        if agrees:
            codec.encode(flat, sizes, codec.measure(flat, sizes), rule)
        else:
            flat.to(wire.dtype)

    return _alone(encode, repeats), _alone(lambda: codec.decode(wire, flat, sizes, agreed, rule), repeats)


def _time_blocks(codec: BlockCodec, code: BlockCode, values: torch.Tensor, repeats: int) -> tuple[float, float]:
    blocks, nbytes = lay_out(code, code.cut(values.shape).lengths, fill_settings({}), values.device)
    flat, kept = values.view(-1), torch.zeros(values.numel())
    message = torch.zeros(nbytes, dtype=torch.uint8)
    return (
        _alone(lambda: codec.encode(flat, kept, blocks, message), repeats),
        # the owner unpacks and adds all ranks' codes of its slice, and every rank unpacks the result
        2 * _alone(lambda: codec.decode(message, blocks, flat), repeats),
    )


def _alone(function: Callable[[], object], repeats: int) -> float:
    times = []
    for repeat in range(repeats + 1):
        start = time.perf_counter()
        function()
        if repeat:
            times.append(time.perf_counter() - start)
    return statistics.median(times)
