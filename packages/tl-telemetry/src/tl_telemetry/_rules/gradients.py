"""Rules about gradients that do not arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from tl_core import Finding
from tl_telemetry._events import Backward, Clip, OptimizerStep
from tl_telemetry._evidence import Evidence, at, fresh_passes, number, several, telling
from tl_telemetry._forward import CUT_INSIDE, OPAQUE, RAN_WITH_GRAD, RAN_WITHOUT_GRAD
from tl_telemetry._record import StepRecord, total
from tl_telemetry._rules.coverage import run_without_gradient

# A loss may be computed at many lines.
MOST_SITES = 3


def loss_not_connected(run: Evidence) -> Iterator[Finding]:
    """See losses whose backward pass reaches no parameter at all."""
    by_site: dict[str, list[tuple[StepRecord, Backward]]] = {}
    for record, event in run.backwards.values():
        by_site.setdefault(event.site, []).append((record, event))
    for site, passes in by_site.items():
        cut = [(record, event) for record, event in passes if not event.connected and not event.filled]
        # a loss made anew may stand for a batch that has none: not in half of the steps
        if len(cut) * 2 >= len(passes) and (len(cut) > 1 or len(run.backwards) == 1):
            yield _without_graph(site, cut, len(passes))
    yield from _elsewhere(run)


def _without_graph(site: str, cut: list[tuple[StepRecord, Backward]], num_passes: int) -> Finding:
    steps = telling(record.step for record, _ in cut)
    count = several(num_passes, "backward pass")
    if len(cut) < num_passes:
        count = f"{len(cut)} of {count}"
    return Finding(
        rule="loss-not-connected",
        seen=f"{count} ({site}) reached no parameter: the loss was a leaf tensor, with no graph behind it "
        f"({at(steps)})",
        cause="the loss was made anew from a number or from detached data (`.item()`, `.detach()`, "
        "`torch.tensor(...)`); `requires_grad=True` on it only silences torch's error",
        fix="call backward() on the tensor that the loss function returned, before any .item() or .detach()",
        steps=steps,
        evidence={"backward_passes": num_passes, "without_graph": len(cut)},
    )


def _elsewhere(run: Evidence) -> Iterator[Finding]:
    """See losses with a graph that leads to nothing that is trained."""
    passes = [(record, event) for record, event in run.backwards.values() if event.connected]
    strangers = run.graded - run.own
    # gradients that were there without a pass were put there by hand
    if not passes or not run.own.isdisjoint(run.graded | run.filled) or (run.filled - strangers) & run.moved:
        return
    if strangers and not _idle_beside(run):
        return
    if run.filled and run.filled <= run.tensors.loose | run.tensors.unregistered.keys():
        return  # parts of the model out of torch's sight: uncovered-parameter speaks of them
    steps = telling(record.step for record, _ in passes)
    fix = "compute the loss from the output of the setup's model, without leaving the graph in between"
    copies = _copies(run) if strangers else None
    if copies is not None:
        count, stepper = copies
        names = " and ".join(repr(name) for name in run.setup.optimizers if name in run.steps_by_optimizer)
        what = (
            f"what they reached are copies of the model's parameters ({several(count, 'tensor')} of the same shapes, "
            f"stepped by {stepper})"
        )
        cause = (
            "a copy of the model is trained, as in an inner loop, and nothing carries its gradients or its weights "
            f"back to the model that {names} steps"
        )
        fix = (
            f"give the model the copy's gradients before {names} steps (p.grad = q.grad.clone() for each p and its q "
            "in the copy; the difference p - q of the weights for Reptile), or call the model itself through "
            "torch.func.functional_call"
        )
    elif run.filled:
        what = f"what they reached is {run.shown(run.filled)}, which no optimizer holds"
        cause = "the loss was computed from another model than the one that the optimizers train"
    else:
        what = "a graph was behind the loss, but no parameter of the model or of an optimizer got a gradient from it"
        cause = (
            "undecided: the loss was computed from another copy of the model, or from an output that had left the "
            "graph (`.detach()`, `.data`, no_grad) together with something else that needs gradients, such as the input"
        )
    yield Finding(
        rule="loss-not-connected",
        seen=f"{several(len(passes), 'backward pass')} ({_sites(passes)}) reached no parameter that is trained: "
        f"{what} ({at(steps)})",
        cause=cause,
        fix=fix,
        steps=steps,
        evidence={"backward_passes": len(passes), "without_graph": 0},
    )


def _sites(passes: list[tuple[StepRecord, Backward]]) -> str:
    """Return the lines of these passes in words, the first ones of many."""
    sites = list(dict.fromkeys(event.site for _, event in passes))
    return " and ".join(sites[:MOST_SITES]) + (f" and {len(sites) - MOST_SITES} more" * (len(sites) > MOST_SITES))


def _idle_beside(run: Evidence) -> bool:
    """Tell whether the setup's optimizers stepped without any effect, while nothing else moved what is the setup's."""
    return run.own.isdisjoint(run.moved) and not run.steps_by_optimizer.keys().isdisjoint(run.setup.optimizers)


def _copies(run: Evidence) -> tuple[int, str] | None:
    """Return how many tensors an optimizer that is not in the setup holds, and its name, if they copy the model's."""
    entries = run.tensors.entries
    shapes = Counter(tuple(entries[i].tensor.shape) for i in run.own if entries[i].in_model)
    for stepper in run.facts.recorder.steppers:
        held = stepper.index_set
        if held and held <= run.filled - run.own and Counter(tuple(entries[i].tensor.shape) for i in held) <= shapes:
            return len(held), stepper.name
    return None


def no_gradient(run: Evidence) -> Iterator[Finding]:
    """See trainable parameters that never get a gradient although their module ran with grad mode on."""
    without = without_gradient(run)
    ran, cut = without.ran, without.cut
    reached = [i for i in run.trainable if i in run.filled]
    counts = f"in {several(len(run.records), 'step')}, while {several(len(reached), 'other parameter')} got one"
    if ran:
        yield Finding(
            rule="no-gradient",
            seen=f"{run.shown(ran)} never got a gradient {counts}; {their(ran)} forward pass ran with gradients on"
            f"{repeated(without, ran)}",
            cause="undecided: the output leaves the graph on the way to the loss (`.detach()`, `.data`, `.item()`, a "
            "copy through numpy), or does not enter the loss at all",
            fix="let the output reach the loss without leaving the graph; if this part is not meant to train, freeze "
            "it with requires_grad_(False), or pass ignore=",
            parameters=run.named(ran),
            evidence={"steps": len(run.records), "without_gradient": len(ran), "with_gradient": len(reached)},
        )
    if cut:
        cause = "this part of the forward pass is under torch.no_grad(), inference_mode() or set_grad_enabled(False)"
        fix = (
            "take that away; if the part is not meant to train, freeze it with requires_grad_(False) and leave it out "
            "of the optimizer, or pass ignore="
        )
        evidence: dict[str, object] = {
            "steps": len(run.records),
            "without_gradient": len(cut),
            "with_gradient": len(reached),
        }
        warnings = (event.message for _, event in run.warnings)
        warning = next(
            (message for message in warnings if "None of the inputs have requires_grad=True" in message), None
        )
        if warning is not None:
            evidence["warning"] = warning
            cause = (
                "torch.utils.checkpoint with use_reentrant=True, around inputs that need no gradient: torch warned "
                "that its gradients will be None"
            )
            fix = "pass use_reentrant=False to checkpoint()"
        yield Finding(
            rule="no-gradient",
            seen=f"{run.shown(cut)} never got a gradient {counts}; {their(cut)} forward pass ran only with gradients "
            f"off{repeated(without, cut)}",
            cause=cause,
            fix=fix,
            parameters=run.named(cut),
            evidence=evidence,
        )


def their(indices: Sequence[int]) -> str:
    """Return the pronoun for one parameter or several."""
    return "its" if len(indices) == 1 else "their"


def repeated(without: WithoutGradient, indices: Sequence[int]) -> str:
    """Say that something was seen in another run than the one that is judged."""
    return "" if without.repeated.isdisjoint(indices) else " (seen by repeating the run without compiling it)"


def never_ran(run: Evidence) -> Iterator[Finding]:
    """Note trainable parameters without a gradient whose module was not seen to run with grad mode on."""
    without = without_gradient(run)
    aside = sorted({*without.only_off, *run_without_gradient(run)})
    num_steps = several(len(run.records), "step")
    for indices, seen, cause, fix in (
        (
            without.not_called,
            f"never got a gradient in {num_steps}, and no forward pass of {their(without.not_called)} module ran"
            f"{repeated(without, without.not_called)}",
            "undecided: its turn did not come in these steps (an expert that was not chosen, another task's head), or "
            "the loop does not use it",
            "nothing, if its turn comes later; else call it in the forward pass, or remove it",
        ),
        (
            aside,
            f"never got a gradient in {num_steps}; {their(aside)} forward pass was only seen to run with gradients off",
            "the calls that were seen were under torch.no_grad(), as those of a target network or a teacher are",
            "nothing, if it is not meant to train: requires_grad_(False) says so; else call it with gradients on",
        ),
        (
            without.hidden,
            f"never got a gradient in {num_steps}; {their(without.hidden)} module runs inside of compiled or scripted "
            "code",
            "undecided: what runs inside of such code cannot be seen. It may be unused, or cut off from the loss",
            "watch the loop once without compiling it: then this says which of the two it is",
        ),
    ):
        if indices:
            yield Finding(
                rule="never-ran",
                seen=f"{run.shown(indices)} {seen}",
                cause=cause,
                fix=fix,
                parameters=run.named(indices),
                evidence={"steps": len(run.records), "without_gradient": len(indices)},
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
        count = f"{len(with_gradient)} of {several(len(steps), 'update')}, {at(hit)}"
        held = {i for _, event in with_gradient for i in event.graded}
        if _switched_off(run, with_gradient, held):
            yield Finding(
                "not-judged",
                f"every gradient that {name!r} stepped with was exactly 0, and so was every loss that made them "
                f"({count}), while other parameters trained: a term that is multiplied by 0 in these steps, or that is "
                f"always 0 (a margin that is met, a cross entropy over one class). What {name!r} trains could not be "
                "judged",
                "",
                "run steps in which the term counts",
                parameters=run.named(held),
            )
            continue
        cause, fix = (
            _clipped_to_zero(with_gradient)
            or _zero_factors(run, held)
            or (
                "undecided: the loss is flat in these weights (a saturated or constant output, a softmax over one "
                "value, a clamp at its bound, a term multiplied by 0), two terms of it cancel exactly (a value minus "
                "itself, where one of the two is meant to be detached), or something sets the gradients to 0 through "
                ".data, to name the common ones",
                "follow the loss back from its end, and look for the operation whose output does not change with its "
                "input",
            )
        )
        yield Finding(
            rule="zero-gradient",
            seen=f"every gradient that {name!r} stepped with was exactly 0 ({count})",
            cause=cause,
            fix=fix,
            steps=hit,
            parameters=run.named(held),
            evidence={"updates": len(steps)},
        )


def _switched_off(run: Evidence, steps: list[tuple[StepRecord, OptimizerStep]], held: set[int]) -> bool:
    """Tell whether all losses behind these steps were exactly 0 while gradients of other parameters were not."""
    passes = set().union(*(fresh_passes(event) for _, event in steps))
    if not passes or not passes <= run.backwards.keys():
        return False
    roots = [run.backwards[n][1].root for n in passes]
    return all(root is not None and root.value() == 0.0 for root in roots) and any(
        norm != 0.0 and i not in held
        for _, event in run.steps
        for i, norm in zip(event.graded, event.norms.values(), strict=True)
    )


def _clipped_to_zero(steps: list[tuple[StepRecord, OptimizerStep]]) -> tuple[str, str] | None:
    """Return the cause and the fix where a clip with a bound of 0 made the gradients 0 that each step used."""
    clips: list[Clip] = []
    for record, event in steps:
        before = record.events[: record.events.index(event)]
        clip = next(
            (
                e
                for e in reversed(before)
                if isinstance(e, Clip) and e.bound == 0.0 and total(e.norms.values()) > 0.0
                if set(event.graded) <= set(e.graded)
            ),
            None,
        )
        if clip is None:
            return None
        clips.append(clip)
    calls = " and ".join(sorted({f"{clip.function}() at {clip.site}" for clip in clips}))
    norms = [total(clip.norms.values()) for clip in clips]
    return (
        f"{calls} is given a bound of 0, and scales them to 0: the norm before was {number(min(norms))} to "
        f"{number(max(norms))}",
        "pass the bound that is meant, or leave the call out where 0 stands for no clipping",
    )


def _zero_factors(run: Evidence, held: set[int]) -> tuple[str, str] | None:
    """Return the cause and the fix where the weights are factors of a product that are 0, each with another one."""
    zeros = run.facts.start.zeros() & run.facts.end.zeros()
    by_owner: dict[int, list[Tensor]] = {}
    for i in held:
        entry = run.tensors.entries[i]
        if entry.owner is None or entry.name not in zeros:
            return None
        by_owner.setdefault(id(entry.owner), []).append(entry.tensor)
    if not by_owner or not all(_are_factors(tensors) for tensors in by_owner.values()):
        return None
    return (
        "all of these weights are 0 in every element, and lie two by two in one module, as the factors of a low-rank "
        "product do (B @ A): the gradient of each is multiplied by the other, so that none ever leaves 0",
        "start only one factor of each product at 0 (in LoRA B), and the other at random values",
    )


def _are_factors(tensors: list[Tensor]) -> bool:
    """Tell whether tensors are two matrices that can be multiplied with each other."""
    if len(tensors) != 2 or any(tensor.dim() != 2 for tensor in tensors):
        return False
    first, second = tensors
    return not {first.shape[0], first.shape[1]}.isdisjoint(second.shape)


class WithoutGradient(NamedTuple):
    """Trainable parameters in an optimizer that got no gradient, by what was seen of their module."""

    ran: list[int]  # with gradients on
    cut: list[int]  # with gradients off where they should be on
    only_off: list[int]  # with gradients off, beside a trained module of the same kind
    not_called: list[int]
    hidden: list[int]  # inside of compiled or scripted code
    repeated: set[int]  # of all these, what was seen when the run was repeated without compiling


def without_gradient(run: Evidence) -> WithoutGradient:
    """Part the parameters that got no gradient; none of them when no backward pass reached anything."""
    found = WithoutGradient([], [], [], [], [], set())
    if not run.filled:  # no backward pass reached anything, or gradients were made without one
        return found
    seen = run.filled | run.graded
    flags = run.facts.recorder.forward.flags
    # gradients came, and none of the modules was seen to run: a compiled function is around them
    reached = [entry for i in run.filled if (entry := run.tensors.entries[i]).in_model]
    unseen = bool(reached) and not any(flags.get(id(entry.owner)) for entry in reached)
    for i in run.trainable:
        if i in seen or i in run.moved or i not in run.held:
            continue
        owner = run.tensors.entries[i].owner
        flag = flags.get(id(owner), 0)
        if flag & OPAQUE or unseen:
            uncompiled = run.facts.uncompiled.get(run.tensors.name(i), OPAQUE)
            if uncompiled & OPAQUE:
                found.hidden.append(i)
                continue
            found.repeated.add(i)
            flag = uncompiled
        if flag & RAN_WITH_GRAD:
            found.ran.append(i)
        elif flag & CUT_INSIDE or (flag & RAN_WITHOUT_GRAD and not _has_trained_twin(run, owner)):
            found.cut.append(i)
        elif flag & RAN_WITHOUT_GRAD:
            found.only_off.append(i)
        else:
            found.not_called.append(i)
    return found


def _has_trained_twin(run: Evidence, owner: nn.Module | None) -> bool:
    """Tell whether another module of the same kind and shapes is trained, whose target or teacher this one may be."""
    if owner is None:
        return True
    shapes = [tuple(p.shape) for p in owner.parameters(recurse=False)]
    trained = {id(run.tensors.entries[i].owner): run.tensors.entries[i].owner for i in run.filled}
    return any(
        type(other) is type(owner) and [tuple(p.shape) for p in other.parameters(recurse=False)] == shapes
        for other in trained.values()
        if other is not None and other is not owner
    )
