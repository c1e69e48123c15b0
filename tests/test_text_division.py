"""Where a text is cut, in two or to be read in parts, and what its numbers can mean where only they are kept."""

from __future__ import annotations

import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bigstep.data import text_parts
from bigstep.data.catalog import open_data
from bigstep.data.text import divide
from bigstep.data.vocabulary import make_vocabulary
from bigstep.errors import DataError


@pytest.mark.parametrize("vocabulary", ["chars", "words"])
@pytest.mark.parametrize("more", range(4))
def test_a_text_is_never_cut_within_a_character(vocabulary: str, more: int, tmp_path: Path) -> None:
    """Of three bytes each: whatever the length, a cut at nine tenths of the bytes lies within one sooner or later."""
    text = "天地玄黄 宇宙洪荒 日月盈昃 " * 40 + "a" * more
    path = tmp_path / "thousand.txt"
    path.write_text(text, encoding="utf-8")
    pair = open_data("text", str(path), length=8, vocabulary=vocabulary)
    assert (
        pair.train.vocabulary.decode(pair.train.tokens) + pair.test.vocabulary.decode(pair.test.tokens)
    ).decode() == text
    train, test = divide([text.encode()])
    assert "".join((train.decode(), test.decode())) == text
    assert abs(len(test) / len(train + test) - 0.1) < 4 / len(train + test) + 1e-9


def test_bytes_that_are_no_characters_are_cut_where_they_were() -> None:
    assert [len(part) for part in divide([b"\x80" * 100])] == [90, 10]


@pytest.mark.parametrize("vocabulary", ["chars", "words", "words:512"])
def test_numbers_alone_have_no_vocabulary_that_is_built_from_a_text(vocabulary: str, tmp_path: Path) -> None:
    """Words of none would be bytes, and every number below 256 would silently count as one."""
    np.save(tmp_path / "numbers.npy", (np.arange(400) % 50).astype(np.uint16))
    with pytest.raises(DataError, match=f"does not keep the text from which data.vocabulary={vocabulary} would be"):
        open_data("tokens", str(tmp_path / "numbers.npy"), length=8, vocabulary=vocabulary)


def divided(vocabulary: str, text: bytes) -> tuple[object, object]:
    """What a vocabulary makes of a text, or the sentence with which it refuses it."""
    try:
        made = make_vocabulary(vocabulary, text)
        return made.built(), made.encode(text, "here").tolist()
    except DataError as error:
        return "refused", str(error)


@pytest.mark.parametrize("vocabulary", ["chars", "words"])
def test_a_text_in_parts_is_what_it_is_at_once(vocabulary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chance = random.Random(0)
    pieces = [
        b" ",
        b"  ",
        b"to",
        b"be",
        b", ",
        b"\n",
        "ä".encode(),
        "地".encode(),
        "😀".encode(),
        b"x" * 30,
        b"\x80",
        b"\xf0",
    ]
    likely = [6] * 10 + [0.03] * 2  # the last two are no UTF-8: some texts are refused, and where is told alike
    for _ in range(200):
        text = b"".join(chance.choices(pieces, likely, k=chance.randrange(1, 60)))
        expected = divided(vocabulary, text)
        for at_once in (4, 5, 11, 64):
            with monkeypatch.context() as parts:
                parts.setattr(text_parts, "_AT_ONCE", at_once)
                assert divided(vocabulary, text) == expected, (text, at_once)


@pytest.mark.parametrize("vocabulary", ["chars", "words"])
def test_dividing_a_text_takes_little_more_than_its_tokens(vocabulary: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_parts, "_AT_ONCE", 2**14)
    chance = random.Random(0)
    text = " ".join(f"{chance.randrange(10**4)}" for _ in range(200_000)).encode()
    tracemalloc.start()
    try:
        made = make_vocabulary(vocabulary, text)
        tokens = made.encode(text, "here")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # the tokens twice, while their parts are joined; some megabytes of ten thousand words and their counts
    assert peak < 2 * tokens.nbytes + 2**22
