"""Building a setup from the person's ``make_setup``."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tl_core._device import resolve_device
from tl_core._errors import noted
from tl_core._setup import TrainingSetup

FORMS = "a TrainingSetup or a tuple (model, optimizer[, scheduler[, scaler[, state]]])"
# What earlier calls returned, by id. Values are weak: an entry goes with its object, so an id is never mistaken.
_returned: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def build_setup(make_setup: Callable[..., Any], device: str | torch.device = "cpu") -> TrainingSetup:
    """Call ``make_setup`` and prepare what it returns for a run.

    The model, modules in ``state`` and the optimizers' state are moved to the device (a model that is spread over
    several accelerators is left where it is). A model that is wholly in eval mode, as pretrained ones come, is put in
    training mode if it has trainable parameters; mixed modes are left as built.

    Args:
        make_setup: ``make_setup()`` or ``make_setup(device)``, returning a ``TrainingSetup`` or a tuple
            ``(model, optimizer[, scheduler[, scaler[, state]]])``, built anew in every call.
        device: Where to train; handed to ``make_setup`` as it is.

    Returns:
        The setup.

    Raises:
        TypeError: ``make_setup`` is no function, needs other arguments, or returns something else.
        ValueError: The device is not available, or an object of an earlier setup was returned again.
    """
    target = resolve_device(device)
    positional, keywords = _arguments(make_setup, device)
    with noted("raised in make_setup()"):
        made = make_setup(*positional, **keywords)
    setup = _normalise(made)
    _check_fresh(setup)
    with noted(f"raised while moving the setup to {target}"):
        _move(setup, target)
    # a wholly frozen model that is in eval mode (the feature net of a style transfer) is meant to stay so
    trains = any(parameter.requires_grad for parameter in setup.model.parameters())
    if trains and not any(module.training for module in setup.model.modules()):
        setup.model.train()
    return setup


def _arguments(make_setup: Any, device: str | torch.device) -> tuple[list[Any], dict[str, Any]]:
    if not callable(make_setup) or isinstance(make_setup, nn.Module):
        raise TypeError(f"make_setup must be a function that builds the setup anew, got a {type(make_setup).__name__}")
    try:
        signature = inspect.signature(make_setup)
    except ValueError:  # a builtin without a signature
        return [], {}
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [p for p in signature.parameters.values() if p.kind not in variadic]
    required = [p for p in parameters if p.default is p.empty]
    named = signature.parameters.get("device")
    taking = required[0] if required else named
    another = len(required) > 1 or (required and named is not None and taking is not named)
    unnamed = taking is not None and taking.kind is inspect.Parameter.KEYWORD_ONLY and taking.name != "device"
    if another or unnamed:
        raise TypeError(f"make_setup must take no argument or only the device, got {_signature(make_setup, signature)}")
    if taking is None or taking.kind in variadic:
        return [], {}
    if taking.kind is inspect.Parameter.KEYWORD_ONLY:
        return [], {taking.name: device}
    if required or parameters[0] is taking:
        return [device], {}
    return [], {taking.name: device}


def _signature(function: Any, signature: inspect.Signature) -> str:
    return f"{getattr(function, '__name__', type(function).__name__)}{signature}"


def _normalise(made: Any) -> TrainingSetup:
    if isinstance(made, TrainingSetup):
        return made
    if made is None:
        raise TypeError(f"make_setup() returned None: return {FORMS}")
    if not isinstance(made, (tuple, list)):
        raise TypeError(f"make_setup() must return {FORMS}, got a {type(made).__name__}")
    if not 2 <= len(made) <= 5:
        raise TypeError(f"make_setup() must return {FORMS}, got {len(made)} element{'' if len(made) == 1 else 's'}")
    return TrainingSetup(*made)


def _check_fresh(setup: TrainingSetup) -> None:
    objects: list[tuple[str, Any]] = [("the same model", setup.model)]
    objects += [(f"the same optimizer {name!r}", optimizer) for name, optimizer in setup.optimizers.items()]
    # Frozen parts may be shared (a backbone that is loaded once); trained ones would carry one run into the next.
    objects += [
        (f"a model whose parameter {name!r} is the same object", parameter)
        for name, parameter in setup.model.named_parameters()
        if parameter.requires_grad
    ]
    for what, member in objects:
        if _returned.get(id(member)) is member:
            raise ValueError(
                f"make_setup() returned {what} as an earlier call: every run needs a fresh setup, "
                "so build the model and the optimizers inside make_setup()"
            )
    for _, member in objects:
        try:
            _returned[id(member)] = member
        except TypeError:  # an object of a class with __slots__ cannot be referenced weakly, so it is not watched
            continue


def _move(setup: TrainingSetup, device: torch.device) -> None:
    modules = [setup.model, *(member for member in setup.state.values() if isinstance(member, nn.Module))]
    for module in modules:
        tensors = [*module.parameters(), *module.buffers()]
        accelerators = {tensor.device for tensor in tensors if tensor.device.type != "cpu"}
        if len(accelerators) <= 1:
            module.to(device)
    for optimizer in setup.optimizers.values():
        for parameter, state in getattr(optimizer, "state", {}).items():
            if not isinstance(parameter, torch.Tensor) or not isinstance(state, dict):
                continue
            for key, value in state.items():
                # Moments follow their parameter; single numbers (Adam's step) stay where the optimizer wants them.
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.ndim > 0:
                    state[key] = value.to(parameter.device)
