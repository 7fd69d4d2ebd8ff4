"""Hears warnings while a run is watched, also telling ones that the person's filters hide, and passes on the rest."""

from __future__ import annotations

import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Warnings of torch that are evidence: heard also where a script silences warnings, as many do.
TELLING = r"Using a target size|None of the inputs have requires_grad=True"
# torch (2.13) warns at each call of a compiled module while there are global hooks: the person has none of their own to
# be warned of, and where warnings are errors it would end their loop.
OWN_DOING = r"Using `torch\.compile\(module\)` when there are global hooks"

Hear = Callable[[str, type[Warning], str, int], None]


@contextmanager
def hearing(hear: Hear) -> Iterator[None]:
    """Call ``hear(message, category, filename, lineno)`` for each warning; the person sees what their filters show."""
    # Python shows a warning once a line; entering this context makes it forget what it has shown, so that a second
    # run in one process hears what the first one heard.
    with warnings.catch_warnings():
        pass
    original = warnings.showwarning
    with _filter("ignore", OWN_DOING), _filter("always", TELLING) as let_through:
        passing_on = threading.local()
        shown: dict[Any, Any] = {}

        def showwarning(
            message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
        ) -> None:
            if getattr(passing_on, "now", False):
                original(message, category, filename, lineno, file, line)
                return
            hear(str(message), category, filename, lineno)
            if let_through not in warnings.filters or not re.match(TELLING, str(message), re.IGNORECASE):
                original(message, category, filename, lineno, file, line)
                return
            # this filter let it through: the person's own decide whether it is shown, or raised as an error
            position = warnings.filters.index(let_through)
            del warnings.filters[position]  # type: ignore[attr-defined]
            passing_on.now = True
            try:
                warnings.warn_explicit(message, category, filename, lineno, registry=shown)
            finally:
                passing_on.now = False
                warnings.filters.insert(position, let_through)  # type: ignore[attr-defined]

        warnings.showwarning = showwarning
        try:
            yield
        finally:
            if warnings.showwarning is showwarning:
                warnings.showwarning = original


@contextmanager
def _filter(action: Any, message: str) -> Iterator[object]:
    warnings.filterwarnings(action, message=message)
    added = warnings.filters[0]
    try:
        yield added
    finally:
        if added in warnings.filters:
            warnings.filters.remove(added)  # type: ignore[attr-defined]
