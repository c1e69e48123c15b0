"""Figures that the papers print, or that follow from what they print, come out of our schedules and losses."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from bigstep.optim import RMSpropWarmup
from bigstep.schedules import (
    BatchPlan,
    BatchStage,
    Schedule,
    constant,
    elu_blend,
    join,
    linear,
    polynomial,
    scale_lr,
    slow_start,
    step_decay,
    warmup,
)

IMAGES = 1_281_167  # ImageNet's training set


class TestGoyal:
    """Goyal et al., Accurate, Large Minibatch SGD, 2017."""

    BATCH = 8192
    lr = staticmethod(join((5, warmup(0.1, scale_lr(0.1, BATCH), until=5)), (90, step_decay(3.2, at=(30, 60, 80)))))

    @pytest.mark.parametrize(
        ("batch", "rate"),
        [(128, 0.05), (256, 0.1), (512, 0.2), (1024, 0.4), (2048, 0.8), (4096, 1.6), (8192, 3.2), (16384, 6.4),
         (32768, 12.8), (65536, 25.6)],
    )  # fmt: skip
    def test_linear_scaling_gives_every_rate_of_the_table_of_batches(self, batch: int, rate: float) -> None:
        assert scale_lr(0.1, batch) == pytest.approx(rate, rel=1e-12)

    def test_the_square_root_rule_they_compare_with(self) -> None:
        assert scale_lr(0.1, self.BATCH, rule="sqrt") == pytest.approx(0.1 * math.sqrt(32), rel=1e-12)

    def test_warm_up_rises_from_0_1_to_3_2_by_equal_increments_over_782_iterations(self) -> None:
        per_epoch = IMAGES / self.BATCH
        assert math.ceil(5 * per_epoch) == 782
        rates = [self.lr(step / per_epoch) for step in range(783)]
        increments = [later - earlier for earlier, later in zip(rates[:781], rates[1:782], strict=True)]
        assert rates[0] == 0.1
        assert increments == pytest.approx([3.1 / (5 * per_epoch)] * 781, rel=1e-9)  # differences of rounded numbers
        assert rates[781] < 3.2
        assert rates[782] == pytest.approx(3.2, rel=1e-12)

    def test_the_rate_falls_by_ten_at_epochs_30_60_and_80(self) -> None:
        for epoch, rate in ((5, 3.2), (29.99, 3.2), (30, 0.32), (59.99, 0.32), (60, 0.032), (80, 0.0032), (90, 0.0032)):
            assert self.lr(epoch) == pytest.approx(rate, rel=1e-12)


class TestAkiba:
    """Akiba, Suzuki, Fukuda, Extremely Large Minibatch SGD, 2017."""

    def test_the_slow_start_at_1024_workers_of_32(self) -> None:
        peak = scale_lr(0.1, BatchStage(0, 1024, 32).batch)
        assert peak == pytest.approx(12.8, rel=1e-12)
        lr = slow_start(peak)
        for first, last, rate in ((0, 39, 6.4), (40, 69, 0.96), (70, 84, 0.128), (85, 89, 0.0128)):
            assert lr(first) == pytest.approx(rate, rel=1e-12)
            assert lr(last + 0.999) == pytest.approx(rate, rel=1e-12)

    @pytest.mark.parametrize(
        ("epoch", "weight"),
        [(0, 0.00916), (5, 0.0677), (9, 0.335), (10, 0.5), (11, 0.7), (12, 0.9), (12.5, 1.0), (90, 1.0)],
    )
    def test_the_weight_of_sgd(self, epoch: float, weight: float) -> None:
        assert elu_blend(epoch) == pytest.approx(weight, rel=2e-3)  # three digits are given

    def test_the_printed_slope_would_overshoot_to_one_and_a_half(self) -> None:
        """Why the slope is 1 / period: with the printed 2 / period the weight ends its line at 1.5."""
        assert 0.5 + 2 / 5 * (12.5 - 10) == 1.5
        assert max(elu_blend(step / 1000) for step in range(20_000)) == 1.0

    def test_the_published_constants_are_the_defaults(self) -> None:
        defaults = RMSpropWarmup([torch.nn.Parameter(torch.zeros(1))], lr=6.4).defaults
        published = {"momentum": 0.9, "rms_decay": 0.99, "rms_lr": 3e-4, "eps": 1e-8}
        assert {name: defaults[name] for name in published} == published


class TestGoogle:
    """The learning rates of Google's TPU ResNet: straight to P over W epochs, then P * (1 - t)^2 to the end."""

    TABLE = [
        # P, W, then the rate at epoch W / 2, at W, midway between W and 90, at 90
        (10.0, 5, 5.0, 10.0, 2.5, 0.0),
        (25.0, 5, 12.5, 25.0, 6.25, 0.0),
        (34.0, 12, 17.0, 34.0, 8.5, 0.0),
        (41.0, 16, 20.5, 41.0, 10.25, 0.0),
        (32.0, 14, 16.0, 32.0, 8.0, 0.0),
        (31.2, 25, 15.6, 31.2, 7.800075, 1e-4),  # MLPerf: ends at 1e-4
    ]

    @pytest.mark.parametrize(("peak", "epochs", "half", "full", "midway", "last"), TABLE)
    def test_every_row_of_the_table(
        self, peak: float, epochs: float, half: float, full: float, midway: float, last: float
    ) -> None:
        lr = join((epochs, warmup(0, peak, until=epochs)), (90, polynomial(peak, last, begin=epochs, until=90)))
        at = (0, epochs / 2, epochs, (epochs + 90) / 2, 90)
        assert [lr(epoch) for epoch in at] == pytest.approx([0.0, half, full, midway, last], rel=1e-12)


class TestFastAi:
    """fast.ai and DIUx, ImageNet in 18 minutes, 2018: the schedule on sixteen machines, 128 GPUs."""

    L = 0.24 * 8
    lr: Schedule = staticmethod(
        join(
            (6, linear(L, 2 * L, begin=0, until=6)),
            (11, constant(2 * L)),
            (14, linear(2 * L, L, begin=11, until=14)),
            (17, constant(L)),
            (23, linear(L, L / 10 * 3.5, begin=17, until=23)),
            (29, linear(L / 10 * 3.5, L / 100 * 3.5, begin=23, until=29)),
            (37, linear(L / 100, L / 1000, begin=29, until=37)),
            (40, constant(L / 1000)),
        )
    )
    plan = BatchPlan(
        (
            BatchStage(0, 128, 64),
            BatchStage(6, 128, 128),
            BatchStage(14, 128, 64),
            BatchStage(17, 128, 224),
            BatchStage(29, 128, 128),
        )
    )

    @pytest.mark.parametrize(
        ("epoch", "rate", "batch"),
        [
            (0, 1.92, 8_192),
            (3, 2.88, 8_192),
            (6, 3.84, 16_384),
            (10.9, 3.84, 16_384),
            (12.5, 2.88, 16_384),
            (14, 1.92, 8_192),
            (17, 1.92, 28_672),
            (20, 1.296, 28_672),
            (23, 0.672, 28_672),
            (26, 0.3696, 28_672),
            (29, 0.0192, 16_384),
            (33, 0.01056, 16_384),
            (37, 0.00192, 16_384),
            (39.9, 0.00192, 16_384),
        ],
    )
    def test_rate_and_batch_at_every_phase(self, epoch: float, rate: float, batch: int) -> None:
        assert self.lr(epoch) == pytest.approx(rate, rel=1e-12)
        assert self.plan.at(epoch).batch == batch

    def test_the_largest_batch_is_in_the_phase_of_full_images(self) -> None:
        assert (self.plan.largest.epoch, self.plan.largest.batch) == (17, 28_672)


class TestMikami:
    """Mikami et al., Massively Distributed SGD, first version, 2018: 34K grows to 68K on 2176 GPUs."""

    def test_k_is_1024_in_the_batches_of_the_title_run(self) -> None:
        plan = BatchPlan((BatchStage(0, 2176, 16), BatchStage(30, 2176, 32)))
        assert [stage.batch for stage in plan.stages] == [34 * 1024, 68 * 1024]


class TestSzegedy:
    """Label smoothing, Szegedy et al., Rethinking the Inception Architecture, 2015, section 7."""

    def test_the_smallest_reachable_loss_of_1000_classes_is_1_0148(self) -> None:
        target = torch.tensor([3])
        smoothed = torch.full((1, 1000), 0.1 / 1000, dtype=torch.float64)
        smoothed[0, 3] += 0.9
        floor = F.cross_entropy(smoothed.log(), target, label_smoothing=0.1)
        assert float(floor) == pytest.approx(1.0148, abs=5e-5)  # four decimals are given
        generator = torch.Generator().manual_seed(0)
        for _ in range(20):  # no other prediction comes below it
            other = smoothed.log() + 0.1 * torch.randn(1, 1000, generator=generator, dtype=torch.float64)
            assert F.cross_entropy(other, target, label_smoothing=0.1) > floor
