"""nvJPEG called directly: what is passed to the library, when memory is used again, and who is trusted.

There is no GPU here: a library of the same functions in C fills planes in host memory with bytes that can be told.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from bigstep.data.decoders import nvjpeg_decoders, nvjpeg_library
from bigstep.data.decoders.nvjpeg_decoders import (
    Decoders,
    difference_from_pillow,
    try_out,
    why_not_library,
)
from bigstep.data.decoders.nvjpeg_library import Decoder, Library, RefusedError
from test_data_folder import photograph

CPU = torch.device("cpu")
STUB = r"""
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef struct { unsigned char *channel[4]; size_t pitch[4]; } Image;
typedef struct { int count, busy; } State;
enum { CREATED, DESTROYED, STATES, FREED, READIED, RESERVED, LAST_RESERVED, BEGUN, DECODED, FLAGS, REFUSED, TOGETHER };
atomic_int tally[16];

/* a file: width, height (two bytes each), channels, sampling of colour, first byte of the pixels, how it behaves */
static int width(const unsigned char *f) { return f[0] | f[1] << 8; }
static int height(const unsigned char *f) { return f[2] | f[3] << 8; }

int nvjpegCreateEx(int backend, void *a, void *b, unsigned flags, void **handle) {
  if (backend != 3 || a || b) return 97;
  if (tally[REFUSED] & flags) return 6;
  tally[CREATED]++; tally[FLAGS] = flags; *handle = malloc(8); return 0;
}
int nvjpegDestroy(void *handle) { tally[DESTROYED]++; free(handle); return 0; }
int nvjpegJpegStateCreate(void *handle, State **state) {
  tally[STATES]++; *state = calloc(1, sizeof(State)); return 0;
}
int nvjpegJpegStateDestroy(State *state) { tally[FREED]++; free(state); return 0; }
int nvjpegJpegStreamCreate(void *h, const unsigned char ***header) {
  *header = calloc(1, sizeof(void *)); return 0;
}
int nvjpegJpegStreamDestroy(const unsigned char **header) { free(header); return 0; }
int nvjpegJpegStreamParseHeader(void *h, const unsigned char *f, size_t n, const unsigned char **header) {
  *header = f; return n < 8 || f[7] == 'U' ? 3 : 0;
}
int nvjpegDecodeBatchedSupported(void *h, const unsigned char **header, int *not) {
  *not = (*header)[4] != 3 || (*header)[5] > 3; return 0;
}
int nvjpegJpegStreamGetFrameDimensions(const unsigned char **header, unsigned *w, unsigned *tall) {
  *w = width(*header); *tall = height(*header); return 0;
}
int nvjpegDecodeBatchedPreAllocate(void *h, State *s, int batch, int w, int tall, int sampling, int format) {
  if (sampling || format != 3 || w < 1 || tall < 1) return 96;
  tally[RESERVED]++; tally[LAST_RESERVED] = w * 1000 + tall; return 0;
}
int nvjpegDecodeBatchedInitialize(void *h, State *s, int batch, int threads, int format) {
  if (format != 3 || threads < 1) return 95;
  tally[READIED]++; s->count = batch; return 0;
}
/* a file behaves: - well, S slowly, T when all are here, F fails, U cannot be read */
int nvjpegDecodeBatched(void *h, State *s, const unsigned char *const *files, const size_t *lengths, Image *into,
                        void *stream) {
  if (!s->count || s->busy || stream) return 94;
  s->busy = 1;
  tally[BEGUN]++;
  for (int n = 0; n < s->count; n++) {
    const unsigned char *f = files[n];
    if (f[7] == 'S') usleep(20000);
    for (int turn = 0; f[7] == 'T' && tally[BEGUN] < tally[TOGETHER]; turn++) { /* until as many are here */
      usleep(1000);
      if (turn == 5000) return 91;
    }
    if (f[7] == 'F') { s->count = 0; s->busy = 0; return 8; }
    if (lengths[n] != 8 || into[n].channel[3] || into[n].pitch[3]) return 93;
    for (int c = 0; c < 3; c++) {
      if ((uintptr_t)into[n].channel[c] % 16 || into[n].pitch[c] < width(f)) return 92;
      for (int y = 0; y < height(f); y++)
        for (int x = 0; x < width(f); x++) into[n].channel[c][y * into[n].pitch[c] + x] = f[6] + 85 * c + 7 * y + x;
    }
    tally[DECODED]++;
  }
  s->busy = 0;
  return 0;
}
"""
TALLY = re.findall(r"\w+", re.findall("enum {(.*)}", STUB)[0].lower())


class Stub(Library):
    """The library in C, and what it has counted."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self._tally = (ctypes.c_int * 16).in_dll(ctypes.CDLL(path), "tally")

    def __getitem__(self, name: str) -> int:
        return self._tally[TALLY.index(name)]

    def __setitem__(self, name: str, value: int) -> None:
        self._tally[TALLY.index(name)] = value


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        pytest.skip("there is no C compiler")
    folder = tmp_path_factory.mktemp("stub")
    (folder / "stub.c").write_text(STUB)
    path = folder / "libnvjpeg.so.12"
    done = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "-o", str(path), str(folder / "stub.c")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return str(path)


@pytest.fixture
def stub(built: str) -> Stub:
    library = Stub(built)
    for name in TALLY:
        library[name] = 0
    return library


def file(width: int, height: int, first: int, *, behaves: str = "-", channels: int = 3, sampling: int = 2) -> Tensor:
    head = [width & 255, width >> 8, height & 255, height >> 8, channels, sampling, first, ord(behaves)]
    return torch.tensor(head, dtype=torch.uint8)


def picture(width: int, height: int, first: int) -> Tensor:
    """What the stub makes of a file."""
    c, y, x = torch.meshgrid(torch.arange(3), torch.arange(height), torch.arange(width), indexing="ij")
    return ((first + 85 * c + 7 * y + x) % 256).to(torch.uint8)


def batch(count: int, seed: int, **behaviour: Any) -> tuple[list[Tensor], list[tuple[int, int]], list[Tensor]]:
    rng = np.random.default_rng(seed)
    shapes = [(int(w), int(h)) for w, h in rng.integers(1, 300, (count, 2))]
    firsts = rng.integers(0, 256, count).tolist()
    contents = [file(*shape, first, **behaviour) for shape, first in zip(shapes, firsts, strict=True)]
    return contents, shapes, [picture(*shape, first) for shape, first in zip(shapes, firsts, strict=True)]


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    assert len(found) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_the_library_fills_the_planes_of_each_image(stub: Stub) -> None:
    """The stub itself refuses planes at odd places, a fourth channel, or a pitch below the width."""
    decoder = Decoder(stub, CPU)
    for seed, count in enumerate((1, 7, 7, 0, 3)):
        contents, sizes, expected = batch(count, seed)
        assert_same(decoder.decode(contents, sizes), expected)
    assert stub["decoded"] == 1 + 7 + 7 + 3
    assert stub["readied"] == stub["reserved"] == 3  # once for each size of a batch
    assert stub["last_reserved"] == 1001
    decoder.close()
    assert [stub[name] for name in ("created", "destroyed", "states", "freed")] == [1, 1, 1, 1]


@pytest.mark.parametrize(("options", "flags", "reserved"), [({}, 32, 1), ({"smooth": False, "reserve": None}, 0, 0)])
def test_options_reach_the_library(stub: Stub, options: dict[str, Any], flags: int, reserved: int) -> None:
    decoder = Decoder(stub, CPU, **options)
    decoder.decode([file(3, 2, 1)], [(3, 2)])
    assert (stub["flags"], stub["reserved"]) == (flags, reserved)


def test_three_results_lie_in_different_memory(stub: Stub) -> None:
    """Two are still read when the next is decoded; the one before is overwritten, also by a smaller batch."""
    decoder = Decoder(stub, CPU)
    batches = [batch(count, seed) for seed, count in enumerate((9, 5, 5, 4, 5, 1))]
    given: list[list[Tensor]] = []
    for turn, (contents, sizes, _) in enumerate(batches):
        given.append(decoder.decode(contents, sizes))
        for back in range(min(turn + 1, 3)):
            assert_same(given[turn - back], batches[turn - back][2])
    assert given[3][0].data_ptr() == given[0][0].data_ptr()  # no memory is taken while there is enough


class FakeStream:
    """A stream of a reader; nothing is queued on it, so that what reads the batch before is not held up."""

    def __init__(self, name: str) -> None:
        self.name = name


def test_a_buffer_waits_for_its_own_reader(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The event is recorded one call before it is waited for: by then all that reads the images is queued."""
    told: list[str] = []

    def mark(stream: Any) -> str | None:
        if stream is None:
            return None
        told.append(f"mark {stream.name}")
        return f"wait {stream.name}"

    monkeypatch.setattr(nvjpeg_library, "_mark", mark)
    monkeypatch.setattr(nvjpeg_library, "_wait", lambda event: None if event is None else told.append(event))
    decoder = Decoder(stub, CPU)
    for number in range(5):
        told.append(f"call {number}")
        before = stub["decoded"]
        decoder.decode([file(40, 30, number)], [(40, 30)], FakeStream(f"reader {number}"))  # type: ignore[arg-type]
        assert stub["decoded"] == before + 1
    assert told == [
        "call 0",
        "call 1",
        *("call 2", "mark reader 0"),
        *("call 3", "mark reader 1", "wait reader 0"),
        *("call 4", "mark reader 2", "wait reader 1"),
    ]
    told.clear()
    decoder.close()
    assert {f"wait reader {number}" for number in (2, 3, 4)} <= set(told)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (file(9, 9, 0, behaves="F"), "nvjpegDecodeBatched returned status 8"),
        (file(9, 9, 0, behaves="U"), "nvjpegJpegStreamParseHeader returned status 3"),
        (file(9, 10, 0), "another size"),
        (file(1000, 9, 0), "another size"),
        (file(9, 9, 0, sampling=4), "not for the chip's decoders"),
        (file(9, 9, 0, sampling=255), "not for the chip's decoders"),
        (file(9, 9, 0, channels=1), "not for the chip's decoders"),
    ],
    ids=["refused", "unreadable", "taller", "wider", "4:1:1", "unknown sampling", "grey"],
)
def test_one_bad_file_is_an_error_and_the_next_batch_is_not(stub: Stub, bad: Tensor, words: str) -> None:
    decoders = Decoders(stub, CPU)
    contents, sizes, expected = batch(40, 0)
    assert_same(decoders.decode(contents, sizes), expected)
    with pytest.raises(RefusedError, match=words):
        decoders.decode([*contents[:30], bad, *contents[31:]], [*sizes[:30], (9, 9), *sizes[31:]])
    assert_same(decoders.decode(contents, sizes), expected)
    decoders.close()


def test_an_error_of_one_waits_for_all(stub: Stub) -> None:
    """Otherwise the others would still read files whose memory is used again."""
    decoders = Decoders(stub, CPU)
    contents, sizes, _ = batch(40, 0)
    contents[0] = file(*sizes[0], 0, behaves="F")
    contents[20] = file(*sizes[20], 0, behaves="S")
    with pytest.raises(RefusedError):
        decoders.decode(contents, sizes)
    assert stub["decoded"] == 20
    decoders.close()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_decoders_share_a_batch_at_once_and_keep_its_order(stub: Stub, count: int) -> None:
    """The first file of each part is decoded when all decoders are at work, or never."""
    decoders = Decoders(stub, CPU, count)
    contents, sizes, expected = batch(48, 1)
    stub["together"] = count
    for first in range(0, 48, 48 // count):
        contents[first] = file(*sizes[first], int(expected[first][0, 0, 0]), behaves="T")
    assert_same(decoders.decode(contents, sizes), expected)
    waiting = decoders.begin(contents[:5], sizes[:5])  # a few: one decoder, and the caller goes on
    later = decoders.begin(contents[5:], sizes[5:])
    assert_same(waiting() + later(), expected)
    decoders.close()
    assert not any(thread.name.startswith("nvjpeg") for thread in threading.enumerate())


def test_the_library_is_found_where_it_is_loaded_or_the_reason_told(
    built: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ctypes.CDLL(built)
    assert built in nvjpeg_decoders._paths()  # behind that of torchvision, where it has one
    beside = [tmp_path / "nvidia" / name for name in ("nvjpeg/lib/libnvjpeg.so.12", "cu13/lib/libnvjpeg.so.13")]
    for path in beside:
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    paths = list(nvjpeg_decoders._paths())
    assert str(beside[1]) in paths  # of the CUDA that torch has
    assert str(beside[0]) not in paths
    monkeypatch.setattr(nvjpeg_decoders, "_paths", lambda: iter(["missing.so", built]))
    assert nvjpeg_decoders.find_library().path == built
    monkeypatch.setattr(nvjpeg_decoders, "_paths", lambda: iter(["missing.so", "libc.so.6"]))
    with pytest.raises(RefusedError, match="no libnvjpeg"):
        nvjpeg_decoders.find_library()


def test_a_library_that_shows_other_pixels_is_not_trusted(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    def by_pillow(contents: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
        opened = [Image.open(io.BytesIO(content.numpy().tobytes())) for content in contents]
        assert [image.size for image in opened] == list(sizes)
        return [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in opened]

    def with_colours_swapped(*batch: Any) -> list[Tensor]:
        return [image.flip(0) for image in by_pillow(*batch)]

    def with_the_last_of_another(*batch: Any) -> list[Tensor]:
        images = by_pillow(*batch)
        return [*images[:-1], images[-1].flip(2)]

    assert difference_from_pillow(by_pillow) is None
    for wrong in (with_colours_swapped, with_the_last_of_another):
        assert "off by" in str(difference_from_pillow(wrong))
    assert "fails on a test image" in str(try_out(stub, CPU, {}))  # it knows no JPEG
    stub["refused"] = 32
    assert try_out(stub, CPU, {}) == "nvJPEG does not start (nvjpegCreateEx returned status 6)"
    assert stub["created"] == stub["destroyed"] == 2


def test_an_older_library_is_asked_for_less(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """What it refuses is left out, and it is tried once for each device."""
    monkeypatch.setattr(nvjpeg_decoders, "find_library", lambda: stub)
    monkeypatch.setattr(
        nvjpeg_decoders, "try_out", lambda library, device, options: "no" if options.get("smooth", True) else None
    )
    nvjpeg_decoders._outcome.cache_clear()
    assert nvjpeg_decoders._outcome(torch.device("cuda", 0)) == (stub, {"smooth": False})
    assert why_not_library(torch.device("cuda", 0)) is None
    nvjpeg_decoders._outcome.cache_clear()
    assert why_not_library(CPU) == "there is no GPU"


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_gpu_decodes_2000_images_beside_a_busy_stream(count: int) -> None:
    """Every image is read late, behind work that was queued before; an overwritten one would be another image."""
    device = torch.device("cuda", 0)
    assert why_not_library(device) is None
    files, expected = [], []
    for seed in range(100):
        content = io.BytesIO()
        photograph(401 + 7 * (seed % 9), 300 + seed, seed=seed).save(
            content, "JPEG", quality=95, subsampling=seed % 2 * 2
        )
        files.append(torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8))
        expected.append(
            torch.from_numpy(np.array(Image.open(io.BytesIO(content.getvalue())))).permute(2, 0, 1).to(device)
        )
    rng = np.random.default_rng(0)
    decoders = nvjpeg_decoders.open_decoders(device, count)
    busy = torch.randn(4096, 4096, device=device)
    worst = torch.zeros((), device=device)
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize()
    for _ in range(20):
        order = rng.permutation(100).tolist()
        with torch.cuda.stream(stream):
            finish = decoders.begin(
                [files[n] for n in order], [(expected[n].shape[2], expected[n].shape[1]) for n in order]
            )
            for _ in range(10):
                busy = torch.tanh(busy @ busy)
            for n, image in zip(order, finish(), strict=True):
                worst = torch.maximum(worst, (image.float() - expected[n].float()).abs().mean())
    torch.cuda.synchronize()
    assert worst.item() < 2  # grey levels: half a level of rounding, and colour that is blown up in another way
    decoders.close()
