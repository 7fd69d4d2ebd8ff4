"""How messages say things."""

from __future__ import annotations

from collections.abc import Iterable

from tl_accum._plan import Group, Plan
from tl_accum._runs import Run
from tl_core import group_names, parameter_names


def number(value: float) -> str:
    """Return a figure with three significant digits."""
    return f"{value:.3g}"


def times(value: float) -> str:
    """Return a factor: ``4x``, ``0.25x``."""
    rounded = round(value)
    close = rounded and abs(value - rounded) <= 0.005 * abs(value)
    return f"{rounded}x" if close else f"{value:.3g}x"


def several(count: int, noun: str) -> str:
    """Return ``1 update``, ``3 updates``, ``2 micro-batches``."""
    return f"{count} {noun}" + ("" if count == 1 else "es" if noun.endswith(("s", "ch")) else "s")


def often(count: int) -> str:
    """Return ``not at all``, ``once``, ``twice``, ``4 times``."""
    return {0: "not at all", 1: "once", 2: "twice"}.get(count, f"{count} times")


def ordinal(count: int) -> str:
    """Return ``2nd``, ``4th``."""
    ending = "th" if count % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(count % 10, "th")
    return f"{count}{ending}"


def shown(names: Iterable[str], run: Run) -> str:
    """Return parameters in a few words, grouped by module: ``encoder.* (12 tensors), head.weight``."""
    chosen = list(dict.fromkeys(names))
    every = list(parameter_names(run.setup.model))
    if len(chosen) > 1 and set(chosen) == set(every):
        return f"all {len(chosen)} parameters"
    return group_names(chosen, every)


def listed(words: Iterable[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    words = list(words)
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def cycle(plan: Plan, group: Group) -> str:
    """Return which cycle a group is: ``cycle 1 of 2``, ``the incomplete last group of the epoch (2 micro-batches)``."""
    if group.incomplete:
        return f"the incomplete last group of the epoch ({several(len(group.parts), 'micro-batch')})"
    return f"cycle {group.number + 1} of {len(plan.groups)}"


def places(positions: Iterable[int], of: int) -> str:
    """Return micro-batches of a group in words: ``micro-batch 1 of 4``, ``micro-batches 1 and 2 of 4``."""
    found = [str(place + 1) for place in sorted(set(positions))]
    return f"micro-batch{'' if len(found) == 1 else 'es'} {listed(found)} of {of}"


def optimizers(names: Iterable[str]) -> str:
    """Return optimizers by name: ``optimizer 'encoder'``, ``optimizers 'a' and 'b'``."""
    found = [repr(name) for name in dict.fromkeys(names)]
    return f"optimizer{'' if len(found) == 1 else 's'} {listed(found)}"
