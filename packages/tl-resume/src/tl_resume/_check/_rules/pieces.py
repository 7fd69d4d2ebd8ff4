"""What the checkpoint must carry: weights, optimizers, schedulers, the scaler, setup.state, gradients, modes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tl_core import Finding, group_names
from tl_resume._check._evidence import Evidence
from tl_resume._check._origin import Origin
from tl_resume._check._words import below, established, listed_names, module_names, one, tensor_names, title, values
from tl_telemetry import Piece, StateDifference

_RULE = {
    "weights": "model-not-restored",
    "trainable": "trainable-not-restored",
    "optimizer state": "optimizer-state-not-restored",
    "optimizer attributes": "optimizer-state-not-restored",
    "param groups": "param-groups-not-restored",
    "scheduler": "scheduler-not-restored",
    "scaler": "scaler-not-restored",
    "state": "state-not-restored",
    "gradients": "gradients-not-restored",
    "modes": "modes-not-restored",
}
_CONSEQUENCE = {
    "optimizer state": "momentum, Adam's moments and step counts restart",
    "param groups": "learning rate, weight decay and what else a loop changes on the way restart",
    "scheduler": "the schedule restarts",
    "scaler": "the loss scale and its growth counter restart",
    "state": "it restarts from what make_setup() gives it",
    "trainable": "state_dict() carries values, not requires_grad: parameters are frozen or trained as in the beginning",
    "gradients": "the micro-batches that were accumulated so far are lost to the next update",
    "modes": "dropout and batch norm act otherwise",
}
_FIX = {
    "weights": "save model.state_dict() and load it with model.load_state_dict(), strict",
    "trainable": "freeze and unfreeze in load() as the run had done, for example from the restored step",
    "optimizer state": "save optimizer.state_dict() and load it with optimizer.load_state_dict(), once that is built",
    "optimizer attributes": "carry these attributes in the optimizer's state_dict()",
    "param groups": "load the whole optimizer.state_dict(), its param_groups included, and change nothing after it",
    "scheduler": "save scheduler.state_dict() and load it with scheduler.load_state_dict() after the optimizer's",
    "scaler": "save scaler.state_dict() and load it with scaler.load_state_dict()",
    "state": "save its state_dict() (or its content) and restore it in load()",
    "gradients": "save only after an update, or save the .grad of the parameters too (save_training_state does)",
    "modes": "save and restore module.training of each module, or call model.train() at the end of load()",
}


def order_varies(evidence: Evidence) -> Iterator[Finding]:
    """``make_setup`` gives an optimizer its parameters in another order in each call, and load() goes by position."""
    saved = evidence.save.run.order
    for other in [evidence.full.order, *evidence.resumed.orders]:
        for name, groups in saved.items():
            if other.get(name, groups) != groups and Piece("optimizer state", name) in evidence.by_piece:
                first = [n for group in groups for n in group]
                second = [n for group in other[name] for n in group]
                at = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), 0)
                yield Finding(
                    "parameter-order-varies",
                    f"make_setup() gives optimizer {name!r} its parameters in another order from call to call: "
                    f"place {at} holds {_at(first, at)} in the run that saves and {_at(second, at)} in another setup; "
                    f"{_differing(evidence, Piece('optimizer state', name))}",
                    "optimizer.load_state_dict() goes by position, so that each parameter gets the state of another "
                    "one; a set (or anything that is ordered by id or hash) makes such an order",
                    "build the parameter list in a fixed order: model.parameters(), or sorted by name",
                    evidence={"is_cause": True, "optimizer": name},
                )
                return


def optimizer_left_behind(evidence: Evidence) -> Iterator[Finding]:
    """``load`` replaced the model, and an optimizer goes on with the tensors of the old one."""
    for name, strangers in evidence.left_behind.items():
        total = sum(map(len, evidence.resumed.loaded.order[name]))
        yield Finding(
            "optimizer-of-other-model",
            f"after loading, {len(strangers)} of {total} tensors in optimizer {name!r} are no longer in the setup "
            f"(when saved, they were {group_names(strangers, evidence.weight_names)}): its steps go nowhere",
            "load() put another model, or other tensors, into the setup, and the optimizer still holds the old ones",
            "copy into the tensors that are there (model.load_state_dict(...), tensor.copy_(...)), or build the "
            "optimizer anew for the new ones and then load its state",
            steps=(evidence.resume_at,),
            evidence={"is_cause": True, "optimizer": name},
        )


def _at(names: Sequence[str], place: int) -> str:
    return names[place] if place < len(names) else "nothing"


def not_restored(evidence: Evidence) -> Iterator[Finding]:
    """A piece of the training state is another one after loading, and stays so or makes the runs part."""
    found: list[Finding] = []
    reordered = {f.evidence["optimizer"] for f in order_varies(evidence)}
    for piece, differences in evidence.by_piece.items():
        rule = _RULE.get(piece.kind)
        cause = evidence.is_cause(piece)
        if rule is None or (piece.kind == "optimizer state" and piece.name in (*reordered, *evidence.left_behind)):
            continue
        if not cause:
            if piece.kind == "gradients":
                continue
            differences = [d for d in differences if _stays(evidence, d)]
        if differences:
            found.append(_finding(evidence, piece, rule, differences, cause))
    yield from _merged(found)


_ONE_MISTAKE = ("checkpoint-by-reference", "loaded-in-lower-precision", "restored-then-overwritten")


def _merged(found: list[Finding]) -> Iterator[Finding]:
    """Make one finding of several pieces that suffered from one mistake."""
    for rule in dict.fromkeys(finding.rule for finding in found):
        same = [finding for finding in found if finding.rule == rule]
        first = same[0]
        if rule not in _ONE_MISTAKE or len(same) == 1:
            yield from same
            continue
        heads = [str(finding.evidence["differs"]) for finding in same]
        yield replace(
            first,
            seen="; ".join(heads) + first.seen.removeprefix(heads[0]),
            cause=first.cause.replace(str(first.evidence["piece"]), listed_names([f.evidence["piece"] for f in same])),
            parameters=tuple(dict.fromkeys(name for finding in same for name in finding.parameters)),
        )


def _stays(evidence: Evidence, difference: StateDifference) -> bool:
    """Tell whether a difference is one at the end too, and one that a repetition of the run does not show."""
    if difference.piece.kind == "scheduler" and difference.path[-1:] == ("_step_count",):
        return False  # torch counts the calls of step() to warn of a wrong order, and goes by last_epoch
    return evidence.remains(difference) and (difference.piece, difference.path) not in evidence.unsteady


def _finding(
    evidence: Evidence, piece: Piece, rule: str, differences: list[StateDifference], is_cause: bool
) -> Finding:
    rule, cause, fix = _explained(evidence, piece, rule, differences)
    seen, effect = _differing(evidence, piece), _effect(evidence, piece, is_cause)
    return Finding(
        rule,
        f"{seen}{effect}",
        cause,
        fix,
        steps=(evidence.diverged.step,) if evidence.diverged is not None else (evidence.resume_at,),
        parameters=tuple(dict.fromkeys(str(d.path[0]) for d in differences if piece.kind == "weights")),
        evidence={"is_cause": is_cause, "piece": title(piece), "differs": seen, "effect": effect},
    )


def _explained(evidence: Evidence, piece: Piece, rule: str, differences: list[StateDifference]) -> tuple[str, str, str]:
    """Return the rule, the cause and the fix: from how load() worked, from where the values come, or in general."""
    come = evidence.origin(piece)
    restores = [r for r in evidence.resumed.restored if piece in r.pieces]
    if any(piece in r.right for r in restores):
        return (
            "restored-then-overwritten",
            f"{title(piece)}: as saved when load_state_dict() returned, and changed by load() after that"
            f"{_overwritten_by(evidence, piece)}",
            "build everything first, then restore: model, optimizer, scheduler, and change nothing after that",
        )
    if come is not None and come.kind == "rounded":
        return (
            "loaded-in-lower-precision",
            f"the loaded values are the saved ones rounded to {come.dtype}: the checkpoint was written in {come.dtype}",
            "save the training state in the precision that it has; write a smaller copy for inference beside it",
        )
    if come is not None and come.kind == "end":
        return (
            "checkpoint-by-reference",
            "the loaded values are those of the end of the run that saved: the checkpoint refers to the live tensors, "
            "which training went on to change (state_dict() does not copy)",
            "write the file before save() returns, or copy: copy.deepcopy(model.state_dict()), tensor.detach().clone()",
        )
    if come is not None and come.kind == "elsewhere" and come.source is not None:
        return _from_elsewhere(piece, rule, come)
    if any(r.missing or r.unexpected for r in restores):
        return rule, *_not_strict(restores[-1].missing, restores[-1].unexpected)
    fix = _FIX[piece.kind]
    if piece.kind == "weights" and _not_in_state_dict(evidence, piece):
        fix = "register the buffer with persistent=True, or save and restore it beside the state_dict()"
    return rule, _generic_cause(evidence, piece, come), fix


def _differing(evidence: Evidence, piece: Piece) -> str:
    """Say how a piece differs."""
    differences = evidence.by_piece[piece]
    if piece.kind == "weights":
        names = tensor_names(differences, evidence.weight_names)
        return f"{names} differ{'s' if len(differences) == 1 else ''} after loading ({one(differences[0])})"
    if piece.kind == "optimizer state":
        lost = [d for d in differences if len(d.path) == 1 and d.b is None]
        if lost:
            names = tensor_names(lost, [n for group in evidence.save.run.order.get(piece.name, []) for n in group])
            return f"optimizer {piece.name!r} has no state for {names} after loading, and had it when saved"
        return f"{title(piece)} differs after loading: {values(differences, name=below)}"
    if piece.kind == "gradients":
        lost = [d for d in differences if d.b is None]
        names = tensor_names(lost or differences, evidence.weight_names)
        return f"the gradients of {names}, accumulated before step {evidence.resume_at}, are not there after loading"
    if piece.kind == "trainable":
        parts = []
        for trained, verb in ((True, "frozen"), (False, "trainable")):
            if changed := [d for d in differences if d.plain_a is trained]:
                names = tensor_names(changed, evidence.weight_names)
                parts.append(f"{names} {_are(changed)} {verb} after loading (requires_grad={not trained})")
        return " and ".join(parts) + ", other than when saved"
    if piece.kind == "state" and len(differences) == 1:
        return values(differences)
    if piece.kind == "modes":
        parts = []
        for mode, other in ((True, "eval"), (False, "training")):
            switched = [d for d in differences if d.plain_a is mode]
            if switched:
                parts.append(f"{module_names(switched)} {_are(switched)} in {other} mode after loading")
        return " and ".join(parts) + ", other than when saved"
    verb = "differ" if piece.kind == "param groups" else "differs"
    return f"{title(piece)} {verb} after loading: {values(differences, name=below)}"


def _are(several: Sequence[object]) -> str:
    return "is" if len(several) == 1 else "are"


def _effect(evidence: Evidence, piece: Piece, is_cause: bool) -> str:
    found = evidence.diverged
    if found is None:
        return "; the losses agree so far" if evidence.repeatable else ""
    return established(evidence, piece) if is_cause else ""


def _generic_cause(evidence: Evidence, piece: Piece, come: Origin | None) -> str:
    consequence = _CONSEQUENCE.get(piece.kind)
    tail = f": {consequence}" if consequence else ""
    if piece.kind == "weights" and (hidden := _not_in_state_dict(evidence, piece)):
        return f"state_dict() leaves {hidden} out (persistent=False): the checkpoint lacks what training made of it"
    if piece.kind != "trainable" and ((come is not None and come.kind == "fresh") or evidence.as_built(piece)):
        tail = "" if piece.kind == "state" else tail
        return f"load() left {_it(piece)} as make_setup() had built {_it(piece)}{tail}"
    restored = any(piece in r.pieces for r in evidence.resumed.restored)
    if piece.kind == "trainable":
        return tail.removeprefix(": ")
    if piece.kind in ("optimizer state", "param groups", "scheduler", "scaler", "state") and not restored:
        return f"it is not in the checkpoint, or load() does not restore it{tail}"
    if piece.kind == "gradients" and all(d.b is None for d in evidence.by_piece[piece]):
        return f"they are not in the checkpoint, or load() does not restore them{tail}"
    return f"load() gave {_it(piece)} other values than when saved{tail}"


def _it(piece: Piece) -> str:
    return "it" if piece.kind in ("optimizer state", "scheduler", "scaler", "state") else "them"


def _not_in_state_dict(evidence: Evidence, piece: Piece) -> str:
    names = [str(difference.path[0]) for difference in evidence.by_piece[piece]]
    left_out = evidence.resumed.run.not_in_state_dict
    return tensor_names(evidence.by_piece[piece], evidence.weight_names) if left_out.issuperset(names) else ""


def _overwritten_by(evidence: Evidence, piece: Piece) -> str:
    """Say what may have written over a piece, where its kind tells."""
    if piece.kind == "param groups" and any(p.kind == "scheduler" for p in evidence.save.saved.pieces):
        return "; building a scheduler writes lr and initial_lr of its optimizer"
    if piece.kind == "scheduler":
        epochs = [(d.plain_a, d.plain_b) for d in evidence.by_piece[piece] if d.path[-1:] == ("last_epoch",)]
        if any(isinstance(a, int) and b == a + 1 for a, b in epochs):
            return ": it was stepped once more"
    return ""


def _from_elsewhere(piece: Piece, rule: str, come: Origin) -> tuple[str, str, str]:
    assert come.source is not None
    if come.source == piece:
        shown = "; ".join(f"{at} got that of {source}" for at, source in come.moves[:3])
        return (
            "optimizer-state-misplaced" if piece.kind == "optimizer state" else rule,
            f"the state went to the wrong parameter: {shown}",
            "restore it in the order in which it was saved: optimizers go by the position of their parameters",
        )
    if piece.kind == come.source.kind == "optimizer state":
        return (
            "optimizer-state-misplaced",
            f"the loaded state is the one that optimizer {come.source.name!r} had when saved",
            "save and load the optimizers by name: {name: optimizer.state_dict() for name, optimizer in ...}",
        )
    if piece.kind == "weights":
        return (
            "other-weights-loaded",
            f"the loaded weights are the ones that {title(come.source)} held when saved",
            "save the model's own weights, and load them and what else holds weights each into its own place",
        )
    return rule, f"the loaded values are the ones that {title(come.source)} held when saved", _FIX[piece.kind]


def _first(keys: Sequence[str]) -> str:
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")


def _not_strict(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str]:
    parts = [
        f"{len(keys)} {'key' if len(keys) == 1 else 'keys'} {word} ({_first(keys)})"
        for word, keys in (("missing", missing), ("unexpected", unexpected))
        if keys
    ]
    return (
        f"load_state_dict(strict=False) passed over what does not fit: {' and '.join(parts)}",
        "load with strict=True, and mend the names: a wrapper (DataParallel, torch.compile) puts a prefix before them",
    )
