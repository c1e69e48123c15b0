"""Text to numbers and back. Every vocabulary here can represent any text that it accepts, so that nothing is lost, and
bits per byte can be compared between vocabularies.
"""

from __future__ import annotations

import itertools
import json
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bigstep.data.text_parts import characters, pieces_of, whole_text
from bigstep.errors import ConfigError, DataError, nearest
from bigstep.records import write_atomically
from bigstep.tables import load
from bigstep.tables.vocabularies import VOCABULARIES

__all__ = ["Vocabulary", "load_vocabulary", "make_vocabulary", "restore_vocabulary"]

FILE = "vocabulary.json"
_WORDS = 8192

Tokens = NDArray[np.unsignedinteger[Any]]


class Vocabulary(ABC):
    """Different tokens, and how text is divided into them."""

    name: str
    """As `data.vocabulary` names it."""
    size: int
    """How many different tokens there are."""

    @abstractmethod
    def encode(self, text: bytes, where: str) -> Tokens:
        """Return the tokens of a text; `where` names the text in messages."""

    @abstractmethod
    def decode(self, tokens: Sequence[int]) -> bytes:
        """Return the text of some tokens."""

    def lengths(self) -> NDArray[np.int64] | None:
        """Return how many bytes each token stands for; None if a token has no length of its own."""
        return np.array([len(self.decode([token])) for token in range(self.size)])

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every token."""
        return np.min_scalar_type(self.size - 1)

    def built(self) -> list[Any] | None:
        """Return what was built from the text; None if the name alone defines the vocabulary."""
        return None

    def keep(self, folder: Path) -> None:
        """Write the vocabulary into a folder, if it was built from the text; `load_vocabulary` reads it."""
        if (built := self.built()) is not None:
            content = json.dumps({"name": self.name, "tokens": built}, ensure_ascii=False)
            write_atomically(folder / FILE, content.encode())


class Bytes(Vocabulary):
    """The 256 bytes."""

    name, size = "bytes", 256

    def encode(self, text: bytes, where: str) -> Tokens:
        """Return the bytes."""
        return np.frombuffer(text, dtype=np.uint8)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Join the bytes."""
        return bytes(tokens)


class Chars(Vocabulary):
    """Characters, in the order of their code points.

    >>> chars = make_chars("", b"to be")
    >>> chars.size, chars.encode(b"bet", "here").tolist(), chars.decode([1, 2])
    (5, [1, 2, 4], b'be')
    """

    name = "chars"

    def __init__(self, points: Sequence[int]) -> None:
        self._points = np.array(points, dtype=np.uint32)
        self.size = len(points)

    def encode(self, text: bytes, where: str) -> Tokens:
        """Return the place of each character."""
        last = int(self._points[-1]) + 1  # stands for all code points after the last character
        places: Tokens = np.full(last + 1, self.size, dtype=np.min_scalar_type(self.size))
        places[self._points] = np.arange(self.size)
        found = [np.empty(0, dtype=self.dtype)]
        for part in characters(text, where):
            points = np.frombuffer(part.encode("utf-32-le"), dtype="<u4")
            tokens: Tokens = places[np.minimum(points, last)]
            if tokens.max() == self.size:
                strange = chr(points[tokens.argmax()])
                raise DataError(f"{where} holds {strange!r}, a character that the vocabulary of this run lacks.")
            found.append(tokens.astype(self.dtype))
        return np.concatenate(found)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Join the characters."""
        return "".join(chr(self._points[token]) for token in tokens).encode()

    def built(self) -> list[int]:
        """Return the code points."""
        return [int(point) for point in self._points]


class Words(Vocabulary):
    """The 256 bytes, then frequent words with the space before them; other words are spelled in bytes.

    >>> words = make_words("258", b"to be or not to be")
    >>> words.encode(b"to be, or", "here").tolist()
    [116, 111, 256, 44, 32, 111, 114]
    """

    def __init__(self, words: Sequence[bytes]) -> None:
        self._words = list(words)
        self.size = 256 + len(self._words)
        self.name = f"words:{self.size}"
        self._tokens = {word: (256 + place,) for place, word in enumerate(self._words)}

    def encode(self, text: bytes, where: str) -> Tokens:
        """Return the token of each word, or its bytes."""
        found = [np.empty(0, dtype=self.dtype)]
        for pieces in pieces_of(text, where):
            # iterating over the bytes of a word that has no token gives their numbers, which are their tokens
            spelled = itertools.chain.from_iterable(self._tokens.get(piece, piece) for piece in pieces)
            found.append(np.fromiter(spelled, dtype=self.dtype))
        return np.concatenate(found)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Join bytes and words."""
        return b"".join(bytes([token]) if token < 256 else self._words[token - 256] for token in tokens)

    def built(self) -> list[str]:
        """Return the words; latin-1 writes each byte as one character."""
        return [word.decode("latin-1") for word in self._words]


class Tiktoken(Vocabulary):
    """An encoding of tiktoken."""

    def __init__(self, encoding: Any) -> None:
        self._encoding = encoding
        self.name, self.size = f"tiktoken:{encoding.name}", encoding.n_vocab

    def encode(self, text: bytes, where: str) -> Tokens:
        """Let tiktoken divide the text; special tokens are ordinary text here."""
        return np.array(self._encoding.encode_ordinary(whole_text(text, where)), dtype=self.dtype)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Join the bytes of the tokens."""
        return bytes(self._encoding.decode_bytes(list(tokens)))

    def lengths(self) -> NDArray[np.int64]:
        """Return how many bytes each token stands for; numbers without a token stand for none."""
        lengths = np.zeros(self.size, dtype=np.int64)
        for piece in self._encoding.token_byte_values():
            lengths[self._encoding.encode_single_token(piece)] = len(piece)
        return lengths


class Tokenizers(Vocabulary):
    """A tokenizer of Hugging Face's package tokenizers."""

    def __init__(self, path: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.name, self.size = f"tokenizers:{path}", tokenizer.get_vocab_size()

    def encode(self, text: bytes, where: str) -> Tokens:
        """Let the tokenizer divide the text."""
        return np.array(self._tokenizer.encode(whole_text(text, where), add_special_tokens=False).ids, dtype=self.dtype)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Let the tokenizer join the tokens."""
        return str(self._tokenizer.decode(list(tokens))).encode()

    def lengths(self) -> None:
        """Its tokens have no bytes of their own: they may leave out or mark spaces."""
        return None


class Numbers(Vocabulary):
    """Tokens of which only the numbers are known, as in a packed file from elsewhere."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size

    def encode(self, text: bytes, where: str) -> Tokens:
        """Refuse: how to divide text is not known."""
        raise DataError(f"{where} cannot be divided into tokens: only numbers are known of its vocabulary {self.name}.")

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Write the numbers."""
        return " ".join(map(str, tokens)).encode()

    def lengths(self) -> None:
        """Numbers have no length."""
        return None


def make_vocabulary(name: str, train: bytes, test: bytes = b"") -> Vocabulary:
    """Make the vocabulary that `data.vocabulary` names.

    Args:
        name: one of `bigstep.tables.vocabularies.VOCABULARIES`, with what follows a colon.
        train: the training text, from which words are chosen.
        test: the rest of the text, whose characters have to be known as well.
    """
    kind, colon, rest = name.partition(":")
    if kind not in VOCABULARIES:
        raise ConfigError(f"data.vocabulary is {name!r:.80}: {nearest(kind, VOCABULARIES)}")
    entry = VOCABULARIES[kind]
    if (colon and not (rest and entry.after)) or (entry.required and not rest):
        written = f"{kind}:{entry.after}" if entry.after else kind
        raise ConfigError(f"data.vocabulary is {name!r}, but it must be written {written}.")
    made: Vocabulary = load(entry.home)(rest, train, test)
    return made


def restore_vocabulary(name: str, size: int, built: list[Any] | None, where: str) -> Vocabulary:
    """Return the vocabulary kept at `where`: from what was built if it was built, else from its name."""
    if name == Bytes.name:
        return Bytes()
    if built is None:
        return Numbers(name, size)
    kind = name.partition(":")[0]
    if kind == Chars.name and built and all(map(_is_character, built)):
        return Chars(sorted(set(built)))
    if kind == "words" and all(type(word) is str and word and max(word) < "\u0100" for word in built):
        return Words([word.encode("latin-1") for word in built])
    raise DataError(f"{where} holds no vocabulary of characters or words.")


def _is_character(point: Any) -> bool:
    """Whether this is a code point that text can hold: the surrogates are halves of a character."""
    return type(point) is int and 0 <= point <= sys.maxunicode and not 0xD800 <= point <= 0xDFFF


def load_vocabulary(folder: Path) -> Vocabulary | None:
    """Return the vocabulary that a run folder keeps; None if it keeps none."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_bytes())
        name, built = str(kept["name"]), list(kept["tokens"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise DataError(f"{path} is not a vocabulary that a run keeps ({type(error).__name__}).") from None
    return restore_vocabulary(name, 0, built, str(path))


def make_bytes(rest: str, train: bytes, test: bytes = b"") -> Vocabulary:
    """Return the vocabulary of bytes."""
    return Bytes()


def make_chars(rest: str, train: bytes, test: bytes = b"") -> Vocabulary:
    """Collect the characters of a text."""
    seen: set[str] = set()
    for text in (train, test):
        for part in characters(text, "The text"):
            seen.update(part)
    return Chars(sorted(map(ord, seen)))


def make_words(rest: str, train: bytes, test: bytes = b"") -> Vocabulary:
    """Collect the most frequent words of a text; words of equal count in the order of their bytes."""
    if rest and not (rest.isascii() and rest.isdigit() and 256 < int(rest) <= 2**20):
        raise ConfigError(f"data.vocabulary is words:{rest}, but the size must be a number from 257 to 1048576.")
    counts = Counter[bytes]()
    for pieces in pieces_of(train, "The text"):
        counts.update(piece for piece in pieces if len(piece) > 1)
    order = sorted(counts, key=lambda piece: (-counts[piece], piece))
    return Words(order[: int(rest or _WORDS) - 256])


def make_tiktoken(rest: str, train: bytes, test: bytes = b"") -> Vocabulary:
    """Return an encoding of tiktoken."""
    try:
        import tiktoken
    except ImportError:
        raise ConfigError(f"data.vocabulary tiktoken:{rest} needs the package tiktoken; install it.") from None
    try:
        return Tiktoken(tiktoken.get_encoding(rest))
    except ValueError:
        known = nearest(rest, tiktoken.list_encoding_names())
        raise ConfigError(f"tiktoken has no encoding {rest!r}: {known}") from None
    except OSError as error:  # it fetches encodings when they are first used
        raise DataError(f"tiktoken cannot fetch the encoding {rest!r} ({type(error).__name__}).") from None


def make_tokenizers(rest: str, train: bytes, test: bytes = b"") -> Vocabulary:
    """Read a tokenizer.json file."""
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(f"data.vocabulary tokenizers:{rest} needs the package tokenizers; install it.") from None
    try:
        return Tokenizers(rest, tokenizers.Tokenizer.from_file(rest))
    except Exception as error:  # the package raises plain Exception
        raise DataError(f"{rest} is not a tokenizer.json that the package tokenizers can read: {error}.") from None
