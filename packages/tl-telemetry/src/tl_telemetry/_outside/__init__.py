"""What a loop keeps outside of its setup: found in its code, captured, and set back before it runs again."""

from tl_telemetry._outside._own import is_own_class, is_own_namespace
from tl_telemetry._outside._reset import Outside, own_object
from tl_telemetry._outside._unnamed import setup_functions

__all__ = ["Outside", "is_own_class", "is_own_namespace", "own_object", "setup_functions"]
