"""Which section of one state is held against which of the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tl_resume._diff._sections import Section
from tl_resume._diff._sources import Source


def paired(a: Source, b: Source) -> Iterator[tuple[Section | None, Section | None]]:
    """Bring together the sections of one title, then those that are the only ones left of their kind.

    What has no title is paired last, unless it is of the same kind: a bare state dict is the other side's model. Files
    of a folder that only the other side's reader refuses are left out.
    """
    return _paired(_left(a, b), _left(b, a))


def _left(source: Source, other: Source) -> list[Section]:
    refused = {file for file in other.refused if file not in source.refused}
    return [section for section in source.sections if section.file not in refused]


def _paired(a: list[Section], b: list[Section]) -> Iterator[tuple[Section | None, Section | None]]:
    a, b = _lifted(a, b), _lifted(b, a)
    pairs: dict[int, Section] = {}
    rest = list(b)

    def take(one: Section, candidates: list[Section]) -> None:
        if id(one) not in pairs and candidates:
            pairs[id(one)] = candidates[0]
            rest.remove(candidates[0])

    for one in a:
        take(one, [other for other in rest if other.title == one.title and (one.title or other.kind == one.kind)])
    for one in a:
        if id(one) not in pairs and one.kind:
            alike = [other for other in rest if other.kind == one.kind]
            alone = sum(x.kind == one.kind and id(x) not in pairs for x in a) == 1
            take(one, alike if len(alike) == 1 and alone else [])
    for one in a:
        take(one, [other for other in rest if not (other.title or one.title)])
    for one in a:
        yield one, pairs.get(id(one))
    for other in rest:
        yield None, other


def _lifted(sections: list[Section], others: list[Section]) -> list[Section]:
    """Make sections of loose values that are sections on the other side, so that they meet there."""
    titles = {other.title for other in others if other.title} - {section.title for section in sections}
    lifted: list[Section] = []
    for section in sections:
        loose = section.value if not section.title and isinstance(section.value, Mapping) else {}
        found = [key for key in loose if isinstance(key, str) and key in titles]
        if found:
            kept = {key: value for key, value in loose.items() if key not in found}
            lifted.append(Section("", section.kind, kept, section.ordered))
            lifted += [Section(key, "", loose[key], section.ordered) for key in found]
        else:
            lifted.append(section)
    return lifted
