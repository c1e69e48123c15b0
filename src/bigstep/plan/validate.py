"""Compare the planner with published rows: prediction, error, and which rows count."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bigstep.plan.cluster import Cluster, cluster_names
from bigstep.plan.rows import ROWS, Assumed, Row

__all__ = ["Checked", "check_rows", "list_constants", "summarise"]


@dataclass(frozen=True)
class Checked:
    """A published row beside its prediction."""

    system: str
    quantity: str
    unit: str
    published: float
    predicted: float
    error: float
    """(predicted - published) / published."""
    role: str
    source: str
    note: str


def check_rows(assumed: Assumed | None = None) -> list[Checked]:
    """Predict every row, with the usual assumptions or with others, to see how much they matter."""
    return [_check(row, assumed or Assumed()) for row in ROWS]


def _check(row: Row, assumed: Assumed) -> Checked:
    predicted = row.predicted(assumed)
    error = (predicted - row.published) / row.published
    return Checked(row.system, row.quantity, row.unit, row.published, predicted, error, row.role, row.source, row.note)


def summarise(rows: list[Checked]) -> dict[str, Any]:
    """Mean and worst absolute error over the rows that count.

    >>> rows = check_rows()
    >>> summary = summarise(rows)
    >>> summary["mean_error"] < 0.1 and summary["worst_error"] < 0.2
    True
    """
    counted = [row for row in rows if row.role == "predicted"]
    errors = [abs(row.error) for row in counted]
    systems: dict[str, list[float]] = {}
    for row in counted:
        systems.setdefault(row.system, []).append(abs(row.error))
    return {
        "rows": len(rows),
        "predicted": len(counted),
        "sets_a_constant": sum(row.role == "sets a constant" for row in rows),
        "contradicted": sum(row.role == "contradicted" for row in rows),
        "mean_error": sum(errors) / len(errors),
        "worst_error": max(errors),
        "mean_error_by_system": {name: sum(values) / len(values) for name, values in systems.items()},
    }


def list_constants() -> list[dict[str, str]]:
    """Every figure of the built-in clusters, with its source."""
    return [
        {"cluster": name, "field": field, "source": source}
        for name in cluster_names()
        for field, source in Cluster.load(name).sources.items()
    ]


def as_dict(rows: list[Checked]) -> dict[str, Any]:
    """The whole validation, ready for JSON."""
    return {"rows": [asdict(row) for row in rows], "summary": summarise(rows), "constants": list_constants()}
