from __future__ import annotations

import contextlib
import importlib.util
import random
import warnings
from pathlib import Path

import pytest
import torch

from tl_core import seed_everything
from tl_telemetry import observe

spec = importlib.util.spec_from_file_location("telemetry_loops", Path(__file__).with_name("loops.py"))
loops = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loops)
LOOPS, STEPS = loops.LOOPS, loops.STEPS


def tensors_of(value):
    if isinstance(value, torch.Tensor):
        yield value.detach().clone()
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_of(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def outcome(build, watch):
    """Train a fresh loop; return every tensor of losses, weights, optimizer states, averages and the random streams."""
    torch.compiler.reset()
    seed_everything(3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # each kind of loop has warnings of its own, the same ones in both runs
        setup, step = build()
        losses = []
        with watch(setup) as run:
            for _ in range(STEPS):
                with contextlib.nullcontext() if run is None else run.step() as current:
                    losses.append(step(setup).detach().clone())
                    if current is not None:
                        current.loss = losses[-1]
    seen = [*losses, *tensors_of(setup.model.state_dict())]
    for member in (*setup.optimizers.values(), *setup.state.values()):
        seen += tensors_of(member.state_dict())
    return [*seen, torch.get_rng_state(), torch.tensor(random.getstate()[1])], setup, run


def unwatched(setup):
    return contextlib.nullcontext()


def without_updates(setup):
    return observe(setup, track_updates=False)


@pytest.mark.parametrize("watch", [observe, without_updates])
@pytest.mark.parametrize("name", LOOPS)
def test_watching_changes_nothing(name, watch):
    """Losses, weights, optimizer states and random streams of a watched loop are bitwise those of the unwatched one."""
    alone, _, _ = outcome(LOOPS[name], unwatched)
    watched, _, run = outcome(LOOPS[name], watch)
    assert len(alone) == len(watched)
    assert all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
    assert [record.loss for record in run.records] == pytest.approx(
        [float(loss) for loss in alone[:STEPS]], nan_ok=True
    )
    assert not any(record.skipped for record in run.records if name not in ("gradient_scaler",))


@pytest.mark.parametrize("name", LOOPS)
def test_a_correct_loop_has_no_finding(name):
    """None of these kinds of loop is found fault with."""
    _, _, run = outcome(LOOPS[name], observe)
    assert [str(finding) for finding in run.findings] == []
    assert {note.rule for note in run.notes} <= {"never-ran", "clip-every-update", "torch-warning", "not-judged"}


def test_the_comparison_of_two_runs_can_fail():
    """A loop that draws one random number more, or moves its weights by one bit, is told apart."""

    def draws(setup):
        torch.rand(())
        return contextlib.nullcontext()

    def moves(setup):
        with torch.no_grad():
            first = next(setup.model.parameters())
            first.view(-1)[0] = torch.nextafter(first.view(-1)[0], torch.tensor(9.0))
        return contextlib.nullcontext()

    alone, _, _ = outcome(LOOPS["sgd"], unwatched)
    for other in (draws, moves):
        watched, _, _ = outcome(LOOPS["sgd"], other)
        assert not all(torch.equal(a, b) for a, b in zip(alone, watched, strict=True))
