"""Text as windows of tokens: a window is a sample, and its targets are its tokens shifted by one place.

Windows follow one another without a gap or an overlap, so each token is predicted once in an epoch. The last window is
as long as the others; its part beyond the end of the text is padding, which does not count.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bigstep.data.device_memory import DeviceMemory, Take
from bigstep.data.loaders import Chunk, Finish, Job, Loaders
from bigstep.data.sources.base import PADDING, Source, digest, spread
from bigstep.data.view import Request, View, Way
from bigstep.data.vocabulary import Bytes, Vocabulary
from bigstep.errors import DataError

__all__ = ["TokenWindows"]

_HOST_BYTES = 2**31  # a text up to this size is copied to memory; a larger one is read from disk as it is needed
_GPU_SHARE = 4  # tokens may take one part in this many of a GPU's free memory
_HASHED = 2**16  # tokens that are part of a fingerprint
_SCANNED = 2**24  # tokens that are looked at in one go


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenWindows(Source):
    """A text, cut into windows.

    Args:
        tokens: the text as uint8, uint16 or uint32 numbers, in memory or memory-mapped.
        length: tokens of a window.
        vocabulary: what the numbers mean.
        name: what to call the text in a message; a path where it came from one.
        text_bytes: bytes of the text, for a vocabulary that does not tell how long a token is.
        windows: the numbers of the windows to use; None means all.

    >>> text = TokenWindows(tokens=np.frombuffer(b"to be or not", np.uint8), length=4, name="tiny")
    >>> len(text), text.targets(torch.arange(3)).tolist(), text.inputs(0), text.num_classes
    (3, [4, 4, 3], {'length': 4}, 256)
    """

    unit = "sequences"
    classes = ()
    labels = None
    tokens: NDArray[Any]
    length: int
    vocabulary: Vocabulary = field(default_factory=Bytes)
    name: str = "text"
    text_bytes: int = 0
    windows: Tensor | None = None

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.tokens.dtype not in (np.uint8, np.uint16, np.uint32):
            kind = f"{self.tokens.dtype} of {self.tokens.shape}"
            raise DataError(f"{self.name}: tokens must be uint8, uint16 or uint32 of one dimension, not {kind}.")
        if self.length < 1:
            raise DataError(f"{self.name}: data.length is {self.length}, but a window has at least one token.")
        if len(self.tokens) < 2:
            raise DataError(f"{self.name} has {len(self.tokens)} tokens; there must be two, one to predict the other.")

    def __len__(self) -> int:
        return self._all if self.windows is None else len(self.windows)

    @property
    def _all(self) -> int:
        """Windows of the whole text: every token but the first is a target."""
        return -(-(len(self.tokens) - 1) // self.length)

    @property
    def num_classes(self) -> int:
        """Count the different tokens."""
        return self.vocabulary.size

    def inputs(self, image_size: int) -> dict[str, int]:
        """Return the length of a window."""
        return {"length": self.length}

    def subset(self, indices: Tensor) -> TokenWindows:
        """Keep the windows at `indices`, in that order."""
        return replace(self, windows=self._windows(indices))

    def feed(self, view: View) -> Way:
        """Keep the tokens on the device if they fit, else read them in loader processes."""
        on_gpu = view.device.type == "cuda"
        most = torch.cuda.mem_get_info(view.device)[0] // _GPU_SHARE if on_gpu else _HOST_BYTES
        if self.tokens.nbytes > most:
            return Loaders(view, TokenJobs(self), _as_loaded, self.name)
        return DeviceMemory(view, self._taken_on(view.device))

    def _taken_on(self, device: torch.device) -> Any:
        """Return the `prepare` of `DeviceMemory`: each window is a row of one tensor, its targets a row of another."""
        count, length = self._all, self.length
        padded = np.zeros(count * length + 1, dtype=self.tokens.dtype)
        padded[: len(self.tokens)] = self.tokens
        # torch has few functions for unsigned numbers, so the same bits are gathered as signed ones, then masked
        signed = padded if padded.itemsize == 1 else padded.view(f"i{padded.itemsize}")
        held = torch.from_numpy(signed).to(device)
        inputs, targets = held[:-1].view(count, length), held[1:].view(count, length)
        mask, last, missing = 2 ** (8 * padded.itemsize) - 1, count - 1, count * length + 1 - len(self.tokens)
        beyond = torch.arange(length, device=device) >= length - missing
        chosen = None if self.windows is None else self.windows.to(device)

        def take(indices: Tensor, epoch: int) -> tuple[Tensor, Tensor]:
            windows = indices if chosen is None else chosen.index_select(0, indices)
            x = inputs.index_select(0, windows).long().bitwise_and_(mask)
            y = targets.index_select(0, windows).long().bitwise_and_(mask)
            if missing:
                y.masked_fill_((windows == last).unsqueeze(1) & beyond, PADDING)
            return x, y

        def prepare(view: View) -> Take:
            return take

        return prepare

    def read(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return windows and their targets, read from memory or from disk."""
        start = self._windows(indices).numpy()[:, None] * self.length
        places = start + np.arange(self.length + 1)
        block = self.tokens[np.minimum(places, len(self.tokens) - 1)].astype(np.int64)
        block[places >= len(self.tokens)] = 0
        x, y = torch.from_numpy(block[:, :-1].copy()), torch.from_numpy(block[:, 1:].copy())
        y[torch.from_numpy(places[:, 1:] >= len(self.tokens))] = PADDING
        return x, y

    def targets(self, indices: Tensor) -> Tensor:
        """Count the targets of each window: its length, or what is left of the text for the last."""
        left = len(self.tokens) - 1 - self._windows(indices) * self.length
        return left.clamp(max=self.length)

    def bytes(self, indices: Tensor) -> Tensor | None:
        """Count the bytes that the targets of each window stand for, as float64; an average if only that is known."""
        lengths = self._lengths
        if lengths is None:
            share = self.text_bytes / len(self.tokens)
            return self.targets(indices).double() * share if share else None
        _, y = self.read(indices)
        return torch.where(y == PADDING, 0, lengths[y.clamp(min=0)]).sum(1).double()

    @cached_property
    def _lengths(self) -> Tensor | None:
        lengths = self.vocabulary.lengths()
        return None if lengths is None else torch.from_numpy(lengths)

    def fingerprint(self) -> str:
        """Hash some of the tokens, evenly spread over the text, and the numbers of the windows."""
        some = self.tokens[spread(len(self.tokens), _HASHED).numpy()]
        chosen = torch.tensor([]) if self.windows is None else self.windows
        return digest(len(self.tokens), self.length, self.vocabulary.name, self.vocabulary.size, some, chosen)

    def keep(self, folder: Path) -> None:
        """Write the vocabulary into the run folder if it was built from this text."""
        self.vocabulary.keep(folder)

    def check(self) -> None:
        """Refuse a text with a number that the vocabulary lacks; reads all of it."""
        for begin in range(0, len(self.tokens), _SCANNED):
            part = self.tokens[begin : begin + _SCANNED]
            if (highest := int(part.max())) >= self.vocabulary.size:
                place = begin + int(part.argmax())
                raise DataError(
                    f"{self.name} has the token {highest} at place {place:,}, but its vocabulary has the "
                    f"{self.vocabulary.size:,} tokens 0 to {self.vocabulary.size - 1}."
                )

    def describe(self, verify: bool) -> dict[str, Any]:
        """Count tokens and bytes; `verify` looks for numbers that the vocabulary lacks."""
        everything = torch.arange(len(self))
        seen = np.unique(self.tokens[spread(len(self.tokens), _SCANNED).numpy()])
        facts: dict[str, Any] = {
            "tokens": int(self.targets(everything).sum()) + 1,
            "length": self.length,
            "vocabulary": {"name": self.vocabulary.name, "size": self.vocabulary.size, "seen": len(seen)},
            "corrupt": [],
        }
        some = spread(len(self), 1024)
        if (counted := self.bytes(some)) is not None:
            facts["bytes_per_token"] = round(float(counted.sum() / self.targets(some).sum()), 3)
        if verify:
            try:
                self.check()
            except DataError as error:
                facts["corrupt"] = [{"file": self.name, "reason": str(error)}]
        return facts

    def _windows(self, indices: Tensor) -> Tensor:
        return indices if self.windows is None else self.windows[indices]


class TokenJobs:
    """Read windows of a text that does not fit in memory, many in one call."""

    def __init__(self, source: TokenWindows) -> None:
        self.source = source

    def look(self, request: Request, view: View) -> None:
        """Windows are read in one way only."""

    def __getitem__(self, job: Job) -> Chunk:
        return self.source.read(torch.tensor(job.indices))


def _as_loaded(view: View) -> Finish:
    return lambda inputs, indices, epoch: inputs
