"""Loader processes: do they share the work, and draw random numbers of their own?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator

from bigstep.doctor.facts import Loader, Worker
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.findings.samples import read_content

__all__ = ["RULES"]


def repeated_by_workers(case: Case) -> Iterator[Finding]:
    """An iterable data set is not split over the loader's processes, so each of them reads everything."""
    worlds = [world for world in (case.one, case.many) if world is not None and world.ranks]
    streams = [(w, e) for w in worlds for e in w.ranks[0].all(Loader) if e.iterable and e.workers > 1]
    if not streams:
        raise Unseen("no iterable data set with several loader processes")
    for world, loader in streams:
        rows = read_content(world.ranks[0], loader.loader)
        copies = Counter(rows)
        twice = sum(count > 1 for count in copies.values())
        if rows and twice > 0.3 * len(copies):
            yield Finding(
                name="repeated-by-workers",
                title="every loader process reads the whole stream",
                evidence=f"{twice} of {len(copies)} samples came more than once in one pass, with num_workers="
                f"{loader.workers} and an iterable data set",
                cost=f"an epoch holds every sample {loader.workers} times, in neighbouring batches",
                remedy="in __iter__ call torch.utils.data.get_worker_info() and keep every num_workers-th sample, "
                "starting at id",
                likelihood=0.95,
                line=loader.line,
            )
            return


def alike_workers(case: Case) -> Iterator[Finding]:
    """Loader processes draw the same random numbers."""
    worlds = [world for world in (case.one, *case.worlds) if world is not None]
    events = [(w, e) for w in worlds for p in w.everything for e in p.all(Worker) if e.worker >= 0]
    if not events:
        raise Unseen("no random number was drawn in a loader process")
    for world in worlds:
        groups: dict[tuple[int, int, str, str], set[int]] = defaultdict(set)
        for process in world.everything:
            for event in process.all(Worker):
                if event.worker >= 0:
                    groups[process.rank, event.loader, event.generator, event.state].add(event.worker)
        for (rank, number, generator, _), workers in groups.items():
            if len(workers) > 1:
                line = next((e.line for e in world.all(Loader) if e.loader == number), "")
                yield Finding(
                    name="alike-workers",
                    title="loader processes draw the same random numbers",
                    evidence=f"on rank {rank}, loader processes {', '.join(map(str, sorted(workers)))} began to "
                    f"draw from {generator} in the same state",
                    cost=f"{len(workers)} batches in a row get the same augmentations",
                    remedy="seed it from torch.initial_seed() in worker_init_fn, or make the generator inside the "
                    "worker instead of in the data set's __init__",
                    likelihood=0.93,
                    line=line,
                )
                return


RULES: tuple[Rule, ...] = (repeated_by_workers, alike_workers)
