from __future__ import annotations

import pytest
import torch
from torch import nn

from tl_coverage import check_optimizer_coverage

UNCOVERED_CAUSE = (
    "no optimizer was given them. Either they were left out when it was built, or they were added to the model or "
    "unfrozen afterwards"
)
UNCOVERED_FIX = (
    "build the optimizer from model.parameters() once the model is complete, or add them with add_param_group(); "
    "if they are not meant to train, freeze them with requires_grad_(False) or pass ignore="
)


def test_parameters_in_no_optimizer_are_found(model, sgd):
    """Trainable parameters that no optimizer holds are named by module."""
    report = check_optimizer_coverage(model, sgd([*model.enc.parameters(), model.head.weight]))
    assert str(report) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[uncovered-parameter] 3 of 6 trainable parameters are in no optimizer: norm.* (2 tensors), head.bias\n"
        f"  cause: {UNCOVERED_CAUSE}\n"
        f"  fix: {UNCOVERED_FIX}"
    )
    (finding,) = report.findings
    assert finding.parameters == ("norm.weight", "norm.bias", "head.bias")
    assert finding.evidence == {"num_uncovered": 3, "num_trainable": 6}


def test_no_optimizer_at_all_covers_nothing(model):
    """An empty dict, to be filled by the loop, holds nothing yet."""
    (finding,) = check_optimizer_coverage(model, {}).findings
    assert str(finding) == (
        "[uncovered-parameter] 6 of 6 trainable parameters are in no optimizer: "
        "enc.* (2 tensors), norm.* (2 tensors), head.* (2 tensors)\n"
        "  cause: there is no optimizer\n"
        f"  fix: {UNCOVERED_FIX}"
    )


# torch 2.13's own compiler modules use what it deprecates when they are first imported.
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_names_are_those_of_the_unwrapped_model(model, sgd):
    """A compiled model's finding carries no trace of the wrapper."""
    report = check_optimizer_coverage(torch.compile(nn.DataParallel(model)), sgd([*model.parameters()][:4]))
    assert report.findings[0].parameters == ("head.weight", "head.bias")


def test_frozen_and_ignored_parameters_need_no_optimizer(model, sgd):
    """What is frozen or ignored may be left out, and so may what another optimizer holds."""
    model.norm.requires_grad_(False)
    optimizers = {"weight": sgd([model.head.weight]), "bias": sgd([model.head.bias])}
    assert str(check_optimizer_coverage(model, optimizers, ignore=["enc.*"])) == "Optimizer coverage: passed"


def test_parameters_in_several_optimizers_are_found(model, sgd):
    """A parameter that two optimizers hold is named with both, once for every such pair."""
    optimizers = {"body": sgd([*model.parameters()][:5]), "top": sgd(model.head.parameters())}
    assert str(check_optimizer_coverage(model, optimizers)) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[several-optimizers] 1 parameter is in 2 optimizers ('body', 'top'): head.weight\n"
        "  cause: each of these optimizers updates the parameter when it steps, with moments of its own\n"
        "  fix: give every parameter to one optimizer; if they take turns on purpose, pass the check only the "
        "optimizers of one phase, or ignore="
    )


def test_frozen_parameters_may_be_in_several_optimizers(model, sgd):
    """Nobody updates a frozen parameter."""
    model.enc.requires_grad_(False)
    optimizers = [sgd(model.parameters()), sgd(model.enc.parameters())]
    assert check_optimizer_coverage(model, optimizers).ok


def test_a_wrapper_and_its_inner_optimizer_are_one(model, sgd):
    """Optimizers that share their list of groups (SAM and its base) are not two owners."""

    class Outer(torch.optim.Optimizer):
        def __init__(self, inner):
            super().__init__([p for group in inner.param_groups for p in group["params"]], {})
            self.param_groups = inner.param_groups

    inner = sgd(model.parameters())
    assert check_optimizer_coverage(model, {"outer": Outer(inner), "inner": inner}).ok


TWICE_CAUSE = (
    "  cause: an optimizer updates a parameter once for every time that it is listed, so each step moves it "
    "several times\n"
    "  fix: list every parameter once, in one group"
)


def test_a_parameter_twice_in_a_group_is_found(model, sgd):
    """Twice in one group means twice in each step."""
    optimizer = sgd(model.parameters())
    optimizer.param_groups[0]["params"] += [*model.enc.parameters()]
    assert str(check_optimizer_coverage(model, optimizer)) == (
        "Optimizer coverage: failed, 1 finding\n\n"
        "[listed-twice] the optimizer lists 2 parameters 2 times in group 0: enc.* (2 tensors)\n" + TWICE_CAUSE
    )


def test_a_parameter_in_two_groups_is_found(model, sgd):
    """So does once in each of two groups; among several optimizers the right one is named."""
    own, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
    second = sgd([{"params": [*model.head.parameters(), own]}, {"params": [other]}])
    second.param_groups[1]["params"] += [model.head.bias, own]
    optimizers = {"first": sgd([*model.enc.parameters(), *model.norm.parameters()]), "second": second}
    (finding,) = check_optimizer_coverage(model, optimizers).findings
    assert str(finding) == (
        "[listed-twice] optimizer 'second' lists 2 parameters in groups 0, 1: head.bias, a tensor of shape (3,)\n"
        + TWICE_CAUSE
    )


def test_parameters_in_groups_once_are_left_alone(model, sgd):
    """Parameter groups as such, and one optimizer for each parameter, are fine."""
    groups = [{"params": [p], "lr": 0.1 * index} for index, p in enumerate(model.parameters())]
    assert check_optimizer_coverage(model, sgd(groups)).ok
    assert check_optimizer_coverage(model, {name: sgd([p]) for name, p in model.named_parameters()}).ok


def test_ignored_parameters_may_be_listed_twice(model, sgd):
    """ignore= applies to every rule."""
    optimizers = [sgd(model.parameters()), sgd(model.enc.parameters())]
    assert not check_optimizer_coverage(model, optimizers).ok
    assert check_optimizer_coverage(model, optimizers, ignore=["enc.*"]).ok


class Twins(nn.Module):
    """A network and a second one of the same kind."""

    def __init__(self, second="target", width=4):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        self.add_module(second, nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1)))


def test_a_part_that_may_be_a_target_network(sgd):
    """Parameters that repeat names and shapes of held ones may be a copy that the loop moves."""
    model = Twins()
    (finding,) = check_optimizer_coverage(model, sgd(model.online.parameters())).findings
    assert finding.cause == (
        "no optimizer was given them. They were left out when it was built, were added to the model or unfrozen "
        "afterwards, or are a target network or an average that the loop moves: there are parameters of the same names "
        "and shapes that an optimizer holds (online.* (4 tensors))"
    )
    assert finding.fix == f"{UNCOVERED_FIX}; of a target network a run shows that it is moved"


@pytest.mark.parametrize("width", [4, 5])
def test_a_part_that_is_no_target_network(sgd, width):
    """Parts of other shapes, and single layers that are alike, are no copies of what is held."""
    model = Twins(width=width)
    held = model.online.parameters() if width != 4 else [*model.online.parameters(), *model.target[0].parameters()]
    model.late, model.other = nn.Linear(4, 1), nn.Linear(4, 1)
    (finding,) = check_optimizer_coverage(model, sgd([*held, *model.other.parameters()])).findings
    assert finding.cause == UNCOVERED_CAUSE


def test_an_optimizer_of_frozen_parameters(model, sgd):
    """That all of what the optimizer holds is frozen narrows the cause down."""
    optimizer = sgd(model.parameters())
    model.requires_grad_(False)
    model.adapter = nn.Linear(16, 2)
    (finding,) = check_optimizer_coverage(model, optimizer).findings
    assert str(finding) == (
        "[uncovered-parameter] 2 of 2 trainable parameters are in no optimizer: adapter.* (2 tensors)\n"
        "  cause: all 6 tensors that the optimizer holds are frozen: either the optimizer was built before that part "
        "was frozen and these were added (adapters, a new head), or was given the frozen part instead of the trained "
        "one\n"
        f"  fix: {UNCOVERED_FIX}"
    )


def test_an_optimizer_of_some_frozen_parameters(model, sgd):
    """Where some of the optimizer's parameters train, when it was built is left open."""
    optimizer = sgd(model.parameters())
    model.enc.requires_grad_(False)
    model.adapter = nn.Linear(16, 2)
    (finding,) = check_optimizer_coverage(model, optimizer).findings
    assert finding.cause == UNCOVERED_CAUSE
