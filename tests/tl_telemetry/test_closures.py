from __future__ import annotations

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import observe

X = torch.linspace(-1.0, 1.0, 12).reshape(4, 3)


def train(closure_of, *, outside=False, **options):
    """Train with LBFGS; ``closure_of(model, optimizer)`` makes the closure, ``outside`` clears before each step."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, **options)
    setup = TrainingSetup(model, optimizer)
    closure = closure_of(model, optimizer)
    with observe(setup) as run:
        for _ in range(4):
            with run.step() as step:
                if outside:
                    optimizer.zero_grad()
                step.loss = optimizer.step(closure)
    return run


def evaluation(*, clear, parts=1, set_to_none=True):
    """Return what makes a closure of ``parts`` backward passes, with or without clearing the gradients first."""

    def closure_of(model, optimizer):
        def closure():
            if clear:
                optimizer.zero_grad(set_to_none=set_to_none)
            losses = [(model(x) - 1).exp().mean() / parts for x in X.chunk(parts)]
            for loss in losses:
                loss.backward()
            return sum(loss.detach() for loss in losses)

        return closure

    return closure_of


def test_gradients_cleared_outside_of_the_closure():
    """An optimizer that evaluates its closure several times a step needs the gradients cleared in it."""
    run = train(evaluation(clear=False), outside=True, max_iter=4)
    (finding,) = run.findings
    assert str(finding) == (
        "[missing-zero-grad] the gradients of all 2 parameters that 'optimizer' stepped with held more than its "
        "closure's last evaluation (4 of 4 updates, steps 0-3): up to 4 backward passes, with the closure evaluated 4 "
        "times in the step\n"
        "  cause: the closure does not clear the gradients: each evaluation adds to those before it\n"
        "  fix: call zero_grad() in the closure, before backward()"
    )


@pytest.mark.parametrize(
    ("closure_of", "options"),
    [
        (evaluation(clear=True), {"max_iter": 4}),
        (evaluation(clear=True, set_to_none=False), {"max_iter": 4}),
        (evaluation(clear=True, parts=2), {"max_iter": 4}),
        (evaluation(clear=True, parts=4), {"max_iter": 4, "line_search_fn": "strong_wolfe"}),
        (evaluation(clear=False, parts=2), {"max_iter": 1, "max_eval": 1}),
    ],
    ids=["cleared", "set to zero", "two parts", "line search", "one evaluation"],
)
def test_closures_that_are_right(closure_of, options):
    """Micro-batches in a closure, line searches, and a single evaluation of a closure that need not clear."""
    assert [str(finding) for finding in train(closure_of, outside=True, **options).findings] == []


def test_gradients_that_are_never_cleared_get_one_finding():
    """Without any zero_grad the leftovers of earlier updates are what is told."""
    (finding,) = train(evaluation(clear=False), max_iter=4).findings
    assert finding.rule == "missing-zero-grad"
    assert "still held those of its earlier updates" in finding.seen
