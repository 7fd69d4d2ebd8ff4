"""The functions that a loop runs without naming them, as the setup holds them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from tl_core import TrainingSetup


def setup_functions(setup: TrainingSetup) -> list[Callable[..., Any]]:
    """List the functions that a setup runs without the step naming them: hooks, schedules, attributes of the setup.

    Args:
        setup: the setup; nothing of it is run.

    Returns:
        Hooks of modules, optimizers and parameters, functions of ``LambdaLR`` and its like, and functions set on the
        setup, ready for ``Outside``.
    """
    return list(_functions(setup))


def _functions(setup: TrainingSetup) -> Iterator[Callable[..., Any]]:
    holders = [*setup.model.modules(), *setup.optimizers.values()]
    tables = [hooks for holder in holders for name, hooks in vars(holder).items() if name.endswith("_hooks")]
    for parameter in setup.model.parameters():
        tables += [parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None)]
    for hooks in tables:
        if isinstance(hooks, dict):
            yield from (hook for hook in hooks.values() if callable(hook))
    for scheduler in setup.schedulers.values():
        yield from (function for function in getattr(scheduler, "lr_lambdas", ()) if isinstance(function, FunctionType))
    yield from (value for value in vars(setup).values() if isinstance(value, FunctionType))
