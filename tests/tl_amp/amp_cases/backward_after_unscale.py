"""Scaled gradients that are added to unscaled ones."""

from __future__ import annotations

from amp_loops import case, loss_of, penalty_of, two, update
from torch.nn.utils import clip_grad_norm_


def _step(*, late):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if not late:
            setup.scaler.scale(penalty_of(setup)).backward()
        setup.scaler.unscale_(setup.optimizer)
        clip_grad_norm_(setup.model.parameters(), 1.0)
        if late:
            setup.scaler.scale(penalty_of(setup)).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {"a penalty after the clip": case(_step(late=True))}


def healthy():
    return {"a penalty after the clip": case(_step(late=False))}


def near_misses():
    def not_scaled(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        penalty_of(setup).backward()
        update(setup)
        return loss.detach()

    def other_part(setup, batch):
        setup.model.zero_grad()
        hidden = setup.model.body(batch[0])
        setup.scaler.scale(hidden.square().mean()).backward()
        setup.scaler.unscale_(setup.optimizers["body"])
        loss = (setup.model.head(hidden.detach()) - batch[1]).square().mean()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return {"a penalty that is not scaled": case(not_scaled), "gradients of another optimizer": case(other_part, two())}


MESSAGES = {
    "a penalty after the clip": """\
Mixed precision training: failed, 1 finding

[backward-after-unscale] backward() at backward_after_unscale.py:19 ran after scaler.unscale_() at \
backward_after_unscale.py:16, and before the optimizer's step (4 times, steps 0-3)
  cause: it adds gradients that are still multiplied by 256 to ones that are not, and scaler.step() does not divide \
them again
  fix: call backward() on all losses of an update first, then scaler.unscale_(), scaler.step() and scaler.update()

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.472  1.38       0.06902  0.05  1          256
  1     3.78   1.373      0.06863  0.05  1          256
  2     6.036  1.343      0.06714  0.05  1          256
  3     2.401  1.346      0.06728  0.05  1          256""",
}
