"""Rules about gradients that hold more than they should: each is judged when its own optimizer steps."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from tl_core import Finding
from tl_telemetry._events import Backward, OptimizerStep, Portion
from tl_telemetry._evidence import Evidence, at, number, recurs, several, telling
from tl_telemetry._record import total
from tl_telemetry._rules.unstepped import in_others_stead


def missing_zero_grad(run: Evidence) -> Iterator[Finding]:
    """See gradients that still hold what an earlier update of the same optimizer had used."""
    elsewhere = in_others_stead(run)  # never-stepped speaks of these
    for name, steps in run.steps_by_optimizer.items():
        hit: list[int] = []
        held: set[int] = set()
        nothing: set[int] = set()  # left over too, with nothing in it
        users: set[str] = set()
        example: tuple[int, float, float] | None = None
        for record, event in steps:
            leftover = {} if id(event) in elsewhere else _leftover(run, event)
            nothing.update(i for i, norm in leftover.items() if not norm > 0.0)
            leftover = {i: norm for i, norm in leftover.items() if norm > 0.0}
            if leftover:
                users.update(run.last_users(event, leftover))
                hit.append(record.step)
                held.update(leftover)
                before = dict(zip(event.graded, record.norms_before_clip(event), strict=True))
                example = (record.step, total(list(leftover.values())), total([before[i] for i in leftover]))
        if example is None or not recurs(len(hit), len(steps) - 1):
            yield from _evaluations_added_up(run, name)
            continue
        step, left, whole = example
        parameters = [i for _, event in steps for i in event.graded]
        whole_optimizer = held | nothing >= set(parameters)
        whose = "the gradients" if whole_optimizer else f"the gradients of {run.shown(held)}"
        others = sorted(users - {name})
        earlier = "its earlier updates" if not others else f"earlier updates by {' and '.join(map(repr, others))}"
        cause = "nothing cleared them between an update and the next backward(), which adds to what it finds"
        if not whole_optimizer and not others:
            cause += "; the other gradients of this optimizer were cleared"
        on = "" if len(run.steps_by_optimizer) == 1 else f" on {name!r}"
        fix = f"call zero_grad(){on} once an update, before backward() or after step()"
        if others:
            fix = f"call zero_grad() on {name!r} before the backward() whose gradients it steps with"
        elif steps[-1][1].closure and steps[-1][1].backwards:
            fix = "call zero_grad() in the closure, before backward()"
        elif not whole_optimizer:
            fix += ", on the optimizer itself: it reaches all that it steps, which a module's zero_grad() need not"
        yield Finding(
            rule="missing-zero-grad",
            seen=f"{whose} that {name!r} stepped with still held those of {earlier} ({len(hit)} of "
            f"{several(len(steps), 'update')}, {at(hit)}): at step {step} a norm of {number(left)} was left over when "
            f"backward() added to it, and the sum had a norm of {number(whole)}",
            cause=cause,
            fix=fix,
            steps=telling(hit),
            parameters=run.named(held),
            evidence={"updates": len(steps), "with_leftover": len(hit), "leftover_norm": left, "norm": whole},
        )


def _evaluations_added_up(run: Evidence, name: str) -> Iterator[Finding]:
    """See a step's gradients hold several evaluations of its closure, where the optimizer counts them."""
    steps = run.steps_by_optimizer[name]
    hit: list[int] = []
    most: tuple[int, int] = (0, 0)
    held: set[int] = set()
    for record, event in steps:
        if event.evaluations < 2:
            continue
        inside = [e for e in record.events if isinstance(e, Backward) and e.in_step == name]
        for portion in event.portions:
            passes = sum(backward.in_step == name for backward in _passes(run, portion))
            # a closure may well run several backward passes: those of one evaluation
            if passes * event.evaluations > len(inside) and run.norm_at(event, portion.parameters) > 0.0:
                hit.append(record.step)
                held.update(portion.parameters)
                most = max(most, (passes, event.evaluations))
    if not hit or not recurs(len(set(hit)), len(steps)):
        return
    yield Finding(
        rule="missing-zero-grad",
        seen=f"the gradients of {run.shown(held)} that {name!r} stepped with held more than its closure's last "
        f"evaluation ({len(set(hit))} of {several(len(steps), 'update')}, {at(hit)}): up to "
        f"{several(most[0], 'backward pass')}, with the closure evaluated {most[1]} times in the step",
        cause="the closure does not clear the gradients: each evaluation adds to those before it",
        fix="call zero_grad() in the closure, before backward()",
        steps=telling(hit),
        parameters=run.named(held),
        evidence={"updates": len(steps), "added_up": len(set(hit)), "passes": most[0], "evaluations": most[1]},
    )


def backward_twice(run: Evidence) -> Iterator[Finding]:
    """See updates whose gradient holds the same loss's backward pass twice."""
    for name, steps in run.steps_by_optimizer.items():
        hit: list[int] = []
        held: set[int] = set()
        sites: set[str] = set()
        of_term = False
        for record, event in steps:
            for portion in event.portions:
                for backward in _passes(run, portion):
                    doubled = _doubled(backward, portion)
                    if doubled:
                        of_term = backward.repeats_term
                        hit.append(record.step)
                        held.update(doubled)
                        sites.update((run.backwards[backward.repeats or 0][1].site, backward.site))
        if not recurs(len(set(hit)), len(steps)):
            continue
        yield Finding(
            rule="backward-twice",
            seen=f"backward() ran {'on a term of a loss, and on the sum' if of_term else 'twice on the same loss'} "
            f"before {name!r} stepped ({_lines(sites)}; "
            f"{len(set(hit))} of {several(len(steps), 'update')}, {at(hit)}): the gradients of {run.shown(held)} held "
            f"{'the term' if of_term else 'it'} twice",
            cause="the second call adds its gradients to those of the first: nothing cleared them in between",
            fix="call backward() on the sum alone, or on each term alone"
            if of_term
            else "call backward() once on each loss; to log gradient norms, read p.grad after that call, or take them "
            "from torch.autograd.grad, which adds nothing to p.grad",
            steps=telling(hit),
            parameters=run.named(held),
            evidence={"updates": len(steps), "doubled": len(set(hit))},
        )


def leaked_gradient(run: Evidence) -> Iterator[Finding]:
    """See gradients that another optimizer's loss left behind, and that an update then applied."""
    for name, steps in run.steps_by_optimizer.items():
        hit: list[int] = []
        held: set[int] = set()
        others: set[str] = set()
        sites: set[str] = set()
        own_sites: set[str] = set()
        for record, event in steps:
            for portion in event.portions:
                leak = _leak(run, event, portion)
                if leak is not None:
                    hit.append(record.step)
                    held.update(portion.parameters)
                    others.add(leak[0])
                    sites.add(leak[1])
                    own_sites.add(leak[2])
        if not recurs(len(set(hit)), len(steps)):
            continue
        other = " and ".join(map(repr, sorted(others)))
        yield Finding(
            rule="leaked-gradient",
            seen=f"the gradients of {run.shown(held)} that {name!r} stepped with held more than those of its own loss "
            f"({_lines(own_sites)}): the loss that {other} steps with ({_lines(sites)}) had left its gradients in them "
            f"({len(set(hit))} of {several(len(steps), 'update')}, {at(hit)})",
            cause=f"the backward pass for {other} reaches these parameters too, and nothing clears their gradients "
            f"before the backward pass for {name!r} adds to them",
            fix=f"call zero_grad() on {name!r} right before the backward() of its own loss, or keep the other loss "
            "out of these parameters (requires_grad_(False) meanwhile, or backward(inputs=...))",
            steps=telling(hit),
            parameters=run.named(held),
            evidence={"updates": len(steps), "leaked": len(set(hit)), "from": tuple(sorted(others))},
        )


def _lines(sites: set[str]) -> str:
    """Return lines of code in words: ``train.py:8``, ``train.py:8 and train.py:12``."""
    return " and ".join(sorted(sites))


def _passes(run: Evidence, portion: Portion) -> list[Backward]:
    """Return the fresh backward passes in a portion's gradients, in order."""
    return [run.backwards[n][1] for n in portion.unused if n in run.backwards]


def _leftover(run: Evidence, event: OptimizerStep) -> dict[int, float]:
    """Return the parameters whose gradient held used content under fresh one, with the norm of what was left."""
    left: dict[int, float] = {}
    for portion in event.portions:
        onto = run.backwards.get(portion.onto)
        if onto is None or onto[1].leftover_norms is None:
            continue
        norms = dict(zip(onto[1].leftover, onto[1].leftover_norms.values(), strict=True))
        now = dict(zip(event.graded, event.norms.values(), strict=True))
        left.update({i: norms[i] if now[i] > 0.0 else 0.0 for i in portion.parameters if i in norms})
    return left


def _doubled(backward: Backward, portion: Portion) -> set[int]:
    if backward.repeats is None or backward.repeated_norms is None or backward.repeats not in portion.source:
        return set()
    norms = dict(zip(backward.repeated, backward.repeated_norms.values(), strict=True))
    return {i for i in portion.parameters if i in backward.filled and norms.get(i, 0.0) > 0.0}


def _leak(run: Evidence, event: OptimizerStep, portion: Portion) -> tuple[str, str, str] | None:
    """Return (other optimizer, its line, own line) where a pass that another one used came before this one's own."""
    passes = _passes(run, portion)
    for earlier, own in itertools.pairwise(passes):
        if earlier.site == own.site and earlier.filled == own.filled:
            continue  # the same loss, accumulated: the other optimizer only steps more often
        other = _user_between(run, event, earlier, own)
        if other is None:
            continue
        # Parts that several losses share may collect all of them, at a rate of their own (a shared encoder). Another
        # optimizer's loss leaked when it reaches all that this one's own loss trains here, and that loss is only this
        # optimizer's, or runs through the other's parameters too (a critic's or generator's).
        trained = set(own.filled) & set(event.graded)
        own_only = len(trained) == len(own.filled)
        through_other = not set(other.graded).isdisjoint(own.filled)
        if trained <= set(earlier.filled) and (own_only or through_other):
            return other.optimizer, earlier.site, own.site
    return None


def _user_between(run: Evidence, event: OptimizerStep, earlier: Backward, own: Backward) -> OptimizerStep | None:
    """Return another optimizer's step, over other parameters, that used ``earlier`` before ``own`` ran."""
    for _, step in run.steps_between(earlier.number, own.number):
        if step.optimizer == event.optimizer or not set(step.graded).isdisjoint(event.graded):
            continue
        if any(earlier.number in portion.source and portion.used < earlier.number for portion in step.portions):
            return step
    return None
