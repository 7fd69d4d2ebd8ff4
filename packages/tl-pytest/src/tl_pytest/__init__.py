"""The training-loop checks in pytest; every public name of the checks can be imported from here too.

Names are looked up when they are asked for: pytest imports this package in every run, and the checks import torch.
Those of tl-lightning and tl-hf are there where the extras ``lightning`` and ``hf`` are, and not in ``__all__``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tl_accum import (
        ACCUM_FINDINGS,
        ACCUM_NOTES,
        AccumulationReport,
        assert_accumulation_equivalent,
        check_accumulation_equivalent,
        split_batch,
    )
    from tl_amp import (
        AMP_FINDINGS,
        AMP_NOTES,
        assert_mixed_precision_training,
        check_mixed_precision_training,
    )
    from tl_core import (
        Batches,
        CheckFailed,
        Finding,
        NoLoss,
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
        module_names,
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
    from tl_hf import assert_hf_accumulation_equivalent as assert_hf_accumulation_equivalent
    from tl_hf import assert_hf_optimizer_coverage as assert_hf_optimizer_coverage
    from tl_hf import assert_hf_resume_equivalent as assert_hf_resume_equivalent
    from tl_hf import check_hf_accumulation_equivalent as check_hf_accumulation_equivalent
    from tl_hf import check_hf_optimizer_coverage as check_hf_optimizer_coverage
    from tl_hf import check_hf_resume_equivalent as check_hf_resume_equivalent
    from tl_hf import make_hf_trainer as make_hf_trainer
    from tl_hf import watch_hf as watch_hf
    from tl_lightning import assert_lightning_accumulation_equivalent as assert_lightning_accumulation_equivalent
    from tl_lightning import assert_lightning_resume_equivalent as assert_lightning_resume_equivalent
    from tl_lightning import check_lightning_accumulation_equivalent as check_lightning_accumulation_equivalent
    from tl_lightning import check_lightning_resume_equivalent as check_lightning_resume_equivalent
    from tl_lightning import from_lightning as from_lightning
    from tl_lightning import make_lightning_trainer as make_lightning_trainer
    from tl_lightning import watch_lightning as watch_lightning
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
        LateRun,
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
        SteppedLoop,
        StepRecord,
        TensorDifference,
        TrainingRun,
        Unscaling,
        Warned,
        capture_outside,
        capture_state,
        compare_captures,
        explain_nonfinite,
        first_divergence,
        is_own_class,
        is_own_namespace,
        largest_gap,
        never_stepped,
        non_finite,
        num_updates,
        observe,
        observe_later,
        own_object,
        put_back,
        run_training,
        setup_functions,
        update_rounds_away,
        zeroed_before_step,
    )

__all__ = [
    "ACCUM_FINDINGS",
    "ACCUM_NOTES",
    "AMP_FINDINGS",
    "AMP_NOTES",
    "FINDINGS",
    "NOTES",
    "AccumulationReport",
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
    "LateRun",
    "LossTerm",
    "NoLoss",
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
    "SteppedLoop",
    "TensorDifference",
    "Tolerance",
    "Tolerances",
    "TrainingRun",
    "TrainingRunner",
    "TrainingSetup",
    "Unscaling",
    "Warned",
    "assert_accumulation_equivalent",
    "assert_checkpoint_crash_safe",
    "assert_mixed_precision_training",
    "assert_optimizer_coverage",
    "assert_resume_equivalent",
    "build_setup",
    "capture_outside",
    "capture_state",
    "check_accumulation_equivalent",
    "check_checkpoint_crash_safe",
    "check_mixed_precision_training",
    "check_optimizer_coverage",
    "check_resume_equivalent",
    "check_rule_ids",
    "choose_step",
    "compare_captures",
    "diff_states",
    "explain_nonfinite",
    "first_divergence",
    "group_names",
    "is_own_class",
    "is_own_namespace",
    "largest_gap",
    "load_training_state",
    "match_names",
    "module_names",
    "move_to_device",
    "never_stepped",
    "non_finite",
    "noted",
    "num_updates",
    "observe",
    "observe_later",
    "own_object",
    "parameter_names",
    "preserve_rng",
    "put_back",
    "run_training",
    "save_training_state",
    "seed_everything",
    "setup_functions",
    "split_batch",
    "split_losses",
    "standard_step",
    "step_ranges",
    "training_state",
    "unregistered_tensors",
    "update_rounds_away",
    "zeroed_before_step",
]

_HOMES = ("tl_core", "tl_coverage", "tl_telemetry", "tl_resume", "tl_accum", "tl_amp", "tl_pytest._runner")
# the names of each package that only an extra brings
_OF_EXTRAS = {
    ("hf", "tl_hf"): (
        "assert_hf_accumulation_equivalent",
        "assert_hf_optimizer_coverage",
        "assert_hf_resume_equivalent",
        "check_hf_accumulation_equivalent",
        "check_hf_optimizer_coverage",
        "check_hf_resume_equivalent",
        "make_hf_trainer",
        "watch_hf",
    ),
    ("lightning", "tl_lightning"): (
        "assert_lightning_accumulation_equivalent",
        "assert_lightning_resume_equivalent",
        "check_lightning_accumulation_equivalent",
        "check_lightning_resume_equivalent",
        "from_lightning",
        "make_lightning_trainer",
        "watch_lightning",
    ),
}


def __getattr__(name: str) -> object:
    if name in __all__:
        for home in _HOMES:
            value: object = getattr(import_module(home), name, None)
            if value is not None:
                globals()[name] = value  # looked up once
                return value
    for (extra, home), names in _OF_EXTRAS.items():
        if name in names:
            from tl_pytest._extras import needed

            with needed(extra, name):
                package = import_module(home)
            return globals().setdefault(name, getattr(package, name))
    raise AttributeError(f"module 'tl_pytest' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
