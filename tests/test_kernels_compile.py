"""The update kernels go through the compiler for a GPU, which needs none; the interpreter takes more than it does."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest

PROGRAM = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bigstep.gpu import batch_norm_forward_triton as norms
from bigstep.gpu import crops_triton, cross_entropy_triton, lamb_triton, lars_triton, max_pool_triton, pool_triton

WALK = {"table": "*i64", "chunk_tensor": "*i32", "chunk_first": "*i32", "sizes": "*i32", "first_chunk": "*i32"}
ROWS = {"logits": "*bf16", "gradient": "*bf16", "target": "*i64", "classes": "i32", "smoothing": "fp32"}
CROPS = {
    "places": "*i64", "out": "*fp16", "width": "i32", "height": "i32",
    **{name: "i32" for name in ("out_image", "out_channel", "out_row", "out_column")},
    **{f"{name}{channel}": "fp32" for name in ("scale", "shift") for channel in range(3)},
}
SIZES = ("rows", "channels", "windows", "columns", "images_per_group", "out_height", "out_width", "plane")
IMAGES = {
    **dict.fromkeys(("x", "y", "y2", "residual", "other", "picked"), "*bf16"), "signs": "*u8", "winner": "*u8",
    **dict.fromkeys(SIZES, "i32"),
}
TYPES = {**WALK, **ROWS, **CROPS, **IMAGES, "tensors": "i32", "chunks": "i32", "momentum": "fp32"}
FLAGS = ("EVEN", "RELU", "RESIDUAL", "OTHER", "SIGNS", "HALF")
KIND = {"CHUNK": 2048, "NARROW": tl.bfloat16, "ALIGNED": True}
KERNELS = [
    (lars_triton.norms_kernel, KIND, 8),
    (lars_triton.trust_kernel, {"BLOCK": 256}, 2),
    (lars_triton.update_kernel, {**KIND, "NESTEROV": True, "COPIES": True}, 8),
    (lamb_triton.corrections_kernel, {}, 1),
    (lamb_triton.moments_kernel, {**KIND, "APPLY": False, "COPIES": False}, 8),
    (lamb_triton.moments_kernel, {**KIND, "APPLY": True, "COPIES": True}, 8),
    (lamb_triton.ratios_kernel, {"BLOCK": 256}, 2),
    (lamb_triton.update_kernel, {**KIND, "COPIES": True}, 8),
    (cross_entropy_triton.cost_kernel, {"SMOOTHED": True, "IGNORED": -100, "B": 1024}, 4),
    (cross_entropy_triton.gradient_kernel, {"IGNORED": -100, "B": 1024}, 4),
    (cross_entropy_triton.cost_kernel, {"SMOOTHED": False, "IGNORED": -100, "B": 4096}, 8),  # a vocabulary of 50,257
    (cross_entropy_triton.gradient_kernel, {"IGNORED": -100, "B": 4096}, 8),
    (cross_entropy_triton.cost_kernel, {"SMOOTHED": False, "IGNORED": -100, "B": 256}, 1),  # bytes
    (crops_triton.crop_kernel, {"BLOCK": 256}, 4),
    (norms.normalize_kernel, {"BM": 32, "BC": 128, **dict.fromkeys(FLAGS, True)}, 4),
    (pool_triton.normalize_pool_kernel, {"BW": 8, "BC": 64}, 4),
    (max_pool_triton.pool_kernel, {"BM": 32, "BC": 64}, 4),
]
for kernel, fixed, warps in KERNELS:
    names = kernel.arg_names
    signature = {name: "constexpr" if name in fixed else TYPES.get(name, "*fp32") for name in names}
    source = ASTSource(kernel, signature, {(names.index(name),): value for name, value in fixed.items()})
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    if "cross_entropy" in kernel.__module__:  # 32,768 rows of 65,536 logits are 2^31: places must have 64 bits
        products = [line for line in compiled.asm["ttir"].splitlines() if "arith.muli" in line and "%row" in line]
        assert products and all(": i64" in line for line in products), compiled.asm["ttir"]
    if "RELU" in fixed:
        assert "max.NaN" in compiled.asm["ptx"], "what is no number must not become 0"
    print(kernel.__module__.split(".")[-1], kernel.__name__, compiled.asm["ptx"].count(".v4.b32"))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compile_for_a_gpu_and_updates_move_sixteen_bytes_at_once() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, check=False)
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()]
    assert len(rows) == 17
    # what walks over tensors does it with 16-byte accesses; an address from a table does not tell the compiler
    walks = [int(wide) for _, kernel, wide in rows if kernel in ("norms_kernel", "moments_kernel", "update_kernel")]
    assert len(walks) == 5
    assert min(walks) > 0
