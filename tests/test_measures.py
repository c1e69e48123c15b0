"""What an evaluation tells: sums over samples or tokens, whichever batches they come in."""

from __future__ import annotations

import math

import pytest
import torch

from bigstep.config import LrConfig, Piece
from bigstep.engine.measures import Totals
from bigstep.engine.rates import learning_rate
from bigstep.losses import IGNORED, CrossEntropy

CPU = torch.device("cpu")


def test_top5_counts_the_right_class_among_the_five_highest_scores() -> None:
    scores = torch.zeros(4, 8)
    scores[:, :6] = torch.tensor([6.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    target = torch.tensor([0, 4, 5, 7])  # first, fifth, sixth, last
    totals = Totals(CPU)
    for part in (slice(0, 3), slice(3, 4)):  # unequal batches
        totals.add(scores[part], target[part], CrossEntropy()(scores[part], target[part]))
    found = totals.evaluation()
    assert (found.accuracy, found.top5) == (1 / 4, 2 / 4)
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(scores, target).item(), abs=1e-6)  # float32
    assert "bits_per_byte" not in found.facts()
    five = Totals(CPU)
    five.add(scores[:, :5], target.clamp(max=4), torch.tensor(1.0))
    assert five.evaluation().top5 is None, "among five classes every answer is one of the five"


def test_tokens_count_and_not_sequences_and_padding_counts_for_nothing() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 4, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(8, (3, 4), generator=generator)
    target[1, 1:] = IGNORED
    totals, loss = Totals(CPU, tokens=True), CrossEntropy()
    for part in (slice(0, 1), slice(1, 3)):
        totals.add(scores[part], target[part], loss(scores[part], target[part]))
    totals.add_bytes(torch.tensor([8.0, 2.0, 8.0]))  # two bytes a token
    found, counted = totals.evaluation(), target != IGNORED
    mean = torch.nn.functional.cross_entropy(scores[counted], target[counted]).item()
    assert found.loss == pytest.approx(mean, abs=1e-8)  # the sum is rounded to multiples of 2^-30
    assert found.perplexity == pytest.approx(math.exp(mean), rel=1e-7)
    assert found.bits_per_byte == pytest.approx(mean / math.log(2) / 2, rel=1e-7)
    assert found.accuracy == (scores.argmax(-1) == target)[counted].double().mean().item()
    assert found.top5 is None


@pytest.mark.parametrize("classes", [5, 8])  # as many as rows and columns: shapes alone do not tell where classes lie
def test_pixels_are_scored_where_torch_has_their_classes_and_those_that_are_left_out_count_for_nothing(
    classes: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, classes, 8, 8, generator=generator, dtype=torch.float64)
    target = torch.randint(classes, (6, 8, 8), generator=generator)
    target[:2] = IGNORED  # all of a batch
    target[2, 1:] = IGNORED
    totals = Totals(CPU)
    for part in (slice(0, 2), slice(2, 3), slice(3, 6)):
        totals.add(scores[part], target[part], torch.nn.functional.cross_entropy(scores[part], target[part]))
    found, counted = totals.evaluation(), target != IGNORED
    assert found.samples == 6
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(scores, target).item(), abs=1e-8)
    assert found.accuracy == (scores.argmax(1) == target)[counted].double().mean().item()


def test_warm_up_then_stable_then_decay_is_three_pieces_and_counts_tokens() -> None:
    """An epoch is a pass over the tokens: of 100 million, the rate rises over 2, holds until 80 and ends at 0."""
    rate = LrConfig(
        base=1e-3,
        scaling="none",
        schedule=(
            Piece(shape="warmup", until=0.02, start=0.0),
            Piece(shape="constant", until=0.8),
            Piece(shape="linear", until=1.0, end=0.0),
        ),
    )
    at = learning_rate(rate, 64)
    tokens = {0: 0.0, 1_000_000: 5e-4, 2_000_000: 1e-3, 50_000_000: 1e-3, 90_000_000: 5e-4, 100_000_000: 0.0}
    assert [at(count / 100e6, 64) for count in tokens] == pytest.approx(list(tokens.values()), abs=1e-12)
