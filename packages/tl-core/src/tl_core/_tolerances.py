"""Named tolerances of the comparing checks, per device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch


class Tolerance(NamedTuple):
    """Say how far two values may lie apart: ``abs(a - b) <= atol + rtol * abs(b)``."""

    rtol: float
    atol: float


DEFAULTS = {
    "grad_accumulation": Tolerance(rtol=1e-4, atol=1e-6),
    "training_resume": Tolerance(rtol=1e-5, atol=1e-6),
}
Override = Tolerance | Mapping[str, object]


class Tolerances:
    """Look up tolerances by the name of a check, with overrides from a project's configuration or a call.

    Example:
        >>> from tl_core import Tolerances
        >>> tolerances = Tolerances({"training_resume": {"rtol": 1e-4, "cuda": {"rtol": 1e-3}}})
        >>> tolerances.get("training_resume")
        Tolerance(rtol=0.0001, atol=1e-06)
        >>> tolerances.get("training_resume", "cuda:1")
        Tolerance(rtol=0.001, atol=1e-06)

    Args:
        overrides: By name, a ``Tolerance`` or a dict of ``rtol``, ``atol`` and device types; a device type holds a
            ``Tolerance`` or a dict of ``rtol`` and ``atol``. What is not given keeps its default.

    Raises:
        TypeError, ValueError: An unknown name, key or device type, or a number that is not finite and >= 0.
    """

    def __init__(self, overrides: Mapping[str, Override] | None = None) -> None:
        self._everywhere = dict(DEFAULTS)
        self._by_device: dict[tuple[str, str], Tolerance] = {}
        for name, override in (overrides or {}).items():
            self._check_name(name)
            if not isinstance(override, (Tolerance, Mapping)):
                raise TypeError(f"tolerance {name!r} must be a Tolerance or a dict, got {type(override).__name__}")
            own = override._asdict() if isinstance(override, Tolerance) else override
            plain = {key: value for key, value in own.items() if key in Tolerance._fields}
            base = self._everywhere[name] = _replace(self._everywhere[name], plain, repr(name))
            for device, nested in own.items():
                if device not in plain:
                    key = name, _device_type(device, name, "rtol, atol or a device type")
                    self._by_device[key] = _replace(base, nested, f"{name!r} on {device!r}")

    def get(
        self,
        name: str,
        device: str | torch.device = "cpu",
        *,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> Tolerance:
        """Return the tolerance of a check on a device.

        Args:
            name: ``"training_resume"`` (rtol 1e-5, atol 1e-6) or ``"grad_accumulation"`` (rtol 1e-4, atol 1e-6).
            device: The device of the run; only its type counts.
            rtol: Used instead of the named one, where given.
            atol: Used instead of the named one, where given.

        Raises:
            ValueError: An unknown name or device, or a number that is not finite and >= 0.
        """
        self._check_name(name)
        found = self._by_device.get((name, _device_type(device, name, "a device")), self._everywhere[name])
        given = {key: value for key, value in (("rtol", rtol), ("atol", atol)) if value is not None}
        return _replace(found, given, repr(name))

    @staticmethod
    def _check_name(name: str) -> None:
        if name not in DEFAULTS:
            raise ValueError(f"there is no tolerance named {name!r}; the names are {', '.join(DEFAULTS)}")


def _device_type(device: str | torch.device, name: str, allowed: str) -> str:
    try:
        return torch.device(device).type
    except (RuntimeError, TypeError):
        raise ValueError(f"tolerance {name!r}: {device!r} is not {allowed}") from None


def _replace(base: Tolerance, values: object, what: str) -> Tolerance:
    if isinstance(values, Tolerance):
        values = values._asdict()
    if not isinstance(values, Mapping):
        raise TypeError(f"tolerance {what} must be a Tolerance or a dict, got {type(values).__name__}")
    for key, value in values.items():
        if key not in Tolerance._fields:
            raise ValueError(f"tolerance {what}: {key!r} is not rtol or atol")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"tolerance {what}: {key} must be a number, got {type(value).__name__} {value!r}")
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"tolerance {what}: {key} must be finite and >= 0, got {value}")
    return base._replace(**{key: float(value) for key, value in values.items()})


Tolerance.__module__ = Tolerances.__module__ = "tl_core"
