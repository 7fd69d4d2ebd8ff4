"""The setup of a training loop: what a step uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

_OPTIMIZER_PARTS = ("step", "zero_grad", "param_groups")
_SCALER_PARTS = ("scale", "unscale_", "step", "update", "get_scale")


class TrainingSetup:
    """Hold what a training step uses.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(4, 1)
        >>> setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> setup
        TrainingSetup(Linear, optimizers: optimizer (SGD))

    A single optimizer or scheduler is named ``optimizer`` / ``scheduler``, those of a list ``optimizer[0]``, ...
    Plain attributes may be added. A loop may replace entries of ``optimizers`` and ``schedulers`` while it trains; a
    dict that is handed in is used itself, not copied.

    Args:
        model: The model.
        optimizers: One optimizer, a list, or a dict of named ones. An empty dict is for loops that fill it later.
        schedulers: One learning rate scheduler, a list, a dict of named ones, or None.
        scaler: The GradScaler, or None.
        state: Other objects by name that belong to the training state: an EMA, a criterion with parameters, a sampler.

    Attributes:
        step_index: The index of the current step, set by the runner.
        driver: The framework whose Trainer steps the optimizers and schedulers by itself, set by what adapts it
            (``"Lightning"``); empty for a loop of the person's own.

    Raises:
        TypeError: Something that is not what its argument needs, for example model and optimizer swapped.
        ValueError: The same optimizer or scheduler twice, or an empty list.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Any,
        schedulers: Any = None,
        scaler: Any = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        _check_model(model, optimizers)
        self.model = model
        self.optimizers: dict[str, Any] = _named(optimizers, "optimizer", _check_optimizer)
        given = {} if schedulers is None else schedulers
        self.schedulers: dict[str, Any] = _named(given, "scheduler", _check_scheduler)
        _check_scaler(scaler)
        self.scaler = scaler
        if state is not None and not isinstance(state, Mapping):
            raise TypeError(f"state must be a dict of named objects, got {type(state).__name__}")
        self.state: dict[str, Any] = {} if state is None else state if type(state) is dict else dict(state)
        self.step_index = 0
        self.driver = ""

    @property
    def optimizer(self) -> Any:
        """The only optimizer.

        Raises:
            AttributeError: There is not exactly one; the message lists the names.
        """
        return _only(self.optimizers, "optimizer")

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        _check_optimizer(optimizer, "optimizer")
        _set_only(self.optimizers, "optimizer", optimizer)

    @property
    def scheduler(self) -> Any:
        """The only scheduler.

        Raises:
            AttributeError: There is not exactly one; the message lists the names.
        """
        return _only(self.schedulers, "scheduler")

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        _check_scheduler(scheduler, "scheduler")
        _set_only(self.schedulers, "scheduler", scheduler)

    def __repr__(self) -> str:
        parts = [type(self.model).__name__]
        for title, members in (("optimizers", self.optimizers), ("schedulers", self.schedulers), ("state", self.state)):
            if members:
                listed = ", ".join(f"{name} ({type(member).__name__})" for name, member in members.items())
                parts.append(f"{title}: {listed}")
        if self.scaler is not None:
            parts.append(f"scaler: {type(self.scaler).__name__}")
        return f"TrainingSetup({', '.join(parts)})"


def _named(given: Any, kind: str, check: Any) -> dict[str, Any]:
    if isinstance(given, Mapping):
        members: dict[str, Any] = given if type(given) is dict else dict(given)
        for name in members:
            if not isinstance(name, str):
                raise TypeError(f"the names of {kind}s must be strings, got {name!r}")
    elif isinstance(given, (list, tuple)):
        if not given:
            raise ValueError(f"{kind}s is an empty {type(given).__name__}; pass at least one {kind}")
        members = {f"{kind}[{index}]": member for index, member in enumerate(given)}
    else:
        members = {kind: given}
    names: dict[int, str] = {}
    for name, member in members.items():
        check(member, name)
        if id(member) in names:
            twice = f"{names[id(member)]!r} and {name!r}"
            raise ValueError(f"{kind}s holds the same {type(member).__name__} twice, as {twice}")
        names[id(member)] = name
    return members


def _check_model(model: Any, optimizers: Any) -> None:
    if isinstance(model, nn.Module):
        return
    if _is_optimizer(model) or isinstance(optimizers, nn.Module):
        raise TypeError("model and optimizers are swapped: the model comes first")
    hint = "; put several models into one nn.ModuleDict" if isinstance(model, (list, tuple, Mapping)) else ""
    what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
    raise TypeError(f"model must be a torch.nn.Module, got {what}{hint}")


def _is_optimizer(value: Any) -> bool:
    return not isinstance(value, type) and all(hasattr(value, part) for part in _OPTIMIZER_PARTS)


def _check_optimizer(optimizer: Any, name: str) -> None:
    if _is_optimizer(optimizer):
        return
    hint = ""
    if isinstance(optimizer, type):
        hint = ": build it, with the model's parameters"
    elif hasattr(optimizer, "step") and hasattr(optimizer, "get_last_lr"):
        hint = ": a scheduler goes to schedulers="
    what = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else _a(optimizer)
    raise TypeError(f"{name} must be an optimizer (with step, zero_grad and param_groups), got {what}{hint}")


def _check_scheduler(scheduler: Any, name: str) -> None:
    if _is_optimizer(scheduler):
        raise TypeError(f"{name} must be a scheduler, got the optimizer {type(scheduler).__name__}")
    if isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None)) or _is_scaler(scheduler):
        what = f"the class {scheduler.__name__}" if isinstance(scheduler, type) else _a(scheduler)
        hint = ": a scaler goes to scaler=" if _is_scaler(scheduler) else ""
        raise TypeError(f"{name} must be a scheduler (with a step method), got {what}{hint}")


def _is_scaler(value: Any) -> bool:
    return all(callable(getattr(value, part, None)) for part in _SCALER_PARTS)


def _check_scaler(scaler: Any) -> None:
    if scaler is not None and (isinstance(scaler, type) or not _is_scaler(scaler)):
        what = f"the class {scaler.__name__}" if isinstance(scaler, type) else _a(scaler)
        raise TypeError(f"scaler must be a GradScaler (with {', '.join(_SCALER_PARTS)}) or None, got {what}")


def _a(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _only(members: dict[str, Any], kind: str) -> Any:
    if len(members) == 1:
        return next(iter(members.values()))
    if not members:
        raise AttributeError(f"the setup has no {kind}")
    raise AttributeError(
        f"the setup has {len(members)} {kind}s, {', '.join(map(repr, members))}: "
        f"choose one, setup.{kind}s[{next(iter(members))!r}]"
    )


def _set_only(members: dict[str, Any], kind: str, new: Any) -> None:
    if len(members) > 1:
        _only(members, kind)
    members[next(iter(members), kind)] = new


TrainingSetup.__module__ = "tl_core"
