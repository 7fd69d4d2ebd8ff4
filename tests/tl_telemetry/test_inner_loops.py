"""Loops that train copies of the model with optimizers of their own: what they reach, and where their records end."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup
from tl_telemetry import TrainingRun, observe, run_training

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(5))
Y = X.sum(1, keepdim=True)


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    return TrainingSetup(model, {"outer": torch.optim.Adam(model.parameters(), 1e-2)})


def loss_of(model: nn.Module) -> Tensor:
    return nn.functional.mse_loss(model(X), Y)


def adapted(model: nn.Module) -> nn.Module:
    """Train a copy for two steps, with an optimizer that is made for it."""
    copied = copy.deepcopy(model)
    inner = torch.optim.SGD(copied.parameters(), lr=0.05)
    for _ in range(2):
        inner.zero_grad()
        loss_of(copied).backward()
        inner.step()
    copied.zero_grad()
    return copied


def meta_step(setup: TrainingSetup, carry: bool) -> Tensor:
    outer = setup.optimizers["outer"]
    outer.zero_grad()
    copied = adapted(setup.model)
    loss = loss_of(copied)
    loss.backward()
    if carry:
        for ours, theirs in zip(setup.model.parameters(), copied.parameters(), strict=True):
            ours.grad = theirs.grad
    outer.step()
    return loss.detach()


def not_carried(setup: TrainingSetup, _: Any) -> Tensor:
    return meta_step(setup, carry=False)


def carried(setup: TrainingSetup, _: Any) -> Tensor:
    return meta_step(setup, carry=True)


def towards_copy(setup: TrainingSetup, _: Any) -> Tensor:
    """Move the weights towards those of the trained copy without an optimizer, as Reptile does."""
    copied = adapted(setup.model)
    with torch.no_grad():
        for ours, theirs in zip(setup.model.parameters(), copied.parameters(), strict=True):
            ours.lerp_(theirs, 0.5)
    return loss_of(copied).detach()


def observed(step: Any) -> TrainingRun:
    setup = make_setup()
    with observe(setup) as run:
        for _ in range(6):
            step(setup, None)
    return run


MESSAGE = """\
[loss-not-connected] 18 backward passes (test_inner_loops.py:33 and \
test_inner_loops.py:44) reached no parameter that is trained: what they \
reached are copies of the model's parameters (4 tensors of the same shapes, stepped by SGD that is not in the setup) \
(steps 0-5)
  cause: a copy of the model is trained, as in an inner loop, and nothing carries its gradients or its weights back to \
the model that 'outer' steps
  fix: give the model the copy's gradients before 'outer' steps (p.grad = q.grad.clone() for each p and its q in the \
copy; the difference p - q of the weights for Reptile), or call the model itself through torch.func.functional_call"""


def test_gradients_that_stay_in_the_copy() -> None:
    """An optimizer that steps 6 times without a gradient, beside a trained copy of the model, has that as its cause."""
    run = run_training(make_setup, [None], not_carried, steps=6)
    report = run.check()
    assert [str(finding) for finding in report.findings] == [MESSAGE]
    assert not any(note.rule == "never-ran" for note in report.notes)


def test_the_same_without_told_steps() -> None:
    """A loop that gives no steps gets the same verdict."""
    assert [str(finding) for finding in observed(not_carried).check().findings] == [MESSAGE]


def test_gradients_or_weights_that_are_carried_back() -> None:
    """A copy whose gradients or weights come back to the model is as it should be."""
    for step in (carried, towards_copy):
        assert run_training(make_setup, [None], step, steps=6).check().ok
    assert observed(carried).check().ok


def test_optimizers_that_wait_for_their_turn() -> None:
    """An optimizer whose part is not called steps without gradients in peace while another one trains the rest."""

    def make_two() -> TrainingSetup:
        model = nn.ModuleDict({"first": nn.Linear(4, 1), "second": nn.Linear(4, 1)})
        optimizers = {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()}
        return TrainingSetup(model, optimizers)

    def step(setup: TrainingSetup, _: Any) -> Tensor:
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        loss = loss_of(setup.model["first"])
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss.detach()

    assert run_training(make_two, [None], step, steps=6).check().ok


def test_strangers_close_no_record() -> None:
    """Without told steps, a record ends with an update of the setup's own, and the summary tells what is left out."""
    run = observed(carried)
    assert len(run.records) == 6
    assert [record.optimizer_steps["outer"] for record in run.records] == [1] * 6
    followed = sum(count for record in run.records for name, count in record.optimizer_steps.items() if name != "outer")
    left = 12 - followed
    assert f"further optimizers that hold nothing of the setup {left} (not followed)" in run.summary()
