"""The check: all rules on one setup."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from tl_core import Finding, Report, TrainingSetup
from tl_coverage._decay import decay_rules
from tl_coverage._foreign import explain_missing, foreign_rules
from tl_coverage._frozen import attribute_notes, frozen_rules
from tl_coverage._inventory import Inventory
from tl_coverage._listing import listing_rules, uncovered_rule
from tl_coverage._memory import shared_memory
from tl_coverage._unregistered import unregistered_rule

CHECK = "Optimizer coverage"


def check_optimizer_coverage(
    model: nn.Module,
    optimizers: Any,
    *,
    ignore: Sequence[str] = (),
    allow_frozen: bool = True,
    no_decay: Sequence[str] | None = None,
) -> Report:
    """Compare a model's parameters with what its optimizers hold. Nothing is run and nothing is changed.

    Example:
        >>> import torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
        >>> print(check_optimizer_coverage(model, torch.optim.SGD(model.parameters(), lr=0.1)))
        Optimizer coverage: passed

    Args:
        model: The model.
        optimizers: One optimizer, a list, or a dict of named ones.
        ignore: ``fnmatch`` patterns of parameter names that no rule looks at.
        allow_frozen: Whether parameters may be frozen (``requires_grad`` is False).
        no_decay: ``fnmatch`` patterns of the parameters that weight decay must not reach; None leaves decay unjudged.

    Returns:
        The report, with the most telling finding first.

    Raises:
        TypeError: Swapped arguments, a string instead of a list of patterns, or anything else of the wrong kind.
        ValueError: A pattern that matches no parameter, or the same optimizer twice.
    """
    if not isinstance(allow_frozen, bool):
        raise TypeError(f"allow_frozen must be True or False, got {type(allow_frozen).__name__} {allow_frozen!r}")
    inventory = Inventory(TrainingSetup(model, optimizers), ignore)
    explained = explain_missing(inventory)
    shared, unreached = shared_memory(inventory)
    settled = explained.names | unreached
    findings: list[Finding] = [*explained.findings, *shared, *uncovered_rule(inventory, settled)]
    notes: list[Finding] = [*explained.notes]
    (findings if inventory.missing.keys() - settled else notes).extend(foreign_rules(inventory, explained))
    unregistered, plain = unregistered_rule(inventory)
    findings += [*unregistered, *listing_rules(inventory)]
    notes += plain
    if not allow_frozen:
        findings += frozen_rules(inventory)
    notes += attribute_notes(inventory, allow_frozen=allow_frozen)
    decayed, undecayed = decay_rules(inventory, no_decay)
    findings += decayed
    notes += undecayed
    judged = bool(inventory.trainable or findings)
    if not judged:
        notes.append(_nothing_to_judge(inventory))
    return Report(CHECK, tuple(findings), tuple(notes), judged=judged)


def assert_optimizer_coverage(
    model: nn.Module,
    optimizers: Any,
    *,
    ignore: Sequence[str] = (),
    allow_frozen: bool = True,
    no_decay: Sequence[str] | None = None,
) -> Report:
    """Demand that every trainable parameter is updated by exactly one optimizer.

    The arguments are those of ``check_optimizer_coverage``.

    Returns:
        The report, when there are no findings.

    Raises:
        CheckFailed: There are findings.
        NotJudged: The model has no trainable parameter to look at.
        TypeError, ValueError: As ``check_optimizer_coverage``.
    """
    report = check_optimizer_coverage(model, optimizers, ignore=ignore, allow_frozen=allow_frozen, no_decay=no_decay)
    return report.require()


def _nothing_to_judge(inventory: Inventory) -> Finding:
    if not inventory.named:
        seen = "the model has no parameters"
    elif not inventory.watched:
        seen = f"all {len(inventory.named)} parameters of the model are ignored"
    else:
        seen = f"none of the {len(inventory.watched)} parameters of the model is trainable"
    return Finding("not-judged", f"{seen}: there is nothing that an optimizer has to update", "", "")
