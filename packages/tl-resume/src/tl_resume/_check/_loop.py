"""The person's loop, run again and again: from a fresh setup, with the same batches, in a clean process state."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tl_core import Batches, TrainingSetup, build_setup, move_to_device, noted, preserve_rng, seed_everything
from tl_resume._check._ledger import Ledger
from tl_resume._check._store import Store
from tl_resume._model_names import module_modes
from tl_telemetry import Outside, RunTrace, StateCapture, capture_state, setup_functions

Step = Callable[[TrainingSetup, Any], Any]
Save = Callable[[TrainingSetup, Path], Any]
Load = Callable[[TrainingSetup, Path], Any]


@dataclass(frozen=True)
class Loop:
    """What the person gave, validated.

    Attributes:
        make_setup: builds the setup.
        step: the step; with ``make_step``, a new one is built for each run.
        make_step: builds the step, or None.
        save: writes a checkpoint.
        load: restores one.
        batches: one batch a step, drawn once, on the CPU where it can be.
        steps: how many steps the uninterrupted run has.
        device: where it runs.
        seed: the seed of the uninterrupted run.
        restores_step: whether ``load`` must tell the step to go on from.
    """

    make_setup: Callable[..., Any]
    step: Step | None
    make_step: Callable[[], Step] | None
    save: Save
    load: Load
    batches: list[Any]
    steps: int
    device: str | torch.device
    seed: int
    restores_step: bool

    def new_step(self) -> Step:
        """Return the step of one run."""
        if self.make_step is None:
            assert self.step is not None
            return self.step
        with noted("raised in make_step()"):
            made = self.make_step()
        if not callable(made):
            raise TypeError(f"make_step() must return a function step(setup, batch), got a {type(made).__name__}")
        return made

    def batch(self, index: int) -> Any:
        """Return a copy of a step's batch, on the device."""
        try:
            copied = copy.deepcopy(self.batches[index])
        except Exception:  # noqa: BLE001  a batch of the person's own class may refuse in any way
            copied = self.batches[index]
        return move_to_device(copied, self.device)


@dataclass
class Run:
    """One run of the loop, or its resumed part.

    Attributes:
        trace: losses and norms of the weights, step by step.
        ledger: the inputs of the models and the batches drawn, step by step.
        order: of each optimizer, the names of its parameters.
        start: digests of the fresh setup's state.
        end: the state at the end.
        not_in_state_dict: the buffers that the model's ``state_dict`` leaves out.
        error: what the step raised, where a resumed run raised.
    """

    trace: RunTrace
    order: dict[str, list[list[str]]]
    start: StateCapture
    ledger: Ledger | None = None
    end: StateCapture | None = None
    not_in_state_dict: set[str] = field(default_factory=set)
    error: str | None = None

    @property
    def finished(self) -> StateCapture:
        """The state at the end of a run that came to its end."""
        assert self.end is not None
        return self.end


class Session:
    """What all runs of one check share.

    Args:
        loop: the loop.
        store: keeps the tensors of captures.
    """

    def __init__(self, loop: Loop, store: Store) -> None:
        self.loop = loop
        self.store = store
        self.outside = Outside([loop.new_step()], keep=store.keep)
        self.cost = 0.0  # in whole runs of the loop

    def capture(self, setup: TrainingSetup, outside: Outside) -> StateCapture:
        """Capture the whole state, tensors kept."""
        return capture_state(setup, outside=outside.values(), keep=self.store.keep)

    @contextmanager
    def fresh(self, seed: int) -> Iterator[tuple[TrainingSetup, Step, Outside, Run]]:
        """Give a fresh setup and step in a world that is set back; the generators are put back afterwards."""
        loop = self.loop
        self.outside.reset()
        if torch.device(loop.device).type != "cpu":
            # an optimizer and its scheduler refer to each other: the run before holds the device's memory until now
            gc.collect()
        with preserve_rng():
            seed_everything(seed)
            step = loop.new_step()
            setup = build_setup(loop.make_setup, loop.device)
            hooks = setup_functions(setup)
            # a step that was made anew, and hooks, have objects and closure cells of their own in each run
            anew = bool(hooks) or loop.make_step is not None
            outside = Outside([step, *hooks], keep=self.store.keep) if anew else self.outside
            start = capture_state(setup, outside=outside.values(), keep=self.store.mark)
            yield setup, step, outside, Run(RunTrace(), start.order, start, not_in_state_dict=_left_out(setup))

    def train(
        self,
        setup: TrainingSetup,
        step: Step,
        run: Run,
        start: int,
        stop: int,
        *,
        what: str,
        before_step: Callable[[TrainingSetup], None] | None = None,
    ) -> None:
        """Run steps ``start`` to ``stop - 1``, recorded in ``run``.

        Args:
            setup: the setup.
            step: the step.
            run: where losses, norms, inputs and batches are recorded.
            start: the first step.
            stop: the step before which to stop.
            what: the run's name, for notes on exceptions.
            before_step: called with the setup before each step.
        """
        assert run.ledger is not None
        for index in range(start, stop):
            setup.step_index = index
            batch = self.loop.batch(index)
            run.ledger.begin_step(index)
            if before_step is not None:
                before_step(setup)
            with noted(f"raised in step {index} of the {what}"):
                result = step(setup, batch)
            run.trace.add(index, result, setup)
        self.cost += (stop - start) / self.loop.steps


def _left_out(setup: TrainingSetup) -> set[str]:
    """Return the buffers that are registered with ``persistent=False``."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, parts in module_modes(setup.model).items()
        for part in parts
        for buffer in part._non_persistent_buffers_set
    }


def draw(data: Any, steps: int, seed: int) -> list[Any]:
    """Draw one batch a step, seeded, on the CPU; every run gets copies of these."""
    with preserve_rng():
        seed_everything(seed)
        source = Batches(data, steps, device="cpu")
        return [source.batch(index) for index in range(steps)]
