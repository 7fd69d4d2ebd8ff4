"""Correct loops that tempt the check: each passes, and says what it could not judge."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from tl_amp import check_mixed_precision_training
from tl_core import TrainingSetup, standard_step

spec = importlib.util.spec_from_file_location("amp_loops", Path(__file__).with_name("amp_loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)
one, two, plain, loss_of, penalty_of = loops.one, loops.two, loops.plain, loops.loss_of, loops.penalty_of

LOOPS = {}


def loop(make_setup=None, notes=()):
    """Register a step with what builds its setup and the rules of the notes that it gets."""

    def register(step):
        LOOPS[step.__name__] = (make_setup or one(), step, notes)
        return step

    return register


def finish(setup, loss):
    for optimizer in setup.optimizers.values():
        setup.scaler.step(optimizer)
    setup.scaler.update()
    return loss.detach()


def float16(setup, batch):
    return plain(setup, batch, torch.float16)


LOOPS["plain"] = (one(), plain, ())
LOOPS["fused"] = (one(torch.optim.AdamW, fused=True, lr=0.01), plain, ())
LOOPS["two_optimizers"] = (two(), plain, ())
LOOPS["float16"] = (one(scale=2.0**16, momentum=0.9, lr=0.01), float16, ())
LOOPS["scale_starts_too_high"] = (one(scale=2.0**20), float16, ())
LOOPS["fused_scale_starts_too_high"] = (one(torch.optim.AdamW, 2.0**20, fused=True, lr=0.01), float16, ())
LOOPS["growing_scale"] = (
    lambda: TrainingSetup(
        model := loops.Net(),
        torch.optim.SGD(model.parameters(), lr=0.05),
        scaler=loops.scaler_of(16.0, growth_interval=3),
    ),
    plain,
    (),
)
LOOPS["standard_step"] = (
    one(),
    standard_step(
        lambda model, batch: functional.mse_loss(model(batch[0]), batch[1]), accumulation_steps=4, max_grad_norm=1.0
    ),
    (),
)


@loop()
def zero_grad_at_the_end(setup, batch):
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    finish(setup, loss)
    setup.optimizer.zero_grad(set_to_none=False)
    return loss.detach()


@loop(one(torch.optim.AdamW, fused=True, lr=0.01))
def accumulation(setup, batch):
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss / 4).backward()
    if setup.step_index % 4 == 3:
        setup.scaler.unscale_(setup.optimizer)
        clip_grad_norm_(setup.model.parameters(), 1.0)
        finish(setup, loss)
        setup.optimizer.zero_grad()
    return loss.detach()


@loop()
def divided_after_scaling(setup, batch):
    setup.optimizer.zero_grad()
    for _ in range(2):
        loss = loss_of(setup, batch)
        (setup.scaler.scale(loss) / 2).backward()
    return finish(setup, loss)


@loop()
def two_losses_scaled_each(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    (setup.scaler.scale(loss) + setup.scaler.scale(penalty_of(setup))).backward()
    return finish(setup, loss)


@loop()
def list_of_losses(setup, batch):
    setup.optimizer.zero_grad()
    losses = [loss_of(setup, batch), penalty_of(setup)]
    torch.autograd.backward(setup.scaler.scale(losses))
    return finish(setup, losses[0])


@loop()
def two_passes_scaled_each(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.scale(penalty_of(setup)).backward()
    return finish(setup, loss)


@loop()
def losses_of_each_example(setup, batch):
    setup.optimizer.zero_grad()
    losses = (setup.model(batch[0]) - batch[1]).pow(2).squeeze(1)
    setup.scaler.scale(losses).mean().backward()
    return finish(setup, losses.mean())


@loop()
def scaled_by_its_number(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss.detach())
    (loss * setup.scaler.get_scale()).backward()
    return finish(setup, loss)


@loop()
def scaled_by_the_gradient(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss.detach())
    loss.backward(gradient=torch.tensor(setup.scaler.get_scale()))
    return finish(setup, loss)


@loop()
def term_that_is_nothing(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    unused = 0.0 * sum(p.sum() for p in setup.model.parameters())
    (setup.scaler.scale(loss) + unused).backward()
    return finish(setup, loss)


@loop()
def update_at_the_start_of_the_next_call(setup, batch):
    if setup.step_index:
        setup.scaler.update()
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.step(setup.optimizer)
    return loss.detach()


@loop()
def new_scale_by_hand(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.step(setup.optimizer)
    setup.scaler.update(new_scale=512.0 + setup.step_index)
    return loss.detach()


@loop()
def norm_logged_before_unscaling(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    clip_grad_norm_(setup.model.parameters(), math.inf)
    return finish(setup, loss)


@loop()
def bound_times_the_scale(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    clip_grad_norm_(setup.model.parameters(), 0.5 * setup.scaler.get_scale())
    return finish(setup, loss)


@loop()
def bound_times_the_scale_by_hand(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    loops.clip_by_hand(setup.model.parameters(), 0.5 * setup.scaler.get_scale())
    return finish(setup, loss)


@loop()
def clip_by_hand_after_unscaling(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.unscale_(setup.optimizer)
    loops.clip_by_hand(setup.model.parameters(), 0.5)
    return finish(setup, loss)


@loop()
def divided_by_a_token_count(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    tokens = 20 + setup.step_index % 5
    setup.scaler.scale(loss * tokens).backward()
    for parameter in setup.model.parameters():
        parameter.grad.div_(tokens)
    return finish(setup, loss)


@loop()
def noise_on_scaled_gradients(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    for parameter in setup.model.parameters():
        parameter.grad.add_(torch.randn_like(parameter) * setup.scaler.get_scale() * 0.01)
    return finish(setup, loss)


@loop()
def own_guard_against_bad_gradients(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.unscale_(setup.optimizer)
    norm = clip_grad_norm_(setup.model.parameters(), 1.0)
    if setup.step_index % 5 != 2 and torch.isfinite(norm):
        setup.scaler.step(setup.optimizer)
    setup.scaler.update()
    return loss.detach()


@loop()
def own_guard_against_bad_losses(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch) * (math.nan if setup.step_index == 4 else 1.0)
    if not torch.isfinite(loss):
        return loss.detach()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop()
def unscaled_and_stepped_by_hand(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss * (math.inf if setup.step_index == 3 else 1.0)).backward()
    setup.scaler.unscale_(setup.optimizer)
    if torch.isfinite(clip_grad_norm_(setup.model.parameters(), 1.0)):
        setup.optimizer.step()
    setup.scaler.update()
    return loss.detach()


@loop()
def divided_by_hand(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    for parameter in setup.model.parameters():
        parameter.grad.data.div_(setup.scaler.get_scale())
    setup.optimizer.step()
    return loss.detach()


@loop()
def gradient_penalty(setup, batch):
    inputs = batch[0].clone().requires_grad_()
    setup.optimizer.zero_grad()
    outputs = setup.model(inputs)
    (slope,) = torch.autograd.grad(setup.scaler.scale(outputs.sum()), inputs, create_graph=True)
    slope = slope / setup.scaler.get_scale()
    loss = functional.mse_loss(outputs, batch[1]) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop(notes=("not-judged",))
def gradients_of_autograd_grad(setup, batch):
    loss = loss_of(setup, batch)
    parameters = list(setup.model.parameters())
    for parameter, grad in zip(parameters, torch.autograd.grad(setup.scaler.scale(loss), parameters), strict=True):
        parameter.grad = grad
    return finish(setup, loss)


@loop()
def sharpness_by_hand(setup, batch):
    setup.optimizer.zero_grad()
    setup.scaler.scale(loss_of(setup, batch)).backward()
    parameters = list(setup.model.parameters())
    ways = [0.05 * parameter.grad / setup.scaler.get_scale() for parameter in parameters]
    with torch.no_grad():
        torch._foreach_add_(parameters, ways)
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    with torch.no_grad():
        torch._foreach_sub_(parameters, ways)
    return finish(setup, loss)


@loop()
def checkpointed(setup, batch):
    setup.optimizer.zero_grad()
    outputs = checkpoint(setup.model, batch[0], use_reentrant=False)
    loss = functional.mse_loss(outputs, batch[1])
    setup.scaler.scale(loss).backward()
    return finish(setup, loss)


@loop(two())
def optimizers_that_take_turns(setup, batch):
    setup.model.zero_grad()
    loss = loss_of(setup, batch)
    setup.scaler.scale(loss).backward()
    setup.scaler.step(setup.optimizers["body" if setup.step_index % 2 else "head"])
    setup.scaler.update()
    return loss.detach()


@loop(two())
def one_part_without_the_scaler(setup, batch):
    body, head = setup.optimizers.values()
    hidden = setup.model.body(batch[0])
    body.zero_grad()
    setup.scaler.scale(hidden.pow(2).mean()).backward()
    setup.scaler.step(body)
    setup.scaler.update()
    head.zero_grad()
    loss = functional.mse_loss(setup.model.head(hidden.detach().tanh()), batch[1])
    loss.backward()
    head.step()
    return loss.detach()


def adversaries(shared):
    def make_setup():
        model = nn.ModuleDict({"maker": nn.Linear(6, 6), "judge": nn.Linear(6, 1)})
        optimizers = {name: torch.optim.Adam(part.parameters(), lr=1e-3) for name, part in model.items()}
        state = {} if shared else {"second": loops.scaler_of(1024.0)}
        return TrainingSetup(model, optimizers, scaler=loops.scaler_of(), state=state)

    return make_setup


def adversarial(setup, batch):
    maker, judge = setup.model["maker"], setup.model["judge"]
    second = setup.state.get("second", setup.scaler)
    made = maker(batch[0])
    setup.optimizers["judge"].zero_grad()
    judged = functional.softplus(-judge(batch[0])).mean() + functional.softplus(judge(made.detach())).mean()
    second.scale(judged).backward()
    second.step(setup.optimizers["judge"])
    second.update()
    setup.optimizers["maker"].zero_grad()
    fooled = functional.softplus(-judge(made)).mean()
    setup.scaler.scale(fooled).backward()
    setup.scaler.step(setup.optimizers["maker"])
    setup.scaler.update()
    return {"maker": fooled.detach(), "judge": judged.detach()}


LOOPS["adversaries_with_one_scaler"] = (adversaries(shared=True), adversarial, ())
LOOPS["adversaries_with_one_scaler_each"] = (adversaries(shared=False), adversarial, ())


@loop(one(scale=2.0**20, schedule=lambda optimizer: LambdaLR(optimizer, lambda count: 1 / (1 + count))))
def schedule_that_waits_for_updates(setup, batch):
    before = setup.scaler.get_scale() if setup.step_index else 2.0**20
    loss = float16(setup, batch)
    if setup.scaler.get_scale() >= before:
        setup.scheduler.step()
    return loss


@loop(one(scale=2.0**18, schedule=lambda optimizer: StepLR(optimizer, 1)))
def schedule_by_the_epoch(setup, batch):
    loss = float16(setup, batch)
    if setup.step_index in (1, 9, 17):
        setup.scheduler.step()
    return loss


@loop(one(scale=2.0**18, schedule=ReduceLROnPlateau))
def plateau(setup, batch):
    loss = float16(setup, batch)
    if setup.step_index % 5 == 4:
        setup.scheduler.step(loss)
    return loss


@loop(one(average=lambda model: AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))))
def averaged(setup, batch):
    loss = plain(setup, batch)
    setup.state["average"].update_parameters(setup.model)
    return loss


@loop(one(scale=2.0**15, schedule=lambda o: LambdaLR(o, lambda count: 1.0)), notes=("moved-on-skipped",))
def schedule_a_little_ahead(setup, batch):
    loss = float16(setup, batch)
    setup.scheduler.step()
    return loss


class Wrapper(torch.optim.Optimizer):
    """An optimizer that steps another one over its groups."""

    def __init__(self, parameters, lr):
        super().__init__(list(parameters), {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)

    def step(self, closure=None):
        return self.base.step()


LOOPS["wrapped_optimizer"] = (one(Wrapper), plain, ())


@loop(one(scale=None))
def scaler_set_in_the_first_step(setup, batch):
    if setup.scaler is None:
        setup.scaler = loops.scaler_of()
    return plain(setup, batch)


class Bundle:
    """A scaler with backward, clip and step in one call, as libraries have them."""

    def __init__(self):
        self.inner = loops.scaler_of()

    def __call__(self, loss, optimizer, parameters):
        self.inner.scale(loss).backward()
        self.inner.unscale_(optimizer)
        clip_grad_norm_(parameters, 1.0)
        self.inner.step(optimizer)
        self.inner.update()


@loop(one(scale=None, average=lambda model: Bundle()), notes=("not-judged",))
def scaler_out_of_sight(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    setup.state["average"](loss, setup.optimizer, setup.model.parameters())
    return loss.detach()


# -- without a scaler --------------------------------------------------------------------------------------------------


def unscaled(setup, batch, dtype=torch.bfloat16):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch, dtype)
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


LOOPS["bfloat16"] = (one(torch.optim.AdamW, None, lr=0.01), unscaled, ())
LOOPS["float16_without_scaler"] = (
    one(scale=None),
    lambda setup, batch: unscaled(setup, batch, torch.float16),
    ("float16-without-scaler",),
)
LOOPS["disabled"] = (
    lambda: TrainingSetup(
        model := loops.Net(),
        torch.optim.SGD(model.parameters(), lr=0.05),
        scaler=torch.amp.GradScaler("cpu", enabled=False),
    ),
    plain,
    ("not-judged",),
)


@loop(one(torch.optim.LBFGS, None, lr=0.1))
def closures(setup, batch):
    def closure():
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        loss.backward()
        return loss

    return setup.optimizer.step(closure).detach()


@loop(one(scale=None), notes=("not-judged",))
def float32(setup, batch):
    setup.optimizer.zero_grad()
    loss = functional.mse_loss(setup.model(batch[0]), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


@loop(one(scale=None), notes=("static-scale",))
def static_scale(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch, torch.float16)
    (loss * 1024).backward()
    for parameter in setup.model.parameters():
        parameter.grad.div_(1024)
    setup.optimizer.step()
    return loss.detach()


class Masters(torch.optim.Optimizer):
    """Keeps float32 copies of low-precision weights, and steps those."""

    def __init__(self, parameters, lr):
        super().__init__(list(parameters), {"lr": lr})
        self.masters = [p.detach().float().clone() for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, master in zip(self.param_groups[0]["params"], self.masters, strict=True):
            parameter.copy_(master.sub_(parameter.grad.float(), alpha=self.param_groups[0]["lr"]))


@loop(lambda: TrainingSetup(model := loops.Net().bfloat16(), Masters(model.parameters(), 1e-3)))
def master_weights(setup, batch):
    setup.optimizer.zero_grad()
    loss = functional.mse_loss(setup.model(batch[0].bfloat16()).float(), batch[1])
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_correct_loop_passes(name):
    """No finding without any option, and only the notes that the loop deserves."""
    make_setup, step, notes = LOOPS[name]
    report = check_mixed_precision_training(make_setup, loops.BATCHES, step)
    assert [str(finding) for finding in report.findings] == []
    assert tuple(note.rule for note in report.notes) == notes
    assert report.ok
