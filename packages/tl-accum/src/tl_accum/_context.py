"""What is known of the first update whose gradients differ: the parts that they were made of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property

from tl_accum._compare import Comparison
from tl_accum._differences import GradientGap
from tl_accum._plan import Group
from tl_accum._updates import Change, Pass, added_in, changes, passes, updates
from tl_accum._vectors import Vector, added, agrees, dot, minus, norm, only, ratio
from tl_accum._words import number, shown
from tl_telemetry import Backward


class Context:
    """One update whose gradients differ, with everything that can tell why.

    Args:
        comparison: both runs.
        number: the group.
        gap: how the gradients differ.
    """

    def __init__(self, comparison: Comparison, number: int, gap: GradientGap) -> None:
        self.comparison = comparison
        self.number = number
        self.gap = gap
        self.expected, self.got = gap.vectors
        self.names = tuple(dict.fromkeys([*self.expected, *self.got]))
        # where random numbers change the gradients, what is compared within one run is exact all the same
        bounds = replace(comparison.bounds, floor={}) if comparison.is_random else comparison.bounds
        self.rtol = bounds.length(self.expected)

    @property
    def group(self) -> Group:
        return self.comparison.plan.groups[self.number]

    @property
    def num_parts(self) -> int:
        """How many micro-batches the group has."""
        return len(self.group.parts)

    @property
    def hidden_by_clip(self) -> bool:
        """Whether clipping makes the applied gradients agree."""
        gap = self.gap
        return gap.before_clipping and agrees(gap.got.applied, gap.expected.applied, self.rtol)

    @cached_property
    def passes(self) -> list[Pass]:
        """The backward passes of the micro-batches that reached these parameters, up to the update."""
        return self._passes(reference=False)

    @cached_property
    def reference_passes(self) -> list[Pass]:
        """Those of the full batch."""
        return self._passes(reference=True)

    def _passes(self, *, reference: bool) -> list[Pass]:
        run = self.comparison.reference if reference else self.comparison.run
        wanted = set(self.names)
        found = passes(run, run.groups[self.number])
        for one in found:
            one.added, one.before, one.after = (only(v, wanted) for v in (one.added, one.before, one.after))
        return [one for one in found if norm(one.added)]

    @cached_property
    def increments(self) -> list[Vector]:
        """What each micro-batch added to the gradients."""
        return [added_in(self.passes, place, self.names) for place in range(self.num_parts)]

    @cached_property
    def total(self) -> Vector:
        """The sum of what all micro-batches added."""
        return added(self.increments)

    @cached_property
    def left_over(self) -> Vector:
        """What lay in the gradients before the group's first backward pass."""
        return self.passes[0].before if self.passes else {}

    @cached_property
    def changes(self) -> list[Change]:
        """What changed the gradients between the micro-batches' passes."""
        run = self.comparison.run
        return changes(run, run.groups[self.number], self.names, self.num_parts - 1)

    @cached_property
    def singles(self) -> list[Vector]:
        """The gradients that a step for one accumulation step makes of each micro-batch, from the same weights."""
        found = []
        for part in range(self.num_parts):
            one = self.comparison.session.single(
                frozen=self.comparison.frozen, indices=self.comparison.indices, number=self.number, part=part
            )
            made = updates(one, one.groups[-1]).get(self.gap.optimizer, [])
            found.append(made[0].accumulated if made else {})
        return found

    @cached_property
    def is_mean(self) -> bool:
        """Whether the full batch's gradients are the mean of those that each micro-batch makes by itself."""
        return self.same(added(self.singles, [1.0 / self.num_parts] * self.num_parts), self.expected)

    @cached_property
    def is_sum(self) -> bool:
        """Whether they are the sum of those."""
        return self.same(added(self.singles), self.expected)

    def increment_for(self, accumulation_steps: int) -> Vector:
        """Return what a step for some number of accumulation steps adds to the gradients in the first micro-batch."""
        one = self.comparison.session.single(
            frozen=self.comparison.frozen,
            indices=self.comparison.indices,
            number=self.number,
            part=0,
            accumulation_steps=accumulation_steps,
        )
        return added_in(passes(one, one.groups[-1]), 0, self.names)

    @property
    def is_untraced(self) -> bool:
        """Whether no backward pass but an optimizer's own filled gradients: ``autograd.grad``, or a closure."""
        group = self.comparison.run.groups[self.number]
        events = (event for step in group.steps for event in step.record.events)
        return not any(isinstance(event, Backward) and event.in_step is None and event.filled for event in events)

    def is_reached(self, place: int) -> bool:
        """Tell whether a backward pass of a micro-batch reached these parameters, be it with gradients of 0."""
        run = self.comparison.run
        events = run.groups[self.number].steps[place].record.events
        filled = {run.name(index) for event in events if isinstance(event, Backward) for index in event.filled}
        return not filled.isdisjoint(self.names)

    def reaches_only(self, place: int) -> bool:
        """Tell whether what a micro-batch added is a multiple of its own gradients, and of no other's."""
        return ratio(self.increments[place], self.singles[place], self.rtol) is not None

    @cached_property
    def is_kept(self) -> bool:
        """Whether the accumulated gradients are all that the micro-batches added, and nothing else."""
        return self.same(self.total, self.got)

    def same(self, a: Vector, b: Vector) -> bool:
        """Tell whether two vectors are one, within tolerance."""
        return agrees(a, b, self.rtol)

    def norms(self) -> str:
        """Return how long the accumulated gradients are, and how long the full batch's; else how they differ."""
        a, b = norm(self.expected), norm(self.got)
        text = f"norm {number(b)} instead of {number(a)}"
        if a and b and abs(b / a - 1.0) < 0.01:
            cosine = dot(self.expected, self.got) / a / b
            apart = norm(minus(self.got, self.expected))
            text += (
                f", in another direction (cosine {number(cosine)})" if cosine < 0.9995 else f", {number(apart)} apart"
            )
        return text

    def shown(self, names: Iterable[str]) -> str:
        """Return parameters in a few words."""
        return shown(names, self.comparison.run)
