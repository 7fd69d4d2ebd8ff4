"""The plugin's settings: from the command line or the project's pytest configuration, validated without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest

from tl_pytest._rule_ids import RULES
from tl_pytest._tolerances import FORM, ToleranceOverride, parse_tolerances

T = TypeVar("T")

DEFAULT_DEVICE = "cpu"
DEFAULT_SEED = 0
MAX_SEED = 2**32 - 1  # the largest that numpy.random.seed takes
MAX_THREADS = 1024
ACCELERATORS = ("cuda", "hpu", "mps", "mtia", "npu", "xpu")
AUTO = "auto"

_DEVICE = re.compile(rf"cpu|(?:{'|'.join(ACCELERATORS)})(?::(?:0|[1-9]\d*))?")
_NAMES_ALLOWED = f"cpu, or one of {', '.join(ACCELERATORS)} with an optional index, as in cuda:1"
_DEVICES_ALLOWED = f"auto, {_NAMES_ALLOWED}, or several with commas between them"
_SEEDS_ALLOWED = f"an integer from 0 to {MAX_SEED}"
_THREADS_ALLOWED = f"an integer from 1 to {MAX_THREADS}"
_RULES = tuple(dict.fromkeys(rule for rules in RULES.values() for rule in rules))


@dataclass(frozen=True)
class Settings:
    """What the fixtures are bound to.

    Args:
        devices: Names of devices, or ``"auto"`` alone: the CPU, and the accelerator where there is one.
        device_source: Where the devices were set, in words for messages; ``"the default"`` when they were not.
        seed: The seed of every random number generator, from 0 to 2**32 - 1.
        deterministic: Whether torch may use deterministic algorithms only.
        num_threads: How many CPU threads torch uses; None leaves that to torch.
        allow: The rules that may be broken in all checks.
        tolerances: The overrides of the configuration file.
        report: The folder for each test's verdicts and records.
        sarif: The file for the findings of the run.
    """

    devices: tuple[str, ...]
    device_source: str
    seed: int
    deterministic: bool = False
    num_threads: int | None = None
    allow: tuple[str, ...] = ()
    tolerances: tuple[ToleranceOverride, ...] = ()
    report: Path | None = None
    sarif: Path | None = None

    @property
    def several_devices(self) -> bool:
        """Whether tests that use a device run once on each."""
        return len(self.devices) > 1 or AUTO in self.devices

    def header(self, torch_version: str | None) -> str:
        """Describe the settings in one line.

        Args:
            torch_version: The version of torch; None where there is none.

        Returns:
            The line; what is neither a device nor a seed only where it is not the default.
        """
        parts = [] if torch_version is None else [f"torch={torch_version}"]
        parts += [f"device={','.join(self.devices)}", f"seed={self.seed}"]
        if self.deterministic:
            parts.append("deterministic")
        if self.num_threads is not None:
            parts.append(f"num_threads={self.num_threads}")
        if self.allow:
            parts.append(f"allow={','.join(self.allow)}")
        return f"tl-pytest: {', '.join(parts)}"


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
    devices, device_source = _devices(config)
    return Settings(
        devices,
        device_source,
        seed=_integer(config, "tl_seed", 0, MAX_SEED, "cannot seed with", _SEEDS_ALLOWED, DEFAULT_SEED),
        deterministic=_deterministic(config),
        num_threads=_integer(config, "tl_num_threads", 1, MAX_THREADS, "cannot use", _THREADS_ALLOWED, None),
        allow=_allow(config),
        tolerances=_tolerances(config),
        report=_path(config, "tl_report", "a folder, which is made where it is missing"),
        sarif=_path(config, "tl_sarif", "a file, whose folder is made where it is missing"),
    )


def is_device(name: object) -> bool:
    """Tell whether this is the name of a device."""
    return isinstance(name, str) and _DEVICE.fullmatch(name) is not None


def unknown_device(name: object) -> str:
    """Say that this is no name of a device, and what is."""
    return f"unknown device {name!r}; allowed: {_NAMES_ALLOWED}"


def _devices(config: pytest.Config) -> tuple[tuple[str, ...], str]:
    value, source = _given(config, "tl_device", _DEVICES_ALLOWED)
    if value is None:
        return (DEFAULT_DEVICE,), "the default"
    names = tuple(name.strip() for name in value.split(",")) if isinstance(value, str) else (value,)
    if names == (AUTO,):
        return (AUTO,), source
    for name in names:
        if name == AUTO:
            raise pytest.UsageError(f"{source}: auto stands alone, got {value!r}; allowed: {_DEVICES_ALLOWED}")
        if not is_device(name):
            raise pytest.UsageError(f"{source}: unknown device {name!r}; allowed: {_DEVICES_ALLOWED}")
        if names.count(name) > 1:
            raise pytest.UsageError(f"{source}: {name} is named twice in {value!r}; each test would run twice on it")
    return tuple(map(str, names)), source


def _integer(config: pytest.Config, key: str, least: int, most: int, problem: str, allowed: str, default: T) -> int | T:
    value, source = _given(config, key, allowed)
    if value is None:
        return default
    try:
        number = int(str(value))
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise pytest.UsageError(f"{source}: {problem} {value!r}; allowed: {allowed}")
    return number


def _deterministic(config: pytest.Config) -> bool:
    value, _ = _given(config, "tl_deterministic", "true or false")
    return bool(value)


def _allow(config: pytest.Config) -> tuple[str, ...]:
    from_file, file_source = _from_file(config, "tl_allow", "rules, one a line")
    given = [(rule, file_source) for rule in _as_list(from_file)]
    given += [(rule, "--tl-allow") for rule in config.getoption("tl_allow") or ()]
    for rule, source in given:
        if rule not in _RULES:
            import difflib  # here, because most runs do without

            near = difflib.get_close_matches(str(rule), _RULES, n=3)
            there = f"did you mean {', '.join(near)}?" if near else f"allowed: {', '.join(_RULES)}"
            raise pytest.UsageError(f"{source}: there is no rule {rule!r}; {there}")
    return tuple(dict.fromkeys(str(rule) for rule, _ in given))


def _tolerances(config: pytest.Config) -> tuple[ToleranceOverride, ...]:
    lines, source = _from_file(config, "tl_tolerances", FORM)
    try:
        return parse_tolerances(_as_list(lines))
    except ValueError as error:
        raise pytest.UsageError(f"{source}: {error}") from None


def _path(config: pytest.Config, key: str, allowed: str) -> Path | None:
    """Read where something is written, as a whole path, and make the folder for it."""
    value, source = _given(config, key, allowed)
    if value is None:
        return None
    base = config.invocation_params.dir if config.getoption(key) is not None else config.rootpath
    path = base / str(value)
    folder = path if key == "tl_report" else path.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise pytest.UsageError(f"{source}: cannot make {folder} ({error.strerror}); allowed: {allowed}") from None
    if not value or (path != folder and path.is_dir()):
        raise pytest.UsageError(f"{source}: cannot write to {str(value)!r}; allowed: {allowed}")
    return path


def _as_list(value: object) -> list[object]:
    return list(value) if isinstance(value, (list, tuple)) else []


def _given(config: pytest.Config, key: str, allowed: str) -> tuple[object, str]:
    """Read an option, or else the key of the same name, with the words that name it in messages."""
    value: object = config.getoption(key)
    if value is not None:
        return value, f"--{key.replace('_', '-')}"
    return _from_file(config, key, allowed)


def _from_file(config: pytest.Config, key: str, allowed: str) -> tuple[object, str]:
    """Read one key of the configuration file (or of ``-o key=value``), with the words that name it in messages."""
    source = f"{key} in {config.inipath.name}" if config.inipath is not None else f"-o {key}"
    try:
        return config.getini(key), source
    except (TypeError, ValueError, pytest.UsageError) as error:
        # a wrong type in TOML, or text that is no number in INI; pytest 9.2 makes its own usage error of them
        raise pytest.UsageError(f"{source}: {error}; allowed: {allowed}") from None
