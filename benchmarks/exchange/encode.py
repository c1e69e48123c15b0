"""What 1-bit coding costs on one core: encode and decode 25 million values, in blocks of ResNet-50's kinds.

    taskset -c 0 python benchmarks/exchange/encode.py [--out benchmarks/exchange/results/encode]

Writes OUT.json and OUT.md. Goal: encode + decode <= 60 ms. Beside it, the time of the least any codec must do: read
values and residuals once, write residuals once, and write the decoded values once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bigstep.exchange.codecs import Blocks
from bigstep.exchange.codecs.onebit import OneBit
from bigstep.records import describe_machine
from bigstep.tables.codecs import onebit_blocks

HERE = Path(__file__).parent
VALUES = 25_000_000
# 1x1 and 3x3 convolutions and the classifier, about in ResNet-50's proportions
SHAPES = [(1024, 256), (256, 1024), (512, 2048), (256, 256, 3, 3), (512, 512, 3, 3), (1000, 2048)]


def block_table(values: int) -> tuple[Blocks, int, int]:
    """Blocks of `SHAPES`, over and over until `values` are reached; their values, and the bytes of the message."""
    lengths: list[int] = []
    total = 0
    while total < values:
        for shape in SHAPES:
            blocks = onebit_blocks(shape)
            lengths += blocks
            total += sum(blocks)
    sizes = torch.tensor(lengths).cumsum(0)
    lengths = lengths[: int((sizes <= values).sum())]
    size = torch.tensor(lengths)
    rows = (size + 7) // 8
    bits_at = 8 * len(lengths) + rows.cumsum(0) - rows
    table = Blocks(size.cumsum(0) - size, size, 2 * torch.arange(len(lengths)), bits_at)
    return table, int(size.sum()), int(8 * len(lengths) + rows.sum()) // 4 * 4 + 4


def milliseconds(run: Callable[[], object], repeats: int) -> dict[str, float]:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return {"n": repeats, "median_ms": statistics.median(times), "min_ms": min(times), "max_ms": max(times)}


def markdown(result: dict[str, Any]) -> str:
    machine = result["machine"]
    lines = [
        "# 1-bit coding on one core",
        "",
        f"Written by `taskset -c 0 python benchmarks/exchange/encode.py`: {result['values']:,} values in "
        f"{result['blocks']:,} blocks, {result['compression']:.1f} times smaller than float32. Goal: encode + decode "
        "<= 60 ms.",
        "",
        f"- hardware: {machine['hardware']}, load {result['load_average_at_start']:.2f} at the start",
        f"- versions: {machine['versions']}",
        f"- commit: {machine['commit']}",
        "",
        "| | n | median ms | min-max ms |",
        "|---|---|---|---|",
    ]
    for name, one in result["figures"].items():
        lines.append(f"| {name} | {one['n']} | {one['median_ms']:.1f} | {one['min_ms']:.1f}-{one['max_ms']:.1f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default=str(HERE / "results" / "encode"), help="OUT.json and OUT.md are written")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    blocks, count, nbytes = block_table(VALUES)
    values, residual, out = torch.randn(count), torch.zeros(count), torch.empty(count)
    message = torch.zeros(nbytes, dtype=torch.uint8)
    codec = OneBit()
    figures = {
        "encode": milliseconds(lambda: codec.encode(values, residual, blocks, message), options.repeats),
        "decode": milliseconds(lambda: codec.decode(message, blocks, out), options.repeats),
        "encode + decode": milliseconds(
            lambda: (codec.encode(values, residual, blocks, message), codec.decode(message, blocks, out)),
            options.repeats,
        ),
        "memory alone": milliseconds(lambda: (residual.add_(values), out.fill_(0.0)), options.repeats),
    }
    result = {
        "values": count, "blocks": blocks.starts.numel(), "compression": 4 * count / nbytes, "figures": figures,
        "machine": describe_machine(), "load_average_at_start": load,
    }  # fmt: skip
    Path(f"{options.out}.json").write_text(json.dumps(result, indent=1) + "\n")
    Path(f"{options.out}.md").write_text(markdown(result))
    print(markdown(result))


if __name__ == "__main__":
    main()
