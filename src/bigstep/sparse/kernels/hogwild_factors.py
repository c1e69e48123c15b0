"""SGD for matrix completion by threads that share both factors, under each of the disciplines compared.

A row of a factor is its bias followed by its coordinates, padded to whole cache lines, so that two rows never share
one. Modes, tickets and exactness are those of `bigstep.sparse.kernels.hogwild`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from bigstep.sparse.kernels.atomics import (
    acquire,
    add_float,
    compiled,
    fetch_add,
    load_float,
    prefetch,
    release,
    store_int,
    wait_for,
)
from bigstep.sparse.kernels.hogwild import AIG, ATOMIC, CHUNK, LOCK, LOCKED, ROUND_ROBIN, TICKET, TURN, WATCH_EVERY

__all__ = ["AHEAD", "factor_worker"]

AHEAD = 8  # ratings between prefetch and use: one takes about 20 ns


# long: a kernel, compiled whole: calls of its parts would cost more than they do
@compiled
def factor_worker(
    mode: int,
    thread: int,
    threads: int,
    begin: int,
    end: int,
    order: Any,
    rows: Any,
    columns: Any,
    ratings: Any,
    left: Any,
    right: Any,
    stride: int,
    rank: int,
    rate: float,
    alpha: float,
    control: Any,
    locks: Any,
) -> Any:
    """Take one thread's part of the ratings at positions `begin..end` of the order.

    With error e = z - (b_u + c_v + L_u . R_v), each of L_u, R_v, b_u, c_v moves by rate * (e * its partner - alpha *
    itself), the partner of a bias being 1; L_u is taken as it was before the step when R_v moves.

    Args:
        mode: PLAIN, ATOMIC, AIG, LOCKED or ROUND_ROBIN; serial is PLAIN with one thread.
        thread: This thread's number; only ROUND_ROBIN uses it.
        threads: How many threads run this call.
        begin: First position.
        end: One past the last position.
        order: Rating at each position.
        rows: Row of each rating, int32.
        columns: Column of each rating, int32.
        ratings: Values, float32.
        left: Flat float32, rows x stride.
        right: Flat float32, columns x stride.
        stride: Floats from one row of a factor to the next.
        rank: Coordinates of a row beside its bias.
        rate: Step size.
        alpha: L2 coefficient.
        control: int64 block, 0 but for TICKET and TURN, which are `begin`.
        locks: int64, one 0 for each row and then for each column; only AIG uses them.

    Returns:
        Sum of squared errors before each update, updates, watched ones, and of those how many found a coordinate
        changed by another thread between their read and their write.
    """
    step, decay = np.float32(rate), np.float32(rate * alpha)
    size = CHUNK if mode < LOCKED else 1
    several = threads > 1
    atomic, careful = several and mode == ATOMIC, several and mode == AIG
    n_rows = len(left) // stride
    width = rank + 1
    seen = np.empty(2 * width, np.float32)
    total, updates, watched, conflicts = 0.0, 0, 0, 0
    own = begin + thread
    while True:
        if mode == LOCKED:
            acquire(control, LOCK)
        if mode == ROUND_ROBIN:
            first = own
            own += threads
        else:
            first = fetch_add(control, TICKET, size)
        if first >= end:
            if mode == LOCKED:
                release(control, LOCK)
            return total, updates, watched, conflicts
        for t in range(first, min(first + size, end)):
            if t + 2 * AHEAD < len(order):
                later = order[t + 2 * AHEAD]
                prefetch(rows, later)
                prefetch(columns, later)
                prefetch(ratings, later)
                later = order[t + AHEAD]
                for k in range(0, stride, 16):
                    prefetch(left, np.int64(rows[later]) * stride + k)
                    prefetch(right, np.int64(columns[later]) * stride + k)
            at = order[t]
            u = np.uint64(np.int64(rows[at]) * stride)
            v = np.uint64(np.int64(columns[at]) * stride)
            watch = t % WATCH_EVERY == 0
            if watch:
                for k in range(width):
                    seen[k] = load_float(left, u + np.uint64(k))
                    seen[width + k] = load_float(right, v + np.uint64(k))
            error = ratings[at] - (left[u] + right[v])
            for k in range(np.uint64(1), np.uint64(width)):
                error -= left[u + k] * right[v + k]
            total += error * error
            if mode == ROUND_ROBIN:
                wait_for(control, TURN, t)
            if careful:  # always rows before columns, so that threads cannot deadlock
                acquire(locks, np.int64(rows[at]))
                acquire(locks, n_rows + np.int64(columns[at]))
            if watch:
                changed = False
                for k in range(width):
                    changed |= load_float(left, u + np.uint64(k)) != seen[k]
                    changed |= load_float(right, v + np.uint64(k)) != seen[width + k]
                watched += 1
                conflicts += changed
            updates += 1
            pull = step * error
            if atomic:
                add_float(left, np.int64(u), pull - decay * left[u])
                add_float(right, np.int64(v), pull - decay * right[v])
            else:
                left[u] += pull - decay * left[u]
                right[v] += pull - decay * right[v]
            for k in range(np.uint64(1), np.uint64(width)):
                a, b = left[u + k], right[v + k]
                if atomic:
                    add_float(left, np.int64(u + k), pull * b - decay * a)
                    add_float(right, np.int64(v + k), pull * a - decay * b)
                else:
                    left[u + k] = a + (pull * b - decay * a)
                    right[v + k] = b + (pull * a - decay * b)
            if careful:
                release(locks, n_rows + np.int64(columns[at]))
                release(locks, np.int64(rows[at]))
            if mode == ROUND_ROBIN:
                store_int(control, TURN, t + 1)
        if mode == LOCKED:
            release(control, LOCK)
