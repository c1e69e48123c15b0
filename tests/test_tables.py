"""One table for every kind of name: what it says is true of the code, and no list elsewhere disagrees with it."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bigstep
from bigstep import recipes
from bigstep.config import OptimizerConfig
from bigstep.config.edit import find_change, flatten, scale_batch
from bigstep.config.reference import KINDS, reference
from bigstep.config.text import apply_settings, config_from_mapping, config_to_mapping, config_to_yaml
from bigstep.data.sampler import Sampler
from bigstep.engine.rates import Rates, batch_plan, learning_rate
from bigstep.errors import ConfigError
from bigstep.optim import parameter_groups
from bigstep.tables import load
from bigstep.tables.methods import METHODS
from bigstep.tables.models import FORMS, MODELS, Model, find_model, model_names
from bigstep.tables.optimizers import OPTIMIZERS, LarsSettings, Optimizer, SgdSettings, rules_with
from bigstep.tables.precisions import PRECISIONS
from bigstep.tables.schedules import SHAPES, Shape, make_schedule
from bigstep.train import fit
from bigstep.validate import Fraction

BASE = {"workers": {"count": 8, "local_batch": 32}, "epochs": 2, "lr": {"base": 0.1}}
OLD_RUNS = sorted((Path(__file__).parent / "data" / "v0.1").glob("*/run.json"))
HOMES = {
    **{f"optimizer {name}": entry.home for name, entry in OPTIMIZERS.items()},
    **{f"changing {name}": entry.changing for name, entry in OPTIMIZERS.items() if entry.changing},
    **{f"shape {name}": entry.home for name, entry in SHAPES.items()},
    **{f"model {name}": entry.home for name, entry in {**MODELS, **FORMS}.items()},
}


@pytest.mark.parametrize("home", HOMES.values(), ids=HOMES)
def test_every_home_is_there(home: str) -> None:
    assert callable(load(home))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_is_built_from_its_settings_alone_and_takes_a_step(name: str) -> None:
    settings = OptimizerConfig(name=name, weight_decay=1e-4)
    model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3))
    optimizer = load(settings.home)(parameter_groups(model, settings.weight_decay), lr=1.0, **settings.arguments())
    changing = load(settings.entry.changing)(settings, 3.0, 0.1) if settings.entry.changing else {}
    for group in optimizer.param_groups:
        group.update({"lr": 0.1, **changing})
    before = model[0].weight.detach().clone()
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    assert not torch.equal(before, model[0].weight)


@pytest.mark.parametrize("adagrad", ["none", "before", "after"])
def test_sgd_is_built_for_every_place_of_adagrad(adagrad: str) -> None:
    settings = OptimizerConfig(name="sgd", adagrad=adagrad, nesterov=True)
    model = nn.Linear(2, 1)
    groups = parameter_groups(model, 0.0)
    assert type(load(settings.home)(groups, lr=1.0, **settings.arguments())).__name__ == (
        "AdaGradSGD" if adagrad == "after" else "SGD"
    )
    assert bool(settings.before_exchange) == (adagrad == "before")
    if settings.before_exchange:
        load(settings.before_exchange)(model, groups, **settings.arguments_before())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_settings_of_an_optimizer_survive_yaml_and_pickle(name: str) -> None:
    config = apply_settings(config_from_mapping(BASE), [f"optimizer.name={name}"])
    assert type(config.optimizer) is OPTIMIZERS[name].settings
    assert config_from_mapping(json.loads(json.dumps(config_to_mapping(config)))) == config
    assert pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config.optimizer, weight_decay=0.5).weight_decay == 0.5


@pytest.mark.parametrize("path", OLD_RUNS, ids=lambda path: path.parent.name)
def test_runs_of_the_first_release_keep_every_setting_that_had_a_meaning(path: Path) -> None:
    config = config_from_mapping(json.loads(path.read_text())["config"])
    old = dict(flatten(json.loads(path.read_text())["config"]))
    new = dict(flatten(config_to_mapping(config)))
    gone = set(old) - set(new)
    assert {name.partition(".")[0] for name in gone} <= {"optimizer"}
    assert all(config.optimizer.name not in rules_with(name.removeprefix("optimizer.")) for name in gone)
    assert {name: new[name] for name in set(old) - gone} == {name: old[name] for name in set(old) - gone}
    assert find_change(json.loads(path.read_text())["config"], config) is None


def test_switching_the_optimizer_keeps_what_means_the_same() -> None:
    config = apply_settings(
        config_from_mapping({**BASE, "optimizer": {"name": "lars", "momentum": 0.8, "eps": 0.0, "weight_decay": 0.1}}),
        ["optimizer.adagrad=after", "optimizer.name=sgd"],  # in any order
    )
    assert config.optimizer == SgdSettings(momentum=0.8, weight_decay=0.1, adagrad="after")


def test_settings_of_another_optimizer_are_left_out_of_files_and_refused_when_set() -> None:
    config = config_from_mapping({**BASE, "optimizer": {"name": "sgd", "trust_coefficient": 0.1}})
    assert config.optimizer == SgdSettings()
    with pytest.raises(ConfigError, match=r"trust_coefficient goes with optimizer.name=lars \(got sgd\)"):
        apply_settings(config, ["optimizer.trust_coefficient=0.1"])
    with pytest.raises(ConfigError, match="did you mean 'optimizer.momentum'"):
        apply_settings(config_from_mapping(BASE), ["optimizer.momentun=0.1"])
    with pytest.raises(ConfigError, match="did you mean 'lars'"):
        OptimizerConfig(name="larz")
    with pytest.raises(ConfigError, match="change the name with `switch`"):
        dataclasses.replace(LarsSettings(), name="sgd")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_takes_fields_of_a_piece_and_gives_a_schedule(shape: str) -> None:
    fields: dict[str, Any] = {
        "start": 1.0, "end": 0.5, "begin": 0.0, "until": 10.0, "power": 2.0, "at": (5.0,), "factor": 0.1,
        "values": (1.0, 0.5),
    }  # fmt: skip
    entry = SHAPES[shape]
    assert set(entry.takes) <= set(inspect.signature(load(entry.home)).parameters)
    schedule = make_schedule(shape, fields)
    assert 0 < schedule(0.0) <= 1
    assert 0 < schedule(9.9) <= 1


def test_rates_by_group_are_multiples_of_the_rate_for_the_parameters_that_a_pattern_names() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    groups = parameter_groups(model, 0.1, {"0.weight": 0.5, "0.*": 2.0})
    found = {
        id(param): (group.get("rate", 1.0), group["weight_decay"]) for group in groups for param in group["params"]
    }
    assert [found[id(param)] for param in model.parameters()] == [(0.5, 0.1), (2.0, 0.0), (1.0, 0.1), (1.0, 0.0)]
    with pytest.raises(ConfigError, match="matches no parameter"):
        parameter_groups(model, 0.1, {"1.scale": 2.0})


def test_a_schedule_sets_the_rate_of_every_group_times_its_factor() -> None:
    config = apply_settings(config_from_mapping(BASE), ["lr.groups=[{names: '*bias', factor: 2}]"])
    optimizer = torch.optim.SGD(
        parameter_groups(nn.Linear(2, 1), 0.0, {group.names: group.factor for group in config.lr.groups}), lr=1.0
    )
    sampler = Sampler(1024, 0, batch_plan(config))
    rates = Rates(config, sampler, optimizer, learning_rate(config.lr, config.batch))
    assert rates.set(next(sampler.steps(1))) == pytest.approx(0.1)
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.1, 0.2])


def test_every_precision_names_types_of_torch() -> None:
    for precision in PRECISIONS.values():
        assert {getattr(torch, precision.weights), getattr(torch, precision.products)} <= {
            torch.float64, torch.float32, torch.bfloat16, torch.float16
        }  # fmt: skip
    assert [name for name, precision in PRECISIONS.items() if precision.loss_scale] == ["fp16"]


def test_a_model_says_what_it_takes() -> None:
    assert {entry.input for entry in MODELS.values()} == {"images", "tokens"}
    assert find_model("timm:resnet10t").input == "images"
    assert find_model("hf:gpt2").input == "tokens"
    assert find_model("mine:net").input == "any"
    with pytest.raises(ConfigError, match="did you mean 'resnet50'"):
        find_model("resnet5")


def test_optimizers_name_methods_that_exist() -> None:
    for entry in OPTIMIZERS.values():
        assert set(entry.methods) <= set(METHODS)


def test_the_yaml_of_a_configuration_lists_the_names_of_the_tables() -> None:
    text = config_to_yaml(config_from_mapping(BASE))
    for names in (OPTIMIZERS, model_names()):
        assert ", ".join(names) in text
    assert "{" not in "".join(line.partition("#")[2] for line in text.splitlines() if "optimizers" in line)


def test_the_reference_in_the_documents_is_up_to_date() -> None:
    file = Path(__file__).parents[1] / "docs" / "configuration.md"
    assert file.read_text() == reference(), "run: python -m bigstep.config.reference > docs/configuration.md"


@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_says_in_one_line_what_its_name_means(kind: str) -> None:
    _, table = KINDS[kind]
    for name, entry in table.items():
        assert 3 < len(entry.about) < 160, name
        assert "\n" not in entry.about, name


TYPED = {name for _, table in KINDS.values() for name in table} - {"none", "tokens", "text", "words", "bytes"}


@pytest.mark.parametrize("path", sorted(Path(bigstep.__file__).parent.rglob("*.py")), ids=lambda path: path.name)
def test_no_annotation_types_the_names_of_a_table_again(path: Path) -> None:
    """A `Literal` with three names of a table is a list that the next entry would have to be added to."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id == "Literal":
            names = {leaf.value for leaf in ast.walk(node.slice) if isinstance(leaf, ast.Constant)}
            for kind, (_, table) in KINDS.items():
                assert len(names & TYPED & set(table)) < 3, f"{path.name}:{node.lineno} lists names of {kind}"


class SignSGD(torch.optim.Optimizer):
    """w <- w - lr * sign(g), of elements whose gradient is larger than `least`."""

    def __init__(self, params: Any, lr: float, least: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "least": least, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(group["lr"] * torch.where(param.grad.abs() > group["least"], param.grad.sign(), 0.0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignSettings(OptimizerConfig):
    name: str = "signsgd"
    least: Fraction = 0.0
    """Gradients up to this size change nothing."""


def halve(start: float, begin: float) -> Any:
    return lambda epoch: start * 0.5 ** (epoch - begin)


def one_layer(*, classes: int, channels: int, image_size: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, classes))


def test_one_entry_is_all_that_an_optimizer_a_shape_or_a_model_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    rule = Optimizer(
        about="the sign alone", home=f"{here}:SignSGD", settings=SignSettings, batch_rule="sqrt", state_bytes=0
    )
    shape = Shape(about="half as much each epoch", home=f"{here}:halve", takes={"start": "start", "begin": "begin"})
    monkeypatch.setitem(OPTIMIZERS, "signsgd", rule)
    monkeypatch.setitem(SHAPES, "halving_rate", shape)
    monkeypatch.setitem(MODELS, "one-layer", Model(about="one linear layer", home=f"{here}:one_layer"))
    config = apply_settings(
        config_from_mapping({**BASE, "model": "one-layer", "data": {"holdout": 0.95}}),
        [
            "optimizer.least=0.001", "optimizer.name=signsgd", "lr.base=0.001",
            "lr.schedule=[{shape: halving_rate, until: 2, start: 2}]",
        ],
    )  # fmt: skip
    assert config.optimizer == SignSettings(least=0.001)
    assert config_from_mapping(config_to_mapping(config)) == config
    assert "signsgd" in config_to_yaml(config)
    assert scale_batch(apply_settings(config, ["lr.scaling=none"]), 512).lr.scaling == "sqrt"
    with pytest.raises(ConfigError, match="optimizer.least is 1.0, but it must be at least 0 and less than 1"):
        apply_settings(config, ["optimizer.least=1"])
    with pytest.raises(ConfigError, match="did you mean 'signsgd'"):
        OptimizerConfig(name="signsgt")
    result = fit(config, max_steps=5, device="cpu")
    assert result.accuracy > 0.3  # of ten classes, after five steps


def test_every_recipe_stands_in_the_readme_and_in_the_table_of_papers() -> None:
    root = Path(__file__).parents[1]
    readme, papers = (root / "README.md").read_text(), (root / "docs" / "papers.md").read_text()
    assert [name for name in recipes.NAMES if f"`{name}`" not in readme] == []
    published = [name for name in recipes.SYNCHRONOUS if "paper" in recipes.describe(name).presets]
    assert [name for name in published if f"| `{name}` |" not in papers] == []
