"""Scalers that step and are never updated."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of, scaler_of

from tl_core import TrainingSetup


def _step(*, unscale=False, update=True, late=False):
    def step(setup, batch):
        if late and setup.step_index:
            setup.scaler.update()
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        if unscale:
            setup.scaler.unscale_(setup.optimizer)
        setup.scaler.step(setup.optimizer)
        if update:
            setup.scaler.update()
        return loss.detach()

    return step


def _guarded(*, inside):
    """Look at the norm, and leave out what is too large; update() within the condition, or after it."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        fits = setup.step_index != 1
        if fits:
            setup.scaler.step(setup.optimizer)
        if fits or not inside:
            setup.scaler.update()
        return loss.detach()

    return step


def make_three():
    model = Net()
    parts = {"weight": [model.body.weight], "bias": [model.body.bias], "head": model.head.parameters()}
    return TrainingSetup(
        model, {name: torch.optim.SGD(held, lr=0.05) for name, held in parts.items()}, scaler=scaler_of()
    )


def _in_turns(*, update):
    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.step(list(setup.optimizers.values())[setup.step_index % 3])
        if update:
            setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "never, with optimizers that take turns": case(_in_turns(update=False), make_three, steps=3),
        "never": case(_step(update=False)),
        "never, after unscale_": case(_step(update=False, unscale=True)),
        "only where it steps": case(_guarded(inside=True)),
    }


def healthy():
    return {
        "never, with optimizers that take turns": case(_in_turns(update=True), make_three, steps=3),
        "never": case(_step()),
        "never, after unscale_": case(_step(unscale=True)),
        "only where it steps": case(_guarded(inside=False)),
    }


def near_misses():
    def by_hand(setup, batch):
        loss = _step(update=False)(setup, batch)
        setup.scaler.update(new_scale=256.0)
        return loss

    return {
        "at the start of the next step": case(_step(update=False, late=True)),
        "with a scale of its own": case(by_hand),
        "one step only": case(_step(update=False), steps=1),
    }


MESSAGES = {
    "never, with optimizers that take turns": """\
Mixed precision training: failed, 1 finding

[missing-update] scaler.step() was called 3 times (missing_update.py:59, steps 0-2), and scaler.update() never
  cause: update() is missing: the scale never adapts, and the scaler keeps what it found out about each optimizer's \
gradients
  fix: call scaler.update() once an update, after all optimizers have stepped

Telemetry:
  step  loss   grad norm weight  update weight  lr weight  opt steps weight  grad norm bias  update bias  lr bias  \
opt steps bias  grad norm head  update head  lr head  opt steps head  scale
  0     1.472  1.049             0.05244        0.05       1                 -               -            0.05     \
0               -               -            0.05     0               256
  1     3.868  -                 -              0.05       0                 0.774           0.0387       0.05     \
1               -               -            0.05     0               256
  2     6.455  -                 -              0.05       0                 -               -            0.05     \
0               5.893           0.2946       0.05     1               256""",
    "never": """\
Mixed precision training: failed, 1 finding

[missing-update] scaler.step() was called for 'optimizer' at missing_update.py:20 in step 0, and scaler.step() \
again at missing_update.py:20 in step 1, without an update() in between: the GradScaler raised at \
missing_update.py:20 in step 1 (step() has already been called since the last update())
  cause: scaler.update() is missing: it ends an update, and lets the scaler unscale and step these optimizers anew
  fix: call scaler.update() once an update, after all optimizers have stepped

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  1          256
  1     -      -          -       0.05  0          256""",
    "never, after unscale_": """\
Mixed precision training: failed, 1 finding

[missing-update] scaler.step() was called for 'optimizer' at missing_update.py:20 in step 0, and scaler.unscale_() \
at missing_update.py:19 in step 1, without an update() in between: the GradScaler raised at missing_update.py:19 in \
step 1 (unscale_() is being called after step())
  cause: scaler.update() is missing: it ends an update, and lets the scaler unscale and step these optimizers anew
  fix: call scaler.update() once an update, after all optimizers have stepped

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  1          256
  1     -      -          -       0.05  0          256""",
    "only where it steps": """\
Mixed precision training: failed, 1 finding

[missing-update] unscale_() was called for 'optimizer' at missing_update.py:35 in steps 1 and 2, and its gradients \
were cleared in between: the GradScaler raised at missing_update.py:35 in step 2 (unscale_() has already been \
called on this optimizer since the last update())
  cause: in step 1 unscale_() was followed neither by scaler.step() nor by scaler.update(): the scaler goes on \
holding the gradients for unscaled
  fix: call scaler.update() after each unscale_(), also where scaler.step() is left out

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.472  2.288      0.1144  0.05  1          256
  1     3.62   -          -       0.05  0          256
  2     -      -          -       0.05  0          256""",
}
