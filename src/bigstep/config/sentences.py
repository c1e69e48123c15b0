"""The sentence under each field of a configuration, with the names of the tables filled in."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable
from typing import cast

from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import RUNNABLE
from bigstep.tables.datasets import DATASETS
from bigstep.tables.decoders import DECODERS
from bigstep.tables.methods import ASYNCHRONOUS
from bigstep.tables.models import model_names
from bigstep.tables.optimizers import OPTIMIZERS
from bigstep.tables.precisions import PRECISIONS
from bigstep.tables.schedules import SHAPES

__all__ = ["NAMES", "sentences_of"]

NAMES: dict[str, Iterable[str]] = {
    "optimizers": OPTIMIZERS,
    "shapes": SHAPES,
    "models": model_names(),
    "precisions": PRECISIONS,
    "collectives": RUNNABLE,
    "codecs": CODECS,
    "datasets": DATASETS,
    "decoders": DECODERS,
    "asynchronous": ASYNCHRONOUS,
}
"""What replaces `{optimizers}` and the like in a sentence."""


def sentences_of(cls: type) -> dict[str, str]:
    """Return the string under each field, read from the source of a class and its parents.

    >>> from bigstep.config import LossConfig
    >>> sentences_of(LossConfig)["label_smoothing"]
    'Weight epsilon of the uniform distribution in the target.'
    """
    sentences = {}
    for parent in reversed(cls.__mro__[:-1]):
        body = cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(parent))).body[0]).body
        for statement, follower in zip(body, body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(follower, ast.Expr):
                # one line, however many it has in the source: it becomes a YAML comment and a table cell
                sentence = " ".join(str(cast(ast.Constant, follower.value).value).split())
                for table, names in NAMES.items():
                    sentence = sentence.replace(f"{{{table}}}", ", ".join(names))
                sentences[cast(ast.Name, statement.target).id] = sentence
    return sentences
