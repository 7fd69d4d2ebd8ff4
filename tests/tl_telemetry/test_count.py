from __future__ import annotations

import math

import pytest

from tl_telemetry import num_updates

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def counted(num_examples, batch_size, epochs, accumulation_steps, drop_last):
    """Count the updates of a loop that walks through its examples."""
    updates = 0
    for _ in range(epochs):
        sizes = [min(batch_size, num_examples - start) for start in range(0, num_examples, batch_size)]
        if drop_last:
            sizes = [size for size in sizes if size == batch_size]
        groups = [sizes[start : start + accumulation_steps] for start in range(0, len(sizes), accumulation_steps)]
        updates += sum(not drop_last or len(group) == accumulation_steps for group in groups)
    return updates


NUMBERS = st.integers(1, 40)


@hypothesis.settings(deadline=None, database=None, derandomize=True)
@hypothesis.given(NUMBERS, NUMBERS, st.integers(1, 3), st.integers(1, 8), st.booleans())
def test_the_number_of_updates_is_that_of_the_loop(num_examples, batch_size, epochs, accumulation_steps, drop_last):
    """The formula counts what a loop over the examples would."""
    plan = {"epochs": epochs, "accumulation_steps": accumulation_steps, "drop_last": drop_last}
    assert num_updates(num_examples, batch_size, **plan) == counted(num_examples, batch_size, *plan.values())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((0, 1), ValueError, "num_examples must be at least 1, got 0"),
        ((10, 0), ValueError, "batch_size must be at least 1, got 0"),
        ((10, 2, -1), ValueError, "epochs must be at least 1, got -1"),
        ((10, 2.0), TypeError, "batch_size must be an int, got 2.0"),
        ((True, 2), TypeError, "num_examples must be an int, got True"),
        ((math.inf, 2), TypeError, "num_examples must be an int, got inf"),
    ],
)
def test_bad_input(arguments, error, message):
    """Each wrong argument is an error that names it."""
    with pytest.raises(error) as caught:
        num_updates(*arguments)
    assert str(caught.value) == message
