"""Says what became of the data's position after a resume, from the contents of batches alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tl_core import step_ranges
from tl_resume._check._ledger import Drawn, Ledger

_MAX_RANGES = 6


@dataclass(frozen=True)
class Position:
    """Where the data of a resumed run are, compared with the run without interruption.

    Attributes:
        kind: ``"same"``; ``"restarted"`` (from the first batch of all); ``"behind"`` (batches come again); ``"ahead"``
            (batches are left out); ``"reordered"`` (within a step); ``"contents"`` (the same samples with other
            contents); ``"count"`` (more or fewer in a step); ``"other"`` (nothing that the other run had);
            ``"unseen"`` (neither run showed a batch or an input).
        first_step: The first step that differs; None if none does.
        seen: What was seen, in words; empty where nothing differs.
        loader: The name of the loader whose batches differ; None where it is the inputs of the models.
    """

    kind: str
    first_step: int | None
    seen: str
    loader: str | None = None


@dataclass(frozen=True)
class _Item:
    step: int
    content: str
    indices: tuple[int, ...] | None = None


def describe_position(uninterrupted: Ledger, resumed: Ledger, resume_at: int) -> Position:
    """Compare the batches and inputs of a resumed run with those of the uninterrupted one.

    The inputs of the models decide where both runs show some: a resumed loop may draw more, to get to its position.
    What the loaders gave then explains the difference. An input that is computed from weights can differ without any
    fault of the data: it is ``"other"``, and not before the step in which the weights differ.

    Args:
        uninterrupted: The ledger of the run without interruption, from its first step on.
        resumed: The ledger of the resumed run.
        resume_at: The first step of the resumed run.

    Returns:
        The first difference there is, in words.
    """
    expected, got = _inputs(uninterrupted), _inputs(resumed)
    drawn_expected, drawn_got = _drawn(uninterrupted), _drawn(resumed)
    if not expected and not drawn_expected:
        return Position("unseen", None, "")
    found = _compare(expected, got, resume_at, None)
    loaders = [one for one in _loaders(drawn_expected, drawn_got, resume_at) if one.kind != "same"]
    if found.kind == "same" and any(item.step >= resume_at for item in got):
        # other labels to the same inputs count, batches that were drawn and not used do not
        loaders = [one for one in loaders if one.kind != "count"]
    explained = min(loaders, key=_step, default=found)
    return found if found.kind != "same" and _step(found) < _step(explained) else explained


def _step(position: Position) -> int:
    assert position.first_step is not None or position.kind == "same"
    return -1 if position.first_step is None else position.first_step


def _inputs(ledger: Ledger) -> list[_Item]:
    return [_Item(step, content) for step in _steps(ledger.inputs) for content in ledger.inputs[step]]


def _drawn(ledger: Ledger) -> dict[str, list[_Item]]:
    by_loader: dict[str, list[_Item]] = {}
    for step in _steps(ledger.drawn):
        for drawn in ledger.drawn[step]:
            by_loader.setdefault(drawn.loader, []).append(_item(step, drawn))
    return by_loader


def _item(step: int, drawn: Drawn) -> _Item:
    return _Item(step, drawn.content, drawn.indices)


def _steps(by_step: dict[int, Any]) -> list[int]:
    return sorted(step for step in by_step if step >= 0)


def _loaders(expected: dict[str, list[_Item]], got: dict[str, list[_Item]], resume_at: int) -> Iterator[Position]:
    left, new = [one for one in expected if one not in got], [one for one in got if one not in expected]
    if len(left) == len(new) == 1:  # one loader was put in another's place: accelerate's skip_first_batches() does that
        got = {left[0] if name == new[0] else name: items for name, items in got.items()}
    for loader in dict.fromkeys([*expected, *got]):
        yield _compare(expected.get(loader, []), got.get(loader, []), resume_at, loader)


def _compare(expected: list[_Item], got: list[_Item], resume_at: int, loader: str | None) -> Position:
    """Compare two sequences of batches, of one loader or of inputs."""
    wanted = [item for item in expected if item.step >= resume_at]
    got = [item for item in got if item.step >= resume_at]
    if loader is not None:
        got = _without_passed_over(wanted, got)
    for place, (one, other) in enumerate(zip(wanted, got, strict=False)):
        if one.step != other.step:
            break
        if one.content != other.content:
            return _moved(expected, wanted, got, place, loader)
    else:
        if len(wanted) == len(got):
            return Position("same", None, "", loader)
        place = min(len(wanted), len(got))
    step = min(item.step for item in (*wanted[place : place + 1], *got[place : place + 1]))
    counts = [sum(item.step == step for item in items) for items in (got, wanted)]
    act = "ran the models on" if loader is None else "drew"
    what = ("input", "inputs") if loader is None else ("batch", "batches")
    seen = f"step {step} {act} {_count(counts[0], *what)}, without interruption {_count(counts[1], *what)}"
    return Position("count", step, seen, loader)


def _without_passed_over(wanted: list[_Item], got: list[_Item]) -> list[_Item]:
    """Leave out what the first step of a resumed run draws before its own batches, to get to its position."""
    if not got:
        return got
    first = got[0].step
    mine = [item for item in got if item.step == first]
    expected = sum(item.step == first for item in wanted)
    return got[max(0, len(mine) - expected) :] if expected else got


def _moved(expected: list[_Item], wanted: list[_Item], got: list[_Item], place: int, loader: str | None) -> Position:
    step = got[place].step
    noun = "inputs" if loader is None else "batch"
    samples = _samples(expected, wanted, got)
    origin = _origin(expected, got[place:])
    if origin is None:
        indices = got[place].indices
        if indices is not None and indices == wanted[place].indices:
            seen = (
                f"step {step} drew the same samples as without interruption ({_indices(indices)}), with other contents"
            )
            return Position("contents", step, seen, loader)
        verb = "are" if loader is None else "is"
        held = f"the {noun} of step {step} {verb} none that the uninterrupted run had"
        return Position("other", step, held + samples, loader)
    came = expected[origin].step
    seen = f"step {step} trained on the {noun} that step {came} had without interruption"
    if came == step:
        return Position("reordered", step, f"the {noun} of step {step} came in another order{samples}", loader)
    if came > step:
        skipped = range(step, came)
        gone = f"the {noun} of {step_ranges(skipped)} {'was' if len(skipped) == 1 and loader else 'were'} skipped"
        if loader and len(skipped) > 1:
            gone = f"the batches of {step_ranges(skipped)} were skipped"
        return Position("ahead", step, f"{gone}: {seen}{samples}", loader)
    if origin == 0 and place == 0:
        return Position("restarted", step, f"{seen}: the data start again{samples}", loader)
    return Position(
        "behind", step, f"{seen}: the data are {_count(step - came, 'step', 'steps')} behind{samples}", loader
    )


def _origin(expected: list[_Item], got: list[_Item]) -> int | None:
    """Find where the uninterrupted run had what a resumed run has from some place on.

    A batch may have come several times: the origin is the one from which most of what follows agrees, then the one
    with the fewest disagreements, then the very first batch, then the nearest.
    """
    here = next((k for k, item in enumerate(expected) if item.step >= got[0].step), len(expected))
    best: tuple[tuple[int, int, bool, int], int] | None = None
    for start, item in enumerate(expected):
        if item.content != got[0].content:
            continue
        pairs = list(zip(expected[start:], got, strict=False))
        agree = sum(one.content == other.content for one, other in pairs)
        score = (agree, agree - len(pairs), start == 0, -abs(start - here))
        if best is None or score > best[0]:
            best = (score, start)
    return None if best is None else best[1]


def _samples(expected: list[_Item], wanted: list[_Item], got: list[_Item]) -> str:
    """Say which samples came again and which were left out, where the sampler's indices are known."""
    if any(item.indices is None for item in (*expected, *got)):
        return ""
    before = Counter(index for item in expected[: len(expected) - len(wanted)] for index in item.indices or ())
    without = Counter(index for item in wanted for index in item.indices or ())
    after = Counter(index for item in got for index in item.indices or ())
    if without == after:
        return "; the samples are the same in another order"
    parts = []
    repeated = [index for index in after - without if index in before or index in without]
    dropped = list(without - after)
    if repeated:
        parts.append(f"{_indices(repeated)} {'was' if len(repeated) == 1 else 'were'} repeated")
    if dropped:
        parts.append(f"{_indices(dropped)} dropped")
    return f"; {', '.join(parts)}" if parts else ""


def _indices(indices: Iterable[int]) -> str:
    ordered = sorted(set(indices))
    ranges: list[list[int]] = []
    for index in ordered:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_MAX_RANGES]]
    rest = sum(last - first + 1 for first, last in ranges[_MAX_RANGES:])
    more = f" and {rest} more" if rest else ""
    return f"sample {'index' if len(ordered) == 1 else 'indices'} {', '.join(shown)}{more}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number if number else 'no'} {one if number == 1 else many}"
