"""Forward passes under float16 autocast whose losses no scaler scales."""

from __future__ import annotations

import torch
from amp_loops import case, loss_of, one, plain


def _step(dtype):
    def step(setup, batch):
        setup.optimizer.zero_grad()
        loss = loss_of(setup, batch, dtype)
        loss.backward()
        setup.optimizer.step()
        return loss.detach()

    return step


def buggy():
    return {"float16": case(_step(torch.float16), one(scale=None))}


def healthy():
    return {"float16": case(lambda setup, batch: plain(setup, batch, torch.float16))}


NOTED = {"float16 for an evaluation only": ("not-judged",)}


def near_misses():
    def evaluated(setup, batch):
        setup.optimizer.zero_grad()
        loss = (setup.model(batch[0]) - batch[1]).square().mean()
        loss.backward()
        setup.optimizer.step()
        with torch.no_grad():
            loss_of(setup, batch, torch.float16)
        return loss.detach()

    return {
        "bfloat16": case(_step(torch.bfloat16), one(scale=None)),
        "float16 for an evaluation only": case(evaluated, one(scale=None)),
    }


MESSAGES = {
    "float16": """\
Mixed precision training: passed, 1 note

Notes:
[float16-without-scaler] the forward passes ran under float16 autocast, and backward() at \
float16_without_scaler.py:13 on losses that no GradScaler scales
  cause: gradients below 6e-8, the smallest float16 number, become 0 on their way through float16 operations
  fix: scale the losses with torch.amp.GradScaler, or use bfloat16; nothing, if the gradients are large enough""",
}
