"""The reference of all names and fields: `python -m bigstep.config.reference > docs/configuration.md`."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from bigstep.config.data import Resize
from bigstep.config.methods import OuterConfig
from bigstep.config.rate import Piece, RateGroup
from bigstep.config.schema import RunConfig, Stage
from bigstep.config.sentences import sentences_of
from bigstep.config.text import in_one_line
from bigstep.tables.codecs import CODECS
from bigstep.tables.collectives import COLLECTIVES
from bigstep.tables.datasets import DATASETS
from bigstep.tables.decoders import DECODERS
from bigstep.tables.methods import METHODS
from bigstep.tables.models import FORMS, MODELS
from bigstep.tables.optimizers import OPTIMIZERS, OptimizerConfig
from bigstep.tables.own_rule import FORM, OWN
from bigstep.tables.precisions import PRECISIONS
from bigstep.tables.schedules import SHAPES
from bigstep.tables.vocabularies import VOCABULARIES
from bigstep.validate import speak

__all__ = ["reference"]

OPENING = """\
# Configuration: names and fields

Generated from the tables and the schema by `python -m bigstep.config.reference > docs/configuration.md`; a test fails
if it is out of date. A recipe is a complete configuration: `bigstep recipes sony --yaml` prints one with these
sentences as comments, `--config FILE` reads it back, and `--set lr.base=0.2` changes one field. `--config` also takes
the folder of an earlier run, to start the same run again.

`--epochs` stretches a run: schedule, batch plan (with `plan: auto` its `growth.every`), image sizes, the transition of
the RMSprop warm-up, the uncompressed first steps, the beginning of islands and Downpour's warm start keep their places
in it. What `--set` gives is not stretched, nor are intervals of meetings, evaluations and checkpoints.

A resumed run may change `data.path`, `data.loaders`, `data.decoder`, `exchange.grid`, `checkpoint` and `kernels`,
which do not decide its path (another decoder changes the last bit of some pixels); everything else must be as it was.

Epochs count passes over the training set and may be fractions, so they express schedules in tokens too: a warm-up over
the first 10 of 500 million tokens ends at epoch 0.02.

A model, data set, update rule or loss of your own is named `package.module:name`; installed packages may add names to
these tables ([extending.md](extending.md)).

## Names
"""
KINDS: dict[str, tuple[str, Mapping[str, Any]]] = {
    "optimizer.name": ("Update rules", {**OPTIMIZERS, FORM: OWN}),
    "lr.schedule": ("Shapes of a schedule's pieces", SHAPES),
    "model": ("Models", {**MODELS, **FORMS}),
    "data.name": ("Data sets", DATASETS),
    "data.decoder": ("Decoders of image files", DECODERS),
    "data.vocabulary": ("Vocabularies of text", VOCABULARIES),
    "exchange.collective": ("Collectives", COLLECTIVES),
    "exchange.codec": ("Codecs", CODECS),
    "islands, asynchronous.method": ("Methods: ways of taking a step", METHODS),
    "precision": ("Precisions", PRECISIONS),
}
"""Each table, by the field that takes its names."""
LISTED = {
    "plan": Stage, "lr.schedule": Piece, "lr.groups": RateGroup, "data.sizes": Resize, "islands.outer": OuterConfig,
}  # fmt: skip
"""Fields whose values have fields of their own."""


def reference() -> str:
    """Return the reference as Markdown."""
    return "\n".join([OPENING, *_names(), "## Fields\n", *_fields()])


def _names() -> Iterator[str]:
    for field, (title, table) in KINDS.items():
        yield from (f"### {title} (`{field}`)\n", "| name | what it is |", "|---|---|")
        yield from (f"| `{name}` | {_about(entry)} |" for name, entry in table.items())
        yield ""


def _about(entry: Any) -> str:
    """The sentence of an entry, and what it goes with."""
    words = [str(entry.about).rstrip(".")]
    if methods := getattr(entry, "methods", None):
        words.append(f"with {', '.join(methods)}")
    if getattr(entry, "input", "any") != "any":
        words.append(f"for {entry.input}" if entry in MODELS.values() else str(entry.input))
    if not getattr(entry, "home", "here"):
        words.append("for the planner only")
    return "; ".join(words)


def _fields() -> Iterator[str]:
    sections = {field.name: typing.get_type_hints(RunConfig)[field.name] for field in dataclasses.fields(RunConfig)}
    nested = {name: cls for name, cls in sections.items() if dataclasses.is_dataclass(cls)}
    yield from _section("a run", RunConfig, leave_out=set(nested))
    for name, cls in nested.items():
        if cls is not OptimizerConfig:
            yield from _section(name, cls)
    for name, cls in LISTED.items():
        yield from _section(name, cls)
    yield from _section("optimizer", OptimizerConfig)
    common = {field.name for field in dataclasses.fields(OptimizerConfig)}
    for name, entry in {**OPTIMIZERS, FORM: OWN}.items():
        yield from _section(f"optimizer, name: {name}", entry.settings, leave_out=common)


def _section(name: str, cls: Any, leave_out: Iterable[str] = ()) -> Iterator[str]:
    sentences, hints = sentences_of(cls), typing.get_type_hints(cls, include_extras=True)
    yield from (f"### `{name}`\n" if name != "a run" else "### A run\n", "| field | takes | default | meaning |")
    yield "|---|---|---|---|"
    for field in dataclasses.fields(cls):
        if field.name not in leave_out:
            takes, sentence = _takes(hints[field.name]), sentences[field.name]
            yield f"| `{field.name}` | {takes} | {_default(field)} | {sentence} |"
    yield ""


def _takes(hint: Any) -> str:
    bounds = [mark.words for mark in getattr(hint, "__metadata__", ())]
    return "; must ".join([speak(hint), *bounds])


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "" if field.default_factory is dataclasses.MISSING else "see below"
    return f"`{in_one_line(field.default)}`"


if __name__ == "__main__":
    print(reference(), end="")
