"""Sections of optimizers that go by index, with names for their parameters."""

from __future__ import annotations

from collections.abc import Mapping

from tl_resume._diff import _names
from tl_resume._diff._sections import Section, is_tensor
from tl_resume._diff._sources import Source


def with_names(section: Section, source: Source) -> Section:
    """Name an optimizer's parameters by what its own side tells; by index they stay where it tells nothing."""
    if not _by_index(section):
        return section
    optimizer = section.value
    names = _names.own_names(optimizer)
    for model in source.sections:
        if not names and model.kind == "model" and model.ordered and isinstance(model.value, Mapping):
            tensors = {name: value for name, value in model.value.items() if is_tensor(value)}
            names = _names.names_from_model(optimizer, tensors)
            if names:
                name = model.title or "the model"
                source.notes.append(
                    f"{section.title or source.label} goes by index: its parameters are named after {name}, "
                    "whose order and shapes agree"
                )
    value = _names.renamed(optimizer, names) if names else optimizer
    return Section(section.title, section.kind, value, section.ordered)


def named_after(section: Section, other: Section | None) -> Section:
    """Name the parameters of an optimizer that are still known by index after those of the other side."""
    if not _by_index(section):
        return section
    names = {}
    if other is not None and _names.is_optimizer(other.value) and not _by_index(other):
        names = _names.names_from_other(section.value, other.value)
    return Section(section.title, section.kind, _names.renamed(section.value, names), section.ordered)


def _by_index(section: Section) -> bool:
    return _names.is_optimizer(section.value) and _names.is_by_index(section.value)
