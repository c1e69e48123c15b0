"""Where 1-bit stops paying off: the bandwidth at which its step and a dense one take equally long."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bigstep.lab.hosts import burst_bytes
from bigstep.plan.cluster import Cluster
from bigstep.plan.local import crossing_rate, meeting_rate, predict_run

__all__ = ["find_crossovers"]

_SAME = ("model", "bucket_mb", "local_batch", "world")
"""What a 1-bit run and a dense one must share to be compared."""


def find_crossovers(runs: Sequence[dict[str, Any]], machine: Cluster) -> list[dict[str, Any]]:
    """Compare 1-bit with each dense exchange that was measured at the same rates of one world, on one level of links.

    The measured crossover is interpolated between two of the rates, linearly in log-log; the predicted one is where the
    two predictions are equal, whatever rates were measured.

    Args:
        runs: Of one world, with the machine's constants (`bigstep.lab.machine.with_constants`).
        machine: Their machine, as the planner reads it.

    Returns:
        For each pair with at least three rates in common its curves and its crossovers in Mbit/s, measured and
        predicted; None for a crossover that does not exist. `error` is that of the prediction where both exist.
    """
    curves: dict[tuple[Any, ...], dict[float, dict[str, Any]]] = {}
    for run in runs:
        if run["kind"] == "sync" and run["ranks_per_node"] == 1:
            key = (*(run[field] for field in _SAME), run["collective"], run["codec"])
            curves.setdefault(key, {})[run["rate_mbit_s"]] = run
    found = []
    for key, dense in curves.items():
        onebit = curves.get((*key[:-2], "gather", "onebit"), {})
        rates = sorted(dense.keys() & onebit.keys())
        if dense is not onebit and len(rates) >= 3:
            found.append(_compare([dense[rate] for rate in rates], [onebit[rate] for rate in rates], machine))
    return found


def _compare(dense: list[dict[str, Any]], onebit: list[dict[str, Any]], machine: Cluster) -> dict[str, Any]:
    rates = [run["rate_mbit_s"] for run in dense]
    measured = crossing_rate(rates, [run["seconds"] for run in dense], [run["seconds"] for run in onebit])
    predicted = meeting_rate(lambda rate: _at(dense[0], rate, machine) - _at(onebit[0], rate, machine))
    return {
        **{field: dense[0][field] for field in _SAME},
        "dense": f"{dense[0]['collective']} {dense[0]['codec']}",
        "rates_mbit_s": rates,
        "dense_ms": [1e3 * run["seconds"] for run in dense],
        "onebit_ms": [1e3 * run["seconds"] for run in onebit],
        "measured_mbit_s": measured,
        "predicted_mbit_s": predicted,
        "error": predicted / measured - 1 if measured and predicted else None,
    }


def _at(run: dict[str, Any], rate_mbit_s: float, machine: Cluster) -> float:
    """The prediction for the same run on links of another rate."""
    rate = {"rate_mbit_s": rate_mbit_s, "burst_byte": burst_bytes(f"{rate_mbit_s:.6f}mbit")}
    return predict_run(run | rate, machine)
