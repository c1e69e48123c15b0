"""SGD on sparse examples by threads that share one weight vector, under each of the disciplines compared.

All of them run the same arithmetic in the same order of operations and without fast-math, so that one thread, or any
number of threads under the lock, gives bit for bit the serial result.

The weights are stored as `weights = true weights / scale(t)`, where `scale(t) = (1 + rate * alpha)^-t` depends only on
the position t of the example in the epoch's order. L2 decay of all coordinates thus costs nothing per coordinate and
needs no shared state: each thread knows t. The caller folds the scale back into the weights when it becomes small.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bigstep.sparse.kernels.atomics import (
    acquire,
    add_float,
    compiled,
    fetch_add,
    inlined,
    load_float,
    prefetch,
    release,
    store_int,
    try_acquire,
    wait_for,
)
from bigstep.sparse.kernels.sparse_rows import PAD

__all__ = ["AIG", "ATOMIC", "CACHED", "CHUNK", "CONTROL_SIZE", "HINGE", "LOCK", "LOCKED", "LOGISTIC", "PLAIN"]
__all__ += ["ROUND", "ROUND_ROBIN", "TICKET", "TURN", "WATCH_EVERY", "linear_worker"]

HINGE, LOGISTIC = 0, 1

# What a thread does to write: add; add by compare-exchange; add to its copy of the frequent weights; take the locks of
# all coordinates that it writes; take one lock for all; wait for its turn. Those below LOCKED claim examples in chunks.
PLAIN, ATOMIC, CACHED, AIG, LOCKED, ROUND_ROBIN = range(6)

# places in the control block, 128 bytes apart so that no two share a cache line or its prefetched neighbour
LOCK, TICKET, TURN, MERGE, CONTROL_SIZE = 0, 16, 32, 48, 64
CHUNK = 2048  # examples that a free-running thread claims at once: 100 to 500 us between two merges, which take a few
TOP, ROUND = 1024, 16  # of its copy it then merges the first TOP weights and one part in ROUND of the others,
TOP_COLUMNS = 256  # but at least this many columns: with many outputs, TOP weights would be few of them
WATCH_EVERY = 64  # every 64th position is watched for conflicts
LARGE = 1e250  # logarithms are taken above this; with one more factor, at most 2, it is still a float64
AHEAD = 4  # examples between prefetch and use: about 400 ns, a few times the latency of memory


@inlined
def _add_products(indices: Any, values: Any, start: Any, stop: Any, weights: Any, sums: Any) -> Any:
    """Continue four sums, PAD of them: the additions to a single one would wait for each other."""
    a, b, c, d = sums
    for j in range(start, stop, np.uint64(PAD)):
        a += values[j] * weights[indices[j]]
        b += values[j + np.uint64(1)] * weights[indices[j + np.uint64(1)]]
        c += values[j + np.uint64(2)] * weights[indices[j + np.uint64(2)]]
        d += values[j + np.uint64(3)] * weights[indices[j + np.uint64(3)]]
    return a, b, c, d


@inlined
def _dot(indices: Any, values: Any, start: Any, middle: Any, stop: Any, local: Any, weights: Any) -> Any:
    """Multiply the part before `middle` with `local`, the rest with `weights`; where the cut is changes no bit."""
    nothing = np.float32(0)
    sums = _add_products(indices, values, start, middle, local, (nothing, nothing, nothing, nothing))
    a, b, c, d = _add_products(indices, values, middle, stop, weights, sums)
    return (a + b) + (c + d)


@inlined
def _add_dots(indices: Any, values: Any, start: Any, stop: Any, weights: Any, sums: Any) -> None:
    outputs = np.uint64(len(sums))
    for j in range(start, stop):
        x = values[j]
        base = np.uint64(indices[j]) * outputs
        for k in range(outputs):
            sums[k] += x * weights[base + k]


@inlined
def _add_row(indices: Any, values: Any, start: Any, stop: Any, weights: Any, step: Any) -> None:
    for j in range(start, stop, np.uint64(PAD)):
        weights[indices[j]] += step * values[j]
        weights[indices[j + np.uint64(1)]] += step * values[j + np.uint64(1)]
        weights[indices[j + np.uint64(2)]] += step * values[j + np.uint64(2)]
        weights[indices[j + np.uint64(3)]] += step * values[j + np.uint64(3)]


@inlined
def _add_rows(
    indices: Any, values: Any, start: Any, stop: Any, weights: Any, outputs: int, steps: Any, active: Any, count: int
) -> None:
    """Add a row for several outputs, but only those with a step: another thread may be writing the others."""
    for j in range(start, stop):
        base = np.uint64(indices[j]) * np.uint64(outputs)
        for a in range(np.uint64(count)):
            weights[base + np.uint64(active[a])] += steps[a] * values[j]


@inlined
def _add_rows_atomically(
    indices: Any, values: Any, start: Any, stop: Any, weights: Any, outputs: int, steps: Any, active: Any, count: int
) -> None:
    """Do the same by compare-exchange, so that no addition is lost."""
    for j in range(start, stop):
        if values[j] != 0:  # padding changes nothing and need not wait
            base = np.uint64(indices[j]) * np.uint64(outputs)
            for a in range(np.uint64(count)):
                add_float(weights, np.int64(base + np.uint64(active[a])), steps[a] * values[j])


@inlined
def _pull(loss: int, margin: Any, target: Any) -> Any:
    """Return minus the derivative of the loss with respect to the margin, and the loss as a + log(b)."""
    z = margin * target
    if loss == HINGE:
        short = np.float32(1) - z
        return (target, short, np.float32(1)) if short > 0 else (np.float32(0), np.float32(0), np.float32(1))
    small = np.float32(math.exp(-abs(z)))  # one exponential for both, and no overflow
    part = small if z > 0 else np.float32(1)
    return target * part / (np.float32(1) + small), max(np.float32(0), -z), np.float32(1) + small


@inlined
def _prefetch_row(indices: Any, values: Any, start: int, stop: int) -> None:
    """Prefetch a row: up to 96 columns without a branch that would be mispredicted, but no line beyond the row."""
    line = 64 // indices.itemsize
    for ahead in range(0, 96, line):
        prefetch(indices, min(start + ahead, stop - 1))
    for ahead in range(0, 96, 16):
        prefetch(values, min(start + ahead, stop - 1))
    for j in range(start + 96, stop, 16):
        prefetch(indices, j)
        prefetch(values, j)


@inlined
def _prefetch_ahead(
    order: Any, at: Any, indptr: Any, split: Any, labels: Any, indices: Any, values: Any, cached: bool
) -> None:
    """Prefetch the example AHEAD positions from here, and where the one at twice that distance begins."""
    if at + np.uint64(AHEAD) < len(order):
        soon = np.uint64(order[at + np.uint64(AHEAD)])
        _prefetch_row(indices, values, indptr[soon], indptr[soon + np.uint64(1)])
    if at + np.uint64(2 * AHEAD) < len(order):
        later = np.uint64(order[at + np.uint64(2 * AHEAD)])
        prefetch(indptr, later)
        prefetch(labels, later)
        if cached:
            prefetch(split, later)


@compiled
def _watch(indices: Any, start: Any, stop: Any, outputs: int, k: int, weights: Any, seen: Any, compare: bool) -> bool:
    """Note the weights of one output that an example touches, or compare them with those noted."""
    changed = False
    for j in range(start, stop):
        now = load_float(weights, np.int64(indices[j]) * outputs + k)
        if compare:
            changed |= now != seen[j - start]
        else:
            seen[j - start] = now
    return changed


@compiled
def _take_locks(locks: Any, indices: Any, start: Any, stop: Any) -> None:
    """Take the locks of an example's coordinates, the intercept's first.

    All rows keep their columns in the order that they had before they were renamed, so that threads cannot deadlock.
    Padding repeats the last column.
    """
    acquire(locks, 0)
    for j in range(start, stop):
        if j == start or indices[j] != indices[j - np.uint64(1)]:
            acquire(locks, np.int64(indices[j]))


@compiled
def _give_locks(locks: Any, indices: Any, start: Any, stop: Any) -> None:
    """Release the locks of an example's coordinates."""
    for j in range(start, stop):
        if j == start or indices[j] != indices[j - np.uint64(1)]:
            release(locks, np.int64(indices[j]))
    release(locks, 0)


@compiled
def _merge(weights: Any, local: Any, base: Any, begin: int, end: int) -> None:
    """Add what this thread did to its copy since the last merge; exactly, where no other thread changed anything."""
    for v in range(np.uint64(begin), np.uint64(end)):
        now = weights[v]
        new = local[v] if now == base[v] else now + (local[v] - base[v])
        weights[v] = new
        local[v] = new
        base[v] = new


# long: a kernel, compiled whole: calls of its parts would cost more than they do
@compiled
def linear_worker(
    mode: int,
    loss: int,
    thread: int,
    threads: int,
    begin: int,
    end: int,
    order: Any,
    indptr: Any,
    split: Any,
    indices: Any,
    values: Any,
    labels: Any,
    weights: Any,
    outputs: int,
    hot: int,
    longest: int,
    rate: float,
    bias_rate: float,
    outer: Any,
    inner: Any,
    control: Any,
    locks: Any,
) -> Any:
    """Take one thread's part of the positions `begin..end` of the order.

    Column 0 of the weights is the intercept; columns `1..hot-1` are the more frequent ones. If every example wrote to
    them, their cache lines would travel between the cores with every example; under CACHED a thread works on its own
    copy of them and adds its part to the shared ones: the most frequent once per chunk, the others, which are met less
    often, once in ROUND chunks. All other columns are shared, and under every other mode all columns are.

    It is one long function because a call costs more than a short row, and because Numba keeps counters in registers
    only within one function.

    Args:
        mode: PLAIN, ATOMIC, CACHED, AIG, LOCKED or ROUND_ROBIN; serial is PLAIN with one thread.
        loss: HINGE or LOGISTIC.
        thread: This thread's number; only ROUND_ROBIN uses it.
        threads: How many threads run this call.
        begin: First position.
        end: One past the last position.
        order: Example at each position.
        indptr: Row starts, int64; rows as `bigstep.sparse.kernels.sparse_rows.arrange_rows` writes them.
        split: Where in each row the columns below `hot` end, int64; read only under CACHED, by several threads.
        indices: Columns as uint16 or uint32: unsigned, so that no code for negative indices is made.
        values: Values, float32.
        labels: Output for which each example is positive, int32; all other outputs take it as negative.
        weights: Shared, float32, flat, columns x outputs.
        outputs: Number of linear functions that are learnt at once.
        hot: Number of hot columns, the intercept among them.
        longest: Most non-zeros in a row.
        rate: Step size.
        bias_rate: Step size of the intercept; 0 leaves it alone.
        outer: `scale(begin + i * CHUNK)`.
        inner: `scale(begin + i) / scale(begin)` for i < CHUNK.
        control: int64 block, 0 but for TICKET and TURN, which are `begin`.
        locks: int64, one 0 for each column; only AIG uses them.

    Returns:
        Sum of losses before each update, examples that changed the weights, watched ones among them, and of those
        how many found a shared weight changed by another thread between their read and their write.
    """
    local = weights
    base = weights
    several = threads > 1  # a single thread needs no copy and no lock, and neither would change a bit
    cached, atomic, careful = several and mode == CACHED, several and mode == ATOMIC, several and mode == AIG
    if cached:
        acquire(control, MERGE)
        local = weights[: hot * outputs].copy()
        release(control, MERGE)
        base = local.copy()
    # at least 32 merges per thread: on a small set a whole chunk is a large part of an epoch, and copies drift apart.
    # On 4,000 examples two threads are 1.2 points below serial with 16 merges, 0.5 with 32 (means of 36 fits).
    size = min(CHUNK, max(16, (end - begin) // (32 * threads))) if mode < LOCKED else 1
    sums = np.empty(outputs, np.float32)
    steps = np.empty(outputs, np.float32)
    active = np.empty(outputs, np.int64)
    seen = np.empty(longest, np.float32)
    total, product, updates, watched, conflicts = 0.0, 1.0, 0, 0, 0
    own, turn = begin + thread, 0
    while True:
        if mode == LOCKED:
            acquire(control, LOCK)
        if mode == ROUND_ROBIN:
            first = own
            own += threads
        else:
            first = fetch_add(control, TICKET, size)
        if first >= end:
            break
        for t in range(first, min(first + size, end)):
            at = np.uint64(t)
            _prefetch_ahead(order, at, indptr, split, labels, indices, values, cached)
            row = np.uint64(order[at])
            start, stop = np.uint64(indptr[row]), np.uint64(indptr[row + np.uint64(1)])
            middle = np.uint64(split[row]) if cached else start  # where the shared weights begin
            label = labels[row]
            place = t - begin
            scale = outer[place // CHUNK] * inner[place % CHUNK]
            watch = t % WATCH_EVERY == 0
            if watch:
                _watch(indices, middle, stop, outputs, label if outputs > 1 else 0, weights, seen, False)
            if outputs == 1:
                sums[0] = _dot(indices, values, start, middle, stop, local, weights)
            else:
                sums[:] = 0
                _add_dots(indices, values, start, middle, local, sums)
                _add_dots(indices, values, middle, stop, weights, sums)
            count = 0
            for k in range(outputs):
                target = np.float32(1) if label == k else np.float32(-1)
                pull, part, factor = _pull(loss, scale * sums[k] + local[k], target)
                total += part
                product *= factor
                if product > LARGE:  # a logarithm now and then, not one per example
                    total += math.log(product)
                    product = 1.0
                if pull != 0:
                    active[count] = k
                    steps[count] = pull
                    count += 1
            if mode == ROUND_ROBIN:
                wait_for(control, TURN, t)
            if count > 0:
                updates += 1
                if careful:
                    _take_locks(locks, indices, start, stop)
                if watch:
                    watched += 1
                    conflicts += _watch(
                        indices, middle, stop, outputs, label if outputs > 1 else 0, weights, seen, True
                    )
                for a in range(count):
                    if atomic:
                        add_float(weights, active[a], np.float32(bias_rate) * steps[a])
                    else:
                        local[active[a]] += np.float32(bias_rate) * steps[a]
                    steps[a] *= np.float32(rate) / scale
                if atomic:
                    _add_rows_atomically(indices, values, start, stop, weights, outputs, steps, active, count)
                elif outputs == 1:
                    _add_row(indices, values, start, middle, local, steps[0])
                    _add_row(indices, values, middle, stop, weights, steps[0])
                else:
                    _add_rows(indices, values, start, middle, local, outputs, steps, active, count)
                    _add_rows(indices, values, middle, stop, weights, outputs, steps, active, count)
                if careful:
                    _give_locks(locks, indices, start, stop)
            if mode == ROUND_ROBIN:
                store_int(control, TURN, t + 1)
        if mode == LOCKED:
            release(control, LOCK)
        elif cached and try_acquire(control, MERGE):  # while another thread merges, go on and merge later
            top = min(max(TOP, TOP_COLUMNS * outputs), len(local))
            _merge(weights, local, base, 0, top)
            rest = len(local) - top
            _merge(weights, local, base, top + rest * turn // ROUND, top + rest * (turn + 1) // ROUND)
            turn = (turn + 1) % ROUND
            release(control, MERGE)
    if mode == LOCKED:
        release(control, LOCK)
    elif cached:
        acquire(control, MERGE)
        _merge(weights, local, base, 0, len(local))
        release(control, MERGE)
    return total + math.log(product), updates, watched, conflicts
