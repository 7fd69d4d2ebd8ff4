from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from tl_core import TrainingSetup
from tl_telemetry import Backward, OptimizerStep, ScalerUpdate, SkippedStep, StateMoved, Unscaling, observe

SCALED = 5.0 * 8.0  # the norm of the gradients, times the scale


def build(optimizer=torch.optim.SGD, scale=8.0, state=None, **options):
    """Return a setup whose loss 3a + 4b has gradients of norm 5."""
    model = nn.Module()
    model.register_parameter("a", nn.Parameter(torch.tensor([1.0, 1.0])))
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return TrainingSetup(model, optimizer(model.parameters(), lr=0.1, **options), scaler=scaler, state=state)


def loss_of(setup, factor=1.0):
    loss = 3 * setup.model.a[0] + 4 * setup.model.a[1]
    return loss if factor == 1.0 else loss * factor


def train(setup, factor=1.0):
    setup.optimizer.zero_grad()
    setup.scaler.scale(loss_of(setup, factor)).backward()
    setup.scaler.step(setup.optimizer)
    setup.scaler.update()


def train_without_update(setup):
    setup.scaler.scale(loss_of(setup)).backward()
    setup.scaler.step(setup.optimizer)


def recorded(setup, *steps):
    with observe(setup) as run:
        for step in steps:
            with run.step():
                step(setup)
    return run.records


def events(record, kind):
    return [event for event in record.events if isinstance(event, kind)]


def kinds(record):
    return [event.kind for event in record.events]


def line_of(function, text):
    lines, first = inspect.getsourcelines(function)
    return f"test_scaler_events.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_what_a_scaler_does_is_recorded_in_order():
    """Unscaling inside of scaler.step(), the optimizer's step and update() stand between the other acts, with lines."""
    (record,) = recorded(build(), train)
    assert kinds(record) == ["backward", "unscale", "optimizer_step", "scaler_update"]
    (unscaling,) = events(record, Unscaling)
    site = line_of(train, "scaler.step")
    assert (unscaling.optimizer, unscaling.scaler, unscaling.in_step, unscaling.site) == (
        "optimizer",
        "scaler",
        True,
        site,
    )
    assert (unscaling.scale.value(), unscaling.found_inf.values()) == (8.0, [0.0])
    assert unscaling.norms.values() == [pytest.approx(SCALED)]
    assert unscaling.largest is None
    (step,) = events(record, OptimizerStep)
    assert (step.scaler, step.site, step.scaler_stage) == ("scaler", site, "unscaled")
    (update,) = events(record, ScalerUpdate)
    assert (update.site, update.before.value(), update.after.value()) == (line_of(train, "update()"), 8.0, 8.0)


def test_a_skipped_step_is_an_act_of_its_own():
    """An overflow is found, the optimizer does not step, and the scale falls."""
    (record,) = recorded(build(), lambda setup: train(setup, math.inf))
    assert kinds(record) == ["backward", "unscale", "skipped_step", "scaler_update"]
    (skipped,) = events(record, SkippedStep)
    assert (skipped.optimizer, skipped.scaler, skipped.site) == ("optimizer", "scaler", line_of(train, "scaler.step"))
    assert skipped.found_inf.values() == [1.0]
    (update,) = events(record, ScalerUpdate)
    assert (update.before.value(), update.after.value(), update.found_inf.value()) == (8.0, 4.0, 1.0)


def test_a_fused_optimizer_is_called_by_the_scaler_also_where_it_skips():
    """Its steps name the scaler and the flag that it skipped by."""
    records = recorded(build(torch.optim.Adam, fused=True), train, lambda setup: train(setup, math.inf))
    steps = [step for record in records for step in events(record, OptimizerStep)]
    assert [(step.scaler, step.found_inf.value()) for step in steps] == [("scaler", 0.0), ("scaler", 1.0)]
    assert [kinds(record)[-3:] for record in records] == [["unscale", "optimizer_step", "scaler_update"]] * 2


def test_unscaling_by_the_person_is_told_from_that_of_a_step():
    """An explicit unscale_ stands before the clip, and scaler.step() does not unscale again."""

    def step(setup):
        setup.scaler.scale(loss_of(setup)).backward()
        setup.scaler.unscale_(setup.optimizer)
        nn.utils.clip_grad_norm_(setup.model.parameters(), 1.0)
        setup.scaler.step(setup.optimizer)
        setup.scaler.update()

    (record,) = recorded(build(), step)
    assert kinds(record) == ["backward", "unscale", "clip", "optimizer_step", "scaler_update"]
    (unscaling,) = events(record, Unscaling)
    assert (unscaling.in_step, unscaling.site) == (False, line_of(step, "unscale_"))


def test_methods_that_were_bound_before_are_seen():
    """scale, unscale_, step and update may be bound before the run, and the class may be somebody's own."""

    class Own(GradScaler):
        def step(self, optimizer, *args, **kwargs):
            return super().step(optimizer, *args, **kwargs)

    setup = build()
    setup.scaler = Own("cpu", init_scale=8.0)
    scale, unscale, step, update = (getattr(setup.scaler, name) for name in ("scale", "unscale_", "step", "update"))

    def bound(setup):
        scale(loss_of(setup)).backward()
        unscale(setup.optimizer)
        step(setup.optimizer)
        update()

    (record,) = recorded(setup, bound)
    assert kinds(record) == ["backward", "unscale", "optimizer_step", "scaler_update"]
    assert events(record, OptimizerStep)[0].site == line_of(bound, "step(setup")


def test_several_dtypes_are_one_unscaling():
    """unscale_ calls torch once for each dtype of the gradients; that is one act."""
    setup = build()
    setup.model.register_parameter("b", nn.Parameter(torch.ones(1, dtype=torch.float64)))
    setup.optimizer.add_param_group({"params": [setup.model.b]})

    def step(setup):
        setup.scaler.scale(loss_of(setup) + (setup.model.b * math.inf).sum()).backward()
        setup.scaler.step(setup.optimizer)

    (record,) = recorded(setup, step)
    (unscaling,) = events(record, Unscaling)
    assert unscaling.graded == (0, 1)
    assert unscaling.found_inf.values() == [1.0]


def test_two_scalers_have_names():
    """A scaler in setup.state is known by its place, and one that the setup does not hold is called a stranger."""
    setup = build(state={"second": torch.amp.GradScaler("cpu", init_scale=2.0)})
    third = torch.amp.GradScaler("cpu", init_scale=4.0)

    def by(scaler):
        def step(setup):
            scaler.scale(loss_of(setup)).backward()
            scaler.step(setup.optimizer)
            scaler.update()

        return step

    records = recorded(setup, by(setup.state["second"]), by(third), train)
    assert [events(record, Unscaling)[0].scaler for record in records] == [
        "setup.state['second']",
        "a GradScaler that is not in the setup",
        "scaler",
    ]
    assert [events(record, Backward)[0].terms[0].scaler for record in records[::2]] == [
        "setup.state['second']",
        "scaler",
    ]


def test_a_scale_that_is_set_by_hand_is_an_update_without_a_line():
    """update(new_scale) computes nothing that torch could be seen by; what it leaves tells."""

    def step(setup):
        setup.scaler.scale(loss_of(setup)).backward()
        setup.scaler.step(setup.optimizer)
        setup.scaler.update(new_scale=32.0)

    records = recorded(build(), step, train)
    (by_hand,) = events(records[0], ScalerUpdate)
    assert (by_hand.site, by_hand.before, by_hand.found_inf, by_hand.after.value()) == ("", None, None, 32.0)
    assert [update.before.value() for update in events(records[1], ScalerUpdate)] == [32.0]


def test_a_direct_step_names_no_scaler():
    """optimizer.step() has the person's line and no scaler; after unscale_ its stage says so."""

    def direct(setup):
        setup.scaler.scale(loss_of(setup)).backward()
        setup.optimizer.step()

    (record,) = recorded(build(), direct)
    (step,) = events(record, OptimizerStep)
    assert (step.scaler, step.scaler_stage, step.site) == (None, "ready", line_of(direct, "optimizer.step"))


def test_edits_by_hand_show_in_norms():
    """The norm after backward() is that before an edit, the one at unscale_ that after it, with the largest element."""

    def step(setup):
        setup.optimizer.zero_grad()
        setup.scaler.scale(loss_of(setup)).backward()
        setup.model.a.grad.clamp_(-7.0, 7.0)
        setup.scaler.unscale_(setup.optimizer)

    (record,) = recorded(build(), step)
    assert events(record, Backward)[0].norms.values() == [pytest.approx(SCALED)]
    (unscaling,) = events(record, Unscaling)
    assert unscaling.norms.values() == [pytest.approx(7.0 * math.sqrt(2.0))]
    assert unscaling.largest.values() == [7.0]


def test_norms_of_scaled_gradients_are_taken_in_the_first_steps():
    """A long run goes without them later: what they tell shows early."""
    records = recorded(build(), *[train] * 66)
    known = [(events(r, Backward)[0].norms is None, events(r, Unscaling)[0].norms is None) for r in records]
    assert known == [(False, False)] * 64 + [(True, True)] * 2


def test_without_a_scaler_nothing_of_it_is_recorded():
    """A loop without a scaler, and one whose scaler is disabled, has plain events without figures for it."""
    setup = build()
    setup.scaler = torch.amp.GradScaler("cpu", enabled=False)
    (record,) = recorded(setup, train)
    assert kinds(record) == ["backward", "optimizer_step"]
    (backward,) = events(record, Backward)
    assert (backward.terms, backward.norms, backward.gradient) == (None, None, None)
    (step,) = events(record, OptimizerStep)
    assert (step.scaler, step.scaler_stage, step.site) == (None, None, "")


class Average:
    def __init__(self, model):
        self.model = model
        self.decay = 0.9
        self.shadow = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self):
        for name, p in self.model.named_parameters():
            self.shadow[name].lerp_(p.detach(), 1 - self.decay)


def test_averages_that_are_written_to_are_seen_step_by_step():
    """An average that moved during a step is told at its end; one that rests, and the model it keeps, are not."""
    setup = build()
    setup.state["average"] = Average(setup.model)

    def moving(setup):
        train(setup)
        setup.state["average"].update()

    records = recorded(setup, train, moving, train)
    assert [events(record, StateMoved) for record in records] == [[], [StateMoved(("average",))], []]


# -- the taps ----------------------------------------------------------------------------------------------------------

TAPS = (
    (torch, "_amp_foreach_non_finite_check_and_unscale_"),
    (torch, "_amp_update_scale_"),
    (GradScaler, "_maybe_opt_step"),
)


def taps():
    return [getattr(owner, name) for owner, name in TAPS]


def test_the_taps_are_put_back():
    """Every tap is replaced inside and torch's own again afterwards, also when the loop raises or observers nest."""
    before = taps()
    with observe(build()), observe(build()):
        assert all(now is not then for now, then in zip(taps(), before, strict=True))
    with pytest.raises(RuntimeError, match="already been called"):
        recorded(build(), train_without_update, train_without_update)
    assert taps() == before


@pytest.mark.parametrize(("owner", "name"), TAPS, ids=[name for _, name in TAPS])
def test_a_tap_that_somebody_else_replaced_stays_theirs(owner, name):
    """What was put over a tap during the run is left there, and passes calls on."""
    original, calls = getattr(owner, name), []
    try:
        with observe(build()) as run, run.step():
            ours = getattr(owner, name)

            def theirs(*args, **kwargs):
                calls.append(name)
                return ours(*args, **kwargs)

            setattr(owner, name, theirs)
            train(run.setup)
        assert getattr(owner, name) is theirs
        train(build())
        assert calls == [name, name]
        assert len(run.records) == 1
    finally:
        setattr(owner, name, original)


def test_two_observers_see_the_same_scaler():
    """Observers that nest each record every act once."""
    setup = build()
    with observe(setup) as outer, observe(setup, track_updates=False) as inner, outer.step(), inner.step():
        train(setup)
    expected = ["backward", "unscale", "optimizer_step", "scaler_update"]
    assert [kinds(run.records[0]) for run in (outer, inner)] == [expected, expected]
