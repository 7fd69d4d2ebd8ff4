"""Correct loops of every kind pass, without options and without findings."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

import tl_core
from tl_accum import assert_accumulation_equivalent, check_accumulation_equivalent
from tl_core import TrainingSetup

spec = importlib.util.spec_from_file_location("correct_loops", Path(__file__).with_name("correct_loops.py"))
correct_loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(correct_loops)
KINDS, usual = correct_loops.KINDS, correct_loops.usual
PASSED = "Gradient accumulation: passed"

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": correct_loops.sgd,
    "adam": correct_loops.adam,
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adam_foreach_amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, foreach=True),
    "rmsprop_centered": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-2, centered=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=1e-3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_passes(name: str) -> None:
    """An update is the same one whatever makes it of the gradients, in each of four cycles."""
    report = assert_accumulation_equivalent(**usual(OPTIMIZERS[name]), cycles=4)
    assert str(report) == PASSED


@pytest.mark.parametrize("name", KINDS)
def test_a_correct_loop_passes(name: str) -> None:
    """No finding and no note, without any option."""
    assert str(assert_accumulation_equivalent(**KINDS[name]())) == PASSED


def tampered(arguments: dict[str, Any]) -> dict[str, Any]:
    """Treble the gradients of each group's first micro-batch."""
    given = dict(arguments)
    loss_fn = given.pop("loss_fn", None)
    make_step = given.pop("make_step", None) or (lambda k: tl_core.standard_step(loss_fn, accumulation_steps=k))

    def make_other(k: int) -> Any:
        step = make_step(k)

        def other(setup: TrainingSetup, batch: Any) -> Any:
            losses = step(setup, batch)
            for optimizer in setup.optimizers.values():
                for parameter in chain.from_iterable(group["params"] for group in optimizer.param_groups):
                    if k > 1 and not setup.step_index % k and parameter.grad is not None:
                        parameter.grad.mul_(3.0)
            return losses

        return other

    return {**given, "make_step": make_other}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_loop_with_a_mistake_is_caught(name: str) -> None:
    """Each of these loops is really looked at: with gradients that are changed within a group, it fails."""
    report = check_accumulation_equivalent(**tampered(KINDS[name]()))
    assert "gradient-edited" in [finding.rule for finding in report.findings]
