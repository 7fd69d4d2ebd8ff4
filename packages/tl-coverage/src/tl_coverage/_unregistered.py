"""The rule on tensors that the model keeps where torch registers no parameters."""

from __future__ import annotations

from torch import nn

from tl_core import Finding, group_names
from tl_coverage._inventory import Inventory, verb

_CAUSE = (
    "torch registers only an nn.Parameter that is an attribute of a module, or in an nn.ParameterList or "
    "nn.ParameterDict"
)


def unregistered_rule(inventory: Inventory) -> tuple[list[Finding], list[Finding]]:
    """Find Parameters in plain lists, tuples and dicts that no optimizer holds; note plain tensors with requires_grad.

    Returns:
        The findings and the notes.
    """
    in_containers: list[str] = []
    plain: list[str] = []
    for name, tensor in inventory.unregistered.items():
        # who hides a Parameter from torch on purpose sets it past the module's own __setattr__
        is_stored = isinstance(tensor, nn.Parameter) and name.endswith("]")
        (in_containers if is_stored else plain).append(name)
    findings = [_finding(inventory, in_containers)] if in_containers else []
    return findings, [_note(inventory, plain)] if plain else []


def _finding(inventory: Inventory, names: list[str]) -> Finding:
    it, is_, a = verb(len(names), "it", "them"), verb(len(names), "is", "are"), verb(len(names), "a ", "")
    return Finding(
        "uncovered-parameter",
        f"{group_names(names, inventory.unregistered)} {is_} in no optimizer: {a}Parameter{verb(len(names), '', 's')} "
        f"in a plain list, tuple or dict, so that model.parameters() does not give {it}",
        _CAUSE,
        "keep them in an nn.ParameterList or nn.ParameterDict, and build the optimizer afterwards; if they are not "
        "meant to train, freeze them with requires_grad_(False) or pass ignore=",
        parameters=tuple(names),
        evidence={"num_unregistered": len(names)},
    )


def _note(inventory: Inventory, names: list[str]) -> Finding:
    is_, a = verb(len(names), "is", "are"), verb(len(names), "a tensor", "tensors")
    return Finding(
        "uncovered-parameter",
        f"{group_names(names, inventory.unregistered)} {is_} in no optimizer: {a} with requires_grad True that the "
        "model keeps without registering",
        _CAUSE,
        "make what is meant to train an nn.Parameter that is an attribute; a run shows whether gradients reach it and "
        "whether anything moves it",
        parameters=tuple(names),
        evidence={"num_unregistered": len(names)},
    )
