"""Rules about state beside the weights: buffers, graphs, and torch's own warnings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from tl_core import Finding
from tl_telemetry._evidence import Evidence, at, listed, several, telling
from tl_telemetry._forward import INPUT_TRAINS, RAN_IN_TRAINING
from tl_telemetry._marks import WALKED_STEPS
from tl_telemetry._tensors import other_modules, shown_name

BROADCAST = re.compile(r"Using a target size \((.+?)\) that is different to the input size \((.+?)\)")


def frozen_buffer_moved(run: Evidence) -> Iterator[Finding]:
    """See buffers that the forward pass moves in a module whose parameters are all frozen (BatchNorm)."""
    facts = run.facts
    moved = facts.end.moved_since(facts.start)
    touched_parameters = {run.tensors.name(i) for i in run.moved}
    found: dict[str, str] = {}
    seen: set[nn.Module] = set()  # a wrapper in setup.state may hold the model itself
    for label, root in (("", run.setup.model), *other_modules(run.setup)):
        for module_name, module in root.named_modules(memo=seen):
            flags = facts.recorder.forward.flags.get(id(module), 0)
            # forward passes are not followed to the end of a long run: then the mode that the run left tells
            if not module._buffers or not (flags & RAN_IN_TRAINING or module.training):
                continue
            frozen = _frozen_around(root, module_name, module, fed=bool(flags & INPUT_TRAINS))
            if frozen is None:
                continue
            names = {_dotted(label, shown_name(name)) for name in frozen}
            if names & touched_parameters or names & facts.trainable_start:
                continue
            for own in module._buffers:
                name = _dotted(label, shown_name(module_name), own)
                if name in moved:
                    found[name] = type(module).__name__
    if not found:
        return
    kinds = sorted(set(found.values()))
    yield Finding(
        rule="frozen-buffer-moved",
        seen=f"{listed(list(found))} changed during the run, although the {' and '.join(kinds)} modules that hold "
        "them are frozen (no parameter there is trainable)",
        cause="they ran in training mode: requires_grad_(False) does not stop what a forward pass writes, "
        "such as running statistics",
        fix="put the frozen part in eval mode (module.eval()), again after each model.train()",
        parameters=tuple(found),
        evidence={"buffers": len(found)},
    )


def _dotted(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _frozen_around(root: nn.Module, name: str, module: nn.Module, *, fed: bool) -> list[str] | None:
    """Return the names of the frozen parameters that a buffer belongs to; None if some are trainable or there are none.

    BatchNorm with affine=False belongs to the nearest module around it that has parameters. So does one whose scale and
    shift alone are fixed, where what flows in is trained (``fed``): its statistics follow a network that trains.
    """
    parameters = list(module.named_parameters(recurse=False))
    batch_norm = isinstance(module, _NormBase)
    if not parameters and not batch_norm:
        return None  # somebody's own normaliser: what it keeps is its own business
    frozen = parameters
    parts = name.split(".") if name else []
    while parts and (not frozen or (fed and batch_norm and len(frozen) == len(parameters))):
        parts.pop()
        frozen = list(root.get_submodule(".".join(parts)).named_parameters())
    if not frozen or any(p.requires_grad for _, p in (*parameters, *frozen)):
        return None
    if parameters and len(frozen) > len(parameters):
        return [_dotted(name, own) for own, _ in parameters]
    return [_dotted(".".join(parts), own) for own, _ in frozen]


def graph_kept_alive(run: Evidence) -> Iterator[Finding]:
    """See autograd graphs that stay alive from step to step."""
    facts, marks = run.facts, run.facts.recorder.marks
    # outputs of a few steps may wait for a backward pass that comes later (an episode)
    updated = len({record.step for record, _ in run.steps}) >= WALKED_STEPS
    for count, followed, kept_is in (
        (facts.graphs_alive, min(marks.num_steps, marks.num_followed), "whole"),
        (facts.graph_parts_alive, min(marks.num_steps, marks.num_walked), "part"),
        (facts.made_alive if updated else 0, marks.num_made, "made"),
    ):
        if count < 4 or count < 0.7 * (followed - 1):
            continue
        if kept_is == "whole":
            seen = f"the autograd graphs of {count} of {several(followed, 'step')} were still alive when the run ended"
            kept = "losses, or what is computed from them, are kept with their history"
            usual = "usually a sum (`total += loss`) or a list (`losses.append(loss)`)"
            fix = "keep loss.detach() (or loss.item() where waiting for the device is fine)"
        elif kept_is == "part":
            seen = (
                f"parts of the autograd graphs of {count} of the first {several(followed, 'step')} were still alive "
                "when the run ended, while the losses were not"
            )
            kept = "something that a loss is computed from is kept with its history"
            usual = (
                "usually outputs or features in a list (`outputs.append(model(x))`), a running average of them, "
                "a hidden state, or gradients of backward(create_graph=True)"
            )
            fix = "keep what .detach() returns of it (set such a .grad to None)"
        else:
            seen = (
                f"graphs that forward passes made in {count} of the first {several(followed, 'step')} were still alive "
                "when the run ended, while the losses were not"
            )
            kept = "an output of the model, or what is computed from it, is kept with its history"
            usual = "usually a validation loss outside of torch.no_grad(), or features in a queue or memory bank"
            fix = "compute it under torch.no_grad(), or keep what .detach() returns of it"
        yield Finding(
            rule="graph-kept-alive",
            seen=seen,
            cause=f"{kept} from step to step, so that memory grows with every step: {usual}",
            fix=fix,
            evidence={"alive": count, "followed": followed},
        )
        return


def loss_broadcast(run: Evidence) -> Iterator[Finding]:
    """See losses of which torch warned that input and target have different shapes."""
    lines: dict[str, list[tuple[int, str, str]]] = {}
    for record, event in run.warnings:
        if match := BROADCAST.search(event.message):
            lines.setdefault(event.site, []).append((record.step, match[2], match[1]))
    for site, hits in lines.items():
        step, given, target = hits[0]
        yield Finding(
            rule="loss-broadcast",
            seen=f"the loss at {site} compares an input of size {_size(given)} with a target of size {_size(target)} "
            f"(first in step {step}){_broadcast_to(given, target)}",
            cause="the shapes differ, and are stretched to a common one instead of being compared element by element",
            fix=_same_shape(given, target),
            steps=telling(step for step, _, _ in hits),
            evidence={"input_size": _size(given), "target_size": _size(target)},
        )


def torch_warning(run: Evidence) -> Iterator[Finding]:
    """Note warnings that torch raised during the run."""
    seen: dict[str, tuple[str, str, list[int]]] = {}
    for record, event in run.warnings:
        if BROADCAST.search(event.message) or not (event.from_torch or "lr_scheduler" in event.message):
            continue
        seen.setdefault(event.message, (event.category, event.site, []))[2].append(record.step)
    for message, (category, site, steps) in seen.items():
        yield Finding(
            rule="torch-warning",
            seen=f"torch warned at {site} ({at(steps)}): {category}: {message.strip()}",
            cause="",
            fix="",
            steps=telling(steps),
        )


def _broadcast_to(input_size: str, target_size: str) -> str:
    shapes = [tuple(map(int, re.findall(r"\d+", text))) for text in (input_size, target_size)]
    try:
        common = tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]
    except RuntimeError:  # torch warned, and is about to raise
        return ""
    wanted = max(math.prod(shape) for shape in shapes)
    if math.prod(common) == wanted:
        return f": they are broadcast to {_shown(common)}"
    return f": they are broadcast to {_shown(common)}, and {math.prod(common)} pairs are compared instead of {wanted}"


def _same_shape(input_size: str, target_size: str) -> str:
    given, target = (tuple(map(int, re.findall(r"\d+", text))) for text in (input_size, target_size))
    if given == (*target, 1):
        return "give both the same shape: target.unsqueeze(-1), or prediction.squeeze(-1)"
    if target == (*given, 1):
        return "give both the same shape: target.squeeze(-1), or prediction.unsqueeze(-1)"
    return "give both the same shape"


def _shown(shape: tuple[int, ...]) -> str:
    return f"({', '.join(map(str, shape))}{',' * (len(shape) == 1)})"


def _size(text: str) -> str:
    """Return a shape as torch prints it (``torch.Size([16, 1])``) without its wrapping: ``(16, 1)``."""
    return _shown(tuple(map(int, re.findall(r"\d+", text))))
