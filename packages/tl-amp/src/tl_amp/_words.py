"""Words that messages are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tl_core import step_ranges


def at(steps: Iterable[int]) -> str:
    """Return steps as a range in words: ``step 3``, ``steps 0-4, 7``."""
    return step_ranges(sorted(set(steps)))


def number(value: float) -> str:
    """Return a figure as messages show it: three significant digits."""
    return f"{value:.3g}"


def scale_of(value: float) -> str:
    """Return a loss scale as messages show it: whole where it is whole, and not too long for that."""
    return f"{value:.0f}" if 1.0 <= value < 1e8 and value == round(value) else f"{value:.3g}"


def scales(values: Iterable[float]) -> str:
    """Return the loss scales that were in use: ``1024``, or ``32 to 65536``."""
    ordered = sorted(set(values))
    if not ordered:
        return "unknown"
    return scale_of(ordered[0]) + (f" to {scale_of(ordered[-1])}" if len(ordered) > 1 else "")


def history(values: Sequence[float]) -> str:
    """Return how a scale went: ``65536 -> 32768 -> 16384``; of a long way, its ends."""
    shown = [scale_of(value) for index, value in enumerate(values) if index == 0 or value != values[index - 1]]
    if len(shown) > 8:
        shown = [*shown[:4], "...", *shown[-2:]]
    return " -> ".join(shown)


def several(count: int, noun: str) -> str:
    """Return ``1 update``, ``3 updates``, ``2 backward passes``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith("s") else "s")


def together(names: Iterable[str]) -> str:
    """Return distinct names, in their order: ``a``, ``a and b``, ``a, b and c``."""
    listed = list(dict.fromkeys(names))
    return " and ".join([", ".join(listed[:-1]), listed[-1]] if len(listed) > 1 else listed)


def quoted(names: Iterable[str]) -> str:
    """Return distinct names in quotes: ``'a' and 'b'``."""
    return together(map(repr, names))


def telling(steps: Iterable[int]) -> tuple[int, ...]:
    """Return steps once each, in order."""
    return tuple(sorted(set(steps)))
