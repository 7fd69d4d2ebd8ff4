"""What the fixtures give, and that they leave nothing behind."""

from __future__ import annotations

import inspect
import random

import numpy as np
import pytest
import torch

import tl_pytest
from tl_pytest._extras import MissingExtraError
from tl_pytest._runner import TrainingRunner

DRAW = """
import random
import numpy
import pytest
import torch

def draw():
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))
"""


def test_the_seed_seeds_every_generator(run_tests):
    """Two tests with torch_seed draw the same numbers from python, numpy and torch; another seed draws others."""
    source = (
        DRAW
        + """
seen = []

def test_first(torch_seed):
    seen.append(draw())

def test_between():
    draw()

def test_second(torch_seed):
    seen.append(draw())
    assert seen[0] == seen[1]
    torch.manual_seed(torch_seed + 1)
    assert float(torch.rand(())) != seen[0][2]
"""
    )
    run_tests(source, "-p", "no:randomly").assert_outcomes(passed=3)


@pytest.mark.parametrize("ending", ["pass", "assert False", "pytest.skip()"], ids=["pass", "fail", "skip"])
def test_generators_are_put_back(run_tests, ending):
    """After a test with torch_seed the generators go on where they were, however the test ended."""
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = (random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state())
    run_tests(DRAW + f"\ndef test_it(torch_seed):\n    draw()\n    {ending}\n", "--tl-seed=9")
    assert random.getstate() == before[0]
    assert (np.random.get_state()[1] == before[1]).all()
    assert torch.equal(torch.get_rng_state(), before[2])


def test_without_the_fixture_generators_move(run_tests):
    """The check above can fail: a test without torch_seed leaves its traces."""
    torch.manual_seed(5)
    before = torch.get_rng_state()
    run_tests(DRAW + "\ndef test_it():\n    draw()\n").assert_outcomes(passed=1)
    assert not torch.equal(torch.get_rng_state(), before)


def test_the_runner_trains_on_the_device_with_the_seed(run_tests, loop):
    """training_runner.run binds device and seed; the run passes its assertions and is repeated bit for bit."""
    source = (
        loop
        + """
def test_it(training_runner, torch_device, torch_seed):
    assert (training_runner.device, training_runner.seed) == (torch_device, torch_seed) == (torch.device("cpu"), 4)
    assert repr(training_runner) == "TrainingRunner(device='cpu', seed=4)"
    first = training_runner.run(make_setup, make_batch(), train_step, steps=5)
    first.assert_healthy()
    second = training_runner.run(make_setup, make_batch(), train_step, steps=5)
    other = training_runner.run(make_setup, make_batch(), train_step, steps=5, seed=5)
    assert first.losses == second.losses != other.losses
    assert len(first.records) == 5
"""
    )
    run_tests(source, "--tl-seed=4").assert_outcomes(passed=1)


# what a method leaves to whoever builds a check of its own
OF_OTHER_CHECKS = {"run": {"catch"}, "observe": {"gradients"}}


class _Recorder:
    """Stands for the packages with checks: keeps what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name):
        return lambda *arguments, **keywords: self.calls.append((name, arguments, keywords))


@pytest.fixture
def recorder(monkeypatch):
    recorder = _Recorder()
    for package in ("tl_accum", "tl_amp", "tl_coverage", "tl_resume", "tl_telemetry"):
        monkeypatch.setattr(f"tl_pytest._runner.{package}", recorder)
    return recorder


def test_run_passes_everything_on(recorder):
    """Every argument of run reaches run_training; device and seed are the runner's unless they are given."""
    runner = TrainingRunner(torch.device("meta"), 3)
    runner.run("setup", "data", "step", steps=7, track_updates=False)
    runner.run("setup", "data", loss_fn="loss", device="cpu", seed=0)
    assert recorder.calls == [
        (
            "run_training",
            ("setup", "data", "step"),
            {"loss_fn": None, "steps": 7, "device": torch.device("meta"), "seed": 3, "track_updates": False},
        ),
        (
            "run_training",
            ("setup", "data", None),
            {"loss_fn": "loss", "steps": 20, "device": "cpu", "seed": 0, "track_updates": True},
        ),
    ]


def test_the_other_checks_pass_everything_on(recorder):
    """observe and assert_optimizer_coverage hand their arguments to the checks of the same name."""
    runner = TrainingRunner(torch.device("cpu"), 0)
    runner.observe("setup", track_updates=False, allow=["lr-zero"])
    runner.assert_optimizer_coverage("model", "optimizer", ignore=["a*"], allow_frozen=False, no_decay=["*.bias"])
    assert recorder.calls == [
        ("observe", ("setup",), {"track_updates": False, "allow": ["lr-zero"]}),
        (
            "assert_optimizer_coverage",
            ("model", "optimizer"),
            {"ignore": ["a*"], "allow_frozen": False, "no_decay": ["*.bias"]},
        ),
    ]


def test_the_resume_checks_pass_everything_on(recorder):
    """The two checks of tl_resume get all arguments; device and seed are the runner's unless they are given."""
    runner = TrainingRunner(torch.device("meta"), 3)
    resume = {
        "loss_fn": None,
        "steps": 6,
        "resume_at": 2,
        "save": "save",
        "load": "load",
        "restores_step": True,
        "make_step": None,
        "fresh_process": True,
        "rtol": 0.1,
        "atol": 0.2,
        "allow": ["rng-not-restored"],
    }
    crash = {"loss_fn": None, "save": "save", "load": "load", "steps": 6, "crash_points": 3, "allow": ["not-synced"]}
    runner.assert_resume_equivalent("setup", "data", "step", **resume)
    runner.assert_resume_equivalent("setup", "data", "step", **resume, device="cpu", seed=0)
    runner.assert_checkpoint_crash_safe("setup", "data", "step", **crash)
    runner.assert_checkpoint_crash_safe("setup", "data", "step", **crash, seed=0)
    given = ("setup", "data", "step")
    assert recorder.calls == [
        ("assert_resume_equivalent", given, {**resume, "device": torch.device("meta"), "seed": 3}),
        ("assert_resume_equivalent", given, {**resume, "device": "cpu", "seed": 0}),
        ("assert_checkpoint_crash_safe", given, {**crash, "seed": 3}),
        ("assert_checkpoint_crash_safe", given, {**crash, "seed": 0}),
    ]


def test_the_accumulation_check_passes_everything_on(recorder):
    """The check of tl_accum gets all arguments; device and seed are the runner's unless they are given."""
    runner = TrainingRunner(torch.device("meta"), 3)
    options = {
        "loss_fn": None,
        "accumulation_steps": 8,
        "cycles": 3,
        "epoch_length": 20,
        "split": "split",
        "disable_dropout": False,
        "rtol": 0.1,
        "atol": 0.2,
        "allow": ["mean-of-means"],
    }
    given = ("setup", "data", "make_step")
    runner.assert_accumulation_equivalent(*given, **options)
    runner.assert_accumulation_equivalent(*given, **options, device="cpu", seed=0)
    assert recorder.calls == [
        ("assert_accumulation_equivalent", given, {**options, "device": torch.device("meta"), "seed": 3}),
        ("assert_accumulation_equivalent", given, {**options, "device": "cpu", "seed": 0}),
    ]


def test_the_mixed_precision_check_passes_everything_on(recorder):
    """The check of tl_amp gets all arguments; device and seed are the runner's unless they are given."""
    runner = TrainingRunner(torch.device("meta"), 3)
    options = {"loss_fn": None, "steps": 6, "every": 2, "max_skipped_fraction": 0.5, "allow": ["static-scale"]}
    given = ("setup", "data", "step")
    runner.assert_mixed_precision_training(*given, **options)
    runner.assert_mixed_precision_training(*given, **options, device="cpu", seed=0)
    assert recorder.calls == [
        ("assert_mixed_precision_training", given, {**options, "device": torch.device("meta"), "seed": 3}),
        ("assert_mixed_precision_training", given, {**options, "device": "cpu", "seed": 0}),
    ]


@pytest.mark.parametrize("name", [name for name in vars(TrainingRunner) if not name.startswith("_")])
def test_the_defaults_are_those_of_the_checks(name):
    """A method has the parameters and defaults of its function; device and seed are None, which is the test's."""
    try:
        function = getattr(tl_pytest, "run_training" if name == "run" else name)
    except MissingExtraError as error:
        pytest.skip(str(error))
    wanted = {
        key: None if key in ("device", "seed", "trainer_class") else one.default  # a class of transformers
        for key, one in inspect.signature(function).parameters.items()
        if key not in OF_OTHER_CHECKS.get(name, ())
    }
    _, *parameters = inspect.signature(getattr(TrainingRunner, name)).parameters.items()
    assert {key: one.default for key, one in parameters} == wanted


def test_the_runner_asserts_accumulation(run_tests, loop):
    """training_runner.assert_accumulation_equivalent returns the report, or fails with the finding."""
    source = (
        loop
        + """
import pytest
from tl_pytest import CheckFailed, standard_step

def loss_fn(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

def undivided(k):
    return standard_step(lambda model, batch: k * loss_fn(model, batch), accumulation_steps=k)

def test_it(training_runner):
    assert training_runner.assert_accumulation_equivalent(make_setup, make_batch(), loss_fn=loss_fn).ok
    with pytest.raises(CheckFailed) as caught:
        training_runner.assert_accumulation_equivalent(make_setup, make_batch(), undivided)
    assert caught.value.findings[0].rule == "loss-not-divided"
"""
    )
    run_tests(source).assert_outcomes(passed=1)


def test_the_runner_asserts_mixed_precision(run_tests, loop):
    """training_runner.assert_mixed_precision_training returns the run, or fails with the finding."""
    source = (
        loop
        + """
import pytest
from tl_pytest import CheckFailed, standard_step

def scaled():
    setup = make_setup()
    setup.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return setup

def past_the_scaler(setup, batch):
    setup.optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(setup.model(batch[0]), batch[1])
    setup.scaler.scale(loss).backward()
    setup.optimizer.step()
    setup.scaler.update()
    return loss

def loss_fn(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

def test_it(training_runner):
    run = training_runner.assert_mixed_precision_training(scaled, make_batch(), loss_fn=loss_fn, steps=6)
    assert len(run.records) == 6
    with pytest.raises(CheckFailed) as caught:
        training_runner.assert_mixed_precision_training(scaled, make_batch(), past_the_scaler, steps=6)
    assert caught.value.findings[0].rule == "stepped-past-scaler"
"""
    )
    run_tests(source).assert_outcomes(passed=1)


def test_the_runner_asserts_a_resume(run_tests, loop):
    """training_runner.assert_resume_equivalent returns the report, or fails with the finding."""
    source = (
        loop
        + """
import pytest
from tl_pytest import CheckFailed

def save(setup, path):
    torch.save(setup.model.state_dict(), path)

def load(setup, path):
    torch.load(path)  # and nothing of it is used

def test_it(training_runner):
    batches = [make_batch() for _ in range(4)]
    assert training_runner.assert_resume_equivalent(make_setup, batches, train_step).ok
    with pytest.raises(CheckFailed) as caught:
        training_runner.assert_resume_equivalent(make_setup, batches, train_step, save=save, load=load)
    assert caught.value.findings[0].rule == "model-not-restored"
"""
    )
    run_tests(source).assert_outcomes(passed=1)


def test_the_runner_asserts_coverage(run_tests, loop):
    """training_runner.assert_optimizer_coverage returns the report, or fails with the finding."""
    source = (
        loop
        + """
import pytest
from tl_pytest import CheckFailed

def test_it(training_runner):
    setup = make_setup()
    assert training_runner.assert_optimizer_coverage(setup.model, setup.optimizer).ok
    setup.model.extra = torch.nn.Linear(2, 2, bias=False)
    with pytest.raises(CheckFailed) as caught:
        training_runner.assert_optimizer_coverage(setup.model, setup.optimizer)
    assert [finding.rule for finding in caught.value.findings] == ["uncovered-parameter"]
    training_runner.assert_optimizer_coverage(setup.model, setup.optimizer, ignore=["extra.*"])
"""
    )
    run_tests(source).assert_outcomes(passed=1)


def test_the_runner_observes(run_tests, loop):
    """training_runner.observe watches a loop of the test's own."""
    source = (
        loop
        + """
def test_it(training_runner):
    setup = make_setup()
    with training_runner.observe(setup) as run:
        for _ in range(3):
            train_step(setup, make_batch())
    assert len(run.records) == 3
"""
    )
    run_tests(source).assert_outcomes(passed=1)


def test_fixtures_lists_the_fixtures(run_tests):
    """--fixtures shows the five fixtures with a sentence each, and -v a worked example."""
    lines = run_tests("", "--fixtures").outlines
    told = {
        "hf_trainer": "Makes Trainers of transformers set up for tests: on the test's device, with its seed,",
        "lightning_trainer": "A Lightning Trainer set up for tests: on the test's device, quiet, for 8 updates,",
        "torch_device": "The device that tests train on, a torch.device: --tl-device",
        "torch_seed": "The seed, an int, with which all random number generators are seeded before the test",
        "training_runner": "Runs training loops on the test's device with the test's seed: a tl_pytest.TrainingRunner",
    }
    for name, sentence in told.items():
        (start,) = (number for number, line in enumerate(lines) if line.startswith(f"{name} -- "))
        assert lines[start + 1].startswith(f"    {sentence}")
    lines = run_tests("", "--fixtures", "-v").outlines
    for name in told:
        (start,) = (number for number, line in enumerate(lines) if line.startswith(f"{name} -- "))
        assert "    Example::" in lines[start : start + 12], name
        assert any("def test_" in line and f"({name}" in line for line in lines[start : start + 16]), name
