"""Watch the moving parts of a training loop, and name what is wrong in it."""

from tl_telemetry._capture import (
    Piece,
    StateCapture,
    StateDifference,
    TensorDifference,
    capture_outside,
    capture_state,
    compare_captures,
    put_back,
)
from tl_telemetry._count import num_updates
from tl_telemetry._events import (
    Backward,
    Clip,
    Event,
    GradientsCleared,
    LossTerm,
    OptimizerStep,
    ScalerUpdate,
    SchedulerStep,
    SkippedStep,
    StateMoved,
    Unscaling,
    Warned,
)
from tl_telemetry._evidence import Evidence
from tl_telemetry._gradient_log import GradientAct, GradientLog
from tl_telemetry._late import LateRun, observe_later
from tl_telemetry._observe import observe
from tl_telemetry._outside import Outside, is_own_class, is_own_namespace, own_object, setup_functions
from tl_telemetry._record import ParameterFigures, StepRecord
from tl_telemetry._rule_ids import FINDINGS, NOTES
from tl_telemetry._rules.bounds import non_finite
from tl_telemetry._rules.cleared import zeroed_before_step
from tl_telemetry._rules.finite import explain_nonfinite
from tl_telemetry._rules.unstepped import never_stepped
from tl_telemetry._rules.updates import update_rounds_away
from tl_telemetry._run import TrainingRun
from tl_telemetry._runner import run_training
from tl_telemetry._stepped import SteppedLoop
from tl_telemetry._trace import Divergence, RunTrace, first_divergence, largest_gap

__all__ = [
    "FINDINGS",
    "NOTES",
    "Backward",
    "Clip",
    "Divergence",
    "Event",
    "Evidence",
    "GradientAct",
    "GradientLog",
    "GradientsCleared",
    "LateRun",
    "LossTerm",
    "OptimizerStep",
    "Outside",
    "ParameterFigures",
    "Piece",
    "RunTrace",
    "ScalerUpdate",
    "SchedulerStep",
    "SkippedStep",
    "StateCapture",
    "StateDifference",
    "StateMoved",
    "StepRecord",
    "SteppedLoop",
    "TensorDifference",
    "TrainingRun",
    "Unscaling",
    "Warned",
    "capture_outside",
    "capture_state",
    "compare_captures",
    "explain_nonfinite",
    "first_divergence",
    "is_own_class",
    "is_own_namespace",
    "largest_gap",
    "never_stepped",
    "non_finite",
    "num_updates",
    "observe",
    "observe_later",
    "own_object",
    "put_back",
    "run_training",
    "setup_functions",
    "update_rounds_away",
    "zeroed_before_step",
]

for _public in (
    Backward,
    Clip,
    Divergence,
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
    StepRecord,
    SteppedLoop,
    TensorDifference,
    TrainingRun,
    Unscaling,
    Warned,
):
    _public.__module__ = "tl_telemetry"
