"""Where a text is cut in two, and what its numbers can mean where only they are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bigstep.data.catalog import open_data
from bigstep.data.text import divide
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
