"""What the local validation runs: laboratories, and the cases each of them runs."""

from __future__ import annotations

from typing import Any

__all__ = ["Network", "networks"]

Network = tuple[dict[str, Any], list[dict[str, Any]]]
"""The arguments of a `Lab`, and its cases."""

BATCHES = {"mlp": 16, "small": 2, "resnet9": 2}
DENSE = [("ring", "none"), ("ring", "fp16"), ("halving", "none"), ("torus", "none")]
# below 50 Mbit/s a message is longer than a shaper's queue of 100 ms, so packets are lost
FLAT_RATES = ("50mbit", "100mbit", "200mbit", "400mbit")
LEVELS = [("100mbit", "20mbit"), ("200mbit", "50mbit"), ("400mbit", "100mbit")]
# at 50 Mbit/s the queue holds less than the weights of mlp: how TCP then shares the server's link is not modelled
SERVER_RATES = {"50mbit": False, "100mbit": True, "200mbit": True, "400mbit": True}
"""By rate, whether the run counts towards the error of the predictions."""
# 1-bit and a dense exchange: the model, its buckets, the dense collective, and rates on both sides of their crossover
CROSSINGS = [
    (4, "small", 0.01, "halving", ("60mbit", "80mbit", "100mbit", "125mbit", "160mbit", "220mbit", "300mbit")),
    (2, "resnet9", 4.0, "ring", ("1gbit", "2gbit", "4gbit")),
]


def case(
    collective: str, codec: str, model: str = "mlp", *, bucket_mb: float = 4.0, steps: int = 3, counts: bool = True
) -> dict[str, Any]:
    """A case of synchronous steps through an Exchange, `steps` of them in each turn."""
    return {
        "kind": "sync",
        "model": model,
        "collective": collective,
        "codec": codec,
        "grid": [],
        "bucket_mb": bucket_mb,
        "in_flight": True,
        "local_batch": BATCHES[model],
        "steps": steps,
        "counts": counts,
    }


def server_case(steps: int, counts: bool = True) -> dict[str, Any]:
    """A case of a server, and workers that push and pull without computing."""
    return {"kind": "server", "model": "mlp", "codec": "none", "steps": steps, "local_batch": 1, "counts": counts}


def networks(quick: bool) -> list[Network]:
    """52 runs that count, and others for the crossovers of 1-bit and dense exchanges; 5 if quick."""
    if quick:
        levels = [case("torus", "none", steps=3), case("hierarchical", "none", steps=3)]
        flat = [case("ring", "none", steps=3), case("gather", "onebit", "resnet9", steps=3)]
        return [
            ({"hosts": 2, "rate": "20mbit"}, flat),
            ({"hosts": 4, "rate": "100mbit", "nodes": 2, "rate_between": "20mbit"}, levels),
            ({"hosts": 3, "rate": "100mbit"}, [server_case(6)]),
        ]
    flat = [*(case(*way) for way in DENSE), case("gather", "onebit", "resnet9")]
    levels = [case("torus", "none"), case("torus", "fp16"), case("hierarchical", "none")]
    found: list[Network] = [({"hosts": hosts, "rate": rate}, flat) for hosts in (2, 4) for rate in FLAT_RATES]
    for rate, between in LEVELS:
        found.append(({"hosts": 4, "rate": rate, "nodes": 2, "rate_between": between}, levels))
    found += [({"hosts": 3, "rate": rate}, [server_case(12, counts)]) for rate, counts in SERVER_RATES.items()]
    for hosts, model, bucket_mb, dense, rates in CROSSINGS:
        ways = ((dense, "none"), ("gather", "onebit"))
        steps = 20 if model == "small" else 3  # differences of a few percent decide where two curves cross
        pair = [case(*way, model, bucket_mb=bucket_mb, steps=steps, counts=False) for way in ways]
        found += [({"hosts": hosts, "rate": rate}, pair) for rate in rates]
    return found
