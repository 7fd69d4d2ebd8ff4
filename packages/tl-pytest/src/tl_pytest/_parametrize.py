"""Lets each test that uses torch_device run once on each of several devices."""

from __future__ import annotations

from collections.abc import Callable

import pytest

FIXTURE = "torch_device"


def takes_devices(metafunc: pytest.Metafunc, own: Callable[..., object]) -> bool:
    """Tell whether a test asks for the plugin's torch_device and leaves the choice of devices to the options.

    A fixture of that name in the project goes before the plugin's and is left alone, unless it asks for the plugin's
    in turn; so is a test that is parametrized over devices of its own.

    Args:
        metafunc: The test function.
        own: The function of the plugin's fixture.

    Returns:
        Whether to parametrize it.
    """
    if FIXTURE not in metafunc.fixturenames:
        return False
    for mark in metafunc.definition.iter_markers("parametrize"):
        names = mark.args[0] if mark.args else mark.kwargs.get("argnames", ())
        if FIXTURE in ([name.strip() for name in names.split(",")] if isinstance(names, str) else names):
            return False
    # no public way tells which of several fixtures of one name a test gets; this one is as old as pytest 3
    for definition in reversed(metafunc._arg2fixturedefs.get(FIXTURE, ())):
        if definition.func is own:
            return True
        if FIXTURE not in definition.argnames:
            return False
    return False
