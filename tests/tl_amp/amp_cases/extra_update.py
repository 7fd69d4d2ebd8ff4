"""A scaler.update() too many."""

from __future__ import annotations

from amp_loops import case, loss_of, plain


def _micro_batches(*, every):
    def step(setup, batch):
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss / 2).backward()
        last = setup.step_index % 2 == 1
        if last:
            setup.scaler.step(setup.optimizer)
            setup.optimizer.zero_grad()
        if last or every:
            setup.scaler.update()
        return loss.detach()

    return step


def _again(*, again):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        if again:
            setup.scaler.update()
        return loss.detach()

    return step


def buggy():
    return {
        "in every micro-batch": case(_micro_batches(every=True)),
        "twice": case(_again(again=True)),
    }


def healthy():
    return {
        "in every micro-batch": case(_micro_batches(every=False)),
        "twice": case(_again(again=False)),
    }


def near_misses():
    def where_nothing_steps(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        setup.scaler.unscale_(setup.optimizer)
        if setup.step_index != 1:
            setup.scaler.step(setup.optimizer)
        setup.scaler.update()
        return loss.detach()

    def and_set(setup, batch):
        loss = plain(setup, batch)
        setup.scaler.update(new_scale=512.0)
        return loss

    return {"after unscale_ without a step": case(where_nothing_steps), "to set the scale": case(and_set)}


MESSAGES = {
    "in every micro-batch": """\
Mixed precision training: failed, 1 finding

[extra-update] scaler.update() was called after a backward pass whose gradients no scaler had unscaled or stepped \
yet: the GradScaler raised at extra_update.py:17 in step 0 (No inf checks were recorded prior to update)
  cause: undecided: update() runs on every micro-batch of an accumulation, it comes before scaler.step(), or \
scaler.step() is not called
  fix: call scaler.update() once an update, right after scaler.step() of all optimizers

Telemetry:
  step  lr    opt steps  scale
  0     0.05  0          256""",
    "twice": """\
Mixed precision training: failed, 1 finding

[extra-update] scaler.update() had been called at extra_update.py:29 in the same step, and nothing was unscaled \
since: the GradScaler raised at extra_update.py:31 in step 0 (No inf checks were recorded prior to update)
  cause: update() is called more often than updates
  fix: call scaler.update() once an update, right after scaler.step() of all optimizers

Telemetry:
  step  grad norm  update  lr    opt steps  scale
  0     2.288      0.1144  0.05  1          256""",
}
