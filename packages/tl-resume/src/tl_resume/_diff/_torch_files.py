"""Files of torch.save, read without unpickling: weights_only=True, and mapped, so that a tensor is read when used."""

from __future__ import annotations

import pickle
import re
import warnings
from pathlib import Path
from typing import Any

import torch

_REFUSED = re.compile(r"(?:GLOBAL|Unsupported class) ([\w.]*\w)")
ZIP_MAGIC = b"PK\x03\x04"


class RefusedFileError(Exception):
    """A file that cannot be read without unpickling it, or not at all; the message is the reason."""


def load_torch_file(path: Path) -> tuple[Any, str]:
    """Read a file of ``torch.save`` on the CPU.

    Args:
        path: The file.

    Returns:
        Its content, and a note on how it was read ("" where nothing is worth a note).

    Raises:
        RefusedFileError: It holds pickled objects that the safe reader refuses, or is damaged.
    """
    with path.open("rb") as file:
        mapped = file.read(4) == ZIP_MAGIC
    note = "" if mapped else f"{path.name} is in the format of torch < 1.6, which is read into memory whole"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on TorchScript archives and old storages: neither matters here
            return torch.load(path, map_location="cpu", weights_only=True, mmap=mapped), note
    except pickle.UnpicklingError as error:
        raise RefusedFileError(_reason(str(error))) from None
    except Exception as error:  # noqa: BLE001  a damaged file can make torch's reader raise anything
        text = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise RefusedFileError(f"torch.load cannot read it ({text[:120]})") from None


def _reason(text: str) -> str:
    """Shorten torch's explanation, which is long and recommends ways around the safe reader."""
    found = _REFUSED.search(text)
    if found:
        return f"needs {found.group(1)} to be unpickled, which the safe reader refuses"
    first = text.removeprefix("Weights only load failed. ").splitlines()[0]
    return f"the safe reader refuses it ({first[:120]})"
