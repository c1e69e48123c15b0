"""Names from elsewhere: what installed packages add to the tables, and pieces of one's own named in a file."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from bigstep import recipes
from bigstep.check.shrink import shrink
from bigstep.config.edit import find_change
from bigstep.config.text import apply_settings, config_from_mapping, config_to_mapping, config_to_yaml, read_yaml
from bigstep.errors import ConfigError
from bigstep.tables.models import find_model
from bigstep.tables.optimizers import OPTIMIZERS, OptimizerConfig
from bigstep.tables.plugins import GROUPS, brought
from bigstep.train import fit

Bigstep = Callable[..., tuple[int, str, str]]

PIECES = """
from dataclasses import dataclass

import torch
from torch import nn

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.tables.models import Model
from bigstep.tables.optimizers import Optimizer, OptimizerConfig
from bigstep.validate import Fraction

TOUCHED = []


@dataclass(frozen=True, kw_only=True)
class SignSettings(OptimizerConfig):
    memory: Fraction = 0.9


class Sign(torch.optim.Optimizer):
    def __init__(self, groups, lr, memory=0.5):
        super().__init__(groups, {"lr": lr, "memory": memory})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            TOUCHED.append(group["memory"])
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


def tiny(classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))


def squared(output, target):
    TOUCHED.append("squared")
    return (output - nn.functional.one_hot(target, output.shape[1])).square().mean()


SIGN = Optimizer(about="signs", home="fake_pieces:Sign", settings=SignSettings, batch_rule="sqrt", state_bytes=4)
TINY = Model(about="tiny", home="fake_pieces:tiny")


def nothing():
    return {}


def base():
    return RunConfig(
        model="tiny", workers=WorkersConfig(count=2, local_batch=4), epochs=1, lr=LrConfig(base=0.01, scaling="none")
    )
"""
RECIPE = """
'''A recipe of somebody's.'''
from bigstep.config import Published

import fake_pieces

__all__ = ["PUBLISHED", "SUMMARY", "TECHNIQUES", "mini"]
SUMMARY = "signs alone"
TECHNIQUES = ("signs",)
PUBLISHED = Published(system="Fake", source="nobody", hardware="none", batch="8", accuracy=None, seconds=None)


def mini():
    from dataclasses import replace

    from bigstep.config import OptimizerConfig

    return replace(fake_pieces.base(), optimizer=OptimizerConfig(name="sign", memory=0.7))
"""
ENTRY_POINTS = """
[bigstep.optimizers]
sign = fake_pieces:SIGN
sgd = fake_pieces:SIGN
broken = fake_pieces:NOTHING
wrong = fake_pieces:TINY
[bigstep.models]
tiny = fake_pieces:TINY
[bigstep.recipes]
signs = fake_recipe
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A distribution that is installed as far as Python's packaging can tell."""
    site = tmp_path / "site"
    about = site / "fake_pieces-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-pieces\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    (site / "fake_pieces.py").write_text(PIECES)
    (site / "fake_recipe.py").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delenv("BIGSTEP_TRUST", raising=False)
    brought.cache_clear()
    yield tmp_path
    from bigstep.tables.models import MODELS

    for table, name in ((OPTIMIZERS, "sign"), (MODELS, "tiny")):
        table.pop(name, None)
    for name in ("fake_pieces", "fake_recipe"):
        sys.modules.pop(name, None)
    brought.cache_clear()


def test_an_installed_package_adds_names(package: Path) -> None:
    config = recipes.load("signs")
    assert (config.recipe, config.optimizer.name, config.optimizer.arguments()) == ("signs", "sign", {"memory": 0.7})
    assert recipes.describe("signs").summary == "signs alone"
    assert recipes.known()[-1] == "signs"
    assert find_model("tiny").home == "fake_pieces:tiny"
    assert config_from_mapping(config_to_mapping(config)) == pickle.loads(pickle.dumps(config)) == config
    assert fit(config, max_steps=2, device="cpu").steps == 2
    assert sys.modules["fake_pieces"].TOUCHED[-1] == 0.7


def test_a_package_replaces_nothing_and_its_mistakes_are_its_own(package: Path) -> None:
    assert OPTIMIZERS["sgd"].home == "torch.optim:SGD"
    with pytest.raises(ConfigError, match="'broken' of the package fake-pieces cannot be loaded .AttributeError: .*"):
        OptimizerConfig(name="broken")
    with pytest.raises(ConfigError, match="'wrong' of the package fake-pieces is a Model, but .* takes Optimizer"):
        OptimizerConfig(name="wrong")
    with pytest.raises(ConfigError, match="did you mean 'signs'"):
        recipes.load("sings")


def test_recipes_of_packages_are_listed_and_run_by_name(package: Path, bigstep: Bigstep) -> None:
    status, out, _ = bigstep("recipes")
    assert status == 0
    assert "signs alone" in out
    status, out, err = bigstep("train", "signs", "--steps", "1", "--device", "cpu", "--no-report", "--json")
    assert status == 0, err


FILE = """
recipe: fake_pieces:base
model: fake_pieces:tiny
optimizer: {name: "fake_pieces:Sign", settings: {memory: 0.25}, weight_decay: 0.1}
loss: {name: "fake_pieces:squared"}
"""


def test_a_file_names_optimizer_loss_and_recipe_by_their_place(package: Path, bigstep: Bigstep) -> None:
    (package / "run.yaml").write_text(FILE)
    status, _, err = bigstep("train", "--config", "run.yaml")
    assert status == 2
    assert "run.yaml names fake_pieces:base, which would run code" in err
    assert "fake_pieces" not in sys.modules, "nothing of it has run"
    with pytest.raises(ConfigError, match="which would run code"):
        fit(package / "run.yaml", device="cpu")
    result = fit(package / "run.yaml", max_steps=2, device="cpu", trust=True, out=package / "run")
    touched = sys.modules["fake_pieces"].TOUCHED
    assert result.steps == 2
    assert 0.25 in touched
    assert "squared" in touched
    config = recipes.read(read_yaml(package / "run.yaml"), "run.yaml", trusted=True)
    assert (config.workers.count, config.lr.base) == (2, 0.01), "what the file leaves out is the function's"
    again = config_from_mapping(config_to_mapping(config))
    assert again == config
    assert find_change(config_to_mapping(config), again) is None
    assert hash(shrink(config, 2)) == hash(shrink(again, 2)), "a check remembers trials by their configuration"
    assert "settings: {memory: 0.25}" in config_to_yaml(config)


def test_each_field_that_names_code_needs_trust(package: Path, bigstep: Bigstep) -> None:
    whole = config_to_mapping(recipes.load("plain"))
    for part in ({"optimizer": {"name": "fake_pieces:Sign"}}, {"loss": {"name": "fake_pieces:squared"}}):
        (package / "one.yaml").write_text(config_to_yaml(config_from_mapping({**whole, **part})))
        status, _, err = bigstep("train", "--config", "one.yaml", "--steps", "1")
        assert status == 2
        assert "which would run code" in err
    (package / "suite.yaml").write_text("- {recipe: plain, set: {optimizer.name: 'fake_pieces:Sign'}}\n")
    status, _, err = bigstep("bench", "suite.yaml")
    assert status == 2
    assert "which would run code" in err
    assert "fake_pieces" not in sys.modules
    # what is typed is the user's own word
    config = apply_settings(
        recipes.load("plain"), ["optimizer.name=fake_pieces:Sign", "optimizer.settings={memory: 1}"]
    )
    assert config.optimizer.arguments() == {"memory": 1}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["optimizer.name=os:system"], "os is a module of Python itself"),
        (["loss.name=subprocess:run"], "subprocess is a module of Python itself"),
        (["loss.name=mse"], "loss.name is 'mse', but it must be cross_entropy or package.module:function"),
        (["loss.name=mine:loss", "loss.label_smoothing=0.1"], "leave one of them out"),
        (["optimizer.name=mine:Rule", "optimizer.momentum=0.9"], "optimizer.momentum goes with"),
        (["optimizer.name=mine:Rule", "islands.count=2", "workers.count=4"], "does not go with this optimizer"),
    ],
)
def test_what_cannot_be_is_one_sentence(settings: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        apply_settings(recipes.load("plain"), settings)


def test_settings_of_a_rule_of_one_s_own_may_be_set_one_by_one_and_are_refused_in_one_sentence(package: Path) -> None:
    given = ["optimizer.name=fake_pieces:Sign", "optimizer.settings.memory=0.25", "model=mlp"]
    assert apply_settings(recipes.load("plain"), given).optimizer.arguments() == {"memory": 0.25}
    config = apply_settings(recipes.load("plain"), [*given, "optimizer.settings.memroy=1"])
    with pytest.raises(ConfigError, match="fake_pieces:Sign does not take optimizer.settings as they are .*'memroy'"):
        fit(config, max_steps=1, device="cpu")
    with pytest.raises(ConfigError, match=r"Unknown field 'optimizer\.settings\.memory'"):
        apply_settings(recipes.load("plain"), ["optimizer.settings.memory=1"])


def test_a_name_that_leads_nowhere_is_one_sentence(package: Path) -> None:
    for name, words in {
        "fake_pieces:Sing": "optimizer.name: fake_pieces:Sing: fake_pieces has no function 'Sing': did you mean 'Sign'",
        "no_such_module:Rule": "there is no module 'no_such_module'",
    }.items():
        config = apply_settings(recipes.load("plain"), [f"optimizer.name={name}", "model=mlp"])
        with pytest.raises(ConfigError, match=words):
            fit(config, max_steps=1, device="cpu")
    with pytest.raises(ConfigError, match="recipe: fake_pieces:nothing returned dict, but a RunConfig is needed"):
        recipes.load("fake_pieces:nothing")


def test_the_groups_are_documented() -> None:
    page = (Path(__file__).parent.parent / "docs" / "extending.md").read_text()
    for group in GROUPS:
        assert f"`bigstep.{group}`" in page
