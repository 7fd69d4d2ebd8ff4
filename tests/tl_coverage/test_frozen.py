from __future__ import annotations

import torch
from torch import nn

from tl_coverage import check_optimizer_coverage

ATTRIBUTE = (
    "[frozen-parameter] norm.* (2 tensors) are frozen, but model.norm has the plain attribute requires_grad = True\n"
    "  cause: model.norm.requires_grad = True sets an attribute of the module and leaves its parameters as they were\n"
    "  fix: call model.norm.requires_grad_(True)"
)


def test_frozen_parameters_are_found_when_none_may_be(model, sgd):
    """With allow_frozen=False every frozen parameter is a finding, in an optimizer or not."""
    model.enc.requires_grad_(False)
    report = check_optimizer_coverage(model, sgd([*model.parameters()][1:]), allow_frozen=False)
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[frozen-parameter] 2 parameters are frozen although allow_frozen is False: enc.* (2 tensors) "
        "(1 of 2 in an optimizer, which will not move them)\n"
        "  cause: requires_grad is False, so they get no gradient\n"
        "  fix: unfreeze them with requires_grad_(True); pass ignore= for those that are meant to be frozen"
    )


def test_frozen_parameters_are_fine_by_default(model, sgd):
    """Frozen parameters, in an optimizer or not, pass; so do ignored ones when none else may be frozen."""
    model.enc.requires_grad_(False)
    assert str(check_optimizer_coverage(model, sgd(model.parameters()))) == "Optimizer coverage: passed"
    assert check_optimizer_coverage(model, sgd(model.head.parameters()), ignore=["norm.*"]).ok
    assert check_optimizer_coverage(model, sgd(model.parameters()), ignore=["enc.*"], allow_frozen=False).ok


def test_an_attribute_instead_of_a_call_is_named(model, sgd):
    """`module.requires_grad = True` unfreezes nothing: said as such, apart from what else is frozen."""
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    model.norm.requires_grad = True
    report = check_optimizer_coverage(model, sgd(model.parameters()), allow_frozen=False, ignore=["enc.*"])
    assert str(report) == f"Optimizer coverage: failed, 1 finding\n\n{ATTRIBUTE}"
    both = check_optimizer_coverage(model, sgd(model.parameters()), allow_frozen=False)
    assert [finding.parameters for finding in both.findings] == [
        ("norm.weight", "norm.bias"),
        ("enc.weight", "enc.bias"),
    ]


def test_the_attribute_is_a_note_where_frozen_is_allowed(model, sgd):
    """By default the same is worth a note."""
    model.norm.requires_grad_(False).requires_grad = True
    report = check_optimizer_coverage(model, sgd(model.parameters()))
    assert str(report) == f"Optimizer coverage: passed, 1 note\n\nNotes:\n{ATTRIBUTE}"


def test_an_attribute_that_freezes_nothing_is_a_note(model, sgd):
    """`model.requires_grad = False` freezes nothing; through wrappers the module keeps its name."""
    model.enc.requires_grad = False
    wrapped = nn.DataParallel(model)
    for allow_frozen in (True, False):
        report = check_optimizer_coverage(wrapped, sgd(model.parameters()), allow_frozen=allow_frozen)
        assert str(report) == (
            "Optimizer coverage: passed, 1 note\n\nNotes:\n"
            "[frozen-parameter] enc.* (2 tensors) are trainable, but model.enc has the plain attribute "
            "requires_grad = False\n"
            "  cause: model.enc.requires_grad = False sets an attribute of the module and leaves its parameters as "
            "they were\n"
            "  fix: call model.enc.requires_grad_(False)"
        )


def test_the_attribute_on_the_model_itself_is_named(model, sgd):
    """The whole model is called `model`."""
    model.requires_grad = False
    (note,) = check_optimizer_coverage(model, sgd(model.parameters())).notes
    assert note.fix == "call model.requires_grad_(False)"


def test_an_attribute_that_agrees_is_left_alone(model, sgd):
    """A module's own setting of that name is no mistake when its parameters are so, or mixed."""
    model.norm.requires_grad_(False).requires_grad = False
    model.head.bias.requires_grad_(False)
    model.head.requires_grad = True
    assert str(check_optimizer_coverage(model, sgd(model.parameters()))) == "Optimizer coverage: passed"


def test_integer_parameters_are_not_frozen(model, sgd):
    """A quantised weight cannot have a gradient: nobody froze it."""
    model.table = nn.Parameter(torch.zeros(3, dtype=torch.int8), requires_grad=False)
    assert check_optimizer_coverage(model, sgd(model.parameters()), allow_frozen=False).ok


def test_lazy_parameters_may_be_frozen(sgd):
    """A parameter without a shape is judged like any other."""
    model = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    for parameter in model[0].parameters():
        parameter.requires_grad = False
    (finding,) = check_optimizer_coverage(model, sgd(model.parameters()), allow_frozen=False).findings
    assert finding.parameters == ("0.weight", "0.bias")
