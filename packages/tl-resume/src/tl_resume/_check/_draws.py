"""Hears what DataLoaders give, with the indices that their samplers gave for it."""

from __future__ import annotations

import functools
import operator
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import dataloader

# What a listener is told: the iterator, the batch, and the sample indices or None.
Listener = Callable[[Any, Any, "tuple[int, ...] | None"], None]

_lock = threading.RLock()
_listeners: list[tuple[Listener, int]] = []
_patched: list[tuple[type, str, Any, Any]] = []
# By iterator, the indices of the batches that its workers have been asked for, by the number of the batch.
_asked: weakref.WeakKeyDictionary[Any, dict[int, tuple[int, ...] | None]] = weakref.WeakKeyDictionary()
_replaying = threading.local()


def listen(listener: Listener) -> None:
    """Tell a listener of every batch that an iterator of a DataLoader gives in this thread."""
    with _lock:
        _listeners.append((listener, threading.get_ident()))
        if len(_listeners) > 1:
            return
        try:
            _patch(dataloader._BaseDataLoaderIter, "__next__", _next)
            _patch(dataloader._BaseDataLoaderIter, "_next_index", _next_index)
            stateful = sys.modules.get("torchdata.stateful_dataloader.stateful_dataloader")
            if stateful is not None:
                _patch(stateful.StatefulDataLoader, "_get_iterator", _get_iterator)
        except BaseException:
            unlisten(listener)
            raise


def unlisten(listener: Listener) -> None:
    """Tell a listener of nothing more; the last one puts the classes back as they were."""
    with _lock:
        _listeners[:] = [entry for entry in _listeners if entry[0] != listener]
        while not _listeners and _patched:
            cls, name, original, ours = _patched.pop()
            if vars(cls)[name] is ours:
                setattr(cls, name, original)


def _patch(cls: type, name: str, replacement: Callable[..., Any]) -> None:
    original = vars(cls)[name]
    ours = functools.wraps(original)(lambda self: replacement(original, self))
    setattr(cls, name, ours)
    _patched.append((cls, name, original, ours))


def _next(original: Callable[[Any], Any], iterator: Any) -> Any:
    batch = original(iterator)
    # Worker iterators count the batches (torch 2.6 to 2.13); the plain one draws the indices of a batch when it is due.
    indices = _asked.get(iterator, {}).pop(getattr(iterator, "_rcvd_idx", 1) - 1, None)
    if not getattr(iterator, "_in_order", True):
        indices = None
    if not getattr(_replaying, "depth", 0):
        for listener, thread in list(_listeners):
            if thread == threading.get_ident():
                listener(iterator, batch, indices)
    return batch


def _next_index(original: Callable[[Any], Any], iterator: Any) -> Any:
    index = original(iterator)
    _asked.setdefault(iterator, {})[getattr(iterator, "_send_idx", 0)] = _as_indices(index)
    return index


def _get_iterator(original: Callable[[Any], Any], loader: Any) -> Any:
    # A StatefulDataLoader that was loaded may get to its position by drawing: these batches reach nobody.
    _replaying.depth = getattr(_replaying, "depth", 0) + 1
    try:
        return original(loader)
    finally:
        _replaying.depth -= 1


def _as_indices(index: Any) -> tuple[int, ...] | None:
    """Write what a sampler gave as integers, without using up an iterator."""
    numpy = sys.modules.get("numpy")
    arrays = (torch.Tensor,) if numpy is None else (torch.Tensor, numpy.ndarray)
    if isinstance(index, arrays):
        index = index.tolist()
    try:
        if isinstance(index, (list, tuple, range)):
            return tuple(operator.index(one) for one in index)
        return (operator.index(index),)
    except TypeError:
        return None
