"""A plan as one self-contained page, with controls that recompute it in the browser."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import bigstep
from bigstep.pages import packed_plotly, unpack_script
from bigstep.plan.cluster import Cluster, Link
from bigstep.plan.terminal import (
    crossover_sentence,
    priced_way,
    spoken_devices,
    spoken_goal,
    spoken_minutes,
    way_sentences,
)
from bigstep.plan.workload import Workload
from bigstep.records import write_atomically
from bigstep.tables.codecs import CODECS, encoded_bytes
from bigstep.tables.collectives import COLLECTIVES
from bigstep.tables.optimizers import OPTIMIZERS

__all__ = ["page_facts", "write_page"]

TEMPLATES = Path(__file__).parent / "templates"
PAGE_CODECS = ("none", "fp16", "onebit")
PAGE_BUCKETS = (1, 4, 16, 64)


def write_page(result: dict[str, Any], path: Path, *, model: str, cluster: str) -> None:
    """Write the answer of `cli_result` as one HTML file that needs no network.

    Args:
        result: The dictionary that `cli_result` returned for a plan.
        path: The file to write.
        model: The model, as given to `cli_result`.
        cluster: The cluster, as given to `cli_result`.
    """
    import jinja2

    workload, machine = Workload.load(model), Cluster.load(cluster)
    facts = page_facts(workload, machine.resized(result["gpus"]), result)
    best = result["best"]
    goal, devices = spoken_goal(result) or "as fast as possible", spoken_devices(result["gpus"])
    sure = result["sure"]
    sentences = [
        *result["why"],
        crossover_sentence(result),
        *map(priced_way, result["ways"]),
        *way_sentences(result),
        f"The same model is off by {100 * sure['mean_error']:.0f} % on average and {100 * sure['worst_error']:.0f} % "
        f"at worst on {sure['predicted']} published rows of other people's clusters.",
        *(f"Note: {warning}." for warning in result["warnings"]),
    ]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    files = ("plan.css", "plan_model.js", "plan_page.js")
    css, model_js, page_js = ((TEMPLATES / name).read_text(encoding="utf-8") for name in files)
    times = [spoken_minutes(row["minutes"]) if row["minutes"] else "–" for row in result["ranking"]]
    html = environment.get_template("plan.html").render(
        title=f"{workload.name} on {devices} of {machine.name}: {goal}",
        lead=f"{machine.about or machine.name}. Best found: recipe {best['recipe']}, batch {best['batch']:,}, "
        f"{best['collective']}, codec {best['codec']}, buckets of {best['bucket_mb']:g} MB.",
        counts=facts["counts"],
        batches=facts["batches"],
        start=_start(best, facts, machine),
        codecs=PAGE_CODECS,
        collectives=[name for name in facts["collectives"] if name != "gather"],
        buckets=PAGE_BUCKETS,
        law=facts["model"]["law"],
        devices=devices,
        ranking=[row | {"time": time, "best": row == best} for row, time in zip(result["ranking"], times, strict=True)],
        sentences=sentences,
        version=bigstep.__version__,
        facts=facts,
        css=css,
        plotly=packed_plotly(),
        unpack_script=unpack_script(),
        model_js=model_js,
        page_js=page_js,
    )
    write_atomically(path, html.encode())


def _start(best: dict[str, Any], facts: dict[str, Any], cluster: Cluster) -> dict[str, Any]:
    """The positions of the controls when the page opens: the best choice."""
    codec = best["codec"] if best["codec"] in PAGE_CODECS else "fp16"
    rate = math.log10(cluster.between.bandwidth_byte_s * 8 / 1e9)
    return {
        "count": facts["counts"].index(best["gpus"]),
        "bandwidth": round(min(3.2, max(-2.0, rate)) * 50) / 50,  # a step of the slider; untouched, it means `rate`
        "batch": facts["batches"].index(best["local_batch"]),
        "codec": codec,
        "collective": best["collective"] if best["collective"] != "gather" else "halving",
        "bucket": min(PAGE_BUCKETS, key=lambda size: abs(size - best["bucket_mb"])),
    }


# long: one table, read top to bottom beside the page's JavaScript
def page_facts(workload: Workload, cluster: Cluster, result: dict[str, Any]) -> dict[str, Any]:
    """Everything that the model in the page needs, in SI units."""
    law, best = result.get("law"), result.get("best", {})
    most = max(4096, result["gpus"]) if cluster.devices >= 4096 else cluster.devices
    counts = sorted({2**power for power in range(21) if 2**power <= most} | {result["gpus"]})
    layers = [
        {
            "flops": layer.flops,
            "values": layer.parameters,
            "launches": layer.launches,
            "forward": layer.forward_s,
            "backward": layer.backward_s,
            "bytes": {codec: encoded_bytes(codec, layer.shapes) for codec in PAGE_CODECS},
        }
        for layer in workload.layers
    ]
    device, rule = cluster.device, OPTIMIZERS[workload.optimizer]
    return {
        "counts": counts,
        "batches": sorted({2**power for power in range(10)} | {best.get("local_batch", 1)}),
        "collectives": [
            name for name in COLLECTIVES if name != "switch" or cluster.in_network or best.get("collective") == name
        ],
        "model": {
            "layers": layers,
            "unit": "sequences" if workload.tokens else "images",
            "parameters": workload.parameters,
            "outputs": workload.outputs,
            "samples": workload.samples,
            "measuredBatch": workload.measured_batch,
            "optimizer": workload.optimizer_s,
            "update": rule.traffic,
            "held": 8 + rule.state_bytes,
            "law": law
            and {
                "base": law["base_epochs"],
                "slope": law["epochs_per_sample_of_batch"],
                "target": result["target"],
                "largest": law["largest_batch"],
                "furthest": law["furthest_batch"],
            },
        },
        "cluster": {
            "perNode": cluster.devices_per_node,
            "adapters": cluster.adapters_per_node,
            "rack": cluster.nodes_per_rack,
            "oversubscription": cluster.oversubscription,
            "jitter": cluster.jitter,
            "loader": 0 if math.isinf(cluster.loader_samples_s) else cluster.loader_samples_s,
            "inside": _link(cluster.inside),
            "between": _link(cluster.between),
            "collectives": {
                name: {"latency": speed.latency_s, "start": speed.start_s, "copy": 1 / speed.copy_byte_s}
                for name, speed in cluster.collectives.items()
            },
            "device": {
                "flops": workload.rate(device),
                "launch": device.launch_s,
                "memory": device.memory_byte,
                "memoryRate": device.memory_byte_s,
            },
            "codecs": {
                name: {
                    "encode": speed.encode_byte_s,
                    "decode": speed.decode_byte_s,
                    "encodeCall": speed.encode_call_s,
                    "decodeCall": speed.decode_call_s,
                }
                for name, speed in cluster.codecs.items()
            },
            "traffic": {
                name: {
                    "encode": CODECS[name].encode_traffic,
                    "decode": CODECS[name].decode_traffic,
                    "summable": CODECS[name].summable,
                }
                for name in PAGE_CODECS
            },
        },
    }


def _link(link: Link) -> dict[str, float]:
    return {
        "bandwidth": link.bandwidth_byte_s,
        "latency": link.latency_s,
        "gap": link.gap_s,
        "efficiency": link.efficiency,
        "start": link.start_s,
        "copy": 1 / link.copy_byte_s,  # 0 where copies are free
    }
