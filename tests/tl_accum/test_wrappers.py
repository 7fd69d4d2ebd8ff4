"""A model that is wrapped (compiled, data parallel) is judged and named as the model itself is."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tl_accum import AccumulationReport, check_accumulation_equivalent
from tl_core import TrainingSetup

WRAPPERS: dict[str, Callable[[nn.Module], Any]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "data_parallel": nn.DataParallel,
}


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.linear = nn.Linear(4, 1)

    def forward(self, batch: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(batch.detach().mean(0), alpha=0.1)
        return self.linear(batch)


def hooked() -> nn.Module:
    model = nn.Linear(4, 1)
    model.weight.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
    return model


def nothing(model: nn.Module, k: int, ends: bool) -> None:
    pass


def decay(model: nn.Module, k: int, ends: bool) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)


def decay_by_steps(model: nn.Module, k: int, ends: bool) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0 - 0.1 * k * ends)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, int, bool], None], tuple[str, ...]]] = {
    "statistics of forward passes": (Centred, nothing, ("buffers-per-forward",)),
    "weights that move in each micro-batch": (lambda: nn.Linear(4, 1), decay, ("moved-per-micro-batch",)),
    "weights that move otherwise": (lambda: nn.Linear(4, 1), decay_by_steps, ("weights-differ",)),
    "batch statistics": (
        lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)),
        nothing,
        ("not-judged",),
    ),
    "gradient hooks": (hooked, nothing, ("gradients-differ",)),
}


@cache
def report_of(name: str, wrapper: str | None) -> AccumulationReport:
    make_model, edit, _ = MODELS[name]

    def make_setup() -> TrainingSetup:
        model = make_model() if wrapper is None else WRAPPERS[wrapper](make_model())
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.05))

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Any) -> Tensor:
            inputs, targets = batch
            loss = F.mse_loss(setup.model(inputs), targets)
            (loss / k).backward()
            ends = (setup.step_index + 1) % k == 0
            edit(setup.model, k, ends)
            if ends:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return loss

        return step

    inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    return check_accumulation_equivalent(make_setup, (inputs, inputs.sum(1, keepdim=True)), make_step)


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("name", MODELS)
def test_a_wrapped_model_is_judged_as_itself(name: str, wrapper: str) -> None:
    """What is found, and every name in it, is what it is without the wrapper."""
    bare, wrapped = report_of(name, None), report_of(name, wrapper)
    assert tuple(found.rule for found in (*bare.findings, *bare.notes)) == MODELS[name][2]
    assert str(wrapped) == str(bare)
    assert [found.parameters for found in wrapped.findings] == [found.parameters for found in bare.findings]
