"""Missing parameters whose memory the optimizers hold under another tensor: aliases and flat buffers."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tl_core import Finding
from tl_coverage._explained import CALLED_WITH, Explained
from tl_coverage._inventory import Entry, Inventory, count, parametrized_weight, shape_of, shapes_text, verb
from tl_coverage._spans import Span, inside, overlap, same_memory, span_of

Held = list[tuple[Entry, Span]]


def explain_by_memory(inventory: Inventory, explained: Explained) -> None:
    """Settle the missing parameters that lie in the memory of tensors which an optimizer holds.

    An alias (the same shape in the same place) without a gradient is a finding. What is left is a matter of the
    gradients: a parameter may be a view of a flat buffer, as with ZeRO and FSDP, and its gradient a view of the
    buffer's.
    """
    held = [(entry, span) for entry in inventory.foreign if (span := span_of("", entry.tensor)) is not None]
    holders = {name: _holders(inventory.missing[name], held) for name in explained.open_names(inventory)}
    # weight_norm puts one of two new parameters into the memory of the old one: then it is the cause, not the memory.
    split = {parametrized_weight(name, inventory.named) for name, entries in holders.items() if not entries} - {None}
    kinds: dict[str, dict[str, list[Entry]]] = {"detached": {}, "wrapped": {}, "flat": {}}
    for name, entries in holders.items():
        if entries and parametrized_weight(name, inventory.named) not in split:
            aliases = [entry for entry in _aliases(inventory.missing[name], held) if entry.tensor.grad is None]
            kind = "flat" if not aliases else "wrapped" if aliases[0].tensor.requires_grad else "detached"
            kinds[kind][name] = aliases or entries
    if kinds["detached"]:
        _detached(inventory, explained, kinds["detached"], held)
    if kinds["wrapped"]:
        _wrapped(inventory, explained, kinds["wrapped"])
    if kinds["flat"]:
        _flat(inventory, explained, kinds["flat"])
    _besides(inventory, explained, held)


def _detached(inventory: Inventory, explained: Explained, found: dict[str, list[Entry]], held: Held) -> None:
    theirs = _distinct(found.values())
    # What gave the aliases (a state_dict) gave those of the rest of the model too.
    rest = [entry for entry in _without_gradient(inventory, held) if entry not in theirs]
    explained.claim(found, [*theirs, *rest])
    more = f", and {len(rest)} of other parameters or buffers of the model" if rest else ""
    explained.findings.append(
        _alias_finding(
            inventory,
            found,
            f"with requires_grad False and no gradient){more}",
            "the optimizer was given detached aliases, as model.state_dict().values(), p.data and p.detach() are: "
            "backward() fills the gradients of the Parameters, never those of their aliases, and an optimizer leaves "
            "out what has no gradient",
            "build the optimizer from the Parameters themselves, as model.parameters() gives them",
        )
    )


def _wrapped(inventory: Inventory, explained: Explained, found: dict[str, list[Entry]]) -> None:
    explained.claim(found, _distinct(found.values()))
    explained.findings.append(
        _alias_finding(
            inventory,
            found,
            "with requires_grad True and no gradient)",
            "undecided: the Parameters were wrapped anew, as by nn.Parameter(p.data), for the optimizer or in the "
            f"model after it was built, or the model is called with these tensors {CALLED_WITH}",
            "build the optimizer from the Parameters themselves, as model.parameters() gives them, after the last "
            "change to the model; if it is called with these tensors on purpose, name its own parameters in ignore=",
        )
    )


def _alias_finding(inventory: Inventory, found: dict[str, list[Entry]], which: str, cause: str, fix: str) -> Finding:
    entries = _distinct(found.values())
    optimizers = dict.fromkeys(entry.optimizer for entry in entries)
    total = len(inventory.trainable)
    return Finding(
        "uncovered-parameter",
        f"{len(found)} of {count(total, 'trainable parameter')} {verb(len(found), 'is', 'are')} in no optimizer: "
        f"{inventory.group(found)}; {inventory.labels(optimizers)} {verb(len(optimizers), 'holds', 'hold')} "
        f"{len(entries)} {verb(len(entries), 'alias', 'aliases')} of {verb(len(found), 'it', 'them')} instead "
        f"({verb(len(entries), 'another tensor', 'other tensors')} in the same memory, {which}",
        cause,
        fix,
        parameters=tuple(found),
        evidence={"num_uncovered": len(found), "num_trainable": total, "num_aliases": len(entries)},
    )


def _flat(inventory: Inventory, explained: Explained, found: dict[str, list[Entry]]) -> None:
    entries = _distinct(found.values())
    explained.claim(found, entries)
    optimizers = dict.fromkeys(entry.optimizer for entry in entries)
    explained.notes.append(
        Finding(
            "not-judged",
            f"{inventory.group(found)} {verb(len(found), 'is', 'are')} in no optimizer, but "
            f"{verb(len(found), 'its', 'their')} memory lies inside of {count(len(entries), 'tensor')} that "
            f"{inventory.labels(optimizers)} {verb(len(optimizers), 'holds', 'hold')} "
            f"({shapes_text(entry.tensor for entry in entries)}), as with flat buffers: whether the gradients reach "
            f"{verb(len(entries), 'it', 'them')} can only be seen in a run",
            "",
            "",
            parameters=tuple(found),
        )
    )


def _besides(inventory: Inventory, explained: Explained, held: Held) -> None:
    """Note what a list of more than parameters gave an optimizer, so that nobody looks for another origin."""
    by_optimizer: dict[str, list[Entry]] = {}
    for entry in _without_gradient(inventory, held):
        if id(entry.tensor) not in explained.claimed:
            by_optimizer.setdefault(entry.optimizer, []).append(entry)
    for optimizer, entries in by_optimizer.items():
        explained.claim([], entries)
        explained.notes.append(
            Finding(
                "foreign-tensor",
                f"{inventory.label(optimizer)} holds {count(len(entries), 'tensor')} that "
                f"{verb(len(entries), 'is a buffer or an alias', 'are buffers or aliases')} of the model's own "
                f"tensors, with requires_grad False and no gradient ({shapes_text(entry.tensor for entry in entries)})",
                "it was given more than parameters, as model.buffers() and model.state_dict() hold; an optimizer "
                "leaves out what has no gradient",
                "give it model.parameters() only",
                evidence={"optimizer": optimizer, "shapes": tuple(shape_of(entry.tensor) for entry in entries)},
            )
        )


def _without_gradient(inventory: Inventory, held: Held) -> list[Entry]:
    """List the held tensors without gradients that are buffers, or aliases of a buffer or a parameter that is held."""
    dead = [(entry, span) for entry, span in held if not entry.tensor.requires_grad and entry.tensor.grad is None]
    own = [parameter for name, parameter in inventory.named.items() if name not in inventory.missing]
    return _distinct(_aliases(tensor, dead) for tensor in [*own, *inventory.model.buffers()])


def _holders(tensor: torch.Tensor, held: Held) -> list[Entry]:
    """List the tensors that hold a tensor's memory together; none if they do not hold all of it."""
    span = span_of("", tensor)
    if span is None:
        return []
    near = [(entry, other) for entry, other in held if other.device == span.device and overlap(span, other)]
    return [entry for entry, _ in near] if inside(span, [other for _, other in near]) else []


def _aliases(tensor: torch.Tensor, held: Held) -> list[Entry]:
    """List the tensors that are the same memory in the same shape."""
    span = span_of("", tensor)
    if span is None:
        return []
    return [entry for entry, other in held if other.device == span.device and same_memory(span, other)]


def _distinct(lists: Iterable[list[Entry]]) -> list[Entry]:
    return list({id(entry.tensor): entry for entries in lists for entry in entries}.values())
