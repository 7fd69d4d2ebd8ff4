"""A loss scale by hand that is undone for some parameters only."""

from __future__ import annotations

import torch
from amp_loops import Net, case, loss_of, one
from torch.nn.utils import clip_grad_norm_

from tl_core import TrainingSetup

SCALE = 1024.0


def _matrices(parameter):
    return parameter.ndim > 1


def _all(parameter):
    return True


def _step(which, bound=None, micro_batches=1):
    def step(setup, batch):
        loss = loss_of(setup, batch, torch.float16)
        (loss / micro_batches * SCALE).backward()
        if (setup.step_index + 1) % micro_batches == 0:
            for parameter in filter(which, setup.model.parameters()):
                parameter.grad.div_(SCALE)
            if bound is not None:
                clip_grad_norm_(setup.model.parameters(), bound)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss.detach()

    return step


def _two(names):
    """Divide the gradients of some of two optimizers."""

    def step(setup, batch):
        setup.model.zero_grad()
        loss = loss_of(setup, batch, torch.float16)
        (loss * SCALE).backward()
        for name in names:
            for parameter in getattr(setup.model, name).parameters():
                parameter.grad.data /= SCALE
        for optimizer in setup.optimizers.values():
            optimizer.step()
        return loss.detach()

    return step


def _rates(**rates):
    """Return a function that builds a setup with an optimizer for each part, and rates of their own."""

    def make_setup():
        model = Net()
        return TrainingSetup(
            model, {name: torch.optim.SGD(getattr(model, name).parameters(), lr=lr) for name, lr in rates.items()}
        )

    return make_setup


def _of_a_scaler(which):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch)
        setup.scaler.scale(loss).backward()
        scale = setup.scaler.get_scale()
        for parameter in filter(which, setup.model.parameters()):
            parameter.grad.div_(scale)
        setup.optimizer.step()
        return loss.detach()

    return step


def buggy():
    return {
        "all but the biases": case(_step(_matrices), one(scale=None)),
        "and a clip after it": case(_step(_matrices, bound=5.0), one(scale=None)),
        "after two micro-batches": case(_step(_matrices, micro_batches=2), one(scale=None)),
        "of a GradScaler": case(_of_a_scaler(_matrices)),
        "of one of two optimizers": case(_two(["body"]), _rates(body=1e-5, head=1e-5)),
    }


NOTED = {
    "of one of two optimizers": ("static-scale",),
    "a rate that is as much smaller": ("static-scale",),
    "all but the biases": ("static-scale",),
    "and a clip after it": ("static-scale",),
    "after two micro-batches": ("static-scale",),
    "a part that another loss trains": ("static-scale",),
    "half of it for the biases": ("static-scale",),
    "larger gradients for the biases": ("not-judged",),
}


def healthy():
    return {
        "all but the biases": case(_step(_all), one(scale=None)),
        "and a clip after it": case(_step(_all, bound=5.0), one(scale=None)),
        "after two micro-batches": case(_step(_all, micro_batches=2), one(scale=None)),
        "of a GradScaler": case(_of_a_scaler(_all)),
        "of one of two optimizers": case(_two(["body", "head"]), _rates(body=1e-5, head=1e-5)),
    }


def near_misses():
    def two_losses(setup, batch):
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = setup.model.body(batch[0]).float()
        (hidden.square().mean() * SCALE).backward()
        for parameter in setup.model.body.parameters():
            parameter.grad.div_(SCALE)
        loss = (setup.model.head(hidden.detach().tanh()) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    def half(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch, torch.float16)
        (loss * SCALE).backward()
        for parameter in setup.model.parameters():
            parameter.grad.div_(SCALE if parameter.ndim > 1 else 2 * SCALE)
        setup.optimizer.step()
        return loss.detach()

    def weighted(setup, batch):
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        (loss * 3.0).backward()
        for parameter in filter(_matrices, setup.model.parameters()):
            parameter.grad.div_(3.0)
        setup.optimizer.step()
        return loss.detach()

    return {
        "a rate that is as much smaller": case(_two(["body"]), _rates(body=0.05, head=0.05 / SCALE)),
        "a part that another loss trains": case(two_losses, one(scale=None)),
        "half of it for the biases": case(half, one(scale=None)),
        "larger gradients for the biases": case(weighted, one(scale=None)),
    }


MESSAGES = {
    "all but the biases": """\
Mixed precision training: failed, 1 finding

[unscaled-in-part] the loss that backward() at unscaled_in_part.py:25 ran on is multiplied by 1024; before \
'optimizer' stepped, the gradients of body.weight, head.weight were made 1024 times smaller by hand, and those of \
body.bias, head.bias were left as they were (2 of 4 updates, steps 0-1; in step 1 head.bias had a norm of 5.13e+04 \
instead of 50.1)
  cause: the loop undoes its loss scale for some parameters only: the gradients of the others are 1024 times too \
large
  fix: divide the gradients of all parameters by 1024, also those of body.bias, head.bias

Telemetry:
  step  loss       grad norm  update  lr    opt steps
  0     1.471      528.2      26.41   0.05  1
  1     630.3      5.143e+04  2571    0.05  1
  2     6.445e+06  nan        nan     0.05  1
  3     nan        nan        nan     0.05  1""",
    "and a clip after it": """\
Mixed precision training: failed, 1 finding

[unscaled-in-part] the loss that backward() at unscaled_in_part.py:25 ran on is multiplied by 1024; before \
'optimizer' stepped, the gradients of body.weight, head.weight were made 1024 times smaller by hand, and those of \
body.bias, head.bias were left as they were (4 of 4 updates, steps 0-3; in step 3 head.bias had a norm of 1.25e+03 \
instead of 1.22)
  cause: the loop undoes its loss scale for some parameters only: the gradients of the others are 1024 times too \
large
  fix: divide the gradients of all parameters by 1024, also those of body.bias, head.bias

Telemetry:
  step  loss   grad norm  update  lr    opt steps
  0     1.471  528.2 → 5  0.25    0.05  1
  1     3.538  1222 → 5   0.25    0.05  1
  2     5.838  967.7 → 5  0.25    0.05  1
  3     2.964  1423 → 5   0.25    0.05  1""",
    "after two micro-batches": """\
Mixed precision training: failed, 1 finding

[unscaled-in-part] the loss that backward() at unscaled_in_part.py:25 ran on is multiplied by 1024; before \
'optimizer' stepped, the gradients of body.weight, head.weight were made 1024 times smaller by hand, and those of \
body.bias, head.bias were left as they were (2 of 2 updates, steps 1, 3; in step 3 head.bias had a norm of 1.13e+05 \
instead of 110)
  cause: the loop undoes its loss scale for some parameters only: the gradients of the others are 1024 times too \
large
  fix: divide the gradients of all parameters by 1024, also those of body.bias, head.bias

Telemetry:
  step  loss   grad norm  update  lr    opt steps
  0     1.471  -          -       0.05  0
  1     3.913  1192       59.6    0.05  1
  2     3012   -          -       0.05  0
  3     3087   1.13e+05   5650    0.05  1""",
    "of a GradScaler": """\
Mixed precision training: failed, 1 finding

[unscaled-in-part] the loss that backward() at unscaled_in_part.py:71 ran on is multiplied by 256; before \
'optimizer' stepped, the gradients of body.weight, head.weight were made 256 times smaller by hand, and those of \
body.bias, head.bias were left as they were (4 of 4 updates, steps 0-3; in step 3 head.bias had a norm of 2.04e+06 \
instead of 7.97e+03)
  cause: the loop undoes its loss scale for some parameters only: the gradients of the others are 256 times too \
large
  fix: divide the gradients of all parameters by 256, also those of body.bias, head.bias; scaler.step(optimizer) \
does so by itself

Telemetry:
  step  loss       grad norm  update    lr    opt steps  scale
  0     1.472      132.4      6.618     0.05  1          256
  1     42.99      3423       171.1     0.05  1          256
  2     2.423e+04  8.074e+04  4037      0.05  1          256
  3     1.587e+07  2.04e+06   1.02e+05  0.05  1          256""",
    "of one of two optimizers": """\
Mixed precision training: failed, 1 finding

[unscaled-in-part] the loss that backward() at unscaled_in_part.py:44 ran on is multiplied by 1024; before 'body' \
and 'head' stepped, the gradients of body.* (2 tensors) were made 1024 times smaller by hand, and those of head.* \
(2 tensors) were left as they were (4 of 4 updates, steps 0-3; in step 3 head.weight had a norm of 1.86e+03 instead \
of 1.82)
  cause: the loop undoes its loss scale for some parameters only: the gradients of the others are 1024 times too \
large
  fix: divide the gradients of all parameters by 1024, also those of head.* (2 tensors)

Telemetry:
  step  loss   grad norm body  update body  lr body  opt steps body  grad norm head  update head  lr head  opt \
steps head
  0     1.471  1.07            1.069e-05    1e-05    1               2065            0.02065      1e-05    1
  1     3.862  2.426           2.426e-05    1e-05    1               3479            0.03479      1e-05    1
  2     6.307  3.65            3.65e-05     1e-05    1               5969            0.05969      1e-05    1
  3     2.509  1.971           1.971e-05    1e-05    1               1881            0.01881      1e-05    1""",
}
