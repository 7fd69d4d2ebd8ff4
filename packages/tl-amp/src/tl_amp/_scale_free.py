"""An experiment: gradients that are applied must not depend on the loss scale."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from tl_amp._acts import attempts, fresh, norms_after, norms_at, passes, unscalings
from tl_amp._words import number, scale_of
from tl_core import Finding, TrainingSetup, group_names
from tl_telemetry import Evidence, TrainingRun, run_training

# By how much the scale is changed: little, so that float16 keeps the gradients that it kept.
FACTOR = 4.0
# A scale that hardly scales.
SMALL = 2.0
# From this ratio on, a gradient depends on the scale; what is smaller than this part of all gradients is not looked at.
DEPENDS = 1.1
COUNTS = 1e-3
# A gradient that differs by more when everything is the same is not the loss scale's.
REPEATS = 1.01

Repeat = Callable[[Callable[..., Any], int], TrainingRun]


def depends_on_scale(run: Evidence, make_setup: Callable[..., Any], repeat: Repeat) -> Finding | None:
    """Make the first update with other loss scales, and see whether its gradients are the same.

    Args:
        run: what the run showed.
        make_setup: builds the setup.
        repeat: runs the loop for some steps from what a function builds.

    Returns:
        The finding; None where the gradients do not depend on the scale, or where that cannot be tried. A note
        ``not-judged`` where they differ at one scale already.
    """
    tried = attempts(run)
    applied = next((attempt for attempt in tried if attempt.applied), None)
    if applied is None or not isinstance(run.setup.scaler, torch.amp.GradScaler):
        return None
    scale = run.records[applied.step - 1].loss_scale if applied.step else None
    first = tried[0].step
    usual = _first_update(make_setup, repeat, first, scale, 1.0)
    lower = _first_update(make_setup, repeat, first, scale, 1.0 / FACTOR)
    if not usual or not lower:
        return None
    differing, what = _differing(usual, lower), "a quarter of it"
    if not differing and torch.float16 not in _dtypes(run):
        # what is added to scaled gradients vanishes beside them, unless the scale is small; float16 needs its scale
        lower, what = _first_update(make_setup, repeat, first, SMALL, 1.0), f"a scale of {SMALL:g}"
        differing = _differing(usual, lower)
    if not differing:
        return None
    if _differing(usual, _first_update(make_setup, repeat, first, scale, 1.0), REPEATS):
        return Finding(
            "not-judged",
            "the loop's first update is another one each time it runs, from the same seed and loss scale: whether its "
            "gradients depend on the scale could not be judged",
            "",
            "draw random numbers from the global generators, which are seeded, or from one that make_setup() builds",
        )
    higher = _first_update(make_setup, repeat, first, scale, FACTOR)
    if higher and not set(_differing(usual, higher)) & set(differing):
        return None  # float16 loses small gradients at the lower scale: what a scale is for
    return _finding(run, first, scale, differing, usual, lower, what)


def _first_update(
    make_setup: Callable[..., Any], repeat: Repeat, step: int, scale: float | None, factor: float
) -> dict[str, float]:
    """Return the norms of the gradients of the first update, unscaled; nothing where it was not applied."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself has shown them
        try:
            run = repeat(_with_scale(make_setup, scale, factor), step + 1)
        except Exception:  # noqa: BLE001  a loop that minds its scale only goes without this look
            return {}
    if run.error is not None or len(run.records) <= step or run.records[step].skipped:
        return {}
    figures = run.records[step].parameters
    return {name: one.grad_norm for name, one in figures.items() if one.grad_norm is not None}


def _with_scale(make_setup: Callable[..., Any], scale: float | None, factor: float) -> Callable[..., Any]:
    """Return a ``make_setup`` whose scaler starts at another scale; ``scale`` None: at a multiple of its own."""

    @wraps(make_setup)
    def build(*args: Any, **kwargs: Any) -> Any:
        made = make_setup(*args, **kwargs)
        scaler = made.scaler if isinstance(made, TrainingSetup) else made[3] if len(made) > 3 else None
        if scaler is not None and (state := scaler.state_dict()):
            scaler.load_state_dict({**state, "scale": (state["scale"] if scale is None else scale) * factor})
        return made

    return build


def _differing(a: dict[str, float], b: dict[str, float], ratio: float = DEPENDS) -> list[str]:
    """Return the parameters whose gradients differ, of those that count."""
    most = max(a.values(), default=0.0)
    return [
        name
        for name, norm in a.items()
        if norm > COUNTS * most and name in b and not 1.0 / ratio <= b[name] / norm <= ratio
    ]


def _dtypes(run: Evidence) -> set[torch.dtype]:
    """Return the dtypes that forward passes and parameters of the run are in."""
    return {*run.autocast, *(entry.tensor.dtype for entry in run.tensors.entries)}


def _finding(
    run: Evidence,
    step: int,
    scale: float | None,
    differing: list[str],
    usual: dict[str, float],
    lower: dict[str, float],
    what: str,
) -> Finding:
    worst = max(differing, key=lambda name: abs(usual[name] - lower[name]))
    names = [entry.name for entry in run.tensors.entries]
    scale = run.records[step].loss_scale if scale is None else scale
    own = "its own" if scale is None else f"the scale of {scale_of(scale)}"
    cause, fix = _why(run, differing, names)
    return Finding(
        "depends-on-scale",
        f"the gradients of the first update, in step {step}, depend on the loss scale: {group_names(differing, names)} "
        f"({worst} has a norm of {number(usual[worst])} at {own}, and of {number(lower[worst])} at {what})",
        cause,
        fix,
        steps=(step,),
        parameters=tuple(differing),
        evidence={"norm": usual[worst], "norm_at_other_scale": lower[worst]},
    )


_TERM = "a term of the loss is made of gradients that torch.autograd.grad() takes of a scaled loss"


def _why(run: Evidence, differing: list[str], names: list[str]) -> tuple[str, str]:
    """Return the cause, as far as the run shows where gradients were changed, and the fix."""
    hooked = list(_hooked(run, differing))
    if hooked:
        return (
            f"gradient hooks (register_hook) on {group_names(hooked, names)} run in the backward pass, on gradients "
            "that are still multiplied by the scale: a bound or a threshold in them means something else at each scale",
            "do what they do after scaler.unscale_(optimizer), or multiply their bounds by scaler.get_scale()",
        )
    edited = _edited(run)
    if edited:
        return (
            f"the gradients are changed between backward() at {edited} and unscaling: "
            "they are still multiplied by the scale there, and a bound, a threshold or noise means something else at "
            "each scale",
            "call scaler.unscale_(optimizer) before they are changed, once an update",
        )
    if edited == "":
        return (
            f"undecided, but within the backward pass, since nothing changed the gradients after it: {_TERM}, "
            "scaler.scale() takes something that the loss is computed of (outputs) instead of the loss, or hooks "
            "inside of the model act on gradients that are still multiplied by the scale",
            "scale the loss itself; divide gradients of a scaled loss by scaler.get_scale() before they go into a "
            "loss; multiply bounds in hooks by it",
        )
    return (
        "undecided: something acts on gradients that are still multiplied by the scale (a clamp, a threshold, noise), "
        f"or {_TERM}",
        "change gradients after scaler.unscale_(optimizer); divide gradients of a scaled loss by scaler.get_scale() "
        "before they go into a loss",
    )


def _edited(run: Evidence) -> str | None:
    """Return the line of the first backward pass if its gradients were changed before unscaling; "" if not."""
    known = passes(run)
    # one whose update is skipped says nothing: what is not finite is equal to nothing
    finite = (unscaled for unscaled in unscalings(run) if all(map(math.isfinite, norms_at(unscaled))))
    first = next(finite, None)
    numbers = [] if first is None else [number for number in fresh(run, first.event) if number in known]
    if first is None or not numbers:
        return None
    norms = norms_after(known[numbers[-1]].event)
    pairs = [(norms[i], now) for i, now in zip(first.event.graded, norms_at(first), strict=True) if i in norms]
    if not pairs or len(pairs) < len(first.event.graded):
        return None
    same = all(math.isclose(before, now, rel_tol=1e-6) for before, now in pairs)
    return "" if same else known[numbers[-1]].event.site


def _hooked(run: Evidence, names: list[str]) -> Iterator[str]:
    for entry in run.tensors.entries:
        if entry.name in names and getattr(entry.tensor, "_backward_hooks", None):
            yield entry.name


def repeating(
    data: Any,
    step: Callable[[TrainingSetup, Any], Any] | None,
    loss_fn: Callable[[Any, Any], Any] | None,
    device: str | torch.device,
    seed: int,
) -> Repeat:
    """Return what runs a loop again for some steps."""
    return lambda make_setup, steps: run_training(
        make_setup,
        data,
        step,
        loss_fn=loss_fn,
        steps=steps,
        device=device,
        seed=seed,
        track_updates=False,
        catch=(Exception,),
    )
