from __future__ import annotations

import pytest
import torch
from torch import nn

from tl_core import group_names, match_names, module_names, parameter_names, step_ranges

# torch 2.13's own compiler modules use what it deprecates when they are first imported.
quiet_compile = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(5, 3)
        self.out = nn.Linear(3, 5, bias=False)
        self.out.weight = self.emb.weight


def test_names_are_those_of_the_model():
    """A plain model's names are its own, in order, for the same objects."""
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    named = parameter_names(model)
    assert list(named) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert all(named[name] is parameter for name, parameter in model.named_parameters())


def test_tied_parameters_have_their_first_name():
    """A tied parameter appears once, or under all its names when they are asked for."""
    assert list(parameter_names(Tied())) == ["emb.weight"]
    assert list(parameter_names(Tied(), remove_duplicate=False)) == ["emb.weight", "out.weight"]


@quiet_compile
@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        nn.DataParallel,
        lambda model: torch.compile(nn.DataParallel(model)),
        lambda model: nn.DataParallel(torch.compile(model)),
    ],
    ids=["compiled", "parallel", "compiled parallel", "parallel compiled"],
)
def test_wrappers_leave_no_trace_in_names(wrap):
    """What torch.compile and data parallel wrappers put into names is cut out, also nested."""
    model = nn.Sequential(nn.Linear(2, 3))
    assert list(parameter_names(wrap(model))) == ["0.weight", "0.bias"]
    assert module_names(wrap(model)) == {"": model, "0": model[0]}


@quiet_compile
def test_a_compiled_part_leaves_no_trace():
    """A submodule that is compiled alone has its plain names too."""
    encoder = nn.Linear(2, 3)
    model = nn.ModuleDict({"enc": torch.compile(encoder), "head": nn.Linear(3, 1)})
    assert list(parameter_names(model)) == ["enc.weight", "enc.bias", "head.weight", "head.bias"]
    assert module_names(model) == {"": model, "enc": encoder, "head": model["head"]}


def test_a_module_that_is_named_module_keeps_its_name():
    """Only a wrapper's own prefix is cut, not an attribute that happens to be called `module`."""
    model = nn.Module()
    model.module = nn.Linear(2, 3)
    assert list(parameter_names(model)) == ["module.weight", "module.bias"]
    assert list(parameter_names(nn.DataParallel(model))) == ["module.weight", "module.bias"]
    assert list(module_names(nn.DataParallel(model))) == ["", "module"]


NAMES = ["enc.weight", "enc.bias", "head.weight"]


def test_patterns_pick_names_in_their_order():
    """The result follows the names, not the patterns, and lists each once."""
    assert match_names(NAMES, ["head.*", "*.weight"], argument="ignore") == ["enc.weight", "head.weight"]
    assert match_names(NAMES, (), argument="ignore") == []


@pytest.mark.parametrize(
    ("patterns", "error", "message"),
    [
        ("enc.*", TypeError, "ignore must be a list of patterns, got the string 'enc.*': write ['enc.*']"),
        (3, TypeError, "ignore must be a list of patterns, got int"),
        ([3], TypeError, "ignore must hold strings, got int 3"),
        (
            ["enc.*", "hed.weight"],
            ValueError,
            "ignore: the pattern 'hed.weight' matches nothing; names are for example head.weight, enc.weight",
        ),
        (
            ["Q"],
            ValueError,
            "ignore: the pattern 'Q' matches nothing; names are for example enc.weight, enc.bias, head.weight",
        ),
    ],
)
def test_bad_patterns_are_named(patterns, error, message):
    """A string, a non-string and a pattern that matches nothing are errors that name the argument."""
    with pytest.raises(error) as caught:
        match_names(NAMES, patterns, argument="ignore")
    assert str(caught.value) == message


def test_a_pattern_without_any_names_says_so():
    """Nothing to match is said as such."""
    with pytest.raises(ValueError) as caught:
        match_names([], ["a"], argument="frozen")
    assert str(caught.value) == "frozen: the pattern 'a' matches nothing; there are no names"


ALL = ["enc.0.weight", "enc.0.bias", "enc.1.weight", "norm.weight", "head.weight", "head.bias"]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["head.weight"], "head.weight"),
        (["norm.weight"], "norm.weight"),
        (["head.bias", "head.weight"], "head.* (2 tensors)"),
        (["enc.0.weight", "enc.0.bias", "head.bias"], "enc.0.* (2 tensors), head.bias"),
        (["enc.0.weight", "enc.0.bias", "enc.1.weight"], "enc.* (3 tensors)"),
        (["enc.0.weight", "other.a", "other.b"], "enc.0.weight, other.* (2 tensors)"),
    ],
)
def test_a_prefix_stands_for_all_its_names_only(names, text):
    """The longest run of names under one module becomes its prefix; a part of a module is spelled out."""
    assert group_names(names, ALL) == text


def test_a_long_list_of_names_is_cut():
    """Twelve entries are shown; the rest is counted in tensors."""
    names = [f"a{index}" for index in range(14)] + ["b.weight", "b.bias"]
    text = group_names(names, names)
    assert text == f"{', '.join(names[:12])}, and 4 more tensors"


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([], "no step"),
        ([3], "step 3"),
        ([3, 3], "step 3"),
        ([0, 1, 2], "steps 0-2"),
        ([7, 0, 2, 1, 4, 3], "steps 0-4, 7"),
        ([1, 2], "steps 1-2"),
    ],
)
def test_steps_are_written_as_ranges(steps, text):
    """Neighbouring steps become a range, in order."""
    assert step_ranges(steps) == text
