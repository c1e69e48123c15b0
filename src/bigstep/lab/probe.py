"""`bigstep probe`: measure this machine and its links, and write them as files that `bigstep plan` reads."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml

from bigstep.errors import ConfigError
from bigstep.lab.probe_layers import measure_workload
from bigstep.lab.probe_links import fit_cost, measure_codecs, measure_collectives, without_codec
from bigstep.models import build_model
from bigstep.plan.workload import Workload
from bigstep.records import describe_machine, write_atomically
from bigstep.tables.models import find_model

__all__ = ["probe", "workload_to_mapping", "workload_to_yaml"]

LOOPBACK_GBYTE_S = 1000.0
"""Rate written for loopback: memory is the wire, so the measured copying contains all that a byte costs."""


def probe(
    out: Path,
    *,
    model: str = "",
    ranks: int = 2,
    batch: int = 32,
    image_size: int = 224,
    channels: int = 3,
    classes: int = 1000,
    length: int = 128,
    vocabulary: int = 256,
    device: str = "cpu",
    repeats: int = 5,
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """Measure this machine; write `machine.yaml`, and `MODEL.yaml` where a model is given, into `out`.

    Args:
        out: Folder for the files.
        model: A model by the names of `bigstep train`; empty to measure only the machine.
        ranks: Processes among which collectives are timed.
        batch: Local batch at which the model is measured.
        image_size: Side of its images.
        channels: Of its images.
        classes: Of its output.
        length: Of its sequences, for a model of tokens.
        vocabulary: Different tokens.
        device: cpu or cuda.
        repeats: Each figure is the median of this many; of memory bandwidth and arithmetic it is the best.
        tell: Called with what is measured next, since it takes half a minute and a large model much longer.

    Returns:
        The cluster as plain dicts, and the files written.
    """
    if ranks < 2:
        raise ConfigError(f"ranks is {ranks}, but a collective needs at least 2.")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError("device is cuda, but torch sees no CUDA device; use device=cpu.")
    of_tokens = bool(model) and find_model(model).input == "tokens"  # refuses an unknown name before anything is timed
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ConfigError(
            f"The folder {out} cannot be written ({error.strerror}); choose another with --out."
        ) from None
    cluster = _measure_machine(ranks, torch.device(device), repeats, tell)
    files = [out / "machine.yaml"]
    write_atomically(files[0], yaml.safe_dump(cluster, sort_keys=False, allow_unicode=True, width=120).encode())
    if model:
        if of_tokens:
            network = build_model(model, vocabulary=vocabulary, length=length).to(device)
            sample = torch.randint(vocabulary, (batch, length), device=device)
        else:
            network = build_model(model, classes=classes, channels=channels, image_size=image_size).to(device)
            sample = torch.randn(batch, channels, image_size, image_size, device=device)
        safe = model.replace(":", "-").replace("/", "-")
        workload = measure_workload(network, sample, name=safe, repeats=repeats, tell=tell)
        workload = replace(workload, tokens=length if of_tokens else 0)
        files.append(out / f"{safe}.yaml")
        write_atomically(files[1], workload_to_yaml(workload).encode())
    return {"kind": "probe", "cluster": cluster, "files": [str(path) for path in files]}


def _measure_machine(ranks: int, device: torch.device, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    tell("codecs")
    codecs = measure_codecs(repeats=repeats)
    tell(f"collectives among {ranks} ranks")
    points = measure_collectives(ranks, repeats=repeats)
    points["gather"] = without_codec(points["gather"], codecs["onebit"])
    collectives = {name: _rounded(fit_cost(name, points[name], ranks)) for name in points}
    tell("memory and arithmetic")
    facts = describe_machine()
    when = time.strftime("%Y-%m-%d")
    measured = f"measured on this machine, {when}, {ranks} ranks over loopback"
    link = {"bandwidth_gbyte_s": LOOPBACK_GBYTE_S, **collectives["ring"], "gap_us": 0}
    return {
        "name": "machine",
        "about": f"{facts['hardware']['processor']}, {facts['hardware']['cores']} cores, torch {torch.__version__}",
        "nodes": ranks,
        "devices_per_node": 1,
        "jitter": 0.0,
        "device": {
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else facts["hardware"]["processor"],
            "memory_gib": round(_memory_byte(device) / 2**30, 2),
            "memory_bandwidth_gbyte_s": round(_memory_rate(device, repeats) / 1e9, 3),
            "sustained_tflop_s": round(_flop_rate(device, repeats) / 1e12, 5),
        },
        "inside": link,
        "between": dict(link),
        "collectives": collectives,
        "codecs": {name: _rounded(dict(speed)) for name, speed in codecs.items()},
        "sources": {"collectives": measured, "codecs": measured, "device": measured},
    }


def _rounded(figures: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def _memory_byte(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.get_device_properties(device).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _memory_rate(device: torch.device, repeats: int) -> float:
    """Bytes a second of a copy, read and written."""
    source = torch.ones(16_777_216, device=device)
    target = torch.empty_like(source)
    return 8 * source.numel() / _best(lambda: target.copy_(source), device, repeats)


def _flop_rate(device: torch.device, repeats: int) -> float:
    """Operations a second of a convolution's forward pass, as in the middle of a ResNet."""
    images = torch.randn(8, 64, 56, 56, device=device)
    convolution = torch.nn.Conv2d(64, 64, 3, padding=1).to(device)
    with torch.no_grad():
        seconds = _best(lambda: convolution(images), device, repeats)
    return 2 * 8 * 64 * 64 * 9 * 56 * 56 / seconds


def _best(function: Any, device: torch.device, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        function()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)


def workload_to_mapping(workload: Workload) -> dict[str, Any]:
    """A measured workload as the content of its file."""
    layers = [
        {
            "name": layer.name,
            "shapes": [list(shape) for shape in layer.shapes],
            "outputs": layer.outputs,
            "forward_us": round(layer.forward_s * 1e6, 3),
            "backward_us": round(layer.backward_s * 1e6, 3),
        }
        for layer in workload.layers
    ]
    return {
        "name": workload.name,
        "samples": workload.samples,
        "measured_batch": workload.measured_batch,
        "tokens": workload.tokens,
        "optimizer_us": round(workload.optimizer_s * 1e6, 3),
        "layers": layers,
    }


def workload_to_yaml(workload: Workload) -> str:
    """Write a measured workload as the planner reads it."""
    return yaml.safe_dump(workload_to_mapping(workload), sort_keys=False, default_flow_style=None, width=120)
