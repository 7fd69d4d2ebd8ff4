"""Gradients that are divided again with each further micro-batch, or after an update() that forgets."""

from __future__ import annotations

from amp_loops import case, loss_of
from torch.nn.utils import clip_grad_norm_


def _micro_batches(*, every, update):
    """Accumulate four micro-batches; unscale in each, or once; update in each, or once."""

    def step(setup, batch):
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss / 4).backward()
        last = setup.step_index % 4 == 3
        if last or every:
            setup.scaler.unscale_(setup.optimizer)
            clip_grad_norm_(setup.model.parameters(), 1.0)
        if last:
            setup.scaler.step(setup.optimizer)
            setup.optimizer.zero_grad()
        if last or update:
            setup.scaler.update()
        return loss.detach()

    return step


def _update(*, early):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        clip_grad_norm_(setup.model.parameters(), 1.0)
        if early:
            setup.scaler.update()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "in every micro-batch": case(_micro_batches(every=True, update=True), steps=8),
        "in every micro-batch, which raises": case(_micro_batches(every=True, update=False)),
        "an update() before the step": case(_update(early=True)),
    }


def healthy():
    once = _micro_batches(every=False, update=False)
    return {
        "in every micro-batch": case(once, steps=8),
        "in every micro-batch, which raises": case(once),
        "an update() before the step": case(_update(early=False)),
    }


def near_misses():
    def each_stepped(setup, batch):
        """Unscale in each micro-batch, and step in each."""
        for part in zip(batch[0].split(6), batch[1].split(6), strict=True):
            setup.optimizer.zero_grad()
            loss = loss_of(setup, part)
            setup.scaler.scale(loss).backward()
            setup.scaler.unscale_(setup.optimizer)
            clip_grad_norm_(setup.model.parameters(), 1.0)
            setup.scaler.step(setup.optimizer)
            setup.scaler.update()
        return loss.detach()

    def given_up(setup, batch):
        """Unscale, look at the norm, and give the gradients up where it is too large."""
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        if clip_grad_norm_(setup.model.parameters(), 1.0) < 4.0:
            setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    return {"each micro-batch an update": case(each_stepped), "gradients that are given up": case(given_up)}


MESSAGES = {
    "in every micro-batch": """\
Mixed precision training: failed, 1 finding

[unscaled-again] scaler.unscale_() at unscaled_again.py:17 divided gradients of 'optimizer' by the scale that it \
had divided already (6 of 8 calls, steps 1-3, 5-7): no update had used them, and a further backward pass had added \
to them
  cause: unscale_() runs on every micro-batch of an accumulation, which update() allows: the gradients of earlier \
micro-batches are divided again each time, the first one's by 256 ** 4 instead of 256, and vanish
  fix: call unscale_(), clip, scaler.step() and scaler.update() once an update, after the last micro-batch's \
backward()

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.472  -          -        0.05  0          256
  1     3.916  -          -        0.05  0          256
  2     6.604  -          -        0.05  0          256
  3     2.652  0.7013     0.03507  0.05  1          256
  4     1.505  -          -        0.05  0          256
  5     2.276  -          -        0.05  0          256
  6     1.416  -          -        0.05  0          256
  7     3.838  1.041 → 1  0.05     0.05  1          256""",
    "in every micro-batch, which raises": """\
Mixed precision training: failed, 1 finding

[unscaled-again] unscale_() was called again for optimizer 'optimizer' at unscaled_again.py:17 in steps 0 and 1, \
after backward() at unscaled_again.py:14 had added to the gradients that it had unscaled: the GradScaler raised at \
unscaled_again.py:17 in step 1 (unscale_() has already been called on this optimizer since the last update())
  cause: unscale_() runs on every micro-batch of an accumulation: the gradients of earlier micro-batches would be \
divided by the scale again each time
  fix: call unscale_(), clip, scaler.step() and scaler.update() once an update, after the last micro-batch's \
backward()

Telemetry:
  step  loss   lr    opt steps  scale
  0     1.472  0.05  0          256
  1     -      0.05  0          256""",
    "an update() before the step": """\
Mixed precision training: failed, 1 finding

[unscaled-again] scaler.step() at unscaled_again.py:38 divided the gradients of 'optimizer' by 256 again, which \
scaler.unscale_() at unscaled_again.py:34 had divided already, without a backward pass in between (4 of 8 \
unscalings, steps 0-3)
  cause: scaler.update() at unscaled_again.py:37 came between them: the scaler forgets with it what it has \
unscaled, and the gradients become 256 times too small
  fix: move scaler.update() from unscaled_again.py:37 to after scaler.step() of all optimizers

Telemetry:
  step  loss   grad norm         update     lr    opt steps  scale
  0     1.472  2.288 → 0.003906  0.0001953  0.05  1          256
  1     3.916  4.224 → 0.003906  0.0001953  0.05  1          256
  2     6.596  7.057 → 0.003906  0.0001953  0.05  1          256
  3     2.652  2.792 → 0.003906  0.0001953  0.05  1          256""",
}
