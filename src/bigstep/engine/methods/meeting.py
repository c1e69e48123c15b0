"""How the moves of islands are combined: as a sum if the codec loses nothing, else as the codes of all islands.

A lossy codec encodes each island by itself, its residual is kept for that island, and codes are decoded in the order of
islands: so a meeting gives the same result, whichever ranks host the islands.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bigstep.config import ExchangeConfig
from bigstep.data.sampler import hosted_workers
from bigstep.engine.ranks import Ranks
from bigstep.exchange.bucket import Bucket
from bigstep.exchange.codecs import BlockCodec, Blocks
from bigstep.exchange.codecs.layout import lay_out
from bigstep.exchange.collectives.phases import Collective, all_gather
from bigstep.exchange.line import Line, Steps
from bigstep.exchange.summed import Summed
from bigstep.exchange.world import World
from bigstep.tables import load
from bigstep.tables.codecs import CODECS, fill_settings
from bigstep.tables.collectives import COLLECTIVES

__all__ = ["Meeting", "Transport"]

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Meeting:
    """A mean that may still be under way.

    Args:
        steps: The steps of communication that bring it.
        mean: The tensor that will hold it.
        line: The thread that runs the steps.
        sent: Other tensors that the steps read.
    """

    def __init__(self, steps: Steps, mean: Tensor, line: Line, sent: Sequence[Tensor]):
        self._mean, self._stream = mean, line.stream
        self._error: BaseException | None = None
        self._there = threading.Event()
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(mean.device))
            for tensor in (mean, *sent):
                tensor.record_stream(self._stream)
        line.submit(steps, self._arrive)

    def _arrive(self, error: BaseException | None) -> None:
        self._error = error
        try:
            self._arrived = None if self._stream is None else self._stream.record_event()
        except Exception as broken:  # a failed device cannot record an event; wait() must raise the error
            self._error = error or broken
        self._there.set()

    def wait(self) -> Tensor:
        """Return the mean over islands, weighted as they were."""
        self._there.wait()
        if self._error is not None:
            raise self._error
        if self._arrived is not None:
            self._arrived.synchronize()  # on the host, so that the caller can time the wait
        return self._mean


class Transport:
    """Carries meetings between ranks that host different islands.

    Args:
        count: Islands in all.
        ranks: Those that meet: one for each island, or fewer that host several each.
        config: Names the collective for what can be summed.
        codec: Encodes the move of an island.
    """

    def __init__(self, count: int, ranks: Ranks, config: ExchangeConfig, codec: str):
        self._count, self._ranks, self._codec = count, ranks, codec
        # a stream of its own: with NCCL, waiting for a message blocks a stream, and steps must go on meanwhile
        apart = ranks.size > 1 and ranks.device.type == "cuda"
        self._line = Line(torch.cuda.Stream(ranks.device) if apart else None)  # type: ignore[no-untyped-call]  # torch's
        self._turn = 0
        self._kept: dict[int, dict[int, Tensor]] = {}  # island -> fragment -> residual of its codec
        self._layouts: dict[int, tuple[Blocks, int]] = {}
        self._world: World | None = None
        collective: Collective | None = None
        self._bytes_gathered = 0.0
        entry = CODECS[codec]
        self.loses = entry.loses != "nothing"
        """Whether the codec loses something or keeps it back."""
        if ranks.size > 1:
            assert ranks.group is not None
            self._world = World.join(ranks.group, purpose=f"meetings by {config.collective} in {codec}")
            self._gathers = self._world.new_group(self._world.everyone())
            name = config.collective if COLLECTIVES[config.collective].sums else "ring"
            collective = load(COLLECTIVES[name].home)(self._world)
        self._sum: Summed | None = None
        self._agrees = entry.agree_from > 0
        if not self.loses:
            written = load(entry.home)()
            self._sum = Summed(self._world, collective, written, agrees=self._agrees, parts=count)

    @property
    def bytes_sent(self) -> float:
        """Bytes this rank has put on the wire since the beginning."""
        return self._bytes_gathered + (self._sum.bytes_sent if self._sum is not None else 0.0)

    def start(
        self,
        number: int,
        shapes: Sequence[torch.Size],
        moved: Iterable[tuple[int, Tensor]],
        present: Mapping[int, bool],
    ) -> Meeting:
        """Send off the moves of this rank's islands in a fragment, each weighted by its share of the mean.

        `moved` is read one island at a time and kept no longer than needed: a rank may host many islands.
        """
        if self._sum is not None:
            flats = (flat for _, flat in moved)
            first, *others = flats if self._agrees else [functools.reduce(Tensor.add_, flats)]
            bucket = Bucket(first, (f"fragment {number}",), tuple(shapes), step=0, held=tuple(others))
            return Meeting(self._sum.start(bucket), first, self._line, others)
        messages = []
        for island, flat in moved:
            messages.append(self._write(number, shapes, island, flat, present[island]))
        mean, written = torch.zeros_like(flat), torch.stack(messages)
        return Meeting(self._gathered(number, written, mean), mean, self._line, [written])

    def _gathered(self, number: int, messages: Tensor, mean: Tensor) -> Steps:
        world = self._world
        if world is not None:
            most = -(-self._count // world.size)  # islands of the rank that hosts the most
            length = messages.shape[1]
            mine = messages.new_zeros(most, length)
            mine[: len(messages)] = messages
            whole = messages.new_empty(world.size * most * length)
            self._turn += 1
            yield all_gather(whole, mine.view(-1), world, world.everyone(), self._gathers, self._turn)
            self._bytes_gathered += (world.size - 1) * mine.numel()
            per_rank = whole.view(world.size, most, length)
            hosted = [len(hosted_workers(self._count, rank, world.size)) for rank in range(world.size)]
            messages = torch.cat([per_rank[rank, :islands] for rank, islands in enumerate(hosted)])
        self._read(number, messages.contiguous(), mean)

    def _write(self, number: int, shapes: Sequence[torch.Size], island: int, flat: Tensor, present: bool) -> Tensor:
        """Return an island's message; one that misses the meeting sends zeros and keeps its whole residual."""
        if self._codec in _HALF:
            return flat.to(_HALF[self._codec]).view(torch.uint8)
        blocks, length = self._layout(number, shapes, flat.device)
        kept = self._kept.setdefault(island, {}).setdefault(number, torch.zeros_like(flat))
        message = torch.zeros(length, dtype=torch.uint8, device=flat.device)
        if present:
            settings = fill_settings({})
            kept.mul_(settings["decay"] if "decay" in CODECS[self._codec].settings else 1.0)
            self._block_codec().encode(flat, kept, blocks, message)
        return message

    def _read(self, number: int, messages: Tensor, mean: Tensor) -> None:
        """Add up the messages of all islands, in the order of islands."""
        if self._codec in _HALF:
            for message in messages:
                mean.add_(message.view(_HALF[self._codec]).to(mean.dtype))
            return
        blocks, length = self._layouts[number]
        self._block_codec().decode(messages.view(-1), blocks, mean, copies=len(messages), stride=length)

    def _block_codec(self) -> BlockCodec:
        codec: BlockCodec = load(CODECS[self._codec].home)()
        return codec

    def _layout(self, number: int, shapes: Sequence[torch.Size], device: torch.device) -> tuple[Blocks, int]:
        if number not in self._layouts:
            code = CODECS[self._codec].blocks
            assert code is not None
            lengths = [length for shape in shapes for length in code.cut(shape).lengths]
            self._layouts[number] = lay_out(code, lengths, fill_settings({}), device)
        return self._layouts[number]

    def owed(self, number: int, *, copy: bool) -> dict[int, Tensor]:
        """Return copies of the residuals of this rank's islands in a fragment; nothing unless `copy`."""
        return {island: kept[number].clone() for island, kept in self._kept.items() if copy and number in kept}

    def take_back(self, number: int, owed: Mapping[int, Tensor]) -> None:
        """Restore the residuals from before a meeting that could not be held."""
        for island, kept in self._kept.items():
            kept.pop(number, None)
            if island in owed:
                kept[number] = owed[island]

    def close(self) -> None:
        """End the threads."""
        self._line.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the residuals of this rank's islands, by island."""
        return {str(island): {str(n): kept for n, kept in by_part.items()} for island, by_part in self._kept.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what belongs to the islands of this rank."""
        hosted = set(hosted_workers(self._count, self._ranks.rank, self._ranks.size))
        self._kept = {
            int(island): {int(n): kept.to(self._ranks.device, copy=True) for n, kept in by_part.items()}
            for island, by_part in state.items()
            if int(island) in hosted
        }
