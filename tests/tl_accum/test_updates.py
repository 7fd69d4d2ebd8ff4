"""What updates, backward passes and changes in between are read from the acts of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tl_accum._compare import Comparison, compare
from tl_accum._plan import make_plan
from tl_accum._session import Session
from tl_accum._tolerance import Bounds
from tl_accum._updates import added_in, changes, passes, updates
from tl_accum._vectors import Vector, agrees, norm
from tl_core import TrainingSetup
from tl_telemetry import Piece

X = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
NAMES = ["0.weight", "0.bias", "1.weight", "1.bias"]
Step = Callable[[TrainingSetup, Any], Any]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))


def make_setup() -> Any:
    model = make_model()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def squared(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def compared(make_step: Callable[[int], Step], build: Callable[[], Any] = make_setup, **changed: Any) -> Comparison:
    given: dict[str, Any] = {
        "accumulation_steps": 4,
        "cycles": 2,
        "epoch_length": None,
        "split": None,
        "disable_dropout": True,
        "device": "cpu",
        "seed": 0,
        **changed,
    }
    session = Session(make_plan(build, X, make_step, **given))
    try:
        return compare(session, Bounds(1e-4, 1e-6))
    finally:
        session.close()


def usual(
    before: Callable[[TrainingSetup], None] = lambda setup: None,
    each: Callable[[TrainingSetup], None] = lambda setup: None,
) -> Callable[[int], Step]:
    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            (loss / k).backward()
            each(setup)
            if (setup.step_index + 1) % k == 0:
                before(setup)
                for optimizer in setup.optimizers.values():
                    optimizer.step()
                    optimizer.zero_grad()
            return loss.detach()

        return step

    return make_step


def truth(found: Comparison, number: int = 0, part: int | None = None) -> Vector:
    """Return the gradients of a group's full batch, or of a k-th of a micro-batch, computed by hand."""
    group = found.plan.groups[number]
    model = make_model()
    start = found.reference.groups[number].start
    model.load_state_dict({name: tensor for (name,), tensor in start.contents(Piece("weights"))})
    batch, share = (group.full, 1) if part is None else (group.parts[part], len(group.parts))
    (squared(model, batch) / share).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_an_update_has_the_gradients_that_it_applied() -> None:
    """Those of the full batch, in both runs, in each cycle."""
    found = compared(usual())
    for run, place in ((found.reference, 0), (found.run, 3)):
        for number, group in enumerate(run.groups):
            (update,) = updates(run, group)["optimizer"]
            assert (update.optimizer, update.place) == ("optimizer", place)
            assert (update.clips, update.clipped) == ((), None)
            assert list(update.applied) == NAMES
            for vector in (update.raw, update.accumulated, update.applied):
                assert agrees(vector, truth(found, number), 1e-5)


def test_backward_passes_have_what_they_added() -> None:
    """Each micro-batch adds its share; before and after are what lay there."""
    found = compared(usual())
    made = passes(found.run, found.run.groups[0])
    assert [(one.place, one.ordinal) for one in made] == [(0, 0), (1, 0), (2, 0), (3, 0)]
    for one in made:
        assert agrees(one.added, truth(found, part=one.place), 1e-5)
        assert one.site.startswith("test_updates.py:")
    assert norm(made[0].before) == 0.0
    assert agrees(made[1].before, made[0].after, 1e-6)
    assert agrees(added_in(made, 2, NAMES[:1]), {NAMES[0]: truth(found, part=2)[NAMES[0]]}, 1e-5)


def test_two_passes_of_one_micro_batch_are_told_apart() -> None:
    """By their ordinal; what a micro-batch added is their sum."""

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            for _ in range(2):
                (squared(setup.model, batch) / k / 2).backward()
            if (setup.step_index + 1) % k == 0:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
            return torch.zeros(())

        return step

    found = compared(make_step)
    made = passes(found.run, found.run.groups[0])
    assert [(one.place, one.ordinal) for one in made] == [(place, ordinal) for place in range(4) for ordinal in (0, 1)]
    assert agrees(added_in(made, 1, NAMES), truth(found, part=1), 1e-5)


def test_a_clip_lies_between_accumulated_and_applied() -> None:
    """Two clips are both kept, in order; the first one's before is what was accumulated."""

    def clip(setup: TrainingSetup) -> None:
        nn.utils.clip_grad_norm_(setup.model.parameters(), 0.01)
        nn.utils.clip_grad_value_(setup.model.parameters(), 0.001)

    found = compared(usual(before=clip))
    (update,) = updates(found.run, found.run.groups[0])["optimizer"]
    assert [clip.bound for clip in update.clips] == [0.01, 0.001]
    assert agrees(update.accumulated, truth(found), 1e-5)
    assert update.clipped is not None
    assert agrees(update.clipped, update.applied, 1e-6)
    assert max(float(value.abs().max()) for value in update.applied.values()) == pytest.approx(0.001)


def test_gradients_that_are_changed_after_the_last_pass_are_in_applied_only() -> None:
    """raw is what the last backward pass left; accumulated and applied are later."""

    def halve(setup: TrainingSetup) -> None:
        for parameter in setup.model.parameters():
            parameter.grad.mul_(0.5)

    found = compared(usual(before=halve))
    (update,) = updates(found.run, found.run.groups[0])["optimizer"]
    assert agrees(update.raw, truth(found), 1e-5)
    assert agrees(update.applied, {name: value * 0.5 for name, value in truth(found).items()}, 1e-5)


@pytest.mark.parametrize("fused", [False, True])
def test_gradients_are_unscaled_whenever_they_are_looked_at(fused: bool) -> None:
    """With a GradScaler: after backward, before a clip, and in a fused step, which unscales by itself."""

    def build() -> Any:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.1, fused=fused), scaler=scaler)

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch)
            setup.scaler.scale(loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                if not fused:
                    setup.scaler.unscale_(setup.optimizer)
                    nn.utils.clip_grad_norm_(setup.model.parameters(), 1e9)
                setup.scaler.step(setup.optimizer)
                setup.scaler.update()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    found = compared(make_step, build)
    assert found.agrees
    for run in (found.reference, found.run):
        (update,) = updates(run, run.groups[0])["optimizer"]
        for vector in (update.raw, update.accumulated, update.applied):
            assert agrees(vector, truth(found), 1e-4)
        made = passes(run, run.groups[0])
        assert agrees(made[-1].after, truth(found), 1e-4)


def test_a_fused_step_that_skips_an_overflow_is_no_update() -> None:
    """It leaves the weights alone, as the GradScaler does for other optimizers."""

    def build() -> Any:
        model = make_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
        return TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.1, fused=True), scaler=scaler)

    def make_step(k: int) -> Step:
        def step(setup: TrainingSetup, batch: Tensor) -> Tensor:
            loss = squared(setup.model, batch) * 1e3
            setup.scaler.scale(loss / k).backward()
            if (setup.step_index + 1) % k == 0:
                setup.scaler.step(setup.optimizer)
                setup.scaler.update()
                setup.optimizer.zero_grad()
            return loss.detach()

        return step

    found = compared(make_step, build)
    assert updates(found.run, found.run.groups[0]) == {}
    assert "optimizer_step" in [event.kind for event in found.run.groups[0].steps[-1].record.events]


def test_each_optimizer_has_its_own_parameters() -> None:
    """And one that has none to apply makes no update."""

    def build() -> Any:
        model = make_model()
        first = torch.optim.SGD(model[0].parameters(), lr=0.1)
        return TrainingSetup(model, {"first": first, "last": torch.optim.SGD(model[1].parameters(), lr=0.2)})

    found = compared(usual(), build)
    made = updates(found.run, found.run.groups[1])
    assert {name: list(found[0].applied) for name, found in made.items()} == {"first": NAMES[:2], "last": NAMES[2:]}


def test_clips_within_a_group_are_changes() -> None:
    """Those that changed something, with the gradients before and after."""
    found = compared(usual(each=lambda setup: nn.utils.clip_grad_norm_(setup.model.parameters(), 0.01)))
    made = changes(found.run, found.run.groups[0], NAMES, 3)
    assert [(change.what, change.place, change.bound) for change in made] == [
        ("clip", place, 0.01) for place in range(3)
    ]
    assert agrees(made[0].before, truth(found, part=0), 1e-5)
    assert norm(made[0].after) == pytest.approx(0.01, rel=1e-3)
    assert made[0].site.startswith("test_updates.py:")


def test_edits_within_a_group_are_changes() -> None:
    """Between two acts, by anything that no clip function did; what comes after the last pass is none."""

    def double(setup: TrainingSetup) -> None:
        for parameter in setup.model.parameters():
            parameter.grad.mul_(2.0)

    found = compared(usual(each=double))
    made = changes(found.run, found.run.groups[0], NAMES, 3)
    assert [(change.what, change.place, change.site) for change in made] == [("edit", place, "") for place in range(3)]
    for change in made:
        assert agrees(change.after, {name: 2.0 * value for name, value in change.before.items()}, 1e-6)


def test_clearing_is_a_change_that_leaves_nothing() -> None:
    """By None or by zeros."""
    for set_to_none in (True, False):
        found = compared(usual(each=lambda setup, none=set_to_none: setup.optimizer.zero_grad(set_to_none=none)))
        made = changes(found.run, found.run.groups[0], NAMES, 3)
        assert [change.place for change in made] == [0, 1, 2]
        assert [norm(change.after) for change in made] == [0.0] * 3


def test_a_loop_that_leaves_gradients_alone_has_no_changes() -> None:
    """Clips above the norm change nothing."""
    found = compared(usual(each=lambda setup: nn.utils.clip_grad_norm_(setup.model.parameters(), 1e9)))
    assert changes(found.run, found.run.groups[0], NAMES, 3) == []
