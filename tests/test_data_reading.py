"""Reading ahead of a device that decodes: into memory that is used again, in threads that end with whoever takes."""

from __future__ import annotations

import itertools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bigstep.data.background import in_background, in_threads
from bigstep.data.decoders import nvjpeg
from bigstep.data.decoders.base import Mixed
from bigstep.data.feed import Feed, Request
from bigstep.data.reading import read_files
from bigstep.data.sources.coded import Look
from bigstep.data.view import Decoding
from test_data_decoders import by_pillow, with_odd_files


def test_files_are_read_into_memory_that_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, _ = with_odd_files(tmp_path)
    everything = list(range(len(source)))
    draw = Look("centre", (8, 8)).draw(everything, 0, 0)
    for size in (0, 3000, 100_000):  # none fits, some do, all do
        room = memoryview(bytearray(size))
        coded, _ = nvjpeg.read(source, everything, draw, Mixed(1.0, "pillow", pinned=False), room)
        for row, content in zip(coded.rows, coded.files, strict=True):
            assert content.numpy().tobytes() == source.content(row)
        shared = [
            torch.frombuffer(room, dtype=torch.uint8).data_ptr() <= each.data_ptr() for each in coded.files if size
        ]
        assert not size or any(shared)
    monkeypatch.setattr(nvjpeg, "decode_on_device", by_pillow)
    feed = Feed(source, train=False, image_size=8, loaders=2, decoding=Decoding("nvjpeg"))
    assert len(list(feed(Request(0, torch.tensor([n % 6])) for n in range(40)))) == 40
    assert 1 <= len(feed._way._rooms) <= 2 + 2 + 1  # type: ignore[attr-defined]  # being read, ahead, being decoded
    assert feed.loaders == 2


def test_many_files_are_read_until_one_is_not(tmp_path: Path) -> None:
    sizes = {"first": 5000, "empty": 0, "large": 70_000, "last": 3}
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(np.random.default_rng(size).bytes(size))
    (tmp_path / "folder").mkdir()
    paths = {name: os.fsencode(tmp_path / name) for name in (*sizes, "folder", "missing")}
    good = [paths[name] for name in sizes]
    room = memoryview(bytearray(75_004))
    assert [bytes(part) for part in read_files(good, room)] == [(tmp_path / name).read_bytes() for name in sizes]
    for names, room_for, count in (
        (["first", "missing", "last"], 10_000, 1),
        (["first", "folder", "last"], 10_000, 1),
        (["missing"], 10_000, 0),
        (["first", "large", "last"], 75_000, 1),  # nobody would know whether that was all
        (["first", "large", "last"], 75_001, 2),
        (["first"], 0, 0),
        ([], 10, 0),
    ):
        found = read_files([paths[name] for name in names], room[:room_for])
        assert [len(part) for part in found] == [sizes[name] for name in names[:count]]
    before = len(os.listdir("/proc/self/fd"))
    read_files([paths["missing"], *good], room)
    read_files([*good, paths["folder"]], room)
    assert len(os.listdir("/proc/self/fd")) == before  # nothing stays open


def test_threads_keep_the_order_and_end_with_whoever_takes() -> None:
    begun: list[int] = []

    def double(number: int) -> int:
        begun.append(number)
        time.sleep(0.002 * (number % 3))
        return 2 * number

    numbers = in_threads(double, itertools.count(), threads=3, ahead=5)
    assert [next(numbers) for _ in range(10)] == list(range(0, 20, 2))
    before = threading.active_count()
    numbers.close()
    assert threading.active_count() == before - 3
    assert len(begun) <= 10 + 5
    with pytest.raises(ZeroDivisionError):
        list(in_threads(lambda number: 1 // number, [1, 0], threads=1, ahead=2))


def test_work_in_the_background_stops_with_whoever_takes_it() -> None:
    made: list[int] = []
    ended: list[bool] = []

    def count() -> Any:
        try:
            for number in range(1000):
                made.append(number)
                yield number
        finally:
            ended.append(True)

    numbers = in_background(count(), depth=2)
    assert [next(numbers), next(numbers)] == [0, 1]
    numbers.close()
    assert ended == [True]
    assert len(made) <= 6  # two taken, two waiting, one or two in hand
