from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume import diff_states, training_state
from tl_resume._format import write_state


class Net(nn.Module):
    """A model whose parameters have shapes of their own, with buffers between them and a tied weight."""

    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(2, 3)
        self.norm = nn.BatchNorm1d(3)
        self.b = nn.Linear(3, 3, bias=False)
        self.out = nn.Linear(3, 3, bias=False)
        if tied:
            self.out.weight = self.b.weight

    def forward(self, x):
        return self.out(self.b(self.norm(self.a(x))))


def trained(make_groups=None, **kwargs):
    model = Net(**kwargs)
    groups = make_groups(model) if make_groups else model.parameters()
    optimizer = torch.optim.Adam(groups, lr=0.5)
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def changed_slot(state, key="optimizer"):
    """Change one element of the state of the parameter that stands fourth, the norm's bias."""
    state = copy.deepcopy(state)
    state[key]["state"][3]["exp_avg"][1] += 1.0
    return state


def paths(diff):
    return [difference.path for difference in diff.differences]


def by_decay(model):
    """Two groups, as for weight decay: matrices, then vectors."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]


NOTE = "optimizer goes by index: its parameters are named after model, whose order and shapes agree"


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict"])
def test_parameters_are_named_after_the_model_beside_them(tmp_path, key):
    """In the usual layouts of torch.save, where order, number and shapes agree; buffers are left out."""
    model, optimizer = trained()
    state = {key: model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    torch.save(changed_slot(state), tmp_path / "b.pt")
    diff = diff_states(tmp_path / "a.pt", tmp_path / "b.pt")
    assert paths(diff) == ["optimizer: exp_avg of norm.bias"]
    assert diff.notes == (NOTE.replace("model", key),)


def test_two_groups_for_weight_decay(tmp_path):
    """Matrices first, then vectors: the order in which such groups are made."""
    model, optimizer = trained(by_decay)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    diff = diff_states(state, changed_slot(state))
    assert paths(diff) == ["optimizer: exp_avg of a.bias"]


def test_tied_weights_count_once(tmp_path):
    """A tied weight stands twice in the model's state and once in the optimizer's."""
    model, optimizer = trained(tied=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "a.pt")
    torch.save(changed_slot(state), tmp_path / "b.pt")
    assert paths(diff_states(tmp_path / "a.pt", tmp_path / "b.pt")) == ["optimizer: exp_avg of norm.bias"]


def test_names_kept_by_the_optimizer_come_first():
    """An optimizer built from named parameters keeps their names, whatever their order."""
    model, optimizer = trained(lambda model: list(model.named_parameters())[::-1])
    state = {"optimizer": optimizer.state_dict(), "model": model.state_dict()}
    diff = diff_states(state, changed_slot(state))
    assert (paths(diff), diff.notes) == (["optimizer: exp_avg of norm.weight"], ())


def test_shapes_that_contradict_leave_the_index():
    """Parameters in another order than the model's are not named by guess."""
    model, optimizer = trained(lambda model: list(model.parameters())[::-1])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    diff = diff_states(state, changed_slot(state))
    assert (paths(diff), diff.notes) == (["optimizer: exp_avg of parameter 3"], ())


def test_another_number_leaves_the_index():
    """An optimizer of some of the parameters is not named by the order of all."""
    model, optimizer = trained(lambda model: list(model.parameters())[:4])
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    assert paths(diff_states(state, changed_slot(state))) == ["optimizer: exp_avg of parameter 3"]


def test_an_optimizer_alone_goes_by_index():
    """Without a model there are no names, and the optimizer need not have a section."""
    _, optimizer = trained()
    state = optimizer.state_dict()
    diff = diff_states(state, changed_slot({"optimizer": state})["optimizer"])
    assert paths(diff) == ["exp_avg of parameter 3"]


def test_names_of_the_other_side(tmp_path):
    """A bare optimizer file against a state file of ours: named by position, if the shapes agree."""
    model, optimizer = trained()
    write_state(tmp_path / "a.safetensors", training_state(TrainingSetup(model, optimizer)))
    torch.save(changed_slot({"optimizer": optimizer.state_dict()}), tmp_path / "b.pt")
    diff = diff_states(tmp_path / "a.safetensors", tmp_path / "b.pt")
    assert paths(diff) == ["optimizer 'optimizer' / optimizer: exp_avg of norm.bias"]
    other = nn.Linear(2, 2)
    other_optimizer = torch.optim.Adam(other.parameters())
    other(torch.ones(1, 2)).sum().backward()
    other_optimizer.step()
    torch.save({"optimizer": other_optimizer.state_dict()}, tmp_path / "c.pt")
    diff = diff_states(tmp_path / "a.safetensors", tmp_path / "c.pt")
    assert {entry.name for entry in diff.only_in_b} >= {"exp_avg of parameter 0", "exp_avg of parameter 1"}


def test_lists_of_optimizers():
    """The layout of Lightning, a list of optimizer states."""
    model, optimizer = trained()
    state = {"state_dict": model.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    other = copy.deepcopy(state)
    other["optimizer_states"][0]["param_groups"][0]["lr"] = 0.25
    other["optimizer_states"][0]["state"][0]["step"] += 1
    assert paths(diff_states(state, other)) == [
        "optimizer_states[0]: step of a.weight",
        "optimizer_states[0]: param_groups[0].lr",
    ]


def test_an_optimizer_without_state_is_not_named():
    """Before the first step nothing tells the shapes; the parameters stay numbered."""
    model = Net()
    state = {"model": model.state_dict(), "optimizer": torch.optim.SGD(model.parameters(), lr=0.1).state_dict()}
    other = copy.deepcopy(state)
    other["optimizer"]["param_groups"][0]["params"] = [5, 4, 3, 2, 1, 0]
    (difference,) = diff_states(state, other).differences
    assert difference.b[0] == "parameter 5"


@pytest.mark.parametrize("params", [5, [[0]], None, [{}]])
def test_what_only_looks_like_an_optimizer(params):
    """Groups whose parameters are neither indices nor names are compared as what they are."""
    state = {"optimizer": {"state": {}, "param_groups": [{"params": params, "lr": 0.1}]}}
    other = copy.deepcopy(state)
    other["optimizer"]["param_groups"][0]["lr"] = 0.2
    assert paths(diff_states(state, other)) == ["optimizer: param_groups[0].lr"]
