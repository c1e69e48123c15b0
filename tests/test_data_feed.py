"""The feed: one batch a request, in order, the same whatever the loaders; errors arrive as one sentence."""

from __future__ import annotations

import gc
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from bigstep.data.catalog import open_data
from bigstep.data.feed import Feed, Request
from bigstep.data.pair import hold_out
from bigstep.data.rectangles import rectangle_of
from bigstep.data.sources.folder import open_folder
from bigstep.data.sources.given import as_source
from bigstep.data.sources.memory import TensorImages
from bigstep.data.sources.text import TokenWindows
from bigstep.errors import ConfigError, DataError, RunError
from test_data_folder import make_folder


def requests(epoch: int, *batches: list[int]) -> list[Request]:
    return [Request(epoch, torch.tensor(batch)) for batch in batches]


def tiny(count: int = 100) -> TensorImages:
    images = torch.randint(0, 256, (count, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(count) % 10
    return TensorImages(images=images, labels=labels, classes=tuple("0123456789"), mean=(0.5,), std=(0.5,), name="tiny")


class Squares:
    """A data set of a user's own, with a random part."""

    classes = ("even", "odd")

    def __init__(self, count: int = 200) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        by_others = np.random.random() + random.random()
        return torch.tensor([float(index) ** 2, float(torch.rand(())), by_others]).view(3, 1, 1), index % 2


class Broken(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == 3:
            raise DataError("item 3 is broken.")
        return super().__getitem__(index)


class Uneven(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(index + 1), 0


UNEVEN = r"Items 2 and 3 of Uneven do not form a batch: torch.float32 of \(3,\), int and torch.float32 of \(4,\), int"


class Suicidal(Squares):
    """Ends its loader process, as the system does when memory runs out."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")


def test_memory_yields_one_batch_a_request_in_order() -> None:
    source = tiny()
    feed = Feed(source, train=False, dtype=torch.float64)
    found = list(feed(requests(0, [5, 3], [99], [0, 1, 2])))
    assert [labels.tolist() for _, labels in found] == [[5, 3], [9], [0, 1, 2]]
    torch.testing.assert_close(found[0][0], (source.images[[5, 3]].double() / 255 - 0.5) / 0.5, rtol=0, atol=1e-15)
    assert (len(feed), feed.num_classes, feed.channels, feed.image_size) == (100, 10, 1, 8)


def test_evaluation_is_never_augmented_and_training_is() -> None:
    wanted = requests(1, list(range(50)))
    plain = next(iter(Feed(tiny(), train=False, augment="crop_flip")(wanted)))[0]
    assert torch.equal(plain, next(iter(Feed(tiny(), train=True, augment="none")(wanted)))[0])
    assert not torch.equal(plain, next(iter(Feed(tiny(), train=True, augment="crop_flip")(wanted)))[0])


def test_batches_of_an_evaluation_hold_every_sample_once() -> None:
    batches = Feed(tiny(), train=False).evaluation_batches(30)
    assert [len(batch) for batch in batches] == [30, 30, 30, 10]
    assert torch.equal(torch.cat(batches), torch.arange(100))


def test_memory_can_change_its_size_between_epochs() -> None:
    feed = Feed(tiny(), train=True, augment="resized_crop")
    assert next(iter(feed(requests(0, [1, 2]))))[0].shape == (2, 1, 8, 8)
    feed.resize(12, min_scale=0.5)
    assert next(iter(feed(requests(1, [1, 2]))))[0].shape == (2, 1, 12, 12)
    assert feed.image_size == 12


@pytest.mark.parametrize("augment", ["none", "crop_flip", "resized_crop"])
def test_a_folder_looks_the_same_with_and_without_loaders(tmp_path: Path, augment: str) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    wanted = requests(3, [4, 0, 2], [1], [5, 3])
    feeds = [Feed(train, train=True, augment=augment, seed=1, image_size=32, loaders=n) for n in (0, 2)]
    alone, helped = ([*feed(wanted)] for feed in feeds)
    feeds[1].close()
    for (x, y), (u, v) in zip(alone, helped, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert [labels.tolist() for _, labels in alone] == [[1, 0, 0], [0], [1, 1]]
    whole = next(iter(feeds[0](requests(3, [0, 1, 2, 3, 4, 5]))))[0]
    assert torch.equal(whole[[4, 0, 2]], alone[0][0])  # the batch does not matter
    assert (feeds[0].channels, feeds[0].image_size, feeds[0].num_classes) == (3, 32, 2)


def test_loaders_live_through_a_new_size_and_an_unfinished_pass(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    feed = Feed(train, train=True, augment="resized_crop", image_size=32, loaders=2)
    abandoned = feed(requests(0, *([n] for n in range(6))))
    assert next(abandoned)[0].shape == (1, 3, 32, 32)
    feed.resize(48, min_scale=0.35)
    found = list(feed(requests(1, [1, 2], [3])))
    feed.close()
    alone = Feed(train, train=True, augment="resized_crop", image_size=32)
    alone.resize(48, min_scale=0.35)
    for (x, _), (u, _) in zip(found, alone(requests(1, [1, 2], [3])), strict=True):
        assert torch.equal(x, u)


def test_a_large_request_is_one_batch(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path, per_class=3))
    indices = [n % 6 for n in range(150)]  # three chunks
    images, labels = next(iter(Feed(train, train=False, image_size=16)(requests(0, indices))))
    assert images.shape == (150, 3, 16, 16)
    assert labels.tolist() == [train.labels[n].item() for n in indices]
    assert torch.equal(images[4], images[148])


def test_rectangular_evaluation_sees_each_sample_once_at_its_shape(tmp_path: Path) -> None:
    _, test = open_folder(make_folder(tmp_path, per_class=5))
    feed = Feed(test, train=False, image_size=64, rectangular=True)
    batches = feed.evaluation_batches(3)
    assert sorted(torch.cat(batches).tolist()) == list(range(10))
    for batch, (images, labels) in zip(batches, feed(Request(0, batch) for batch in batches), strict=True):
        width, height = rectangle_of(*test.sizes[batch[0]].tolist(), 64)
        assert images.shape == (len(batch), 3, height, width)
        assert torch.equal(labels, test.labels[batch])


@pytest.mark.parametrize("loaders", [0, 1])
def test_a_damaged_file_is_the_same_sentence_from_a_loader(tmp_path: Path, loaders: int) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    path = train.path(2)
    path.write_bytes(path.read_bytes()[:-300])
    feed = Feed(train, train=False, image_size=32, loaders=loaders)
    before = set(multiprocessing.active_children())
    batches = feed(requests(0, [0, 1], [2, 3]))
    next(batches)
    assert len(set(multiprocessing.active_children()) - before) == loaders
    with pytest.raises(DataError) as caught:
        next(batches)
    feed.close()
    assert set(multiprocessing.active_children()) <= before, "loaders outlive the feed, since the error holds them"
    with pytest.raises(DataError) as direct:
        train.load_crops([2], 32)
    assert str(caught.value) == str(direct.value)
    assert str(caught.value).startswith(f"{path} cannot be decoded: image file is truncated")


def test_a_folder_needs_a_size(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    with pytest.raises(ConfigError, match=r"set data\.image_size"):
        Feed(train, train=True)


def seeded() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), np.random.random(), random.random()


def test_own_data_repeats_its_random_part_and_leaves_all_generators_alone() -> None:
    seeded()
    expected_next = drawn()
    seeded()
    wanted = requests(2, list(range(130)), [7, 3])
    feeds = [Feed(Squares(), train=True, seed=4, dtype=torch.float64, loaders=n) for n in (0, 1)]
    alone, helped = ([*feed(wanted)] for feed in feeds)
    feeds[1].close()
    assert drawn() == expected_next
    for (x, y), (u, v) in zip(alone, helped, strict=True):
        assert torch.equal(x, u)
        assert torch.equal(y, v)
    assert torch.equal(alone[0][0][[7, 3]], alone[1][0])
    assert alone[1][0][:, 0, 0, 0].tolist() == [49, 9]
    assert alone[0][0].dtype == torch.float64
    part = Feed(hold_out(as_source(Squares()), 0.1, seed=0).test, train=False)
    assert (len(part), part.num_classes) == (20, 2)
    other_epoch = next(iter(feeds[0](requests(3, [7]))))[0]
    assert not torch.equal(other_epoch[0], alone[1][0][0])
    assert (len(feeds[0]), feeds[0].num_classes, feeds[0].channels, feeds[0].image_size) == (200, 2, 3, 1)


@pytest.mark.parametrize("loaders", [0, 1])
@pytest.mark.parametrize(("kind", "sentence"), [(Broken, "item 3 is broken."), (Uneven, UNEVEN)])
def test_own_data_that_is_wrong_is_one_error(kind: type[Squares], sentence: str, loaders: int) -> None:
    feed = Feed(kind(), train=True, loaders=loaders)
    with pytest.raises(DataError, match=sentence):
        list(feed(requests(0, [2, 3])))
    feed.close()


def test_a_killed_loader_is_a_run_error() -> None:
    feed = Feed(Suicidal(), train=True, loaders=1)
    with pytest.raises(RunError, match="loader process .* was killed"):
        list(feed(requests(0, [1])))
    feed.close()


class Collecting(Squares):
    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        gc.collect()
        return super().__getitem__(index)


class Marking:
    """Writes down which process it ended in, and lives until garbage is collected."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.itself = folder, self

    def __del__(self) -> None:
        (self.folder / str(os.getpid())).touch()


def test_garbage_of_the_run_is_not_collected_by_its_loaders(tmp_path: Path) -> None:
    """It may be an event of a GPU, which would end a process that was forked."""
    gc.disable()
    try:
        Marking(tmp_path)
        feed = Feed(Collecting(), train=True, loaders=1)
        assert len(list(feed(requests(0, [1], [2])))) == 2
        feed.close()
        assert not list(tmp_path.iterdir())
    finally:
        gc.enable()
    gc.collect()
    assert [mark.name for mark in tmp_path.iterdir()] == [str(os.getpid())]


def test_requests_are_taken_at_most_one_group_ahead() -> None:
    taken = 0

    def endless() -> Iterator[Request]:
        nonlocal taken
        while True:
            taken += 1
            yield Request(0, torch.tensor([taken % 100]))

    batches = Feed(tiny(), train=False)(endless())
    for _ in range(5):
        next(batches)
    assert 5 <= taken <= 513  # 512 samples are prepared together, and one request shows that the group is full


def test_own_data_by_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_sets.py").write_text(
        "class S(list):\n    pass\n"
        "def plain():\n    return [(1, 0)] * 3, [(1, 0)]\n"
        "def placed(path):\n    return [(path, 0)], [(path, 0)]\n"
        "def preset(path='there'):\n    return [(path, 0)], [(path, 0)]\n"
        "def single():\n    return [1]\n"
        "def empty():\n    return [], [1]\n"
        "def numbers():\n    return 1, 2\n"
    )
    (tmp_path / "my_fault.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)  # where models and losses are found too
    monkeypatch.setattr(sys, "path", sys.path.copy())
    assert len(open_data("my_sets:plain").train) == 3
    assert open_data("my_sets:placed", "here").test[0] == ("here", 0)
    assert open_data("my_sets:preset").test[0] == ("there", 0)
    assert open_data("my_sets:preset", "here").test[0] == ("here", 0)
    assert len(open_data("my_sets:plain", holdout=0.34).test) == 1
    for name, path, sentence in [
        ("my_setz:plain", "", "there is no module 'my_setz'"),
        ("my_sets.deeper:plain", "", "there is no module"),
        ("my_sets:plian", "", "did you mean 'plain'"),
        ("my_sets:single", "", "needs two data sets"),
        ("my_sets:empty", "", "empty data set"),
        ("my_sets:numbers", "", "gave a int"),
        ("my_sets:plain", "here", "takes no argument"),
        (":plain", "", "data.name: :plain is not an import path; write package.module:name"),
        (".my_sets:plain", "", "is not an import path"),
    ]:
        with pytest.raises((ConfigError, DataError), match=sentence):
            open_data(name, path)
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_there"):  # the user's own fault, seen whole
        open_data("my_fault:plain")


@pytest.mark.gpu
def test_copies_to_a_gpu_are_begun_one_batch_ahead_from_pinned_memory(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    feed = Feed(train, train=True, augment="resized_crop", image_size=16, device="cuda")
    pinned, seen = [], []
    way = feed._way
    way._join = lambda parts, join=way._join: (pinned.extend(part.is_pinned() for part in parts), join(parts))[1]
    for _, labels in feed(requests(0, [0, 1], [2, 3], [4, 5])):
        seen.append((len(pinned) // 2, labels.tolist()))
    assert all(pinned)
    assert seen == [(2, [0, 0]), (3, [0, 1]), (3, [1, 1])]


@pytest.mark.gpu
def test_a_gpu_gets_the_same_batches(tmp_path: Path) -> None:
    train, _ = open_folder(make_folder(tmp_path))
    pairs = TensorDataset(torch.rand(9, 3, 8, 8, dtype=torch.float64), torch.arange(9))
    text = TokenWindows(tokens=np.arange(60_000, 60_099, dtype=np.uint16), length=20)  # the last window is padded
    for source in (train, tiny(), Squares(), pairs, text):
        wanted = requests(1, [0, 1, 2], [4])
        options = {"train": True, "augment": "resized_crop", "dtype": torch.float64}
        here = Feed(source, image_size=16, **options)
        there = Feed(source, image_size=16, device="cuda", loaders=2, **options)
        for (x, y), (u, v) in zip(here(wanted), there(wanted), strict=True):
            assert u.is_cuda
            assert v.is_cuda
            torch.testing.assert_close(x, u.cpu(), rtol=0, atol=1e-10)  # sampling points differ by float64 rounding
            assert torch.equal(y, v.cpu())
        there.close()
