from __future__ import annotations

import math

import pytest

from tl_telemetry import num_updates

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies


def counted(num_examples, batch_size, epochs, accumulation_steps, drop_last, last_group):
    """Count the updates of a loop that walks through its examples."""
    updates = pending = 0
    for _ in range(epochs):
        for start in range(0, num_examples, batch_size):
            if drop_last and start + batch_size > num_examples:
                continue
            pending += 1  # backward()
            if pending == accumulation_steps:
                updates, pending = updates + 1, 0
        if pending and last_group == "step":
            updates, pending = updates + 1, 0
        elif last_group == "drop":
            pending = 0  # zero_grad() at the beginning of an epoch
    return updates


NUMBERS = st.integers(1, 40)
GROUPS = st.sampled_from(["step", "drop", "carry"])


@hypothesis.settings(deadline=None, database=None, derandomize=True, max_examples=300)
@hypothesis.given(NUMBERS, NUMBERS, st.integers(1, 4), st.integers(1, 8), st.booleans(), GROUPS)
def test_the_number_of_updates_is_that_of_the_loop(
    num_examples, batch_size, epochs, accumulation_steps, drop_last, last_group
):
    """The formula counts what a loop over the examples would, whatever it does with what is incomplete."""
    plan = {"accumulation_steps": accumulation_steps, "drop_last": drop_last, "last_group": last_group}
    assert num_updates(num_examples, batch_size, epochs, **plan) == counted(
        num_examples, batch_size, epochs, *plan.values()
    )


def test_the_last_batch_and_the_last_group_are_told_apart():
    """The loader's drop_last leaves out a batch, and the loop's last_group an update; neither implies the other."""
    plan = {"num_examples": 90, "batch_size": 8, "epochs": 2, "accumulation_steps": 4}  # 11 whole batches and one of 2
    assert num_updates(**plan) == num_updates(**plan, last_group="drop") == 6
    assert num_updates(**plan, drop_last=True) == 6  # 11 batches: the last group has 3
    assert num_updates(**plan, drop_last=True, last_group="drop") == 4
    assert num_updates(**plan, drop_last=True, last_group="carry") == 5


def test_the_defaults_are_one_epoch_without_accumulation():
    """With two numbers it is the length of a DataLoader."""
    assert (num_updates(10, 4), num_updates(10, 4, drop_last=True)) == (3, 2)


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accumulation_steps": 0}, ValueError, "accumulation_steps must be at least 1, got 0"),
        ({"drop_last": "step"}, TypeError, "drop_last must be True or False, got 'step'"),
        ({"last_group": "keep"}, ValueError, "last_group must be one of 'step', 'drop', 'carry', got 'keep'"),
        ({"last_group": True}, ValueError, "last_group must be one of 'step', 'drop', 'carry', got True"),
    ],
)
def test_bad_options(options, error, message):
    """A wrong option is an error that says what is allowed."""
    with pytest.raises(error) as caught:
        num_updates(10, 2, **options)
    assert str(caught.value) == message
