"""A loss scale by hand that does not adapt."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of, one, plain

from tl_core import TrainingSetup


def _step(scale, divide):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        (loss * scale).backward()
        divide(setup.model.parameters(), scale)
        setup.optimizer.step()
        return loss.detach()

    return step


def each(parameters, scale):
    for parameter in parameters:
        parameter.grad.div_(scale)


def all_at_once(parameters, scale):
    torch._foreach_mul_([parameter.grad for parameter in parameters], 1.0 / scale)


def out_of_torchs_sight(parameters, scale):
    for parameter in parameters:
        parameter.grad.data.div_(scale)


def no_division(parameters, scale):
    pass


def make_copies():
    """Train weights in float32 beside a model in float16."""
    model = Net().half()
    copies = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    setup = TrainingSetup(model, torch.optim.SGD(copies, lr=0.01))
    setup.copies = copies
    return setup


def with_copies(setup, batch):
    setup.model.zero_grad()
    loss = (setup.model(batch[0].half()).float() - batch[1]).square().mean()
    (loss * 1024.0).backward()
    pairs = list(zip(setup.copies, setup.model.parameters(), strict=True))
    for copy, parameter in pairs:
        copy.grad = parameter.grad.float() / 1024.0
    setup.optimizer.step()
    with torch.no_grad():
        for copy, parameter in pairs:
            parameter.copy_(copy)
    return loss.detach()


def buggy():
    return {
        "divided one by one": case(_step(1024.0, each), one(scale=None)),
        "divided all at once": case(_step(256.0, all_at_once), one(scale=None)),
        "divided through .data": case(_step(2.0**12, out_of_torchs_sight), one(scale=None)),
        "copied to weights in float32": case(with_copies, make_copies),
    }


def healthy():
    return dict.fromkeys(buggy(), case(plain))


def near_misses():
    return {
        "a weight of the loss": case(_step(10.0, no_division), one(scale=None, lr=0.005)),
        "a sum of losses that is made a mean": case(_step(12.0, each), one(scale=None)),
    }


MESSAGES = {
    "divided one by one": """\
Mixed precision training: passed, 1 note

Notes:
[static-scale] the loss that backward() at static_scale.py:15 ran on is multiplied by 1024, and the gradients were \
divided by it again before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit""",
    "divided all at once": """\
Mixed precision training: passed, 1 note

Notes:
[static-scale] the loss that backward() at static_scale.py:15 ran on is multiplied by 256, and the gradients were \
divided by it again before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit""",
    "divided through .data": """\
Mixed precision training: passed, 1 note

Notes:
[static-scale] the loss that backward() at static_scale.py:15 ran on is multiplied by 4096, and the gradients were \
divided by it again before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit""",
    "copied to weights in float32": """\
Mixed precision training: passed, 1 note

Notes:
[static-scale] the loss that backward() at static_scale.py:53 ran on is multiplied by 1024, and the gradients were \
edited by hand before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit""",
}
