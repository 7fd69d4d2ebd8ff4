"""Rules on weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tl_core import Finding
from tl_coverage._inventory import Entry, Inventory, verb


def decay_rules(inventory: Inventory, no_decay: Sequence[str] | None) -> tuple[list[Finding], list[Finding]]:
    """Judge which parameters weight decay reaches.

    Returns:
        The findings (decay where there must be none) and the notes (none where there may be some).
    """
    if no_decay is None:
        return [], []
    exempt = inventory.match(no_decay, argument="no_decay")
    trained = {id(parameter) for parameter in inventory.trainable.values()}
    entries = [entry for entry in inventory.entries if id(entry.tensor) in trained]
    if entries and all(entry.weight_decay is None for entry in entries):
        seen = f"no group of {inventory.labels(inventory.optimizers)} has the setting weight_decay"
        return [], [Finding("not-judged", f"{seen}: no_decay= could not be judged", "", "")]
    decayed = [entry for entry in entries if id(entry.tensor) in exempt and _decays(entry)]
    findings = [_decayed_finding(inventory, place, members) for place, members in _by_group(decayed).items()]
    notes = []
    if any(map(_decays, entries)):
        bare = [entry for entry in entries if id(entry.tensor) not in exempt and not _decays(entry)]
        notes = [_undecayed_note(inventory, place, members) for place, members in _by_group(bare).items()]
    return findings, notes


def _decays(entry: Entry) -> bool:
    return entry.weight_decay is not None and bool(entry.weight_decay != 0)


def _by_group(entries: list[Entry]) -> dict[tuple[str, int], list[Entry]]:
    groups: dict[tuple[str, int], list[Entry]] = {}
    for entry in entries:
        groups.setdefault((entry.optimizer, entry.group), []).append(entry)
    return groups


def _value(entry: Entry) -> Any:
    return float(entry.weight_decay)


def _decayed_finding(inventory: Inventory, place: tuple[str, int], entries: list[Entry]) -> Finding:
    names = [inventory.name_of[id(entry.tensor)] for entry in entries]
    optimizer, group = place
    it, decay = verb(len(names), "it", "them"), _value(entries[0])
    return Finding(
        "decayed-parameter",
        f"{inventory.group(names)} {verb(len(names), 'matches', 'match')} no_decay, but group {group} of "
        f"{inventory.label(optimizer)} decays {it} with weight_decay={decay:g}",
        _why(inventory, names),
        "move them to a group with weight_decay=0.0, chosen by the names that model.named_parameters() gives",
        parameters=tuple(names),
        evidence={"optimizer": optimizer, "group": group, "weight_decay": decay},
    )


def _why(inventory: Inventory, names: list[str]) -> str:
    if all(_decays(entry) for entry in inventory.entries):
        return "every group has weight decay: none was made for the parameters without"
    return (
        f"there is a group without weight decay, but {verb(len(names), 'this parameter was', 'these were')} not sorted "
        "into it"
    )


def _undecayed_note(inventory: Inventory, place: tuple[str, int], entries: list[Entry]) -> Finding:
    names = [inventory.name_of[id(entry.tensor)] for entry in entries]
    optimizer, group = place
    return Finding(
        "undecayed-parameter",
        f"{inventory.group(names)} {verb(len(names), 'matches', 'match')} no pattern of no_decay, but group {group} of "
        f"{inventory.label(optimizer)} does not decay {verb(len(names), 'it', 'them')}",
        f"{verb(len(names), 'it is', 'they are')} in a group with weight_decay=0",
        "move them to a group with weight decay, or add their names to no_decay",
        parameters=tuple(names),
        evidence={"optimizer": optimizer, "group": group},
    )
