"""Rules on optimizer tensors that are no parameters of the model: where do they come from?

Tensors in the memory of the model's parameters are told by their addresses (``_aliases``). For the rest nothing guesses
from one shape alone. Another copy is told by nearly all missing shapes being there, in optimizers
that hold nothing of the model's own; a replaced layer by a whole module missing and tensors in its place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch

from tl_core import Finding
from tl_coverage._aliases import explain_by_memory
from tl_coverage._explained import CALLED_WITH, Explained
from tl_coverage._inventory import Entry, Inventory, as_code, count, parametrized_weight, shape_of, shapes_text, verb

COPY_SHARE = 0.8  # the share of the missing parameters' shapes that another copy has
HALF_PRECISION = (torch.float16, torch.bfloat16)


def explain_missing(inventory: Inventory) -> Explained:
    """Find what optimizers hold in place of the parameters that they miss."""
    explained = Explained()
    explain_by_memory(inventory, explained)
    if inventory.missing and inventory.foreign:
        _master_weights(inventory, explained)
        _other_copy(inventory, explained)
        _parametrized(inventory, explained)
        _replaced_layers(inventory, explained)
    return explained


def foreign_rules(inventory: Inventory, explained: Explained) -> list[Finding]:
    """Describe the foreign tensors that explain no missing parameter (findings only when some are missing)."""
    by_optimizer: dict[str, list[Entry]] = {}
    for entry in explained.open_entries(inventory):
        by_optimizer.setdefault(entry.optimizer, []).append(entry)
    return [_foreign_finding(inventory, explained, name, entries) for name, entries in by_optimizer.items()]


def _foreign_finding(inventory: Inventory, explained: Explained, optimizer: str, entries: list[Entry]) -> Finding:
    names = [entry.name for entry in entries if entry.name is not None]
    called = f"named {', '.join(names)}; " if names else ""
    missing = explained.open_names(inventory)
    seen = (
        f"{inventory.label(optimizer)} holds {count(len(entries), 'tensor')} that "
        f"{verb(len(entries), 'is no parameter', 'are no parameters')} of the model "
        f"({called}{shapes_text(entry.tensor for entry in entries)})"
    )
    beside = "something that is trained beside the model"
    # A model that is called with other tensors has none of its own parameters in an optimizer.
    is_called = not inventory.covered_ids
    if missing:
        seen += f", while {inventory.group(missing)} {verb(len(missing), 'is', 'are')} in no optimizer"
        cause = f"undecided: what it holds belongs to {beside} (a criterion with parameters)"
        replaced = "to a part of the model that was replaced after the optimizer was built"
        cause += f", {replaced}, or is what the model is called with {CALLED_WITH}" if is_called else f", or {replaced}"
        fix = "build the optimizer from the finished model's parameters, plus those of what is trained beside it"
    else:
        cause = (
            f"{verb(len(entries), 'it belongs', 'they belong')} to {beside}, for example a criterion with parameters"
        )
        if is_called:
            it = verb(len(entries), "it is", "they are")
            cause = f"undecided: {cause}, or {it} what the model is called with {CALLED_WITH}"
        fix = "nothing, if that is meant; a run shows whether gradients reach what it holds"
    return Finding(
        "foreign-tensor",
        seen,
        cause,
        fix,
        parameters=tuple(missing),
        evidence={"optimizer": optimizer, "shapes": tuple(shape_of(entry.tensor) for entry in entries)},
    )


def _key(tensor: torch.Tensor) -> tuple[object, ...]:
    return (shape_of(tensor), tensor.dtype)


def _take(
    names: list[str],
    inventory: Inventory,
    entries: list[Entry],
    key: Callable[[torch.Tensor], object],
) -> tuple[list[str], list[Entry]]:
    """Pair missing parameters with foreign tensors of the same key, each used once, both in order."""
    pools: dict[object, list[Entry]] = {}
    for entry in entries:
        pools.setdefault(key(entry.tensor), []).append(entry)
    taken_names, taken_entries = [], []
    for name in names:
        pool = pools.get(key(inventory.missing[name]))
        if pool:
            taken_names.append(name)
            taken_entries.append(pool.pop(0))
    return taken_names, taken_entries


def _without_own(inventory: Inventory, explained: Explained) -> list[Entry]:
    """List the foreign tensors of optimizers that hold nothing of the model's own."""
    with_own = {entry.optimizer for entry in inventory.entries if inventory.owns(entry)}
    return [entry for entry in explained.open_entries(inventory) if entry.optimizer not in with_own]


def _master_weights(inventory: Inventory, explained: Explained) -> None:
    """Leave float32 master copies of low-precision weights to a run, which sees them being copied back."""
    names = [name for name, parameter in inventory.missing.items() if parameter.dtype in HALF_PRECISION]
    entries = [entry for entry in inventory.foreign if entry.tensor.dtype == torch.float32]
    taken, masters = _take(names, inventory, entries, shape_of)
    if not taken or len(taken) < len(inventory.missing):
        return
    explained.claim(taken, masters)
    optimizers = dict.fromkeys(entry.optimizer for entry in masters)
    explained.notes.append(
        Finding(
            "not-judged",
            f"{inventory.group(taken)} {verb(len(taken), 'is', 'are')} in no optimizer, but "
            f"{inventory.labels(optimizers)} {verb(len(optimizers), 'holds', 'hold')} float32 tensors of the same "
            "shapes: whether these are master weights that the loop copies back can only be seen in a run",
            "",
            "",
            parameters=tuple(taken),
        )
    )


def _other_copy(inventory: Inventory, explained: Explained) -> None:
    missing = explained.open_names(inventory)
    entries = _without_own(inventory, explained)
    names, copies = _take(missing, inventory, entries, _key)
    whole = len(missing) == len(inventory.trainable)
    # A lone tensor of a frequent shape may belong to anything; a model's only one, in its only optimizer, may not.
    if not names or len(names) < COPY_SHARE * len(missing) or (len(names) == 1 and not whole):
        return
    # Tensors of the copy that match frozen parameters of the model belong to the copy too.
    frozen = Counter(_key(parameter) for parameter in inventory.named.values() if not parameter.requires_grad)
    rest = [entry for entry in entries if entry not in copies]
    for entry in rest:
        if frozen[_key(entry.tensor)] > 0:
            frozen[_key(entry.tensor)] -= 1
            copies.append(entry)
    optimizers = list(dict.fromkeys(entry.optimizer for entry in copies))
    holds, what = verb(len(optimizers), "holds", "hold"), inventory.group(missing)
    labels, were = inventory.labels(optimizers), verb(len(optimizers), "was", "were")
    fix = "build the optimizer from the parameters of the model that is trained, after its last copy"
    if whole:
        seen = f"{labels} {holds} none of the model's {count(len(missing), 'trainable parameter')}"
        cause = (
            f"{labels} {were} built for another copy of the model (before a deepcopy, before the model was built "
            "again, or before load_state_dict(assign=True) put new Parameters in)"
        )
    else:
        seen = f"{labels} {holds} none of the model's own parameters"
        cause = f"{labels} {were} built for another copy of this part of the model, before it was replaced"
    # Shapes alone do not tell a copy's parameters from plain tensors that the model is called with.
    if not all(isinstance(entry.tensor, torch.nn.Parameter) for entry in copies):
        cause = f"undecided: {cause}, or for tensors that the model is called with {CALLED_WITH}"
    explained.claim(missing, copies)
    explained.findings.append(
        Finding(
            "other-copy",
            f"{seen}, but {count(len(copies), 'other tensor')}, of which {len(names)} "
            f"{verb(len(names), 'has', 'have')} the shape of a missing parameter; in no optimizer: {what}",
            cause,
            f"{fix}; if it is called with these tensors on purpose, name its own parameters in ignore=",
            parameters=tuple(missing),
            evidence={"num_missing": len(missing), "num_same_shape": len(names), "optimizers": tuple(optimizers)},
        )
    )


def _parametrized(inventory: Inventory, explained: Explained) -> None:
    """Recognise weights that weight_norm or a parametrization replaced after the optimizer was built."""
    groups: dict[str, list[str]] = {}
    for name in explained.open_names(inventory):
        weight = parametrized_weight(name, inventory.named)
        if weight is not None:
            groups.setdefault(weight, []).append(name)
    for weight, names in groups.items():
        entries = explained.open_entries(inventory)
        named = [entry for entry in entries if entry.name == weight]
        _, taken = _take(names, inventory, entries, shape_of)
        if not named and not taken:
            continue
        old = (named or taken)[0]
        explained.claim(names, [old])
        explained.findings.append(
            Finding(
                "replaced-layer",
                f"{', '.join(names)} {verb(len(names), 'is', 'are')} in no optimizer; {inventory.label(old.optimizer)} "
                f"holds a tensor of shape {shape_of(old.tensor)} instead, which is no parameter of the model",
                f"{weight} was parametrized (weight_norm or a parametrization) after the optimizer was built: new "
                f"parameters took the place of the one that the optimizer holds",
                "apply the parametrization first, then build the optimizer",
                parameters=tuple(names),
                evidence={"weight": weight, "shape_held": shape_of(old.tensor)},
            )
        )


def _replaced_layers(inventory: Inventory, explained: Explained) -> None:
    for prefix, names in _missing_modules(inventory, explained).items():
        old = _held_instead(inventory, explained, prefix, names)
        if not old:
            continue
        explained.claim(names, old)
        new_shapes = [inventory.missing[name] for name in names]
        shapes = shapes_text(entry.tensor for entry in old)
        same = Counter(map(shape_of, new_shapes)) == Counter(shape_of(entry.tensor) for entry in old)
        explained.findings.append(
            Finding(
                "replaced-layer",
                f"{inventory.group(names)} {verb(len(names), 'is', 'are')} in no optimizer "
                f"({shapes_text(new_shapes)}); {inventory.label(old[0].optimizer)} holds "
                f"{count(len(old), 'tensor')} instead that {verb(len(old), 'is no parameter', 'are no parameters')} of "
                f"the model ({'the same ' + verb(len(old), 'shape', 'shapes') if same else shapes})",
                f"{as_code(prefix)} was replaced after the optimizer was built, which still holds the old one",
                "build the optimizer after the last change to the model, or add the new parameters with "
                "add_param_group()",
                parameters=tuple(names),
                evidence={
                    "shapes_missing": tuple(map(shape_of, new_shapes)),
                    "shapes_held": tuple(shape_of(entry.tensor) for entry in old),
                },
            )
        )


def _missing_modules(inventory: Inventory, explained: Explained) -> dict[str, list[str]]:
    """Group missing parameters by the largest module of which every trainable parameter is missing."""
    missing = set(explained.open_names(inventory))
    broken: set[str] = set()
    for name in inventory.trainable:
        if name not in missing:
            broken.update(_prefixes(name))
    modules: dict[str, list[str]] = {}
    for name in inventory.missing:
        if name in missing:
            whole = [prefix for prefix in _prefixes(name) if prefix not in broken]
            modules.setdefault(whole[0] if whole else name, []).append(name)
    return modules


def _prefixes(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def _held_instead(inventory: Inventory, explained: Explained, prefix: str, names: list[str]) -> list[Entry]:
    """Return the foreign tensors that stand for a missing module; none when that is not established."""
    entries = explained.open_entries(inventory)
    if any(entry.name in names for entry in entries):
        return [entry for entry in entries if entry.name in names or (entry.name or "").startswith(f"{prefix}.")]
    # A vector's shape alone tells nothing: a bias that was left out beside a criterion's scale looks the same.
    if not any(_is_matrix(inventory.missing[name]) for name in names):
        return []
    taken, exact = _take(names, inventory, entries, shape_of)
    if len(taken) == len(names) > 1:
        return exact
    return _in_place(inventory, names, entries)


def _is_matrix(tensor: torch.Tensor) -> bool:
    return len(shape_of(tensor) or ()) > 1


def _in_place(inventory: Inventory, names: list[str], entries: list[Entry]) -> list[Entry]:
    """Accept tensors that stand in a group where the missing parameters belong and take the same input.

    One tensor alone must stand between parameters of the model: at an end it may be a criterion's, put before or after
    the model's parameters.
    """
    placed = [(entry, _neighbours(inventory, entry, names)) for entry in entries]
    run = [entry for entry, neighbours in placed if neighbours is not None][: len(names)]
    if not run:
        return []
    between = all(neighbours == 2 for entry, neighbours in placed if entry in run)
    shapes = [
        (shape_of(inventory.missing[name]) or (), shape_of(entry.tensor) or ())
        for name, entry in zip(names, run, strict=False)
    ]
    same_kind = all(len(new) == len(old) for new, old in shapes)
    same_input = all(new[1:] == old[1:] for new, old in shapes[:1])
    return run if same_kind and same_input and (len(run) > 1 or between) else []


def _neighbours(inventory: Inventory, entry: Entry, names: list[str]) -> int | None:
    """Count the sides on which an entry has the model's own parameters in its group; None if it is out of place."""
    order = inventory.position
    group = [other for other in inventory.entries if (other.optimizer, other.group) == (entry.optimizer, entry.group)]
    at = group.index(entry)
    before = [order[inventory.name_of[id(other.tensor)]] for other in group[:at] if inventory.owns(other)]
    after = [order[inventory.name_of[id(other.tensor)]] for other in group[at + 1 :] if inventory.owns(other)]
    if any(index > order[names[0]] for index in before) or any(index < order[names[-1]] for index in after):
        return None
    return bool(before) + bool(after)
