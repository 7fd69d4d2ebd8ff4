"""Rules about gradients that do not arrive."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tl_core import Finding
from tl_telemetry._evidence import Evidence, at, several, telling
from tl_telemetry._forward import CUT_INSIDE, OPAQUE, RAN_WITH_GRAD, RAN_WITHOUT_GRAD
from tl_telemetry._record import total


def loss_not_connected(run: Evidence) -> Iterator[Finding]:
    """See losses whose backward pass reaches no parameter at all."""
    passes = list(run.backwards.values())
    if not passes or run.filled:
        return
    without_graph = sum(not event.connected for _, event in passes)
    if without_graph == len(passes):
        what = "the loss has no graph behind it (it is a leaf tensor)"
        cause = (
            "the loss was made anew from a number or from detached data: `.item()`, `.detach()`, `torch.tensor(...)`; "
            "`requires_grad=True` on it only silences torch's error"
        )
    else:
        what = "no parameter that is followed got a gradient from it"
        cause = (
            "the loss is computed from something else than the model's parameters: a detached or another model's output"
        )
    steps = telling(record.step for record, _ in passes)
    yield Finding(
        rule="loss-not-connected",
        seen=f"the loss is not connected to the model: {several(len(passes), 'backward')} "
        f"({passes[0][1].site}), and {what} ({at(steps)})",
        cause=cause,
        fix="call backward() on the tensor that the loss function returned, before any .item() or .detach()",
        steps=steps,
        evidence={"backward_passes": len(passes), "without_graph": without_graph},
    )


def zeroed_before_step(run: Evidence) -> Iterator[Finding]:
    """See gradients that a backward pass made and that were gone when their optimizer stepped."""
    for name, steps in run.steps_by_optimizer.items():
        hit = []
        lost: set[int] = set()
        kept_tensors = False
        for record, event in steps:
            if event.lost and total(event.norms.values()) == 0.0:
                hit.append(record.step)
                lost.update(event.lost)
                kept_tensors = kept_tensors or bool(event.graded)
        if not hit or len(hit) * 2 < len(steps):
            continue
        what = "0 in every element" if kept_tensors else "None"
        yield Finding(
            rule="zeroed-before-step",
            seen=f"the gradients of {run.shown(lost)} were {what} when {name!r} stepped, although a backward pass had "
            f"filled them just before ({len(hit)} of {several(len(steps), 'update')}, {at(hit)})",
            cause="zero_grad() runs between backward() and step(): the update has no gradient to apply"
            + (", so that at most weight decay and momentum move the weights" if kept_tensors else ""),
            fix="move zero_grad() before backward(), or after step()",
            steps=telling(hit),
            parameters=run.named(lost),
            evidence={"updates": len(steps), "without_gradient": len(hit)},
        )


def no_gradient(run: Evidence) -> Iterator[Finding]:
    """See trainable parameters that never get a gradient although their module ran with grad mode on."""
    ran, cut, _ = _without_gradient(run)
    reached = [i for i in run.trainable if i in run.filled]
    counts = f"in {several(len(run.records), 'step')}, while {len(reached)} other tensors got theirs"
    if ran:
        yield Finding(
            rule="no-gradient",
            seen=f"{run.shown(ran)} never got a gradient {counts}; the module's forward pass ran with gradients on",
            cause="the graph is cut between this module's output and the loss (`.detach()`, `.data`, `.item()`, a copy "
            "through numpy), or its output does not enter the loss",
            fix="let the output reach the loss without leaving the graph, or add the term that was left out to the loss; "
            "freeze the parameters (requires_grad_(False)) if they are not meant to train",
            parameters=run.named(ran),
            evidence={"steps": len(run.records), "without_gradient": len(ran), "with_gradient": len(reached)},
        )
    if cut:
        yield Finding(
            rule="no-gradient",
            seen=f"{run.shown(cut)} never got a gradient {counts}; the module's forward pass ran only with gradients off",
            cause="torch.no_grad() (or inference_mode) around this part of the forward pass",
            fix="take the no_grad() away, or freeze the parameters (requires_grad_(False)) and leave them out of the "
            "optimizer if they are not meant to train",
            parameters=run.named(cut),
            evidence={"steps": len(run.records), "without_gradient": len(cut), "with_gradient": len(reached)},
        )


def never_ran(run: Evidence) -> Iterator[Finding]:
    """Note trainable parameters without a gradient whose module was not seen to run with grad mode on."""
    _, _, idle = _without_gradient(run)
    if idle:
        yield Finding(
            rule="never-ran",
            seen=f"{run.shown(idle)} never got a gradient in {several(len(run.records), 'step')}: the module was not "
            "seen to run with gradients on",
            cause="it is not used in these steps (an expert that was not chosen, another task's head, a target network), "
            "or it runs where forward passes cannot be seen (under no_grad, inside of a compiled model)",
            fix="nothing, if it is meant; else call it in the forward pass, or run more steps",
            parameters=run.named(idle),
            evidence={"steps": len(run.records), "without_gradient": len(idle)},
        )


def zero_gradient(run: Evidence) -> Iterator[Finding]:
    """See optimizers whose gradients are exactly zero in every update."""
    for name, steps in run.steps_by_optimizer.items():
        with_gradient = [(record, event) for record, event in steps if event.graded]
        if len(with_gradient) < 3 or any(event.lost for _, event in with_gradient):
            continue
        if any(total(event.norms.values()) != 0.0 for _, event in with_gradient):
            continue
        hit = telling(record.step for record, _ in with_gradient)
        yield Finding(
            rule="zero-gradient",
            seen=f"every gradient that {name!r} stepped with was exactly 0 ({len(hit)} of {several(len(steps), 'update')}, "
            f"{at(hit)})",
            cause="undecided: the loss does not depend on the weights (a saturated or constant output, a clamp at its "
            "bound, a loss multiplied by 0), or something sets the gradients to 0 through .data",
            fix="print the loss's inputs for two different batches, and look for what makes the loss constant",
            steps=hit,
            parameters=run.named(i for _, event in with_gradient for i in event.graded),
            evidence={"updates": len(steps)},
        )


def _without_gradient(run: Evidence) -> tuple[list[int], list[int], list[int]]:
    """Return trainable parameters without a gradient: their module ran, ran only under no_grad, was not seen to run."""
    ran: list[int] = []
    cut: list[int] = []
    idle: list[int] = []
    if not run.filled:  # no backward pass reached anything, or gradients were made without one
        return ran, cut, idle
    seen = run.filled | run.graded
    flags = run.facts.recorder.forward.flags
    for i in run.trainable:
        if i in seen or i in run.moved or i not in run.held:
            continue
        owner = run.tensors.entries[i].owner
        flag = flags.get(id(owner), 0)
        if flag & OPAQUE:
            idle.append(i)
        elif flag & RAN_WITH_GRAD:
            ran.append(i)
        elif flag & CUT_INSIDE or (flag & RAN_WITHOUT_GRAD and not _has_trained_twin(run, owner)):
            cut.append(i)
        else:
            idle.append(i)
    return ran, cut, idle


def _has_trained_twin(run: Evidence, owner: nn.Module | None) -> bool:
    """Tell whether another module of the same kind and shapes is trained: then this one may be its target or teacher."""
    if owner is None:
        return True
    shapes = [tuple(p.shape) for p in owner.parameters(recurse=False)]
    trained = {id(run.tensors.entries[i].owner): run.tensors.entries[i].owner for i in run.filled}
    return any(
        type(other) is type(owner) and [tuple(p.shape) for p in other.parameters(recurse=False)] == shapes
        for other in trained.values()
        if other is not None and other is not owner
    )
