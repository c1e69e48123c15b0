"""GPT, LSTM and the loss over tokens: what they compute, how they start, and how a wrong input is refused."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from bigstep.errors import ConfigError
from bigstep.losses import IGNORED, CrossEntropy, count_targets
from bigstep.models import GPT, LSTM, build_model

TOKEN_MODELS = ("gpt-mini", "gpt-mini-untied", "lstm-mini")
has_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def some_ids(batch: int = 2, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def small_gpt(dropout: float = 0.0) -> GPT:
    return GPT(vocabulary=256, length=16, depth=2, width=32, heads=4, dropout=dropout)


@pytest.mark.parametrize(
    "name, vocabulary, length, parameters",
    [
        ("gpt-124m", 50257, 1024, 124_439_808),  # GPT-2's smallest, as published
        ("gpt-10m", 256, 256, 10_646_784 + (2 + 256 + 256) * 384),  # blocks; last norm and the two tables
        ("gpt-25m", 256, 256, 25_219_072 + (2 + 256 + 256) * 512),
        ("gpt-10m-untied", 256, 256, 10_646_784 + (2 + 256 + 256 + 256) * 384),
        ("lstm", 256, 256, 2 * 4 * 512 * (512 + 512 + 2) + 256 * 513),
    ],
)
def test_named_sizes_have_their_number_of_parameters(name: str, vocabulary: int, length: int, parameters: int) -> None:
    with torch.device("meta"):
        model = build_model(name, vocabulary=vocabulary, length=length)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_no_logit_depends_on_a_later_token(name: str) -> None:
    torch.manual_seed(0)
    model, ids = build_model(name, vocabulary=256, length=16).double(), some_ids()
    changed = ids.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 256
    before, after = model(ids), model(changed)
    torch.testing.assert_close(after[:, :9], before[:, :9], rtol=0, atol=1e-12)
    assert (after[:, 9:] != before[:, 9:]).any(-1).all()


@pytest.mark.parametrize("name", TOKEN_MODELS)
def test_every_weight_gets_a_gradient_and_equal_seeds_give_equal_weights(name: str) -> None:
    torch.manual_seed(3)
    model = build_model(name, vocabulary=256, length=16)
    torch.manual_seed(3)
    again = build_model(name, vocabulary=256, length=16)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    CrossEntropy()(model(some_ids()), some_ids(seed=1)).backward()
    silent = [label for label, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert silent == []


def test_gpt_starts_as_gpt2_does() -> None:
    torch.manual_seed(0)
    model = GPT(vocabulary=512, length=128, depth=8, width=256, heads=4)
    block = model.blocks[0]
    # at least 32,768 draws each: the sample deviation is off by 1 / sqrt(65,536) = 0.4 %, so 2 % is five deviations
    for weight, deviation in (
        (model.tokens.weight, 0.02),
        (model.positions.weight, 0.01),
        (block.mlp[0].weight, 0.02),
        (block.mlp[2].weight, 0.02 / 4),  # sqrt(2 * 8 branches)
        (block.attention.out.weight, 0.02 / 4),
    ):
        assert weight.std().item() == pytest.approx(deviation, rel=0.02)
    assert not any(bias.any() for name, bias in model.named_parameters() if name.endswith("bias"))
    # logits near 0 make the first loss that of a guess
    first = CrossEntropy()(model(some_ids()), some_ids(seed=1)).item()
    assert first == pytest.approx(math.log(512), rel=0.02)


def test_an_lstm_starts_by_remembering() -> None:
    model = LSTM(vocabulary=256, depth=2, width=32)
    for layer in model.layers:
        gates = layer.bias_hh_l0.view(4, 32)
        assert (gates[1] == 1).all()
        assert not gates[[0, 2, 3]].any()


def test_dropout_follows_torchs_generator_and_stops_in_evaluation() -> None:
    for model in (small_gpt(dropout=0.2), LSTM(vocabulary=256, depth=2, width=32, dropout=0.2)):
        ids = some_ids()

        def drawn(seed: int, model: nn.Module = model, ids: Tensor = ids) -> Tensor:
            torch.manual_seed(seed)
            return model(ids)

        assert torch.equal(drawn(1), drawn(1))
        assert not torch.equal(drawn(1), drawn(2))
        model.eval()
        assert torch.equal(drawn(1), drawn(2))


@has_transformers
def test_gpt_computes_what_hugging_faces_gpt2_computes() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    ours = small_gpt().double().eval()
    theirs = GPT2LMHeadModel(GPT2Config(vocab_size=256, n_positions=16, n_embd=32, n_layer=2, n_head=4)).double().eval()
    names = {"attention_norm": "ln_1", "attention.query_key_value": "attn.c_attn", "attention.out": "attn.c_proj",
             "mlp_norm": "ln_2", "mlp.0": "mlp.c_fc", "mlp.2": "mlp.c_proj"}  # fmt: skip
    state = {"transformer.wte.weight": ours.tokens.weight, "transformer.wpe.weight": ours.positions.weight,
             "lm_head.weight": ours.tokens.weight, "transformer.ln_f.weight": ours.norm.weight,
             "transformer.ln_f.bias": ours.norm.bias}  # fmt: skip
    for index, block in enumerate(ours.blocks):
        for mine, name in names.items():
            module = block.get_submodule(mine)
            weight = (
                module.weight.T if isinstance(module, nn.Linear) else module.weight
            )  # theirs multiply from the left
            state[f"transformer.h.{index}.{name}.weight"] = weight
            state[f"transformer.h.{index}.{name}.bias"] = module.bias
    theirs.load_state_dict(state)
    torch.testing.assert_close(ours(some_ids()), theirs(some_ids()).logits, rtol=1e-12, atol=1e-12)


@has_transformers
def test_a_causal_model_of_transformers_is_built_by_name_or_folder(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, '
        '"num_attention_heads": 2, "num_key_value_heads": 2}'
    )
    model = build_model(f"hf:{tmp_path}", vocabulary=40, length=8)
    logits = model(some_ids() % 40)
    assert isinstance(logits, Tensor)
    assert logits.shape == (2, 16, 40)
    with torch.device("meta"):
        named = build_model("hf:gpt2", vocabulary=300, length=64)
    assert {parameter.shape[0] for parameter in named.parameters() if parameter.shape[-1] == 768} >= {300, 64}
    with pytest.raises(ConfigError, match="did you mean 'gpt2'"):
        build_model("hf:gtp2", vocabulary=300, length=64)


@pytest.mark.parametrize(
    "name, shape, sentence",
    [
        ("gpt-mini", {"classes": 10, "channels": 1, "image_size": 28}, "takes tokens, but the data are images"),
        ("resnet50", {"vocabulary": 256, "length": 64}, "takes images, but the data are tokens"),
        ("hf:gpt2", {"classes": 10, "channels": 1, "image_size": 28}, "takes tokens"),
        ("timm:resnet10t", {"vocabulary": 256, "length": 64}, "takes images"),
        ("gpt-125m", {"vocabulary": 256, "length": 64}, "Unknown model 'gpt-125m': did you mean 'gpt-"),
        ("vgg16", {"classes": 10, "channels": 1, "image_size": 28}, "at least 32 pixels"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_in_one_sentence(
    name: str, shape: dict[str, int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build_model(name, **shape)


def test_a_sequence_longer_than_a_gpts_positions_is_refused_and_a_shorter_one_taken() -> None:
    model = small_gpt()
    assert model(some_ids(length=5)).shape == (2, 5, 256)
    with pytest.raises(ConfigError, match="has 17 tokens, but this GPT has positions for 16"):
        model(some_ids(length=17))


def test_vgg16_has_the_published_layers() -> None:
    with torch.device("meta"):
        model = build_model("vgg16", classes=1000, channels=3, image_size=224)
    shapes = [tuple(parameter.shape) for parameter in model.parameters()]
    assert sum(parameter.numel() for parameter in model.parameters()) == 138_357_544
    assert shapes[-6::2] == [(4096, 25088), (4096, 4096), (1000, 4096)]
    assert build_model("vgg16", classes=7, channels=3, image_size=32)(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def some_targets() -> Tensor:
    """Rows of unequal length: 5, 2, none and 4 targets are counted."""
    target = some_ids(4, 5, seed=2) % 11
    for row, counted in enumerate((5, 2, 0, 4)):
        target[row, counted:] = IGNORED
    return target


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_is_the_mean_over_counted_targets_not_over_sequences(smoothing: float) -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(4, 5, 11, dtype=torch.float64), some_targets()
    counted = target != IGNORED
    each = functional.cross_entropy(logits[counted], target[counted], label_smoothing=smoothing, reduction="none")
    assert len(each) == count_targets(target) == 11
    loss = CrossEntropy(smoothing)
    torch.testing.assert_close(loss(logits, target), each.mean(), rtol=1e-14, atol=0)
    of_rows = torch.stack([loss(logits[row : row + 1], target[row : row + 1]) for row in (0, 1, 3)])
    assert abs(of_rows.mean() - each.mean()) > 1e-3  # so that a mean of means would be seen here


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_target_that_is_neither_a_class_nor_padding_is_refused_in_every_precision(dtype: torch.dtype) -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):  # -1 is what many sets call unlabelled
        CrossEntropy()(torch.zeros(2, 5, dtype=dtype), torch.tensor([3, -1]))


def test_for_one_target_a_sample_the_loss_is_torchs() -> None:
    torch.manual_seed(0)
    logits, target = torch.randn(6, 10), torch.arange(6)
    torch.testing.assert_close(
        CrossEntropy(0.1)(logits, target), nn.CrossEntropyLoss(label_smoothing=0.1)(logits, target)
    )


def test_a_batch_without_a_counted_target_costs_nothing() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.randn(2, 3, 5).to(dtype).requires_grad_()
        loss = CrossEntropy()(logits, torch.full((2, 3), IGNORED))
        loss.backward()
        assert loss.item() == 0.0
        assert not logits.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_half_precision_costs_only_the_rounding_of_logits_and_gradient(
    dtype: torch.dtype, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bigstep.gpu.cross_entropy.CHUNK", 7 * 11)  # 20 rows in chunks of 7, 7 and 6
    torch.manual_seed(0)
    logits, target = (4 * torch.randn(4, 5, 11)).to(dtype).requires_grad_(), some_targets()
    exact = logits.detach().double().requires_grad_()
    loss, reference = CrossEntropy(smoothing)(logits, target), CrossEntropy(smoothing)(exact, target)
    (3 * loss).backward()
    (3 * reference).backward()
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), reference, rtol=1e-6, atol=0)  # sums in float32
    # one rounding to half precision: half a unit in the last place, 2^-11 or 2^-8 of the value
    rounding = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1.01 * rounding, atol=1e-7)


def test_gpt_trains_under_autocast_in_bf16() -> None:
    torch.manual_seed(0)
    model, ids = small_gpt(), some_ids(8, 17)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    losses = []
    for _ in range(40):
        with torch.autocast("cpu", torch.bfloat16):
            loss = CrossEntropy()(model(ids[:, :-1]), ids[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
