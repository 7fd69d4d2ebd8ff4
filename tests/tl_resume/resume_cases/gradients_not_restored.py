"""A save in the middle of an accumulation cycle, without the gradients that were accumulated so far."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup, standard_step

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[gradients-not-restored] the gradients of weight, bias, accumulated before step 3, are not there after loading; the \
runs part at step 3: after it, weight has norm 0.777122 resumed, 0.96992 without interruption; with it put back \
after loading, the resumed run is the uninterrupted one
  cause: load() left them as make_setup() had built them: the micro-batches that were accumulated so far are lost to \
the next update
  fix: save only after an update, or save the .grad of the parameters too (save_training_state does)"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    grads = {name: parameter.grad for name, parameter in setup.model.named_parameters()}
    torch.save({"model": setup.model.state_dict(), "grads": grads}, path)


def _case(with_gradients: bool, resume_at: int | None = 3, steps: int = 8) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if with_gradients:
            for name, parameter in setup.model.named_parameters():
                parameter.grad = state["grads"][name]

    step = standard_step(loss_fn, accumulation_steps=2)
    case = {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}
    return {**case, "resume_at": resume_at, "steps": steps}


def buggy() -> dict[str, Any]:
    return _case(with_gradients=False)


def healthy() -> dict[str, Any]:
    return _case(with_gradients=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "saved after an update": _case(with_gradients=False, resume_at=4),
        "half of the steps is in the middle of a cycle": _case(with_gradients=False, resume_at=None, steps=6),
        "gradients that the next step clears": _stale(),
    }


def _stale() -> dict[str, Any]:
    def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
        setup.optimizer.zero_grad()
        loss = loss_fn(setup.model, batch)
        loss.backward()
        setup.optimizer.step()
        return loss

    return {**_case(with_gradients=False), "step": step}
