"""A trace as a table: where each microsecond of a step goes, against the bytes to move and the FLOPs to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bigstep.engine.profile.costs import Cost
from bigstep.engine.profile.groups import EXCHANGE, GAPS, GROUPS
from bigstep.engine.profile.tree import NO_CALL, Charge, Event, device_charges, host_charges, window_of

__all__ = ["Peaks", "Row", "Table", "table_of"]


@dataclass(frozen=True)
class Peaks:
    """Measured peak rates of the device: of a copy (bytes read and written) and of a matrix product."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str
    """Type of the matrix product."""

    def bound_us(self, cost: Cost) -> float:
        """Return the least time of an operation: its bytes over the bandwidth or its FLOPs over the rate."""
        return 1e6 * max(cost.bytes / self.bytes_per_s, cost.flops / self.flops_per_s)


@dataclass
class Row:
    """One operation, kernel or group, as the mean over the profiled steps; `bytes` is None where it is not known.

    `bound_us` and `counted_us` cover only the calls whose bytes are known.
    """

    group: str
    name: str
    calls: float = 0.0
    us: float = 0.0
    flops: float = 0.0
    bytes: float | None = None
    bound_us: float = 0.0
    counted_us: float = 0.0

    @property
    def reached(self) -> float | None:
        """The share of the bound that was reached; above 1 if a cache saved memory traffic."""
        return self.bound_us / self.counted_us if self.counted_us and self.bytes else None

    def to_mapping(self, step_us: float) -> dict[str, Any]:
        """Return the row with its rates, ready for JSON."""
        known = self.bytes is not None and self.counted_us > 0
        facts = asdict(self)
        del facts["counted_us"]
        return facts | {
            "share": self.us / step_us,
            "tflops": self.flops / self.counted_us / 1e6 if known else None,
            "gb_per_s": (self.bytes or 0.0) / self.counted_us / 1e3 if known else None,
            "bound_us": self.bound_us if known else None,
            "reached": self.reached,
        }


@dataclass(frozen=True)
class Table:
    """Rows of a profile, largest first, and the same by group."""

    rows: list[Row]
    groups: list[Row]
    step_us: float
    steps: int
    device: str
    peaks: Peaks

    def to_mapping(self) -> dict[str, Any]:
        """Return all of it, ready for JSON."""
        return {
            "steps": self.steps,
            "step_us": self.step_us,
            "device": self.device,
            "peaks": asdict(self.peaks),
            "groups": [row.to_mapping(self.step_us) for row in self.groups],
            "rows": [row.to_mapping(self.step_us) for row in self.rows],
        }


def table_of(
    events: Sequence[Event],
    peaks: Peaks,
    *,
    device: str = "cpu",
    waited_us: float = 0.0,
    rehearsal: Sequence[Event] = (),
) -> Table:
    """Turn the events of a trace into a table.

    Args:
        events: those of a Chrome trace whose steps are marked.
        peaks: those of the device.
        device: cpu or cuda.
        waited_us: on a CPU, microseconds in all for which the loop waited for gradients of other ranks.
        rehearsal: events of one marked forward and backward, run without a CUDA graph: they tell which operation
            launches which kernel, and its bytes and FLOPs.
    """
    window = window_of(events)
    if device == "cpu":
        charges = host_charges(events, window)
        idle_us, idle = window.end - window.begin - sum(charge.us for charge in charges), "Python"
        if waited_us:
            waited_us = min(waited_us, idle_us)
            charges.append(Charge(EXCHANGE, "waiting for gradients", waited_us, NO_CALL, None))
            idle_us -= waited_us
    else:
        charges, busy_us = device_charges(events, window)
        if rehearsal:
            once, _ = device_charges(rehearsal, window_of(rehearsal))
            charges = list(_recognised(charges, once, window.steps))
        idle_us, idle = window.end - window.begin - busy_us, "device idle"
    charges.append(Charge(GAPS, idle, max(0.0, idle_us), NO_CALL, None))
    rows = _rows(charges, window.steps, peaks, by_group=False)
    groups = _rows(charges, window.steps, peaks, by_group=True)
    return Table(
        sorted(rows, key=lambda row: -row.us),
        sorted(groups, key=lambda row: GROUPS.index(row.group)),
        (window.end - window.begin) / window.steps,
        window.steps,
        device,
        peaks,
    )


def _rows(charges: Iterable[Charge], steps: int, peaks: Peaks, *, by_group: bool) -> list[Row]:
    rows: dict[tuple[str, str], Row] = {}
    calls: dict[tuple[str, str], set[int]] = {}
    for charge in charges:
        key = (charge.group, charge.group if by_group else charge.name)
        row = rows.setdefault(key, Row(*key))
        calls.setdefault(key, set()).add(charge.call)
        row.us += charge.us / steps
        if charge.cost is not None:
            row.flops += charge.cost.flops / steps
            row.bytes = (row.bytes or 0.0) + charge.cost.bytes / steps
            row.bound_us += peaks.bound_us(charge.cost) / steps
            row.counted_us += charge.us / steps
    for key, row in rows.items():
        row.calls = len(calls[key] - {NO_CALL}) / steps
    return list(rows.values())


def _recognised(charges: Sequence[Charge], once: Sequence[Charge], steps: int) -> Iterable[Charge]:
    """Match kernels of a graph with the operations that launched kernels of these names in a rehearsal, in order.

    A graph replays what was captured: forward and backward as in the rehearsal, then the update. So the first launches
    of a kernel in a step are those of the rehearsal, and further ones keep their name alone.
    """
    rehearsed: dict[str, list[Charge]] = {}
    for charge in once:
        rehearsed.setdefault(charge.kernel, []).append(charge)
    in_graph = [charge for charge in charges if charge.call < 0]
    launches = Counter(charge.kernel for charge in in_graph)
    seen: Counter[str] = Counter()
    for charge in charges:
        if charge.call >= 0:
            yield charge
            continue
        known, a_step = rehearsed.get(charge.kernel, []), launches[charge.kernel] // steps
        step, number = divmod(seen[charge.kernel], a_step or 1)
        seen[charge.kernel] += 1
        if launches[charge.kernel] % steps or a_step < len(known) or number >= len(known):
            yield charge
            continue
        twin = known[number]
        # calls of different steps must not count as one
        call = twin.call + step * 10**9 if twin.call >= 0 else charge.call
        yield Charge(twin.group, twin.name, charge.us, call, twin.cost, charge.kernel)
