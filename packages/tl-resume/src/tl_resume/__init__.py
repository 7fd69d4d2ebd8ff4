"""Save, load and compare training state, and prove that a resumed run is the same run."""

from tl_resume._files import load_training_state, save_training_state
from tl_resume._format import StateFileError
from tl_resume._state import training_state

__all__ = ["StateFileError", "load_training_state", "save_training_state", "training_state"]
