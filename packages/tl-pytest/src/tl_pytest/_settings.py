"""The plugin's settings: from the command line or the project's pytest configuration, validated without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest

DEFAULT_DEVICE = "cpu"
DEFAULT_SEED = 0
MAX_SEED = 2**32 - 1  # the largest that numpy.random.seed takes
ACCELERATORS = ("cuda", "hpu", "mps", "mtia", "npu", "xpu")

_DEVICE = re.compile(rf"auto|cpu|(?:{'|'.join(ACCELERATORS)})(?::(?:0|[1-9]\d*))?")
_DEVICES_ALLOWED = f"auto, cpu, or one of {', '.join(ACCELERATORS)} with an optional index, as in cuda:1"
_SEEDS_ALLOWED = f"an integer from 0 to {MAX_SEED}"


@dataclass(frozen=True)
class Settings:
    """What the fixtures are bound to.

    Args:
        device: ``"cpu"``, ``"auto"`` (the accelerator where there is one, else the CPU) or an accelerator's name with
            an optional index.
        seed: The seed of every random number generator, from 0 to 2**32 - 1.
        device_source: Where the device was set, in words for messages; ``"the default"`` when it was not.
    """

    device: str
    seed: int
    device_source: str

    def header(self) -> str | None:
        """Describe the settings that differ from the defaults, in one line.

        Returns:
            The line, or None when all settings are the defaults.
        """
        parts = []
        if self.device != DEFAULT_DEVICE:
            parts.append(f"device={self.device}")
        if self.seed != DEFAULT_SEED:
            parts.append(f"seed={self.seed}")
        return f"tl-pytest: {', '.join(parts)}" if parts else None


def resolve(config: pytest.Config) -> Settings:
    """Read the settings: the command line goes before the configuration file, and that before the default.

    Args:
        config: pytest's configuration, options parsed.

    Returns:
        The validated settings.

    Raises:
        pytest.UsageError: A value is not allowed; the message names the option or the file's key, the value and what
            is allowed.
    """
    device, device_source = _device(config)
    return Settings(device, _seed(config), device_source)


def _device(config: pytest.Config) -> tuple[str, str]:
    value: object = config.getoption("tl_device")
    source = "--tl-device"
    if value is None:
        value, source = _from_file(config, "tl_device", _DEVICES_ALLOWED)
    if value is None:
        return DEFAULT_DEVICE, "the default"
    if not isinstance(value, str) or _DEVICE.fullmatch(value) is None:
        raise pytest.UsageError(f"{source}: unknown device {value!r}; allowed: {_DEVICES_ALLOWED}")
    return value, source


def _seed(config: pytest.Config) -> int:
    value: object = config.getoption("tl_seed")
    source = "--tl-seed"
    if value is None:
        value, source = _from_file(config, "tl_seed", _SEEDS_ALLOWED)
    if value is None:
        return DEFAULT_SEED
    try:
        seed = int(str(value))
    except ValueError:
        seed = -1
    if not 0 <= seed <= MAX_SEED:
        raise pytest.UsageError(f"{source}: cannot seed with {value!r}; allowed: {_SEEDS_ALLOWED}")
    return seed


def _from_file(config: pytest.Config, key: str, allowed: str) -> tuple[object, str]:
    """Read one key of the configuration file (or of ``-o key=value``), with the words that name it in messages."""
    source = f"{key} in {config.inipath.name}" if config.inipath is not None else f"-o {key}"
    try:
        return config.getini(key), source
    except (TypeError, ValueError, pytest.UsageError) as error:
        # a wrong type in TOML, or text that is no number in INI; pytest 9.2 makes its own usage error of them
        raise pytest.UsageError(f"{source}: {error}; allowed: {allowed}") from None
