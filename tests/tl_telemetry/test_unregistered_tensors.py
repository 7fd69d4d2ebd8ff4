"""Tensors that a module trains and torch does not know: which ones a run misses in the optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_core import Report, TrainingSetup
from tl_telemetry import run_training

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(7))
Y = X.sum(1, keepdim=True)


class Prompted(nn.Module):
    """Add prompts to the input, and scale the output."""

    def __init__(self, prompts: Any, scale: Tensor) -> None:
        super().__init__()
        self.prompts = prompts
        self.scale = scale
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + sum(self.prompts)) * self.scale


def prompts() -> list[nn.Parameter]:
    return [nn.Parameter(torch.full((4,), 0.1)) for _ in range(2)]


def train(setup: TrainingSetup, batch: Any) -> Tensor:
    setup.optimizer.zero_grad()
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def report_of(make: Any, step: Any = train, held: Any = lambda model: model.parameters()) -> Report:
    def make_setup() -> TrainingSetup:
        model = make()
        return TrainingSetup(model, torch.optim.SGD(held(model), lr=0.01))

    return run_training(make_setup, (X, Y), step, steps=4).check()


REST = """\
  cause: torch registers only an nn.Parameter that is an attribute of a module, or in an nn.ParameterList or \
nn.ParameterDict
  fix: make what is meant to train an nn.Parameter that is an attribute, or several an nn.ParameterList or \
nn.ParameterDict, and build the optimizer afterwards; requires_grad_(False) says that it is not meant to train"""


def test_parameters_in_a_plain_list() -> None:
    """Parameters in a list, which no optimizer holds, get gradients for nothing."""
    (finding,) = report_of(lambda: Prompted(prompts(), torch.ones(1))).findings
    assert str(finding) == (
        "[uncovered-parameter] prompts[0], prompts[1] got gradients from 4 backward passes, without being in an "
        "optimizer, and nothing moved them: Parameters in a plain list, tuple or dict, which parameters() does not "
        "give\n" + REST
    )


def test_a_plain_tensor() -> None:
    """A tensor with requires_grad in an attribute is no Parameter either."""
    (finding,) = report_of(lambda: Prompted([0.0], torch.ones(1, requires_grad=True))).findings
    assert str(finding) == (
        "[uncovered-parameter] scale got gradients from 4 backward passes, without being in an optimizer, and nothing "
        "moved it: a plain tensor with requires_grad, which parameters() does not give\n" + REST
    )


def test_a_plain_tensor_in_a_criterion() -> None:
    """What a criterion beside the model keeps in this way is missed too."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log_var = torch.zeros(1, requires_grad=True)

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return ((output - target).square().mean() * (-self.log_var).exp() + self.log_var).squeeze()

    def make_setup() -> TrainingSetup:
        model = nn.Linear(4, 1)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01), state={"criterion": Weighted()})

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        loss = setup.state["criterion"](setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    (finding,) = run_training(make_setup, (X, Y), step, steps=4).check().findings
    assert finding.rule == "uncovered-parameter"
    assert finding.parameters == ("criterion.log_var",)


def scaled() -> Prompted:
    return Prompted([0.0], torch.ones(1, requires_grad=True))


def by_hand(setup: TrainingSetup, batch: Any) -> Tensor:
    loss = train(setup, batch)
    with torch.no_grad():
        setup.model.scale -= 0.01 * setup.model.scale.grad
        setup.model.scale.grad = None
    return loss


def keeps_its_input(setup: TrainingSetup, batch: Any) -> Tensor:
    """Keep the input of each step, with a gradient of its own, as for saliency maps."""
    setup.model.seen = batch[0].clone().requires_grad_()
    return train(setup, (setup.model.seen, batch[1]))


@pytest.mark.parametrize(
    ("make", "step", "held"),
    [
        (scaled, train, lambda model: [*model.parameters(), model.scale]),
        (scaled, by_hand, lambda model: model.parameters()),
        (lambda: Prompted(nn.ParameterList(prompts()), torch.ones(1)), train, lambda model: model.parameters()),
        (lambda: Prompted([0.0], torch.ones(1)), keeps_its_input, lambda model: model.parameters()),
    ],
)
def test_tensors_that_are_as_they_should_be(make: Any, step: Any, held: Any) -> None:
    """What an optimizer holds, the loop moves, torch registers or each step makes anew is nothing to find."""
    report = report_of(make, step, held)
    assert report.ok
    assert report.findings == ()
