"""Models: sizes, names, starts and the ways in which a wrong name is refused."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from bigstep.errors import ConfigError
from bigstep.models import MODELS, Residual, build_model
from bigstep.norm import zero_gamma


def parameters_of(model: nn.Module) -> tuple[int, int]:
    """Scalars and tensors."""
    parameters = list(model.parameters())
    return sum(parameter.numel() for parameter in parameters), len(parameters)


# the counts of torchvision's models of the same names with 1,000 classes
@pytest.mark.parametrize(
    "name, scalars, tensors",
    [("resnet18", 11_689_512, 62), ("resnet34", 21_797_672, 110), ("resnet50", 25_557_032, 161)],
)
def test_resnets_have_the_published_number_of_parameters(name: str, scalars: int, tensors: int) -> None:
    assert parameters_of(build_model(name, classes=1000, channels=3, image_size=224)) == (scalars, tensors)


def test_resnet50_names_its_state_as_torchvision_does() -> None:
    state = build_model("resnet50", classes=1000, channels=3, image_size=224).state_dict()
    assert len(state) == 320  # 161 parameters and three buffers for each of 53 norms
    shapes = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_var": (64,),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.bias": (256,),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer4.2.bn3.num_batches_tracked": (),
        "fc.weight": (1000, 2048),
    }
    assert {name: tuple(state[name].shape) for name in shapes} == shapes


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="torchvision is not installed")
def test_weights_travel_to_torchvision_and_give_the_same_logits() -> None:
    from torchvision.models import resnet50

    ours = build_model("resnet50", classes=10, channels=3, image_size=224).eval()
    theirs = resnet50(num_classes=10).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(images), theirs(images))


def test_the_stride_of_a_bottleneck_sits_on_its_3x3_convolution() -> None:
    block = build_model("resnet50", classes=10, channels=3, image_size=224).layer2[0]
    assert (block.conv1.stride, block.conv2.stride, block.conv3.stride) == ((1, 1), (2, 2), (1, 1))


@pytest.mark.parametrize("image_size, side", [(32, 4), (64, 8), (65, 3), (224, 7)])
def test_the_stem_follows_the_image_size(image_size: int, side: int) -> None:
    model = build_model("resnet18", classes=10, channels=3, image_size=image_size)
    maps: list[torch.Size] = []
    model.layer4.register_forward_hook(lambda module, inputs, output: maps.append(output.shape))
    model.eval()(torch.zeros(1, 3, image_size, image_size))
    assert maps == [torch.Size([1, 512, side, side])]


SMALL = {
    "small": (1, 28),
    "mlp": (1, 28),
    "resnet9": (3, 32),
    "conv8": (3, 32),
    "conv8-wide": (3, 32),
    "resnet18": (3, 32),
    "alexnet": (3, 96),
    "vgg16": (3, 32),
}


@pytest.mark.parametrize("name", SMALL)
def test_every_weight_gets_a_gradient_and_every_class_a_logit(name: str) -> None:
    channels, side = SMALL[name]
    torch.manual_seed(0)
    model = build_model(name, classes=7, channels=channels, image_size=side)
    logits = model(torch.randn(4, channels, side, side))
    assert logits.shape == (4, 7)
    nn.functional.cross_entropy(logits, torch.arange(4)).backward()
    silent = [label for label, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert silent == []


@pytest.mark.parametrize("name", SMALL)
def test_equal_seeds_give_equal_weights_and_others_do_not(name: str) -> None:
    channels, side = SMALL[name]

    def weights(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        model = build_model(name, classes=10, channels=channels, image_size=side)
        return nn.utils.parameters_to_vector(model.parameters())

    assert torch.equal(weights(3), weights(3))
    assert not torch.equal(weights(3), weights(4))


def test_weights_start_as_he_and_goyal_say() -> None:
    torch.manual_seed(0)
    model = build_model("resnet18", classes=1000, channels=3, image_size=224)
    conv = model.layer4[1].conv2.weight
    # 2.4 M draws: the sample deviation is off by 1 / sqrt(2 * 2.4e6) = 0.05 %, so 0.5 % is ten deviations
    assert conv.std().item() == pytest.approx((2 / (512 * 9)) ** 0.5, rel=5e-3)
    assert model.fc.weight.std().item() == pytest.approx(0.01, rel=1e-2)
    assert not model.fc.bias.any()
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert all((norm.weight == 1).all() and (norm.bias == 0).all() for norm in norms)


@pytest.mark.parametrize(
    "name, blocks", [("small", 1), ("resnet9", 2), ("resnet18", 8), ("resnet34", 16), ("resnet50", 16)]
)
def test_zero_gamma_finds_every_residual_block(name: str, blocks: int) -> None:
    assert zero_gamma(build_model(name, classes=10, channels=3, image_size=32)) == blocks


def test_a_block_with_zero_gamma_is_its_shortcut_and_still_learns() -> None:
    block, images = Residual(4).double(), torch.rand(8, 4, 5, 5, dtype=torch.float64)
    zero_gamma(block)
    output = block(images)
    assert torch.equal(output, images)  # images are positive, so the ReLU keeps them
    (output * torch.randn_like(output)).sum().backward()
    assert block.bn2.weight.grad is not None
    assert block.bn2.weight.grad.any()


def test_small_takes_other_sizes_than_it_was_built_for() -> None:
    model = build_model("small", classes=10, channels=1, image_size=28)
    assert model(torch.zeros(2, 1, 20, 20)).shape == (2, 10)


def test_alexnet_normalises_after_the_fifth_pooling() -> None:
    features = list(build_model("alexnet", classes=10, channels=3, image_size=96).features)
    assert [type(layer) for layer in features[-2:]] == [nn.MaxPool2d, nn.BatchNorm2d]


def test_a_users_function_gets_only_the_arguments_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_net.py").write_text(
        "from torch import nn\n"
        "def plain(classes):\n    return nn.Linear(3, classes)\n"
        "def all_facts(**facts):\n    return nn.Linear(len(facts), facts['classes'])\n"
        "def wrong(classes):\n    return classes\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    facts = {"classes": 5, "channels": 1, "image_size": 28}
    assert parameters_of(build_model("own_net:plain", **facts)) == (20, 2)
    assert parameters_of(build_model("own_net:all_facts", **facts)) == (20, 2)
    with pytest.raises(ConfigError, match=r"returned int, but a torch\.nn\.Module is needed"):
        build_model("own_net:wrong", **facts)
    with pytest.raises(ConfigError, match="no function 'plan': did you mean 'plain'"):
        build_model("own_net:plan", **facts)


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("resnet5O", "Unknown model 'resnet5O': did you mean 'resnet50'"),
        ("zzz", "allowed are alexnet, conv8, conv8-wide, gpt-10m, gpt-10m-untied"),
        ("no_such_package.nets:build", "there is no module 'no_such_package'"),
        (":build", "is not an import path"),
        ("alexnet", "at least 63 pixels a side"),
    ],
)
def test_a_wrong_name_is_refused_in_one_sentence(name: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_model(name, classes=10, channels=3, image_size=28)


def test_timm_is_used_where_it_is_installed_and_else_named() -> None:
    if importlib.util.find_spec("timm") is None:
        with pytest.raises(ConfigError, match=r"bigstep\[extras\]"):
            build_model("timm:resnet10t", classes=4, channels=1, image_size=64)
    else:
        model = build_model("timm:resnet10t", classes=4, channels=1, image_size=64)
        assert model.eval()(torch.zeros(1, 1, 64, 64)).shape == (1, 4)


def test_the_configuration_names_every_model() -> None:
    from bigstep.config.text import config_from_mapping, config_to_yaml

    text = config_to_yaml(
        config_from_mapping({"workers": {"count": 1, "local_batch": 1}, "epochs": 1, "lr": {"base": 1}})
    )
    (line,) = (line for line in text.splitlines() if line.startswith("model:"))
    assert [name for name in MODELS if name not in line and "-" not in name] == []  # of sizes, the first stands there
