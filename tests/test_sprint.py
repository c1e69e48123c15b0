"""What lets CIFAR-10 be learned in seconds: whitened patches, flips that alternate, views, a preset that holds them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bigstep import recipes
from bigstep.config import DataConfig, LrConfig, RunConfig, WorkersConfig
from bigstep.config.edit import stretch
from bigstep.config.text import apply_settings
from bigstep.data import TensorImages
from bigstep.data.augment import Augment, alternating_flip
from bigstep.engine.views import views_of
from bigstep.errors import ConfigError
from bigstep.gpu import optimize
from bigstep.models import build_model
from bigstep.models.conv8 import EPS, Whitening
from bigstep.optim import parameter_groups
from bigstep.records import read_run
from bigstep.train import fit


def correlated_images(count: int, side: int = 16, seed: int = 0) -> torch.Tensor:
    """Smooth images of three channels that go along with one another, as photographs have them."""
    noise = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(seed))
    smooth = noise.cumsum(2).cumsum(3) + 3 * noise.sum(1, keepdim=True)
    return (smooth - smooth.amin()) / (smooth.amax() - smooth.amin())


def image_set(count: int, seed: int) -> TensorImages:
    images = (255 * correlated_images(count, seed=seed)).to(torch.uint8)
    labels = (images.float().mean((1, 2, 3)) > images.float().mean()).long()
    return TensorImages(images=images, labels=labels, classes=("a", "b"), mean=(0.5,) * 3, std=(0.2,) * 3, name="tiny")


DATA = image_set(64, 0), image_set(40, 1)
CONFIG = RunConfig(
    model="conv8",
    data=DataConfig(augment="crop_alternate", shift=2),
    workers=WorkersConfig(count=2, local_batch=16),
    epochs=1,
    lr=LrConfig(base=0.01),
)


def test_patches_are_uncorrelated_and_of_equal_variance_with_both_signs() -> None:
    images = correlated_images(200).double()
    layer = Whitening(channels=3).double()
    layer.see(images)
    seen = layer(images).detach().transpose(0, 1).flatten(1)
    one, other = seen[:12], seen[12:]
    torch.testing.assert_close(one, -other)
    patches = nn.functional.unfold(images, 2).transpose(0, 1).flatten(1)
    variances = torch.linalg.eigvalsh(torch.cov(patches))
    # E' x / sqrt(v + eps) has the variance v / (v + eps), and no covariance
    torch.testing.assert_close(torch.cov(one), torch.diag(variances / (variances + EPS)), rtol=1e-8, atol=1e-8)
    assert not layer.filters.requires_grad


def test_images_pass_the_convolutions_as_they_are_at_first() -> None:
    torch.manual_seed(0)
    model = build_model("conv8", classes=10, channels=3, image_size=16)
    first, last = (layer for index, layer in enumerate(model) if index in (2, 6))
    maps = torch.randn(2, 24, 9, 9)
    torch.testing.assert_close(first(maps)[:, :24], maps)
    maps = torch.randn(2, 64, 9, 9)
    torch.testing.assert_close(last(maps), maps)


def test_a_gpu_finds_all_its_norms_fused() -> None:
    model = build_model("conv8", classes=10, channels=3, image_size=32)
    report = optimize(model)
    assert (len(report.fused), report.left) == (6, {})


def test_muon_takes_the_six_convolutions_and_biases_have_a_rate_of_their_own() -> None:
    model = build_model("conv8", classes=10, channels=3, image_size=32)
    config = recipes.load("muon", "sprint")
    groups = parameter_groups(model, 0.0, {group.names: group.factor for group in config.lr.groups})
    shapes = {
        (kind, group.get("rate", 1)): sum(each == kind for each in group["kind"])
        for group in groups
        for kind in group["kind"]
    }
    # the head and six factors of norms; seven biases: of six norms and of the whitening
    assert shapes == {("matrix", 1): 6, ("rest", 1): 6, ("rest", 16): 7}


def test_two_epochs_show_each_image_both_ways() -> None:
    images, indices = torch.arange(4 * 100.0).view(100, 1, 1, 4), torch.arange(100)
    shown = [alternating_flip(images, indices, seed=3, epoch=epoch) for epoch in range(4)]
    mirrored = [(each != images).flatten(1).any(1) for each in shown]
    assert torch.equal(mirrored[0], ~mirrored[1])
    assert torch.equal(mirrored[0], mirrored[2])
    assert 30 < int(mirrored[0].sum()) < 70  # four deviations around a half


@pytest.mark.parametrize("shift", [0, 2])
def test_shifts_are_as_far_as_asked_for(shift: int) -> None:
    images = torch.zeros(200, 1, 9, 9, dtype=torch.uint8)
    images[:, :, 4, 4] = 255
    augment = Augment(kind="crop_alternate", shift=shift, mean=(0.0,), std=(1.0,))
    places = augment(images, torch.arange(200), epoch=1).flatten(1).argmax(1)
    rows, columns = places // 9, places % 9
    for place in (rows, columns):
        assert (int(place.min()), int(place.max())) == (4 - shift, 4 + shift)


def test_six_views_are_the_image_its_mirror_and_shifts_of_both() -> None:
    images = torch.arange(25.0).view(1, 1, 5, 5)
    views = list(views_of(images, 6))
    assert [weight for weight, _ in views] == [0.25] * 2 + [0.125] * 4
    up_left, down_right = views[2][1], views[3][1]
    assert torch.equal(up_left[..., 1:, 1:], images[..., :-1, :-1])
    assert torch.equal(down_right[..., :-1, :-1], images[..., 1:, 1:])
    assert torch.equal(views[4][1][..., 1:, 1:], images.flip(3)[..., :-1, :-1])
    with pytest.raises(ConfigError, match="no images: use evaluate_views=1"):
        next(views_of(torch.zeros(2, 7, dtype=torch.int64), 2))


class LeftHalf(nn.Module):
    """Says "a point" if the left half of an image is bright; surer of it than of the other answer."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return two scores."""
        bright = x[:, 0, :, :4].sum((1, 2)) + 0 * self.unused
        return torch.stack([torch.full_like(bright, 0.25), bright], 1)


def test_views_are_told_beside_the_accuracy_of_one(tmp_path: Path) -> None:
    """Half of the points are on the left; of every image or its mirror image one has it there."""
    pixels = torch.zeros(40, 1, 8, 8, dtype=torch.uint8)
    pixels[:20, 0, 3, 1], pixels[20:, 0, 3, 6] = 255, 255
    data = TensorImages(
        images=pixels, labels=torch.ones(40, dtype=torch.int64), classes=("dark", "a point"), mean=(0.0,), std=(1.0,),
        name="points",
    )  # fmt: skip
    for views in (1, 2, 6):
        config = replace(CONFIG, evaluate_views=views, data=DataConfig(), lr=LrConfig(base=1e-9))
        facts = fit(config, model=LeftHalf(), data=(data, data), out=tmp_path / str(views)).facts
        assert (facts["accuracy"], facts.get("accuracy_views")) == (0.5, 1.0 if views > 1 else None)


def test_views_of_what_is_no_image_are_refused_before_the_first_step(tmp_path: Path) -> None:
    config = apply_settings(recipes.load("adamw"), ["evaluate_views=6"])
    with pytest.raises(ConfigError, match="evaluate_views is 6, but text has no mirror image"):
        fit(config, out=tmp_path / "run", device="cpu", max_steps=1)
    rows = TensorDataset(torch.zeros(64, 5), torch.zeros(64, dtype=torch.int64))
    config = replace(CONFIG, evaluate_views=2, data=DataConfig(), epochs=2)
    with pytest.raises(ConfigError, match=r"evaluate_views is 2, but samples of shape \(5,\) have no mirror image"):
        fit(config, model=nn.Linear(5, 2), data=(rows, rows), out=tmp_path / "rows", device="cpu")
    assert not list(tmp_path.rglob("metrics.jsonl"))


def first_filters(folder: str, ranks: int) -> list[float]:
    result = fit(replace(CONFIG, epochs=0.5), data=DATA, out=folder)
    assert result.facts["ranks"] == ranks
    return [result.loss, result.facts["eval_loss"]]


def test_ranks_begin_with_the_same_filters_and_take_the_same_path(world: Any, tmp_path: Path) -> None:
    alone = first_filters(str(tmp_path / "one"), 1)
    for shared in world(2).run(first_filters, str(tmp_path / "two"), 2):
        assert shared == pytest.approx(alone, rel=1e-4)  # float32 sums in another order


def test_noise_is_not_measured_where_that_is_not_wanted(tmp_path: Path) -> None:
    result = fit(replace(CONFIG, measure_noise=False), data=DATA, out=tmp_path / "run")
    assert result.facts["noise_scale"] is None
    assert not any("noise_scale" in row for row in read_run(tmp_path / "run").rows)
    with pytest.raises(ConfigError, match="measure_noise=false"):
        replace(CONFIG, measure_noise=False, plan="auto")


def test_the_preset_holds_what_a_sprint_needs() -> None:
    config = recipes.load("muon", "sprint")
    assert (config.model, config.batch, config.precision, config.measure_noise) == ("conv8-wide", 2048, "fp16", False)
    assert config.checkpoint.every == config.checkpoint.seconds == 0
    assert config.evaluate_every >= config.epochs  # once, at the end


def test_the_rates_of_the_preset_are_stable_and_learn(tmp_path: Path) -> None:
    small = apply_settings(recipes.load("muon", "sprint"), ["workers.count=1", "workers.local_batch=32"])
    config = stretch(small, 8)
    unscaled = replace(config.lr, scaling="none")  # the rates of 2,048 images, for a batch of 32: harder than they are
    result = fit(replace(config, precision="float32", lr=unscaled), data=DATA, out=tmp_path / "run")
    losses = [row["loss"] for row in read_run(tmp_path / "run").rows if row["kind"] == "train"]
    assert result.steps == 16
    # of two classes ln 2 = 0.69 at first; with a smoothing of 0.2 no loss is below 0.325 (measured at the end: 0.336)
    assert max(losses) < 2.0
    assert sum(losses[-4:]) / 4 < 0.55
    assert result.loss < 0.4
