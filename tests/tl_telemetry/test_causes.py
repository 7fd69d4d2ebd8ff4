"""Rules that see one thing and tell its causes apart."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import lr_scheduler

from tl_core import Finding, TrainingSetup
from tl_telemetry import run_training

X = torch.randn(16, 6, generator=torch.Generator().manual_seed(3))
Y = X @ torch.linspace(-1.0, 1.0, 6).unsqueeze(1)


def findings(prepare: Callable[[], TrainingSetup], step: Callable[[TrainingSetup, Any], Any]) -> tuple[Finding, ...]:
    return run_training(prepare, (X, Y), step, steps=8).check().findings


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


def plain(lr: float = 0.05, schedule: Callable[[Any], Any] | None = None) -> Callable[[], TrainingSetup]:
    def make_setup() -> TrainingSetup:
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=lr)
        return TrainingSetup(net, optimizer, schedule(optimizer) if schedule else None)

    return make_setup


def backward(setup: TrainingSetup, batch: Any) -> Tensor:
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    return loss


def train(setup: TrainingSetup, batch: Any) -> Tensor:
    setup.optimizer.zero_grad()
    loss = backward(setup, batch)
    setup.optimizer.step()
    for scheduler in setup.schedulers.values():
        scheduler.step()
    return loss


def train_without_scheduler(setup: TrainingSetup, batch: Any) -> Tensor:
    setup.optimizer.zero_grad()
    loss = backward(setup, batch)
    setup.optimizer.step()
    return loss


def hidden_schedule() -> TrainingSetup:
    setup = plain(0.1)()
    setup.hidden = lr_scheduler.LambdaLR(setup.optimizer, lambda step: 0.0)
    return setup


ZERO_RATES = {
    "a schedule that begins at 0 and never steps": (
        plain(0.1, lambda o: lr_scheduler.LambdaLR(o, lambda epoch: epoch / 5)),
        train_without_scheduler,
        "its base rate is 0.1, but the first value of 'scheduler' is 0, and it never stepped in these 8 updates: "
        "it steps once an epoch (the first epoch then trains nothing), or its step() is never called",
    ),
    "a base rate of 0": (
        plain(0.0, lambda o: lr_scheduler.ExponentialLR(o, 0.9)),
        train,
        "its base rate is 0 (initial_lr of every group), and whatever a schedule multiplies it with stays 0",
    ),
    "a scheduler outside of the setup": (
        hidden_schedule,
        train,
        "its base rate is 0.1, and something that is not among the setup's schedulers sets 0",
    ),
    "no scheduler": (
        plain(0.0),
        train,
        "undecided: the optimizer was built with lr=0, or the loop sets its rate to 0; no scheduler of the setup "
        "drives it",
    ),
}


@pytest.mark.parametrize("name", ZERO_RATES)
def test_cause_of_a_zero_rate(name: str) -> None:
    """A rate of 0 is traced as far as base rates and schedulers tell."""
    prepare, step, cause = ZERO_RATES[name]
    (finding,) = findings(prepare, step)
    assert (finding.rule, finding.cause) == ("lr-zero", cause)


def read_generator() -> TrainingSetup:
    net = model()
    parameters = net.parameters()
    setup = TrainingSetup(net, torch.optim.SGD(parameters, lr=0.05))
    setup.clipped = parameters
    return setup


def with_copy() -> TrainingSetup:
    setup = plain()()
    setup.clipped = list(copy.deepcopy(setup.model).parameters())
    return setup


def clips_attribute(setup: TrainingSetup, batch: Any) -> Tensor:
    setup.optimizer.zero_grad()
    loss = backward(setup, batch)
    clip_grad_norm_(setup.clipped, 0.1)
    setup.optimizer.step()
    return loss


def clips_zeros(setup: TrainingSetup, batch: Any) -> Tensor:
    setup.optimizer.zero_grad(set_to_none=False)
    clip_grad_norm_(setup.model.parameters(), 0.1)
    loss = backward(setup, batch)
    setup.optimizer.step()
    return loss


def clips_after_clearing(setup: TrainingSetup, batch: Any) -> Tensor:
    loss = backward(setup, batch)
    setup.optimizer.step()
    setup.optimizer.zero_grad()
    clip_grad_norm_(setup.model.parameters(), 0.1)
    return loss


def clips_leftovers(setup: TrainingSetup, batch: Any) -> Tensor:
    clip_grad_norm_(setup.model.parameters(), 0.1)
    return train(setup, batch)


CLIPS = {
    "a generator that was read": (
        read_generator,
        clips_attribute,
        "clip-misses",
        "its argument is empty: usually a generator that was read before (`params = model.parameters()`)",
    ),
    "a copy": (
        with_copy,
        clips_attribute,
        "clip-misses",
        "the clip is given other parameters than those that are trained",
    ),
    "zeros": (
        plain(),
        clips_zeros,
        "clip-misses",
        "it runs after zero_grad() and before backward(): there is nothing to clip at that time",
    ),
    "nothing left": (
        plain(),
        clips_after_clearing,
        "clip-misses",
        "it runs after zero_grad(): there is nothing to clip at that time",
    ),
    "what the last update left": (
        plain(),
        clips_leftovers,
        "clip-after-step",
        "the clip comes before backward(), on the gradients that the last update left",
    ),
}


@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.filterwarnings("ignore:`parameters` is an empty generator:UserWarning")
def test_cause_of_a_clip_without_effect(name: str) -> None:
    """A clip without effect is told apart by what it was given, and by when it ran."""
    prepare, step, rule, cause = CLIPS[name]
    (finding,) = findings(prepare, step)
    assert (finding.rule, finding.cause) == (rule, cause)


def test_clip_of_the_wrong_player() -> None:
    """A clip whose gradients are dropped, right before another optimizer's step, is given the wrong parameters."""

    def make_setup() -> TrainingSetup:
        net = nn.ModuleDict({"maker": nn.Linear(2, 6), "judge": nn.Linear(6, 1)})
        return TrainingSetup(net, {name: torch.optim.SGD(part.parameters(), lr=0.01) for name, part in net.items()})

    def step(setup: TrainingSetup, batch: Any) -> dict[str, Tensor]:
        maker, judge = setup.model["maker"], setup.model["judge"]
        made = maker(torch.randn(16, 2))
        setup.optimizers["judge"].zero_grad()
        judged = (judge(batch[0]) - 1).square().mean() + judge(made.detach()).square().mean()
        judged.backward()
        clip_grad_norm_(judge.parameters(), 1.0)
        setup.optimizers["judge"].step()
        setup.optimizers["maker"].zero_grad()
        fooled = (judge(made) - 1).square().mean()
        fooled.backward()
        clip_grad_norm_(judge.parameters(), 1.0)  # the maker's were meant
        setup.optimizers["maker"].step()
        return {"judge": judged, "maker": fooled}

    (finding,) = findings(make_setup, step)
    line = step.__code__.co_firstlineno + 11
    assert str(finding) == (
        f"[clip-misses] clip_grad_norm_() at test_causes.py:{line} clipped none of the stepped gradients: "
        "it covers only judge.* (2 tensors), whose gradients of that time never went into an update; what was stepped "
        "next is maker.* (2 tensors) (7 calls, steps 0-6)\n"
        "  cause: the clip is given other parameters than those that 'maker' steps after it\n"
        "  fix: pass the parameters of 'maker'"
    )


def test_stale_gradient_of_a_frozen_layer() -> None:
    """A frozen layer that moves by a gradient from before is told from one that decays."""

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        if setup.step_index == 3:
            setup.model[0].requires_grad_(False)
        for p in setup.model.parameters():
            if p.requires_grad:
                p.grad = None
        loss = backward(setup, batch)
        setup.optimizer.step()
        return loss

    (finding,) = findings(plain(), step)
    assert (finding.rule, finding.parameters) == ("frozen-moved", ("0.weight", "0.bias"))
    assert finding.cause == (
        "'optimizer' still holds them, and their .grad still holds a gradient from before they were frozen (norm up to "
        "1.03): it is applied again at each update"
    )


def test_wanted_freeze_that_is_broken() -> None:
    """What ``frozen=`` names and changes is a finding, with the parameters and buffers told apart."""

    def make_setup() -> TrainingSetup:
        net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        net[1].requires_grad_(False)
        return TrainingSetup(net, torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05))

    run = run_training(make_setup, (X, Y), train, steps=4)
    (finding,) = run.check(frozen=["0.bias", "1.*"]).findings
    assert str(finding) == (
        "[frozen-moved] 0.bias, 1.num_batches_tracked, 1.running_mean, 1.running_var changed during the run although "
        "frozen=['0.bias', '1.*'] asks for no change\n"
        "  cause: 'optimizer' moved 0.bias; a forward pass (BatchNorm in training mode does), or the loop itself, "
        "wrote 1.num_batches_tracked, 1.running_mean, 1.running_var\n"
        "  fix: leave what must not move out of the optimizer, and freeze it (requires_grad_(False)); put the frozen "
        "modules in eval mode (module.eval()) after each model.train()"
    )


def test_wanted_freeze_that_is_an_attribute() -> None:
    """Where ``module.requires_grad = False`` was meant to freeze, ``frozen=`` names it as the cause."""

    def make_setup() -> TrainingSetup:
        setup = plain()()
        setup.model[0].requires_grad = False
        return setup

    run = run_training(make_setup, (X, Y), train, steps=4)
    (finding,) = run.check(frozen=["0.*"]).findings
    assert str(finding) == (
        "[frozen-moved] 0.bias, 0.weight changed during the run although frozen=['0.*'] asks for no change\n"
        "  cause: 'optimizer' moved 0.bias, 0.weight: model[0].requires_grad = False sets an attribute of the module "
        "and leaves its parameters as they were\n"
        "  fix: call model[0].requires_grad_(False)"
    )
    (finding,) = run.check(frozen=["2.*"]).findings
    assert finding.cause == "'optimizer' moved 2.bias, 2.weight"


class _Settled(torch.optim.Optimizer):
    """Steps by less than what bfloat16 resolves, with or without a setting that says that this adds up."""

    def __init__(self, parameters: Any, kahan_sum: bool) -> None:
        super().__init__(parameters, {"lr": 1e-7, "kahan_sum": kahan_sum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad.sign(), alpha=-1e-7)


class _Wrapper:
    """Wraps an optimizer, and has neither state nor defaults."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups = optimizer, optimizer.param_groups
        self.step, self.zero_grad = optimizer.step, optimizer.zero_grad


@pytest.mark.parametrize("kahan_sum", [False, True])
def test_compensation_of_a_wrapped_optimizer(kahan_sum: bool) -> None:
    """Whether rounding is made up for is asked of the optimizer inside of a wrapper, which need not have a state."""

    def make_setup() -> TrainingSetup:
        model = nn.Linear(6, 1).bfloat16()
        return TrainingSetup(model, _Wrapper(_Settled(model.parameters(), kahan_sum)))

    report = run_training(make_setup, (X.bfloat16(), Y.bfloat16()), train, steps=4).check()
    assert [finding.rule for finding in report.findings] == ([] if kahan_sum else ["update-rounds-away"])
    assert report.notes == ()


def two_losses(clear: bool) -> tuple[Callable[[], TrainingSetup], Callable[[TrainingSetup, Any], Any]]:
    """Return a loop that runs backward on a term of its loss, clears the gradients or does not, and then on the sum."""

    def make_setup() -> TrainingSetup:
        net = nn.Linear(6, 2)
        return TrainingSetup(net, torch.optim.SGD(net.parameters(), lr=0.05))

    def step(setup: TrainingSetup, batch: Any) -> Tensor:
        setup.optimizer.zero_grad()
        main, term = (setup.model(batch[0]) - batch[1]).square().mean(0).unbind()
        term = 0.5 * term
        term.backward(retain_graph=True)
        if clear:
            setup.optimizer.zero_grad()
        total = main + term + 0.0
        total.backward()
        setup.optimizer.step()
        return total

    return make_setup, step


def test_term_and_sum_are_added_up() -> None:
    """A term of a loss that had a backward pass of its own before the sum's counts twice."""
    make_setup, step = two_losses(clear=False)
    line = step.__code__.co_firstlineno
    assert str(findings(make_setup, step)[0]) == (
        "[backward-twice] backward() ran on a term of a loss, and on the sum before 'optimizer' stepped "
        f"(test_causes.py:{line + 4} and test_causes.py:{line + 8}; 8 of 8 updates, steps 0-7): the gradients of all 2 "
        "parameters held the term twice\n"
        "  cause: the second call adds its gradients to those of the first: nothing cleared them in between\n"
        "  fix: call backward() on the sum alone, or on each term alone"
    )


def test_term_that_is_cleared_before_the_sum() -> None:
    """A term whose gradients are only read (to weigh the losses) counts once."""
    assert not [f for f in findings(*two_losses(clear=True)) if f.rule != "discarded-gradient"]
