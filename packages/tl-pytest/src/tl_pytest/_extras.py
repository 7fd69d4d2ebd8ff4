"""The packages that only an extra of tl-pytest brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

# what each extra brings: the adapter, and what that cannot be imported without
EXTRAS = {
    "lightning": frozenset({"tl_lightning", "greenlet"}),
    "hf": frozenset({"tl_hf", "transformers", "accelerate", "greenlet"}),
}


class MissingExtraError(ImportError):
    """Raised where an extra is needed that is not installed."""


@contextmanager
def needed(extra: str, user: str) -> Iterator[None]:
    """Say which extra to install where an import inside fails for want of it.

    Args:
        extra: The extra, a key of ``EXTRAS``.
        user: What needs it, for the message.

    Raises:
        MissingExtraError: A package that the extra brings is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRAS[extra]:
            raise
        package = str(error.name).replace("_", "-")
        message = f'{user} needs {package}, which is not installed: pip install "tl-pytest[{extra}]"'
        raise MissingExtraError(message, name=error.name) from None


@contextmanager
def needed_by_fixture(extra: str, fixture: str) -> Iterator[None]:
    """Fail the test where an import inside fails for want of an extra; there is no line of the person's to show.

    Args:
        extra: The extra, a key of ``EXTRAS``.
        fixture: The fixture that needs it.
    """
    try:
        with needed(extra, fixture):
            yield
    except MissingExtraError as error:
        raise pytest.fail.Exception(str(error), pytrace=False) from None
