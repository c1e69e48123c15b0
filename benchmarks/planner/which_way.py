"""Fill the predicted tables of docs/which-way.md: efficiency by model, devices and link; where 1-bit codes pay."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tables import fill

from bigstep.plan import Cluster, Workload, cli_result
from bigstep.plan.islands import IslandPlan, fewest_steps_between
from bigstep.plan.search import Choice, rank

DOCUMENT = Path(__file__).parents[2] / "docs" / "which-way.md"
MODELS = {"resnet50": 64, "vgg16": 64, "gpt-124m": 16, "lstm": 64}
"""Samples of one device."""
LINKS = {"1 Gbit/s": (1, 1), "10 Gbit/s": (10, 1), "100 Gbit/s": (100, 1), "8 x 400 Gbit/s": (400, 8)}
"""Rate of an adapter and adapters of a node."""
KEPT = 0.85
"""What of a device's speed an exchange must keep; waiting for the slowest of 512 devices takes 9 % by itself."""


def cell(workload: Workload, cluster: Cluster, devices: int, local: int) -> str:
    """The first of a dense exchange, codes and islands that keeps `KEPT` of a device's speed."""
    choices = rank(workload, cluster, devices, batch=devices * local)

    def best(codecs: set[str]) -> Choice:
        return min((choice for choice in choices if choice.prediction.scheme.codec in codecs), key=lambda c: c.cost)

    dense, coded = best({"none", "fp16"}), best({"onebit", "powersgd"})
    for choice in (dense, coded):
        scheme, efficiency = choice.prediction.scheme, choice.prediction.efficiency
        if efficiency >= KEPT:
            return f"{scheme.collective} {scheme.codec} {100 * efficiency:.0f} %"
    nodes = devices // cluster.devices_per_node
    plan = IslandPlan(count=nodes, overlap=1)
    islands = fewest_steps_between(
        workload, cluster, devices=devices, local_batch=local, plan=plan, scheme=dense.prediction.scheme
    )
    kept = islands.inner.single_s / islands.step_s
    code = coded.prediction
    return f"islands H = {islands.plan.every} {100 * kept:.0f} %, or {code.scheme.codec} {100 * code.efficiency:.0f} %"


def predicted_table() -> str:
    lines = [f"| model | devices | {' | '.join(LINKS)} |", "|---|---|" + "---|" * len(LINKS)]
    for name, local in MODELS.items():
        workload = Workload.load(name)
        for devices in (16, 64, 512):
            cells = []
            for rate, adapters in LINKS.values():
                cluster = replace(Cluster.load("dgx_h200"), adapters_per_node=adapters, in_network=False)
                cells.append(cell(workload, cluster.with_bandwidth(rate * 1e9 / 8), devices, local))
            lines.append(f"| {name}, {local} a device | {devices} | {' | '.join(cells)} |")
    return "\n".join(lines)


CLUSTERS = ("big_basin", "mn1", "tencent_p40", "abci", "dgx_a100", "dgx_h100", "dgx_h200")
CODED = {"vgg16": (32, 128), "resnet50": (32, 128)}
"""Samples of one device."""


def crossing_table() -> str:
    """The rate of an adapter below which 1-bit codes make a step of 64 devices shorter than any dense exchange."""
    settings = [(model, local) for model, locals_ in CODED.items() for local in locals_]
    heads = " | ".join(f"{model}, {local} a device" for model, local in settings)
    lines = [f"| 64 devices of | its adapters | {heads} |", "|---|---|" + "---|" * len(settings)]
    for name in CLUSTERS:
        found = [cli_result(model=m, cluster=name, gpus=64, batch=64 * local)["crossover"] for m, local in settings]
        cells = [f"{each['gbit_s']:.1f}" for each in found]
        lines.append(f"| {name} | {found[0]['here_gbit_s']:g} Gbit/s | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    tables = {"predicted": predicted_table(), "crossing": crossing_table()}
    DOCUMENT.write_text(fill(DOCUMENT.read_text(encoding="utf-8"), tables), encoding="utf-8")


if __name__ == "__main__":
    main()
