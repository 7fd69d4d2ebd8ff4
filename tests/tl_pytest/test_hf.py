"""The fixture hf_trainer and the runner's checks of a real trainer.train(), in real runs of pytest."""

from __future__ import annotations

import json

import pytest

MODEL = """
from pathlib import Path

import pytest
import torch
from transformers import Trainer

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = torch.nn.Linear(4, 8)
        self.head = torch.nn.Linear(8, 1)

    def forward(self, inputs, labels):
        outputs = self.head(torch.tanh(self.hidden(inputs)))
        return {"loss": torch.nn.functional.mse_loss(outputs, labels), "logits": outputs}

def data():
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(1))
    return {"inputs": inputs, "labels": inputs.sum(1, keepdim=True)}

class HeadOnly(Trainer):
    def create_optimizer(self, *model):
        self.optimizer = torch.optim.SGD(self.model.head.parameters(), lr=0.1)
        return self.optimizer

def watched(training_runner, trainer):
    with training_runner.watch_hf(trainer) as run:
        trainer.train()
    return run
"""


@pytest.fixture(autouse=True, scope="module")
def _transformers_is_imported():
    """Import what trains before the runs in this process, which else would drop it with each."""
    pytest.importorskip("transformers.trainer")
    pytest.importorskip("tl_hf")


@pytest.fixture
def run_hf(run_tests):
    def run(tests: str, *arguments: str, **options: bool) -> pytest.RunResult:
        return run_tests(MODEL + tests, *arguments, **options)

    return run


def test_the_trainer_trains_under_watch(run_hf, pytester):
    """The Trainer makes 8 updates on the test's device, with its seed, and leaves nothing in the current folder."""
    source = """
def test_it(hf_trainer, training_runner, tmp_path):
    trainer = hf_trainer(Net(), data())
    run = watched(training_runner, trainer)
    run.assert_healthy().assert_num_updates(8)
    assert len(run.records) == 8
    assert (trainer.args.device, trainer.args.seed) == (training_runner.device, 5)
    assert Path(trainer.args.output_dir).is_relative_to(tmp_path)
"""
    run_hf(source, "--tl-seed=5").assert_outcomes(passed=1)
    assert {path.name for path in pytester.path.iterdir()} - {"__pycache__"} == {"test_inner.py"}


def test_the_fixture_takes_what_a_trainer_takes(run_hf):
    """Fields of TrainingArguments, another class and data to evaluate on reach the Trainer, from the runner too."""
    source = """
class Other(Trainer):
    pass

def test_it(hf_trainer, training_runner):
    for make in (hf_trainer, training_runner.make_hf_trainer):
        trainer = make(Net(), data(), data(), trainer_class=Other, max_steps=3, gradient_accumulation_steps=2, seed=9)
        assert type(trainer) is Other
        assert trainer.train().global_step == 3
        assert (trainer.args.gradient_accumulation_steps, trainer.args.seed) == (2, 9)
        assert set(trainer.evaluate()) >= {"eval_loss"}
"""
    run_hf(source).assert_outcomes(passed=1)


FORGETS = """
def test_it(hf_trainer, training_runner):
    watched(training_runner, hf_trainer(Net(), data(), trainer_class=HeadOnly)).assert_healthy()

def test_coverage(hf_trainer, training_runner):
    training_runner.assert_hf_optimizer_coverage(hf_trainer(Net(), data(), trainer_class=HeadOnly))
"""


def test_a_finding_fails_the_test_with_the_rule(run_hf):
    """An optimizer that misses a layer is found by its rule, in a watched run and before it."""
    result = run_hf(FORGETS)
    result.assert_outcomes(failed=2)
    finding = "  [[]uncovered-parameter[]] *"
    counted = "tl: uncovered-parameter 2x (test_it, test_coverage)"
    result.stdout.fnmatch_lines(["*tl findings*", "Training run: failed", finding, "*: failed", finding, counted])


def test_allowed_rules_reach_the_checks(run_hf):
    """--tl-allow holds for watched training and for the coverage of a Trainer's optimizer."""
    run_hf(FORGETS, "--tl-allow=uncovered-parameter").assert_outcomes(passed=2)


def test_the_comparing_checks_run(run_hf):
    """Resume and accumulation pass for a Trainer that does both right."""
    source = """
def test_resume(hf_trainer, training_runner):
    assert training_runner.assert_hf_resume_equivalent(lambda: hf_trainer(Net(), data()), steps=4).ok

def test_accumulation(hf_trainer, training_runner):
    def make_trainer(k):
        return hf_trainer(Net(), data(), gradient_accumulation_steps=k)

    assert training_runner.assert_hf_accumulation_equivalent(make_trainer, accumulation_steps=2).ok
"""
    run_hf(source).assert_outcomes(passed=2)


def test_the_persons_error_is_shown_without_the_trainers_frames(run_hf):
    """An exception in compute_loss shows the test's line and the one that raised, nothing of what lies between."""
    source = """
class Broken(Trainer):
    def compute_loss(self, *arguments, **keywords):
        raise RuntimeError("out of luck")

def test_it(hf_trainer, training_runner):
    training_runner.assert_hf_resume_equivalent(lambda: hf_trainer(Net(), data(), trainer_class=Broken))
"""
    result = run_hf(source)
    result.assert_outcomes(failed=1)
    assert _lines_shown(result) == [
        ">       training_runner.assert_hf_resume_equivalent(lambda: hf_trainer(Net(), data(), trainer_class=Broken))",
        '>       raise RuntimeError("out of luck")',
    ]


def test_an_error_of_torch_in_a_trainer_is_shown_without_the_trainers_frames(run_hf):
    """What lies between two of the checks' functions is the Trainer's, in a check and in a watched training."""
    source = """
class Broken(Trainer):
    def compute_loss(self, *arguments, **keywords):
        return torch.zeros(24).view(-1, 5)

def test_check(hf_trainer, training_runner):
    training_runner.assert_hf_resume_equivalent(lambda: hf_trainer(Net(), data(), trainer_class=Broken))

def test_watch(hf_trainer, training_runner):
    trainer = hf_trainer(Net(), data(), trainer_class=Broken)
    with training_runner.watch_hf(trainer):
        trainer.train()
"""
    result = run_hf(source)
    result.assert_outcomes(failed=2)
    assert _lines_shown(result) == [
        ">       training_runner.assert_hf_resume_equivalent(lambda: hf_trainer(Net(), data(), trainer_class=Broken))",
        ">       return torch.zeros(24).view(-1, 5)",
        ">           trainer.train()",
        ">       return torch.zeros(24).view(-1, 5)",
    ]
    assert not [line for line in result.outlines if "transformers/trainer.py" in line]


def _lines_shown(result: pytest.RunResult) -> list[str]:
    return [line for line in result.outlines if line.startswith(">")]


@pytest.mark.parametrize("workers", [False, True], ids=["one process", "xdist"])
def test_seeds_and_reports_are_the_same_with_workers(run_hf, pytester, workers):
    """Each test starts from --tl-seed, on whichever worker; its watched run is in --tl-report."""
    if workers:
        pytest.importorskip("xdist")
    source = """
@pytest.mark.parametrize("number", range(3))
def test_it(number, hf_trainer, training_runner):
    watched(training_runner, hf_trainer(Net(), data())).assert_healthy()
"""
    arguments = ("-n", "2") if workers else ()
    result = run_hf(source, *arguments, "--tl-seed=6", "--tl-report=reports", subprocess=workers)
    result.assert_outcomes(passed=3)
    losses = []
    for report in (pytester.path / "reports").iterdir():
        lines = [json.loads(line) for line in report.read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line["kind"] == "step"])
    assert [len(one) for one in losses] == [8, 8, 8]
    assert losses[0] == losses[1] == losses[2]
