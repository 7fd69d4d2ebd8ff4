"""The fixture lightning_trainer and the runner's checks of a real Trainer.fit, in real runs of pytest."""

from __future__ import annotations

import json

import pytest

MODULE = """
import lightning.pytorch as pl
import pytest
import torch

class Lit(pl.LightningModule):
    trained = slice(None)

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_index):
        inputs, targets = batch
        return torch.nn.functional.mse_loss(self.net(inputs), targets)

    def configure_optimizers(self):
        return torch.optim.SGD(self.net[self.trained].parameters(), lr=0.1)

class HalfTrained(Lit):
    trained = slice(2, None)

def loader():
    inputs = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return torch.utils.data.DataLoader(data, batch_size=8)

def watched_fit(training_runner, trainer, module):
    with training_runner.watch_lightning(trainer) as run:
        trainer.fit(module, loader())
    return run
"""


@pytest.fixture(autouse=True, scope="module")
def _lightning_is_imported():
    """Import Lightning before the runs in this process, which else would drop it with each."""
    pytest.importorskip("lightning.pytorch")
    pytest.importorskip("tl_lightning")


@pytest.fixture
def run_lit(run_tests):
    def run(tests: str, *arguments: str, **options: bool) -> pytest.RunResult:
        return run_tests(MODULE + tests, *arguments, **options)

    return run


def test_the_trainer_trains_under_watch(run_lit, pytester):
    """The Trainer makes 8 updates on the test's device and leaves no files; the watched run passes its assertions."""
    source = """
def test_it(lightning_trainer, training_runner):
    run = watched_fit(training_runner, lightning_trainer, Lit())
    run.assert_healthy().assert_num_updates(8)
    assert len(run.records) == 8
    assert lightning_trainer.strategy.root_device == training_runner.device
"""
    before = sorted(pytester.path.iterdir())
    run_lit(source).assert_outcomes(passed=1)
    left = {path.name for path in pytester.path.iterdir() if path not in before}
    assert left - {"__pycache__"} == {"test_inner.py"}


def test_calling_the_trainer_makes_others(run_lit):
    """Another Trainer has the arguments that it is given, and the test's device; the runner makes the same."""
    source = """
def test_it(lightning_trainer, training_runner):
    for make in (lightning_trainer, training_runner.make_lightning_trainer):
        other = make(max_steps=3, accumulate_grad_batches=2)
        assert (other.max_steps, other.accumulate_grad_batches) == (3, 2)
        assert other.strategy.root_device == training_runner.device
        assert isinstance(other, pl.Trainer)
        assert other is not lightning_trainer
    assert lightning_trainer.max_steps == 8
"""
    run_lit(source).assert_outcomes(passed=1)


def test_a_finding_fails_the_test_with_the_rule(run_lit):
    """An optimizer that misses a layer is found by its rule, shown in the section of findings and in the last lines."""
    source = """
def test_it(lightning_trainer, training_runner):
    watched_fit(training_runner, lightning_trainer, HalfTrained()).assert_healthy()
"""
    result = run_lit(source)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*tl findings*",
            "Training run: failed",
            "  [[]uncovered-parameter[]] *",
            "tl: uncovered-parameter 1x (test_it)",
        ]
    )


def test_allowed_rules_reach_the_watch(run_lit):
    """--tl-allow holds for watched fits too."""
    source = """
def test_it(lightning_trainer, training_runner):
    watched_fit(training_runner, lightning_trainer, HalfTrained()).assert_healthy()
"""
    run_lit(source, "--tl-allow=uncovered-parameter").assert_outcomes(passed=1)


def test_the_comparing_checks_run(run_lit):
    """Resume and accumulation pass for a module that does both right; other checks take what from_lightning gives."""
    source = """
def test_resume(lightning_trainer, training_runner):
    def make_fit():
        return lightning_trainer(max_epochs=3), Lit(), loader()

    assert training_runner.assert_lightning_resume_equivalent(make_fit, steps=8, resume_at=4).ok

def test_accumulation(training_runner):
    assert training_runner.assert_lightning_accumulation_equivalent(Lit, list(loader())).ok

def test_other_checks(training_runner):
    make_setup, step = training_runner.from_lightning(Lit)
    training_runner.run(make_setup, list(loader()), step, steps=8).assert_healthy()
"""
    run_lit(source).assert_outcomes(passed=3)


def test_the_persons_error_is_shown_without_the_trainers_frames(run_lit):
    """An exception in training_step shows the test's line and the one that raised, nothing of what lies between."""
    source = """
class Broken(Lit):
    def training_step(self, batch, batch_index):
        raise RuntimeError("out of luck")

def test_it(training_runner):
    training_runner.assert_lightning_accumulation_equivalent(Broken, list(loader()))
"""
    result = run_lit(source)
    result.assert_outcomes(failed=1)
    assert [line for line in result.outlines if line.startswith(">")] == [
        ">       training_runner.assert_lightning_accumulation_equivalent(Broken, list(loader()))",
        '>       raise RuntimeError("out of luck")',
    ]


def test_a_fit_that_never_began_is_no_error_of_its_own(run_lit, pytester):
    """A test that fails before the watched fit begins shows its own failure; the report says that nothing was seen."""
    source = """
def test_it(lightning_trainer, training_runner):
    with training_runner.watch_lightning(lightning_trainer) as run:
        assert False
"""
    result = run_lit(source, "--tl-report=reports")
    result.assert_outcomes(failed=1)
    result.stdout.no_fnmatch_line("*INTERNALERROR*")
    result.stdout.no_fnmatch_line("*tl findings*")
    (report,) = (pytester.path / "reports").iterdir()
    _, run = map(json.loads, report.read_text().splitlines())
    told = "[not-judged] no training began inside of the watch\n  fix: look at its limits and data"
    assert run == {"kind": "run", "run": 0, "error": f"Training run: could not judge\n\nNotes:\n{told}"}


@pytest.mark.parametrize("workers", [False, True], ids=["one process", "xdist"])
def test_seeds_and_reports_are_the_same_with_workers(run_lit, pytester, workers):
    """Each test starts from --tl-seed, on whichever worker; its watched run is in --tl-report."""
    if workers:
        pytest.importorskip("xdist")
    source = """
@pytest.mark.parametrize("number", range(3))
def test_it(number, lightning_trainer, training_runner):
    assert training_runner.seed == 6
    watched_fit(training_runner, lightning_trainer, Lit()).assert_healthy()
"""
    arguments = ("-n", "2") if workers else ()
    result = run_lit(source, *arguments, "--tl-seed=6", "--tl-report=reports", subprocess=workers)
    result.assert_outcomes(passed=3)
    losses = []
    for report in (pytester.path / "reports").iterdir():
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "step"])
    assert [len(one) for one in losses] == [8, 8, 8]
    assert losses[0] == losses[1] == losses[2]
