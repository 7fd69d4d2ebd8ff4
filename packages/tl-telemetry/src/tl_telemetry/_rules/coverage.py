"""Rules about which optimizer updates which parameter, judged with what the run showed."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from tl_core import Finding
from tl_coverage import check_optimizer_coverage
from tl_telemetry._evidence import Evidence, at, several
from tl_telemetry._forward import OPAQUE, RAN_WITH_GRAD, RAN_WITHOUT_GRAD
from tl_telemetry._rule_ids import COVERAGE
from tl_telemetry._tensors import loose_tensors, other_modules

# What a run judges by what happens, not by what the optimizers hold.
JUDGED_BY_STEPS = ("several-optimizers", "foreign-tensor")
# A loop that builds an optimizer in each step has very many of them.
MOST_NAMED = 3


def coverage(run: Evidence) -> Iterator[Finding]:
    """See what ``tl_coverage`` finds at the end of the run, with every optimizer that stepped."""
    template = templates(run)
    left_out = run.ignored | trained_otherwise(run) | run_without_gradient(run) | template
    report = check_optimizer_coverage(run.setup.model, _optimizers(run), ignore=_escaped(run, left_out))
    foreign = [seen for f in report.findings if f.rule == "foreign-tensor" and (seen := _without_gradient(run, f))]
    told = {name for finding in foreign for name in finding.parameters}  # each names what is missing too
    for finding in report.findings:
        if finding.rule in JUDGED_BY_STEPS or finding.rule not in COVERAGE:
            continue
        if "num_unregistered" in finding.evidence:
            continue  # the run shows whether they get gradients: unregistered judges that
        if finding.rule == "uncovered-parameter" and told >= set(finding.parameters):
            continue
        yield _since(run, _decided(run, finding))
    yield from foreign
    if template:
        yield Finding(
            "not-judged",
            f"{run.shown(template)} got no gradient and are in no optimizer; tensors of the same shapes "
            "(or stacks of these), which are no parameters, got one and were stepped: the model was called with these "
            "in place of its own (torch.func.functional_call, vmap), which were only a template and were not judged",
            "",
            "",
            parameters=run.named(template),
        )


def _decided(run: Evidence, finding: Finding) -> Finding:
    """Give the cause of a copy in an optimizer, where gradients reached the model's own parameters and not the copy."""
    names = finding.evidence.get("optimizers")
    if finding.rule != "other-copy" or not isinstance(names, tuple):
        return finding
    held = {i for s in run.facts.recorder.steppers if s.name in names for i in s.indices}
    own = set(run.tensors.names(run.filled)) & set(finding.parameters)
    if not own or not held.isdisjoint(run.filled):
        return finding
    return replace(
        finding,
        seen=f"{finding.seen}; in this run gradients reached {len(own)} of these, and nothing that the optimizer holds",
        cause="the optimizer was built for another copy (before a deepcopy, before the model or the part was built "
        "again, or before load_state_dict(assign=True) put new Parameters in)",
        fix="build the optimizer from the parameters of the model that is trained, after its last copy",
    )


def templates(run: Evidence) -> frozenset[int]:
    """Return the model's parameters that other tensors, which an optimizer steps, stood in for in every call.

    Gradients tell: these tensors get them, and of the parameters that are in no optimizer none does.
    """
    missing = frozenset(i for i in run.trainable if i not in run.held)
    if not missing or not missing.isdisjoint(run.filled | run.graded | run.moved):
        return frozenset()
    places: Counter[tuple[int, ...]] = Counter()
    for i in run.graded:
        entry = run.tensors.entries[i]
        # the parameters of another copy of the model are Parameters; what functional_call is given mostly is not
        if not entry.in_model and type(entry.tensor) is not nn.Parameter and entry.tensor.dim():
            places[tuple(entry.tensor.shape)] += 1
            places[tuple(entry.tensor.shape[1:])] += entry.tensor.shape[0]
    wanted = Counter(tuple(run.tensors.entries[i].tensor.shape) for i in missing)
    return missing if all(places[shape] >= count for shape, count in wanted.items()) else frozenset()


def _since(run: Evidence, finding: Finding) -> Finding:
    """Add the step in which the finding's parameters became trainable, or were first used, if that was in the run."""
    became = {run.tensors.name(i): step for i, step in run.facts.recorder.trainable.since.items()}
    new: dict[str, int] = {}
    for record, event in run.backwards.values():
        for i in event.filled:
            if i >= run.facts.num_start:
                new.setdefault(run.tensors.name(i), record.step)
    for what, known in (("trainable", became), ("in use", new)):
        since = sorted({known[name] for name in finding.parameters if name in known})
        if since:
            return replace(finding, seen=f"{finding.seen} ({what} since {at(since)} of this run)", steps=tuple(since))
    return finding


def _without_gradient(run: Evidence, finding: Finding) -> Finding | None:
    """Say how many of an optimizer's foreign tensors got no gradient; None when all of them got one."""
    stepper = next((s for s in run.facts.recorder.steppers if s.name == finding.evidence["optimizer"]), None)
    foreign = [i for i in stepper.indices if not run.tensors.entries[i].in_model] if stepper else []
    without = [i for i in foreign if i not in run.filled | run.graded]
    if not without:
        return None
    if len(foreign) == 1:
        which = "the tensor that it holds got no gradient"
    elif len(without) == len(foreign):
        which = f"none of the {len(foreign)} tensors got a gradient"
    else:
        which = f"{len(without)} of the {len(foreign)} tensors got no gradient"
    return replace(
        finding,
        seen=f"{finding.seen}; {which} in this run",
        cause="undecided: what it holds is a copy of what is missing, or was a part of the model that has been "
        "replaced",
        fix="build the optimizer from the finished model's own parameters",
        evidence={**finding.evidence, "without_gradient": len(without)},
    )


def unregistered(run: Evidence) -> Iterator[Finding]:
    """See what gets gradients inside of the model without being a part of it: modules, and single tensors."""
    yield from _loose(run)
    tensors = run.tensors
    found = [i for i in tensors.unregistered if i in run.filled and i not in run.held | run.moved]
    if not found:
        return
    kinds = sorted({type(tensors.unregistered[i]).__name__ for i in found})
    yield Finding(
        rule="uncovered-parameter",
        seen=f"{run.shown(found)} got gradients and are in no optimizer: these modules ({', '.join(kinds)}) ran inside "
        "of the model, but are not registered in it, so that model.parameters() does not give their parameters",
        cause="they are kept in a plain list, tuple or dict (or made in the forward pass): torch registers only "
        "modules that are attributes, or in an nn.ModuleList, nn.ModuleDict or nn.Sequential",
        fix="keep them in an nn.ModuleList or nn.ModuleDict, and build the optimizer afterwards; freeze them "
        "(requires_grad_(False)) if they are not meant to train",
        parameters=run.named(found),
        evidence={"tensors": len(found)},
    )


def _loose(run: Evidence) -> Iterator[Finding]:
    """See tensors that the modules keep from start to end, that get gradients, and that nothing moves."""
    tensors = run.tensors
    there = set(map(id, loose_tensors(run.setup).values()))
    known = run.held | run.moved | run.ignored
    found = [
        i
        for i in sorted(tensors.loose & run.filled - known)
        if i < run.facts.num_start and id(tensors.entries[i].tensor) in there
    ]
    passes = sum(not set(found).isdisjoint(event.filled) for _, event in run.backwards.values())
    if passes < 2:
        return
    plain = any(not isinstance(tensors.entries[i].tensor, nn.Parameter) for i in found)
    what = "plain tensors with requires_grad, or Parameters in a plain list or dict"
    if len(found) == 1:
        what = "a plain tensor with requires_grad" if plain else "a Parameter in a plain list, tuple or dict"
    elif not plain:
        what = "Parameters in a plain list, tuple or dict"
    one = len(found) == 1
    yield Finding(
        rule="uncovered-parameter",
        seen=f"{run.shown(found)} got gradients from {several(passes, 'backward pass')}, without being in an "
        f"optimizer, and nothing moved {'it' if one else 'them'}: {what}, which parameters() does not give",
        cause="torch registers only an nn.Parameter that is an attribute of a module, or in an nn.ParameterList or "
        "nn.ParameterDict",
        fix="make what is meant to train an nn.Parameter that is an attribute, or several an nn.ParameterList or "
        "nn.ParameterDict, and build the optimizer afterwards; requires_grad_(False) says that it is not meant to "
        "train",
        parameters=run.named(found),
        evidence={"tensors": len(found), "backward_passes": passes},
    )


def beside_model(run: Evidence) -> Iterator[Finding]:
    """See criteria with weights of their own that get gradients and that no optimizer holds."""
    if run.filled.isdisjoint(run.held):
        return  # loss-not-connected speaks of losses that reach nothing that is trained
    entries = run.tensors.entries
    for name, module in other_modules(run.setup):
        mine = set(map(id, module.parameters()))
        left = [i for i in sorted(run.filled - run.held - run.moved - run.ignored) if id(entries[i].tensor) in mine]
        if not left:
            continue
        passes = sum(not set(left).isdisjoint(event.filled) for _, event in run.backwards.values())
        seen = (
            f"{run.shown(left)} got gradients from {several(passes, 'backward pass')}, without being in an optimizer, "
            f"and nothing moved them. {name} ({type(module).__name__}) is beside the model"
        )
        freeze = "freeze them with requires_grad_(False), which also saves their gradients"
        # A network whose features a loss compares is built of layers, and mostly in eval mode. A module that has
        # nothing but weights of its own, or is one layer (the class weights of a margin loss), has them to be trained.
        layers = any(entries[i].owner is not module for i in left)
        if layers or not module.training:
            yield Finding(
                "not-judged",
                f"{seen}: whether it is meant to train could not be judged",
                "",
                f"give its parameters to an optimizer, or {freeze}",
                parameters=run.named(left),
            )
            continue
        yield Finding(
            rule="uncovered-parameter",
            seen=f"{seen}, and has weights of its own",
            cause="the optimizer was built from the model's parameters, to which a criterion's do not belong",
            fix=f"build it from both ([*model.parameters(), *{name}.parameters()]); if they are not meant to train, "
            f"{freeze}",
            parameters=run.named(left),
            evidence={"tensors": len(left), "backward_passes": passes},
        )


def frozen_parameter(run: Evidence) -> Iterator[Finding]:
    """Note modules whose ``requires_grad`` was set as a plain attribute, which unfreezes nothing."""
    report = check_optimizer_coverage(run.setup.model, _optimizers(run), ignore=_escaped(run, run.ignored))
    yield from (note for note in report.notes if note.rule == "frozen-parameter")


def several_optimizers(run: Evidence) -> Iterator[Finding]:
    """Note parameters that several optimizers step in turns."""
    steppers: dict[int, set[str]] = {}
    for _, event in run.steps:
        for i in event.graded:
            steppers.setdefault(i, set()).add(event.optimizer)
    shared: dict[tuple[str, ...], list[int]] = {}
    for i, names in steppers.items():
        if len(names) > 1 and i not in run.ignored:
            shared.setdefault(tuple(sorted(names)), []).append(i)
    for optimizers, indices in shared.items():
        counts = " and ".join(str(_num_steps(run, name, indices)) for name in optimizers)
        who = " and ".join(map(repr, optimizers))
        if len(optimizers) > MOST_NAMED:
            counts = str(sum(_num_steps(run, name, indices) for name in optimizers))
            who = f"{len(optimizers)} optimizers ({', '.join(map(repr, optimizers[:MOST_NAMED]))}, ...)"
        yield Finding(
            rule="several-optimizers",
            seen=f"{who} stepped {run.shown(indices)} in turns, each with gradients of its own ({counts} updates)",
            cause="each of these optimizers holds these parameters, and keeps moments and momentum that know nothing "
            "of the other updates",
            fix="nothing, if the turns are meant; else give each parameter to one optimizer",
            parameters=run.named(indices),
            evidence={"optimizers": optimizers},
        )


def _num_steps(run: Evidence, optimizer: str, indices: list[int]) -> int:
    return sum(not set(indices).isdisjoint(event.graded) for _, event in run.steps_by_optimizer[optimizer])


def _optimizers(run: Evidence) -> dict[str, Any]:
    optimizers = dict(run.setup.optimizers)
    held = {id(optimizer) for optimizer in optimizers.values()}
    for stepper in run.facts.recorder.steppers:
        # one that steps under a setup optimizer's name is its inner or its replaced optimizer
        optimizer = stepper.optimizer
        if optimizer is None or not stepper.count or id(optimizer) in held or stepper.name in optimizers:
            continue
        optimizers[stepper.name] = optimizer
    return optimizers


def _escaped(run: Evidence, indices: Iterable[int]) -> list[str]:
    return [glob.escape(run.tensors.name(i)) for i in indices if run.tensors.entries[i].in_model]


def trained_otherwise(run: Evidence) -> frozenset[int]:
    """Return parameters in no optimizer that the loop moves by hand: a target network, ``p -= lr * p.grad``."""
    # a name moves too when its layer is replaced: only the tensors of the run's start are meant
    return frozenset(i for i in run.trainable if i not in run.held and i in run.moved and i < run.facts.num_start)


def run_without_gradient(run: Evidence) -> frozenset[int]:
    """Return parameters in no optimizer whose module only ran under ``no_grad``, in a model that trains otherwise."""
    if run.graded.isdisjoint(run.trainable):
        return frozenset()
    flags = run.facts.recorder.forward.flags
    known = run.held | run.filled | run.moved
    ran = RAN_WITHOUT_GRAD | RAN_WITH_GRAD | OPAQUE
    return frozenset(
        i
        for i in run.trainable
        if i not in known and flags.get(id(run.tensors.entries[i].owner), 0) & ran == RAN_WITHOUT_GRAD
    )
