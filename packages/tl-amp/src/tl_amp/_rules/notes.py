"""Notes: what may be meant, and what could not be judged."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from tl_amp._acts import BY_HAND, factor, fresh, is_scaled, known_scales, own_scalers, passes, unscalings
from tl_amp._rules.in_part import undone_by_hand
from tl_amp._words import at, quoted, scale_of, scales, telling, together
from tl_core import Finding
from tl_telemetry import Evidence, OptimizerStep

# A number that multiplies a loss and is a power of two from here on is a loss scale rather than a weight.
LEAST_SCALE = 2.0**6

_LOW = (torch.float16, torch.bfloat16)


def float16_without_scaler(run: Evidence) -> Iterator[Finding]:
    """Note forward passes under float16 autocast whose losses no scaler scales."""
    if torch.float16 not in run.autocast or any(scaler.is_enabled() for scaler in run.scalers.values()):
        return
    if any(_static_scale(run)):
        return  # a scale by hand has a note of its own
    sites = together(passed.event.site for passed in passes(run).values())
    yield Finding(
        rule="float16-without-scaler",
        seen=f"the forward passes ran under float16 autocast, and backward() at {sites} on losses that no GradScaler "
        "scales",
        cause="gradients below 6e-8, the smallest float16 number, become 0 on their way through float16 operations",
        fix="scale the losses with torch.amp.GradScaler, or use bfloat16; nothing, if the gradients are large enough",
    )


def static_scale(run: Evidence) -> Iterator[Finding]:
    """Note losses that are multiplied by a large power of two, with gradients that are divided again by hand."""
    found = list(_static_scale(run))
    if not found:
        return
    values = [scale for scale, _, _ in found]
    sites = together(site for _, site, _ in found)
    hit = telling(step for _, _, step in found)
    if len(set(values)) > 1:
        yield _note(
            f"the losses that backward() at {sites} ran on are multiplied by {scales(values)}, by no GradScaler: how "
            "the loop adapts this scale, and which updates it skips, could not be judged",
            "use torch.amp.GradScaler, which does both",
        )
        return
    divided = {undone.scale for undone in undone_by_hand(run)} == set(values)
    how = "divided by it again" if divided else "edited by hand"
    yield Finding(
        rule="static-scale",
        seen=f"the loss that backward() at {sites} ran on is multiplied by {scale_of(values[0])}, and the gradients "
        f"were {how} before the optimizers stepped (seen in {at(hit)}): a loss scale that does not adapt",
        cause="a static scale overflows where the gradients grow, and nothing skips such an update",
        fix="use torch.amp.GradScaler, which adapts its scale; nothing, if the scale is known to fit",
        steps=hit[:3],
        evidence={"scale": values[0]},
    )


def _static_scale(run: Evidence) -> Iterator[tuple[float, str, int]]:
    """Yield loss scales that no scaler knows of, with the line and the step of their backward pass."""
    edited = any(
        isinstance(event, OptimizerStep) and any(BY_HAND in portion.source for portion in event.portions)
        for _, event in run.events
    )
    if own_scalers(run) or not (edited or undone_by_hand(run)):
        return
    for passed in passes(run).values():
        values = [factor(term) for term in passed.event.terms or ()]
        scale = max(values, default=0.0)
        if scale >= LEAST_SCALE and scale.is_integer() and int(scale).bit_count() == 1:
            yield scale, passed.event.site, passed.step


def not_judged(run: Evidence) -> Iterator[Finding]:
    """Say what of a scaler could not be judged, and where nothing of mixed precision was seen."""
    for name, scaler in run.scalers.items():
        kind = str(getattr(scaler, "_device", "")).partition(":")[0]  # "cuda:0" and torch.device("cuda") do as well
        devices = sorted({entry.tensor.device.type for entry in run.tensors.entries})
        if name in run.stranger_scalers:
            yield _note(
                f"{name} acted in the loop: how it is used could not be judged",
                "give it to the setup: TrainingSetup(model, optimizer, scaler=scaler)",
            )
        elif not scaler.is_enabled():
            why = "built with enabled=False"
            if kind == "cuda" and not torch.cuda.is_available():
                why = f"built for {kind!r} on a machine without it, or with enabled=False"
            yield _note(
                f"the GradScaler ({name}) is disabled, {why}: it scales nothing, and how it is used could not be "
                "judged",
                f"enable it where it is needed, for the device that trains: torch.amp.GradScaler({devices[0]!r})"
                if devices
                else "",
            )
        elif kind and devices and kind not in devices:
            yield _note(
                f"the GradScaler ({name}) is built for {kind!r}, and the parameters are on {quoted(devices)}: how it "
                "is used there could only be judged in part",
                f"write torch.amp.GradScaler({devices[0]!r})",
            )
    yield from _unknown_losses(run)
    scaler = run.setup.scaler
    if scaler is not None and not run.scalers:
        yield _note(
            f"the setup's scaler is a {type(scaler).__name__}, and no torch.amp.GradScaler: how it is used could not "
            "be judged",
            "",
        )
    if not run.scalers and scaler is None and not _mixed(run):
        yield _note(
            "no mixed precision was seen: no GradScaler, no autocast around a module's forward pass, no parameter or "
            "loss in float16 or bfloat16; only non-finite values were judged",
            "",
        )


def _unknown_losses(run: Evidence) -> Iterator[Finding]:
    """Say where what multiplies the losses of a scaler's updates could not be read."""
    known = passes(run)
    values = known_scales(run)
    numbers = {number for unscaled in unscalings(run) for number in fresh(run, unscaled.event) if number in known}
    unknown = [known[n] for n in sorted(numbers) if is_scaled(known[n].event, values) is None]
    if numbers and len(unknown) == len(numbers):
        sites = together(passed.event.site for passed in unknown)
        yield _note(
            f"what multiplies the losses of backward() at {sites} could not be read (compiled code, or hooks on saved "
            "tensors): whether they are scaled could not be judged",
            "",
        )


def _mixed(run: Evidence) -> bool:
    dtypes = {entry.tensor.dtype for entry in run.tensors.entries}
    dtypes |= {passed.event.dtype for passed in passes(run).values() if passed.event.dtype is not None}
    return bool(run.autocast) or not dtypes.isdisjoint(_LOW)


def _note(seen: str, fix: str) -> Finding:
    return Finding("not-judged", seen, "", fix)
