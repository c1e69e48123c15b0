"""Every published row that the planner is compared with, and the prediction for it.

No constant is fitted to a row that counts. A row that sets a constant (the speed of one device or one node with its
software) is marked and does not count. If a paper does not report something that the model needs, the row says what
was assumed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from bigstep.plan.accuracy import IMAGENET_LARS
from bigstep.plan.cluster import Cluster
from bigstep.plan.scheme import Scheme
from bigstep.plan.simulate import Prediction, predict
from bigstep.plan.workload import Workload

__all__ = ["ROWS", "Assumed", "Row"]

IMAGES = 1281167


@dataclass(frozen=True)
class Assumed:
    """Values that the papers do not report, the same for all rows; docs/planner.md shows the effect of other values."""

    jitter: float = 0.03
    """Jitter of compute times, on every cluster."""
    run_overhead_s: float = 1.1
    """Seconds of an MLPerf run outside its steps: set by the 768-GPU row (22.1 s, of which the steps take 21.0 s)."""
    mikami_overlap: bool = False
    """Whether Sony's exchange runs during the backward pass."""
    yamazaki_collective: str = "torus"
    """Fujitsu's collective: by default the torus published for the same machine."""


@dataclass(frozen=True)
class Row:
    """One published figure."""

    system: str
    quantity: str
    unit: str
    published: float
    source: str
    predicted: Callable[[Assumed], float]
    role: Literal["predicted", "sets a constant", "contradicted"] = "predicted"
    note: str = ""


@functools.cache
def _cluster(a: Assumed, name: str, tflop_s: float = 0.0) -> Cluster:
    cluster = replace(Cluster.load(name), jitter=a.jitter)
    return replace(cluster, device=replace(cluster.device, flop_s=tflop_s * 1e12)) if tflop_s else cluster


def _step(cluster: Cluster, devices: int, local_batch: float, scheme: Scheme, model: str = "resnet50") -> Prediction:
    return predict(Workload.load(model), cluster, devices=devices, local_batch=local_batch, scheme=scheme)


# Goyal et al.: halving and doubling between servers, phases pipelined and overlapped with backward, float32
_GOYAL = Scheme(collective="halving", pipelined=True)
# Akiba et al.: one flat buffer, NCCL's ring in half precision, after the backward pass
_AKIBA = Scheme(collective="ring", codec="fp16", bucket_mb=1000, overlap=False)
# Jia et al.: half precision, tensor fusion, hierarchical all-reduce, LARS
_JIA = Scheme(collective="hierarchical", codec="fp16", optimizer="lars")
# Mikami et al.: 2D torus in half precision, LARS; one exchange after the backward pass (overlap is not reported)
_MIKAMI = Scheme(collective="torus", codec="fp16", bucket_mb=1000, overlap=False, optimizer="lars")
# NVIDIA's MLPerf configurations: one all-reduce group, in-network reduction, no overlap
_MLPERF = Scheme(collective="switch", codec="fp16", bucket_mb=1000, overlap=False, optimizer="lars")
_NNL_TFLOP_S = 20.18
"""V100 with Sony's library: 641.25 images/s a GPU on one node at 16 images (its table's first row)."""


def _yamazaki(a: Assumed) -> Scheme:
    """Groups of several MB (4 MB on the wire) during the backward pass; the collective is not reported."""
    grid = (64, 32) if a.yamazaki_collective == "torus" else None
    return Scheme(collective=a.yamazaki_collective, codec="fp16", bucket_mb=8, grid=grid, optimizer="lars")


def _minutes(prediction: Prediction, epochs: float) -> float:
    return epochs * IMAGES / prediction.samples_s / 60


def _goyal(gpus: int) -> Callable[[Assumed], float]:
    return lambda a: _step(_cluster(a, "big_basin"), gpus, 32, _GOYAL).step_s


def _mikami(a: Assumed, gpus: int, grid: tuple[int, int], local_batch: int = 16) -> Prediction:
    return _step(
        _cluster(a, "abci", _NNL_TFLOP_S), gpus, local_batch, replace(_MIKAMI, grid=grid, overlap=a.mikami_overlap)
    )


def _mlperf_rate(cluster: str, gpus: int, local_batch: int) -> Callable[[Assumed], float]:
    return lambda a: _step(_cluster(a, cluster), gpus, local_batch, _MLPERF).samples_s / gpus


def _mlperf_minutes(cluster: str, gpus: int, local_batch: int) -> Callable[[Assumed], float]:
    def minutes(a: Assumed) -> float:
        prediction = _step(_cluster(a, cluster), gpus, local_batch, _MLPERF)
        return _minutes(prediction, IMAGENET_LARS.epochs(prediction.batch)) + a.run_overhead_s / 60

    return minutes


_G, _A, _J = "Goyal et al. 2017", "Akiba et al. 2017", "Jia et al. 2018"
_M1, _M2, _Y = "Mikami et al. 2018 (v1)", "Mikami et al. 2019 (v2)", "Yamazaki et al. 2019"
_V2 = "table of GPU scaling, 16 images a GPU (batch inferred: 55,296 / 3456)"
_SETS: Literal["sets a constant"] = "sets a constant"

_IMAGENET = (
    Row(_G, "step, 8 GPUs", "s", 0.232, "29 h for 90 epochs", _goyal(8), _SETS),
    Row(_G, "step, 256 GPUs", "s", 0.256, "1 h for 90 epochs", _goyal(256)),
    Row(_G, "step, 352 GPUs", "s", 0.264, "30 s an epoch", _goyal(352)),
    Row(_A, "efficiency on 1024 against 1 GPU", "%", 70.0, "recollection of the paper",
        lambda a: 100 * _step(_cluster(a, "mn1"), 1024, 32, _AKIBA).efficiency, _SETS,
        "70 % of the step below gave the speed of one GPU"),
    Row(_A, "step, 1024 GPUs", "s", 0.255, "897.9 s for 90 epochs, evaluation included",
        lambda a: _step(_cluster(a, "mn1"), 1024, 32, _AKIBA).step_s),
    Row(_A, "efficiency on 1024 against 8 GPUs", "%", 80.0, "as quoted by NVIDIA's report on Sony",
        lambda a: 100 * _step(_cluster(a, "mn1"), 8, 32, _AKIBA).step_s
        / _step(_cluster(a, "mn1"), 1024, 32, _AKIBA).step_s),
    Row(_J, "ResNet-50, 1024 GPUs, 64 images each", "min", 8.7, "table of results",
        lambda a: _minutes(_step(_cluster(a, "tencent_p40"), 1024, 64, _JIA), 90), _SETS),
    Row(_J, "ResNet-50, 2048 GPUs, 32 images each", "min", 6.6, "abstract",
        lambda a: _minutes(_step(_cluster(a, "tencent_p40"), 2048, 32, _JIA), 90)),
    Row(_J, "efficiency on 1024, 32 images", "%", 87.9, "scaling figure",
        lambda a: 100 * _step(_cluster(a, "tencent_p40"), 1024, 32, _JIA).efficiency,
        note="NVIDIA's report prints it beside 2048 GPUs, QbitAI's beside 1024"),
    Row(_J, "efficiency on 1024, 64 images", "%", 99.2, "scaling figure (recollection)",
        lambda a: 100 * _step(_cluster(a, "tencent_p40"), 1024, 64, _JIA).efficiency),
    Row(_J, "AlexNet, 1024 GPUs", "min", 4.0, "abstract",
        lambda a: _minutes(_step(_cluster(a, "tencent_p40"), 1024, 64, _JIA, "alexnet"), 95)),
    Row(_J, "AlexNet, 512 GPUs", "min", 5.0, "table of results (recollection)",
        lambda a: _minutes(_step(_cluster(a, "tencent_p40"), 512, 128, _JIA, "alexnet"), 95)),
    Row(_M1, "efficiency on 1088 against 4 GPUs, 32 images", "%", 91.62, "table of GPU scaling",
        lambda a: 100 * _mikami(a, 4, (4, 1), 32).step_s / _mikami(a, 1088, (34, 32), 32).step_s,
        note="grid not found; 34 x 32 assumed"),
    Row(_M1, "2176 GPUs, 34K to 68K, 90 epochs", "s", 224.0, "abstract",
        lambda a: sum(
            epochs * IMAGES / _mikami(a, 2176, (34, 64), each).samples_s for epochs, each in ((30, 16), (60, 32))),
        "contradicted", "224 s is 237 images/s a GPU, half of what the paper's own scaling table implies"),
    Row(_M2, "images/s, 4 GPUs", "k/s", 2.565, _V2, lambda a: _mikami(a, 4, (4, 1)).samples_s / 1e3, _SETS),
    Row(_M2, "images/s, 1024 GPUs", "k/s", 556.522, _V2, lambda a: _mikami(a, 1024, (32, 32)).samples_s / 1e3),
    Row(_M2, "images/s, 2048 GPUs", "k/s", 1091.357, _V2, lambda a: _mikami(a, 2048, (64, 32)).samples_s / 1e3),
    Row(_M2, "images/s, 3456 GPUs", "k/s", 1641.853, _V2, lambda a: _mikami(a, 3456, (72, 48)).samples_s / 1e3),
    Row(_M2, "images/s, 4096 GPUs", "k/s", 1929.054, _V2, lambda a: _mikami(a, 4096, (64, 64)).samples_s / 1e3),
    Row(_M2, "3456 GPUs, 90 epochs", "s", 122.0, "abstract",
        lambda a: 90 * IMAGES / _mikami(a, 3456, (72, 48)).samples_s,
        "contradicted", "122 s is 945 k images/s; the table prints 1,642 k for the same GPUs"),
    Row(_Y, "efficiency on 2048 GPUs", "%", 77.0, "scaling figure (recollection)",
        lambda a: 100 * _step(_cluster(a, "abci"), 2048, 40, _yamazaki(a)).efficiency, _SETS,
        "77 % of the rate below gave the speed of one GPU"),
    Row(_Y, "images/s, 2048 GPUs", "k/s", 1730.0, "abstract",
        lambda a: _step(_cluster(a, "abci"), 2048, 40, _yamazaki(a)).samples_s / 1e3, note="collective not reported"),
    Row(_Y, "2048 GPUs, 90 epochs", "s", 74.7, "abstract",
        lambda a: 90 * IMAGES / _step(_cluster(a, "abci"), 2048, 40, _yamazaki(a)).samples_s,
        "contradicted", "1.73 M images/s for 74.7 s is 101 epochs; the epochs are not reported"),
)  # fmt: skip


def _ladder() -> tuple[Row, ...]:
    """NVIDIA's MLPerf submissions: logged rate per chip, and minutes to 75.9 % by the convergence law."""
    rungs = [
        ("dgx_a100", 8, 408, 3398, 28.69), ("dgx_a100", 1024, 35, 2306, 0.555), ("dgx_a100", 4216, 16, None, 0.319),
        ("dgx_h100", 8, 400, 7162, 13.27), ("dgx_h100", 512, 40, 4406, 0.503), ("dgx_h100", 768, 42, 4445, 0.369),
        ("dgx_h100", 2528, 16, 2724, 0.228), ("dgx_h100", 3584, 16, 2819, 0.183), ("dgx_h200", 8, 400, 7950, 12.03),
    ]  # fmt: skip
    rows = []
    for cluster, gpus, batch, rate, minutes in rungs:
        chip = cluster.removeprefix("dgx_").upper()
        system, source = f"MLPerf, NVIDIA {chip}", "result logs, mean of the middle three of five runs"
        if rate:
            role: Literal["predicted", "sets a constant"] = _SETS if gpus == 8 else "predicted"
            rows.append(
                Row(system, f"images/s a chip, {gpus}", "1/s", rate, source, _mlperf_rate(cluster, gpus, batch), role)
            )
        role = _SETS if gpus in (8, 768) else "predicted"
        rows.append(
            Row(system, f"75.9 % on {gpus}", "min", minutes, source, _mlperf_minutes(cluster, gpus, batch), role)
        )
    return tuple(rows)


def _seide(a: Assumed, nodes: int, batch: float, *, halves: bool, parallel_model: float = 1.0) -> float:
    """Thousands of frames per second of 1-bit SGD on K20X; GPUs that share a model are `parallel_model` times as fast.

    Double-buffered, each half of a minibatch is a step.
    """
    scheme = Scheme(collective="gather", codec="onebit", bucket_mb=1000, overlap=False, double_buffer=halves)
    cluster, share = _k20x(a, nodes, parallel_model), batch / nodes / (2 if halves else 1)
    return predict(_SPEECH, cluster, devices=nodes, local_batch=share, scheme=scheme).samples_s / 1e3


_SPEECH = replace(Workload.load("speech46m"), optimizer_s=0.0182)


@functools.cache
def _k20x(a: Assumed, nodes: int, parallel_model: float) -> Cluster:
    """K20X nodes, from the paper's timings of one GPU: 59 ms at 256 frames, 955 ms at 8192, 18.2 ms for the update."""
    frame_s = (0.955 - 0.059) / (8192 - 256)
    fixed_s = 0.059 - 256 * frame_s - 0.0182
    mapping = {
        "nodes": nodes,
        "devices_per_node": 1,
        "jitter": a.jitter,
        "device": {
            "memory_gib": 6,
            "memory_bandwidth_gbyte_s": 250,
            "sustained_tflop_s": _SPEECH.step_flops / frame_s / 1e12 * parallel_model,
            "launch_s": fixed_s / _SPEECH.tensors / parallel_model,
        },
        "inside": {"bandwidth_gbyte_s": 8, "latency_us": 5.7},
        # the fixed cost of about 9 ms for update and quantisation belongs to each exchange
        "between": {"bandwidth_gbyte_s": 8, "latency_us": 14, "start_ms": 9},
        "codecs": {"onebit": {"encode_gbyte_s": 1e6, "decode_gbyte_s": 1e6}},
    }
    return Cluster.from_mapping(mapping, "k20x")


def _speech_rows() -> tuple[Row, ...]:
    system, source = "Seide et al. 2014 (1-bit)", "table of kilo-frames a second, 4 x 2 GPUs"
    sizes = {"1k": 1024, "2k": 2048, "2.8k": 2880, "4k": 4096, "8k": 8192, "16k": 16384, "32k": 32768, "64k": 65536,
             "92k": 92160}  # fmt: skip
    plain = {"2k": 23, "2.8k": 28, "4k": 32, "8k": 36, "16k": 38, "32k": 39, "64k": 44, "92k": 45}
    halves = {"1k": 15, "2k": 23, "2.8k": 28, "4k": 34, "8k": 39, "16k": 45, "32k": 47, "64k": 49, "92k": 50}
    rows = []
    for name, published in (plain | {f"{size} DB": kfps for size, kfps in halves.items()}).items():
        size, double = name.removesuffix(" DB"), name.endswith("DB")
        label = f"batch {size}{', double-buffered' if double else ''}"
        value = functools.partial(_seide, nodes=4, batch=sizes[size], halves=double, parallel_model=_TWO_GPUS[double])
        role: Literal["predicted", "sets a constant"] = _SETS if size == "92k" else "predicted"
        rows.append(Row(system, label, "k/s", published, source, value, role))
    for batch, speedup in ((2880, 3.6), (16384, 6.3)):

        def ratio(a: Assumed, batch: int = batch) -> float:
            alone = batch / predict(_SPEECH, _k20x(a, 1, 1.0), devices=1, local_batch=batch).step_s / 1e3
            return _seide(a, 8, batch, halves=True) / alone

        rows.append(Row(system, f"speed-up of 8 GPUs, batch {batch}", "x", speedup, "abstract", ratio))
    return tuple(rows)


_TWO_GPUS = {False: 1.335, True: 1.499}
"""Speed-up of a model shared by two K20X, without and with double buffering: set by the rows of the largest batch.
There the exchange takes less than 1 % of the time, so it cannot explain the gap between the paper's two series."""

ROWS: tuple[Row, ...] = (*_IMAGENET, *_ladder(), *_speech_rows())
