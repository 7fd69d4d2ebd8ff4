from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tl_core import TrainingSetup
from tl_telemetry import ParameterFigures, observe


def scalar_model(**values):
    """Return a module with one named parameter of the given values each."""
    module = nn.Module()
    for name, value in values.items():
        module.register_parameter(name, nn.Parameter(torch.tensor(value)))
    return module


def setup_of(model, optimizers, **parts):
    return TrainingSetup(model, optimizers, **parts)


def kinds(record):
    return [event.kind for event in record.events]


def test_figures_are_those_of_a_hand_computation():
    """Gradient norms before and after clipping, the change, the rate and the counts of one plain step."""
    model = scalar_model(a=[1.0, 2.0], b=[3.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with observe(setup) as run, run.step(torch.zeros(7, 2)) as step:
        loss = 3 * model.a[0] + 4 * model.a[1] + 12 * model.b[0]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.3)
        setup.optimizer.step()
        setup.optimizer.zero_grad()
        step.loss = loss
    (record,) = run.records
    assert (record.step, record.num_examples, record.loss, record.losses) == (0, 7, 47.0, {"loss": 47.0})
    assert record.grad_norm_before_clip == {"optimizer": pytest.approx(13.0)}
    assert record.grad_norm == {"optimizer": pytest.approx(1.3, rel=1e-5)}
    assert record.update_norm == {"optimizer": pytest.approx(0.65, rel=1e-5)}
    assert record.lrs == {"optimizer": (0.5,)}
    assert record.optimizer_steps == {"optimizer": 1}
    assert (record.skipped, record.loss_scale, record.nonfinite_grads) == (False, None, ())
    assert record.parameters == {
        "a": ParameterFigures(True, *(pytest.approx(v, rel=1e-5) for v in (5.0, 0.5, 0.25))),
        "b": ParameterFigures(True, *(pytest.approx(v, rel=1e-5) for v in (12.0, 1.2, 0.6))),
    }
    assert kinds(record) == ["backward", "clip", "optimizer_step", "zero_grad"]
    assert repr(record) == "StepRecord(step=0, events=[backward, clip, optimizer_step, zero_grad])"


def test_a_parameter_without_a_gradient_is_told():
    """A parameter that the loss does not use has no gradient and no figures."""
    model = scalar_model(used=[1.0], unused=[1.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        (2 * model.used).sum().backward()
        setup.optimizer.step()
    assert run.records[0].parameters == {
        "used": ParameterFigures(True, 2.0, 2.0, 2.0),
        "unused": ParameterFigures(has_grad=False),
    }


def test_a_step_without_an_update_keeps_what_backward_reached():
    """Without an update a parameter that a backward pass reached has a gradient, and no norms."""
    model = scalar_model(a=[1.0], b=[1.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=0.25))
    with observe(setup) as run, run.step():
        model.a.sum().backward()
    (record,) = run.records
    assert record.parameters == {"a": ParameterFigures(has_grad=True)}
    assert (record.grad_norm, record.grad_norm_before_clip, record.update_norm) == ({}, {}, {})
    assert (record.skipped, record.optimizer_steps, record.lrs) == (True, {"optimizer": 0}, {"optimizer": (0.25,)})
    assert record.loss is None
    assert record.losses == {}


def test_without_update_tracking_the_change_is_unknown():
    """track_updates=False leaves update_norm empty, and everything else as it is."""
    model = scalar_model(a=[3.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup, track_updates=False) as run, run.step():
        (5 * model.a).sum().backward()
        setup.optimizer.step()
    assert run.records[0].update_norm == {}
    assert run.records[0].parameters == {"a": ParameterFigures(True, 5.0, 5.0, None)}


def test_two_clips_leave_the_norm_before_the_first():
    """Clipping by value and then by norm: the norm before is the one before both."""
    model = scalar_model(a=[1.0, 1.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        (30 * model.a[0] + 40 * model.a[1]).backward()
        nn.utils.clip_grad_value_(model.parameters(), 10.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        setup.optimizer.step()
    (record,) = run.records
    assert record.grad_norm_before_clip == {"optimizer": pytest.approx(50.0)}
    assert record.grad_norm == {"optimizer": pytest.approx(1.0, rel=1e-5)}
    assert [(e.function, e.bound, e.given) for e in record.events if e.kind == "clip"] == [
        ("clip_grad_value_", 10.0, 1),
        ("clip_grad_norm_", 1.0, 1),
    ]


def test_a_clip_before_the_last_micro_batch_says_nothing_of_the_sum():
    """A clip that a further backward pass follows is not taken for the norm before clipping."""
    model = scalar_model(a=[1.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        (30 * model.a).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        (4 * model.a).sum().backward()
        setup.optimizer.step()
    assert run.records[0].grad_norm_before_clip == {"optimizer": pytest.approx(5.0, rel=1e-5)}


@pytest.mark.parametrize("clip", ["generator", "list", "one tensor", "keyword", "two halves"])
def test_clips_are_seen_however_they_are_called(clip):
    """A generator, a list, one tensor, keywords, and the two halves of clipping are one and the same act."""
    model = scalar_model(a=[1.0, 1.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        (3 * model.a[0] + 4 * model.a[1]).backward()
        if clip == "generator":
            norm = nn.utils.clip_grad_norm_((p for p in model.parameters()), 1.0)
        elif clip == "list":
            norm = nn.utils.clip_grad_norm_([model.a], 1.0)
        elif clip == "one tensor":
            norm = nn.utils.clip_grad_norm_(model.a, 1.0)
        elif clip == "keyword":
            norm = nn.utils.clip_grad_norm_(parameters=model.parameters(), max_norm=1.0)
        else:
            norm = nn.utils.get_total_norm([model.a.grad])
            nn.utils.clip_grads_with_norm_(model.parameters(), 1.0, norm)
        setup.optimizer.step()
    (record,) = run.records
    assert float(norm) == pytest.approx(5.0)
    assert kinds(record) == ["backward", "clip", "optimizer_step"]
    assert record.grad_norm_before_clip == {"optimizer": pytest.approx(5.0)}
    assert record.grad_norm == {"optimizer": pytest.approx(1.0, rel=1e-5)}


def test_several_optimizers_have_figures_of_their_own():
    """Figures are keyed by the optimizer's name; the one that did not step has none but its rates."""
    model = scalar_model(a=[1.0], b=[1.0])
    optimizers = {"often": torch.optim.SGD([model.a], lr=0.5), "seldom": torch.optim.SGD([model.b], lr=0.25)}
    setup = setup_of(model, optimizers)
    with observe(setup) as run:
        for index in range(2):
            with run.step():
                (2 * model.a + 3 * model.b).sum().backward()
                optimizers["often"].step()
                optimizers["often"].zero_grad()
                if index == 1:
                    optimizers["seldom"].step()
    first, second = run.records
    assert first.optimizer_steps == {"often": 1, "seldom": 0}
    assert first.grad_norm == {"often": 2.0}
    assert first.lrs == {"often": (0.5,), "seldom": (0.25,)}
    assert second.optimizer_steps == {"often": 1, "seldom": 1}
    assert second.grad_norm == {"often": 2.0, "seldom": 6.0}
    assert second.update_norm == {"often": 1.0, "seldom": 1.5}
    assert (first.skipped, second.skipped) == (False, False)


def test_learning_rates_are_those_that_the_step_used():
    """A rate per group, read when the optimizer stepped and not after the scheduler did; tensors too."""
    model = scalar_model(a=[1.0], b=[1.0])
    groups = [{"params": [model.a], "lr": torch.tensor(0.5)}, {"params": [model.b], "lr": 0.25}]
    setup = setup_of(model, torch.optim.SGD(groups))
    setup.schedulers["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    with observe(setup) as run:
        for _ in range(3):
            with run.step():
                (model.a + model.b).sum().backward()
                setup.optimizer.step()
                setup.scheduler.step()
    assert [record.lrs["optimizer"] for record in run.records] == [(0.5, 0.25), (0.25, 0.125), (0.125, 0.0625)]
    assert [kinds(record) for record in run.records] == [["backward", "optimizer_step", "scheduler_step"]] * 3


def test_non_finite_gradients_are_named():
    """nonfinite_grads holds the names of the parameters whose gradient had NaN or Inf when stepped."""
    model = scalar_model(good=[1.0], nan=[0.0, 1.0], inf=[0.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        loss = model.good.sum() + (model.nan.sqrt() * torch.tensor([0.0, 1.0])).sum() + model.inf.sqrt().sum()
        loss.backward()
        setup.optimizer.step()
    assert run.records[0].nonfinite_grads == ("nan", "inf")
    assert math.isnan(run.records[0].grad_norm["optimizer"])


def test_an_lbfgs_step_is_one_update():
    """A closure's backward passes belong to the one step that called it."""
    model = scalar_model(a=[4.0])
    setup = setup_of(model, torch.optim.LBFGS(model.parameters(), lr=1.0, max_iter=2))
    passes = []

    def closure():
        setup.optimizer.zero_grad()
        loss = (model.a**2).sum()
        loss.backward()
        passes.append(None)
        return loss

    with observe(setup) as run, run.step() as step:
        step.loss = setup.optimizer.step(closure)
    (record,) = run.records
    assert record.optimizer_steps == {"optimizer": 1}
    assert sum(event.kind == "backward" for event in record.events) == len(passes)
    assert record.events[-1].kind == "optimizer_step"
    assert {event.in_step for event in record.events if event.kind == "backward"} == {"optimizer"}
    assert record.update_norm == {"optimizer": pytest.approx(abs(model.a.item() - 4.0), rel=1e-5)}


class Decayed(torch.optim.SGD):
    """An optimizer of one's own, on top of torch's: its step() decays, then calls the one below."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                torch._foreach_mul_(group["params"], 0.5)
        return super().step(closure)


def test_a_subclass_that_calls_the_step_below_makes_one_update():
    """One call of an overridden step() is one step, and its change is the whole change."""
    model = scalar_model(a=[4.0])
    torch.optim.SGD(scalar_model(b=[1.0]).parameters())  # torch hooks a class's step at its first instance
    setup = setup_of(model, Decayed(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        model.a.sum().backward()
        setup.optimizer.step()
    (record,) = run.records
    assert record.optimizer_steps == {"optimizer": 1}
    assert record.update_norm == {"optimizer": 3.0}


def test_sparse_and_complex_gradients_have_norms():
    """Sparse gradients are coalesced first; complex ones are measured by their moduli."""
    model = nn.Module()
    model.table = nn.Embedding(5, 1, sparse=True)
    model.z = nn.Parameter(torch.tensor([1.0 + 1.0j]))
    optimizers = [torch.optim.SGD([model.table.weight], lr=1.0), torch.optim.SGD([model.z], lr=1.0)]
    setup = setup_of(model, optimizers)
    with observe(setup) as run, run.step():
        # row 1 twice: its entries add up to 4
        (2 * model.table(torch.tensor([1, 1, 3]))).sum().backward()
        (3 * model.z.real + 4 * model.z.imag).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    (record,) = run.records
    assert record.grad_norm == {"optimizer[0]": pytest.approx(math.hypot(4, 2)), "optimizer[1]": pytest.approx(5.0)}
    assert record.update_norm == pytest.approx(record.grad_norm, rel=1e-5)


def test_mixed_precisions_are_measured_each_in_its_own():
    """Parameters of several dtypes in one model: float16 norms do not overflow, float64 ones keep their digits."""
    model = nn.Module()
    model.low = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    model.high = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=0.0))
    with observe(setup) as run, run.step():
        (60000 * model.low).sum().backward()
        ((1 / 3) * model.high).sum().backward()
        setup.optimizer.step()
    figures = run.records[0].parameters
    assert figures["low"].grad_norm == pytest.approx(120000, rel=1e-3)
    assert figures["high"].grad_norm == 1 / 3


def test_what_follows_the_last_record_is_kept_with_it():
    """A zero_grad or a scheduler's step after the last update is not lost."""
    model = scalar_model(a=[4.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    setup.schedulers["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.5)
    with observe(setup) as run:
        for _ in range(2):
            model.a.sum().backward()
            setup.optimizer.step()
            setup.scheduler.step()
            setup.optimizer.zero_grad()
    assert [kinds(record) for record in run.records] == [
        ["backward", "optimizer_step"],
        ["zero_grad", "scheduler_step", "backward", "optimizer_step", "zero_grad", "scheduler_step"],
    ]


def test_gradients_scaled_by_hand_are_no_clip():
    """An edit of gradients in place between backward and step is an act of its own."""
    model = scalar_model(a=[4.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        (8 * model.a).sum().backward()
        model.a.grad /= 4
        setup.optimizer.step()
    (record,) = run.records
    assert kinds(record) == ["backward", "gradient_edit", "optimizer_step"]
    assert (record.events[1].cleared, record.events[1].edited) == ((), (0,))
    assert record.grad_norm == record.grad_norm_before_clip == {"optimizer": 2.0}


def test_tied_weights_are_one_parameter():
    """A tensor that two modules hold appears once, under its first name."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    model[1].weight = model[0].weight
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        model(torch.ones(1, 2)).sum().backward()
        setup.optimizer.step()
    assert list(run.records[0].parameters) == ["0.weight"]


def test_wrappers_do_not_show_in_names():
    """DataParallel's and torch.compile's prefixes are cut from parameter names."""
    inner = nn.Linear(2, 1)
    model = nn.DataParallel(torch.compile(inner, backend="eager"))
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run, run.step():
        inner(torch.ones(1, 2)).sum().backward()
        setup.optimizer.step()
    assert list(run.records[0].parameters) == ["weight", "bias"]


def test_a_named_dict_of_losses():
    """A step's dict of losses is kept by name; "loss" is the main one, else the first."""
    model = scalar_model(a=[4.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    with observe(setup) as run:
        with run.step() as step:
            assert step.loss is None
            step.loss = {"reconstruction": torch.tensor(2.0), "loss": 5.0}
            assert step.loss == 5.0
        with run.step() as step:
            step.loss = {"first": torch.tensor(2.0), "second": 3}
    assert [record.loss for record in run.records] == [5.0, 2.0]
    assert run.records[0].losses == {"reconstruction": 2.0, "loss": 5.0}


def test_a_loss_that_is_changed_later_was_copied():
    """An in-place change of the loss after the step does not change the record."""
    model = scalar_model(a=[4.0])
    setup = setup_of(model, torch.optim.SGD(model.parameters(), lr=1.0))
    total = torch.zeros(())
    with observe(setup) as run:
        for value in (1.0, 2.0):
            with run.step() as step:
                total += value
                step.loss = total
    assert run.losses == [1.0, 3.0]
