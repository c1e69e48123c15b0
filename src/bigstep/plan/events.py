"""A small discrete-event engine: tasks that wait for one another and queue for resources."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Task", "run_tasks"]


@dataclass(frozen=True)
class Task:
    """Work of `seconds` on one resource, after other tasks (their indices in the list)."""

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()


def run_tasks(tasks: Sequence[Task]) -> list[tuple[float, float]]:
    """Start and end of each task; a resource serves one task at a time, first come, first served.

    Ties go to the task that is first in the list.

    >>> tasks = [Task("a", "device", 2), Task("b", "link", 3, (0,)), Task("c", "device", 1), Task("d", "link", 1, (2,))]
    >>> run_tasks(tasks)
    [(0.0, 2.0), (2.0, 5.0), (2.0, 3.0), (5.0, 6.0)]
    """
    missing = [len(task.after) for task in tasks]
    followers: list[list[int]] = [[] for _ in tasks]
    for index, task in enumerate(tasks):
        for before in task.after:
            followers[before].append(index)
    queues: dict[str, list[tuple[float, int]]] = {task.resource: [] for task in tasks}
    busy: set[str] = set()
    times = [(0.0, 0.0)] * len(tasks)
    events: list[tuple[float, int, int]] = []  # (time, 0 for an end and 1 for a task that became ready, task)
    for index, count in enumerate(missing):
        if count == 0:
            heapq.heappush(events, (0.0, 1, index))
    done = 0
    while events:
        now = events[0][0]
        touched = set()
        while events and events[0][0] == now:
            _, ready, index = heapq.heappop(events)
            resource = tasks[index].resource
            touched.add(resource)
            if ready:
                heapq.heappush(queues[resource], (now, index))
                continue
            done += 1
            busy.discard(resource)
            for follower in followers[index]:
                missing[follower] -= 1
                if missing[follower] == 0:
                    heapq.heappush(queues[tasks[follower].resource], (now, follower))
                    touched.add(tasks[follower].resource)
        for resource in touched:
            if resource not in busy and queues[resource]:
                _, index = heapq.heappop(queues[resource])
                busy.add(resource)
                times[index] = (now, now + tasks[index].seconds)
                heapq.heappush(events, (now + tasks[index].seconds, 0, index))
    assert done == len(tasks), "tasks wait for one another in a circle"
    return times
