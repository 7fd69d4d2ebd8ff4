"""A save that evaluates first, and leaves the model in eval mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup, preserve_rng
from tl_resume import load_training_state, save_training_state

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[saving-changes-training] save() before step 4 changed the training state: eval mode was left on in the model and 4 \
of its modules; the runs part at step 4: loss 2.84811 in the run that saves, 2.7262 without interruption
  cause: save() switches the mode and does not switch back: dropout and batch norm act otherwise from then on
  fix: put the modes back at the end of save(), or do not change them: state_dict() is the same in both modes"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def step(setup: TrainingSetup, batch: Any) -> torch.Tensor:
    loss = nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.optimizer.zero_grad()
    loss.backward()
    setup.optimizer.step()
    return loss


def _case(back_to_training: bool) -> dict[str, Any]:
    def save(setup: TrainingSetup, path: Path) -> None:
        setup.model.eval()
        setup.state["score"] = setup.model(X).mean().item()
        if back_to_training:
            setup.model.train()
        save_training_state(setup, path)

    return _with(save)


def _with(save: Any) -> dict[str, Any]:
    def setup_with_score() -> TrainingSetup:
        setup = make_setup()
        setup.state["score"] = 0.0
        return setup

    return {"make_setup": setup_with_score, "data": (X, Y), "step": step, "save": save, "load": load_training_state}


def buggy() -> dict[str, Any]:
    return _case(back_to_training=False)


def healthy() -> dict[str, Any]:
    return _case(back_to_training=True)


def _counts_its_saves(setup: TrainingSetup, path: Path) -> None:
    setup.num_saves = getattr(setup, "num_saves", 0) + 1
    save_training_state(setup, path)


def _draws_and_puts_back(setup: TrainingSetup, path: Path) -> None:
    with preserve_rng():
        setup.model(X)
    save_training_state(setup, path)


def _half_for_export(setup: TrainingSetup, path: Path) -> None:
    save_training_state(setup, path)
    torch.save({k: v.half() for k, v in setup.model.state_dict().items()}, f"{path}.half")


def _averages_and_puts_back(setup: TrainingSetup, path: Path) -> None:
    own = {name: tensor.clone() for name, tensor in setup.model.state_dict().items()}
    setup.model.load_state_dict({name: tensor * 0.5 for name, tensor in own.items()})
    setup.model.load_state_dict(own)
    save_training_state(setup, path)


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a counter of saves": _with(_counts_its_saves),
        "random numbers, put back": _with(_draws_and_puts_back),
        "a half-precision copy beside it": _with(_half_for_export),
        "other weights for a while": _with(_averages_and_puts_back),
    }
