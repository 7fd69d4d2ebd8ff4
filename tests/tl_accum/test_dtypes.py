"""Parameters and buffers of every dtype: those that torch computes in are compared, others are no trouble."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum import AccumulationReport, check_accumulation_equivalent
from tl_core import TrainingSetup

COMPUTED = [torch.float64, torch.bfloat16, torch.complex64, torch.complex128]
STORED = [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int64, torch.bool, torch.complex32]


class Holding(nn.Module):
    def __init__(self, held: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.frozen = nn.Parameter(held.clone(), requires_grad=False)
        self.register_buffer("held", held.clone())

    def forward(self, batch: Tensor) -> Tensor:
        return self.linear(batch)


class Weighted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=dtype))

    def forward(self, batch: Tensor) -> Tensor:
        return (batch.to(self.weight.dtype) @ self.weight).abs().float()


def report_of(make_model: Callable[[], nn.Module], after: Callable[[nn.Module, int], None]) -> AccumulationReport:
    def make_setup() -> TrainingSetup:
        model = make_model()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return TrainingSetup(model, torch.optim.SGD(trained, lr=0.1))

    def make_step(k: int) -> Any:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = setup.model(batch).square().mean()
            (loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
                after(setup.model, k)
            return loss

        return step

    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return check_accumulation_equivalent(make_setup, data, make_step)


def decay(model: nn.Module, k: int) -> None:
    with torch.no_grad():
        model.get_parameter("weight").mul_(1.0 - 0.1 * k)


@pytest.mark.parametrize("dtype", COMPUTED, ids=str)
def test_weights_that_torch_computes_in_are_compared(dtype: torch.dtype) -> None:
    """Complex ones too: by how far they move, as by their gradients."""
    assert report_of(lambda: Weighted(dtype), lambda model, k: None).ok
    report = report_of(lambda: Weighted(dtype), decay)
    assert [(finding.rule, finding.parameters) for finding in report.findings] == [("weights-differ", ("weight",))]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
@pytest.mark.parametrize("dtype", STORED, ids=str)
def test_what_torch_only_stores_is_no_trouble(dtype: torch.dtype) -> None:
    """Frozen weights and buffers of quantized models, counters and masks."""
    report = report_of(lambda: Holding(torch.ones(4, 2).to(dtype)), lambda model, k: None)
    assert str(report) == "Gradient accumulation: passed"
