"""What could not be judged: said, and never passed over in silence."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, plain, scaler_of, update

from tl_core import TrainingSetup


def _with(scaler, **state):
    def make_setup():
        setup = one(scale=None)()
        return TrainingSetup(setup.model, setup.optimizer, scaler=scaler(), state=state)

    return make_setup


def float32(setup, batch):
    setup.optimizer.zero_grad()
    loss = (setup.model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def bfloat16(setup, batch):
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch)
    loss.backward()
    setup.optimizer.step()
    return loss.detach()


def _of_its_own(*, known):
    """Train with a scaler that the setup holds, or that it does not know."""
    scaler = scaler_of()

    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        scaler.scale(loss).backward()
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    return case(step, _with(lambda: scaler if known else None))


def _offloaded(*, whole):
    """Keep what the backward pass needs elsewhere: of all of it, or of the forward pass alone."""

    def pack(tensor):
        return tensor.clone()

    def step(setup, batch):
        setup.optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, pack):
            loss = loss_of(setup, batch)
            scaled = setup.scaler.scale(loss) if whole else None
        if scaled is None:
            scaled = setup.scaler.scale(loss)
        scaled.backward()
        update(setup)
        return loss.detach()

    return step


def _noisy(scaled):
    """Clamp noisy gradients, with noise of a generator that no seed reaches."""
    generator = torch.Generator()

    def step(setup, batch):
        generator.seed()
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch) * (1.0 + scaled * torch.rand((), generator=generator))
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


class OwnScale:
    """A scale that halves where gradients overflow, and doubles after two updates."""

    def __init__(self):
        self.value, self.count = 1024.0, 0


def with_own_scale(setup, batch):
    own = setup.own
    setup.optimizer.zero_grad()
    loss = loss_of(setup, batch, torch.float16)
    (loss * own.value).backward()
    for parameter in setup.model.parameters():
        parameter.grad.div_(own.value)
    if all(parameter.grad.isfinite().all() for parameter in setup.model.parameters()):
        setup.optimizer.step()
        own.count += 1
        own.value *= 2.0 if own.count % 2 == 0 else 1.0
    else:
        own.value /= 2.0
    return loss.detach()


def make_own():
    setup = one(scale=None)()
    setup.own = OwnScale()
    return setup


class FixedScaler:
    """A scaler of somebody's own, which does nothing."""

    def scale(self, loss):
        return loss

    def unscale_(self, optimizer):
        pass

    def step(self, optimizer):
        optimizer.step()

    def update(self):
        pass

    def get_scale(self):
        return 1.0


def _too_few(steps):
    return case(lambda setup, batch: plain(setup, batch, torch.float16), one(scale=2.0**17, lr=0.01), steps=steps)


def for_cuda():
    return torch.amp.GradScaler("cuda")


def buggy():
    return {
        "a disabled scaler": case(plain, _with(lambda: torch.amp.GradScaler("cpu", enabled=False))),
        "a scaler that is not in the setup": _of_its_own(known=False),
        "a scaler that is not torch's": case(plain, _with(FixedScaler)),
        "nothing of mixed precision": case(float32, one(scale=None)),
        "losses that cannot be read": case(_offloaded(whole=True)),
        "two updates, both skipped": _too_few(2),
        "noise that no seed reaches": case(_noisy(10.0)),
        "a scale of the loop's own": case(with_own_scale, make_own),
    } | ({} if torch.cuda.is_available() else {"a scaler for a device that is not there": case(plain, _with(for_cuda))})


def healthy():
    return {
        "a disabled scaler": case(plain),
        "a scaler for a device that is not there": case(plain),
        "a scaler that is not in the setup": _of_its_own(known=True),
        "a scaler that is not torch's": case(bfloat16, one(scale=None)),
        "nothing of mixed precision": case(bfloat16, one(scale=None)),
        "losses that cannot be read": case(_offloaded(whole=False)),
        "two updates, both skipped": _too_few(8),
        "noise that no seed reaches": case(_noisy(0.0)),
        "a scale of the loop's own": case(lambda setup, batch: plain(setup, batch, torch.float16)),
    }


def near_misses():
    def set_later(setup, batch):
        if setup.scaler is None:
            setup.scaler = scaler_of()
        return plain(setup, batch)

    def in_state(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        scaler = setup.state["scaler of its own"]
        scaler.scale(loss).backward()
        scaler.step(setup.optimizer)
        scaler.update()
        return loss.detach()

    return {
        "a scaler that the first step sets": case(set_later, one(scale=None)),
        "a scaler in the setup's state": case(in_state, _with(lambda: None, **{"scaler of its own": scaler_of()})),
    }


MESSAGES = {
    "a disabled scaler": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] the GradScaler (scaler) is disabled, built with enabled=False: it scales nothing, and how it is used \
could not be judged
  fix: enable it where it is needed, for the device that trains: torch.amp.GradScaler('cpu')""",
    "a scaler that is not in the setup": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] a GradScaler that is not in the setup acted in the loop: how it is used could not be judged
  fix: give it to the setup: TrainingSetup(model, optimizer, scaler=scaler)""",
    "a scaler that is not torch's": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] the setup's scaler is a FixedScaler, and no torch.amp.GradScaler: how it is used could not be judged""",
    "nothing of mixed precision": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] no mixed precision was seen: no GradScaler, no autocast around a module's forward pass, no parameter \
or loss in float16 or bfloat16; only non-finite values were judged""",
    "losses that cannot be read": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] what multiplies the losses of backward() at not_judged.py:63 could not be read (compiled code, or \
hooks on saved tensors): whether they are scaled could not be judged""",
    "two updates, both skipped": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] all 2 updates of 'optimizer' in this run were skipped by the GradScaler: whether its scale is only on \
its way down could not be judged
  fix: run more steps""",
    "noise that no seed reaches": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] the loop's first update is another one each time it runs, from the same seed and loss scale: whether \
its gradients depend on the scale could not be judged
  fix: draw random numbers from the global generators, which are seeded, or from one that make_setup() builds""",
    "a scale of the loop's own": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] the losses that backward() at not_judged.py:96 ran on are multiplied by 1024 to 2048, by no \
GradScaler: how the loop adapts this scale, and which updates it skips, could not be judged
  fix: use torch.amp.GradScaler, which does both""",
    "a scaler for a device that is not there": """\
Mixed precision training: passed, 1 note

Notes:
[not-judged] the GradScaler (scaler) is disabled, built for 'cuda' on a machine without it, or with enabled=False: \
it scales nothing, and how it is used could not be judged
  fix: enable it where it is needed, for the device that trains: torch.amp.GradScaler('cpu')""",
}
