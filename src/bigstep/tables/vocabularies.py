"""Vocabularies by name: how text becomes numbers. What follows a colon belongs to the kind, as in words:4096."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["VOCABULARIES", "VocabularyKind"]


@dataclass(frozen=True, kw_only=True)
class VocabularyKind:
    """A way to divide text into tokens."""

    about: str
    """What a token is."""
    home: str
    """The function that makes it: (what follows the colon, training text, test text) -> Vocabulary."""
    after: str = ""
    """What may follow the colon."""
    required: bool = False
    """Whether something must follow it."""


VOCABULARIES: dict[str, VocabularyKind] = {
    "bytes": VocabularyKind(
        about="The 256 bytes: works for any file.",
        home="bigstep.data.vocabulary:make_bytes",
    ),
    "chars": VocabularyKind(
        about="The characters that occur in the text.",
        home="bigstep.data.vocabulary:make_chars",
    ),
    "words": VocabularyKind(
        about="The most frequent words of the training text, 8,192 tokens in all unless a number says otherwise; "
        "rarer words are spelled in bytes.",
        home="bigstep.data.vocabulary:make_words",
        after="SIZE",
    ),
    "tiktoken": VocabularyKind(
        about="An encoding of the package tiktoken, such as gpt2.",
        home="bigstep.data.vocabulary:make_tiktoken",
        after="NAME",
        required=True,
    ),
    "tokenizers": VocabularyKind(
        about="A tokenizer.json file, read by the package tokenizers.",
        home="bigstep.data.vocabulary:make_tokenizers",
        after="PATH",
        required=True,
    ),
}
"""The kinds of vocabulary that `data.vocabulary` may name."""
