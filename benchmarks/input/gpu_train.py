"""`bigstep WORDS`, after which the file that is named first says what the threads did that let a GPU decode.

python benchmarks/input/gpu_train.py PROFILE.json train fujitsu --data FOLDER ...

PINNED_FILES=1 reads files into pinned memory, SWITCH_S sets how soon Python's lock is handed on, and with REHEARSED=1
Pillow stands in for a GPU.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from run import pinned_room
from torch import Tensor

from bigstep.__main__ import program
from bigstep.data import device_decoding
from bigstep.data.decoders import nvjpeg
from bigstep.data.device_decoding import DeviceDecoding
from bigstep.gpu.queues import VARIABLE


def by_pillow(contents: Sequence[Tensor], device: torch.device, again: Any) -> list[Tensor]:
    """Stand in for the GPU's decoders where there is none."""
    opened = [Image.open(io.BytesIO(content.numpy().tobytes())) for content in contents]
    return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in opened]


def main() -> None:
    path = Path(sys.argv.pop(1))
    ways: list[DeviceDecoding] = []
    begin = DeviceDecoding.__init__

    def remember(self: DeviceDecoding, *how: Any, **options: Any) -> None:
        begin(self, *how, **options)
        ways.append(self)

    def tell() -> None:
        used = resource.getrusage(resource.RUSAGE_SELF)
        told: dict[str, Any] = {"cores in use": (used.ru_utime + used.ru_stime) / (time.perf_counter() - began)}
        told["queues"] = os.environ.get(VARIABLE)  # as the run has set it
        for way in ways:
            spent = dict(way.waits.thread)
            if images := spent.pop("images", 0):
                name = "training" if way._view.train else "evaluation"
                told[name] = {part: round(1e6 * seconds / images, 1) for part, seconds in spent.items()}
                told[name].update(images=images, readers=way.loaders, share=round(way.share, 3))
                told[name]["reading, each thread"] = round(1e6 * way.waits.read_s / images, 1)
        path.write_text(json.dumps(told))

    began = time.perf_counter()
    atexit.register(tell)
    DeviceDecoding.__init__ = remember  # type: ignore[method-assign]
    if os.environ.get("PINNED_FILES"):
        device_decoding._new_room = pinned_room
    if seconds := os.environ.get("SWITCH_S"):  # after which a thread hands on Python's lock; 0.005 if nothing is said
        sys.setswitchinterval(float(seconds))
    if os.environ.get("REHEARSED"):  # to ask torch for a GPU would start CUDA
        nvjpeg.why_not_nvjpeg = lambda device: None
        nvjpeg.decode_on_device = by_pillow
    program()


if __name__ == "__main__":
    main()
