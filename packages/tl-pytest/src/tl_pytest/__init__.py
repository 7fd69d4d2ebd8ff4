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
        check_rule_ids,
        choose_step,
        group_names,
        match_names,
        move_to_device,
        noted,
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
    from tl_resume import (
        ResumeReport,
        StateDiff,
        StateFileError,
        assert_checkpoint_crash_safe,
        assert_resume_equivalent,
        check_checkpoint_crash_safe,
        check_resume_equivalent,
        diff_states,
        load_training_state,
        save_training_state,
        training_state,
    )
    from tl_telemetry import (
        FINDINGS,
        NOTES,
        Backward,
        Clip,
        Divergence,
        Event,
        Evidence,
        GradientAct,
        GradientLog,
        GradientsCleared,
        LossTerm,
        OptimizerStep,
        Outside,
        ParameterFigures,
        Piece,
        RunTrace,
        ScalerUpdate,
        SchedulerStep,
        SkippedStep,
        StateCapture,
        StateDifference,
        StateMoved,
        StepRecord,
        TensorDifference,
        TrainingRun,
        Unscaling,
        Warned,
        capture_outside,
        capture_state,
        compare_captures,
        first_divergence,
        is_own_namespace,
        largest_gap,
        never_stepped,
        non_finite,
        num_updates,
        observe,
        own_object,
        put_back,
        run_training,
        setup_functions,
        update_rounds_away,
        zeroed_before_step,
    )

__all__ = [
    "FINDINGS",
    "NOTES",
    "Backward",
    "Batches",
    "CheckFailed",
    "Clip",
    "Divergence",
    "Event",
    "Evidence",
    "Finding",
    "GradientAct",
    "GradientLog",
    "GradientsCleared",
    "LossTerm",
    "NotJudged",
    "OptimizerStep",
    "Outside",
    "ParameterFigures",
    "Piece",
    "Report",
    "ResumeReport",
    "RunTrace",
    "ScalerUpdate",
    "SchedulerStep",
    "SkippedStep",
    "StateCapture",
    "StateDiff",
    "StateDifference",
    "StateFileError",
    "StateMoved",
    "StepRecord",
    "TensorDifference",
    "Tolerance",
    "Tolerances",
    "TrainingRun",
    "TrainingRunner",
    "TrainingSetup",
    "Unscaling",
    "Warned",
    "assert_checkpoint_crash_safe",
    "assert_optimizer_coverage",
    "assert_resume_equivalent",
    "build_setup",
    "capture_outside",
    "capture_state",
    "check_checkpoint_crash_safe",
    "check_optimizer_coverage",
    "check_resume_equivalent",
    "check_rule_ids",
    "choose_step",
    "compare_captures",
    "diff_states",
    "first_divergence",
    "group_names",
    "is_own_namespace",
    "largest_gap",
    "load_training_state",
    "match_names",
    "move_to_device",
    "never_stepped",
    "non_finite",
    "noted",
    "num_updates",
    "observe",
    "own_object",
    "parameter_names",
    "preserve_rng",
    "put_back",
    "run_training",
    "save_training_state",
    "seed_everything",
    "setup_functions",
    "split_losses",
    "standard_step",
    "step_ranges",
    "training_state",
    "unregistered_tensors",
    "update_rounds_away",
    "zeroed_before_step",
]

_HOMES = ("tl_core", "tl_coverage", "tl_telemetry", "tl_resume", "tl_pytest._runner")


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
