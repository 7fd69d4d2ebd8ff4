"""Rules on frozen parameters."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from tl_core import Finding, parameter_names
from tl_coverage._inventory import Inventory, as_code, count, verb


def frozen_rules(inventory: Inventory) -> list[Finding]:
    """Find frozen parameters; those that a plain attribute was meant to unfreeze have a finding of their own."""
    findings = []
    left = [
        name
        for name, parameter in inventory.watched.items()
        # Integer tensors cannot have a gradient, so nobody froze them.
        if not parameter.requires_grad and (parameter.dtype.is_floating_point or parameter.dtype.is_complex)
    ]
    for module, value, names in _attributes(inventory):
        mine = [name for name in names if name in left]
        if value and mine:
            findings.append(_attribute_finding(inventory, module, value, mine))
            left = [name for name in left if name not in mine]
    if left:
        held = sum(id(inventory.named[name]) in inventory.covered_ids for name in left)
        findings.append(
            Finding(
                "frozen-parameter",
                f"{count(len(left), 'parameter')} {verb(len(left), 'is', 'are')} frozen although allow_frozen is "
                f"False: {inventory.group(left)} ({held} of {len(left)} in an optimizer, which will not move them)",
                "requires_grad is False, so they get no gradient",
                "unfreeze them with requires_grad_(True); pass ignore= for those that are meant to be frozen",
                parameters=tuple(left),
                evidence={"num_frozen": len(left), "num_in_an_optimizer": held},
            )
        )
    return findings


def attribute_notes(inventory: Inventory, *, allow_frozen: bool) -> list[Finding]:
    """Note modules with a plain attribute ``requires_grad`` that says the opposite of their parameters."""
    return [
        _attribute_finding(inventory, module, value, names)
        for module, value, names in _attributes(inventory)
        if allow_frozen or not value
    ]


def _attributes(inventory: Inventory) -> Iterator[tuple[str, bool, list[str]]]:
    """Yield modules whose plain attribute ``requires_grad`` is contradicted by the parameters below them."""
    for raw, module in inventory.model.named_modules():
        value = module.__dict__.get("requires_grad")
        if not isinstance(value, bool):
            continue
        below = {id(parameter) for parameter in module.parameters()}
        watched = [(name, parameter) for name, parameter in inventory.watched.items() if id(parameter) in below]
        # Mixed parameters contradict nothing: the attribute may be a setting of the module's own.
        if watched and all(parameter.requires_grad is not value for _, parameter in watched):
            yield _module_name(raw, module, [name for name, _ in watched]), value, [name for name, _ in watched]


def _module_name(raw: str, module: nn.Module, names: list[str]) -> str:
    """Name a module as the parameters' names do, which leave out what wrappers insert."""
    inner = next(iter(parameter_names(module)), None)
    if inner is not None and names[0].endswith(f".{inner}"):
        return names[0].removesuffix(f".{inner}")
    return "" if inner == names[0] else raw


def _attribute_finding(inventory: Inventory, module: str, value: bool, names: list[str]) -> Finding:
    state, code = ("frozen" if value else "trainable"), as_code(module)
    return Finding(
        "frozen-parameter",
        f"{inventory.group(names)} {verb(len(names), 'is', 'are')} {state}, but {code} has the plain attribute "
        f"requires_grad = {value}",
        f"{code}.requires_grad = {value} sets an attribute of the module and leaves its parameters as they were",
        f"call {code}.requires_grad_({value})",
        parameters=tuple(names),
        evidence={"module": module, "attribute": value},
    )
