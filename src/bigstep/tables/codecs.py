"""Codecs by name: how gradients are written on the wire, what that costs and loses, and which collectives carry it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from bigstep.errors import ConfigError, require
from bigstep.tables import find
from bigstep.tables.collectives import COLLECTIVES, RUNNABLE
from bigstep.validate import POSITIVE, Range, check_range

__all__ = [
    "CHUNK", "CODECS", "ONEBIT_MAX_BLOCK", "ONEBIT_MIN_BLOCK", "SETTINGS", "SETTING_RANGES", "BlockCode",
    "CodecEntry", "Cut",
    "check_pair", "collectives_for", "count_largest", "encoded_bytes", "fill_settings", "onebit_blocks",
]  # fmt: skip

Shape = Sequence[int]
Settings = Mapping[str, float]

# A block shares two reconstruction values (8 bytes). A block of 448 values or more takes at most 1/28 of float32, and
# 4096 values with their residuals stay in a core's first- and second-level cache for the second pass over them.
ONEBIT_MIN_BLOCK = 512
ONEBIT_MAX_BLOCK = 4096
# 1024 values share a scale of 4 bytes, 0.8 % of the bytes of int4; the largest of so many is 3.3 times their rms
INTEGER_BLOCK = 1024
CHUNK = 4096
"""Values among which top-k chooses, as SparseLoCo does; an index takes two bytes."""

# torch's PowerSGD sends a matrix whole unless its factors are at least this many times smaller
_POWERSGD_MIN_RATE = 2


@dataclass(frozen=True)
class Cut:
    """How the flat values of a parameter are cut into blocks: a repeated pattern, then a shorter last block."""

    pattern: tuple[int, ...]
    repeats: int
    tail: int = 0

    @property
    def lengths(self) -> list[int]:
        """The lengths of all blocks, in order."""
        return list(self.pattern) * self.repeats + ([self.tail] if self.tail else [])


@dataclass(frozen=True)
class BlockCode:
    """A code that is written block by block and cannot be summed: a head of whole float32, then a body of bytes."""

    cut: Callable[[Shape], Cut]
    """How a parameter of this shape is cut into blocks."""
    head_bytes: int
    """Bytes of the head of each block."""
    body_bytes: Callable[[int, Settings], int]
    """Bytes of the body of a block with so many values."""

    def encoded(self, shape: Shape, settings: Settings) -> int:
        """Bytes of a whole parameter."""
        cut = self.cut(shape)
        whole = sum(self.head_bytes + self.body_bytes(length, settings) for length in cut.pattern)
        last = self.head_bytes + self.body_bytes(cut.tail, settings) if cut.tail else 0
        return cut.repeats * whole + last


@dataclass(frozen=True)
class CodecEntry:
    """A way to write gradients on the wire."""

    about: str
    """One sentence."""
    home: str
    """Where its code is."""
    loses: Literal["nothing", "rounding", "carried"]
    """What a step loses: nothing, rounding errors, or what is carried to the next step."""
    digits: int = 0
    """Significant bits of a value that rounding leaves."""
    bytes_per_value: float | Callable[[Shape, Settings], int] | None = None
    """For a code that can be summed; or a function of a parameter's shape that gives its bytes; else None."""
    blocks: BlockCode | None = None
    """The blocks of a code that cannot be summed."""
    own_rounds: bool = False
    """Whether it brings its own all-reduces, which take a ring's rounds."""
    agree_from: int = 0
    """This many ranks or more first agree on powers of two, by a small all-reduce that a plan omits; 0 for never."""
    orderless: bool = False
    """Whether a sum of codes has the same bits in any order, and hence on any number of ranks."""
    settings: Settings = field(default_factory=dict)
    """Its own settings and their defaults; fields of the configuration's exchange have the same names."""
    encode_traffic: float = 0.0
    """Bytes of memory traffic that encoding a value takes."""
    decode_traffic: float = 0.0
    """Bytes of memory traffic that decoding a value takes."""
    offered: bool = False
    """Whether a plan considers it unasked: its effect on training is known, and no other costs the same."""

    @property
    def summable(self) -> bool:
        """Whether the codes of several ranks can be added on their way."""
        return self.blocks is None

    def encoded(self, shape: Shape, settings: Settings) -> int:
        """Bytes of the gradient of a parameter of this shape."""
        if self.blocks is not None:
            return self.blocks.encoded(shape, settings)
        assert self.bytes_per_value is not None
        if callable(self.bytes_per_value):
            return self.bytes_per_value(shape, settings)
        return int(self.bytes_per_value * math.prod(shape))


def encoded_bytes(codec: str, shapes: Iterable[Shape], **settings: float) -> int:
    """Bytes of the gradients of parameters with these shapes, as `codec` writes them.

    Args:
        codec: A name of `CODECS`.
        shapes: The shape of each parameter.
        **settings: Of the codec (`rank` for powersgd), where they differ from its defaults.

    Returns:
        The sum over all parameters. 1-bit: one bit per value, each block padded to whole bytes, plus two float32
        per block. powersgd: both factors of a matrix, or the tensor itself where those save less than half.

    >>> encoded_bytes("none", [(1000, 2048)]), encoded_bytes("onebit", [(1000, 2048)])
    (8192000, 264000)
    """
    entry = find(CODECS, "codec", codec)
    filled = fill_settings(settings)
    return sum(entry.encoded(shape, filled) for shape in shapes)


def fill_settings(given: Settings) -> dict[str, float]:
    """All settings of all codecs, with defaults for those that are not given.

    >>> fill_settings({"rank": 4})["rank"], fill_settings({})["rank"]
    (4, 2)
    """
    for name, value in given.items():
        find(SETTINGS, "setting of a codec", name)
        check_range(value, SETTING_RANGES[name], name)
    return {**SETTINGS, **given}


def collectives_for(codec: str) -> tuple[str, ...]:
    """Names of the collectives that can carry a codec, the usual one first.

    >>> collectives_for("onebit"), collectives_for("powersgd")
    (('gather',), ('ring',))
    """
    entry = find(CODECS, "codec", codec)
    if entry.own_rounds:
        return ("ring",)
    return tuple(name for name, collective in COLLECTIVES.items() if collective.sums == entry.summable)


def check_pair(collective: str, codec: str, *, double_buffer: bool = False, planned: bool = False) -> None:
    """Refuse a collective and a codec that do not go together; the only place that knows these rules.

    Args:
        collective: How gradients are summed.
        codec: How they are written.
        double_buffer: Whether each gradient arrives one backward late.
        planned: Whether collectives that only a plan knows are allowed too.
    """
    find(COLLECTIVES if planned else RUNNABLE, "collective", collective)
    entry, allowed = find(CODECS, "codec", codec), collectives_for(codec)
    if collective not in allowed:
        if entry.own_rounds:
            raise ConfigError(f"{codec} brings its own all-reduce: use collective={allowed[0]} (got {collective}).")
        if entry.summable:
            codes = " or ".join(name for name, other in CODECS.items() if not other.summable)
            raise ConfigError(
                f"collective={collective} carries codes that cannot be summed: use codec={codes} there, or "
                f"collective={allowed[0]} with codec={codec}."
            )
        raise ConfigError(
            f"{codec} codes cannot be summed on the wire: use collective={allowed[0]} (got {collective})."
        )
    require(
        not (double_buffer and entry.own_rounds),
        f"double_buffer does not go with codec={codec}: use another codec, or leave it out.",
    )


def onebit_blocks(shape: Shape) -> list[int]:
    """Lengths of the blocks that share two reconstruction values, in the order of the flat parameter.

    A block is a column of the paper: the weights that lead into one output. Rows shorter than 512 values share a block
    with their neighbours, rows longer than 4096 are cut evenly, and a bias or norm parameter counts as rows of one.

    >>> onebit_blocks((3, 1000)), onebit_blocks((2, 5000)), onebit_blocks((10, 100)), onebit_blocks((64,))
    ([1000, 1000, 1000], [2500, 2500, 2500, 2500], [600, 400], [64])
    """
    return _cut_rows(shape).lengths


def _cut_rows(shape: Shape) -> Cut:
    values = math.prod(shape)
    if values == 0:
        return Cut((), 0)
    row = values // shape[0] if len(shape) > 1 else 1
    if row < ONEBIT_MIN_BLOCK:
        block = row * -(-ONEBIT_MIN_BLOCK // row)
        return Cut((block,), values // block, values % block)
    parts = -(-row // ONEBIT_MAX_BLOCK)
    length = -(-row // parts)
    return Cut((length,) * (parts - 1) + (row - length * (parts - 1),), values // row)


def _cut_evenly(length: int) -> Callable[[Shape], Cut]:
    """Cut the flat values of a parameter into blocks of this length, whatever its rows are."""
    return lambda shape: Cut((length,), *divmod(math.prod(shape), length))


def count_largest(length: int, settings: Settings) -> int:
    """How many values of a chunk top-k sends: `keep` of 4,096, and of a shorter chunk its share, rounded up.

    >>> count_largest(4096, {"keep": 64}), count_largest(100, {"keep": 64})
    (64, 2)
    """
    return min(length, math.ceil(settings["keep"] * length / CHUNK))


def _powersgd_bytes(shape: Shape, settings: Settings) -> int:
    values = math.prod(shape)
    if len(shape) < 2 or values == 0:
        return 4 * values
    n, m = shape[0], values // shape[0]
    r = min(n, m, int(settings["rank"]))
    factors = (n + m) * r
    return 4 * (factors if factors * _POWERSGD_MIN_RATE < values else values)


# Memory traffic in bytes per value: half precision reads 4 and writes 2; 1-bit reads gradient and residual and writes
# residual and a bit (12.1), then unpacks and adds at the owner (8.1) and at the receiver (4.1); PowerSGD reads the
# matrix three times; top-k reads the values again to choose among them.
CODECS = {
    "none": CodecEntry(
        "float32, or whatever type the gradients have",
        home="bigstep.exchange.codecs.dense:Whole",
        loses="nothing",
        bytes_per_value=4,
        offered=True,
    ),
    "fp16": CodecEntry(
        "half precision; many ranks agree on a scale first",
        home="bigstep.exchange.codecs.dense:Half",
        loses="rounding",
        digits=11,
        bytes_per_value=2,
        agree_from=17,
        encode_traffic=6.0,
        decode_traffic=6.0,
        offered=True,
    ),
    "bf16": CodecEntry(
        "half precision with float32's range",
        home="bigstep.exchange.codecs.dense:BrainHalf",
        loses="rounding",
        digits=8,
        bytes_per_value=2,
        encode_traffic=6.0,
        decode_traffic=6.0,
    ),
    "exact": CodecEntry(
        "64-bit integers on scales that ranks agree on: the same sum in any order",
        home="bigstep.exchange.codecs.exact:Exact",
        loses="nothing",
        bytes_per_value=8,
        agree_from=1,
        orderless=True,
        encode_traffic=16.0,
        decode_traffic=12.0,
    ),
    "onebit": CodecEntry(
        "the sign of each value and two means per block",
        home="bigstep.exchange.codecs.onebit:OneBit",
        loses="carried",
        blocks=BlockCode(_cut_rows, 8, lambda length, _: -(-length // 8)),
        encode_traffic=12.125,
        decode_traffic=12.25,
        offered=True,
    ),
    "int8": CodecEntry(
        "a byte per value and a scale for each 1,024",
        home="bigstep.exchange.codecs.integers:Int8",
        loses="carried",
        blocks=BlockCode(_cut_evenly(INTEGER_BLOCK), 4, lambda length, _: length),
        encode_traffic=13.0,
        decode_traffic=14.0,
    ),
    "int4": CodecEntry(
        "half a byte per value and a scale for each 1,024",
        home="bigstep.exchange.codecs.integers:Int4",
        loses="carried",
        blocks=BlockCode(_cut_evenly(INTEGER_BLOCK), 4, lambda length, _: -(-length // 2)),
        encode_traffic=12.5,
        decode_traffic=13.0,
    ),
    "topk": CodecEntry(
        "the largest of each 4,096 values with their positions; what is carried over decays",
        home="bigstep.exchange.codecs.topk:TopK",
        loses="carried",
        blocks=BlockCode(_cut_evenly(CHUNK), 0, lambda length, settings: 4 * count_largest(length, settings)),
        settings={"keep": 64, "decay": 0.95},
        encode_traffic=24.0,
        decode_traffic=12.25,
    ),
    "powersgd": CodecEntry(
        "each matrix as the product of two thin ones, through torch's own hook",
        home="bigstep.exchange.codecs.powersgd:PowerSGD",
        loses="carried",
        bytes_per_value=_powersgd_bytes,
        own_rounds=True,
        settings={"rank": 2},
        encode_traffic=12.0,
        decode_traffic=8.0,
        offered=True,
    ),
}
SETTINGS = {name: value for entry in CODECS.values() for name, value in entry.settings.items()}
"""Every setting of a codec, with its default."""
SETTING_RANGES = {
    "rank": POSITIVE,
    "keep": Range(lambda keep: 0 < keep <= CHUNK, f"be from 1 to {CHUNK}"),
    "decay": Range(lambda decay: 0 < decay <= 1, "be above 0 and at most 1"),
}
"""What each of them may be."""
