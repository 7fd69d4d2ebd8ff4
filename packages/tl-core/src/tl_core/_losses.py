"""What a step returned, as named losses."""

from __future__ import annotations

import dataclasses
import numbers
import sys
from collections.abc import Mapping

import torch

ALLOWED = "return the loss: a real tensor with one element, a number, or a dict of named ones"


def loss_of(result: object, step: int, *, source: str) -> object:
    """Return the loss of a model's output, a ``ModelOutput`` of transformers or the like; anything else as it is.

    Such an output is a mapping too, of tensors that are no losses: logits, hidden states.

    Raises:
        TypeError: the output has no loss, since the model was given no labels.
    """
    if not isinstance(result, Mapping) or not _is_model_output(result):
        return result
    if "loss" in result:
        return result["loss"]
    if not hasattr(result, "loss"):
        return result
    raise TypeError(
        f"{source} returned a {type(result).__name__} whose loss is None at step {step}: the model computes one where "
        "the batch holds labels"
    )


def _is_model_output(result: Mapping[object, object]) -> bool:
    # transformers is not imported here; a ModelOutput of no further class is no dataclass
    return dataclasses.is_dataclass(result) or any(kind.__name__ == "ModelOutput" for kind in type(result).__mro__)


class NoLoss(dict[str, float]):
    """What a step returns that has no loss to show: a step of a framework's, whose loss nobody hands out."""


def split_losses(
    result: object, step: int, *, source: str = "step()"
) -> tuple[dict[str, torch.Tensor | float], str | None]:
    """Read what a step returned, without waiting for the device.

    Args:
        result: A tensor with one element, a python or numpy number, a dict of those, or a ``ModelOutput`` of
            transformers, of which only the loss counts.
        step: The step's index, for messages.
        source: The function that returned ``result``, for messages.

    Returns:
        The losses by name, and the name of the main one: ``"loss"``, else the first; no loss and None for a ``NoLoss``.
        Tensors are detached copies of shape ``()`` on their device, so that a later in-place change of the loss does
        not change them.

    Raises:
        TypeError: Something that is no loss: None, a string, a complex number, a bool, a tuple, ...
        ValueError: A tensor or array without exactly one element; an empty dict.
    """
    result = loss_of(result, step, source=source)
    if not isinstance(result, Mapping):
        return {"loss": _scalar(result, f"{source} returned", step)}, "loss"
    if isinstance(result, NoLoss):
        return {}, None
    if not result:
        raise ValueError(f"{source} returned an empty {type(result).__name__} at step {step}; {ALLOWED}")
    losses: dict[str, torch.Tensor | float] = {}
    for name, value in result.items():
        if not isinstance(name, str):
            key = f"with the key {name!r}, which is no string,"
            raise TypeError(f"{source} returned a {type(result).__name__} {key} at step {step}; {ALLOWED}")
        losses[name] = _scalar(value, f"{source} returned a {type(result).__name__} whose {name!r} is", step)
    return losses, "loss" if "loss" in losses else next(iter(losses))


def _scalar(value: object, says: str, step: int) -> torch.Tensor | float:
    if isinstance(value, torch.Tensor) and not value.dim() and value.is_floating_point():
        return value.detach().clone()  # the usual loss, in every step of a run
    at = f"at step {step}; {ALLOWED}"
    if isinstance(value, torch.Tensor):
        if value.numel() != 1:
            raise ValueError(f"{says} a tensor of shape {tuple(value.shape)} {at}")
        if value.is_complex() or value.dtype == torch.bool:
            raise TypeError(f"{says} a {str(value.dtype).removeprefix('torch.')} tensor {at}")
        return value.detach().reshape(()).clone()
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        if value.size != 1:
            raise ValueError(f"{says} an array of shape {value.shape} {at}")
        if value.dtype.kind not in "fiu":
            raise TypeError(f"{says} a {value.dtype} array {at}")
        return float(value.reshape(())[()])
    if isinstance(value, (bool, str, complex)):
        raise TypeError(f"{says} a {type(value).__name__} {value!r} {at}")
    if isinstance(value, numbers.Real):
        return float(value)
    if value is None:
        raise TypeError(f"{says} None {at}")
    raise TypeError(f"{says} a {type(value).__name__} {at}")
