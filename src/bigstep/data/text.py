"""Text by name or path, divided into a training set and a test set.

With ten documents or more (files of a folder, or parts of a file separated by the character U+001E), every tenth is
held out whole; otherwise the last tenth of the text is. A folder with train/ and val/ or test/ is already divided.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, cast

from bigstep.data.names import TEXT_SUFFIXES, Packing, Wanted
from bigstep.data.pair import DataPair
from bigstep.data.sources.text import TokenWindows
from bigstep.data.text_parts import character_at
from bigstep.data.tokens import Packed, read_tokens, write_tokens
from bigstep.data.vocabulary import Numbers, Tokens, Vocabulary, make_vocabulary, restore_vocabulary
from bigstep.errors import ConfigError, DataError

__all__ = ["divide", "open_shakespeare", "open_text", "open_tokens", "pack_text", "read_documents", "read_text"]

SHAKESPEARE = Path(__file__).with_name("embedded") / "shakespeare.txt.xz"
SHAKESPEARE_SHA256 = "21b40ccf4999c004256d116655824719001352dbc22636354d9cd0c645d03a4a"
_HELD_OUT = 10  # one part in this many is the test set
_SEPARATOR = b"\x1e"  # between documents
_MAX_BYTES = 2**32  # of text that is read into memory
_MAX_RATIO = 200  # text compresses to a quarter; a file compressed more tightly than this takes far more memory
_ALWAYS_READ = 2**26  # bytes unpacked up to which the ratio does not matter
_MAX_FILES = 100_000
_CHUNK_BYTES = 2**20


def open_shakespeare(wanted: Wanted) -> DataPair:
    """Open the text that ships with the package: its first nine tenths to train on, the last tenth to evaluate on."""
    try:
        content = SHAKESPEARE.read_bytes()
    except OSError as error:
        raise DataError(f"{SHAKESPEARE} cannot be read ({error.strerror}); install bigstep again.") from None
    if hashlib.sha256(content).hexdigest() != SHAKESPEARE_SHA256:
        raise DataError(f"{SHAKESPEARE} is not the file that ships with bigstep; install it again.")
    text = lzma.decompress(content)
    return _encoded(*divide([text]), wanted, "shakespeare")


def open_text(wanted: Wanted) -> DataPair:
    """Open a text file, or a folder of them."""
    return _encoded(*read_text(_path(wanted)), wanted, wanted.path)


def open_tokens(wanted: Wanted) -> DataPair:
    """Open a packed file of tokens."""
    path = _path(wanted)
    packed = read_tokens(path)
    vocabulary = _named_vocabulary(packed, wanted, path)
    parts = [(packed.train, packed.train_bytes), (packed.test, packed.test_bytes)]
    if vocabulary is None:
        highest = max(int(part.max()) for part, _ in parts)
        return _pair(parts, Numbers("numbers", 1 + highest), wanted.length, str(path))
    pair = _pair(parts, vocabulary, wanted.length, str(path))
    for part in (pair.train, pair.test):
        part.check()
    return pair


def _named_vocabulary(packed: Packed, wanted: Wanted, path: Path) -> Vocabulary | None:
    """Return the vocabulary that a packed file or `data.vocabulary` names; None if neither does."""
    if packed.vocabulary:
        given, kept = (name.partition(":") for name in (wanted.vocabulary, packed.vocabulary))
        same = given == kept or (packed.built is not None and given[0] == kept[0])  # built: the file holds all of it
        if not same and wanted.vocabulary != Wanted.vocabulary:
            raise DataError(f"{path} was packed with {packed.vocabulary}, but data.vocabulary is {wanted.vocabulary}.")
        return restore_vocabulary(packed.vocabulary, packed.size, packed.built, str(path))
    if wanted.vocabulary == Wanted.vocabulary:
        return None
    vocabulary = make_vocabulary(wanted.vocabulary, b"")
    if vocabulary.built() is not None:
        raise DataError(
            f"{path} does not keep the text from which data.vocabulary={wanted.vocabulary} would be built; leave "
            "data.vocabulary out, so that tokens are plain numbers, or pack the text with bigstep data pack."
        )
    return vocabulary


def pack_text(wanted: Wanted, packing: Packing) -> dict[str, Any]:
    """Divide a text into tokens and keep them in a file; return what was packed, as `--json` prints it."""
    out = packing.out
    if out.suffix != ".tokens":
        raise ConfigError(f"{out} must end in .tokens, since that is what a text is packed into.")
    if packing.side or packing.raw:
        raise ConfigError("--side and --raw are for images; a text is packed by its --vocabulary.")
    if out.exists():
        raise ConfigError(f"{out} exists already; name another file.")
    train, test, path = *read_text(_path(wanted)), wanted.path
    vocabulary = make_vocabulary(wanted.vocabulary, train, test)
    tokens, held = (vocabulary.encode(text, path) for text in (train, test))
    write_tokens(out, tokens, held, vocabulary, len(train), len(test))
    counted = len(tokens) + len(held)
    return {"path": str(out), "tokens": counted, "bytes": out.stat().st_size, "vocabulary": vocabulary.name}


def divide(documents: list[bytes]) -> tuple[bytes, bytes]:
    """Return what to train on and what to evaluate on.

    >>> divide([b"a text of twenty characters"[:20]])
    (b'a text of twenty c', b'ha')
    >>> [part.decode() for part in divide(["äöü".encode()])]  # the cut would lie within the last of them
    ['äö', 'ü']
    >>> train, test = divide([b"%d" % number for number in range(20)])
    >>> test
    b'919'
    """
    if len(documents) >= _HELD_OUT:
        held = [document for place, document in enumerate(documents) if place % _HELD_OUT == _HELD_OUT - 1]
        kept = [document for place, document in enumerate(documents) if place % _HELD_OUT != _HELD_OUT - 1]
        return b"".join(kept), b"".join(held)
    text = b"".join(documents)
    cut = character_at(text, len(text) * (_HELD_OUT - 1) // _HELD_OUT)  # not within a character
    return text[:cut], text[cut:]


def read_text(path: Path) -> tuple[bytes, bytes]:
    """Read a file or a folder; return what to train on and what to evaluate on."""
    for name in ("val", "test"):
        if (path / "train").is_dir() and (path / name).is_dir():
            return b"".join(read_documents(path / "train")), b"".join(read_documents(path / name))
    return divide(read_documents(path))


def read_documents(path: Path) -> list[bytes]:
    """Read a file, or the text files of a folder in sorted order, as documents."""
    files = _files_of(path) if path.is_dir() else [path]
    documents: list[bytes] = []
    room = _MAX_BYTES
    for file in files:
        text = _read(file, room)
        room -= len(text)
        is_binary = b"\0" in text  # in which the separator is a byte like any other
        documents += [text] if is_binary and text else [part for part in text.split(_SEPARATOR) if part]
    if not documents:
        raise DataError(f"{path} is empty; give a text that is longer than a sequence.")
    return documents


def _files_of(folder: Path) -> list[Path]:
    found: list[Path] = []
    for root, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [Path(root) / name for name in sorted(files) if name.lower().endswith(TEXT_SUFFIXES)]
        if len(found) > _MAX_FILES:
            raise DataError(f"{folder} holds more than {_MAX_FILES:,} text files; join some, or pack them.")
    if not found:
        raise DataError(f"{folder} holds no text files ({', '.join(TEXT_SUFFIXES)}).")
    return found


def _read(path: Path, room: int) -> bytes:
    """Read a file, compressed or not; refuse one that holds more than `room` bytes of text."""
    pieces: list[bytes] = []
    try:
        if path.suffix in (".gz", ".xz"):
            room = min(room, max(path.stat().st_size * _MAX_RATIO, _ALWAYS_READ))
        with _opened(path) as file:
            while piece := file.read(_CHUNK_BYTES):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    raise DataError(
                        f"{path} is more text than is read into memory, or compressed more tightly than text can be; "
                        "unpack it, or give it in parts."
                    )
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        reason = getattr(error, "strerror", None) or "its compressed data is damaged"
        raise DataError(f"{path} cannot be read: {reason}.") from None
    return b"".join(pieces)


def _opened(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path))
    return cast(BinaryIO, lzma.open(path)) if path.suffix == ".xz" else open(path, "rb")


def _encoded(train: bytes, test: bytes, wanted: Wanted, name: str) -> DataPair:
    vocabulary = make_vocabulary(wanted.vocabulary, train, test)
    parts = [(vocabulary.encode(text, name), len(text)) for text in (train, test)]
    return _pair(parts, vocabulary, wanted.length, name)


def _pair(parts: list[tuple[Tokens, int]], vocabulary: Vocabulary, length: int, name: str) -> DataPair:
    """Cut two texts, each given as its tokens and its size in bytes, into windows."""
    (train, _), (test, _) = parts
    if len(train) <= length or len(test) < 2:
        raise DataError(
            f"{name} has {len(train):,} tokens to train on and {len(test):,} to evaluate on, but a sequence takes "
            f"{length:,} and one more; lower data.length, or give more text."
        )
    sources = (
        TokenWindows(tokens=tokens, length=length, vocabulary=vocabulary, name=name, text_bytes=text_bytes)
        for tokens, text_bytes in parts
    )
    return DataPair(*sources)


def _path(wanted: Wanted) -> Path:
    if not wanted.path:
        raise DataError(f"{wanted.name} needs data.path, the file or folder of the text.")
    return Path(wanted.path)
