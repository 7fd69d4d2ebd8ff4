"""Gradients that are exactly 0: by a clip, by a term that is switched off, or for reasons left open."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_

from tl_core import Report
from tl_telemetry import run_training


def data(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def make_setup():
    model = nn.ModuleDict({"a": nn.Linear(4, 1), "b": nn.Linear(4, 1)})
    return model, {name: torch.optim.SGD(part.parameters(), lr=0.05) for name, part in model.items()}


def report_of(loss_of: Any, clip: float | None = None) -> Report:
    """Train both parts, each by the loss that ``loss_of`` makes of its name and its output."""

    def step(setup, x):
        for name, optimizer in setup.optimizers.items():
            optimizer.zero_grad()
            loss = loss_of(name, setup.model[name](x))
            loss.backward()
            if clip is not None:
                clip_grad_norm_(setup.model[name].parameters(), clip)
            optimizer.step()
        return loss

    return run_training(make_setup, data, step, steps=4).report


def test_a_clip_to_zero() -> None:
    """A clip with a bound of 0 is named as the cause, with its line and the norms before it."""
    found = report_of(lambda name, output: output.mean(), clip=0.0).findings
    assert [finding.seen for finding in found] == [
        f"every gradient that {name!r} stepped with was exactly 0 (4 of 4 updates, steps 0-3)" for name in "ab"
    ]
    site = found[0].cause.split(" ")[2]
    assert site.startswith("test_zero_causes.py:")
    norms = [float((data(step).mean(0).square().sum() + 1).sqrt()) for step in range(4)]
    assert found[0].cause == (
        f"clip_grad_norm_() at {site} is given a bound of 0, and scales them to 0: the norm before was "
        f"{min(norms):.3g} to {max(norms):.3g}"
    )
    assert found[0].fix == "pass the bound that is meant, or leave the call out where 0 stands for no clipping"


def test_a_clip_beside_zero_gradients() -> None:
    """A clip that only finds gradients of 0 is not their cause."""
    (finding,) = report_of(
        lambda name, output: output.mean() if name == "b" else 0 * output.mean() + 1, clip=1.0
    ).findings
    assert finding.cause.startswith("undecided: the loss is flat in these weights")


class Product(nn.Module):
    """Add a low-rank product to a frozen layer."""

    def __init__(self, std: float) -> None:
        super().__init__()
        self.base = nn.Linear(4, 3).requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, 4) * std)
        self.b = nn.Parameter(torch.zeros(3, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def product_report(std: float) -> Report:
    def make_two():
        model = nn.Sequential(Product(std), nn.Tanh(), Product(std))
        model[2].base = nn.Linear(3, 3).requires_grad_(False)
        model[2].a = nn.Parameter(torch.randn(2, 3) * std)
        return model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)

    def step(setup, x):
        for _ in range(2):
            setup.optimizer.zero_grad()
            loss = setup.model(x).square().mean()
            loss.backward()
            setup.optimizer.step()
        return loss

    return run_training(make_two, data, step, steps=4).report


def test_both_factors_of_a_product_are_zero() -> None:
    """Two factors that are both 0 keep each other there; every update of a step is counted."""
    (finding,) = product_report(std=0.0).findings
    assert str(finding) == (
        "[zero-gradient] every gradient that 'optimizer' stepped with was exactly 0 (8 of 8 updates, steps 0-3)\n"
        "  cause: all of these weights are 0 in every element, and lie two by two in one module, as the factors of a "
        "low-rank product do (B @ A): the gradient of each is multiplied by the other, so that none ever leaves 0\n"
        "  fix: start only one factor of each product at 0 (in LoRA B), and the other at random values"
    )


def test_one_factor_of_a_product_is_zero() -> None:
    """A product that starts at 0 through one of its factors trains."""
    assert product_report(std=0.1).findings == ()


def test_a_layer_that_is_zero() -> None:
    """A single layer at 0 is no product: what keeps its gradient at 0 is left open."""

    def make_zero():
        model = nn.Linear(4, 1)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def step(setup, x):
        setup.optimizer.zero_grad()
        output = setup.model(x)
        loss = (output - output).square().mean() + 1
        loss.backward()
        setup.optimizer.step()
        return loss

    (finding,) = run_training(make_zero, data, step, steps=4).report.findings
    assert finding.rule == "zero-gradient"
    assert finding.cause.startswith("undecided: the loss is flat in these weights")


def test_a_term_that_is_switched_off() -> None:
    """Where the loss itself is exactly 0 while something else trains, what it trains is not judged."""
    report = report_of(lambda name, output: output.mean() if name == "b" else 0 * output.mean())
    assert report.ok
    assert [note.seen for note in report.notes] == [
        "every gradient that 'a' stepped with was exactly 0, and so was every loss that made them (4 of 4 updates, "
        "steps 0-3), while other parameters trained: a term that is multiplied by 0 in these steps, or that is always "
        "0 (a margin that is met, a cross entropy over one class). What 'a' trains could not be judged"
    ]


def test_everything_switched_off() -> None:
    """Where nothing trains at all, it is a finding."""
    report = report_of(lambda name, output: 0 * output.mean())
    assert [finding.rule for finding in report.findings] == ["zero-gradient", "zero-gradient"]
