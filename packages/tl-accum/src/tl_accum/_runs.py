"""The runs: one step a full batch, and one step a micro-batch, from identical fresh setups."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from tl_accum._forward import watching_buffers
from tl_accum._generators import disturb
from tl_accum._kept import Kept
from tl_accum._plan import Group, Plan, Step
from tl_accum._switch import Met, Switch, switched
from tl_core import TrainingSetup, build_setup, module_names, noted, preserve_rng, seed_everything
from tl_telemetry import (
    GradientAct,
    GradientLog,
    Outside,
    Piece,
    StateCapture,
    StateDifference,
    StepRecord,
    TrainingRun,
    capture_state,
    compare_captures,
    observe,
    put_back,
    setup_functions,
)


@dataclass
class MicroStep:
    """One call of a step.

    Attributes:
        index: ``setup.step_index`` in it.
        record: what was observed.
        acts: the gradients around each backward pass, clip and optimizer step.
        changed: what of the setup's state the call changed; gradients are left out.
        scale: the loss scale before it; 1 without a GradScaler.
    """

    index: int
    record: StepRecord
    acts: list[GradientAct]
    changed: list[StateDifference]
    scale: float

    def has(self, kind: type) -> bool:
        """Tell whether an event of a kind was observed."""
        return any(isinstance(event, kind) for event in self.record.events)


@dataclass
class GroupRun:
    """The calls of one group.

    Attributes:
        steps: the calls, one a micro-batch (one in all for a full batch).
        start: the state before the first one.
        end: the state after the last one.
    """

    steps: list[MicroStep]
    start: StateCapture
    end: StateCapture

    def has(self, kind: type) -> bool:
        """Tell whether an event of a kind was observed in one of the calls."""
        return any(step.has(kind) for step in self.steps)


@dataclass
class Run:
    """One run over all groups.

    Attributes:
        setup: the setup, as the run left it.
        training: what was observed.
        met: what the switch met.
        groups: the groups, in order.
        drew: whether steps drew random numbers.
        outside: what the loop keeps outside of the setup.
        kept: keeps the content of captured tensors.
        moved_in_forward: names of the buffers that forward passes moved.
    """

    setup: TrainingSetup
    training: TrainingRun
    outside: Outside
    kept: Kept
    moved_in_forward: list[str]
    met: Met = field(default_factory=Met)
    groups: list[GroupRun] = field(default_factory=list)

    def capture(self) -> StateCapture:
        """Capture the state of the setup, and of what the loop keeps outside of it."""
        self.kept.begin()
        capture = capture_state(self.setup, outside=self.outside.values(), keep=self.kept.keep)
        del capture.pieces[Piece("gradients")]  # each act tells of them; comparing them too would cost the most
        return capture

    def name(self, index: int) -> str:
        """Return the name of a followed parameter."""
        return self.training.facts.tensors.name(index)

    @property
    def drew(self) -> bool:
        changes = (change for group in self.groups for step in group.steps for change in step.changed)
        return any(change.piece.kind == "rng" or change.kind == "generator" for change in changes)


@dataclass(frozen=True)
class Frozen:
    """What runs with fixed statistics, to see whether something else differs too.

    Attributes:
        batch_norm: whether batch statistics are replaced by fixed ones.
        modules: names of the modules that run in eval mode.
    """

    batch_norm: bool = False
    modules: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """A part of the state.

    Attributes:
        piece: the piece.
        key: the attribute or entry of it; None for the whole piece.
    """

    piece: Piece
    key: Any = None

    def as_in(self, earlier: StateCapture, now: StateCapture) -> StateCapture:
        """Return a capture that has this part as it was earlier, and the rest of its piece as it is now."""
        before, after = earlier.pieces.get(self.piece), now.pieces.get(self.piece)
        held, holds = getattr(before, "items", None), getattr(after, "items", None)
        if self.key is None or held is None or holds is None or self.key not in held:
            return earlier
        mixed: Any = replace(after, items={**holds, self.key: held[self.key]})  # type: ignore[type-var]
        return replace(now, pieces={**now.pieces, self.piece: mixed}, nodes={**now.nodes, **earlier.nodes})


Match = Callable[[Run, int], bool]


class Session:
    """Runs the person's loop, each time as a new process would.

    Args:
        plan: what is run.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        with preserve_rng():
            self._kept = Kept()
            before = Outside([plan.make_setup, plan.make_step], keep=self._kept.keep)
            try:
                steps = [plan.new_step(1), plan.new_step(plan.accumulation_steps)]
            finally:
                before.reset()  # what make_step itself does to it is no part of a new process
            self._outside = Outside([plan.make_setup, plan.make_step, *steps], keep=self._kept.keep)

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
        with self._fresh(1, frozen, "full batches") as (run, step, log, switch):
            for group in self.plan.groups[:until]:
                _clear_gradients(run)
                self._group(run, step, log, switch, group, [(indices[group.number], group.full)], draws)
        return run

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
            matches: tells, after a group, whether it agrees with the reference so far; the next group then starts
                from the reference's weights, so that rounding does not add up.
            until: the number of groups; None runs all.
            restored: what of the state is put back, before each micro-batch of the last group, to how that began.
        """
        with self._fresh(self.plan.accumulation_steps, frozen, "micro-batches") as (run, step, log, switch):
            agreed = True
            for group in self.plan.groups[:until]:
                calls = [(group.first + place, part) for place, part in enumerate(group.parts)]
                part_back = restored if group.number + 1 == until else None
                self._group(run, step, log, switch, group, calls, 0, part_back)
                agreed = agreed and matches(run, group.number)
                if agreed:
                    _take_over(reference.groups[group.number].end, run.setup)
        return run

    def single(
        self, *, frozen: Frozen, indices: Sequence[int], number: int, part: int, accumulation_steps: int = 1
    ) -> Run:
        """Run the full batches before a group, and then one step on one micro-batch of it.

        That step is made for ``accumulation_steps``; the step index is that of a group's first micro-batch, and for one
        accumulation step that of the full batch.
        """
        with self._fresh(1, frozen, "full batches") as (run, step, log, switch):
            for group in self.plan.groups[:number]:
                _clear_gradients(run)
                self._group(run, step, log, switch, group, [(indices[group.number], group.full)], 0)
            group = self.plan.groups[number]
            _clear_gradients(run)
            index = indices[number]
            if accumulation_steps > 1:
                step, index = self.plan.new_step(accumulation_steps), 0
            self._group(run, step, log, switch, group, [(index, group.parts[part])], 0)
        return run

    @contextmanager
    def _fresh(
        self, accumulation_steps: int, frozen: Frozen, what: str
    ) -> Iterator[tuple[Run, Step, GradientLog, Switch]]:
        plan = self.plan
        self._outside.reset()
        log = GradientLog()
        with preserve_rng():
            seed_everything(plan.seed)
            step = plan.new_step(accumulation_steps)
            seed_everything(plan.seed)
            setup = build_setup(plan.make_setup, plan.device)
            with observe(setup, track_updates=False, gradients=log) as training, ExitStack() as stack:
                outside = Outside([step, *setup_functions(setup)], keep=self._kept.keep)
                moved = stack.enter_context(watching_buffers(setup.model))
                run = Run(setup, training, outside, self._kept, moved)
                modules = module_names(setup.model)
                held = tuple(modules[name] for name in frozen.modules if name in modules)
                with (
                    switched(run.met, no_dropout=plan.disable_dropout, frozen=held, fixed=frozen.batch_norm) as switch,
                    noted(f"raised in the run over {what}"),
                ):
                    yield run, step, log, switch

    def _group(
        self,
        run: Run,
        step: Step,
        log: GradientLog,
        switch: Switch,
        group: Group,
        calls: Sequence[tuple[int, Any]],
        draws: int,
        restored: Part | None = None,
    ) -> None:
        setup = run.setup
        if any(is_lazy(parameter) for parameter in setup.model.parameters()):
            draws = 0  # the first forward pass draws the weights, which are to be the same
        # one dropout by hand then draws the same for a full batch and for its micro-batches
        seed_everything((self.plan.seed + 7919 * (group.number + 1) + 104729 * draws) % 2**32)
        if draws:
            kept = [*setup.state.values(), *vars(setup).values(), *run.outside.values().values()]
            disturb(kept, 104729 * draws + group.number)
        start = now = run.capture()
        steps = []
        for place, (index, part) in enumerate(calls):
            setup.step_index = index
            if restored is not None and place:
                put_back(restored.as_in(start, now), setup, [restored.piece], outside=run.outside.access())
                now = run.capture()
            batch = self.plan.fresh(part)
            scale = loss_scale(setup)
            with run.training.step(batch) as current, noted(_where(index, place, calls, group)), switch:
                current.loss = step(setup, batch)
            after = run.capture()
            changed = [d for d in compare_captures(now, after) if not _is_made(d)]
            steps.append(MicroStep(index, run.training.records[-1], log.acts, changed, scale))
            log.acts, now = [], after
        run.groups.append(GroupRun(steps, start, now))


def _where(index: int, place: int, calls: Sequence[Any], group: Group) -> str:
    part = f", micro-batch {place + 1} of {len(calls)}" if len(calls) > 1 else ""
    return f"raised in cycle {group.number + 1}{part} (step_index {index})"


def loss_scale(setup: TrainingSetup) -> float:
    """Return the scale of the setup's GradScaler; 1 without an enabled one."""
    scaler = setup.scaler
    return float(scaler.get_scale()) if scaler is not None and scaler.is_enabled() else 1.0


def _clear_gradients(run: Run) -> None:
    """Clear all gradients, but for those of an optimizer that has not used them yet: it steps in other cycles only."""
    setup = run.setup
    used = {
        getattr(event, "optimizer", None)
        for step in (run.groups[-1].steps if run.groups else ())
        for event in step.record.events
        if event.kind in ("optimizer_step", "skipped_step")
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


def check_fresh(a: Run, b: Run) -> None:
    """Raise the error of a ``make_setup`` that builds another setup in its second call.

    Raises:
        ValueError: weights, optimizer state or settings differ; the message names the first difference.
    """
    kinds = ("weights", "trainable", "optimizer state", "param groups")
    found = [d for d in compare_captures(a.groups[0].start, b.groups[0].start) if d.piece.kind in kinds]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        raise ValueError(
            f"make_setup() built another setup in its second call, under the same seed: {found[0]}{more}. Build it "
            "anew each time, with random numbers from the global generators of torch, numpy or python, which are "
            "seeded before each call"
        )


def batch_norms(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of the modules that normalise by the statistics of the batch, of those and all in training."""
    kinds = (nn.modules.batchnorm._BatchNorm,)
    known = set(names)
    return [
        name
        for name, module in module_names(model).items()
        if isinstance(module, kinds) and (name in known or (module.training and module.running_mean is None))
    ]
