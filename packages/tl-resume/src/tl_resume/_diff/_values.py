"""Plain values: whether two are the same, and how they are written."""

from __future__ import annotations

import math
from typing import Any

from tl_resume._diff._tree import SCALARS

MAX_TEXT = 60


def compare_plain(a: Any, b: Any, rtol: float, atol: float) -> str:
    """Compare two plain values.

    Args:
        a: A scalar, a list or tuple of scalars, or another value that is compared with ``==``.
        b: The other one.
        rtol: Relative tolerance of floats.
        atol: Absolute tolerance of floats.

    Returns:
        ``"same"``, ``"within"`` (floats that differ within the tolerance), ``"value"`` or ``"type"``.
    """
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if isinstance(a, list) != isinstance(b, list):
            return "type"
        if len(a) != len(b):
            return "value"
        outcomes = {compare_plain(x, y, rtol, atol) for x, y in zip(a, b, strict=True)}
        return next((outcome for outcome in ("type", "value", "within") if outcome in outcomes), "same")
    if type(a) is not type(b):
        return "type"
    if isinstance(a, float):
        return _compare_floats(a, b, rtol, atol)
    try:
        return "same" if bool(a == b) else "value"
    except Exception:  # noqa: BLE001  an object's own comparison may raise anything; its text is left
        return "same" if repr(a) == repr(b) else "value"


def _compare_floats(a: float, b: float, rtol: float, atol: float) -> str:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return "same"
    near = math.isfinite(a) and math.isfinite(b) and abs(a - b) <= atol + rtol * abs(b)
    return "within" if near else "value"


def shown(value: Any) -> str:
    """Write a plain value in one short line."""
    return _cut(repr(value))


def shown_pair(a: Any, b: Any) -> str:
    """Write two plain values that differ, so that the difference shows.

    Two long lists of one length are written as the number of places that differ and the first of them.
    """
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and max(len(repr(a)), len(repr(b))) > MAX_TEXT:
        if len(a) != len(b):
            return f"{len(a):,} items -> {len(b):,} items"
        places = [i for i, (x, y) in enumerate(zip(a, b, strict=True)) if compare_plain(x, y, 0.0, 0.0) != "same"]
        if places:
            first = places[0]
            pair = f"[{first}]: {shown(a[first])} -> {shown(b[first])}"
            return f"{len(places):,} of {len(a):,} items differ, {pair}"
        return f"{type(a).__name__} -> {type(b).__name__}"
    left, right = shown(a), shown(b)
    if left == right:
        left, right = _around_first_difference(repr(a), repr(b))
    if left == right:
        return f"{type(a).__name__} {left} -> {type(b).__name__} {right}"
    return f"{left} -> {right}"


def _around_first_difference(a: str, b: str) -> tuple[str, str]:
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    begin = max(place - 10, 0)
    lead = "..." if begin else ""
    return lead + _cut(a[begin:]), lead + _cut(b[begin:])


def _cut(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def number(value: float | complex) -> str:
    """Write a figure with three digits."""
    return f"{value:.3g}"


def number_pair(a: bool | int | float | complex, b: bool | int | float | complex) -> tuple[str, str]:
    """Write two values with as few digits as tell them apart."""
    if all(isinstance(value, (bool, int)) for value in (a, b)):
        return str(a), str(b)
    for digits in (6, 9):
        left, right = (f"{complex(v):.{digits}g}" if isinstance(v, complex) else f"{v:.{digits}g}" for v in (a, b))
        if left != right:
            return left, right
    return repr(a), repr(b)


def size(num_bytes: int) -> str:
    """Write a number of bytes."""
    amount = float(num_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 1000:
            return f"{num_bytes} B" if unit == "B" else f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} TB"


def jsonable(value: Any) -> Any:
    """Turn a plain value into what strict JSON holds: a float that is no number becomes its name, others a text."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(float(value))
    if type(value) in SCALARS and not isinstance(value, complex):
        return value
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    return repr(value)
