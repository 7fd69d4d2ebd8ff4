"""How many updates a training plan makes."""

from __future__ import annotations


def num_updates(
    num_examples: int, batch_size: int, epochs: int = 1, *, accumulation_steps: int = 1, drop_last: bool = False
) -> int:
    """Return how many optimizer updates a plan makes, with the incomplete accumulation group at an epoch's end counted.

    Args:
        num_examples: examples in the data set.
        batch_size: examples a micro-batch.
        epochs: passes over the data set.
        accumulation_steps: micro-batches an update.
        drop_last: whether the loader drops an incomplete last batch, and the loop an incomplete last group.

    Raises:
        TypeError, ValueError: an argument is not a positive int.

    Example:
        >>> num_updates(1000, 32, epochs=3, accumulation_steps=4)
        24
    """
    given = {
        "num_examples": num_examples,
        "batch_size": batch_size,
        "epochs": epochs,
        "accumulation_steps": accumulation_steps,
    }
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be an int, got {value!r}")
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if drop_last:
        return epochs * (num_examples // batch_size // accumulation_steps)
    batches = -(-num_examples // batch_size)
    return epochs * -(-batches // accumulation_steps)
