"""Tolerances from the project's configuration and from markers, read without torch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

# The names that tl_core.Tolerances knows; it cannot be asked without torch.
NAMES = ("grad_accumulation", "training_resume")
DEVICES = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "xpu")
FORM = "lines such as training_resume: rtol=1e-4, cuda.rtol=1e-3"


class ToleranceOverride(NamedTuple):
    """Hold what a line of the configuration or a marker says about one tolerance.

    Args:
        name: The tolerance's name, as in ``tl_core.Tolerances``.
        rtol: The relative tolerance; None leaves it to others.
        atol: The absolute tolerance; None leaves it to others.
        device: The device type that this holds for; None means all.
    """

    name: str
    rtol: float | None = None
    atol: float | None = None
    device: str | None = None


def find_tolerance(overrides: Iterable[ToleranceOverride], name: str, device: str) -> tuple[float | None, float | None]:
    """Look up what overrides say of one tolerance.

    Args:
        overrides: What is given, what goes before other things first.
        name: The tolerance's name.
        device: The device type of the run.

    Returns:
        The relative and the absolute tolerance, None where nothing is said.
    """
    fitting = [one for one in overrides if one.name == name and one.device in (None, device)]
    rtol = next((one.rtol for one in fitting if one.rtol is not None), None)
    atol = next((one.atol for one in fitting if one.atol is not None), None)
    return rtol, atol


def specific_first(overrides: Iterable[ToleranceOverride]) -> tuple[ToleranceOverride, ...]:
    """Sort overrides of equal standing: those for one type of device go before those for all."""
    return tuple(sorted(overrides, key=lambda one: one.device is None))


def parse_tolerances(lines: Iterable[object]) -> tuple[ToleranceOverride, ...]:
    """Read the lines of the configuration, such as ``training_resume: rtol=1e-4, cuda.rtol=1e-3``.

    Args:
        lines: The lines.

    Returns:
        The overrides, those for one type of device first.

    Raises:
        ValueError: A line is not of that form, or says something twice.
    """
    found: dict[tuple[str, str | None, str], ToleranceOverride] = {}
    for line in lines:
        if not isinstance(line, str):
            raise ValueError(f"{line!r} is no text; allowed: {FORM}")
        name, colon, settings = line.partition(":")
        if not colon or not settings.strip():
            raise ValueError(f"{line!r} gives no tolerance; allowed: {FORM}")
        for setting in settings.split(","):
            key, equals, text = (part.strip() for part in setting.partition("="))
            if not equals:
                raise ValueError(f"{line!r}: {setting.strip()!r} is not of the form rtol=1e-4; allowed: {FORM}")
            device, _, field = key.rpartition(".")
            try:
                override = make_override(name.strip(), {field: _number(text)}, device or None)
            except ValueError as error:
                raise ValueError(f"{line!r}: {error}") from None
            place = (override.name, override.device, field)
            if place in found:
                raise ValueError(f"{line!r} gives {key} of {override.name} a second time")
            found[place] = override
    return specific_first(found.values())


def make_override(name: object, values: Mapping[str, object], device: object) -> ToleranceOverride:
    """Check what was given for one tolerance.

    Args:
        name: The tolerance's name.
        values: The numbers, under ``rtol`` and ``atol``; None stands for one that is not given.
        device: The device type, or None.

    Returns:
        The override.

    Raises:
        ValueError: There is no such name, key or device type, or a number is not finite and >= 0.
    """
    if name not in NAMES:
        raise ValueError(f"there is no tolerance named {name!r}; the names are {', '.join(NAMES)}")
    if device is not None and device not in DEVICES:
        raise ValueError(f"there is no type of device named {device!r}; the types are {', '.join(DEVICES)}")
    for key, value in values.items():
        if key not in ("rtol", "atol"):
            raise ValueError(f"{key!r} is not rtol or atol")
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{key} must be a number, finite and >= 0, got {value!r}")
    numbers = {key: float(value) for key, value in values.items() if isinstance(value, (int, float))}
    return ToleranceOverride(str(name), device=None if device is None else str(device), **numbers)


def override_of_marker(arguments: tuple[object, ...], keywords: Mapping[str, object]) -> ToleranceOverride:
    """Read ``@pytest.mark.tl_tolerance(name, rtol=None, atol=None, device=None)``.

    Args:
        arguments: What the marker was given by position.
        keywords: What it was given by name.

    Returns:
        The override.

    Raises:
        ValueError: The arguments are not those, or no tolerance is among them.
    """
    if len(arguments) != 1:
        raise ValueError(f"it takes one name by position, {' or '.join(NAMES)}, got {len(arguments)} arguments")
    unknown = [key for key in keywords if key not in ("rtol", "atol", "device")]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not rtol, atol or device")
    values = {key: keywords[key] for key in ("rtol", "atol") if keywords.get(key) is not None}
    if not values:
        raise ValueError("it gives neither rtol nor atol")
    return make_override(arguments[0], values, keywords.get("device"))


def _number(text: str) -> object:
    try:
        return float(text)
    except ValueError:
        return text
