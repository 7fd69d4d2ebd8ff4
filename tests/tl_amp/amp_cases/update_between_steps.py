"""A scaler.update() between the steps of two optimizers that use gradients of one backward pass."""

from __future__ import annotations

from amp_loops import case, loss_of, two


def _step(*, each, unscale=False):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if unscale:
            for optimizer in setup.optimizers.values():
                setup.scaler.unscale_(optimizer)
        for optimizer in setup.optimizers.values():
            setup.scaler.step(optimizer)
            if each:
                setup.scaler.update()
        if not each:
            setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "in one loop": case(_step(each=True), two()),
        "and unscaled before": case(_step(each=True, unscale=True), two()),
    }


def healthy():
    return {
        "in one loop": case(_step(each=False), two()),
        "and unscaled before": case(_step(each=False, unscale=True), two()),
    }


def near_misses():
    def a_pass_each(setup, batch):
        for optimizer in setup.optimizers.values():
            setup.model.zero_grad()
            loss = loss_of(setup, batch)
            setup.scaler.scale(loss).backward()
            setup.scaler.step(optimizer)
            setup.scaler.update()
        return loss.detach()

    def in_turns(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.step(setup.optimizers["head" if setup.step_index % 2 else "body"])
        setup.scaler.update()
        return loss.detach()

    return {"a backward pass for each": case(a_pass_each, two()), "one of them each time": case(in_turns, two())}


MESSAGES = {
    "in one loop": """\
Mixed precision training: failed, 1 finding

[update-between-steps] scaler.update() at update_between_steps.py:19 ran after 'body' had stepped and before 'head' \
did, with gradients of the same backward pass (4 times, steps 0-3)
  cause: update() between two optimizers' steps: where it changes the scale, the gradients of 'head' are divided by \
another scale than their loss was multiplied by, and an overflow that only they have is judged one update late
  fix: call scaler.step() for every optimizer first, then scaler.update() once

Telemetry:
  step  loss   grad norm body  update body  lr body  opt steps body  grad norm head  update head  lr head  opt \
steps head  scale
  0     1.472  1.07            0.05352      0.05     1               2.023           0.1011       0.05     1        \
       256
  1     3.62   2.286           0.1143       0.05     1               3.224           0.1612       0.05     1        \
       256
  2     4.979  3.31            0.1655       0.05     1               4.943           0.2472       0.05     1        \
       256
  3     1.874  2.16            0.108        0.05     1               1.528           0.07639      0.05     1        \
       256""",
    "and unscaled before": """\
Mixed precision training: failed, 1 finding

[update-between-steps] scaler.update() at update_between_steps.py:19 ran after 'body' had stepped and before 'head' \
did, with gradients of the same backward pass (4 times, steps 0-3)
  cause: update() between two optimizers' steps: the scaler forgets with it that unscale_() at \
update_between_steps.py:15 has divided the gradients of 'head', and divides them by the scale again
  fix: call scaler.step() for every optimizer first, then scaler.update() once

Telemetry:
  step  loss   grad norm body  update body  lr body  opt steps body  grad norm head  update head  lr head  opt \
steps head  scale
  0     1.472  1.07            0.05352      0.05     1               0.0079          0.000395     0.05     1        \
       256
  1     3.857  2.434           0.1217       0.05     1               0.01321         0.0006605    0.05     1        \
       256
  2     6.209  3.581           0.179        0.05     1               0.02233         0.001116     0.05     1        \
       256
  3     2.302  1.911           0.09553      0.05     1               0.006842        0.0003421    0.05     1        \
       256""",
}
