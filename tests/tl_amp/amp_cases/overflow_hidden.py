"""Inf and NaN that are taken out of the gradients before the scaler looks at them."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, update


def _step(between):
    """Train with an Inf in the gradients of every third step."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss * (1e38 if setup.step_index % 3 == 2 else 1.0)).backward()
        between(setup)
        update(setup)
        return loss.detach()

    return step


def replaced(setup):
    for parameter in setup.model.parameters():
        torch.nan_to_num_(parameter.grad, nan=0.0, posinf=0.0, neginf=0.0)


def chosen(setup):
    for parameter in setup.model.parameters():
        parameter.grad = torch.where(parameter.grad.isfinite(), parameter.grad, 0.0)


def nothing(setup):
    pass


def buggy():
    return {
        "nan_to_num_": case(_step(replaced), steps=6),
        "where it is finite": case(_step(chosen), steps=6),
    }


def healthy():
    return {
        "nan_to_num_": case(_step(nothing), max_skipped_fraction=0.5, steps=6),
        "where it is finite": case(_step(nothing), max_skipped_fraction=0.5, steps=6),
    }


def near_misses():
    def never_needed(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        replaced(setup)
        update(setup)
        return loss.detach()

    def after_it(setup, batch):
        """Replace what is not finite after the scaler has looked, to log norms: it skips the step all the same."""
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss * (1e38 if setup.step_index == 2 else 1.0)).backward()
        setup.scaler.unscale_(setup.optimizer)
        replaced(setup)
        update(setup)
        return loss.detach()

    return {
        "nothing that is not finite": case(never_needed, one()),
        "after unscale_": case(after_it, one(), steps=8),
    }


MESSAGES = {
    "nan_to_num_": """\
Mixed precision training: failed, 1 finding

[overflow-hidden] gradients of all 4 parameters held Inf or NaN after backward() at overflow_hidden.py:15, and none \
when the GradScaler looked at them (steps 2, 5)
  cause: something replaces what is not finite in between (nan_to_num, a clamp, zeros): the scaler sees no \
overflow, applies what is left of the gradients, and does not lower its scale
  fix: leave gradients as they are until scaler.step(): it skips the step and lowers the scale

Telemetry:
  step  loss    grad norm  update   lr    opt steps  scale
  0     1.472   2.288      0.1144   0.05  1          256
  1     3.62    3.952      0.1976   0.05  1          256
  2     4.979   0          0        0.05  1          256
  3     2.233   2.611      0.1306   0.05  1          256
  4     0.9627  1.835      0.09173  0.05  1          256
  5     1.774   0          0        0.05  1          256""",
    "where it is finite": """\
Mixed precision training: failed, 1 finding

[overflow-hidden] gradients of all 4 parameters held Inf or NaN after backward() at overflow_hidden.py:15, and none \
when the GradScaler looked at them (steps 2, 5)
  cause: something replaces what is not finite in between (nan_to_num, a clamp, zeros): the scaler sees no \
overflow, applies what is left of the gradients, and does not lower its scale
  fix: leave gradients as they are until scaler.step(): it skips the step and lowers the scale

Telemetry:
  step  loss    grad norm  update   lr    opt steps  scale
  0     1.472   2.288      0.1144   0.05  1          256
  1     3.62    3.952      0.1976   0.05  1          256
  2     4.979   0          0        0.05  1          256
  3     2.233   2.611      0.1306   0.05  1          256
  4     0.9627  1.835      0.09173  0.05  1          256
  5     1.774   0          0        0.05  1          256""",
}
