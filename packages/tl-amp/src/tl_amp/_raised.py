"""What a GradScaler's own errors mean, from what was recorded before them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.amp import grad_scaler

from tl_amp._acts import SCALED, direct_steps, fresh, is_scaled, known_scales, passes
from tl_amp._words import together
from tl_core import Finding
from tl_telemetry import (
    Backward,
    Event,
    Evidence,
    GradientsCleared,
    OptimizerStep,
    ScalerUpdate,
    SkippedStep,
    Unscaling,
)

_FILE = grad_scaler.__file__
_TORCH = os.path.dirname(torch.__file__) + os.sep


class Raised(NamedTuple):
    """A call of a GradScaler's method that raised.

    Attributes:
        text: what the scaler said.
        site: the line of the person's code that called it.
        optimizer: the optimizer that it was given, by name; empty for ``update``.
        step: the step in which it happened.
        since: what was observed since the last ``update()``, in order.
        before: what was observed in all, with the step of each act.
    """

    text: str
    site: str
    optimizer: str
    step: int
    since: list[tuple[int, Event]]


def in_scaler(error: BaseException) -> bool:
    """Tell whether a GradScaler itself raised an error."""
    entries = _entries(error.__traceback__)
    return bool(entries) and entries[-1].tb_frame.f_code.co_filename == _FILE


def raised(error: BaseException) -> Callable[[Evidence], Iterator[Finding]]:
    """Return the rule that explains a GradScaler's error."""

    def scaler_error(run: Evidence) -> Iterator[Finding]:
        call = _call(run, error)
        for part, explain in _CAUSES.items():
            if part in call.text:
                yield explain(run, call)
                return
        yield _finding(
            call, "scaler-refuses", "undecided: the GradScaler was used in a way that it refuses", "see the error"
        )

    return scaler_error


def _entries(traceback: TracebackType | None) -> list[TracebackType]:
    found = []
    while traceback is not None:
        found.append(traceback)
        traceback = traceback.tb_next
    return found


def _call(run: Evidence, error: BaseException) -> Raised:
    entries = _entries(error.__traceback__)
    own = [entry for entry in entries if entry.tb_frame.f_code.co_filename == _FILE]
    given: Any = next((e.tb_frame.f_locals["optimizer"] for e in own if "optimizer" in e.tb_frame.f_locals), None)
    called = [entry for entry in entries if not entry.tb_frame.f_code.co_filename.startswith(_TORCH)]
    site = f"{os.path.basename(called[-1].tb_frame.f_code.co_filename)}:{called[-1].tb_lineno}" if called else "?"
    name = next((name for name, own in run.setup.optimizers.items() if own is given or _holds(own, given)), "")
    since: list[tuple[int, Event]] = []
    for record, event in run.events:
        if isinstance(event, ScalerUpdate):
            since = []
        else:
            since.append((record.step, event))
    kind = type(given).__name__ if given is not None else ""
    return Raised(str(error), site, name or kind, len(run.records) - 1, since)


def _holds(outer: object, inner: object) -> bool:
    """Tell whether an optimizer of the setup is a wrapper around another one."""
    return inner is not None and any(value is inner for value in getattr(outer, "__dict__", {}).values())


def _finding(
    call: Raised, rule: str, cause: str, fix: str, seen: str = "", parameters: tuple[str, ...] = ()
) -> Finding:
    said = call.text.split(".  ")[0].rstrip(". ")
    return Finding(
        rule=rule,
        seen=f"{seen}: the GradScaler raised at {call.site} in step {call.step} ({said})"
        if seen
        else f"the GradScaler raised at {call.site} in step {call.step} ({said})",
        cause=cause,
        fix=fix,
        steps=(call.step,),
        parameters=parameters,
        evidence={"error": call.text},
    )


def _held(run: Evidence, call: Raised) -> frozenset[int]:
    optimizer = run.setup.optimizers.get(call.optimizer)
    held = [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]
    known = (run.tensors.index_of.get(id(p)) for p in held)
    return frozenset(i for i in known if i is not None)


def _after(call: Raised, kind: type[Any]) -> tuple[int, Any, list[tuple[int, Event]]] | None:
    """Return the last act of a kind of the call's optimizer, its step, and what came after it."""
    for place in range(len(call.since) - 1, -1, -1):
        step, event = call.since[place]
        if isinstance(event, kind) and event.optimizer == call.optimizer:
            return step, event, call.since[place + 1 :]
    return None


def _filled(run: Evidence, call: Raised, acts: list[tuple[int, Event]]) -> list[Backward]:
    held = _held(run, call)
    return [event for _, event in acts if isinstance(event, Backward) and not held.isdisjoint(event.filled)]


def _cleared(run: Evidence, call: Raised, acts: list[tuple[int, Event]]) -> bool:
    held = _held(run, call)
    return any(isinstance(event, GradientsCleared) and not held.isdisjoint(event.cleared) for _, event in acts)


def _unscaled_already(run: Evidence, call: Raised) -> Finding:
    earlier = _after(call, Unscaling)
    if earlier is None:
        return _finding(
            call,
            "unscaled-twice",
            f"unscale_() was called for {call.optimizer!r} when it had no gradient, and again",
            "call unscale_() once an update, after backward()",
        )
    step, event, acts = earlier
    backwards = _filled(run, call, acts)
    both = f"{event.site} (step {step}) and {call.site} (step {call.step})"
    if event.site == call.site:
        both = f"{call.site} in steps {step} and {call.step}"
    if not backwards:
        return _finding(
            call,
            "unscaled-twice",
            "a scaler unscales an optimizer's gradients once an update: dividing them twice would make them too small",
            f"keep one of the two calls, {_first(event.site, call.site)}",
            f"unscale_() was called twice for optimizer {call.optimizer!r} in step {call.step}: at {event.site} and at "
            f"{call.site}"
            if step == call.step
            else f"unscale_() was called twice for optimizer {call.optimizer!r} without a backward pass in between: at "
            f"{both}",
        )
    if _cleared(run, call, acts):
        seen = f"unscale_() was called for {call.optimizer!r} at {both}, and its gradients were cleared in between"
        if any(isinstance(event, (OptimizerStep, SkippedStep)) for _, event in acts):
            return _missing_update(call, seen + ", without an update()")
        return _finding(
            call,
            "missing-update",
            f"in step {step} unscale_() was followed neither by scaler.step() nor by scaler.update(): the scaler goes "
            "on holding the gradients for unscaled",
            "call scaler.update() after each unscale_(), also where scaler.step() is left out",
            seen,
        )
    return _finding(
        call,
        "unscaled-again",
        "unscale_() runs on every micro-batch of an accumulation: the gradients of earlier micro-batches would be "
        "divided by the scale again each time",
        "call unscale_(), clip, scaler.step() and scaler.update() once an update, after the last micro-batch's "
        "backward()",
        f"unscale_() was called again for optimizer {call.optimizer!r} at {both}, after backward() at "
        f"{together(backward.site for backward in backwards)} had added to the gradients that it had unscaled",
        run.named(event.graded),
    )


def _first(first: str, second: str) -> str:
    return f"that at {first}" if first != second else "and call it outside of the loop around it"


def _missing_update(call: Raised, seen: str) -> Finding:
    return _finding(
        call,
        "missing-update",
        "scaler.update() is missing: it ends an update, and lets the scaler unscale and step these optimizers anew",
        "call scaler.update() once an update, after all optimizers have stepped",
        seen,
    )


def _last_step(call: Raised) -> tuple[int, str, list[tuple[int, Event]]] | None:
    for place in range(len(call.since) - 1, -1, -1):
        step, event = call.since[place]
        site = getattr(event, "site", "")
        if event.kind in ("optimizer_step", "skipped_step") and getattr(event, "optimizer", "") == call.optimizer:
            return step, site, call.since[place + 1 :]
    return None


def _stepped_already(run: Evidence, call: Raised) -> Finding:
    method = "unscale_()" if "unscale_" in call.text else "step()"
    last = _last_step(call)
    if last is None:
        return _missing_update(call, f"scaler.{method} was called for {call.optimizer!r} after its step")
    step, site, acts = last
    if _filled(run, call, acts) or step != call.step:
        again = " again" if method == "step()" else ""
        return _missing_update(
            call,
            f"scaler.step() was called for {call.optimizer!r} at {site} in step {step}, and scaler.{method}{again} at "
            f"{call.site} in step {call.step}, without an update() in between",
        )
    if method == "unscale_()":
        return _finding(
            call,
            "unscaled-twice",
            "scaler.step() unscales by itself; unscale_() must come before it",
            f"move unscale_() (and the clip after it) before scaler.step() at {site}",
            f"unscale_() was called for optimizer {call.optimizer!r} at {call.site} after scaler.step() at {site}",
        )
    return _finding(
        call,
        "stepped-twice",
        "scaler.step() is called a second time in the same update, with gradients that are used already",
        "call scaler.step() once for each optimizer and update",
        f"scaler.step() was called twice for {call.optimizer!r} in step {step}: at {site} and at {call.site}",
    )


def _no_scale(run: Evidence, call: Raised) -> Finding:
    backwards = [event.site for _, event in run.events if isinstance(event, Backward)]
    where = f" (backward at {together(backwards)})" if backwards else ""
    return _finding(
        call,
        "loss-not-scaled",
        f"scaler.scale() is missing: the loss was never multiplied by the scale{where}, and the scaler has none yet",
        "write scaler.scale(loss).backward()" + (f" at {together(backwards)}" if backwards else ""),
        "scaler.scale() had not been called on any loss",
    )


def _no_gradients(run: Evidence, call: Raised) -> Finding:
    held = _held(run, call)
    whose = f"{run.shown(held)} of {call.optimizer!r}" if held else f"any parameter of {call.optimizer!r}"
    cleared = False
    for record, event in reversed(run.events):
        if isinstance(event, GradientsCleared):
            cleared = cleared or not held.isdisjoint(event.cleared)
        elif isinstance(event, (OptimizerStep, SkippedStep)) and event.optimizer == call.optimizer:
            break
        elif isinstance(event, Backward) and not held.isdisjoint(event.filled) and cleared:
            return _finding(
                call,
                "zeroed-before-step",
                "zero_grad() came between backward() and scaler.step(): no gradient is left to unscale or to apply",
                "move zero_grad() before backward(), or after scaler.step()",
                f"the gradients of {run.shown(held)}, which backward() at {event.site} had filled in step "
                f"{record.step}, were None when {call.optimizer!r} was to step",
                run.named(held),
            )
    others = {i for _, e in call.since if isinstance(e, Backward) for i in e.filled}
    if not held.isdisjoint(others):
        sites = together(event.site for event in _filled(run, call, call.since))
        return _finding(
            call,
            "scaler-refuses",
            f"scaler.unscale_() came before backward() at {sites}: it found no gradients, and a scaler looks at them "
            "once an update",
            "call scaler.unscale_() after backward(), once an update",
            f"{whose} had no gradient when the scaler unscaled them",
            run.named(held),
        )
    return _finding(
        call,
        "scaler-refuses",
        f"none of its parameters had a gradient; the backward passes before it filled {run.shown(others)}"
        if others
        else "none of its parameters had a gradient: no backward pass had run since the last update",
        f"call scaler.step() for {call.optimizer!r} only after a backward pass that reaches its parameters",
        f"no backward pass had given a gradient to {whose}",
        run.named(held),
    )


def _any_backward(acts: list[tuple[int, Event]]) -> bool:
    return any(isinstance(event, Backward) for _, event in acts)


def _nothing_to_update(run: Evidence, call: Raised) -> Finding:
    values = known_scales(run)
    known = passes(run)
    direct = [
        stepped
        for stepped in direct_steps(run)
        if stepped.step == call.step
        and any(n in known and is_scaled(known[n].event, values) == SCALED for n in fresh(run, stepped.event))
    ]
    if direct and not any(isinstance(event, Unscaling) for _, event in call.since):
        sites = together(stepped.event.site for stepped in direct)
        return _finding(
            call,
            "stepped-past-scaler",
            "optimizer.step() bypasses the scaler: nothing divided the scaled gradients by the scale, or looked for "
            "NaN and Inf in them",
            f"call scaler.step(optimizer) instead of optimizer.step() at {sites}",
            f"{together(repr(stepped.event.optimizer) for stepped in direct)} was stepped directly at {sites}, on the "
            "scaled gradients of a loss that the GradScaler had multiplied by its scale",
            run.named({i for stepped in direct for i in stepped.event.graded}),
        )
    idle = [e for _, e in call.since if isinstance(e, OptimizerStep) and e.scaler is not None and not e.graded]
    if any(event.lost for event in idle):
        lost = {i for event in idle for i in event.lost}
        return _finding(
            call,
            "zeroed-before-step",
            "zero_grad() came between backward() and scaler.step(): no gradient is left to unscale or to apply",
            "move zero_grad() before backward(), or after scaler.step()",
            f"the gradients of {run.shown(lost)}, which a backward pass had filled, were None when scaler.step() ran "
            f"at {together(event.site for event in idle)}",
            run.named(lost),
        )
    earlier = [(record.step, event) for record, event in run.events if isinstance(event, ScalerUpdate) and event.site]
    again = ""
    twice = bool(earlier) and earlier[-1][0] == call.step and not _any_backward(call.since)
    if twice:
        again = (
            f"scaler.update() had been called at {earlier[-1][1].site} in the same step, and nothing was unscaled since"
        )
    elif _any_backward(call.since):
        again = "scaler.update() was called after a backward pass whose gradients no scaler had unscaled or stepped yet"
    return _finding(
        call,
        "extra-update",
        "update() is called more often than updates"
        if twice
        else "undecided: update() runs on every micro-batch of an accumulation, it comes before scaler.step(), or "
        "scaler.step() is not called",
        "call scaler.update() once an update, right after scaler.step() of all optimizers",
        again or "scaler.update() was called before anything was unscaled",
    )


def _float16_weights(run: Evidence, call: Raised) -> Finding:
    held = {
        i
        for i in _held(run, call) or range(len(run.tensors.entries))
        if run.tensors.entries[i].tensor.dtype is torch.float16
    }
    return _finding(
        call,
        "scaler-refuses",
        "the weights themselves are float16 (model.half()), and so are their gradients: a scaler divides only float32 "
        "gradients, because what it scaled up would be lost again in float16",
        "keep the weights in float32, and compute in float16 under torch.autocast",
        f"{run.shown(held)} {'is a' if len(held) == 1 else 'are'} float16",
        run.named(held),
    )


def _closure(run: Evidence, call: Raised) -> Finding:
    return _finding(
        call,
        "scaler-refuses",
        "a closure runs backward() inside of the optimizer's step, after the scaler has looked at the gradients",
        "use an optimizer without a closure, or train without a GradScaler (bfloat16 needs none)",
    )


_CAUSES: dict[str, Callable[[Evidence, Raised], Finding]] = {
    "unscale_() has already been called": _unscaled_already,
    "unscale_() is being called after step()": _stepped_already,
    "step() has already been called": _stepped_already,
    "_scale is None": _no_scale,
    "_growth_tracker is None": _no_scale,
    "No inf checks were recorded for this optimizer": _no_gradients,
    "No inf checks were recorded prior to update": _nothing_to_update,
    "Attempting to unscale FP16 gradients": _float16_weights,
    "Closure use is not currently supported": _closure,
}
