from __future__ import annotations

import threading
import warnings
import weakref

import pytest
import torch
from torch import nn

from tl_core import NotJudged, TrainingSetup
from tl_telemetry import observe


def make_setup():
    model = nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def train(setup, steps=1):
    for _ in range(steps):
        setup.optimizer.zero_grad()
        loss = setup.model(torch.ones(2, 3)).pow(2).mean()
        loss.backward()
        setup.optimizer.step()
    return loss


def in_thread(target):
    errors = []

    def guarded():
        try:
            target()
        except BaseException as error:  # noqa: BLE001  handed to the test's own thread
            errors.append(error)

    thread = threading.Thread(target=guarded)
    thread.start()
    return thread, errors


def finish(thread, errors):
    thread.join(60)
    assert not thread.is_alive()
    assert errors == []


def test_another_threads_loop_is_not_seen():
    """Optimizers, backward passes, clips and warnings of another thread are not this observer's."""
    mine, other = make_setup(), make_setup()

    def work():
        train(other, 3)
        nn.utils.clip_grad_norm_(other.model.parameters(), 1.0)

    with observe(mine) as run, run.step():
        finish(*in_thread(work))
        train(mine)
    (record,) = run.records
    assert [event.kind for event in record.events] == ["backward", "optimizer_step"]


def test_two_threads_observe_at_once():
    """Two observers in two threads at once both get the records of their own loop."""
    rates = {"slow": 0.125, "fast": 0.5}
    barrier = threading.Barrier(2)
    runs = {}

    def work(name):
        model = nn.Linear(3, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=rates[name])
        setup = TrainingSetup(model, {name: optimizer})
        with observe(setup) as run:
            for index in range(40):
                with run.step() as step:
                    barrier.wait(30)
                    optimizer.zero_grad()
                    loss = model(torch.full((1, 3), 2.0)).sum() * (index + 1)
                    loss.backward()
                    nn.utils.clip_grad_norm_(model.parameters(), 1e9)
                    optimizer.step()
                    step.loss = loss
        runs[name] = run

    threads = [in_thread(lambda name=name: work(name)) for name in rates]
    for thread in threads:
        finish(*thread)
    for name, rate in rates.items():
        for index, record in enumerate(runs[name].records):
            norm = 2 * 3**0.5 * (index + 1)
            expected = (["zero_grad"] if index else []) + ["backward", "clip", "optimizer_step"]
            assert [event.kind for event in record.events] == expected
            assert record.optimizer_steps == {name: 1}
            assert record.grad_norm == {name: pytest.approx(norm, rel=1e-5)}
            assert record.update_norm == {name: pytest.approx(norm * rate, rel=1e-3)}


def test_a_loop_without_steps_has_a_record_an_update():
    """Without run.step() a record closes at each update; what comes before belongs to it."""
    setup = make_setup()
    with observe(setup) as run:
        for index in range(4):
            setup.model(torch.ones(2, 3)).sum().backward()
            if index % 2:
                setup.optimizer.step()
                setup.optimizer.zero_grad()
    assert [[event.kind for event in record.events] for record in run.records] == [
        ["backward", "backward", "optimizer_step"],
        ["zero_grad", "backward", "backward", "optimizer_step", "zero_grad"],
    ]
    assert run.losses == []
    assert run.assert_healthy() is run


def test_a_loop_without_steps_that_updates_in_its_backward_pass():
    """Optimizers that step in gradient hooks make one record a backward pass."""
    setup = make_setup()
    setup.optimizers = {n: torch.optim.SGD([p], lr=0.1) for n, p in setup.model.named_parameters()}
    for name, p in setup.model.named_parameters():

        def update(p, name=name):
            setup.optimizers[name].step()
            p.grad = None

        p.register_post_accumulate_grad_hook(update)
    with observe(setup) as run:
        for _ in range(3):
            setup.model(torch.ones(2, 3)).pow(2).sum().backward()
    assert [record.optimizer_steps for record in run.records] == [{"weight": 1, "bias": 1}] * 3
    assert run.records[2].events[-1].filled == (0, 1)
    assert run.assert_healthy() is run


def test_a_loop_that_is_observed_from_its_middle_on():
    """Gradients that are there already, and an optimizer with state, are taken as they are."""
    model = nn.Linear(3, 1)
    setup = TrainingSetup(model, torch.optim.Adam(model.parameters(), lr=0.1))
    setup.schedulers["scheduler"] = torch.optim.lr_scheduler.ExponentialLR(setup.optimizer, 0.9)

    def update():
        setup.optimizer.step()
        setup.scheduler.step()
        setup.optimizer.zero_grad()

    for _ in range(3):
        model(torch.ones(2, 3)).pow(2).sum().backward()
        update()
    model(torch.ones(2, 3)).pow(2).sum().backward()
    with observe(setup) as run:
        for _ in range(3):
            with run.step():
                update()
                model(torch.ones(2, 3)).pow(2).sum().backward()
    assert [record.optimizer_steps["optimizer"] for record in run.records] == [1, 1, 1]
    assert run.records[0].lrs["optimizer"] == (pytest.approx(0.1 * 0.9**3),)
    assert run.assert_healthy() is run


def test_an_observer_that_begins_inside_of_a_step():
    """An observer that is entered in an optimizer's closure does not mind the step's end."""
    setup = make_setup()
    contexts = []

    def closure():
        setup.optimizer.zero_grad()
        contexts.append(observe(setup))
        runs.append(contexts[-1].__enter__())
        loss = setup.model(torch.ones(2, 3)).pow(2).sum()
        loss.backward()
        return loss

    runs = []
    setup.optimizer.step(closure)
    train(setup)
    contexts[0].__exit__(None, None, None)
    assert [record.optimizer_steps["optimizer"] for record in runs[0].records] == [1]


def test_an_optimizer_that_is_built_during_the_run_is_named():
    """An optimizer that the setup does not know is told by its class; one put in the setup goes by its name there."""
    setup = make_setup()
    with observe(setup) as run:
        with run.step():
            train(setup)
        with run.step():
            stray = torch.optim.Adam(setup.model.parameters(), lr=0.1)
            setup.model(torch.ones(2, 3)).sum().backward()
            stray.step()
        with run.step():
            setup.optimizer = torch.optim.SGD(setup.model.parameters(), lr=0.2)
            train(setup)
    assert [record.optimizer_steps for record in run.records] == [
        {"optimizer": 1},
        {"optimizer": 0, "Adam that is not in the setup": 1},
        {"optimizer": 1},
    ]
    assert run.records[2].lrs == {"optimizer": (0.2,)}
    assert run.summary().splitlines()[0] == "3 steps, updates: optimizer 2, Adam that is not in the setup 1"


def test_optimizers_that_have_nothing_to_do_with_the_setup_are_let_go():
    """Of optimizers that are made anew in every step and hold nothing of the setup, only the first few are followed."""
    setup = make_setup()
    made = []
    with observe(setup) as run:
        for _ in range(10):
            with run.step():
                other = nn.Linear(2, 1)
                inner = torch.optim.SGD(other.parameters(), lr=0.1)
                other(torch.ones(1, 2)).sum().backward()
                inner.step()
                made.append(weakref.ref(other.weight))
                train(setup)
    del other, inner
    assert [weight() is not None for weight in made] == [True] * 4 + [False] * 6
    assert run.records[0].optimizer_steps == {"optimizer": 1, "SGD that is not in the setup": 1}
    assert run.records[1].optimizer_steps == {"optimizer": 1, "SGD that is not in the setup (2)": 1}
    assert run.records[9].optimizer_steps == {"optimizer": 1}


def test_a_scripted_model_is_watched():
    """A TorchScript model, whose modules cannot be looked into, trains as any other."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1)))
    setup = TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with observe(setup) as run:
        for _ in range(3):
            with run.step() as step:
                step.loss = train(setup)
    assert list(run.records[0].parameters) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert run.assert_healthy() is run


def test_a_run_can_be_judged_before_it_is_over():
    """Inside of the block the run is judged by what there is so far."""
    setup = make_setup()
    with observe(setup) as run:
        for _ in range(3):
            with run.step() as step:
                step.loss = train(setup)
        assert run.assert_healthy(frozen=[]) is run
        with pytest.raises(AssertionError, match="frozen-moved"):
            run.assert_healthy(frozen=["bias"])
        assert run.final < run.initial


def test_steps_outside_of_the_block_are_refused():
    """run.step() after the run is over is misuse."""
    with observe(make_setup()) as run:
        pass
    with pytest.raises(RuntimeError) as error, run.step():
        pass
    assert str(error.value) == "run.step() must be used inside of the block that observes: this run is over"


def test_steps_inside_of_steps_are_refused():
    """run.step() inside of a run.step() is misuse."""
    with observe(make_setup()) as run, run.step():
        with pytest.raises(RuntimeError) as error, run.step():
            pass
        assert str(error.value) == "run.step() was entered inside of a run.step() block: a step has one record"
    assert len(run.records) == 1


def test_a_loop_that_trains_something_else_is_not_judged() -> None:
    """Watching one setup while the loop trains another model can judge nothing, and says so."""
    watched, trained = (TrainingSetup(m := nn.Linear(3, 1), torch.optim.SGD(m.parameters(), lr=0.1)) for _ in range(2))
    with observe(watched) as run:
        for _ in range(5):
            trained.optimizer.zero_grad()
            trained.model(torch.ones(2, 3)).square().mean().backward()
            trained.optimizer.step()
    report = run.report
    assert (report.ok, report.judged, report.findings) == (False, False, ())
    with pytest.raises(NotJudged, match="could not judge"):
        run.assert_healthy()
