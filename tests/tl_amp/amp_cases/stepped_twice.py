"""Optimizers that step twice in one update."""

from __future__ import annotations

from amp_loops import case, loss_of, two


def _step(again=None):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        for optimizer in setup.optimizers.values():
            setup.scaler.step(optimizer)
            if again is not None:
                again(setup, optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def through_the_scaler(setup, optimizer):
    setup.scaler.step(optimizer)


def directly(setup, optimizer):
    optimizer.step()


def _again(*, again):
    """Step and update, and do so once more for good measure."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        if again:
            setup.scaler.step(setup.optimizer)
            setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "through the scaler, after an update()": case(_again(again=True)),
        "through the scaler, which raises": case(_step(through_the_scaler)),
        "directly": case(_step(directly)),
    }


def healthy():
    return {
        "through the scaler, after an update()": case(_again(again=False)),
        "through the scaler, which raises": case(_step()),
        "directly": case(_step()),
    }


def near_misses():
    def inner_steps(setup, batch):
        setup.model.zero_grad()
        for _ in range(2):
            loss = loss_of(setup, batch)
            setup.scaler.scale(loss).backward()
            setup.scaler.step(setup.optimizer)
            setup.scaler.update()
            setup.model.zero_grad()
        return loss.detach()

    def other_gradients(setup, batch):
        loss = _step()(setup, batch)
        for parameter in setup.model.parameters():
            parameter.grad = 1e-3 * parameter.detach()
        setup.optimizer.step()
        return loss

    return {
        "each of two optimizers": case(_step(), two()),
        "two updates in a step": case(inner_steps),
        "directly, with gradients of its own": case(other_gradients),
    }


MESSAGES = {
    "through the scaler, after an update()": """\
Mixed precision training: failed, 1 finding

[stepped-twice] 'optimizer' was stepped through the scaler at stepped_twice.py:38 and again at stepped_twice.py:41, \
without a backward pass in between (4 times, steps 0-3)
  cause: the gradients of the first of these updates are still there: the scaler divides them by the scale once \
more, and they are applied again
  fix: call scaler.step(optimizer) once for each backward pass

Telemetry:
  step  loss   grad norm  update     lr    opt steps  scale
  0     1.472  0.008939   0.0004469  0.05  2          256
  1     3.62   0.01543    0.0007715  0.05  2          256
  2     4.972  0.02325    0.001163   0.05  2          256
  3     1.87   0.01034    0.0005171  0.05  2          256""",
    "through the scaler, which raises": """\
Mixed precision training: failed, 1 finding

[stepped-twice] scaler.step() was called twice for 'optimizer' in step 0: at stepped_twice.py:14 and at \
stepped_twice.py:24: the GradScaler raised at stepped_twice.py:24 in step 0 (step() has already been called since \
the last update())
  cause: scaler.step() is called a second time in the same update, with gradients that are used already
  fix: call scaler.step() once for each optimizer and update

Telemetry:
  step  grad norm  update  lr    opt steps  scale
  0     2.288      0.1144  0.05  1          256""",
    "directly": """\
Mixed precision training: failed, 1 finding

[stepped-twice] 'optimizer' was stepped through the scaler at stepped_twice.py:14 and directly at \
stepped_twice.py:28, without a backward pass in between (4 times, steps 0-3)
  cause: scaler.step() steps the optimizer by itself: a further optimizer.step() applies the same gradients twice, \
and NaN or Inf where the scaler skipped them
  fix: remove the optimizer.step() at stepped_twice.py:28

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  2          256
  1     3.354  3.72       0.186   0.05  2          256
  2     3.742  5.075      0.2538  0.05  2          256
  3     1.382  2.955      0.1478  0.05  2          256""",
}
