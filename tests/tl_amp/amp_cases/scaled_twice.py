"""Losses that are multiplied by the scale twice."""

from __future__ import annotations

from amp_loops import case, loss_of, update


def _step(scale):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        scale(setup.scaler, loss).backward()
        update(setup)
        return loss.detach()

    return step


def once(scaler, loss):
    return scaler.scale(loss)


def buggy():
    return {
        "by two calls": case(_step(lambda scaler, loss: scaler.scale(scaler.scale(loss)))),
        "by its number too": case(_step(lambda scaler, loss: scaler.scale(loss) * scaler.get_scale() / 2)),
    }


def healthy():
    return {"by two calls": case(_step(once)), "by its number too": case(_step(lambda s, loss: s.scale(loss) / 2))}


def near_misses():
    def by_a_count(setup, batch):
        """Multiply the loss by a count that equals the scale, and divide the gradients by it."""
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss * 256.0).backward()
        for parameter in setup.model.parameters():
            parameter.grad.div_(256.0)
        update(setup)
        return loss.detach()

    return {
        "a count that equals the scale, divided by again": case(by_a_count),
        "another number": case(_step(lambda scaler, loss: scaler.scale(loss * 100.0))),
        "half of it twice": case(_step(lambda scaler, loss: scaler.scale(loss) / 2 + scaler.scale(loss) / 2)),
    }


MESSAGES = {
    "by two calls": """\
Mixed precision training: failed, 1 finding

[scaled-twice] the loss that backward() at scaled_twice.py:12 ran on is multiplied by the scale twice, 256 each \
time (4 of 4 backward passes, steps 0-3)
  cause: the loss is multiplied by a number that equals the scale (scaler.get_scale()), beside scaler.scale(): the \
scaler divides the gradients by the scale once, and they stay 256 times too large
  fix: scale the loss of backward() at scaled_twice.py:12 once

Telemetry:
  step  loss       grad norm  update     lr    opt steps  scale
  0     1.472      585.8      29.29      0.05  1          256
  1     82.73      3.458e+04  1729       0.05  1          256
  2     3.283e+04  5.182e+05  2.591e+04  0.05  1          256
  3     4.567e+08  5.539e+09  2.769e+08  0.05  1          256""",
    "by its number too": """\
Mixed precision training: failed, 1 finding

[scaled-twice] the loss that backward() at scaled_twice.py:12 ran on is multiplied by the scale twice, 256 each \
time (4 of 4 backward passes, steps 0-3)
  cause: the loss is multiplied by a number that equals the scale (scaler.get_scale()), beside scaler.scale(): the \
scaler divides the gradients by the scale once, and they stay 256 times too large
  fix: scale the loss of backward() at scaled_twice.py:12 once

Telemetry:
  step  loss       grad norm  update     lr    opt steps  scale
  0     1.472      292.9      14.65      0.05  1          256
  1     25.48      8077       403.9      0.05  1          256
  2     434.4      5734       286.7      0.05  1          256
  3     3.023e+05  3.849e+05  1.925e+04  0.05  1          256""",
}
