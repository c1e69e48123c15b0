"""Recipes for images that are asked for a model of tokens: they run on text, and say plainly what they do there."""

from __future__ import annotations

from pathlib import Path

import pytest

from bigstep import recipes
from bigstep.cli.resolve import job_of
from bigstep.cli.train import Train
from bigstep.engine.rates import learning_rate
from bigstep.errors import ConfigError
from bigstep.records import read_run
from bigstep.tables.datasets import DATASETS
from bigstep.train import fit

OF_IMAGES = (*recipes.SYNCHRONOUS, *recipes.HUGE, "localsgd", "postlocal")


@pytest.mark.parametrize("name", OF_IMAGES)
def test_every_synchronous_recipe_takes_a_gpt_and_says_what_it_does_there(name: str) -> None:
    images = recipes.load(name)
    job = job_of(Train(recipe=name, settings=["model=gpt-mini"]), launched=False)
    text = job.config
    assert (text.model, text.data.name, text.data.augment, text.data.sizes) == ("gpt-mini", "shakespeare", "none", ())
    assert (text.optimizer.name, text.exchange.codec, text.islands.count, text.loss) == (
        images.optimizer.name, images.exchange.codec, images.islands.count, images.loss
    )  # fmt: skip
    assert text.workers.count == images.workers.count
    assert text.epochs == 1.25
    # the rate of a full batch in the middle of the run is the one for images
    middle, was = (
        learning_rate(config.lr, config.batch, config.plan)(config.epochs / 2, config.batch)
        for config in (text, images)
    )
    assert middle == pytest.approx(was, rel=0.05)  # base_batch is rounded to a whole number
    (said,) = job.said
    assert said.startswith(f"{name} on text: gpt-mini on shakespeare, {text.workers.count} workers x ")
    assert f"({images.optimizer.name})" in said
    assert "Nothing was tuned for text" in said
    assert ("augmentation" in said) == (images.data.augment != "none")


def test_what_was_typed_stands_and_data_may_be_ones_own(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("to be or not to be " * 400)
    typed = Train(recipe="sony", model="lstm-mini", data=str(text), workers=2, settings=["workers.local_batch=3"])
    job = job_of(typed, launched=False)
    config = job.config
    assert (config.model, config.data.name, config.batch) == ("lstm-mini", "text", 6)
    assert "lstm-mini on text, 2 workers x 3 sequences of 64 tokens" in job.said[0]


def test_other_recipes_and_models_stay_as_they_are() -> None:
    for typed in (Train(recipe="adamw", model="lstm-mini"), Train(recipe="sony", model="resnet9")):
        job = job_of(typed, launched=False)
        assert not job.said
        assert job.config.data == recipes.load(str(typed.recipe)).data
    with pytest.raises(ConfigError, match="Unknown model 'gtp-mini': did you mean"):
        job_of(Train(recipe="sony", settings=["model=gtp-mini"]), launched=False)
    asynchronous = job_of(Train(recipe="hogwild", settings=["model=gpt-mini"]), launched=False)
    assert DATASETS[asynchronous.config.data.name].input == "images"
    assert not asynchronous.said


def test_the_run_goes_down_and_its_record_is_one_of_text(tmp_path: Path) -> None:
    typed = Train(recipe="lars", model="gpt-mini", workers=2, settings=["data.length=16"])
    result = fit(job_of(typed, launched=False).config, out=tmp_path / "run", device="cpu", max_steps=3)
    losses = [row["loss"] for row in read_run(tmp_path / "run").train]
    assert losses[-1] < losses[0]
    assert result.facts["bits_per_byte"] > 0
