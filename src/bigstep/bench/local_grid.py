"""What the local validation runs: laboratories, and the cases each of them runs."""

from __future__ import annotations

from typing import Any

__all__ = ["Network", "networks"]

Network = tuple[dict[str, Any], list[dict[str, Any]]]
"""The arguments of a `Lab`, and its cases."""

BATCHES = {"mlp": 16, "resnet9": 2}
DENSE = [("ring", "none"), ("ring", "fp16"), ("halving", "none"), ("torus", "none")]
# below 50 Mbit/s the 100 ms of queue that a shaper holds are shorter than a message: packets are lost
FLAT_RATES = ("50mbit", "100mbit", "200mbit", "400mbit")
LEVELS = [("100mbit", "20mbit"), ("200mbit", "50mbit"), ("400mbit", "100mbit")]
SERVER_RATES = ("50mbit", "100mbit", "200mbit")
CROSSING_RATES = ("1gbit", "1.5gbit", "2gbit", "3gbit", "4gbit")


def case(collective: str, codec: str, model: str = "mlp", *, steps: int = 11, counts: bool = True) -> dict[str, Any]:
    """Synchronous steps through an Exchange."""
    return {
        "kind": "sync",
        "model": model,
        "collective": collective,
        "codec": codec,
        "grid": [],
        "bucket_mb": 4.0,
        "local_batch": BATCHES[model],
        "steps": steps,
        "counts": counts,
    }


def server_case(steps: int) -> dict[str, Any]:
    """A server, and workers that push and pull without computing."""
    return {"kind": "server", "model": "mlp", "codec": "none", "steps": steps, "local_batch": 1, "counts": True}


def networks(quick: bool) -> list[Network]:
    """52 runs that count, and 10 for the crossover of 1-bit and the float32 ring; 5 if quick."""
    if quick:
        levels = [case("torus", "none", steps=3), case("hierarchical", "none", steps=3)]
        flat = [case("ring", "none", steps=3), case("gather", "onebit", "resnet9", steps=3)]
        return [
            ({"hosts": 2, "rate": "20mbit"}, flat),
            ({"hosts": 4, "rate": "100mbit", "nodes": 2, "rate_between": "20mbit"}, levels),
            ({"hosts": 3, "rate": "50mbit"}, [server_case(6)]),
        ]
    flat = [*(case(*way) for way in DENSE), case("gather", "onebit", "resnet9")]
    levels = [case("torus", "none"), case("torus", "fp16"), case("hierarchical", "none")]
    crossing = [case(*way, "resnet9", counts=False) for way in (("ring", "none"), ("gather", "onebit"))]
    found: list[Network] = [({"hosts": hosts, "rate": rate}, flat) for hosts in (2, 4) for rate in FLAT_RATES]
    for rate, between in LEVELS:
        found.append(({"hosts": 4, "rate": rate, "nodes": 2, "rate_between": between}, levels))
    found += [({"hosts": 3, "rate": rate}, [server_case(12)]) for rate in SERVER_RATES]
    found += [({"hosts": 2, "rate": rate}, crossing) for rate in CROSSING_RATES]
    return found
