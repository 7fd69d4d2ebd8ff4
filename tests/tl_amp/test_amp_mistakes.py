"""Mistakes in many spellings: each is named by its rule first."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm
from torch.optim.lr_scheduler import LambdaLR

from tl_amp import check_mixed_precision_training
from tl_core import TrainingSetup

spec = importlib.util.spec_from_file_location("amp_loops", Path(__file__).with_name("amp_loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)
one, two, plain, loss_of, penalty_of = loops.one, loops.two, loops.plain, loops.loss_of, loops.penalty_of

LOOPS = {}


def loop(rule, make_setup=None, **options):
    """Register a step under the rule that it breaks."""

    def register(step):
        LOOPS[step.__name__] = (rule, make_setup or one(), step, options)
        return step

    return register


def scaled(setup, batch, dtype=torch.bfloat16):
    """Run backward() on the scaled loss."""
    setup.model.zero_grad()
    loss = loss_of(setup, batch, dtype)
    setup.scaler.scale(loss).backward()
    return loss.detach()


def finish(setup, loss):
    for optimizer in setup.optimizers.values():
        setup.scaler.step(optimizer)
    setup.scaler.update()
    return loss.detach()


# -- steps -------------------------------------------------------------------------------------------------------------


@loop("stepped-past-scaler", one(torch.optim.Adam, lr=0.01))
def direct(setup, batch):
    loss = scaled(setup, batch)
    setup.optimizer.step()
    return loss


@loop("stepped-past-scaler")
def direct_after_a_clip(setup, batch):
    loss = scaled(setup, batch)
    clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.optimizer.step()
    return loss


@loop("stepped-past-scaler", two(torch.optim.Adam))
def one_of_two_direct(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizers["body"])
    setup.optimizers["head"].step()
    setup.scaler.update()
    return loss


@loop("stepped-past-scaler")
def direct_after_unscaling(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.optimizer.step()
    setup.scaler.update()
    return loss


@loop("stepped-twice")
def direct_as_well(setup, batch):
    loss = finish(setup, scaled(setup, batch))
    setup.optimizer.step()
    return loss


@loop("never-stepped", two())
def one_of_two_never(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.step(setup.optimizers["body"])
    setup.scaler.update()
    return loss


@loop("unused-scaler")
def scaler_left_alone(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


# -- losses ------------------------------------------------------------------------------------------------------------


@loop("loss-not-scaled")
def result_dropped(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss)
    loss.backward()
    return finish(setup, loss)


@loop("loss-not-scaled")
def one_of_two_passes(setup, batch):
    loss = scaled(setup, batch)
    penalty_of(setup).backward()
    return finish(setup, loss)


@loop("loss-not-scaled")
def one_term_of_a_sum(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    (setup.scaler.scale(loss) + penalty_of(setup)).backward()
    return finish(setup, loss)


@loop("loss-not-scaled")
def seldom_penalty(setup, batch):
    loss = scaled(setup, batch)
    if setup.step_index % 8 == 7:
        penalty_of(setup).backward()
    return finish(setup, loss)


@loop("loss-not-scaled")
def only_the_last_micro_batch(setup, batch):
    loss = loss_of(setup, batch) / 4
    if setup.step_index % 4 < 3:
        loss.backward()
        return loss.detach()
    setup.scaler.scale(loss).backward()
    finish(setup, loss)
    setup.optimizer.zero_grad()
    return loss.detach()


@loop("scaled-twice")
def scaled_by_the_step_and_by_a_helper(setup, batch):
    setup.optimizer.zero_grad()
    loss = setup.scaler.scale(loss_of(setup, batch))
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("scaled-twice")
def scaled_by_its_number_as_well(setup, batch):
    setup.optimizer.zero_grad()
    loss = setup.scaler.scale(loss_of(setup, batch))
    (loss * setup.scaler.get_scale() / 2).backward()
    return finish(setup, loss)


@loop("low-precision-loss", one(scale=None))
def bfloat16_loss(setup, batch):
    setup.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = (setup.model(batch[0]) - batch[1].bfloat16()).pow(2).mean()
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


@loop("low-precision-loss")
def float16_loss(setup, batch):
    setup.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (setup.model(batch[0]) - batch[1].half()).abs().mean()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


# -- order -------------------------------------------------------------------------------------------------------------


@loop("unscaled-again")
def unscale_on_every_micro_batch(setup, batch):
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss / 4).backward()
    setup.scaler.unscale_(setup.optimizer)
    clip_grad_norm_(setup.model.parameters(), 1.0)
    if setup.step_index % 4 == 3:
        setup.scaler.step(setup.optimizer)
        setup.optimizer.zero_grad()
    setup.scaler.update()
    return loss.detach()


@loop("unscaled-again")
def update_before_the_step(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    clip_grad_norm_(setup.model.parameters(), 1.0)
    setup.scaler.update()
    return finish(setup, loss)


@loop("unscaled-twice")
def divided_by_hand_before(setup, batch):
    loss = scaled(setup, batch)
    for parameter in setup.model.parameters():
        parameter.grad.div_(setup.scaler.get_scale())
    clip_grad_norm_(setup.model.parameters(), 1.0)
    return finish(setup, loss)


@loop("unscaled-twice", one(torch.optim.Adam, lr=0.01))
def divided_by_hand_after(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    for parameter in setup.model.parameters():
        parameter.grad.data.mul_(1.0 / setup.scaler.get_scale())
    return finish(setup, loss)


@loop("update-between-steps", two())
def update_after_each_optimizer(setup, batch):
    loss = scaled(setup, batch)
    for optimizer in setup.optimizers.values():
        setup.scaler.step(optimizer)
        setup.scaler.update()
    return loss


@loop("zeroed-before-step")
def zeros_before_the_step(setup, batch):
    loss = scaled(setup, batch)
    setup.optimizer.zero_grad(set_to_none=False)
    return finish(setup, loss)


@loop("zeroed-before-step")
def cleared_after_unscaling(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizer)
    setup.optimizer.zero_grad()
    return finish(setup, loss)


# -- clips -------------------------------------------------------------------------------------------------------------


def clips(clip):
    def step(setup, batch):
        loss = scaled(setup, batch)
        clip(list(setup.model.parameters()))
        return finish(setup, loss)

    return step


def each_by_hand(parameters):
    for parameter in parameters:
        norm = parameter.grad.norm()
        if norm > 5.0:
            parameter.grad.mul_(5.0 / norm)


def clamp_by_hand(parameters):
    for parameter in parameters:
        parameter.grad.clamp_(-1.0, 1.0)


def out_of_torchs_sight(parameters):
    norm = torch.stack([parameter.grad.norm() for parameter in parameters]).norm()
    for parameter in parameters:
        parameter.grad.data.mul_(min(1.0, 1.0 / float(norm)))


for name, clip in {
    "clip_by_attribute": lambda parameters: nn.utils.clip_grad_norm_(parameters, 1.0),
    "clip_by_name": lambda parameters: clip_grad_norm_(parameters, 1.0),
    "clip_by_new_functions": lambda p: clip_grads_with_norm_(p, 1.0, get_total_norm([one.grad for one in p])),
    "clip_values": lambda parameters: clip_grad_value_(parameters, 1.0),
    "clip_by_hand": lambda parameters: loops.clip_by_hand(parameters, 1.0),
    "clip_by_hand_out_of_sight": out_of_torchs_sight,
    "clip_each_by_hand": each_by_hand,
    "clamp_by_hand": clamp_by_hand,
}.items():
    LOOPS[name] = ("clip-before-unscale", one(), clips(clip), {})


@loop("clip-before-unscale", two())
def clip_of_both_with_one_unscaled(setup, batch):
    loss = scaled(setup, batch)
    setup.scaler.unscale_(setup.optimizers["body"])
    clip_grad_norm_(setup.model.parameters(), 1.0)
    return finish(setup, loss)


@loop("clip-before-unscale")
def clip_of_an_accumulation(setup, batch):
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss / 4).backward()
    if setup.step_index % 4 == 3:
        clip_grad_norm_(setup.model.parameters(), 1.0)
        finish(setup, loss)
        setup.optimizer.zero_grad()
    return loss.detach()


# -- overflows ---------------------------------------------------------------------------------------------------------


@loop("skipped-updates", two())
def infinite_every_second_time(setup, batch):
    loss = scaled(setup, batch)
    if setup.step_index % 2:
        setup.model.head.weight.grad[0, 0] = math.inf
    return finish(setup, loss)


@loop(
    "skipped-updates",
    lambda: TrainingSetup(
        model := loops.Net(),
        torch.optim.SGD(model.parameters(), lr=0.01),
        scaler=loops.scaler_of(2.0**15, growth_interval=1),
    ),
)
def scale_that_grows_all_the_time(setup, batch):
    return plain(setup, batch, torch.float16)


@loop("skipped-updates", one(scale=2.0**60))
def scale_that_never_comes_down(setup, batch):
    return plain(setup, batch, torch.float16)


@loop("skipped-updates")
def infinite_slope(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch) + (0.0 * setup.model.head.weight.sum()).sqrt()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("float16-overflow")
def overflowing_loss(setup, batch):
    setup.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = (setup.model(batch[0]) - 400 * batch[1].half()).pow(2).sum()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("float16-overflow")
def one_overflowing_loss(setup, batch):
    setup.optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        outputs = setup.model(batch[0]) * (1e6 if setup.step_index == 9 else 1.0)
    loss = functional.mse_loss(outputs.float(), batch[1])
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("non-finite")
def seldom_nan(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    if setup.step_index % 8 == 7:
        loss = loss * torch.log(loss.detach() * 0 - 1.0)
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop("non-finite", one(scale=None))
def logarithm(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    if setup.step_index == 5:
        loss = loss + torch.log(-loss.detach()) * setup.model.head.bias.sum()
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


@loop(
    "update-rounds-away", lambda: TrainingSetup(m := loops.Net().bfloat16(), torch.optim.SGD(m.parameters(), lr=1e-6))
)
def weights_too_coarse(setup, batch):
    setup.optimizer.zero_grad()
    loss = functional.mse_loss(setup.model(batch[0].bfloat16()).float(), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


@loop("ahead-of-updates", one(scale=2.0**22, schedule=lambda o: LambdaLR(o, lambda count: 1 / (1 + count))))
def schedule_that_does_not_wait(setup, batch):
    loss = plain(setup, batch, torch.float16)
    setup.scheduler.step()
    return loss


class Average:
    """An exponential average of the weights."""

    def __init__(self, model):
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {name: tensor.clone() for name, tensor in self.shadow.items()}


@loop("ahead-of-updates", one(scale=2.0**22, average=Average))
def average_that_does_not_wait(setup, batch):
    loss = plain(setup, batch, torch.float16)
    setup.state["average"].update(setup.model)
    return loss


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_mistake_is_named_first(name):
    """The first finding is the rule's, and with it allowed that rule is not found."""
    rule, make_setup, step, options = LOOPS[name]
    report = check_mixed_precision_training(make_setup, loops.BATCHES, step, **options)
    assert [finding.rule for finding in report.findings][:1] == [rule]
    allowed = check_mixed_precision_training(make_setup, loops.BATCHES, step, **options, allow=[rule])
    assert rule not in {finding.rule for finding in allowed.findings}


def test_of_a_mistake_only_the_cause_is_told():
    """A step past the scaler hides the clip before it, and unscaling again what follows from it."""
    for name in ("direct_after_a_clip", "unscale_on_every_micro_batch", "overflowing_loss"):
        rule, make_setup, step, options = LOOPS[name]
        report = check_mixed_precision_training(make_setup, loops.BATCHES, step, **options)
        rules = {finding.rule for finding in report.findings} - {"low-precision-loss"}
        assert rules == {rule}
