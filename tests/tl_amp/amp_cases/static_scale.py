"""A loss scale by hand that does not adapt."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, plain


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


def no_division(parameters, scale):
    pass


def buggy():
    return {
        "divided one by one": case(_step(1024.0, each), one(scale=None)),
        "divided all at once": case(_step(256.0, all_at_once), one(scale=None)),
    }


def healthy():
    return {"divided one by one": case(plain), "divided all at once": case(plain)}


def near_misses():
    return {
        "a weight of the loss": case(_step(10.0, no_division), one(scale=None, lr=0.005)),
        "a sum of losses that is made a mean": case(_step(12.0, each), one(scale=None)),
    }


MESSAGES = {
    "divided one by one": """\
Mixed precision training: passed, 1 note

Notes:
[static-scale] the loss that backward() at static_scale.py:13 ran on is multiplied by 1024, and the gradients were \
edited by hand before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit""",
    "divided all at once": """\
Mixed precision training: passed, 1 note

Notes:
[static-scale] the loss that backward() at static_scale.py:13 ran on is multiplied by 256, and the gradients were \
edited by hand before the optimizers stepped (seen in steps 0-3): a loss scale that does not adapt
  cause: a static scale overflows where the gradients grow, and nothing skips such an update
  fix: use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit""",
}
