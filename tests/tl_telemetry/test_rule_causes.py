"""What the rules say where the same mistake has another cause than in the cases: each is told from the evidence."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


def first(report: Report) -> str:
    return str([*report.findings, *report.notes][0])


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01)


def small():
    model = nn.Linear(4, 1)
    return model, sgd(model.parameters())


def parts(**modules):
    """Build a setup with one optimizer a part."""
    return TrainingSetup(nn.ModuleDict(modules), {name: sgd(module.parameters()) for name, module in modules.items()})


def plain(setup, batch):
    setup.optimizer.zero_grad()
    loss = mse(setup.model(batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss


class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, output, target):
        return self.weight * (mse(output, target) + 1)


def test_leftover_outside_of_the_model() -> None:
    """A module's zero_grad() that misses a part of the optimizer is told from a missing one."""

    def make_setup():
        model, criterion = nn.Linear(4, 1), Criterion()
        optimizer = sgd([*model.parameters(), *criterion.parameters()])
        return TrainingSetup(model, optimizer, state={"criterion": criterion})

    def step(setup, batch):
        setup.model.zero_grad()
        loss = setup.state["criterion"](setup.model(batch[0]), batch[1])
        loss.backward()
        setup.optimizer.step()
        return loss

    (finding,) = report_of(make_setup, step).findings
    assert finding.seen.startswith(
        "the gradients of criterion.weight that 'optimizer' stepped with still held those of its earlier updates (3 of "
        "4 updates, steps 1-3): at step 3 a norm of "
    )
    assert finding.cause == (
        "nothing cleared them between an update and the next backward(), which adds to what it finds; the other "
        "gradients of this optimizer were cleared"
    )
    assert finding.fix == (
        "call zero_grad() once an update, before backward() or after step(), on the optimizer itself: it reaches all "
        "that it steps, which a module's zero_grad() need not"
    )


def test_leftover_of_another_optimizer() -> None:
    """Gradients that another optimizer has used are ascribed to it."""

    def make_setup():
        model = nn.ModuleDict({"encoder": nn.Linear(4, 2), "a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
        held = {name: [*model["encoder"].parameters(), *model[name].parameters()] for name in "ab"}
        return TrainingSetup(model, {name: sgd(held[name]) for name in "ab"})

    def step(setup, batch):
        setup.model.zero_grad()
        for name in "ab":
            loss = mse(setup.model[name](setup.model["encoder"](batch[0])), batch[1])
            loss.backward()
            setup.optimizers[name].step()
        return loss

    (finding,) = report_of(make_setup, step).findings
    assert finding.rule == "missing-zero-grad"
    assert finding.seen.startswith(
        "the gradients of encoder.* (2 tensors) that 'b' stepped with still held those of earlier updates by 'a' (4 of "
        "4 updates, steps 0-3): at step 3 a norm of "
    )
    assert finding.fix == "call zero_grad() on 'b' before the backward() whose gradients it steps with"


def test_leftover_in_a_closure() -> None:
    """A closure that clears nothing is told to."""

    def step(setup, batch):
        def closure():
            loss = mse(setup.model(batch[0]), batch[1])
            loss.backward()
            return loss

        return setup.optimizer.step(closure)

    (finding,) = report_of(small, step).findings
    assert finding.rule == "missing-zero-grad"
    assert finding.fix == "call zero_grad() in the closure, before backward()"


def test_no_backward_at_all() -> None:
    """Steps without any backward pass say so."""

    def step(setup, batch):
        loss = mse(setup.model(batch[0]), batch[1])
        setup.optimizer.step()
        return loss

    assert first(report_of(small, step)) == (
        "[step-without-gradient] 'optimizer' stepped 4 times (steps 0-3), never with a gradient: it holds all 2 "
        "parameters\n  cause: no backward pass ran in any step\n  fix: call backward() on the loss before step()"
    )


def test_gradients_used_up_by_another_optimizer() -> None:
    """An optimizer whose gradients another one used and the loop cleared is told which."""

    def make_setup():
        model = nn.Linear(4, 1)
        return TrainingSetup(model, {"first": sgd(model.parameters()), "second": sgd(model.parameters())})

    def step(setup, batch):
        loss = mse(setup.model(batch[0]), batch[1])
        for optimizer in setup.optimizers.values():
            if optimizer is setup.optimizers["first"]:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return loss

    assert first(report_of(make_setup, step)) == (
        "[step-without-gradient] 'second' stepped 4 times (steps 0-3), never with a gradient: it holds all 2 "
        "parameters\n  cause: 'first' had stepped with their gradients, and they were cleared again, before 'second' "
        "stepped\n  fix: give each parameter to one optimizer, or give 'second' a backward pass of its own before its "
        "step"
    )


def test_steps_between_backward_passes() -> None:
    """Steps in which no backward pass ran are told from two steps in one."""

    def step(setup, batch):
        loss = mse(setup.model(batch[0]), batch[1])
        if setup.step_index % 2 == 0:
            setup.optimizer.zero_grad()
            loss.backward()
        setup.optimizer.step()
        return loss

    assert first(report_of(small, step)) == (
        "[repeated-step] 'optimizer' stepped again with gradients that it had used already: no backward pass ran in "
        "between (2 of 4 updates, steps 1, 3)\n  cause: step() is also called in steps in which no backward pass ran\n "
        " fix: call step() once for each backward pass, or once for each accumulation cycle"
    )


def test_loss_of_another_model() -> None:
    """A loss computed from a model that nothing trains says where its gradients went."""

    def make_setup():
        setup = TrainingSetup(*small())
        setup.other = nn.Linear(4, 1)
        return setup

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = mse(setup.other(batch[0]), batch[1])
        loss.backward()  # here
        setup.optimizer.step()
        return loss

    line = step.__code__.co_firstlineno + 3
    assert first(report_of(make_setup, step)) == (
        f"[loss-not-connected] 4 backward passes (test_rule_causes.py:{line}) reached no parameter that is trained: "
        "what they reached is other.* (2 tensors), which no optimizer holds (steps 0-3)\n  cause: the loss was "
        "computed from another model than the one that the optimizers train\n  fix: compute the loss from the output "
        "of the setup's model, without leaving the graph in between"
    )


def test_loss_made_anew_in_half_of_the_steps() -> None:
    """A loss without a graph is found in half of the passes, and left alone where it stands for the odd batch."""

    def loop(every):
        def step(setup, batch):
            setup.optimizer.zero_grad()
            loss = mse(setup.model(batch[0]), batch[1])
            if setup.step_index % every == 1:
                loss = torch.tensor(0.0, requires_grad=True)
            loss.backward()
            setup.optimizer.step()
            return loss

        return step, step.__code__.co_firstlineno + 5

    step, line = loop(2)
    assert report_of(small, step, 6).findings[0].seen == (
        f"3 of 6 backward passes (test_rule_causes.py:{line}) reached no parameter: the loss was a leaf tensor, with "
        "no graph behind it (steps 1, 3, 5)"
    )
    assert report_of(small, loop(3)[0], 6).findings == ()


def test_checkpoint_that_recomputes_nothing() -> None:
    """Reentrant checkpointing around inputs without gradients is named where torch warned of it."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Linear(4, 8)
            self.head = nn.Linear(8, 1)

        def forward(self, x):
            return self.head(checkpoint(self.encoder, x, use_reentrant=True))

    def make_setup():
        model = Net()
        return model, sgd(model.parameters())

    report = report_of(make_setup, plain)
    finding = report.findings[0]
    assert finding.rule == "no-gradient"
    assert finding.parameters == ("encoder.weight", "encoder.bias")
    assert [note.rule for note in report.notes] == []  # the warning is told once
    assert finding.cause == (
        "torch.utils.checkpoint with use_reentrant=True, around inputs that need no gradient: torch warned that its "
        "gradients will be None"
    )
    assert finding.fix == "pass use_reentrant=False to checkpoint()"


def test_part_under_no_grad() -> None:
    """A part that only runs with gradients off, and has no trained twin, is a finding."""

    def step(setup, batch):
        for optimizer in setup.optimizers.values():
            optimizer.zero_grad()
        with torch.no_grad():
            hidden = setup.model["encoder"](batch[0])
        loss = mse(setup.model["head"](hidden), batch[1])
        loss.backward()
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss

    report = report_of(lambda: parts(encoder=nn.Linear(4, 8), head=nn.Linear(8, 1)), step)
    assert first(report) == (
        "[no-gradient] encoder.* (2 tensors) never got a gradient in 4 steps, while 2 other parameters got one; their "
        "forward pass ran only with gradients off\n  cause: this part of the forward pass is under torch.no_grad(), "
        "inference_mode() or set_grad_enabled(False)\n  fix: take that away; if the part is not meant to train, freeze "
        "it with requires_grad_(False) and leave it out of the optimizer, or pass ignore="
    )


def test_teacher_in_no_optimizer() -> None:
    """A part in no optimizer that only runs with gradients off is noted, and is no uncovered parameter."""

    def make_setup():
        model = nn.ModuleDict({"student": nn.Linear(4, 1), "teacher": nn.Linear(4, 1)})
        return model, sgd(model["student"].parameters())

    def step(setup, batch):
        setup.optimizer.zero_grad()
        with torch.no_grad():
            target = setup.model["teacher"](batch[0])
        loss = mse(setup.model["student"](batch[0]), target)
        loss.backward()
        setup.optimizer.step()
        return loss

    report = report_of(make_setup, step)
    assert report.findings == ()
    assert first(report) == (
        "[never-ran] teacher.* (2 tensors) never got a gradient in 4 steps; their forward pass was only seen to run "
        "with gradients off\n  cause: the calls that were seen were under torch.no_grad(), as those of a target "
        "network or a teacher are\n  fix: nothing, if it is not meant to train: requires_grad_(False) says so; else "
        "call it with gradients on"
    )


def test_updates_by_hand_alone() -> None:
    """A loop without optimizers is not judged, and the report says why."""

    def step(setup, batch):
        loss = mse(setup.model(batch[0]), batch[1])
        loss.backward()
        for p in setup.model.parameters():
            p.data -= 0.01 * p.grad
            p.grad = None
        return loss

    report = report_of(lambda: TrainingSetup(nn.Linear(4, 1), {}), step)
    assert report.findings == ()
    assert not report.judged
    assert first(report) == (
        "[not-judged] no optimizer stepped in 4 steps, while the loop moved all 2 parameters without one: what an "
        "update shows could not be judged"
    )
