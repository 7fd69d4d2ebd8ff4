"""The training-loop checks in pytest; every public name of the checks can be imported from here too.

Names are looked up when they are asked for: pytest imports this package in every run, and the checks import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tl_core import (
        Batches,
        CheckFailed,
        Finding,
        NotJudged,
        Report,
        Tolerance,
        Tolerances,
        TrainingSetup,
        build_setup,
        group_names,
        match_names,
        move_to_device,
        parameter_names,
        preserve_rng,
        seed_everything,
        split_losses,
        standard_step,
        step_ranges,
        unregistered_tensors,
    )
    from tl_coverage import (
        assert_optimizer_coverage,
        check_optimizer_coverage,
    )
    from tl_pytest._runner import TrainingRunner
    from tl_telemetry import (
        FINDINGS,
        NOTES,
        ParameterFigures,
        StepRecord,
        TrainingRun,
        num_updates,
        observe,
        run_training,
    )

__all__ = [
    "FINDINGS",
    "NOTES",
    "Batches",
    "CheckFailed",
    "Finding",
    "NotJudged",
    "ParameterFigures",
    "Report",
    "StepRecord",
    "Tolerance",
    "Tolerances",
    "TrainingRun",
    "TrainingRunner",
    "TrainingSetup",
    "assert_optimizer_coverage",
    "build_setup",
    "check_optimizer_coverage",
    "group_names",
    "match_names",
    "move_to_device",
    "num_updates",
    "observe",
    "parameter_names",
    "preserve_rng",
    "run_training",
    "seed_everything",
    "split_losses",
    "standard_step",
    "step_ranges",
    "unregistered_tensors",
]

_HOMES = ("tl_core", "tl_coverage", "tl_telemetry", "tl_pytest._runner")


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in _HOMES:
            value: object = getattr(import_module(home), name, None)
            if value is not None:
                globals()[name] = value  # looked up once
                return value
    raise AttributeError(f"module 'tl_pytest' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
