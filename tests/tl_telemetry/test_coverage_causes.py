"""What a run knows of parameters that no optimizer holds: stand-ins for the model's own, and weights beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.func import functional_call

from tl_core import Report, TrainingSetup
from tl_telemetry import run_training

mse = nn.functional.mse_loss


def data(step):
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    return x, x.sum(1, keepdim=True)


def report_of(make_setup: Callable[[], Any], step: Callable[..., Any], steps: int = 4) -> Report:
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        return run_training(make_setup, data, step, steps=steps).report


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def plain(setup, batch):
    setup.optimizer.zero_grad()
    loss = mse(setup.model(batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


def test_tensors_of_the_same_shapes_that_nothing_uses_are_no_stand_ins() -> None:
    """Plain tensors in the optimizer explain the model's missing parameters only when they get the gradients."""

    def make_setup():
        model = nn.Linear(4, 1)
        return model, sgd([p.detach().clone().requires_grad_() for p in model.parameters()])

    (finding,) = report_of(make_setup, plain).findings
    assert finding.rule == "other-copy"
    assert finding.seen.endswith(
        "in no optimizer: weight, bias; in this run gradients reached 2 of these, and nothing that the optimizer holds"
    )


def test_a_template_is_not_judged() -> None:
    """A note says which parameters were only the template of a call with other tensors."""

    def make_setup():
        model = nn.Linear(4, 1)
        used = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        setup = TrainingSetup(model, sgd(used.values()))
        setup.used = used
        return setup

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = mse(functional_call(setup.model, setup.used, (batch[0],)), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    report = report_of(make_setup, step)
    assert report.ok
    assert [note.seen for note in report.notes] == [
        "all 2 parameters got no gradient and are in no optimizer; tensors of the same shapes (or stacks "
        "of these), which are no parameters, got one and were stepped: the model was called with these in place of its "
        "own (torch.func.functional_call, vmap), which were only a template and were not judged"
    ]


class Prototypes(nn.Module):
    """Compare outputs with class centres of its own."""

    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.eye(2, 3))

    def forward(self, output, target):
        return nn.functional.cross_entropy(output @ self.centres.T, target)


class Features(nn.Module):
    """Compare outputs with targets by the features of a given network."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())

    def forward(self, output, target):
        return mse(self.net(output), self.net(output.detach() + target[:, None]))


def criterion_report(criterion: nn.Module, *, held: bool = False, freeze: bool = False) -> Report:
    def make_setup():
        model = nn.Linear(4, 3)
        criterion.requires_grad_(not freeze)
        parameters = [*model.parameters(), *(criterion.parameters() if held else ())]
        return TrainingSetup(model, sgd(parameters), state={"criterion": criterion})

    def step(setup, batch):
        setup.optimizer.zero_grad()
        setup.state["criterion"].zero_grad()
        loss = setup.state["criterion"](setup.model(batch[0]), (batch[1][:, 0] > 0).long())
        loss.backward()
        setup.optimizer.step()
        return loss

    return report_of(make_setup, step)


def test_a_criterion_with_weights_of_its_own() -> None:
    """Weights that a criterion holds itself, and that no optimizer was given, are missing in it."""
    (finding,) = criterion_report(Prototypes()).findings
    assert str(finding) == (
        "[uncovered-parameter] criterion.centres got gradients from 4 backward passes, without being in an "
        "optimizer, and nothing moved them. criterion (Prototypes) is beside the model, and has weights of its own\n"
        "  cause: the optimizer was built from the model's parameters, to which a criterion's do not belong\n"
        "  fix: build it from both ([*model.parameters(), *criterion.parameters()]); if they are not meant to train, "
        "freeze them with requires_grad_(False), which also saves their gradients"
    )


@pytest.mark.parametrize("in_state", [True, False])
def test_a_layer_beside_the_model(in_state) -> None:
    """One layer whose weights the loss compares with is missing wherever the setup keeps it; frozen it is not."""

    def run(freeze: bool) -> Report:
        def make_setup():
            model, centres = nn.Linear(4, 3), nn.Linear(3, 2, bias=False).requires_grad_(not freeze)
            setup = TrainingSetup(model, sgd(model.parameters()), state={"centres": centres} if in_state else {})
            setup.centres = centres
            return setup

        def step(setup, batch):
            setup.optimizer.zero_grad()
            scores = nn.functional.linear(setup.model(batch[0]), setup.centres.weight)
            loss = nn.functional.cross_entropy(scores, (batch[1][:, 0] > 0).long())
            loss.backward()
            setup.optimizer.step()
            return loss

        return report_of(make_setup, step)

    (finding,) = run(freeze=False).findings
    assert finding.rule == "uncovered-parameter"
    assert finding.seen.endswith("centres (Linear) is beside the model, and has weights of its own")
    assert run(freeze=True).findings == ()


def test_a_network_in_a_criterion_is_not_judged() -> None:
    """A network that a loss compares features of may be fixed on purpose: a note says what it costs."""
    for criterion in (Features(), Prototypes().eval()):
        report = criterion_report(criterion)
        assert report.ok
        (note,) = report.notes
        assert note.rule == "not-judged"
        assert note.seen.endswith(" is beside the model: whether it is meant to train could not be judged")


@pytest.mark.parametrize("how", ["held", "freeze"])
@pytest.mark.parametrize("make", [Prototypes, Features])
def test_criteria_that_are_settled(how, make) -> None:
    """A criterion that an optimizer holds, or that is frozen, is no matter at all."""
    report = criterion_report(make(), **{how: True})
    assert (report.findings, report.notes) == ((), ())


def test_a_tensor_that_is_no_longer_used_explains_its_optimizer() -> None:
    """An optimizer that holds only what was replaced is named once: that it steps without a gradient follows."""

    def make_setup():
        model = nn.Linear(4, 1)
        bias = nn.Parameter(model.bias.detach().clone())
        return TrainingSetup(model, {"weight": sgd([model.weight]), "bias": sgd([bias])})

    def step(setup, batch):
        setup.model.zero_grad()
        loss = mse(setup.model(batch[0]), batch[1])
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    assert [finding.rule for finding in report_of(make_setup, step).findings] == ["foreign-tensor"]
