"""AdamW: the tuned baseline for sequence models, as `plain` is for images.

Evidence
    Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2017 (arXiv 1711.05101): the rule. Betas 0.9 and
    0.95, decay 0.1, clipping at a norm of 1, warm-up and a cosine: the settings of Brown et al., "Language Models are
    Few-Shot Learners", 2020 (arXiv 2005.14165), for all eight of its models.

    | model      | batch        | peak rate | standing              |
    |------------|--------------|-----------|-----------------------|
    | GPT-3 125M | 0.5 M tokens | 6.0e-4    | table of its settings |
    | GPT-3 350M | 0.5 M tokens | 3.0e-4    | the same              |

Launch
    bigstep train adamw
    bigstep train adamw --data my_text.txt
    bigstep train adamw --preset books --data books.txt --device cuda

Batch
    mini: 4 workers x 4 sequences of 64 bytes = 16, 1,024 tokens; 981 steps an epoch on Shakespeare.
    books: 8 workers x 8 sequences of 256 bytes = 64, 16,384 tokens; --set workers.count=N takes any batch; the rate
    grows with its square root up to 512.

Known
    Betas, decay, clipping and the shapes of the schedule, from Brown et al.; a peak rate that falls with the size of
    the model.

Chosen
    A rate for each of the two models: in mini 13 times that of GPT-3 125M, for one that is 200 times smaller. Matrices
    and tables decay, biases and norms do not. Text as bytes, so that bits per byte need no vocabulary.
    mini: judged on the last tenth of the training text, one seed, in bits per byte. Four rates on a quarter of the
    tokens (benchmarks/sequence/mini.py, the same search as for `lamb`): 2e-3 3.27, 4e-3 3.14, 8e-3 3.14, 16e-3 3.81; of
    the two that are level, 8e-3 is ahead in a longer run: 980 steps of 16 sequences give 2.69 with 4e-3 and 2.64 with
    8e-3, which reaches 2.55 in 1,190. Other long runs of the preset's three blocks: 2,000 steps of 8 with 6e-3, 2.60.
    Four blocks, tried first: 900 steps of 16, 2.83 with 2e-3 and 2.72 with 4e-3; 450 steps of 32, 3.02 and 2.85. Three
    come to the same 2.72 with 4e-3 in three quarters of the time. For comparison, 980 steps of momentum SGD with rate 1
    give 3.28, and counts of pairs of bytes 3.59.
    books: not searched; the rate at 64 is that of a probe at 512 with the same model.

Differs
    Brown et al. decay the rate to a tenth over most of 300 billion tokens; here it falls to 0 at the end of one
    pass or one and a quarter. They grow the batch in the first tokens; it is constant here.
"""

from __future__ import annotations

from dataclasses import replace

from bigstep.config import Published, RunConfig
from bigstep.recipes.presets import BOOKS, SHAKESPEARE
from bigstep.tables.optimizers import AdamWSettings

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "books", "mini"]

SUMMARY = "AdamW on text: decoupled weight decay, clipping, cosine; the baseline of sequence models"
TECHNIQUES = ("AdamW", "gradient clipping", "warm-up", "cosine decay")
PUBLISHED = Published(
    system="AdamW",
    source="Brown et al., Language Models are Few-Shot Learners, 2020, arXiv 2005.14165",
    hardware="V100, how many is not reported",
    batch="0.5 M tokens for GPT-3 125M",
    accuracy=None,
    seconds=None,
    note="The source of betas, decay and clipping; its text and sizes are not those of the presets.",
)


def mini() -> RunConfig:
    """Shakespeare as bytes on two CPU cores."""
    return replace(
        SHAKESPEARE,
        optimizer=AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        lr=replace(SHAKESPEARE.lr, base=8e-3),
    )


def books() -> RunConfig:
    """Books as bytes on one GPU, one pass; add workers for a larger batch (--set workers.count=64)."""
    return replace(
        BOOKS,
        optimizer=AdamWSettings(betas=(0.9, 0.95), weight_decay=0.1, clip=1.0),
        lr=replace(BOOKS.lr, base=1e-3),
    )
