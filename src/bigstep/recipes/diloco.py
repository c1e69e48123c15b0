"""DiLoCo: islands take H steps of AdamW; the mean of their movements is the gradient of an outer Nesterov step.

Evidence
    Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023 (arXiv 2311.08105).
    Perplexity of a model of 150 million weights on C4:

    | run                                  | perplexity | standing   |
    |--------------------------------------|------------|------------|
    | one worker                           | 16.23      | its table  |
    | data parallel with 8 times the batch | 15.30      | its table  |
    | 8 islands, H = 500                   | 15.02      | its table  |
    | H = 1,000 instead of 50              | + 2.9 %    | its text   |
    | half of the exchanges lost           | + 2.1 %    | its text   |

    Charles et al., "Communication-Efficient Language Model Training Scales Reliably and Robustly", 2025 (arXiv
    2503.09799), H = 30: a small model loses more with more islands (35 million weights: 3.485 data parallel, 3.508,
    3.554 and 3.621 with 2, 4 and 8), a large one hardly loses (2.4 billion: 2.326; 2.323, 2.332, 2.351).

Launch
    bigstep train diloco
    bigstep train diloco --procs 2 --set islands.every=50
    bigstep train diloco --preset books --data books.txt --device cuda

Batch
    mini: 4 workers x 4 sequences of 64 bytes on 4 islands: 16 in all, 4 an island; 490 steps.
    books: 8 workers x 8 sequences of 256 bytes on 4 islands: 64 in all; --set workers.count=N takes any batch.

Known
    Inner AdamW, whose state stays with its island; outer Nesterov momentum 0.9 with a constant rate of 0.7; the inner
    schedule counts all inner steps. Betas, decay and clipping are those of `adamw`.

Chosen
    H = 30 on books, as in the scaling laws, and 20 in mini: a run of hundreds of steps needs more frequent meetings
    than one of 88,000. Both are synchronous for the first quarter. mini is half an epoch, which keeps it under two
    minutes on two cores.
    mini: an outer momentum of 0.5. A GPT of 120,000 weights, four islands from the start, H = 20, 100 steps, judged on
    the last tenth of the training text, one seed: 3.99 bits per byte with 0.9, 3.77 with 0.5. A run of twenty meetings
    is too short for a momentum that averages over ten. books: not searched.

Differs
    The synchronous beginning stands in for the pre-trained weights from which the paper's replicas start. Islands share
    one text and one order of samples; each takes its own part of every batch.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import IslandsConfig, OuterConfig, Published, RunConfig
from bigstep.config.edit import stretch
from bigstep.recipes import adamw

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "books", "mini"]

SUMMARY = "DiLoCo: islands with AdamW of their own, an outer Nesterov step every H steps"
TECHNIQUES = ("islands", "outer Nesterov momentum", "AdamW", "gradient clipping", "warm-up", "cosine decay")
PUBLISHED = Published(
    system="DiLoCo",
    source="Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models, 2023, "
    "arXiv 2311.08105",
    hardware="not compared",
    batch="8 islands, H = 500",
    accuracy=None,
    seconds=None,
    data="C4",
    note="Perplexity 15.02 against 15.30 of data parallel training, 150 million weights.",
)


def mini() -> RunConfig:
    """Shakespeare as bytes on two CPU cores."""
    islands = IslandsConfig(count=4, every=20, outer=OuterConfig(name="nesterov", lr=0.7, momentum=0.5), begin=0.125)
    return replace(stretch(adamw.mini(), 0.5), islands=islands)


def books() -> RunConfig:
    """Books as bytes on one GPU, one pass; add workers for a larger batch (--set workers.count=64)."""
    islands = IslandsConfig(count=4, every=30, outer=OuterConfig(name="nesterov", lr=0.7, momentum=0.9), begin=0.25)
    return replace(adamw.books(), islands=islands)
