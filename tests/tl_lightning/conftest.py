"""What the tests of this folder share: the two packages, modules made of parts, and what must be put back."""

from __future__ import annotations

import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

FLAVORS = ("lightning.pytorch", "pytorch_lightning")


@pytest.fixture(params=FLAVORS)
def pl(request: pytest.FixtureRequest) -> ModuleType:
    """Each of the two packages."""
    return pytest.importorskip(request.param)


@pytest.fixture
def one_pl() -> ModuleType:
    """One of the two packages, where both have the same code."""
    return pytest.importorskip(FLAVORS[0])


@pytest.fixture
def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Four batches of eight examples, of a linear target."""
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(3))
    targets = inputs @ torch.linspace(-1.0, 1.0, 4).unsqueeze(1)
    return list(zip(inputs.split(8), targets.split(8), strict=True))


@pytest.fixture
def make_class() -> Callable[..., Any]:
    """Make a LightningModule's class: a regression, in which the methods that are given replace its own."""

    def make(pl: ModuleType, /, *, dropout: float = 0.0, **methods: Any) -> Any:
        class Regression(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 1))

            def loss(self, batch: Any) -> torch.Tensor:
                return nn.functional.mse_loss(self.net(batch[0]), batch[1])

            def training_step(self, batch: Any, batch_idx: int) -> Any:
                return self.loss(batch)

            def configure_optimizers(self) -> Any:
                return torch.optim.Adam(self.parameters(), lr=1e-2)

        for name, method in methods.items():
            setattr(Regression, name, method)
        return Regression

    return make


@pytest.fixture
def make_trainer() -> Callable[..., Any]:
    """Make a Trainer that is quiet, writes no files, and is otherwise as it is."""

    def make(pl: ModuleType, **arguments: Any) -> Any:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        arguments = {"accelerator": "cpu", "enable_model_summary": False, **quiet, **arguments}
        return pl.Trainer(**arguments)

    return make


def moving_parts() -> dict[str, Any]:
    """Return everything global that a Trainer or a check touches."""
    hooks = {
        "optimizer pre": torch_optimizer._global_optimizer_pre_hooks,
        "optimizer post": torch_optimizer._global_optimizer_post_hooks,
        "forward pre": nn_module._global_forward_pre_hooks,
        "forward": nn_module._global_forward_hooks,
    }
    names = (*FLAVORS, "lightning.fabric", "lightning_fabric")
    return {
        **{name: tuple(hook.values()) for name, hook in hooks.items()},
        **{f"level of {name}": logging.getLogger(name).getEffectiveLevel() for name in names if name in sys.modules},
        **{f"handler of {one.name}": signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)},
        "engine": torch.autograd._engine_run_backward,
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "dtype": torch.get_default_dtype(),
        "excepthook": sys.excepthook,
        "showwarning": warnings.showwarning,
    }


@pytest.fixture(autouse=True)
def everything_is_put_back() -> Iterator[None]:
    """Fail any test that leaves something behind: a hook, a handler of a signal, a logger's level, a mode of torch."""
    for name in FLAVORS:
        pytest.importorskip(name)
    before = moving_parts()
    state = torch.get_rng_state()
    yield
    torch.set_rng_state(state)
    after = moving_parts()
    assert {name: (value, after[name]) for name, value in before.items() if value != after[name]} == {}


@pytest.fixture
def parts() -> Callable[[], dict[str, Any]]:
    """Everything global that a Trainer or a check touches, as a function."""
    return moving_parts
