"""The device that tests train on."""

from __future__ import annotations

import os

import pytest
import torch

from tl_pytest._settings import is_device, unknown_device


def available_devices() -> tuple[str, ...]:
    """Name the CPU, and the accelerator where there is one, without initialising CUDA.

    Returns:
        The types of the devices.
    """
    name = "PYTORCH_NVML_BASED_CUDA_CHECK"  # torch asks the driver's library for the count, and can fork afterwards
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
    return ("cpu",) if accelerator is None else ("cpu", accelerator.type)


def find_device(name: object, source: str) -> torch.device:
    """Turn the name of a device into the device, and fail the test when it is not there.

    Args:
        name: ``"cpu"``, or an accelerator's name with an optional index.
        source: Where the name was set, for the message.

    Returns:
        The device; an accelerator without an index is torch's current one.
    """
    if not is_device(name):
        pytest.fail(f"{source}: {unknown_device(name)}", pytrace=False)
    if name == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind, _, index = str(name).partition(":")
    if accelerator is None:
        there = "no accelerator here"
    else:
        count = torch.accelerator.device_count()
        if accelerator.type == kind and (not index or int(index) < count):
            return torch.device(str(name))
        there = f"{count} of type {accelerator.type} here"
    pytest.fail(
        f"{source} asks for {name}, but torch {torch.__version__} sees {there}; "
        "auto takes the CPU, and the accelerator where there is one",
        pytrace=False,
    )
