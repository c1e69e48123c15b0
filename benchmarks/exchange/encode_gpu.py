"""What 1-bit coding costs on a GPU, against reading and writing its bytes once.

    python benchmarks/exchange/encode_gpu.py [--out FILE.json]

Goal: encode, and decode, each <= 2x the time of moving the same bytes: encode reads values and residuals and writes
residuals and the message; decode reads the message and writes values. The yardstick is torch's own kernels that move
as many bytes (an in-place add of two tensors; a fill), measured in turns with them. The codes are compared with the
plain-torch specification first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from encode import VALUES, block_table

from bigstep.exchange.codecs import Blocks
from bigstep.exchange.codecs.onebit import OneBit, encode_reference

CODEC = OneBit()


def on_gpu(blocks: Blocks) -> Blocks:
    return Blocks(blocks.starts.cuda(), blocks.lengths.cuda(), blocks.heads_at.cuda(), blocks.bodies_at.cuda())


def microseconds(runs: dict[str, Callable[[], object]], repeats: int, flush: torch.Tensor) -> dict[str, list[float]]:
    """Times by events, variants in turns; the cache is filled with something else before each.

    The device is kept busy while Python starts a variant, as it is in a step: what is timed is the device's work.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 3):
        for name, run in runs.items():
            flush.fill_(repeat)
            torch.cuda._sleep(2_000_000)  # about a millisecond
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            if repeat >= 3:
                times[name].append(1e3 * start.elapsed_time(end))
    return times


def check() -> float:
    """Largest difference of residuals from the specification on a small tensor; bits must be equal."""
    blocks, count, nbytes = block_table(2_000_000)
    torch.manual_seed(1)
    values, residual = torch.randn(count), torch.randn(count)
    message = torch.zeros(nbytes, dtype=torch.uint8)
    ours, code = residual.cuda(), message.cuda()
    CODEC.encode(values.cuda(), ours, on_gpu(blocks), code)
    encode_reference(values, residual, blocks, message)
    means = 8 * blocks.starts.numel()
    assert torch.equal(code[means:].cpu(), message[means:]), "the bits differ from the specification"
    out, expected = torch.empty(count, device="cuda"), torch.empty(count)
    CODEC.decode(code, on_gpu(blocks), out)
    CODEC.decode(code.cpu(), blocks, expected)
    assert torch.equal(out.cpu(), expected), "decoding differs from the CPU's"
    return float((ours.cpu() - residual).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="", help="write the figures here as JSON")
    parser.add_argument("--repeats", type=int, default=50)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("Skipped: no CUDA device.")
    difference = check()
    table, count, nbytes = block_table(VALUES)
    blocks = on_gpu(table)
    values, residual = torch.randn(count, device="cuda"), torch.zeros(count, device="cuda")
    out, message = torch.empty(count, device="cuda"), torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    other = torch.zeros(count, device="cuda")
    times = microseconds(
        {
            "encode": lambda: CODEC.encode(values, residual, blocks, message),
            "decode": lambda: CODEC.decode(message, blocks, out),
            "move encode's bytes": lambda: other.add_(values),
            "move decode's bytes": lambda: out.fill_(1.0),
        },
        options.repeats,
        torch.empty(100_000_000, dtype=torch.int8, device="cuda"),
    )
    medians = {name: statistics.median(each) for name, each in times.items()}
    result = {
        "values": count, "n": options.repeats, "median_us": medians,
        "spread_us": {name: [min(each), max(each)] for name, each in times.items()},
        "encode_over_moving": medians["encode"] / medians["move encode's bytes"],
        "decode_over_moving": medians["decode"] / medians["move decode's bytes"],
        "encode_gb_per_s": (12 * count + nbytes) / medians["encode"] / 1e3,
        "decode_gb_per_s": (4 * count + nbytes) / medians["decode"] / 1e3,
        "residual_difference_from_specification": difference,
        "device": torch.cuda.get_device_name(), "torch": torch.__version__,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
