"""Optimizers that no scaler.step() is called for."""

from __future__ import annotations

from amp_loops import case, loss_of, plain, two


def _step(names):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        for name in names:
            setup.scaler.step(setup.optimizers[name])
        setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {"one of two": case(_step(("body",)), two())}


def healthy():
    return {"one of two": case(_step(("body", "head")), two())}


def near_misses():
    def in_turns(setup, batch):
        return _step(("body",) if setup.step_index % 2 else ("head",))(setup, batch)

    def now_and_then(setup, batch):
        return _step(("body", "head") if setup.step_index % 2 else ("body",))(setup, batch)

    return {
        "in turns": case(in_turns, two()),
        "one of them every second time": case(now_and_then, two()),
        "both": case(plain, two()),
    }


MESSAGES = {
    "one of two": """\
Mixed precision training: failed, 1 finding

[never-stepped] 'head' never stepped in 4 steps, although 4 backward passes gave gradients to head.* (2 tensors); \
nothing else moved them
  cause: scaler.step() is called for 'body' only (never_stepped.py:14)
  fix: call scaler.step(head) as well, before the one scaler.update() of the step

Telemetry:
  step  loss   grad norm body  update body  lr body  opt steps body  lr head  opt steps head  scale
  0     1.472  1.07            0.05352      0.05     1               0.05     0               256
  1     3.859  2.437           0.1219       0.05     1               0.05     0               256
  2     6.212  3.585           0.1793       0.05     1               0.05     0               256
  3     2.303  1.914           0.09571      0.05     1               0.05     0               256""",
}
