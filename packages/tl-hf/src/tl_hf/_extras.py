"""The check packages that only some functions need."""

from __future__ import annotations

from importlib.util import find_spec


def needs(package: str, extra: str) -> None:
    """Demand that a package is installed.

    Raises:
        ImportError: it is not; the message says how to install it.
    """
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise ImportError(f'this check needs {name}: pip install "tl-hf[{extra}]"')
