"""What the person gave, and the groups of micro-batches that are fed."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tl_accum._split import num_examples, rows, split_batch
from tl_core import Batches, TrainingSetup, move_to_device, noted, preserve_rng, seed_everything

Step = Callable[[TrainingSetup, Any], Any]
Split = Callable[[Any, int], Any]

# The epoch of a loader that is longer than this is fed only when somebody asks for it.
MAX_IMPLIED_EPOCH = 64


@dataclass(frozen=True)
class Group:
    """One cycle: the micro-batches of one update, and the full batch that they are.

    Attributes:
        number: which cycle, from 0.
        full: the full batch, on the CPU where it can be.
        parts: its micro-batches.
        first: the step index of its first micro-batch.
        incomplete: whether the epoch ends before the group is complete.
        ends_epoch: whether the epoch ends with it.
    """

    number: int
    full: Any
    parts: tuple[Any, ...]
    first: int
    incomplete: bool
    ends_epoch: bool


@dataclass(frozen=True)
class Plan:
    """What is run.

    Attributes:
        make_setup: builds the setup.
        make_step: ``make_step(k)`` builds the step for ``k`` accumulation steps.
        accumulation_steps: ``k``.
        groups: what is fed, in order.
        epoch_length: micro-batches in an epoch; None where no epoch ends within what is fed.
        implied: whether that is the length of a loader, and nobody said so.
        disable_dropout: whether dropout is off.
        device: where it runs.
        seed: the seed.
        data_form: what data was taken for.
    """

    make_setup: Callable[..., Any]
    make_step: Callable[[int], Step]
    accumulation_steps: int
    groups: tuple[Group, ...]
    epoch_length: int | None
    implied: bool
    disable_dropout: bool
    device: str | torch.device
    seed: int
    data_form: str

    def new_step(self, accumulation_steps: int) -> Step:
        """Return the step for some number of accumulation steps, made anew."""
        with noted(f"raised in make_step({accumulation_steps})"):
            step = self.make_step(accumulation_steps)
        if not callable(step):
            raise TypeError(
                f"make_step({accumulation_steps}) must return a function step(setup, batch), got a "
                f"{type(step).__name__}"
            )
        begin_group = getattr(step, "begin_group", None)
        if begin_group is not None and not callable(begin_group):
            raise TypeError(
                f"begin_group of make_step({accumulation_steps})'s step must be a function begin_group(setup, "
                f"batches), got a {type(begin_group).__name__}"
            )
        return step

    def fresh(self, batch: Any) -> Any:
        """Return a copy of a batch, on the device: a step may change it in place."""
        try:
            batch = copy.deepcopy(batch)
        except Exception:  # noqa: BLE001  a batch of the person's own class may refuse in any way
            return move_to_device(batch, self.device)
        return move_to_device(batch, self.device)


def make_plan(
    make_setup: Callable[..., Any],
    data: Any,
    make_step: Callable[[int], Step],
    *,
    accumulation_steps: int,
    cycles: int,
    epoch_length: int | None,
    split: Split | None,
    disable_dropout: bool,
    device: str | torch.device,
    seed: int,
) -> Plan:
    """Check the arguments and cut the batches; ``check_accumulation_equivalent`` documents them."""
    _check_count(accumulation_steps, "accumulation_steps", 2)
    _check_count(cycles, "cycles", 1)
    if epoch_length is not None:
        _check_count(epoch_length, "epoch_length", 1)
    if split is not None and not callable(split):
        raise TypeError(f"split must be a function split(batch, parts), got {type(split).__name__}")
    _check_make_step(make_step)
    length, implied = epoch_length, False
    if length is None:
        length, implied = _loader_length(data, accumulation_steps), True
    sizes = _sizes(accumulation_steps, cycles, length)
    with preserve_rng():
        seed_everything(seed)
        batches = Batches(data, len(sizes), device="cpu")
        with noted(f"{len(sizes)} full batches are needed, one a step of the data: cycles={cycles}{_of(length)}"):
            drawn = [batches.batch(number) for number in range(len(sizes))]
    groups, first = [], 0
    for number, (batch, size) in enumerate(zip(drawn, sizes, strict=True)):
        full, parts = _cut(batch, size, accumulation_steps, split, number)
        ends = length is not None and (first + size) % length == 0
        groups.append(Group(number, full, parts, first, size < accumulation_steps, ends))
        first += size
    return Plan(
        make_setup,
        make_step,
        accumulation_steps,
        tuple(groups),
        length if any(group.ends_epoch for group in groups) else None,
        implied,
        disable_dropout,
        device,
        seed,
        batches.form,
    )


def _of(length: int | None) -> str:
    return "" if length is None else f", in epochs of {length} micro-batches"


def _check_count(value: Any, name: str, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {type(value).__name__} {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def _check_make_step(make_step: Any) -> None:
    if not callable(make_step):
        raise TypeError(f"make_step must be a function of the accumulation steps, got {type(make_step).__name__}")
    try:
        inspect.signature(make_step).bind(1)
    except ValueError:  # a builtin without a signature
        return
    except TypeError:
        name = getattr(make_step, "__name__", type(make_step).__name__)
        raise TypeError(
            "make_step must take the number of accumulation steps and return step(setup, batch), got "
            f"{name}{inspect.signature(make_step)}: write make_step=lambda k: ..."
        ) from None


def _loader_length(data: Any, accumulation_steps: int) -> int | None:
    """Return the length of a loader whose last group is incomplete, and which is short enough to be fed whole."""
    if isinstance(data, (list, tuple, Mapping, Tensor)) or not (hasattr(data, "__iter__") and hasattr(data, "__len__")):
        return None
    try:
        length = len(data)
    except TypeError:  # a DataLoader over an iterable dataset
        return None
    return length if length % accumulation_steps and length <= MAX_IMPLIED_EPOCH else None


def _sizes(accumulation_steps: int, cycles: int, epoch_length: int | None) -> list[int]:
    """Return the size of each group: whole epochs until the last group of one and the first after it are among them."""
    if epoch_length is None:
        return [accumulation_steps] * cycles
    epoch = [accumulation_steps] * (epoch_length // accumulation_steps)
    rest = epoch_length % accumulation_steps
    if rest:
        epoch.append(rest)
    wanted = max(cycles, len(epoch) + 1) if rest else cycles
    return (epoch * (wanted // len(epoch) + 1))[:wanted]


def _cut(batch: Any, size: int, whole: int, split: Split | None, number: int) -> tuple[Any, tuple[Any, ...]]:
    """Return the full batch of a group and its micro-batches."""
    if split is None:
        with noted(f"raised in split_batch(batch, {whole}) for batch {number}"):
            parts = split_batch(batch, whole)
            if size < whole:  # micro-batches of the usual size, so that the group has fewer examples
                examples = num_examples(batch)
                batch = rows(batch, 0, examples // whole * size, examples)
                parts = split_batch(batch, size)
        return batch, tuple(parts)
    with noted(f"raised in split(batch, {size}) for batch {number}"):
        parts = split(batch, size)
    if not isinstance(parts, (list, tuple)):
        raise TypeError(f"split(batch, {size}) must return a list of {size} micro-batches, got {type(parts).__name__}")
    if len(parts) != size:
        raise ValueError(f"split(batch, {size}) must return {size} micro-batches, got {len(parts)}")
    return batch, tuple(parts)
