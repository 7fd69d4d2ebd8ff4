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
from tl_telemetry._gradient_log import GradientAct, GradientLog
from tl_telemetry._observe import observe
from tl_telemetry._outside import Outside, is_own_namespace, own_object, setup_functions
from tl_telemetry._record import ParameterFigures, StepRecord
from tl_telemetry._rule_ids import FINDINGS, NOTES
from tl_telemetry._run import TrainingRun
from tl_telemetry._runner import run_training
from tl_telemetry._trace import Divergence, RunTrace, first_divergence, largest_gap

__all__ = [
    "FINDINGS",
    "NOTES",
    "Divergence",
    "GradientAct",
    "GradientLog",
    "Outside",
    "ParameterFigures",
    "Piece",
    "RunTrace",
    "StateCapture",
    "StateDifference",
    "StepRecord",
    "TensorDifference",
    "TrainingRun",
    "capture_outside",
    "capture_state",
    "compare_captures",
    "first_divergence",
    "is_own_namespace",
    "largest_gap",
    "num_updates",
    "observe",
    "own_object",
    "put_back",
    "run_training",
    "setup_functions",
]

for _public in (
    Divergence,
    GradientAct,
    GradientLog,
    Outside,
    ParameterFigures,
    Piece,
    RunTrace,
    StateCapture,
    StateDifference,
    StepRecord,
    TensorDifference,
    TrainingRun,
):
    _public.__module__ = "tl_telemetry"
