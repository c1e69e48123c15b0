"""Who decodes: what was asked for, what a short measurement chose, and what a run that waits makes of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bigstep.data.decoders import choose as choosing
from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.choose import choose
from bigstep.data.decoders.on_device import OnDevice
from bigstep.data.decoders.share import Share
from bigstep.data.sources.folder import FolderImages, open_folder
from bigstep.data.view import Decoding
from bigstep.data.waits import Waits
from bigstep.errors import ConfigError
from test_data_decoders import by_pillow
from test_data_folder import make_folder

CPU = torch.device("cpu")


def test_what_cannot_be_had_is_refused_and_the_rest_chosen_with_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = open_folder(make_folder(tmp_path))
    found = choose("auto", source, size=16, loaders=2, device=CPU)
    assert (found.name, found.why) == (
        "pillow",
        "Images are decoded by Pillow in 2 loader processes: on a CPU the model takes longer than they do.",
    )
    for name in ("auto", "pillow", "nvjpeg", "both"):  # the feed says that a size is missing
        assert choose(name, source, size=0, loaders=2, device=torch.device("cuda")) == Decoding()
    assert choose("auto", object(), size=16, loaders=2, device=CPU) == Decoding()
    with pytest.raises(ConfigError, match=r"data\.decoder is nvjpeg, but there is no GPU: use data\.decoder=auto or"):
        choose("nvjpeg", source, size=16, loaders=2, device=CPU)
    monkeypatch.setattr(nvjpeg, "why_not_torchvision", lambda: "torchvision is not installed")
    with pytest.raises(ConfigError, match=r"data\.decoder is torchvision, but torchvision is not installed"):
        choose("torchvision", source, size=16, loaders=2, device=CPU)


def all_but(number: int, contents: Sequence[Tensor], device: torch.device, again: Callable[[int], Tensor]) -> Any:
    """Stand in for GPU decoders that refuse one file."""
    images = by_pillow(contents, device, again)
    images[number] = again(number)
    return images


def test_a_measurement_chooses_and_a_decoder_that_is_wrong_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, _ = open_folder(make_folder(tmp_path))
    monkeypatch.setattr(nvjpeg, "decode_on_device", by_pillow)
    monkeypatch.setattr(nvjpeg, "why_not_torchvision", lambda: "torchvision is not installed")
    monkeypatch.setattr(nvjpeg, "why_not_nvjpeg", lambda device: None)
    rate, part = choosing._rate_of_device(source, 16, CPU)
    assert rate > 0
    assert part == 1.0
    monkeypatch.setattr(choosing, "_rates_of_loaders", lambda *how: {"pillow": 100.0})
    for rate, part, loaders, name, words in (
        (
            50.0,
            1.0,
            2,
            "both",
            "by the GPU, 50 images/s alone, and by Pillow in 2 threads where it does not keep up;",
        ),
        (49.0, 1.0, 2, "pillow", "not by the GPU: it decodes only 49 images/s"),
        (50.0, 0.8, 2, "pillow", "not by the GPU: only 80 % of these files are for it"),
        (0.0, 0.0, 2, "pillow", "not by the GPU: the GPU decodes none of these files"),
        (50.0, 1.0, 0, "nvjpeg", "by the GPU and read by a thread: 50 images/s alone"),
        (200.0, 1.0, 2, "both", "by the GPU, 200 images/s alone, and by Pillow in 2 threads"),
        (201.0, 1.0, 2, "nvjpeg", "by the GPU and read by threads: 201 images/s alone; 2 loader processes would bring"),
    ):
        monkeypatch.setattr(choosing, "_rate_of_device", lambda *how, found=(rate, part): found)
        chosen = choosing._fastest(source, 16, loaders, CPU)
        assert (chosen.name, chosen.loaders_use) == (name, "pillow")
        assert words in chosen.why
        assert name == "pillow" or chosen.share == 1.0
        assert chosen.least == (pytest.approx(rate / (rate + 100)) if name == "both" else 0.0)
    monkeypatch.setattr(choosing, "_rate_of_device", lambda *how: (50.0, 1.0))

    def brighter(*how: Any) -> list[Tensor]:
        return [image.clamp(max=200) + 50 for image in by_pillow(*how)]

    monkeypatch.setattr(nvjpeg, "decode_on_device", brighter)
    refused = choosing._fastest(source, 16, 2, CPU)
    assert refused.name == "pillow"
    assert "not by the GPU: its pixels are off by" in refused.why
    for number in (0, 3):  # a file that was not among those that were timed is refused: Pillow decodes it
        monkeypatch.setattr(nvjpeg, "decode_on_device", functools.partial(all_but, number))
        assert choosing._fastest(source, 16, 2, CPU).name == "both"
    closed: list[OnDevice] = []
    monkeypatch.setattr(OnDevice, "close", lambda decoder: closed.append(decoder))
    monkeypatch.setattr(FolderImages, "open", lambda *_: pytest.fail("Pillow cannot read it either"))
    with pytest.raises(pytest.fail.Exception):
        choosing._difference_on_device(source, 16, CPU)
    assert len(closed) == 1


def test_the_share_follows_whoever_is_late() -> None:
    """A model of a run: all cores bring 4 chunks in a unit of time, the device 8, and the step wants `pace`."""
    for pace, low, high in ((3.0, 1.0, 1.0), (7.9, 1.0, 1.0), (10.0, 0.75, 0.85), (20.0, 0.6, 0.75)):
        share = Share(1.0)
        for _ in range(3000):
            cores_s, device_s = (1 - share.value) / 4, share.value / 8
            share.heed(256, cores_s, device_s, starving=max(cores_s, device_s) > 1 / pace)
        assert low <= share.value <= high, pace
    share = Share(0.3, least=0.25)
    for _ in range(30):
        share.heed(256, 0.0, 1.0, starving=True)  # however late the device is
    assert share.value == 0.25
    share = Share(0.3, fixed=True)
    share.heed(256, 0.0, 1.0, starving=True)
    assert share.value == 0.3


def test_a_device_that_is_busy_starves_for_nothing() -> None:
    """A host that runs ahead waits for batches that its device does not need yet."""

    class Busy:
        def query(self) -> bool:
            return False

    waits = Waits(CPU)
    assert waits.asked() is None
    assert waits.idle()
    waits.now = Busy  # type: ignore[method-assign, assignment]
    waits.asked()
    assert not waits.idle()
