"""The events of a trace as charges: microseconds, each attributed to an operation.

On a CPU an operation is charged with its own time on the thread of the loop. On a GPU it is charged with the time of
the kernels that it launched. A CUDA graph launches kernels without operations; those are known by their names alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bigstep.engine.profile.costs import Cost, cost_of, takes_its_children
from bigstep.engine.profile.groups import CONVOLUTION, GAPS, STEP, group_of_kernel, group_of_operation

__all__ = ["NO_CALL", "Charge", "Window", "device_charges", "host_charges", "window_of"]

Event = Mapping[str, Any]
"""One entry of "traceEvents" in a Chrome trace: name, cat, ph, ts and dur in microseconds, tid, args."""

NO_CALL = -(10**12)
"""The `call` of time that belongs to no operation, such as a gap."""

_HOST = {"cpu_op", "user_annotation"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(frozen=True)
class Window:
    """The profiled steps, in microseconds of the trace."""

    begin: float
    end: float
    steps: int
    thread: Any

    def holds(self, event: Event) -> bool:
        """Whether an event begins inside."""
        return event.get("ph") == "X" and self.begin <= event["ts"] <= self.end


@dataclass(frozen=True)
class Charge:
    """Time of one owner; of several charges with one `call`, only the first carries the cost."""

    group: str
    name: str
    us: float
    call: int
    cost: Cost | None
    kernel: str = ""


@dataclass
class _Node:
    event: Event
    outer: _Node | None
    inside_us: float = 0.0
    number: int = field(default=0)

    @property
    def name(self) -> str:
        return str(self.event["name"])

    @property
    def arguments(self) -> Mapping[str, Any]:
        arguments: Mapping[str, Any] = self.event.get("args", {})
        return arguments

    def outward(self) -> Iterator[_Node]:
        node = self.outer
        while node is not None:
            yield node
            node = node.outer

    def owner(self) -> _Node:
        """Return the outermost operation whose cost covers this one; else this one."""
        found = self
        for node in (self, *self.outward()):
            if takes_its_children(node.name):
                found = node
        return found


def window_of(events: Iterable[Event]) -> Window:
    """Find the profiled steps: from the beginning of the first marked range to the end of the last."""
    steps = [event for event in events if event.get("ph") == "X" and event.get("cat") == "user_annotation"]
    steps = [event for event in steps if event["name"] == STEP]
    assert steps, "the profiled loop marks every step"
    return Window(
        min(event["ts"] for event in steps),
        max(event["ts"] + event["dur"] for event in steps),
        len(steps),
        steps[0]["tid"],
    )


def _nodes(events: Iterable[Event], window: Window) -> list[_Node]:
    """Return operations and ranges, each with the one that it lies in on its thread."""
    threads: dict[Any, list[Event]] = {}
    for event in events:
        if window.holds(event) and event.get("cat") in _HOST:
            threads.setdefault(event["tid"], []).append(event)
    nodes: list[_Node] = []
    for thread in threads.values():
        stack: list[_Node] = []
        for event in sorted(thread, key=lambda event: (event["ts"], -event["dur"])):
            while stack and stack[-1].event["ts"] + stack[-1].event["dur"] <= event["ts"]:
                stack.pop()
            node = _Node(event, stack[-1] if stack else None, number=len(nodes))
            if node.outer is not None:
                node.outer.inside_us += event["dur"]
            stack.append(node)
            nodes.append(node)
    return nodes


def host_charges(events: Sequence[Event], window: Window) -> list[Charge]:
    """Charge what the loop's thread did, each operation with its own time; time outside operations is Python's."""
    charges: list[Charge] = []
    paid: dict[int, Cost | None] = {}
    for node in _nodes(events, window):
        if node.event["tid"] != window.thread:
            continue
        own_us = max(0.0, node.event["dur"] - node.inside_us)
        owner = node.owner()
        if owner.event["cat"] == "user_annotation":
            group = group_of_operation(owner.name, _names(owner))
            if group in ("optimizer", "exchange", "data"):
                charges.append(Charge(group, f"Python of {group}", own_us, owner.number, None))
        elif _is_engine(owner.name):
            charges.append(Charge(GAPS, "autograd engine", own_us, owner.number, None))
        else:
            charges.append(_charge(owner, own_us, "", paid))
    return charges


def device_charges(events: Sequence[Event], window: Window) -> tuple[list[Charge], float]:
    """Charge what ran on the device; return that and the microseconds for which the device was busy."""
    by_id = {node.arguments["External id"]: node for node in _nodes(events, window) if "External id" in node.arguments}
    graphs = {
        event["args"].get("correlation")
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "GraphLaunch" in event["name"]
    }
    charges: list[Charge] = []
    spans: list[tuple[float, float]] = []
    paid: dict[int, Cost | None] = {}
    on_device = [event for event in events if event.get("cat") in _DEVICE and window.holds(event)]
    for number, event in enumerate(sorted(on_device, key=lambda event: event["ts"])):
        spans.append((event["ts"], event["ts"] + event["dur"]))
        arguments, kernel = event.get("args", {}), str(event["name"])
        node = None if arguments.get("correlation") in graphs else by_id.get(arguments.get("External id"))
        owner = None if node is None else node.owner()
        if owner is not None and owner.event["cat"] == "cpu_op" and not _is_engine(owner.name):
            charges.append(_charge(owner, event["dur"], kernel, paid))
            continue
        around = [] if owner is None else [owner.name, *_names(owner)]
        by_range = group_of_operation("", around)
        group = by_range if by_range in ("optimizer", "exchange", "data") else group_of_kernel(kernel)
        charges.append(Charge(group, kernel, event["dur"], -1 - number, None, kernel))
    return charges, _covered(spans)


def _charge(owner: _Node, us: float, kernel: str, paid: dict[int, Cost | None]) -> Charge:
    group = group_of_operation(owner.name, _names(owner))
    name = owner.name.removeprefix("aten::")
    if group == CONVOLUTION:
        dims = [dim for dim in owner.arguments.get("Input Dims", ()) if len(dim) > 1]
        name += " " + " * ".join("x".join(map(str, dim)) for dim in dims[:3])
    if owner.number in paid:
        cost = None if paid[owner.number] is None else Cost(0.0)
    else:
        cost = paid[owner.number] = cost_of(owner.name, owner.arguments)
    return Charge(group, name.strip(), us, owner.number, cost, kernel)


def _names(node: _Node) -> list[str]:
    return [outer.name for outer in node.outward()]


def _is_engine(name: str) -> bool:
    """Whether a range is autograd's own, around the operations of a backward."""
    if name.startswith(("autograd::", "torch::autograd::")):
        return True
    return "::" not in name and "Backward" in name and not takes_its_children(name)


def _covered(spans: list[tuple[float, float]]) -> float:
    """Return the length of the union of spans: kernels on two streams may overlap."""
    covered, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        covered += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return covered
