"""Optimizers that turn a gradient of nothing but rounding into steps of full size, and what that does to the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum import _compare, check_accumulation_equivalent
from tl_accum._replay import replaced_gradients
from tl_accum._updates import Update
from tl_core import TrainingSetup
from tl_telemetry import observe

DATA = torch.randn(32, 7, 8, generator=torch.Generator().manual_seed(5))
PASSED = "Gradient accumulation: passed"


class Block(nn.Module):
    """Attention whose queries, keys and values share one bias: a third of it has a gradient of 0."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Lengthwise(torch.optim.Optimizer):
    """Divides by the size of each gradient, as Adam does, and then the whole step by its length, as LAMB does."""

    def __init__(self, parameters: Any, lr: float = 0.02, shrink: float = 1.0) -> None:
        super().__init__(parameters, {"lr": lr})
        self.shrink = shrink

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                mean = self.state[parameter].setdefault("mean", torch.zeros_like(parameter))
                square = self.state[parameter].setdefault("square", torch.zeros_like(parameter))
                mean.lerp_(parameter.grad, 0.3)
                square.lerp_(parameter.grad.square(), 0.2)
                step = mean / (square.sqrt() + 1e-30)
                parameter.sub_(step / step.norm(), alpha=group["lr"] * self.shrink)


def adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-15, 1e-3))


def build(make_optimizer: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], Any]:
    def make_setup() -> Any:
        model = Block()
        nn.init.normal_(model.attention.in_proj_bias)  # the keys' part is not 0 by chance
        return model, make_optimizer(model.parameters())

    return make_setup


def loop(k: int, before: Callable[[TrainingSetup, int], None] = lambda setup, k: None) -> Any:
    def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
        loss = (setup.model(batch).squeeze(-1) - batch.mean(-1)).square().mean()
        (loss / k).backward()
        if (setup.step_index + 1) % k == 0:
            before(setup, k)
            setup.optimizer.step()
            setup.optimizer.zero_grad()
        return loss.detach()

    return step


OPTIMIZERS = {"by the step's length": Lengthwise, "Adafactor": adafactor}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_rounding_that_an_optimizer_blows_up_does_not_alarm(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of that parameter moves otherwise, and as the optimizer makes it of the accumulated gradients."""
    grows = [DATA * 1.5**number for number in range(4)]  # Adafactor shortens the steps of gradients that grow
    assert str(check_accumulation_equivalent(build(OPTIMIZERS[name]), grows, loop, cycles=4)) == PASSED
    monkeypatch.setattr(_compare, "_by_gradients", lambda found: found)
    tempted = check_accumulation_equivalent(build(OPTIMIZERS[name]), grows, loop, cycles=4)
    assert [(finding.rule, finding.parameters) for finding in tempted.findings] == [
        ("weights-differ", ("attention.in_proj_bias",))
    ]


def test_what_an_optimizer_does_otherwise_is_found_all_the_same() -> None:
    """A step of another size for other accumulation steps: beside the blown-up rounding, in the first cycle."""

    def shrunk(setup: TrainingSetup, k: int) -> None:
        setup.optimizer.shrink = 1.0 if k == 1 else 0.9

    report = check_accumulation_equivalent(build(Lengthwise), DATA, lambda k: loop(k, shrunk), cycles=3)
    assert [(finding.rule, report.diverged_at) for finding in report.findings] == [("weights-differ", 0)]
    assert report.findings[0].parameters == (
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "head.weight",
        "head.bias",
    )


def test_what_it_does_otherwise_later_is_found_in_its_cycle() -> None:
    """Rounding moves weights in earlier cycles: that ends the comparison in none of them."""

    def shrunk(setup: TrainingSetup, k: int) -> None:
        setup.optimizer.shrink = 0.9 if k > 1 and setup.step_index >= 3 * k else 1.0

    report = check_accumulation_equivalent(build(Lengthwise), DATA, lambda k: loop(k, shrunk), cycles=4)
    assert [(finding.rule, report.diverged_at) for finding in report.findings] == [("weights-differ", 3)]


def test_gradients_that_differ_later_are_found_in_their_cycle() -> None:
    """A division that is missing in the last cycle, after cycles in which rounding moved weights."""

    def scaled(setup: TrainingSetup, k: int) -> None:
        if k > 1 and setup.step_index >= 3 * k:
            for parameter in setup.model.parameters():
                parameter.grad.mul_(2.0)

    report = check_accumulation_equivalent(build(Lengthwise), DATA, lambda k: loop(k, scaled), cycles=4)
    assert (report.ok, report.diverged_at) == (False, 3)
    assert report.findings[0].rule != "weights-differ"


@pytest.mark.parametrize("scale", [None, 8.0])
def test_optimizers_are_handed_the_other_gradients_in_order(scale: float | None) -> None:
    """One update after another, multiplied by the scale that a fused step divides by; what is over stays its own."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = Recording(model.parameters())
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    made = [
        Update("optimizer", 0, {}, {}, None, {"weight": torch.full((1, 2), value)}, clips=()) for value in (1.0, 2.0)
    ]
    model.weight.grad = torch.full((1, 2), 5.0)
    with (
        observe(TrainingSetup(model, optimizer)) as training,
        replaced_gradients(_Observed(training), {"optimizer": made}),  # type: ignore[arg-type]
    ):
        for _ in range(3):
            model.weight.grad.fill_(5.0)
            optimizer.step()
    model.weight.grad.fill_(7.0)
    optimizer.step()
    assert optimizer.met == [scale or 1.0, 2.0 * (scale or 1.0), 5.0, 7.0]


class Recording(torch.optim.Optimizer):
    """Does nothing but note the gradients that it would apply."""

    grad_scale: Tensor | None = None

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.met: list[float] = []

    def step(self, closure: Any = None) -> None:
        self.met += [float(p.grad[0, 0]) for group in self.param_groups for p in group["params"]]


class _Observed:
    """A run of which only what was observed counts."""

    def __init__(self, training: Any) -> None:
        self.training = training


@pytest.mark.parametrize("gradient", [torch.zeros(3), torch.zeros(1, 3)], ids=["another shape", "as many elements"])
def test_gradients_of_another_shape_are_left(gradient: Tensor) -> None:
    """They are no update of this parameter."""
    model = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    made = [Update("optimizer", 0, {}, {}, None, {"weight": gradient}, clips=())]
    with (
        observe(TrainingSetup(model, optimizer)) as training,
        replaced_gradients(_Observed(training), {"optimizer": made}),  # type: ignore[arg-type]
    ):
        model.weight.grad = torch.full((1, 2), 5.0)
        optimizer.step()
    assert model.weight.grad.tolist() == [[5.0, 5.0]]
