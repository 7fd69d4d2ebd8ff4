"""A short run of a loop, from a fresh seeded setup."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from tl_core import Batches, TrainingSetup, build_setup, choose_step, noted, preserve_rng, seed_everything
from tl_telemetry._observe import observe
from tl_telemetry._replay import first_nonfinite
from tl_telemetry._run import TrainingRun
from tl_telemetry._sites import cut_own_frames
from tl_telemetry._uncompiled import flags_without_compiling

Step = Callable[[TrainingSetup, Any], Any]


def run_training(
    make_setup: Callable[..., Any],
    data: Any,
    step: Step | None = None,
    *,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    steps: int = 20,
    device: str | torch.device = "cpu",
    seed: int = 0,
    track_updates: bool = True,
    catch: tuple[type[BaseException], ...] = (),
) -> TrainingRun:
    """Train a few steps from a fresh setup and record what happens.

    Nothing is judged yet: ``run.assert_healthy()`` does that, ``print(run.table())`` shows what happened. All random
    number generators are seeded for the run and put back afterwards.

    Args:
        make_setup: ``make_setup()`` or ``make_setup(device)``; returns a fresh ``TrainingSetup`` or a
            ``(model, optimizer[, scheduler[, scaler[, state]]])`` tuple.
        data: one batch, a list of batches (cycled), an iterable such as a DataLoader, or a function from the step
            index to a batch.
        step: ``step(setup, batch)``, the training step; returns a scalar loss or a dict of named ones.
        loss_fn: ``loss_fn(model, batch)`` instead of ``step``; ``standard_step`` does the rest.
        steps: how many steps to run.
        device: where the model and the batches are put.
        seed: seeds python, numpy and torch before ``make_setup`` is called.
        track_updates: measure how far each step moves the parameters; costs one copy of the parameters.
        catch: types of exceptions that end the run when a step raises them, instead of passing through; the exception
            is kept, with its traceback, as ``run.error``.

    Returns:
        The run.

    Raises:
        TypeError, ValueError: an argument is not what is allowed, or ``step`` returned something that is no loss.
            Exceptions from the given code pass through, with a note of the step and phase they came from.
    """
    train_step = choose_step(step, loss_fn)
    batches = Batches(data, steps, device=device)
    with preserve_rng():
        seed_everything(seed)
        setup = build_setup(make_setup, device)
        with observe(setup, track_updates=track_updates) as run:
            run.facts.data_form = batches.form
            if not isinstance(data, Iterator):  # what a one-shot iterator gave is gone
                run.facts.find_nonfinite = lambda until: first_nonfinite(
                    make_setup, data, train_step, until=until, device=device, seed=seed
                )
                run.facts.run_uncompiled = lambda num_steps: flags_without_compiling(
                    make_setup, data, train_step, steps=num_steps, device=device, seed=seed
                )
            _train(run, batches, train_step, steps, catch)
    return run


def _train(
    run: TrainingRun, batches: Batches, train_step: Step, steps: int, catch: tuple[type[BaseException], ...]
) -> None:
    def where() -> str:
        act = run.facts.recorder.last_act()
        return f"raised in step {index} of the training run, after {act}; data was taken as {batches.form}"

    for index in range(steps):
        run.setup.step_index = index
        batch = batches.batch(index)
        with run.step(batch) as current:
            try:
                with noted(where):
                    result = train_step(run.setup, batch)
            except BaseException as error:
                cut_own_frames(error.__traceback__)
                if not isinstance(error, catch):
                    raise
                run.error = error
                return
            current.loss = result
