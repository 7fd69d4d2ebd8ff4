"""Rules on how parameters are listed: in no optimizer, twice in one, in several."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from tl_core import Finding
from tl_coverage._inventory import Entry, Inventory, Shape, count, shape_of, verb

K = TypeVar("K")


def uncovered_rule(inventory: Inventory, settled: set[str]) -> list[Finding]:
    """Find trainable parameters in no optimizer, but for those that another finding settles."""
    names = [name for name in inventory.missing if name not in settled]
    if not names:
        return []
    total = len(inventory.trainable)
    seen = (
        f"{len(names)} of {count(total, 'trainable parameter')} {verb(len(names), 'is', 'are')} in no optimizer: "
        f"{inventory.group(names)}"
    )
    fix = (
        "build the optimizer from model.parameters() once the model is complete, or add them with add_param_group(); "
        "if they are not meant to train, freeze them with requires_grad_(False) or pass ignore="
    )
    held = [entry for entry in inventory.entries if inventory.owns(entry)]
    if not inventory.optimizers:
        cause = "there is no optimizer"
    elif held and len(held) == len(inventory.entries) and not any(entry.tensor.requires_grad for entry in held):
        labels, were = inventory.labels(inventory.optimizers), verb(len(inventory.optimizers), "was", "were")
        cause = (
            f"all {count(len(held), 'tensor')} that {labels} {verb(len(inventory.optimizers), 'holds', 'hold')} "
            f"{verb(len(held), 'is', 'are')} frozen: either {labels} {were} built before that part was frozen and "
            f"these were added (adapters, a new head), or {were} given the frozen part instead of the trained one"
        )
    elif twins := _twins(inventory, names):
        cause = (
            "no optimizer was given them. They were left out when it was built, were added to the model or unfrozen "
            "afterwards, or are a target network or an average that the loop moves: there are parameters of the same "
            f"names and shapes that an optimizer holds ({inventory.group(twins)})"
        )
        fix += "; of a target network a run shows that it is moved"
    else:
        cause = (
            "no optimizer was given them. Either they were left out when it was built, or they were added to the "
            "model or unfrozen afterwards"
        )
    return [
        Finding(
            "uncovered-parameter",
            seen,
            cause,
            fix,
            parameters=tuple(names),
            evidence={"num_uncovered": len(names), "num_trainable": total},
        )
    ]


def _twins(inventory: Inventory, names: list[str]) -> list[str]:
    """List the held parameters that these ones, all of them, repeat in another part of the model; else none.

    The names agree but for the first component (``target.0.weight`` of ``online.0.weight`` or of ``0.weight``).
    """
    held: dict[tuple[str, Shape], list[str]] = {}
    for name, parameter in inventory.trainable.items():
        if name not in inventory.missing:
            for rest in (name, name.partition(".")[2]):
                held.setdefault((rest, shape_of(parameter)), []).append(name)
    found: list[str] = []
    for name in names:
        rest = name.partition(".")[2]
        # a lone layer of the same shape as another one is no copy of it
        if "." not in rest or not (twins := held.get((rest, shape_of(inventory.missing[name])))):
            return []
        found += twins
    return [name for name in inventory.trainable if name in set(found)]


def listing_rules(inventory: Inventory) -> list[Finding]:
    """Find parameters that would be updated more than once."""
    return [*_several_optimizers(inventory), *_listed_twice(inventory)]


def _places(inventory: Inventory) -> list[list[Entry]]:
    """List the entries of every tensor that is held more than once and is not ignored."""
    by_id: dict[int, list[Entry]] = {}
    for entry in inventory.entries:
        by_id.setdefault(id(entry.tensor), []).append(entry)
    return [places for tensor_id, places in by_id.items() if len(places) > 1 and tensor_id not in inventory.ignored_ids]


def _several_optimizers(inventory: Inventory) -> list[Finding]:
    def owners(places: list[Entry]) -> tuple[str, ...]:
        # A wrapper (SAM, Lookahead) and the optimizer inside it share one list of groups: one optimizer, seen twice.
        distinct = {id(inventory.optimizers[e.optimizer].param_groups): e.optimizer for e in reversed(places)}
        return tuple(name for name in inventory.optimizers if name in distinct.values())

    findings = []
    for names, places in _grouped(_places(inventory), owners):
        if len(names) < 2 or not any(entries[0].tensor.requires_grad for entries in places):
            continue
        trained = [entries for entries in places if entries[0].tensor.requires_grad]
        what = _what(inventory, trained)
        findings.append(
            Finding(
                "several-optimizers",
                f"{count(len(trained), 'parameter')} {verb(len(trained), 'is', 'are')} in {len(names)} optimizers "
                f"({', '.join(map(repr, names))}): {what}",
                "each of these optimizers updates the parameter when it steps, with moments of its own",
                "give every parameter to one optimizer; if they take turns on purpose, pass the check only the "
                "optimizers of one phase, or ignore=",
                parameters=_names(inventory, trained),
                evidence={"optimizers": names},
            )
        )
    return findings


def _listed_twice(inventory: Inventory) -> list[Finding]:
    def spots(places: list[Entry]) -> tuple[tuple[str, tuple[int, ...]], ...]:
        per_optimizer: dict[str, list[int]] = {}
        for entry in places:
            per_optimizer.setdefault(entry.optimizer, []).append(entry.group)
        return tuple((name, tuple(groups)) for name, groups in per_optimizer.items() if len(groups) > 1)

    findings = []
    for where, places in _grouped(_places(inventory), spots):
        for optimizer, groups in where:
            distinct = list(dict.fromkeys(groups))
            if len(distinct) == 1:
                place = f"{len(groups)} times in group {distinct[0]}"
            else:
                place = f"in groups {', '.join(map(str, distinct))}"
            findings.append(
                Finding(
                    "listed-twice",
                    f"{inventory.label(optimizer)} lists {count(len(places), 'parameter')} {place}: "
                    f"{_what(inventory, places)}",
                    "an optimizer updates a parameter once for every time that it is listed, so each step moves it "
                    "several times",
                    "list every parameter once, in one group",
                    parameters=_names(inventory, places),
                    evidence={"optimizer": optimizer, "groups": groups},
                )
            )
    return findings


def _grouped(places: list[list[Entry]], key: Callable[[list[Entry]], K]) -> Iterable[tuple[K, list[list[Entry]]]]:
    """Put tensors together that are held in the same places."""
    ordered: dict[K, list[list[Entry]]] = {}
    for entries in places:
        ordered.setdefault(key(entries), []).append(entries)
    return ordered.items()


def _names(inventory: Inventory, places: list[list[Entry]]) -> tuple[str, ...]:
    ids = [id(entries[0].tensor) for entries in places]
    return tuple(inventory.name_of[tensor_id] for tensor_id in ids if tensor_id in inventory.name_of)


def _what(inventory: Inventory, places: list[list[Entry]]) -> str:
    """Name the tensors: the model's by name, others by shape."""
    names = _names(inventory, places)
    others = [entries[0].tensor for entries in places if not inventory.owns(entries[0])]
    parts = [inventory.group(names)] if names else []
    parts += [f"a tensor of shape {shape_of(tensor)}" for tensor in others]
    return ", ".join(parts)
