"""Which decoder a run uses: the one that was asked for, or the one that a short measurement shows to be fastest."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.base import Coded, Mixed
from bigstep.data.decoders.on_device import OnDevice, said_of
from bigstep.data.sources.base import spread
from bigstep.data.sources.coded import CodedImages, Look
from bigstep.data.view import Decoding
from bigstep.errors import ConfigError
from bigstep.tables import load
from bigstep.tables.decoders import DECODERS

__all__ = ["choose"]

_LOOKED_AT = 24  # images that each decoder is timed on
_DECODED_AT_ONCE = 192  # images that the GPU is timed on, in one call, as in a run
_ROUNDS = 3
_BETTER = 1.1  # a decoder must be this many times as fast as Pillow to be taken: less may be chance
_FEWER = 0.5  # the GPU must reach this fraction of the rate of all loaders to be used
_ALONE = 2.0  # if the GPU exceeds the rate of all loaders this many times, they need not help
_MOSTLY = 0.9  # fraction of files that the GPU must take: if Pillow decodes many, threads are slower than processes
_COMPARED = 12  # images that both the GPU and Pillow decode
_ALIKE = 2.0  # mean difference in grey levels from Pillow's pixels above which the GPU's decoders are not trusted


def choose(asked: str, source: Any, *, size: int, loaders: int, device: torch.device, exact: bool = False) -> Decoding:
    """Return who decodes the images of a source, with a sentence that says why.

    Args:
        asked: One of `DECODERS`.
        source: What is trained on; for one that is not made of image files there is nothing to choose.
        size: Side of the crops in pixels; 0, which the feed refuses for image files, leaves nothing to choose either.
        loaders: Loader processes of this rank.
        device: Where the batches go.
        exact: Whether the run must give the same bits, or is in float64; the GPU's crops offer neither.
    """
    if not isinstance(source, CodedImages) or not size:
        return Decoding()
    if asked != "auto":
        return _with_way(_asked_for(asked, source, size, loaders, device), device)
    if exact or device.type != "cuda":
        why = (
            "an exact run, or one in float64, needs one decoder everywhere"
            if exact
            else "on a CPU the model takes longer than they do"
        )
        return Decoding(why=f"Images are decoded by Pillow {_where(loaders)}: {why}.")
    return _with_way(_fastest(source, size, loaders, device), device)


def _with_way(decoding: Decoding, device: torch.device) -> Decoding:
    """Say also how the device decodes, if it does."""
    if not DECODERS[decoding.name].on_device:
        return decoding
    return dataclasses.replace(decoding, why=f"{decoding.why} {said_of(device)}")


def _where(loaders: int) -> str:
    return f"in {loaders} loader process{'es' * (loaders != 1)}" if loaders else "by the run itself"


def _asked_for(asked: str, source: CodedImages, size: int, loaders: int, device: torch.device) -> Decoding:
    kind = DECODERS[asked]
    reason = nvjpeg.why_not_nvjpeg(device) if kind.on_device else None
    if kind.needs and not kind.on_device:
        reason = nvjpeg.why_not_torchvision()
    if reason:
        raise ConfigError(f"data.decoder is {asked}, but {reason}: use data.decoder=auto or pillow.")
    said = f"Images are decoded by {_words(asked)} {_where(loaders)}, as data.decoder says."
    if not kind.on_device:
        return Decoding(asked, why=said)
    rate, _ = _rate_of_device(source, size, device)
    if not rate:
        raise ConfigError(
            f"data.decoder is {asked}, but the GPU decodes none of the files in {source.name}: use pillow."
        )
    if asked == "nvjpeg":
        return Decoding(
            asked, share=1.0, why="Images are decoded by the GPU and read by threads, as data.decoder says."
        )
    rates = _rates_of_loaders(source, size, loaders)
    best = max(rates, key=rates.__getitem__)
    said = f"Images are decoded by the GPU, and by {_words(best)} {_helping(loaders)}, as data.decoder says."
    return Decoding(asked, best, least=_alone_share(rate, rates[best]), why=said)


def _alone_share(device_rate: float, loaders_rate: float) -> float:
    """The device's share at which it and the cores take equally long, each at the rate that it reaches alone.

    >>> _alone_share(9000, 3000)
    0.75
    """
    return device_rate / (device_rate + loaders_rate)


def _helping(loaders: int) -> str:
    return f"in {max(loaders, 1)} thread{'s' * (loaders > 1)} where it does not keep up"


def _words(name: str) -> str:
    return {"pillow": "Pillow"}.get(name, name)


def _fastest(source: CodedImages, size: int, loaders: int, device: torch.device) -> Decoding:
    """Measure, choose, and say why."""
    rates = _rates_of_loaders(source, size, loaders)
    best = max(rates, key=rates.__getitem__)
    best = best if rates[best] > _BETTER * rates["pillow"] else "pillow"
    told = ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    told = f"{loaders or 1} loader process{'es' * (loaders > 1)} would bring {told} images/s"
    reason = nvjpeg.why_not_nvjpeg(device)
    if reason is None:
        rate, part = _rate_of_device(source, size, device)
        difference = _difference_on_device(source, size, device) if rate else 0.0
        if not rate:
            reason = "the GPU decodes none of these files"
        elif difference > _ALIKE:
            reason = f"its pixels are off by {difference:.1f} grey levels here"
        elif part < _MOSTLY:
            reason = f"only {100 * part:.0f} % of these files are for it"
        elif rate < _FEWER * rates[best]:
            reason = f"it decodes only {rate:,.0f} images/s"
        elif loaders < 2 or rate > _ALONE * rates[best]:
            why = f"Images are decoded by the GPU and read by {'threads' if loaders > 1 else 'a thread'}"
            return Decoding("nvjpeg", best, why=f"{why}: {rate:,.0f} images/s alone; {told} (data.decoder=nvjpeg).")
        else:
            why = (
                f"Images are decoded by the GPU, {rate:,.0f} images/s alone, and by {_words(best)} {_helping(loaders)}"
            )
            least = _alone_share(rate, rates[best])
            return Decoding("both", best, least=least, why=f"{why}; {told} (data.decoder=both).")
    chosen = f"Images are decoded by {_words(best)} {_where(loaders)}: {told} (data.decoder={best})"
    return Decoding(best, best, why=f"{chosen}; not by the GPU: {reason}.")


def _rates_of_loaders(source: CodedImages, size: int, loaders: int) -> dict[str, float]:
    """Images per second of the decoders that a loader process may use, for all loaders together."""
    names = ["pillow", *(["torchvision"] if nvjpeg.why_not_torchvision() is None else [])]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a loader process
    try:
        each = {name: _rate(functools.partial(_loaded, name, source, size, _LOOKED_AT)) for name in names}
        return {name: max(loaders, 1) * rate for name, rate in each.items()}
    finally:
        torch.set_num_threads(threads)


def _loaded(name: str, source: CodedImages, size: int, count: int) -> tuple[Any, int]:
    indices = spread(len(source), count).tolist()
    draw = Look("random", (size, size)).draw(indices, 0, 0)
    if name == "nvjpeg":
        how, room = Mixed(1.0, "pillow", pinned=False), memoryview(bytearray())
        return nvjpeg.read(source, indices, draw, how, room)[0], len(indices)
    return load(DECODERS[name].home)(source, indices, draw)[0], len(indices)


def _rate(decode: Callable[[], tuple[Any, int]]) -> float:
    """Images per second: the median of some rounds, after one that warms up."""
    decode()
    rates = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        count = decode()[1]
        rates.append(count / (time.perf_counter() - began))
    return statistics.median(rates)


def _rate_of_device(source: CodedImages, size: int, device: torch.device) -> tuple[float, float]:
    """Images per second that the device decodes, 0 if these files are not for it; and the fraction that is for it."""
    coded: Coded
    coded, count = _loaded("nvjpeg", source, size, _DECODED_AT_ONCE)
    part = len(coded.rows) / count
    if not part:
        return 0.0, part
    with contextlib.closing(OnDevice(device)) as decoder:

        def decode() -> tuple[Any, int]:
            return decoder(coded.files, coded.sizes, _refuse), len(coded.files)

        try:
            return _rate(decode), part
        except _RefusedError:
            return 0.0, part


class _RefusedError(Exception):
    pass


def _refuse(number: int) -> Any:
    raise _RefusedError


def _difference_on_device(source: CodedImages, size: int, device: torch.device) -> float:
    """Mean difference in grey levels between some images that the device decodes and those of Pillow.

    It is not 0: torchvision's nvJPEG repeats chroma that is stored at half the size, where Pillow interpolates it. A
    file that the device refuses is decoded by Pillow, as in a run.
    """
    coded: Coded = _loaded("nvjpeg", source, size, _COMPARED)[0]
    indices = spread(len(source), _COMPARED)[coded.rows].tolist()

    def by_pillow(number: int) -> Tensor:
        with source.open(indices[number]) as opened:
            return torch.from_numpy(np.array(opened.convert("RGB"))).permute(2, 0, 1)

    with contextlib.closing(OnDevice(device)) as decoder:
        images = decoder(coded.files, coded.sizes, by_pillow)
        differences = [
            (image.cpu().float() - by_pillow(number).float()).abs().mean().item() for number, image in enumerate(images)
        ]
    return statistics.fmean(differences) if differences else 0.0
