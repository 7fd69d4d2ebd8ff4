"""Seeding of all random number generators, and putting them back."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

MAX_SEED = 2**32 - 1  # numpy's legacy generator takes no larger one


def seed_everything(seed: int) -> None:
    """Seed the global generators of python, torch (the CPU and every accelerator) and, where imported, numpy.

    Args:
        seed: The seed, from 0 to 2**32 - 1.

    Raises:
        TypeError: ``seed`` is not an int.
        ValueError: ``seed`` is out of range.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, got {type(seed).__name__} {seed!r}")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    random.seed(seed)
    numpy = _numpy()
    if numpy is not None:
        numpy.random.seed(seed)
    torch.manual_seed(seed)


@contextmanager
def preserve_rng() -> Iterator[None]:
    """Put the global generators back to where they were, also when the block raises.

    Covers python, numpy (where imported), torch on the CPU and every accelerator that is initialised when the block
    begins. An accelerator that is initialised inside gets the seed that it would have started from.
    """
    restore: list[Callable[[], None]] = [
        partial(random.setstate, random.getstate()),
        *_accelerators(),  # before the CPU, whose seed tells whether the block seeded them
        partial(torch.set_rng_state, torch.get_rng_state()),
    ]
    numpy = _numpy()
    if numpy is not None:
        restore.append(partial(numpy.random.set_state, numpy.random.get_state()))
    try:
        yield
    finally:
        for put_back in restore:
            put_back()


def _numpy() -> Any:
    # Never imported here: numpy is no dependency, and what the loop does not use needs no seed.
    module = sys.modules.get("numpy")
    return module if hasattr(module, "random") else None


def _accelerators() -> Iterator[Callable[[], None]]:
    seed = torch.initial_seed()
    for name in ("cuda", "xpu"):
        module = getattr(torch, name, None)
        if module is None or not module.is_available():
            continue
        if module.is_initialized():
            yield partial(module.set_rng_state_all, module.get_rng_state_all())
        else:
            yield partial(_put_back_seed, module, seed)
    if torch.backends.mps.is_available():
        yield partial(torch.mps.set_rng_state, torch.mps.get_rng_state())


def _put_back_seed(module: Any, seed: int) -> None:
    """Put back an accelerator that was not initialised: it has no state yet, only a seed to start from.

    That is the seed of the last ``torch.manual_seed`` (or torch's default), which the CPU's generator knows.
    """
    if module.is_initialized() or torch.initial_seed() != seed:
        module.manual_seed_all(seed)
