"""What users have becomes a source: fed as built-in sets are, counted, augmented, told apart, or refused rightly."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, random_split

from bigstep.config import CheckpointConfig, DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.data import DataPair, Source, TensorImages, as_pair, as_source, open_data
from bigstep.data.feed import Feed, Request
from bigstep.data.sources.folder import open_folder
from bigstep.data.sources.own import TensorItems
from bigstep.errors import ConfigError, DataError, RunError
from bigstep.tables.datasets import DATASETS
from bigstep.train import fit
from test_data_folder import make_folder


def batch_of(feed: Feed, indices: list[int], epoch: int = 0) -> tuple[Tensor, Tensor]:
    return next(iter(feed([Request(epoch, torch.tensor(indices))])))


def pictures(count: int = 40) -> Tensor:
    return torch.randint(0, 256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def tensor_images(count: int = 40) -> TensorImages:
    return TensorImages(
        images=pictures(count), labels=torch.arange(count) % 4, classes=tuple("abcd"), mean=(0.5,) * 3, std=(0.5,) * 3,
        name="mine",
    )  # fmt: skip


class Items:
    """A map-style data set without names of classes."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def tiny_config(**fields: Any) -> RunConfig:
    rate = LrConfig(base=0.01, scaling="none")
    return RunConfig(workers=WorkersConfig(count=2, local_batch=4), epochs=1, lr=rate, **fields)


def test_tensor_images_from_a_function_are_augmented_and_held_in_memory_as_built_in_sets_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_images.py").write_text(
        "from test_data_sources import tensor_images\ndef sets():\n    return tensor_images(40), tensor_images(8)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    pair = open_data("my_images:sets")
    feed = Feed(pair.train, train=True, augment="flip", loaders=2)
    assert feed.loaders is None
    assert feed.shape == {"classes": 4, "channels": 3, "image_size": 8}
    direct = Feed(tensor_images(), train=True, augment="flip")
    plain = Feed(tensor_images(), train=True)
    everything = list(range(40))
    assert torch.equal(batch_of(feed, everything)[0], batch_of(direct, everything)[0])
    assert not torch.equal(batch_of(feed, everything)[0], batch_of(plain, everything)[0])
    result = fit(tiny_config(data=DataConfig(name="my_images:sets", augment="flip"), model="small"), device="cpu")
    assert result.steps == 5


def test_a_subset_of_a_source_is_a_source_of_its_own_kind() -> None:
    part = as_source(Subset(Subset(tensor_images(), [4, 5, 6, 7]), [3, 1]))
    assert type(part) is TensorImages
    assert torch.equal(part.images, pictures()[[7, 5]])
    own = as_source(Subset(Items(pictures().float(), torch.arange(40) % 4), [9, 3]))
    assert [own[index][1].item() for index in range(2)] == [1, 3]
    assert own.num_classes == 4  # of the whole, though the part shows two


def test_tensors_and_arrays_stay_in_memory_and_look_as_through_loaders() -> None:
    x, y = torch.randn(30, 3, dtype=torch.float64), torch.arange(30) % 3
    for given in (TensorDataset(x, y), (x, y), (x.numpy(), y.numpy())):
        feed = Feed(given, train=True, loaders=2)
        assert feed.loaders is None
        inputs, targets = batch_of(feed, [7, 2])
        assert torch.equal(inputs, x[[7, 2]].float())  # converted as any floating data
        assert targets.tolist() == [1, 2]
        loaded = batch_of(Feed(Items(x, y), train=True), [7, 2])
        assert torch.equal(loaded[0], inputs)
        assert torch.equal(loaded[1], targets)


@pytest.mark.parametrize("kept", [True, False], ids=["in memory", "item by item"])
def test_real_targets_come_in_the_type_of_the_run_and_numbers_of_classes_as_they_are(kept: bool) -> None:
    """Losses of older releases of torch refuse to mix types in their backward."""
    x = torch.randn(4, 3)
    for y, wanted in ((torch.randn(4), torch.float64), (torch.arange(4), torch.int64)):
        pairs = TensorDataset(x, y)
        feed = Feed(pairs if kept else list(pairs), train=True, dtype=torch.float64)
        inputs, targets = batch_of(feed, [2, 0])
        assert (inputs.dtype, targets.dtype) == (torch.float64, wanted)


def test_classes_are_counted_where_they_have_no_names() -> None:
    x, y = pictures(30), torch.arange(30) % 7
    listed = Items(x, y)
    listed.targets = (torch.arange(30) % 9).tolist()  # as torchvision's sets have them
    named = Items(x, y)
    named.classes = ["p", "q"]
    for given, count in ((Items(x, y), 7), (TensorDataset(x, y), 7), (listed, 9), (named, 2)):
        assert Feed(given, train=True).shape == {"classes": count, "channels": 3, "image_size": 8}
    config = tiny_config(model="small")
    assert fit(config, data=(Items(x.float(), y), Items(x.float(), y)), device="cpu").steps == 4


def test_classes_that_cannot_be_found_are_asked_for() -> None:
    class Huge(Items):
        def __len__(self) -> int:
            return 1_000_000

    with pytest.raises(DataError, match="1,000,000 items.*attribute `classes`"):
        _ = Feed(Huge(pictures(), torch.arange(40)), train=True).shape
    with pytest.raises(DataError, match="not class numbers"):
        _ = Feed(TensorDataset(torch.randn(4, 3), torch.randn(4)), train=True).shape
    assert Feed(Huge(pictures(), torch.arange(40)), train=True).image_size == 8  # asks for no classes


def test_own_images_are_augmented_and_keep_their_range() -> None:
    y = torch.arange(40) % 4
    for images in (pictures(), pictures().double() / 255):
        plain = images[:20] if images.dtype == torch.uint8 else images[:20].float()
        for given in (TensorDataset(images, y), Items(images, y)):
            feed = Feed(given, train=True, augment="flip", seed=3)
            seen, _ = batch_of(feed, list(range(20)))
            assert seen.dtype == plain.dtype
            mirrored = [not torch.equal(a, b) for a, b in zip(seen, plain, strict=True)]
            assert 3 <= sum(mirrored) <= 17
            for index, is_mirrored in enumerate(mirrored):
                assert torch.equal(seen[index], plain[index].flip(-1) if is_mirrored else plain[index])
            still, _ = batch_of(Feed(given, train=False, augment="flip", seed=3), list(range(20)))
            assert torch.equal(still, plain)
    cropped, _ = batch_of(Feed(TensorDataset(pictures(), y), train=True, augment="resized_crop", image_size=6), [1, 2])
    assert (cropped.shape, cropped.dtype) == ((2, 3, 6, 6), torch.uint8)


def test_augmentation_of_what_is_no_image_is_refused() -> None:
    vectors = (torch.randn(8, 5), torch.zeros(8, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"data\.augment is flip.*torch\.float32 of \(5,\).*data\.augment=none"):
        Feed(vectors, train=True, augment="flip")
    Feed(vectors, train=False, augment="flip")  # evaluation is never augmented
    config = tiny_config(data=DataConfig(augment="crop_flip"))
    with pytest.raises(ConfigError, match=r"set data\.augment=none"):
        fit(config, nn.Linear(5, 2), (vectors, vectors), device="cpu")


def test_sequences_tell_vocabulary_length_and_how_many_targets_each_has() -> None:
    x = torch.randint(0, 50, (6, 8), generator=torch.Generator().manual_seed(1))
    x[0, 0] = 50
    y = x.roll(-1, 1)
    y[2, 5:] = -100
    for given in (TensorDataset(x, y), Items(x, y)):
        feed = Feed(given, train=True)
        assert feed.shape == {"vocabulary": 51, "length": 8}
        assert feed.source.targets(torch.tensor([2, 0, 2])).tolist() == [5, 8, 5]
    told, read = Items(x, y), []
    told.target_counts = [8, 8, 5, 8, 8, 8]  # type: ignore[attr-defined]
    source = as_source(told)
    assert source.first  # looks at the first item
    told.__class__ = type("Reading", (Items,), {"__getitem__": lambda self, index: read.append(index)})
    assert source.targets(torch.tensor([2, 0, 2])).tolist() == [5, 8, 5]
    assert source.subset(torch.tensor([5, 2]))._counted.tolist() == [8, 5]
    assert not read, "what is told needs no reading"
    told.target_counts = [8, 8]  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="target_counts must hold for each of its 6 items"):
        as_source(told)._counted  # noqa: B018
    assert as_source(TensorDataset(x, x[:, 0])).targets(torch.tensor([0])) is None  # one label each
    assert tensor_images().targets(torch.tensor([0])) is None


X, Y = np.arange(18, dtype=np.float32).reshape(6, 3), np.arange(6)
GIVEN_WRONGLY = {
    "arrays without a test set": ((X, Y), "training set alone.*data.holdout"),
    "one data set": (TensorDataset(torch.zeros(4, 2), torch.zeros(4)), r"two data sets, \(train, test\).*data.holdout"),
    "no test set": ((TensorDataset(torch.zeros(4, 2), torch.zeros(4)), None), "training set alone.*data.holdout"),
    "loaders": ((DataLoader([(1, 0)]), DataLoader([(1, 0)])), r"DataLoader.*loader\.dataset"),
    "a loader": (DataLoader([(1, 0)]), r"DataLoader.*loader\.dataset"),
    "an array in each place": ((X, torch.zeros(3, 2, 2), 5), "training set alone"),
    "an array and a set": ((X, [(1, 0)]), r"array of \(6, 3\) alone.*\(x, y\)"),
    "arrays of two lengths": (((X, Y[:4]), (X, Y)), "give one y for each x"),
    "a generator": (((n for n in range(3)), [(1, 0)]), "generator, which has no length.*map-style"),
    "two samples": ([(X[0], Y[:3]), (X[1], Y[:3])], r"a tuple, \(train, test\).*\(list, None\)"),
    "two sets in a list": ([(X, Y), (X, Y)], "two data sets or two samples"),
    "nothing in it": (([], [(1, 0)]), "empty"),
    "words": (((X, np.array(["cat", "dog"] * 3)), (X, Y)), "array of <U3.*give numbers"),
    "objects": (((np.full(6, None), Y), (X, Y)), "array of object.*give numbers"),
    "a sparse tensor": (((torch.ones(6, 3).to_sparse(), Y), (X, Y)), r"sparse_coo; give a dense one"),
}


@pytest.mark.parametrize("case", GIVEN_WRONGLY)
def test_what_cannot_be_a_pair_of_sets_is_told_rightly(case: str) -> None:
    given, sentence = GIVEN_WRONGLY[case]
    with pytest.raises(DataError, match=sentence) as caught:
        as_pair(given)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "kept",
    [
        (X.astype(">f4"), Y.astype(">i8")),
        (np.ascontiguousarray(X[::-1])[::-1], np.ascontiguousarray(Y[::-1])[::-1]),
        (torch.from_numpy(X).requires_grad_(), Y),
        (X, Y.tolist()),
        [X, Y],
    ],
    ids=["another order of bytes", "backwards", "with gradients", "labels in a list", "in a list"],
)
def test_numbers_are_taken_however_they_lie_in_memory(kept: Any) -> None:
    pair = as_pair((kept, (X, Y)))
    expected = as_pair(((X, Y), (X, Y)))
    assert pair.fingerprint() == expected.fingerprint()
    for mine, theirs in zip(batch_of(Feed(pair.train, train=False), [4, 1]), (X, Y), strict=True):
        assert np.array_equal(mine.numpy(), theirs[[4, 1]])


def test_a_mapped_file_is_taken_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    np.save(tmp_path / "x.npy", X)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    source = as_source((mapped, Y))
    assert isinstance(source, TensorItems)
    assert source.x.data_ptr() == mapped.ctypes.data  # not copied: it may be larger than memory
    assert not [warning for warning in recwarn if "writable" in str(warning.message)]


def test_complex_numbers_are_neither_tokens_nor_classes() -> None:
    waves = as_source((np.ones((6, 3), np.complex64), np.ones((6, 2), np.complex64)))
    assert waves.inputs(0) == {"channels": 3, "image_size": 3}
    assert waves.targets(torch.arange(6)) is None
    with pytest.raises(DataError, match="not class numbers"):
        _ = waves.num_classes


@pytest.mark.parametrize("x", [pictures(8), torch.zeros(8, 5), torch.zeros(8, 28, 28), torch.zeros(8, 32, 32, 3)])
def test_a_network_by_name_is_given_images_or_the_run_is_refused(x: Tensor) -> None:
    data = TensorDataset(x, torch.arange(8) % 2)
    item = re.escape(f"{x.dtype} of {tuple(x.shape[1:])};")
    with pytest.raises(ConfigError, match=f"small takes floating-point images.* is {item}"):
        fit(tiny_config(), None, (data, data), device="cpu")


class Faulty(Items):
    """Raises an error of its own at an item that no fingerprint looks at."""

    classes = ("a", "b")

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 5:
            raise ValueError("the fifth is odd")
        return super().__getitem__(index)


@pytest.mark.parametrize("loaders", [0, 1])
def test_an_error_of_ones_own_is_told_wherever_it_is_raised(loaders: int) -> None:
    train, test = (kind(torch.zeros(16, 3), torch.zeros(16, dtype=torch.int64)) for kind in (Faulty, Items))
    with pytest.raises(RunError, match=r"Rank 0 failed at step 0 in .*: ValueError: the fifth is odd$"):
        fit(tiny_config(data=DataConfig(loaders=loaders)), nn.Linear(3, 2), (train, test), device="cpu")


def test_a_training_set_alone_will_do_where_some_is_held_out() -> None:
    for given in ((X, Y), (TensorDataset(torch.zeros(6, 2), torch.zeros(6)), None), [(1, 0)] * 6):
        pair = as_pair(given, holdout=0.34)
        assert (len(pair.train), len(pair.test)) == (4, 2)
    samples = [(X[0], Y[:3]), (X[1], Y[:3])]
    with pytest.raises(DataError, match="two data sets or two samples"):  # the second was dropped
        as_pair(samples, holdout=0.34)
    for given in ((samples, None), TensorDataset(torch.zeros(2, 3), torch.zeros(2))):
        pair = as_pair(given, holdout=0.34)
        assert (len(pair.train), len(pair.test)) == (1, 1)
    halves = random_split(TensorDataset(torch.zeros(4, 2), torch.zeros(4)), [2, 2])  # a list
    assert [len(part) for part in (as_pair(halves).train, as_pair(halves).test)] == [2, 2]
    divided = as_pair(((X, Y), (X, Y)))
    assert as_pair(divided, holdout=0.5) is divided  # it was held out already
    data = (torch.randn(16, 3), torch.randn(16, 1))
    config = tiny_config(data=DataConfig(holdout=0.25))
    assert fit(config, nn.Linear(3, 1), data, nn.functional.mse_loss, device="cpu").steps == 2


def test_a_fingerprint_tells_sets_apart_and_does_not_depend_on_the_place(tmp_path: Path) -> None:
    first, moved = (open_folder(make_folder(tmp_path / name))[0] for name in ("a", "b"))
    assert first.fingerprint() == moved.fingerprint()
    path = moved.path(3)
    path.write_bytes(path.read_bytes() + b"x")
    assert first.fingerprint() != moved.fingerprint()
    assert tensor_images().fingerprint() == tensor_images().fingerprint()
    x, y = pictures(), torch.arange(40) % 4
    changed = x.clone()
    changed[39] += 1
    prints = [as_source(given).fingerprint() for given in (tensor_images(39), tensor_images(), (x, y), (changed, y))]
    prints += [as_source(Items(x, labels)).fingerprint() for labels in (y, y.flip(0))]
    assert len(set(prints)) == len(prints)
    assert as_source(Items(x, y)).fingerprint() == as_source(Items(x, y)).fingerprint()
    pair = DataPair(tensor_images(), tensor_images(39))
    assert pair.fingerprint() != DataPair(pair.test, pair.train).fingerprint()


def test_every_named_set_has_an_entry_that_opens(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'embedded'"):
        open_data("embeded")
    for name, entry in DATASETS.items():
        assert entry.about.endswith(".")
        if entry.needs_path:
            with pytest.raises(DataError, match=rf"{name} needs data\.path"):
                open_data(name)
    assert all(isinstance(part, Source) for part in (open_data("embedded").train, open_data("embedded").test))


def test_a_run_refuses_to_go_on_with_other_data_and_says_which(tmp_path: Path) -> None:
    x, y = torch.randn(16, 3), torch.randn(16, 1)
    config = tiny_config(checkpoint=CheckpointConfig(every=0.5))
    model = nn.Linear(3, 1)

    def go_on(x: Tensor, y: Tensor, *, resume: bool = True, steps: int = 2) -> int:
        return fit(
            config, model, ((x, y), (x, y)), nn.functional.mse_loss,
            out=tmp_path / "run", resume=resume, max_steps=steps, device="cpu",
        ).steps  # fmt: skip

    assert go_on(x, y, resume=False, steps=1) == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["data_fingerprint"]
    for changed in ((x + 1, y), (x, -y), (x[:12], y[:12])):
        with pytest.raises(DataError, match=r"data set has changed since the run was started.*--out"):
            go_on(*changed)
    assert go_on(x.clone(), y.clone()) == 2


def test_own_data_that_changes_from_reading_to_reading_still_has_one_fingerprint() -> None:
    class Noisy(Items):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return self.x[index], self.y[index] + np.random.default_rng().integers(0, 2**62)

    noisy = as_source(Noisy(pictures(), torch.arange(40)))
    assert noisy.fingerprint() == noisy.fingerprint()


def test_targets_are_counted_once_a_step_however_many_workers_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted for each worker anew, the targets of all workers would cost the square of their number."""
    counted: list[int] = []
    count = TensorItems.targets

    def counting(self: TensorItems, indices: Tensor) -> Tensor | None:
        counted.append(len(indices))
        return count(self, indices)

    monkeypatch.setattr(TensorItems, "targets", counting)
    tokens = torch.randint(0, 9, (64, 6), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1).masked_fill(tokens == 0, -100)
    order = dataclasses.replace(tiny_config(), workers=WorkersConfig(count=16, local_batch=2))
    data = TensorDataset(tokens, targets)
    fit(order, nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), (data, data), device="cpu")
    assert counted.count(32) == 2, "two steps of sixteen workers"
