"""Weights saved with the prefix of a wrapper, and loaded with strict=False into nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup

X = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
Y = X.sum(dim=1, keepdim=True)

MESSAGE = """\
[model-not-restored] 0.* (2 tensors), 2.* (2 tensors) differ after loading (0.weight: 32 of 32 elements, the most at \
[4, 2]: -0.439778 when saved, 0.437083 after loading); the runs part at step 4: loss 6.60238 resumed, 2.47835 \
without interruption; with it put back after loading, the resumed run is the uninterrupted one
  cause: load_state_dict(strict=False) passed over what does not fit: 4 keys missing (0.weight, 0.bias, 2.weight, \
...) and 4 keys unexpected (module.0.weight, module.0.bias, module.2.weight, ...)
  fix: load with strict=True, and mend the names: a wrapper (DataParallel, torch.compile) puts a prefix before them"""


def make_setup() -> TrainingSetup:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def save(setup: TrainingSetup, path: Any) -> None:
    torch.save({f"module.{name}": tensor for name, tensor in setup.model.state_dict().items()}, path)


def _case(prefix: str) -> dict[str, Any]:
    def load(setup: TrainingSetup, path: Any) -> None:
        state = torch.load(path)
        setup.model.load_state_dict({name.removeprefix(prefix): t for name, t in state.items()}, strict=False)

    return {"make_setup": make_setup, "data": (X, Y), "loss_fn": loss_fn, "save": save, "load": load}


def buggy() -> dict[str, Any]:
    return _case("model.")


def healthy() -> dict[str, Any]:
    return _case("module.")


def near_misses() -> dict[str, dict[str, Any]]:
    return {
        "a buffer that each step computes anew": _recomputed(),
        "a backbone that the checkpoint leaves out": _frozen_backbone(),
    }


class _Scaled(nn.Linear):
    """Keeps the scale of its last input, which nothing but a plot reads."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        self.register_buffer("last_scale", torch.ones(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last_scale = x.detach().abs().max()
        return super().forward(x)


def _recomputed() -> dict[str, Any]:
    def make_scaled() -> TrainingSetup:
        model = _Scaled()
        return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.05))

    return {**_case("module."), "make_setup": make_scaled}


def _frozen_backbone() -> dict[str, Any]:
    """Every setup builds the pretrained part alike; only the head is trained and saved."""

    def make_frozen() -> TrainingSetup:
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1))
        model[0].requires_grad_(False)
        with torch.no_grad():
            model[0].weight.copy_(torch.linspace(-1, 1, 32).view(8, 4))
            model[0].bias.zero_()
        return TrainingSetup(model, torch.optim.SGD(model[1].parameters(), lr=0.05))

    def save_head(setup: TrainingSetup, path: Any) -> None:
        torch.save(setup.model[1].state_dict(), path)

    def load_head(setup: TrainingSetup, path: Any) -> None:
        setup.model[1].load_state_dict(torch.load(path))

    return {**_case(""), "make_setup": make_frozen, "save": save_head, "load": load_head}
