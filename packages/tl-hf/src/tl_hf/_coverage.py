"""The optimizer that a Trainer builds: each parameter in one group, and weight decay where it belongs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import Trainer

from tl_core import Finding, Report
from tl_coverage import check_optimizer_coverage
from tl_hf._setup import unwrapped


def check_hf_optimizer_coverage(
    trainer: Trainer, *, no_decay: Sequence[str] | None = None, ignore: Sequence[str] = ()
) -> Report:
    """Check the optimizer that a Trainer builds, without training.

    Every trainable parameter must be in exactly one of its groups, and weight decay must not reach biases and the
    weights of normalisation layers.

    Args:
        trainer: the Trainer. ``trainer.create_optimizer()`` is called; an optimizer that was not there before is taken
            away again.
        no_decay: ``fnmatch`` patterns of the parameters that weight decay must not reach. None: parameters named
            ``bias``, and those of normalisation layers: torch's, and modules whose class has ``Norm`` in its name and
            which hold nothing but vectors.
        ignore: ``fnmatch`` patterns of parameters that no rule looks at.

    Returns:
        The report.

    Raises:
        TypeError, ValueError: an argument is not what is allowed, or a pattern matches no parameter.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(f"trainer must be a transformers.Trainer, got a {type(trainer).__name__}")
    before = trainer.optimizer
    try:
        optimizer = unwrapped(trainer.create_optimizer() or trainer.optimizer)
    finally:
        trainer.optimizer = before
    model: Any = trainer.model
    patterns = _undecayed(model) if no_decay is None else no_decay
    report = check_optimizer_coverage(model, optimizer, ignore=ignore, no_decay=patterns)
    if no_decay is None:
        report = replace(report, notes=tuple(_unexpected(report.notes, trainer.get_decay_parameter_names(model))))
    if type(trainer).create_optimizer is not Trainer.create_optimizer:
        return report
    return replace(report, findings=tuple(map(_advised, report.findings)))


def assert_hf_optimizer_coverage(
    trainer: Trainer, *, no_decay: Sequence[str] | None = None, ignore: Sequence[str] = ()
) -> Report:
    """Demand that a Trainer's optimizer has every parameter once, and that weight decay is where it belongs.

    The arguments are those of ``check_hf_optimizer_coverage``.

    Example:
        >>> import torch
        >>> from transformers import BertConfig, BertForSequenceClassification
        >>> from tl_hf import make_hf_trainer
        >>> model = BertForSequenceClassification(BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=2,
        ...                                                  num_attention_heads=2, intermediate_size=32))
        >>> data = {"input_ids": torch.ones(8, 4, dtype=torch.long), "labels": torch.ones(8, dtype=torch.long)}
        >>> print(assert_hf_optimizer_coverage(make_hf_trainer(model, data, weight_decay=0.01)))
        Optimizer coverage: passed

    Returns:
        The report, when all is well.

    Raises:
        CheckFailed: there are findings.
        NotJudged: the model has no trainable parameter.
        TypeError, ValueError: an argument is not what is allowed, or a pattern matches no parameter.
    """
    return check_hf_optimizer_coverage(trainer, no_decay=no_decay, ignore=ignore).require()


def _unexpected(notes: Iterable[Finding], decayed: Iterable[str]) -> Iterator[Finding]:
    """Leave out that parameters are not decayed which the Trainer itself takes for biases or norms."""
    wanted = set(decayed)
    for note in notes:
        if note.rule != "undecayed-parameter" or not wanted.isdisjoint(note.parameters):
            yield note


def _advised(finding: Finding) -> Finding:
    """Say how the Trainer's own optimizer is made to leave a parameter out of weight decay."""
    if finding.rule != "decayed-parameter":
        return finding
    return replace(
        finding,
        fix="override get_decay_parameter_names() in your Trainer's class, and leave them out there; or give the "
        "module the name norm, or one that ends in _norm, by which the Trainer knows it",
    )


def _undecayed(model: Any) -> list[str] | None:
    """Return the names of biases and of what normalisation layers hold; None where there are none."""
    norms = tuple(name for name, module in model.named_modules() if _is_norm(module))
    names = [
        name
        for name, _ in model.named_parameters()
        if name.rpartition(".")[2] == "bias" or name.rpartition(".")[0] in norms
    ]
    return [name.replace("[", "[[]") for name in names] or None


def _is_norm(module: nn.Module) -> bool:
    """Tell a normalisation layer: a class may well be called NormedLinear, but holds a matrix then, or layers."""
    if isinstance(module, _NORMS):
        return True
    sizes = [[size for size in parameter.shape if size > 1] for parameter in module.parameters(recurse=False)]
    alone = len(sizes) == len(list(module.parameters()))
    return "Norm" in type(module).__name__ and alone and all(len(more) <= 1 for more in sizes)


_NORMS = (
    *(nn.LayerNorm, nn.GroupNorm, nn.RMSNorm),
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)
