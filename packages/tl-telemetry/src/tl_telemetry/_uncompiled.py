"""Runs a loop again without compiling it, to see which modules run inside of compiled code."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from tl_core import Batches, TrainingSetup, build_setup, preserve_rng, seed_everything
from tl_telemetry._recorder import Recorder


def flags_without_compiling(
    make_setup: Callable[..., Any],
    data: Any,
    step: Callable[[TrainingSetup, Any], Any],
    *,
    steps: int,
    device: str | torch.device,
    seed: int,
) -> dict[str, int]:
    """Repeat a run, with everything that is compiled run as it was written.

    Returns:
        By a parameter's name, the flags of the module whose forward pass uses it (``tl_telemetry._forward``).
    """
    batches = Batches(data, steps, device=device)
    with preserve_rng(), warnings.catch_warnings(), torch.compiler.set_stance("force_eager"):
        warnings.simplefilter("ignore")  # the run itself has shown them
        seed_everything(seed)
        setup = build_setup(make_setup, device)
        recorder = Recorder(setup, track_updates=False)
        recorder.forward.sees_compiled = True
        recorder.attach()
        try:
            for index in range(steps):
                setup.step_index = index
                recorder.open_step(None)
                step(setup, batches.batch(index))
                recorder.close_step({}, None)
        finally:
            recorder.detach()
    flags = recorder.forward.flags
    return {entry.name: flags.get(id(entry.owner), 0) for entry in recorder.tensors.entries}
