"""The file format: a nested state as one safetensors file, written at once and read with distrust."""

from tl_resume._format._entry import TensorEntry
from tl_resume._format._errors import StateFileError
from tl_resume._format._read import StateFile
from tl_resume._format._write import write_state

__all__ = ["StateFile", "StateFileError", "TensorEntry", "write_state"]
