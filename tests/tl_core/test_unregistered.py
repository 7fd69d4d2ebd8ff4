from __future__ import annotations

import torch
from torch import nn

from tl_core import unregistered_tensors


class Keeps(nn.Module):
    """Keep tensors in every way that torch does not register, and in those it does."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.registered = nn.ParameterList([nn.Parameter(torch.zeros(2))])
        self.prompts = [nn.Parameter(torch.zeros(2)), torch.zeros(2)]
        self.scales = {"a": (torch.ones(1, requires_grad=True),)}
        self.again = [self.prompts[0], self.layer.weight]
        self.output = self.layer(torch.ones(1, 2))
        self.fixed = torch.ones(3)


def test_tensors_out_of_torchs_sight():
    """Leaf tensors with requires_grad are named once, by their place; frozen ones, results and Parameters are not."""
    model = nn.Sequential(Keeps())
    kept = model[0]
    found = unregistered_tensors(model)
    assert list(found) == ["0.prompts[0]", "0.scales['a'][0]"]
    assert found["0.prompts[0]"] is kept.prompts[0]


def test_names_without_what_wrappers_insert():
    """A wrapped model gives the names of the model itself."""
    assert list(unregistered_tensors(nn.DataParallel(Keeps()))) == ["prompts[0]", "scales['a'][0]"]


def test_a_plain_model_has_none():
    """Registered layers, recurrent ones among them, hide nothing."""
    assert unregistered_tensors(nn.Sequential(nn.LSTM(2, 2), nn.Linear(2, 2))) == {}


def test_long_containers_are_cut():
    """Of a container, 256 items are looked at."""
    model = nn.Linear(1, 1)
    model.history = [torch.zeros(1, requires_grad=True) for _ in range(300)]
    assert len(unregistered_tensors(model)) == 256
