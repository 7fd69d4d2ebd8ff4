"""Watch the moving parts of a training loop, and name what is wrong in it."""

from tl_telemetry._count import num_updates
from tl_telemetry._observe import observe
from tl_telemetry._record import ParameterFigures, StepRecord
from tl_telemetry._rule_ids import FINDINGS, NOTES
from tl_telemetry._run import TrainingRun
from tl_telemetry._runner import run_training

__all__ = [
    "FINDINGS",
    "NOTES",
    "ParameterFigures",
    "StepRecord",
    "TrainingRun",
    "num_updates",
    "observe",
    "run_training",
]

for _public in (ParameterFigures, StepRecord, TrainingRun):
    _public.__module__ = "tl_telemetry"
