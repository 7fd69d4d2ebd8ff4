"""Values of a forward pass that are beyond float16."""

from __future__ import annotations

import torch
from amp_loops import Net, case, one, plain, scaler_of, update
from torch import nn

from tl_core import TrainingSetup


def _loss(*, low):
    """Sum squares in float16, where they overflow, or in float32."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = setup.model(batch[0])
        outputs = outputs if low else outputs.float()
        loss = (outputs - 400.0 * batch[1].to(outputs.dtype)).pow(2).sum() / 1e6
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def _outputs(*, factor):
    """Have a layer in float16 whose outputs are large, and no scaler."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = setup.model(factor * batch[0])
        loss = (outputs.float() / factor - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    return case(step, lambda: one(scale=None)() if factor < 10.0 else _linear())


def _seldom(factor):
    """Have outputs that are large in one step, so that the scaler skips one update."""

    def step(setup, batch):
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            outputs = setup.model(batch[0]) * (factor if setup.step_index == 2 else 1.0)
        loss = (outputs.float() - batch[1]).square().mean()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def _linear():
    model = nn.Linear(6, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


class Capped(nn.Module):
    """Attention whose scores a tanh holds below 50; ``early`` divides the queries, and not the products."""

    def __init__(self, *, early):
        super().__init__()
        self.early = early
        self.query, self.key, self.value = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        query, key = 500.0 * self.query(x), 500.0 * self.key(x)
        scores = (query / 1e4) @ key.T if self.early else query @ key.T / 1e4
        weights = (50.0 * torch.tanh(scores / 50.0)).softmax(dim=-1)
        return self.out(weights @ self.value(x))


def _attention(*, early):
    def make_setup():
        model = Capped(early=early)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scaler_of())

    return case(lambda setup, batch: plain(setup, batch, torch.float16), make_setup)


def _inputs(factor):
    """Give a layer inputs that are large, and a tanh after it."""

    def make_setup():
        setup = one()()
        with torch.no_grad():
            setup.model.body.weight.mul_(8.0)
        return setup

    def step(setup, batch):
        return plain(setup, (factor * batch[0], batch[1]), torch.float16)

    return case(step, make_setup)


def _normalised(epsilon):
    """Divide by norms that are 0, with an epsilon that float16 may not be able to hold."""

    def step(setup, batch):
        inputs = batch[0] * torch.arange(12.0).unsqueeze(1).clamp(max=1.0)
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = setup.model.body(inputs) - setup.model.body.bias.half()
            outputs = setup.model.head((hidden + 1e-3) / (hidden.abs().mean(dim=1, keepdim=True) + epsilon))
        loss = (outputs.float() - batch[1]).square().mean()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    return step


def buggy():
    return {
        "an epsilon that float16 cannot hold": case(_normalised(1e-8), one(lr=1e-4)),
        "a loss": case(_loss(low=True)),
        "outputs, without a scaler": _outputs(factor=1e5),
        "outputs of one step": case(_seldom(1e6)),
        "scores of attention, capped by a tanh": _attention(early=False),
        "a layer before a tanh": _inputs(2e4),
    }


NOTED = {"outputs, without a scaler": ("float16-without-scaler",)}


def healthy():
    return {
        "an epsilon that float16 cannot hold": case(_normalised(1e-3), one(lr=1e-4)),
        "a loss": case(_loss(low=False)),
        "outputs, without a scaler": _outputs(factor=1.0),
        "outputs of one step": case(_seldom(1.0)),
        "scores of attention, capped by a tanh": _attention(early=True),
        "a layer before a tanh": _inputs(1.0),
    }


def near_misses():
    def masked(setup, batch):
        """Mask scores with minus infinity, as attention does."""
        setup.optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            hidden = setup.model.body(batch[0])
            scores = (hidden @ hidden.T).masked_fill(torch.ones(12, 12).triu(1).bool(), float("-inf"))
            outputs = setup.model.head(torch.tanh(scores.softmax(dim=-1) @ hidden))
        loss = (outputs.float() - batch[1]).square().mean()
        setup.scaler.scale(loss).backward()
        update(setup)
        return loss.detach()

    def make_too_high():
        model = Net()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.01), scaler=scaler_of(2.0**20))

    return {
        "a mask of minus infinity": case(masked),
        "a scale that starts too high": case(
            lambda setup, batch: plain(setup, batch, torch.float16), make_too_high, steps=12
        ),
    }


MESSAGES = {
    "an epsilon that float16 cannot hold": """\
Mixed precision training: failed, 1 finding

[float16-overflow] the loss was not finite in steps 0-3 (loss nan)
  cause: div at float16_overflow.py:110 made Inf in float16 in step 0: what it divides by, or takes the logarithm \
of, is 0 there: numbers below 6e-8 are, an epsilon of 1e-8 too
  fix: use an epsilon that float16 can hold (1e-4), or compute this part in float32

Telemetry:
  step  loss  lr      opt steps  scale
  0     nan   0.0001  0          128
  1     nan   0.0001  0          64
  2     nan   0.0001  0          32
  3     nan   0.0001  0          16""",
    "a loss": """\
Mixed precision training: failed, 2 findings

[float16-overflow] the loss was not finite in steps 0-3 (loss inf)
  cause: pow at float16_overflow.py:20 overflowed in float16 in step 0: the result is beyond 65504, the largest \
float16 number
  fix: compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use \
bfloat16

[low-precision-loss] the loss that backward() at float16_overflow.py:21 ran on is a float16 number (made by Sum) in \
4 of 4 backward passes (steps 0-3)
  cause: the last operations of the loss are computed in float16: their sums keep about 3 digits, and they overflow \
beyond 65504
  fix: compute the loss in float32: convert the outputs first (`loss_fn(outputs.float(), targets)`)

Telemetry:
  step  loss  grad norm  update     lr    opt steps  scale
  0     inf   0.01124    0.000562   0.05  1          256
  1     inf   0.01807    0.0009035  0.05  1          256
  2     inf   0.02862    0.001431   0.05  1          256
  3     inf   0.01226    0.000613   0.05  1          256""",
    "outputs, without a scaler": """\
Mixed precision training: failed, 1 finding

[float16-overflow] the loss was not finite in steps 0-3 (loss nan); gradients that were not finite were applied in \
steps 0-3, first those of all 2 parameters; all 2 parameters held NaN or Inf at the end of the run
  cause: a value at float16_overflow.py:34 was converted to float16 and overflowed in step 0: the result is beyond \
65504, the largest float16 number
  fix: compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use \
bfloat16

Notes:
[float16-without-scaler] the forward passes ran under float16 autocast, and backward() at float16_overflow.py:36 on \
losses that no GradScaler scales
  cause: gradients below 6e-8, the smallest float16 number, become 0 on their way through float16 operations
  fix: scale the losses with torch.amp.GradScaler, or use bfloat16; nothing, if the gradients are large enough

Telemetry:
  step  loss  grad norm  update  lr    opt steps
  0     nan   nan        nan     0.05  1
  1     nan   nan        nan     0.05  1
  2     nan   nan        nan     0.05  1
  3     nan   nan        nan     0.05  1""",
    "outputs of one step": """\
Mixed precision training: failed, 1 finding

[float16-overflow] the loss was not finite in step 2 (loss inf), and backward() ran on it: the GradScaler skipped \
this update, and no scale helps against it
  cause: mul at float16_overflow.py:49 overflowed in float16 in step 2: the result is beyond 65504, the largest \
float16 number
  fix: compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use \
bfloat16

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.471  2.283      0.1141  0.05  1          256
  1     3.621  3.954      0.1977  0.05  1          256
  2     inf    -          -       0.05  0          128
  3     2.232  2.614      0.1307  0.05  1          128""",
    "scores of attention, capped by a tanh": """\
Mixed precision training: failed, 1 finding

[float16-overflow] Inf came up in the forward pass of step 0, although the loss is 1.433: tanh, which took it, made \
finite values
  cause: mm at float16_overflow.py:74 overflowed in float16: the result is beyond 65504, the largest float16 number
  fix: compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use \
bfloat16

Telemetry:
  step  loss   grad norm  update   lr    opt steps  scale
  0     1.433  1.313      0.01313  0.01  1          256
  1     3.797  3.131      0.03131  0.01  1          256
  2     5.166  3.801      0.03801  0.01  1          256
  3     2.338  2.096      0.02096  0.01  1          256""",
    "a layer before a tanh": """\
Mixed precision training: failed, 1 finding

[float16-overflow] Inf came up in the forward pass of step 0, although the loss is 1.83: tanh, which took it, made \
finite values
  cause: addmm at amp_loops.py:26 in module 'body' overflowed in float16: the result is beyond 65504, the largest \
float16 number
  fix: compute this part in float32 (torch.autocast(..., enabled=False), and .float() on its inputs), or use \
bfloat16

Telemetry:
  step  loss   grad norm  update  lr    opt steps  scale
  0     1.83   4.134      0.2067  0.05  1          256
  1     3.624  5.643      0.2822  0.05  1          256
  2     3.828  6.392      0.3196  0.05  1          256
  3     1.711  3.146      0.1573  0.05  1          256""",
}
