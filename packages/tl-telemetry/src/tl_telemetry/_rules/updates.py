"""Rules about what an update changes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tl_core import Finding
from tl_telemetry._events import BY_HAND, OptimizerStep
from tl_telemetry._evidence import Evidence, at, listed, number, several, telling
from tl_telemetry._record import read, total
from tl_telemetry._rules.coverage import frozen_parameter
from tl_telemetry._schedulers import drives
from tl_telemetry._updates import COUNTS

# From this share of unchanged elements on, an update in low precision counts as lost.
ROUNDED_AWAY = 0.9
# From this share on of what independent changes would add up to, elements change in turns instead of the same ones.
ADDS_UP = 0.4
# A few elements that are almost 0 follow any update; they do not show that the others will.
LEAST_MOVED = 0.02
# What optimizers call the means by which small updates are not lost (torchao, optimi, AnyPrecisionAdamW, apex).
COMPENSATION = ("stochastic", "kahan", "compensat", "master", "fp32")


def lr_zero(run: Evidence) -> Iterator[Finding]:
    """See optimizers whose learning rate is 0 in every update."""
    for name, steps in run.steps_by_optimizer.items():
        if len(steps) < 3 or any(lr != 0.0 for _, event in steps for lr in map(read, event.lrs)):
            continue
        hit = telling(record.step for record, _ in steps)
        cause, fix = _why_zero(run, name, len(steps))
        yield Finding(
            rule="lr-zero",
            seen=f"the learning rate of {name!r} was 0 in all of its {several(len(steps), 'update')} ({at(hit)})",
            cause=cause,
            fix=fix,
            steps=hit,
            evidence={"updates": len(steps)},
        )


def group_lr_zero(run: Evidence) -> Iterator[Finding]:
    """Note parameter groups whose learning rate is 0 in every update, beside groups that have one."""
    for name, steps in run.steps_by_optimizer.items():
        optimizer = run.setup.optimizers.get(name)
        rates = [[read(lr) for lr in event.lrs] for _, event in steps]
        if optimizer is None or len(steps) < 3:
            continue
        graded = {i for _, event in steps for i in event.graded}
        others = [lr for of_step in rates for lr in of_step if lr != 0.0]
        for index, group in enumerate(optimizer.param_groups):
            held = [run.tensors.index_of.get(id(parameter)) for parameter in group["params"]]
            still = [i for i in held if i in graded and i not in run.ignored]
            if not still or not others or any(len(of_step) <= index or of_step[index] != 0.0 for of_step in rates):
                continue
            hit = telling(record.step for record, _ in steps)
            by_base = "its base rate (initial_lr) is 0; " if group.get("initial_lr") == 0.0 else ""
            yield Finding(
                rule="group-lr-zero",
                seen=f"the learning rate of group {index} of {name!r} ({run.shown(still)}) was 0 in all of its "
                f"{several(len(steps), 'update')} ({at(hit)}), while others had {_rates_shown(others)}",
                cause=f"undecided: {by_base}the group is frozen by its rate on purpose, or the rate comes out as 0 by "
                "mistake (an integer division such as `base // 10`, a schedule of its own)",
                fix="nothing, if it is meant (requires_grad_(False) says so, and saves its gradients); "
                "else give the group its learning rate",
                steps=hit,
                parameters=run.named(still),
                evidence={"group": index, "updates": len(steps)},
            )


def _why_zero(run: Evidence, name: str, updates: int) -> tuple[str, str]:
    """Return (cause, fix), as far as base rates and schedulers tell."""
    optimizer = run.setup.optimizers.get(name)
    drivers = [n for n, s in run.setup.schedulers.items() if drives(s, optimizer)]
    groups = [] if optimizer is None else optimizer.param_groups
    base = [float(group["initial_lr"]) for group in groups if "initial_lr" in group]  # torch's schedulers note it
    if base and not any(base):
        return (
            "its base rate is 0 (initial_lr of every group), and whatever a schedule multiplies it with stays 0",
            "build the optimizer with the rate that the schedule should reach",
        )
    if not drivers:
        if base:
            return (
                f"its base rate is {_rates_shown(base)}, and something that is not among the setup's schedulers sets 0",
                "look for what drives the rate, and give it to the TrainingSetup as a scheduler",
            )
        return (
            "undecided: the optimizer was built with lr=0, or the loop sets its rate to 0; no scheduler of the setup "
            "drives it",
            "give the optimizer its learning rate",
        )
    driver = " and ".join(map(repr, drivers))
    stepped = sum(event.count for _, event in run.scheduler_steps if event.scheduler in drivers)
    known = f"its base rate is {_rates_shown(base)}, but " if base else ""
    if not stepped:
        return (
            f"{known}the first value of {driver} is 0, and it never stepped in these {updates} updates: "
            "it steps once an epoch (the first epoch then trains nothing), or its step() is never called",
            "let the schedule begin above 0 (`(epoch + 1) / warmup`), or step it after each update",
        )
    return (
        f"{known}every value of {driver} that was used is 0. Undecided which: an integer division (`step // warmup` "
        "for `step / warmup`), a warmup that counts epochs but is stepped once an update (or the reverse), "
        "or a schedule that stays at 0 for longer than the run",
        "print the schedule's first values; a warmup from 0 must leave 0 at its first step",
    )


def _rates_shown(rates: list[float]) -> str:
    distinct = sorted(set(rates))
    if len(distinct) > 3:
        return f"{distinct[0]:g} to {distinct[-1]:g}"
    return ", ".join(f"{rate:g}" for rate in distinct)


def update_rounds_away(run: Evidence) -> Iterator[Finding]:
    """See low-precision weights that are too coarse for their updates."""
    for name, steps in run.steps_by_optimizer.items():
        counts: dict[int, list[float]] = {}
        since_first: dict[int, tuple[float, float]] = {}  # sampled elements with a gradient; of those, never moved
        rates: list[float] = []
        counted = []
        until = 0
        for position_in_run, (record, event) in enumerate(steps):
            if event.unchanged is None or not _rates(event):
                continue
            counted.append(record.step)
            until = position_in_run + 1
            rates += _rates(event)
            values = event.unchanged.values()
            for position, index in enumerate(event.low_precision):
                of_this = counts.setdefault(index, [0.0, 0.0])
                of_this[0] += values[COUNTS * position]
                of_this[1] += values[COUNTS * position + 1]
                since_first[index] = values[COUNTS * position + 2], values[COUNTS * position + 3]
        counts = {i: c for i, c in counts.items() if i not in run.ignored}
        graded = sum(c[0] for c in counts.values())
        unchanged = sum(c[1] for c in counts.values())
        if len(counted) < 3 or not graded or unchanged < ROUNDED_AWAY * graded:
            continue
        if _adds_up(since_first, changed=1.0 - unchanged / graded, updates=until) or _compensates(run, name):
            continue
        worst = [i for i, c in counts.items() if c[0] and c[1] >= ROUNDED_AWAY * c[0]]
        share = sum(counts[i][1] for i in worst) / sum(counts[i][0] for i in worst)
        dtypes = sorted({str(run.tensors.entries[i].tensor.dtype).removeprefix("torch.") for i in worst})
        yield Finding(
            rule="update-rounds-away",
            seen=f"{100 * share:.0f} % of the elements of {run.shown(worst)} that had a gradient did not change when "
            f"{name!r} stepped ({len(counted)} updates looked at, {at(counted)}): the updates round to nothing in "
            f"{' and '.join(dtypes)}",
            cause=f"{' and '.join(map(_precision, dtypes))}; an update below half of that is lost, and with a learning "
            f"rate of {_rates_shown(rates)} nearly all of them are",
            fix="keep the weights in float32 and compute in low precision under torch.autocast, or raise the learning "
            "rate",
            steps=telling(counted),
            parameters=run.named(worst),
            evidence={"elements": int(graded), "unchanged": int(unchanged)},
        )


def _precision(dtype: str) -> str:
    steps = {"bfloat16": "2^-8 to 2^-7 (0.4 to 0.8 %)", "float16": "2^-11 to 2^-10 (0.05 to 0.1 %)"}
    return f"{dtype} represents a weight in steps of {steps[dtype]} of its size"


def _adds_up(since_first: dict[int, tuple[float, float]], changed: float, updates: int) -> bool:
    """Tell whether the updates get through over time although few elements change in each of them.

    Rounding to nearest loses the same elements again and again; stochastic rounding and Kahan summation change others
    in each update, so that the elements that moved at all become more with every one.
    """
    graded = sum(counts[0] for counts in since_first.values())
    still = sum(counts[1] for counts in since_first.values())
    if not graded:
        return False
    moved = 1.0 - still / graded
    return moved > max(LEAST_MOVED, 2.2 * changed, ADDS_UP * (1.0 - (1.0 - changed) ** updates))


def _compensates(run: Evidence, name: str) -> bool:
    """Tell whether settings or state of an optimizer, or of one that it wraps, say that rounding is made up for."""
    inner = [stepper.optimizer for stepper in run.facts.recorder.steppers if stepper.name == name]
    said: list[str] = []
    for optimizer in (run.setup.optimizers.get(name), *inner):
        settings = {**getattr(optimizer, "__dict__", {}), **getattr(optimizer, "defaults", {})}
        said += [type(optimizer).__name__, *(str(key) for key, value in settings.items() if value is True)]
        states = getattr(optimizer, "state", {})  # a wrapper need not have any, or keeps something else under this name
        if isinstance(states, Mapping):
            said += [str(key) for state in states.values() if isinstance(state, Mapping) for key in state]
    return any(word in text.lower() for text in said for word in COMPENSATION)


def no_update(run: Evidence) -> Iterator[Finding]:
    """See optimizers that step with gradients and a learning rate, and change nothing."""
    for name, steps in run.steps_by_optimizer.items():
        able = [
            (record, event)
            for record, event in steps
            if event.updates is not None and _rates(event) and total(event.norms.values()) > 0.0
        ]
        still = [
            record.step for record, event in able if event.updates is not None and total(event.updates.values()) == 0.0
        ]
        # float16 and bfloat16 weights that do not move are update-rounds-away's
        if len(still) < 2 or len(still) < len(able) or any(event.low_precision for _, event in able):
            continue
        _record, event = able[-1]
        lr = max(_rates(event))
        norm = total(event.norms.values())
        yield Finding(
            rule="no-update",
            seen=f"{name!r} stepped {several(len(still), 'time')} and changed no parameter ({at(still)}), "
            f"with a gradient norm of {number(norm)} and a learning rate of {number(lr)}",
            cause="undecided: the step is too small for the weights' precision (a learning rate in the wrong unit), "
            f"or the step() of {_kind(run, name)} does not write what it computes to the parameters",
            fix="compare the learning rate with one that trained before; for an optimizer of your own, "
            "check that it writes to the parameters in place",
            steps=telling(still),
            evidence={"updates": len(still), "grad_norm": norm, "lr": lr},
        )


def _kind(run: Evidence, name: str) -> str:
    optimizer = run.setup.optimizers.get(name)
    return name if optimizer is None else type(optimizer).__name__


def frozen_moved(run: Evidence) -> Iterator[Finding]:
    """See parameters that move although they are frozen, and whatever matches ``frozen=``."""
    hit: list[int] = []
    moved: dict[int, float] = {}
    gradient = 0.0
    optimizers: list[str] = []
    for record, event in run.steps:
        if not event.frozen or event.updates is None:
            continue
        by_hand = {i for p in event.portions if p.source == (BY_HAND,) for i in p.parameters}
        # frozen between its backward pass and the step: the gradient is an honest one
        fresh = {i for p in event.portions if p.fresh and p.source[-1:] != (BY_HAND,) for i in p.parameters}
        for index, norm, update in zip(event.graded, event.norms.values(), event.updates.values(), strict=True):
            # a gradient that somebody put there on a parameter without autograd is how zeroth-order methods train
            if (
                index in event.frozen
                and update > 0.0
                and index not in run.ignored
                and index not in fresh
                and not (index in by_hand and norm > 0.0)
            ):
                moved[index] = max(moved.get(index, 0.0), update)
                gradient = max(gradient, norm)
                hit.append(record.step)
                optimizers.append(event.optimizer)
    if moved:
        name = optimizers[0]
        if gradient > 0.0:
            cause = (
                f"{name!r} still holds them, and their .grad still holds a gradient from before they were frozen (norm "
                f"up to {number(gradient)}): it is applied again at each update"
            )
        else:
            cause = (
                f"{name!r} still holds them, and their .grad is a tensor of zeros instead of None: it steps them, "
                f"and {_what_moves(run, name)} moves them"
            )
        yield Finding(
            rule="frozen-moved",
            seen=f"{run.shown(moved)} moved by up to {number(max(moved.values()))} an update although frozen "
            f"(requires_grad=False; {at(hit)})",
            cause=cause,
            fix="set .grad to None when freezing (zero_grad(set_to_none=True)), or leave frozen parameters out of the "
            "optimizer",
            steps=telling(hit),
            parameters=run.named(moved),
            evidence={"largest_update": max(moved.values()), "largest_gradient": gradient},
        )
    yield from _asked_frozen(run)


def _what_moves(run: Evidence, name: str) -> str:
    """Return which settings of an optimizer move a parameter whose gradient is zero."""
    groups = getattr(run.setup.optimizers.get(name), "param_groups", [])
    decays = any(group.get("weight_decay") for group in groups)
    remembers = any(group.get("momentum") or group.get("betas") for group in groups)
    parts = ["weight decay"] * decays + ["momentum from earlier gradients"] * remembers
    return " or ".join(parts) or "its own rule"


def _asked_frozen(run: Evidence) -> Iterator[Finding]:
    asked = run.asked_frozen
    if not asked:
        return
    facts = run.facts
    names = sorted(facts.start.names() | facts.end.names())
    movers: dict[str, list[str]] = {}  # name -> the optimizers whose steps moved it
    for _, event in run.steps:
        if event.updates is not None:
            for index, update in zip(event.graded, event.updates.values(), strict=True):
                by = movers.setdefault(run.tensors.name(index), [])
                if update > 0.0 and event.optimizer not in by:
                    by.append(event.optimizer)
    moved = facts.end.moved_since(facts.start) | {name for name, by in movers.items() if by}
    broken = [name for name in names if name in asked & moved]
    if not broken:
        return
    parameters = {entry.name for entry in run.tensors.entries}
    buffers = [name for name in broken if name not in parameters]
    stepped = [name for name in broken if movers.get(name)]
    others = [name for name in broken if name in parameters and not movers.get(name)]
    causes: list[str] = []
    fixes: list[str] = []
    if stepped:
        optimizers = sorted({optimizer for name in stepped for optimizer in movers[name]})
        moves = f"{' and '.join(map(repr, optimizers))} moved {listed(stepped)}"
        # `module.requires_grad = False`, which freezes nothing
        meant = [note for note in frozen_parameter(run) if note.evidence.get("attribute") is False]
        why = [note for note in meant if not set(stepped).isdisjoint(note.parameters)]
        causes.append(moves + (f": {' and '.join(note.cause for note in why)}" if why else ""))
        fixes += [note.fix for note in why]
        if not set(stepped) <= {name for note in why for name in note.parameters}:
            fixes.append("leave what must not move out of the optimizer, and freeze it (requires_grad_(False))")
    if others:
        causes.append(f"something other than a step that was tracked changed {listed(others)}: the loop itself")
        fixes.append("look for what writes to them, such as an average or a loaded checkpoint")
    if buffers:
        causes.append(f"a forward pass (BatchNorm in training mode does), or the loop itself, wrote {listed(buffers)}")
        fixes.append("put the frozen modules in eval mode (module.eval()) after each model.train()")
    yield Finding(
        rule="frozen-moved",
        seen=f"{listed(broken)} changed during the run although frozen={list(run.options.frozen)} asks for no change",
        cause="; ".join(causes),
        fix="; ".join(fixes),
        parameters=tuple(broken),
        evidence={"changed": len(broken)},
    )


def _rates(event: OptimizerStep) -> list[float]:
    """Return the learning rates that are not 0."""
    return [lr for lr in map(read, event.lrs) if lr != 0.0]
