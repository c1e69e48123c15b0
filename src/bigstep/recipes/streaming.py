"""Streaming DiLoCo: parts of the network meet in turn, in four bits, while the islands compute on.

Evidence
    Douillard et al., "Streaming DiLoCo with overlapping communication", 2025 (arXiv 2501.18512), a model of a billion
    weights:

    | figure             | data parallel | Streaming DiLoCo | standing                  |
    |--------------------|---------------|------------------|---------------------------|
    | loss               | 2.67          | 2.66             | its table                 |
    | bytes sent         | 441 TB        | 1.10 TB          | its table                 |
    | hours at 1 Gbit/s  | 109           | 0.88             | its own simulation        |

Launch
    bigstep train streaming
    bigstep train streaming --preset books --data books.txt --device cuda
    bigstep train streaming --set islands.overlap=5 --set islands.codec=int8

Batch
    As in `diloco`: 16 sequences in mini and 64 on books, on 4 islands.

Known
    Fragments that meet every H steps, each at another time; a mean that arrives some steps late and with which an
    island mixes its weights half and half (alpha = 0.5); four bits a value; inner and outer optimizer as in DiLoCo.

Chosen
    Three fragments and two steps of travel in mini, where a step is short; three and five on books, two blocks each.

Differs
    A fragment is a sequence of neighbouring parameters with about a third of the weights; the paper prefers layers
    taken in strides. The four bits are integers with a scale for each block, and what they lose is kept for the next
    meeting; the paper's are small floats, and what they lose is lost.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import Published, RunConfig
from bigstep.recipes import diloco

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "books", "mini"]

SUMMARY = "Streaming DiLoCo: fragments meet in turn, in four bits, while the islands compute on"
TECHNIQUES = ("islands", "fragments", "meetings behind computation", "int4 with error feedback", "AdamW")
PUBLISHED = Published(
    system="Streaming DiLoCo",
    source="Douillard et al., Streaming DiLoCo with overlapping communication, 2025, arXiv 2501.18512",
    hardware="simulated links",
    batch="1.10 TB sent instead of 441",
    accuracy=None,
    seconds=None,
    note="Loss 2.66 against 2.67 of data parallel training, a billion weights.",
)


def mini() -> RunConfig:
    """Shakespeare as bytes on two CPU cores."""
    config = diloco.mini()
    return replace(config, islands=replace(config.islands, fragments=3, overlap=2, codec="int4"))


def books() -> RunConfig:
    """Books as bytes on one GPU, one pass; add workers for a larger batch (--set workers.count=64)."""
    config = diloco.books()
    return replace(config, islands=replace(config.islands, fragments=3, overlap=5, codec="int4"))
