"""A checkpoint that is written in half precision to save room."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[loaded-in-lower-precision] 0.* (2 tensors), 2.weight differ after loading (0.weight: 26 of 32 elements, the most at \
[6, 2]: 0.527508 when saved, 0.527344 after loading); the runs part at step 4: loss 2.47818 resumed, 2.47835 without \
interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: the loaded values are the saved ones rounded to float16: the checkpoint was written in float16
  fix: save the training state in the precision that it has; write a smaller copy for inference beside it"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _case(dtype: torch.dtype) -> dict[str, Any]:
    def save(setup: TrainingSetup, path: Any) -> None:
        torch.save({name: tensor.to(dtype) for name, tensor in setup.model.state_dict().items()}, path)

    def load(setup: TrainingSetup, path: Any) -> None:
        setup.model.load_state_dict(torch.load(path))

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case(torch.float16)


def healthy() -> dict[str, Any]:
    return _case(torch.float32)


def near_misses() -> dict[str, dict[str, Any]]:
    return {"saved in double precision": _case(torch.float64), "a model in bfloat16": _low()}


def _low() -> dict[str, Any]:
    def make_low() -> TrainingSetup:
        model = nn.Linear(4, 1).to(torch.bfloat16)
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    return {**_case(torch.bfloat16), "make_setup": make_low, "data": (X.bfloat16(), Y.bfloat16())}
