"""A scheduler that is built after the optimizer was restored: it writes the learning rate anew."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[restored-then-overwritten] the param_groups of optimizer 'optimizer' differ after loading: group 0 lr 0.02 when \
saved, 0.08 after loading; the runs part at step 4: after it, weight has norm 1.20807 resumed, 1.07167 without \
interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: the param_groups of optimizer 'optimizer': as saved when load_state_dict() returned, and changed by load() \
after that; building a scheduler writes lr and initial_lr of its optimizer
  fix: build everything first, then restore: model, optimizer, scheduler, and change nothing after that"""


def make_setup() -> TrainingSetup:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.08)
    return TrainingSetup(model, optimizer, StepLR(optimizer, step_size=2, gamma=0.5))


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    setup.scheduler.step()
    return loss


def save(setup: TrainingSetup, path: Any) -> None:
    state = {name: getattr(setup, name).state_dict() for name in ("model", "optimizer", "scheduler")}
    torch.save(state, path)


def _build_scheduler(setup: TrainingSetup) -> None:
    optimizer = setup.optimizer
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", 0.08)
    setup.schedulers["scheduler"] = StepLR(optimizer, step_size=2, gamma=0.5)


def _case(build_first: bool) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict(state["model"])
        if build_first:
            _build_scheduler(setup)
        setup.optimizer.load_state_dict(state["optimizer"])
        if not build_first:
            _build_scheduler(setup)
        setup.scheduler.load_state_dict(state["scheduler"])

    return {"make_setup": make_setup, "data": (X, Y), "step": step, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(build_first=False)


def healthy() -> dict[str, Any]:
    return _case(build_first=True)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"restored twice": _twice(), "overwritten with what it was": _to_itself()}


def _twice() -> dict[str, Any]:
    case = _case(build_first=False)
    once = case["load"]

    def load(setup: TrainingSetup, path: Any) -> None:
        once(setup, path)
        setup.optimizer.load_state_dict(torch.load(path)["optimizer"])

    return {**case, "load": load}


def _to_itself() -> dict[str, Any]:
    case = _case(build_first=False)
    once = case["load"]

    def load(setup: TrainingSetup, path: Any) -> None:
        once(setup, path)
        setup.optimizer.param_groups[0]["lr"] = setup.scheduler.get_last_lr()[0]

    return {**case, "load": load}
