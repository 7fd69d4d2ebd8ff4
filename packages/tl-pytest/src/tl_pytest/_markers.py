"""The markers of tests."""

from __future__ import annotations

from itertools import groupby

import pytest

from tl_pytest._tolerances import ToleranceOverride, override_of_marker, specific_first

TOLERANCE = (
    "tl_tolerance(name, rtol=None, atol=None, device=None): tolerances of the checks of training_runner; name is "
    "grad_accumulation or training_resume, device a type such as cuda (None: all). Arguments of a call go before it, "
    "and it goes before tl_tolerances of the configuration file."
)


def tolerances_of(item: pytest.Item) -> tuple[ToleranceOverride, ...]:
    """Read the markers ``tl_tolerance`` of a test, its class and its module; fail the test where one makes no sense.

    Args:
        item: The test.

    Returns:
        The overrides, the test's own before those of its class and its module.
    """
    found: list[ToleranceOverride] = []
    for _, marks in groupby(item.iter_markers_with_node("tl_tolerance"), key=lambda pair: pair[0]):
        try:
            found += specific_first([override_of_marker(mark.args, mark.kwargs) for _, mark in marks])
        except ValueError as error:
            pytest.fail(f"@pytest.mark.tl_tolerance of {item.nodeid}: {error}", pytrace=False)
    return tuple(found)
