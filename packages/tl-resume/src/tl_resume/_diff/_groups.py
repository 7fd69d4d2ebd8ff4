"""Names that stand for many: a module prefix for all the tensors below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from tl_resume._diff._lines import counted


class Named(Protocol):
    """What has a name in parts."""

    @property
    def name(self) -> str:
        """The whole name."""

    @property
    def prefix(self) -> str:
        """What comes before the parts, as in ``exp_avg of encoder.weight``."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the name."""


N = TypeVar("N", bound=Named)
Key = tuple[str, tuple[str, ...]]


def grouped(members: Sequence[N], all_names: Iterable[Key], noun: str) -> list[tuple[str, list[N]]]:
    """Group members whose module has no others.

    Args:
        members: What is to be written, of one section.
        all_names: Prefix and parts of all names of that section.
        noun: What the members are, in the singular.

    Returns:
        A label and its members, in the order of the members: ``encoder.* (12 tensors)``, or a name.
    """
    chosen = {(member.prefix, member.parts) for member in members}
    sizes: dict[Key, int] = {}
    partial: set[Key] = set()
    for prefix, parts in dict.fromkeys([*all_names, *((member.prefix, member.parts) for member in members)]):
        for length in range(len(parts)):
            key = prefix, parts[:length]
            sizes[key] = sizes.get(key, 0) + 1
            if (prefix, parts) not in chosen:
                partial.add(key)
    groups: dict[str, list[N]] = {}
    for member in members:
        keys = [(member.prefix, member.parts[:length]) for length in range(len(member.parts))]
        whole = next((key for key in keys if key not in partial and sizes[key] > 1), None)
        text = member.name if whole is None else group_name(*whole, sizes[whole], noun)
        groups.setdefault(text, []).append(member)
    return list(groups.items())


def group_name(prefix: str, parts: tuple[str, ...], size: int, noun: str) -> str:
    """Write what stands for all whose names begin with these parts."""
    text = ""
    for part in parts:
        text += part if part.startswith("[") or not text else f".{part}"
    return f"{prefix}{text}.* ({counted(size, noun)})" if text else f"{prefix}all {counted(size, noun)}"
