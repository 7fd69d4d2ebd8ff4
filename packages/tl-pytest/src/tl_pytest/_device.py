"""The device that tests train on."""

from __future__ import annotations

import pytest
import torch


def find_device(name: str, source: str) -> torch.device:
    """Turn the validated name of a device into the device, and fail the test when it is not there.

    Args:
        name: ``"cpu"``, ``"auto"`` or an accelerator's name with an optional index.
        source: Where the name was set, for the message.

    Returns:
        The device; an accelerator without an index is torch's current one.
    """
    if name == "cpu":
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return torch.device("cpu") if accelerator is None else accelerator
    kind, _, index = name.partition(":")
    if accelerator is None:
        there = "no accelerator here"
    else:
        count = torch.accelerator.device_count()
        if accelerator.type == kind and (not index or int(index) < count):
            return torch.device(name)
        there = f"{count} of type {accelerator.type} here"
    pytest.fail(
        f"{source} asks for {name}, but torch {torch.__version__} sees {there}; "
        "auto takes the accelerator where there is one, else the CPU",
        pytrace=False,
    )
