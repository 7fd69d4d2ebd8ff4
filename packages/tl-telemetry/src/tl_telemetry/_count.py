"""How many updates a training plan makes."""

from __future__ import annotations

LAST_GROUPS = ("step", "drop", "carry")


def num_updates(
    num_examples: int,
    batch_size: int,
    epochs: int = 1,
    *,
    accumulation_steps: int = 1,
    drop_last: bool = False,
    last_group: str = "step",
) -> int:
    """Return how many updates each optimizer makes in a training plan.

    Two things can be incomplete at the end of an epoch, and each has an argument of its own: the loader's last batch
    (``drop_last``), and the loop's last accumulation group (``last_group``).

    Args:
        num_examples: examples in the data set.
        batch_size: examples a micro-batch.
        epochs: passes over the data set.
        accumulation_steps: micro-batches an update.
        drop_last: whether the loader drops an incomplete last batch, as ``DataLoader(drop_last=True)`` does.
        last_group: what the loop does with the last group of an epoch, where that has fewer than
            ``accumulation_steps`` micro-batches: ``"step"`` makes an update of it, ``"drop"`` throws its gradients
            away, ``"carry"`` completes it with the first micro-batches of the next epoch (the last epoch's is dropped).

    Raises:
        TypeError, ValueError: an argument is not what is allowed.

    Example:
        >>> num_updates(1000, 32, epochs=3, accumulation_steps=5)  # 32 micro-batches an epoch: 6 groups of 5, one of 2
        21
        >>> num_updates(1000, 32, epochs=3, accumulation_steps=5, last_group="drop")
        18
        >>> num_updates(1000, 32, epochs=3, accumulation_steps=5, last_group="carry")
        19
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
    if not isinstance(drop_last, bool):
        raise TypeError(f"drop_last must be True or False, got {drop_last!r}")
    if last_group not in LAST_GROUPS:
        raise ValueError(f"last_group must be one of {', '.join(map(repr, LAST_GROUPS))}, got {last_group!r}")
    batches = num_examples // batch_size if drop_last else -(-num_examples // batch_size)
    if last_group == "carry":
        return epochs * batches // accumulation_steps
    if last_group == "drop":
        return epochs * (batches // accumulation_steps)
    return epochs * -(-batches // accumulation_steps)
