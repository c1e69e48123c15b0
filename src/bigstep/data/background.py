"""Work in threads, a little ahead of the consumer."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

__all__ = ["in_background", "in_threads"]

_S = TypeVar("_S")
_T = TypeVar("_T")
_LOOK_AROUND_S = 0.1


def in_background(items: Generator[_T], depth: int) -> Generator[_T]:
    """Yield `items`, which a thread iterates over at most `depth` ahead; an error in that thread is raised here.

    When the consumer stops, the thread stops too: it closes `items` before this returns.

    >>> list(in_background((n * n for n in range(4)), depth=2))
    [0, 1, 4, 9]
    """
    ready: queue.Queue[tuple[str, Any]] = queue.Queue(depth)
    stop = threading.Event()

    def put(kind: str, value: Any) -> None:
        while not stop.is_set():
            with contextlib.suppress(queue.Full):
                ready.put((kind, value), timeout=_LOOK_AROUND_S)
                return

    def work() -> None:
        try:
            with contextlib.closing(items):
                for item in items:
                    put("item", item)
                    if stop.is_set():
                        return
            put("end", None)
        except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
            put("error", error)

    thread = threading.Thread(target=work, name="bigstep-feed", daemon=True)
    thread.start()
    try:
        while True:
            kind, value = ready.get()
            if kind == "error":
                raise value
            if kind == "end":
                return
            yield value
    finally:
        stop.set()
        thread.join()


def in_threads(
    work: Callable[[_S], _T], items: Iterable[_S], *, threads: int, ahead: int, first: Callable[[], None] | None = None
) -> Generator[_T]:
    """Yield `work(item)` for each item, in order, computed in threads; at most `ahead` are begun before they are taken.

    Each thread calls `first` when it begins.

    >>> list(in_threads(lambda n: n * n, range(4), threads=2, ahead=3))
    [0, 1, 4, 9]
    """
    begun: deque[Future[_T]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="bigstep-read", initializer=first)
    try:
        for item in items:
            begun.append(pool.submit(work, item))
            if len(begun) >= ahead:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
