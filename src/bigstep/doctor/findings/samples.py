"""Samples: does every sample reach exactly one rank, in a new order each pass, and validation none trained on?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from bigstep.doctor.facts import Batch, Forward, Held, Loader, Pass
from bigstep.doctor.finding import Case, Finding, Rule, Unseen
from bigstep.doctor.world import Process, World

__all__ = ["RULES", "read_content", "training_loaders"]

_TELLING = 0.5
"""Share of distinct contents above which content tells samples apart."""


def training_loaders(world: World) -> list[Loader]:
    """Return the loaders whose batches were trained on, as rank 0 described them."""
    trained = {event.loader for event in world.all(Forward) if event.training}
    return [loader for loader in world.ranks[0].all(Loader) if loader.loader in trained]


def evaluation_loaders(world: World) -> list[Loader]:
    """Return the loaders whose batches were evaluated and never trained on."""
    judged = {event.loader for event in world.all(Forward) if not event.training}
    train = {loader.loader for loader in training_loaders(world)}
    return [loader for loader in world.ranks[0].all(Loader) if loader.loader in judged - train]


def read_content(process: Process, loader: int) -> list[str]:
    """Return the content of the samples that a rank read in its first pass."""
    batches = [b for b in process.all(Batch) if b.loader == loader and b.number == 0]
    return [row for batch in batches for row in batch.rows]


def _tell_apart(rows: Sequence[str]) -> bool:
    return len(rows) > 1 and len(set(rows)) > _TELLING * len(rows)


def _overlap(first: Sequence[str], second: Sequence[str]) -> float:
    """Return the share of the list with fewer distinct entries that is in the other one too."""
    small, large = sorted((set(first), set(second)), key=len)
    return len(small & large) / len(small) if small else 0.0


def same_samples(case: Case) -> Iterator[Finding]:
    """Every rank trains on all the samples instead of its own share."""
    world = case.several
    loaders = training_loaders(world)
    if not loaders:
        yield from _same_inputs(world)
        return
    for loader in loaders:
        if not loader.iterable and loader.samples > 0:
            yield from _unsplit_set(case, loader)
        else:
            yield from _unsplit_stream(world, loader)


def _unsplit_set(case: Case, loader: Loader) -> Iterator[Finding]:
    world = case.several
    single = next((e for e in case.one.all(Loader) if e.loader == loader.loader), None) if case.one else None
    steps = [[b for b in p.all(Batch) if b.loader == loader.loader][:4] for p in world.ranks]
    together = list(zip(*steps, strict=False))
    alike = sum(len({b.indices or b.rows for b in step}) == 1 for step in together)
    as_before = single is not None and loader.drawn >= 0.9 * single.drawn > 0 and alike > 1
    if loader.drawn < loader.samples and not as_before and 1 < alike == len(together) and _content_alike(together):
        yield _same_share(world, loader, alike)
        return
    if loader.replacement or not (loader.drawn >= loader.samples or as_before) or _own_data(world, loader.loader):
        return
    if single and loader.samples <= 1.1 * single.samples / world.size:
        return  # each rank was given a part of the data set
    same = f"; the first {alike} batches are the same on all ranks" if alike else ", each rank in an order of its own"
    yield Finding(
        name="same-samples",
        title="every rank trains on the whole data set",
        evidence=f"each of {world.size} ranks reads {loader.drawn:,} of {loader.samples:,} samples in a pass "
        f"({loader.sampler or 'its own sampler'}){same}",
        cost=f"every sample is used {world.size} times per epoch: {world.size} ranks do the work of one"
        if alike
        else f"an epoch is {world.size} passes over the data, and schedules counted in epochs are {world.size} "
        f"times too long",
        remedy="give the DataLoader sampler=DistributedSampler(dataset) (and shuffle=False), and call "
        "sampler.set_epoch(epoch) before each pass; with Accelerate, pass the loader through accelerator.prepare",
        likelihood=0.97 if alike else 0.9,
        line=loader.line,
    )


def _content_alike(steps: Sequence[tuple[Batch, ...]]) -> bool:
    """Whether the batches of all ranks have the same content, as far as it was read: equal indices may be of parts."""
    read = [step for step in steps if all(batch.rows for batch in step)]
    return (
        bool(read) and all(len({batch.rows for batch in step}) == 1 for step in read) and _tell_apart(read[0][0].rows)
    )


def _same_share(world: World, loader: Loader, alike: int) -> Finding:
    endless = loader.drawn < 0  # its sampler does not say how many it gives
    left = f"{100 * (1 - loader.drawn / loader.samples):.0f} % of the data is left out of a pass"
    share = f"each of {world.size} ranks reads {loader.drawn:,} of {loader.samples:,} samples in a pass"
    return Finding(
        name="same-samples",
        title=f"every rank trains on the same {'samples' if endless else 'share of the data'}",
        evidence=f"{f'{loader.sampler} splits nothing' if endless else share}, and the first {alike} batches are the "
        f"same on all {f'{world.size} ' if endless else ''}ranks",
        cost=f"{world.size} ranks do the work of one{'' if endless else f', and {left}'}",
        remedy="give each rank its own share: DistributedSampler(dataset) takes rank and number of ranks from the "
        "process group; if you pass rank=, pass dist.get_rank()",
        likelihood=0.96,
        line=loader.line,
    )


def _own_data(world: World, loader: int) -> bool:
    """Whether the ranks hold no sample in common; judged only if a sample reads the same every time."""
    held = [{row for h in p.all(Held) if h.loader == loader for row in h.rows} for p in world.ranks]
    read = {row for batch in world.ranks[0].all(Batch) if batch.loader == loader for row in batch.rows}
    indexed = any(row.startswith("#") for row in held[0])
    return all(held) and bool(indexed or held[0] & read) and not set.intersection(*held)


def _unsplit_stream(world: World, loader: Loader) -> Iterator[Finding]:
    read = [read_content(process, loader.loader) for process in world.ranks]
    if not all(_tell_apart(rows) or loader.workers > 1 for rows in read) or not read[0]:
        return
    apart = all(rows[:4] != read[0][:4] for rows in read[1:])
    if apart and loader.workers <= 1 and any(len(set(rows)) < len(rows) for rows in read):
        return  # each rank draws with replacement, and common samples are chance
    share = min(_overlap(read[0], rows) for rows in read[1:])
    if share > 0.5 and len(set(read[0])) > 1:
        yield Finding(
            name="same-samples",
            title="every rank reads the same stream",
            evidence=f"{100 * share:.0f} % of the samples that rank 0 read were read by every other rank too "
            f"({loader.dataset} is iterable, so no sampler splits it)",
            cost=f"every sample is used {world.size} times: {world.size} ranks do the work of one",
            remedy="in __iter__ keep every WORLD_SIZE-th sample, starting at RANK (with several loader processes, "
            "count them in by get_worker_info()), or use split_dataset_by_node or accelerator.prepare",
            likelihood=0.96,
            line=loader.line,
        )


def _same_inputs(world: World) -> Iterator[Finding]:
    """Programs without a loader: compare what goes into the model."""
    inputs = [[f for f in process.all(Forward) if f.training and f.rows] for process in world.ranks]
    pairs = [pair for pair in zip(*inputs, strict=False) if _tell_apart(pair[0].rows)]
    if not pairs:
        raise Unseen("no data loader, and the model's inputs do not tell samples apart")
    alike = [pair for pair in pairs if len({f.rows for f in pair}) == 1]
    if len(alike) > len(pairs) / 2:
        yield Finding(
            name="same-samples",
            title="every rank trains on the same samples",
            evidence=f"in {len(alike)} of {len(pairs)} calls the model got the same inputs on all {world.size} ranks",
            cost=f"{world.size} ranks do the work of one",
            remedy="draw batches from a generator seeded with the rank as well (seed + rank), or give each rank its "
            "own share of the samples",
            likelihood=0.95,
            line=alike[0][0].line,
        )


def missing_samples(case: Case) -> Iterator[Finding]:
    """All ranks together leave out a part of the data in each pass: it was split twice."""
    world = case.several
    known = [loader for loader in training_loaders(world) if loader.samples > 0 and loader.drawn > 0]
    if not known:
        raise Unseen("no training loader that knows its length")
    for loader in known:
        single = next((e for e in case.one.all(Loader) if e.loader == loader.loader), None) if case.one else None
        whole = single.drawn if single else loader.samples
        slack = loader.batch * world.size  # the last batch of each rank may be dropped, or counted as full
        if loader.samples >= whole and world.size * loader.drawn + slack < 0.8 * whole:
            yield Finding(
                name="missing-samples",
                title="the data is split over the ranks twice",
                evidence=f"{world.size} ranks read {loader.drawn:,} samples each, of {loader.samples:,} in all",
                cost=f"{100 * (1 - world.size * loader.drawn / whole):.0f} % of the data is left out of every pass",
                remedy="split once: either a DistributedSampler, or accelerator.prepare, which splits by itself",
                likelihood=0.94,
                line=loader.line,
            )
            return


def overlapping_shares(case: Case) -> Iterator[Finding]:
    """Ranks shuffle differently before they take their shares, so that some samples are read twice and some never."""
    world = case.several
    train = {loader.loader for loader in training_loaders(world)}
    loaders = [[e for e in process.all(Loader) if e.loader in train and e.seed >= 0] for process in world.ranks]
    shared = _read_twice(world)
    if shared is not None:
        yield shared
        return
    if not all(loaders):
        raise Unseen("no training sampler with a seed")
    for same in zip(*loaders, strict=False):
        seeds = [loader.seed for loader in same]
        if len(set(seeds)) > 1 and same[0].shuffle and same[0].drawn < same[0].samples:
            left = (1 - 1 / world.size) ** world.size
            yield Finding(
                name="overlapping-shares",
                title="ranks take their shares from different shuffles",
                evidence=f"{same[0].sampler} is seeded with {', '.join(map(str, seeds))} on ranks 0 to "
                f"{world.size - 1}",
                cost=f"about {100 * left:.0f} % of the samples are left out of a pass, and as many reads are repeats",
                remedy="give the sampler the same seed on every rank; it takes account of rank and epoch itself",
                likelihood=0.96,
                line=same[0].line,
            )
            return


def _read_twice(world: World) -> Finding | None:
    """Find shares cut by hand that overlap: in one pass the ranks read some samples in common, but not all."""
    for loader in training_loaders(world):
        if loader.iterable or loader.replacement or loader.drawn < loader.samples or "Random" not in loader.sampler:
            continue  # here data sets are the shares; a sampler that splits is judged by its seed
        held = [{row for h in p.all(Held) if h.loader == loader.loader for row in h.rows} for p in world.ranks]
        read = [
            {(i, row) for b in p.all(Batch) if b.loader == loader.loader and b.number == 0 for i, row in _told(b)}
            for p in world.ranks
        ]
        common = set.intersection(*read) if all(read) else set()
        parts = all(held) and len({frozenset(each) for each in held}) > 1
        if parts and len(common) >= 4:
            share = len(set.intersection(*held)) / min(len(each) for each in held)
            return Finding(
                name="overlapping-shares",
                title="the shares of the ranks overlap",
                evidence=f"{len(common)} samples of the first batches were read by all {world.size} ranks, whose data "
                f"sets have {100 * share:.0f} % in common",
                cost="these samples count more than the others in every pass",
                remedy="cut shares that do not overlap, Subset(dataset, range(rank, len(dataset), world)), or use a "
                "DistributedSampler",
                likelihood=0.9,
                line=loader.line,
            )
    return None


def _told(batch: Batch) -> Iterator[tuple[int, str]]:
    """Yield index and content of each sample of a batch, where both are known."""
    return zip(batch.indices, batch.rows, strict=False)


def same_order(case: Case) -> Iterator[Finding]:
    """Every pass over the data takes the samples in the same shuffled order."""
    seen = False
    for world in case.worlds:
        for loader in training_loaders(world):
            numbers = _whole_passes(world.ranks[0], loader.loader)[:2]
            if len(numbers) < 2 or loader.iterable:
                continue
            first, second = (_indices(world.ranks[0], loader.loader, number) for number in numbers)
            length = min(len(first), len(second))
            if length < 2:
                continue
            seen = True
            chosen = loader.sampler in ("SequentialSampler", "DistributedSampler")  # not shuffled on purpose
            shuffled = loader.shuffle or (not chosen and list(first[:length]) != sorted(first[:length]))
            if first[:length] != second[:length] or not shuffled:
                continue
            passes = [p for p in world.ranks[0].all(Pass) if p.loader == loader.loader and p.number in numbers]
            epochs = {p.sampler_epoch for p in passes}
            told = f"; the sampler's epoch stayed at {min(epochs)}" if epochs != {-1} and len(epochs) == 1 else ""
            yield Finding(
                name="same-order",
                title="every epoch takes the samples in the same order",
                evidence=f"two passes begin with the same {length} samples ({', '.join(map(str, first[:4]))}, …){told}",
                cost="every epoch repeats the same batches: shuffling helps only once",
                remedy="call sampler.set_epoch(epoch) at the start of every epoch"
                if loader.sampler == "DistributedSampler"
                else "give the sampler a new order each epoch: set_epoch, or a generator that is not re-seeded",
                likelihood=0.95,
                line=passes[1].line or loader.line,
            )
            return
    if not seen:
        raise Unseen("no second pass over the training data was seen")


def _whole_passes(process: Process, loader: int) -> list[int]:
    """Return the passes over a loader, without those that only looked at its first batch."""
    counts = Counter(batch.number for batch in process.all(Batch) if batch.loader == loader)
    return [number for number in sorted(counts) if counts[number] > 1 or max(counts.values()) == 1]


def _indices(process: Process, loader: int, number: int) -> tuple[int, ...]:
    batches = [b for b in process.all(Batch) if b.loader == loader and b.number == number]
    return tuple(index for batch in batches for index in batch.indices)


def leaked_validation(case: Case) -> Iterator[Finding]:
    """Ranks split training and validation differently, so that one trains on what another validates on."""
    seen = False
    for world in case.worlds:
        train = {loader.loader for loader in training_loaders(world)}
        judge = {loader.loader for loader in evaluation_loaders(world)}
        held = {(p.rank, h.loader): set(h.rows) for p in world.ranks for h in p.all(Held)}
        for t in train:
            for v in judge:
                sets = [
                    (held.get((r, t)), held.get((s, v)), r == s) for r in range(world.size) for s in range(world.size)
                ]
                own = [len(a & b) / len(b) for a, b, same in sets if a and b and same]
                other = [len(a & b) / len(b) for a, b, same in sets if a and b and not same]
                if not own or not other:
                    continue
                seen = True
                if max(other) > 0.1 and max(other) > 2 * max(own):
                    line = next((e.line for e in world.all(Loader) if e.loader == t), "")
                    yield Finding(
                        name="leaked-validation",
                        title="ranks train on each other's validation samples",
                        evidence=f"{100 * max(other):.0f} % of the validation samples of one rank are training "
                        f"samples of another; within a rank it is {100 * max(own):.0f} %",
                        cost="the validation score is too good: it measures memorisation",
                        remedy="split with the same seed on every rank: random_split(..., "
                        "generator=torch.Generator().manual_seed(42))",
                        likelihood=0.98,
                        line=line,
                    )
                    return
    if not seen:
        raise Unseen("no validation data was seen beside training data")


def padded_evaluation(case: Case) -> Iterator[Finding]:
    """The evaluation's sampler repeats samples so that all ranks get the same number, and these count twice."""
    loaders = [loader for world in case.worlds for loader in evaluation_loaders(world)]
    if not loaders:
        raise Unseen("no evaluation was seen")
    for loader in loaders:
        if loader.padded:
            yield Finding(
                name="padded-evaluation",
                title="some evaluation samples are counted twice",
                evidence=f"{loader.sampler} repeats {loader.padded} of {loader.samples:,} samples so that "
                f"{case.ranks} ranks get the same number",
                cost=f"the metric covers {loader.samples + loader.padded:,} samples, and changes with the "
                f"number of ranks",
                remedy="cut what was gathered to len(dataset) (gather_for_metrics does), or split the evaluation "
                "without padding: Subset(dataset, range(rank, len(dataset), world))",
                likelihood=0.8,
                line=loader.line,
            )
            return


RULES: tuple[Rule, ...] = (
    same_samples,
    missing_samples,
    overlapping_shares,
    same_order,
    leaked_validation,
    padded_evaluation,
)
