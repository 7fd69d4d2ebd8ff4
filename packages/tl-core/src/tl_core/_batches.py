"""The data of a run: one batch a step, out of anything that holds or makes batches."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from tl_core._device import move_to_device
from tl_core._errors import noted

ALLOWED = (
    "data must be one batch, a list of batches, an iterable of batches such as a DataLoader, "
    "or a function from the step index to a batch"
)


class Batches:
    """Give a run its batches, one a step, on the run's device.

    A list is a list of batches when its elements are tuples, or containers or objects of one structure, or tensors of
    one dtype and trailing shape; any other list is one batch, as a DataLoader collates ``[x, y]``. Nothing is drawn
    before it is asked for. An iterable that is shorter than the run is iterated again.

    Args:
        data: One batch (a tensor, array, tuple, mapping, dataclass, an object with a ``to`` method), a list of batches
            (cycled), an iterable of batches, or a function from the step index to a batch.
        steps: How many batches the run needs; at least 1.
        device: Where batches are moved to; those that are there already are handed out as the same objects.

    Attributes:
        form: What was decided about ``data``, in words.

    Raises:
        TypeError: ``data`` is nothing that holds batches, for example a Dataset.
        ValueError: ``data`` is empty, or ``steps`` is less than 1.
    """

    def __init__(self, data: Any, steps: int, *, device: str | torch.device) -> None:
        if isinstance(steps, bool) or not isinstance(steps, int):
            raise TypeError(f"steps must be an int, got {type(steps).__name__} {steps!r}")
        if steps < 1:
            raise ValueError(f"steps must be at least 1, got {steps}")
        self._device = device
        self.form, self._source = _source(data, steps)

    def batch(self, step: int) -> Any:
        """Return the batch of a step, on the device.

        Args:
            step: The step's index. Batches of an iterable are drawn in order: those before ``step`` are drawn and
                dropped; one that was dropped cannot be asked for again.

        Raises:
            ValueError: The data is empty or too short.
        """
        if step < 0:
            raise ValueError(f"step must be at least 0, got {step}")
        with noted(f"raised by data at step {step}"):
            batch = self._source(step)
        return move_to_device(batch, self._device)


def _source(data: Any, steps: int) -> tuple[str, Callable[[int], Any]]:
    """Decide what data is: the decision in words, and how to get a step's batch."""
    _refuse(data)
    if isinstance(data, list):
        decided = _list_of_batches(data)
        if decided:
            return _list_form(len(data), steps), lambda step: data[step % len(data)]
        return f"one batch (a list of {_count(data)}), used in every step", lambda step: data
    if _is_one_batch(data):
        kind = type(data).__name__
        return f"one batch ({_a(kind)}), used in every step", lambda step: data
    if isinstance(data, Iterator):
        return f"a one-shot iterator ({type(data).__name__})", _Drawn(data, steps)
    if hasattr(data, "__iter__"):
        return f"an iterable ({type(data).__name__}), iterated again when it ends", _Drawn(data, steps)
    return f"a function of the step index ({_name(data)})", lambda step: _call(data, step)


def _refuse(data: Any) -> None:
    kind = type(data).__name__
    if data is None or isinstance(data, (str, bytes, bool, int, float, complex, nn.Module, type)):
        shown = "None" if data is None else _a(kind) if not isinstance(data, type) else f"the class {data.__name__}"
        raise TypeError(f"{ALLOWED}; got {shown}")
    if _is_dataset(data):
        raise TypeError(
            f"data is a dataset ({kind}), whose items are not batches: wrap it in a DataLoader, "
            "DataLoader(data, batch_size=...), or with batch_size=None if it makes batches itself"
        )
    if isinstance(data, (list, tuple, Mapping)) and not data:
        raise ValueError(f"data is an empty {kind}; {ALLOWED}")
    if _is_one_batch(data) or hasattr(data, "__iter__"):
        return
    if not callable(data):
        raise TypeError(f"{ALLOWED}; got {_a(kind)}")
    if inspect.isgeneratorfunction(data):
        raise TypeError(f"data is the generator function {_name(data)}: pass what it returns, {_name(data)}()")
    try:
        inspect.signature(data).bind(0)
    except ValueError:  # no signature to be had
        return
    except TypeError:
        got = f"{_name(data)}{inspect.signature(data)}"
        raise TypeError(f"data as a function takes the step index as its only argument; got {got}") from None


def _is_dataset(data: Any) -> bool:
    if isinstance(data, Dataset):
        return True
    # Datasets that do not derive from torch's: Hugging Face's have columns; a plain class has items but no iteration.
    if hasattr(data, "column_names") and hasattr(data, "__iter__"):
        return True
    return hasattr(data, "__getitem__") and not hasattr(data, "__iter__") and not callable(getattr(data, "to", None))


def _is_one_batch(data: Any) -> bool:
    if isinstance(data, (torch.Tensor, tuple, Mapping)) or _is_array(data):
        return True
    if callable(getattr(data, "to", None)):
        return True
    return dataclasses.is_dataclass(data) and not hasattr(data, "__iter__") and not callable(data)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _list_of_batches(items: list[Any]) -> bool:
    if all(isinstance(item, torch.Tensor) or _is_array(item) for item in items):
        return len({(str(item.dtype), tuple(item.shape[1:])) for item in items}) == 1
    if any(
        isinstance(item, (torch.Tensor, str, bytes, bool, int, float, complex)) or _is_array(item) for item in items
    ):
        return False
    # A DataLoader turns tuples into lists, so plain tuples in a list were put there by a person: batches, whatever
    # their structure.
    if all(type(item) is tuple for item in items):
        return True
    return len({_structure(item) for item in items}) == 1


def _structure(value: Any) -> Any:
    """Describe how a batch is built, leaving out sizes, which differ from batch to batch."""
    if isinstance(value, torch.Tensor) or _is_array(value):
        return ("tensor", str(value.dtype), value.ndim)
    if isinstance(value, Mapping):
        return ("mapping", frozenset((key, _structure(item)) for key, item in value.items()))
    if isinstance(value, (list, tuple)):
        inner = [_structure(item) for item in value]
        return ("sequence", inner[0]) if len(set(inner)) == 1 else ("sequence", tuple(inner))
    if isinstance(value, (bool, int, float)):
        return "number"
    return type(value)


def _list_form(length: int, steps: int) -> str:
    text = f"a list of {length} batch{'es' if length != 1 else ''}"
    return f"{text}, cycled" if steps > length else f"the first {steps} of {text}" if steps < length else text


def _count(items: list[Any]) -> str:
    kinds = list(dict.fromkeys("tensor" if isinstance(item, torch.Tensor) else type(item).__name__ for item in items))
    if len(kinds) > 1:
        return f"{len(items)} elements: {', '.join(kinds)}"
    return f"{len(items)} {kinds[0]}{'s' if len(items) != 1 else ''}"


def _a(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiouAEIOU' else 'a'} {noun}"


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", None) or type(function).__name__


def _call(function: Callable[[int], Any], step: int) -> Any:
    batch = function(step)
    if batch is None:
        raise TypeError(
            f"data as a function ({_name(function)}) returned None at step {step}; return the batch "
            "(anything else, for example the step index, if the step makes its own data)"
        )
    return batch


class _Drawn:
    """Draw from an iterable, in order, starting it again when it ends."""

    def __init__(self, data: Iterable[Any], steps: int) -> None:
        self._data = data
        self._steps = steps
        self._iterator: Iterator[Any] | None = None
        self._num_drawn = 0
        self._last: Any = None

    def __call__(self, step: int) -> Any:
        if step < self._num_drawn - 1:
            raise ValueError(f"the batch of step {step} was already drawn from data; batches are drawn in order")
        while self._num_drawn <= step:
            self._last = self._next()
            self._num_drawn += 1
        return self._last

    def _next(self) -> Any:
        if self._iterator is not None:
            for batch in self._iterator:
                return batch
            if self._iterator is self._data:
                raise ValueError(self._too_short())
        self._iterator = iter(self._data)
        for batch in self._iterator:
            return batch
        if self._num_drawn and self._iterator is self._data:
            raise ValueError(self._too_short())
        what = "is an exhausted iterator" if self._iterator is self._data else "gave no batches"
        raise ValueError(f"data ({type(self._data).__name__}) {what}: it is empty, and {self._needed()}")

    def _too_short(self) -> str:
        gave = f"{self._num_drawn} batch{'es' if self._num_drawn != 1 else ''}"
        return (
            f"data is a one-shot iterator ({type(self._data).__name__}) that gave {gave}, but {self._needed()}: "
            "pass more batches, a list, or a loader that can be iterated again"
        )

    def _needed(self) -> str:
        return f"steps={self._steps} needs {self._steps}"
