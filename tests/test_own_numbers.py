"""A user's own numbers mean the same in every type and wherever they are kept; what are no numbers is told."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from bigstep.config import LrConfig, RunConfig, WorkersConfig
from bigstep.data import as_pair, as_source
from bigstep.errors import DataError
from bigstep.losses import CrossEntropy
from bigstep.train import FitResult, fit

X = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
CLASSES = np.array([156, 3, 199, 156] * 16)
"""Of 200; as a byte 156 is what -100 is, by which padding is known."""


def in_list(x: Any, y: Any) -> Any:
    return list(zip(x, y, strict=True))


def in_tensors(x: Any, y: Any) -> Any:
    return TensorDataset(torch.from_numpy(x), torch.from_numpy(y))


def trained_on(data: Any) -> FitResult:
    model = nn.Linear(6, 200)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.01)
    config = RunConfig(workers=WorkersConfig(count=2, local_batch=8), epochs=1, lr=LrConfig(base=0.5, scaling="none"))
    return fit(config, model, (data, data), device="cpu")


@pytest.mark.parametrize("kept", [lambda x, y: (x, y), in_tensors, in_list], ids=["arrays", "tensors", "items"])
@pytest.mark.parametrize("kind", ["uint8", "int16", "uint16", "uint32"])
def test_classes_mean_the_same_in_every_type(kept: Any, kind: str) -> None:
    expected, found = (trained_on(kept(X, CLASSES.astype(each))) for each in ("int64", kind))
    assert found.weights_sha256 == expected.weights_sha256
    assert (found.loss, found.accuracy) == (expected.loss, expected.accuracy)
    assert as_source(kept(X, CLASSES.astype(kind))).num_classes == 200


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint64", "int64"])
def test_tokens_of_every_type_are_counted_but_for_padding(kind: str) -> None:
    tokens = np.array([[156, 2, 3], [1, 156, 156]], dtype=kind)
    for source in (as_source((tokens, tokens)), as_source(in_list(tokens, tokens))):
        assert source.targets(torch.arange(2)).tolist() == [3, 3]
        assert source.inputs(0) == {"length": 3}
    padded = np.array([[156, 2, -100], [1, -100, -100]])
    assert as_source((tokens, padded)).targets(torch.arange(2)).tolist() == [2, 1]


@pytest.mark.parametrize("kind", ["uint8", "uint16"])
def test_classes_that_a_data_set_lists_may_be_of_any_type(kind: str) -> None:
    class Listed(list):
        targets = CLASSES.astype(kind)

    assert as_source(Listed(in_list(X, CLASSES))).num_classes == 200


def test_several_inputs_may_be_of_any_type() -> None:
    source = as_source([({"age": np.array([70_000], np.uint32), "x": row}, 1) for row in X])
    assert source.first[0]["age"].dtype == torch.int64


def test_the_loss_of_bytes_is_that_of_whole_numbers() -> None:
    scores, target = torch.randn(4, 200), torch.tensor([156, 156, 3, 7])
    assert CrossEntropy()(scores, target.to(torch.uint8)) == CrossEntropy()(scores, target)


def test_tensors_in_a_data_set_are_taken_as_tensors_alone_are() -> None:
    weights = torch.from_numpy(X).clone().requires_grad_()
    source = as_source(TensorDataset(weights, torch.from_numpy(CLASSES)))
    assert not source.x.requires_grad  # else each step would add up gradients of the data
    assert source.x.data_ptr() == weights.data_ptr()
    with pytest.raises(DataError, match="sparse_coo; give a dense one"):
        as_source(TensorDataset(torch.eye(3).to_sparse(), torch.arange(3)))


def test_labels_in_a_list_that_are_several_numbers_are_told() -> None:
    ragged = [1, [2, 3], *[0] * 62]
    with pytest.raises(
        DataError, match=r"^data gave labels in a list, but not all are single numbers; give one for each x\.$"
    ):
        as_pair(((X, ragged), (X, CLASSES)))
