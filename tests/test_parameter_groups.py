"""parameter_groups: every parameter once, and decay for weights alone."""

from __future__ import annotations

import fnmatch
import ntpath
import types
from collections import OrderedDict

import pytest
import torch
from torch import nn

from bigstep.errors import ConfigError
from bigstep.optim import parameter_groups


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.image_norm = nn.LayerNorm((2, 4))  # parameters of two dimensions
        self.group_norm = nn.GroupNorm(2, 4)
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.frozen = nn.Parameter(torch.ones(2, 2), requires_grad=False)


def test_groups_hold_every_parameter_once_and_decay_weights_alone() -> None:
    model = Shared()
    decayed, rest = parameter_groups(model, 0.1)
    assert [id(param) for param in decayed["params"]] == [id(model.frozen), id(model.first.weight)]
    assert (decayed["weight_decay"], decayed["adapt"]) == (0.1, True)
    assert (rest["weight_decay"], rest["adapt"]) == (0.0, False)
    everything = [id(param) for param in (*decayed["params"], *rest["params"])]
    assert sorted(everything) == sorted(id(param) for param in model.parameters())


def test_a_pattern_in_other_letters_matches_nothing_on_any_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fnmatch, "os", types.SimpleNamespace(path=ntpath))  # as on Windows
    with pytest.raises(ConfigError, match="'HEAD.*' of lr.groups matches no parameter"):
        parameter_groups(nn.Sequential(OrderedDict(head=nn.Linear(2, 2))), 0.1, {"HEAD.*": 2.0})


def test_groups_without_parameters_are_left_out() -> None:
    assert [group["adapt"] for group in parameter_groups(nn.Linear(3, 3, bias=False), 0.1)] == [True]
    assert [group["adapt"] for group in parameter_groups(nn.BatchNorm2d(3), 0.1)] == [False]
