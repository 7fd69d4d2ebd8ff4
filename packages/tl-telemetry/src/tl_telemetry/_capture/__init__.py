"""The state of a setup at one moment, in memory: captured, compared with another one, put back."""

from tl_telemetry._capture._compare import StateDifference, TensorDifference, compare_captures
from tl_telemetry._capture._pieces import Piece, StateCapture
from tl_telemetry._capture._put_back import put_back
from tl_telemetry._capture._setup_state import capture_outside, capture_state

__all__ = [
    "Piece",
    "StateCapture",
    "StateDifference",
    "TensorDifference",
    "capture_outside",
    "capture_state",
    "compare_captures",
    "put_back",
]
