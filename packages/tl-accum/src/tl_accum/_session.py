"""Runs the loop: one step a full batch, or one step a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.nn.parameter import is_lazy

from tl_accum._copies import Copies
from tl_accum._forward import watching_buffers
from tl_accum._generators import disturb
from tl_accum._plan import Group, Plan, Step
from tl_accum._replay import replaced_gradients
from tl_accum._runs import Frozen, GroupRun, MicroStep, Part, Run
from tl_accum._switch import Switch, switched
from tl_accum._updates import updates
from tl_core import TrainingSetup, build_setup, module_names, noted, preserve_rng, seed_everything
from tl_telemetry import (
    GradientLog,
    OptimizerStep,
    Outside,
    Piece,
    SkippedStep,
    StateCapture,
    StateDifference,
    compare_captures,
    observe,
    put_back,
    setup_functions,
)

Match = Callable[[Run, int], bool]


class Session:
    """Runs the person's loop, each time as a new process would.

    Args:
        plan: what is run.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        with preserve_rng():
            self._copies = Copies()
            before = Outside([plan.make_setup, plan.make_step], keep=self._copies.keep)
            try:
                steps = [plan.new_step(1), plan.new_step(plan.accumulation_steps)]
            finally:
                before.reset()  # what make_step itself does to it is no part of a new process
            self._outside = Outside([plan.make_setup, plan.make_step, *steps], keep=self._copies.keep)

    def close(self) -> None:
        """Set what lies outside of the setup back to what it was."""
        self._outside.reset()

    def full(self, *, frozen: Frozen, indices: Sequence[int], draws: int = 0, until: int | None = None) -> Run:
        """Run one step a full batch, each from zeroed gradients.

        Args:
            frozen: what runs with fixed statistics.
            indices: the step index of each group.
            draws: which random numbers the steps get; other ones for another number.
            until: the number of groups; None runs all.
        """
        with self._fresh(1, frozen, "full batches") as loop:
            for group in self.plan.groups[:until]:
                loop.feed_full(group, indices[group.number], group.full, draws=draws)
        return loop.run

    def accumulated(
        self,
        *,
        frozen: Frozen,
        reference: Run,
        matches: Match,
        until: int | None = None,
        restored: Part | None = None,
    ) -> Run:
        """Run one step a micro-batch.

        Args:
            frozen: what runs with fixed statistics.
            reference: the run over full batches.
            matches: called after each group; tells whether that agrees with the reference. As long as all do, the next
                group starts from the reference's weights, so that rounding does not add up.
            until: the number of groups; None runs all.
            restored: what of the state is put back, before each micro-batch of the last group, to how that began.
        """
        with self._fresh(self.plan.accumulation_steps, frozen, "micro-batches") as loop:
            agreed = True
            for group in self.plan.groups[:until]:
                calls = [(group.first + place, part) for place, part in enumerate(group.parts)]
                loop.feed(group, calls, restored=restored if group.number + 1 == until else None)
                agreed = matches(loop.run, group.number) and agreed
                if agreed:
                    _take_over(reference.groups[group.number].end, loop.run.setup)
        return loop.run

    def replayed(self, *, frozen: Frozen, indices: Sequence[int], reference: Run, run: Run, until: int) -> Run:
        """Run the full batches as ``full`` does, with the gradients that the updates over micro-batches applied.

        Args:
            frozen: what runs with fixed statistics.
            indices: the step index of each group.
            reference: the run over full batches; each group but the first starts from its weights.
            run: the run over micro-batches, which took over the reference's weights too.
            until: the number of groups, in all of which the updates are one for one.
        """
        with self._fresh(1, frozen, "full batches") as loop:
            for group in self.plan.groups[:until]:
                with replaced_gradients(loop.run, updates(run, run.groups[group.number])):
                    loop.feed_full(group, indices[group.number], group.full)
                _take_over(reference.groups[group.number].end, loop.run.setup)
        return loop.run

    def single(
        self, *, frozen: Frozen, indices: Sequence[int], number: int, part: int, accumulation_steps: int = 1
    ) -> Run:
        """Run the full batches before a group, and then one step on one micro-batch of it.

        That step is made for ``accumulation_steps``; the step index is that of a group's first micro-batch, and for one
        accumulation step that of the full batch.
        """
        with self._fresh(1, frozen, "full batches") as loop:
            for group in self.plan.groups[:number]:
                loop.feed_full(group, indices[group.number], group.full)
            group, index = self.plan.groups[number], indices[number]
            announced = None
            if accumulation_steps > 1:
                loop.step, index, announced = self.plan.new_step(accumulation_steps), 0, group.parts
            loop.feed_full(group, index, group.parts[part], announced=announced)
        return loop.run

    @contextmanager
    def _fresh(self, accumulation_steps: int, frozen: Frozen, what: str) -> Iterator[_Loop]:
        plan = self.plan
        self._outside.reset()
        log = GradientLog()
        with preserve_rng():
            seed_everything(plan.seed)
            step = plan.new_step(accumulation_steps)
            seed_everything(plan.seed)
            setup = build_setup(plan.make_setup, plan.device)
            with (
                observe(setup, track_updates=False, gradients=log) as training,
                watching_buffers(setup.model) as moved,
            ):
                outside = Outside([step, *setup_functions(setup)], keep=self._copies.keep)
                run = Run(setup, training, outside, self._copies, moved)
                modules = module_names(setup.model)
                held = tuple(modules[name] for name in frozen.modules if name in modules)
                with (
                    switched(run.met, no_dropout=plan.disable_dropout, frozen=held, fixed=frozen.batch_norm) as switch,
                    noted(f"raised in the run over {what}"),
                ):
                    yield _Loop(plan, run, step, log, switch)


@dataclass
class _Loop:
    """The person's loop in one run.

    Attributes:
        plan: what is run.
        run: what is known of it so far.
        step: the step.
        log: the gradients around the acts of the step that runs.
        switch: what is switched off while the step runs.
    """

    plan: Plan
    run: Run
    step: Step
    log: GradientLog
    switch: Switch

    def feed_full(
        self, group: Group, index: int, batch: Any, *, draws: int = 0, announced: Sequence[Any] | None = None
    ) -> None:
        """Run one step on a whole batch, from zeroed gradients."""
        _clear_gradients(self.run)
        self.feed(group, [(index, batch)], draws=draws, announced=announced)

    def feed(
        self,
        group: Group,
        calls: Sequence[tuple[int, Any]],
        *,
        draws: int = 0,
        restored: Part | None = None,
        announced: Sequence[Any] | None = None,
    ) -> None:
        """Run the steps of one group.

        Args:
            group: the group.
            calls: the step index and the batch of each.
            draws: which random numbers the steps get.
            restored: what of the state is put back before each but the first.
            announced: the batches that the step is told to expect; None: those of the calls.
        """
        run, setup = self.run, self.run.setup
        if any(is_lazy(parameter) for parameter in setup.model.parameters()):
            draws = 0  # the first forward pass draws the weights, which are to be the same
        # one dropout by hand then draws the same for a full batch and for its micro-batches
        seed_everything((self.plan.seed + 7919 * (group.number + 1) + 104729 * draws) % 2**32)
        if draws:
            held = [*setup.state.values(), *vars(setup).values(), *run.outside.values().values()]
            disturb(held, 104729 * draws + group.number)
        setup.step_index = calls[0][0]
        self._announce(group, [batch for _, batch in calls] if announced is None else announced)
        start = now = run.capture()
        steps = []
        for place, (index, part) in enumerate(calls):
            setup.step_index = index
            if restored is not None and place:
                put_back(restored.as_in(start, now), setup, [restored.piece], outside=run.outside.access())
                now = run.capture()
            batch = self.plan.fresh(part)
            scale = _loss_scale(setup)
            with run.training.step(batch) as current, noted(_where(index, place, calls, group)), self.switch:
                current.loss = self.step(setup, batch)
            after = run.capture()
            changed = [d for d in compare_captures(now, after) if not _is_made(d)]
            steps.append(MicroStep(index, run.training.records[-1], self.log.acts, changed, scale))
            self.log.acts, now = [], after
        run.groups.append(GroupRun(steps, start, now))

    def _announce(self, group: Group, batches: Sequence[Any]) -> None:
        """Tell a step that wants to know which micro-batches are coming."""
        begin_group = getattr(self.step, "begin_group", None)
        if begin_group is None:
            return
        with noted(f"raised in begin_group() of cycle {group.number + 1}"), self.switch:
            begin_group(self.run.setup, [self.plan.fresh(batch) for batch in batches])


def _where(index: int, place: int, calls: Sequence[Any], group: Group) -> str:
    part = f", micro-batch {place + 1} of {len(calls)}" if len(calls) > 1 else ""
    return f"raised in cycle {group.number + 1}{part} (step_index {index})"


def _loss_scale(setup: TrainingSetup) -> float:
    scaler = setup.scaler
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def _clear_gradients(run: Run) -> None:
    """Clear all gradients, but for those of an optimizer that has not used them yet: it steps in other cycles only."""
    setup = run.setup
    used = {
        event.optimizer
        for step in (run.groups[-1].steps if run.groups else ())
        for event in step.record.events
        if isinstance(event, (OptimizerStep, SkippedStep))
    }
    spared = {
        id(parameter)
        for name, optimizer in setup.optimizers.items()
        if run.groups and name not in used
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    held = (p for optimizer in setup.optimizers.values() for group in optimizer.param_groups for p in group["params"])
    for parameter in (*setup.model.parameters(), *held):
        if id(parameter) not in spared:
            parameter.grad = None


def _is_made(difference: StateDifference) -> bool:
    """Tell whether a lazy module made this weight in its first forward pass."""
    return difference.piece == Piece("weights") and difference.tensor is None


def _take_over(capture: StateCapture, setup: TrainingSetup) -> None:
    put_back(capture, setup, [piece for piece in capture.pieces if piece.kind in ("weights", "optimizer state")])
