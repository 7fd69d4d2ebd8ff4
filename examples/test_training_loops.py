"""The tests that the loop in ``digits_loop.py`` has, as they would stand in its own project.

Try: break one line of the loop and see what ``hatch run test examples`` says. ``hatch run demo`` shows all at once.

- forget zero_grad()
- call zero_grad() between backward() and step()
- detach the features
- make the loss anew from its number
- call backward() twice
- call step() twice
- compare predictions (N, 1) with targets (N,)
- give the optimizer the body only
- build the optimizer for another copy of the model
- leave the weight decay of the biases at AdamW's default
- clip after the step
- clip the average's parameters
- step the scheduler before the optimizer
- step the scheduler twice
- count the warmup in epochs
- divide the learning rate by the batch size
- train the frozen stem's BatchNorm
- forget to update the average
- keep the losses with their history
- forget to divide the loss by the accumulation steps
- clear the gradients in every micro-batch
- clip in every micro-batch
- update in every micro-batch
- forget the optimizer when loading
- forget the scheduler when loading
- forget the average when loading
- forget the random generator when loading
- start counting anew after loading
- forget to scale the images
"""

from __future__ import annotations

import warnings

import digits_loop
import pytest
import torch
from one_line_bugs import BUGS, Bug, with_bug

from tl_core import CheckFailed
from tl_telemetry import num_updates


def test_the_loop_is_healthy(training_runner):
    """No rule finds anything, the schedule is the one that is meant, and the loss falls."""
    digits_loop.check(digits_loop.train(training_runner.run))


def test_the_loop_learns(training_runner):
    """After two epochs, nine of ten digits that training never saw are read rightly."""
    run = digits_loop.train(training_runner.run)
    assert run.setup.accuracies[-1] > 0.9


def test_the_number_of_updates(training_runner):
    """Each batch makes one update."""
    batches, _ = digits_loop.load_data()
    num_examples = sum(len(images) for images, _, _ in batches)
    run = digits_loop.train(training_runner.run)
    run.assert_num_updates(num_updates(num_examples, digits_loop.BATCH_SIZE, epochs=2))


def test_accumulation_makes_the_updates_of_the_full_batch(training_runner):
    """Where memory is short, two micro-batches make the update of their batch."""
    digits_loop.check_accumulation(training_runner.assert_accumulation_equivalent)


def test_a_resumed_run_is_the_uninterrupted_one(training_runner):
    """A checkpoint holds all that the loop needs: what the average has seen, and what dropout is about to draw, too."""
    digits_loop.check_resume(training_runner.assert_resume_equivalent)


def test_evaluation_changes_nothing(training_runner):
    """Evaluation leaves modes, weights and statistics as they were."""
    setup = digits_loop.make_setup()
    modes = [module.training for module in setup.model.modules()]
    state = {name: value.clone() for name, value in setup.model.state_dict().items()}
    digits_loop.evaluate(setup.model)
    assert [module.training for module in setup.model.modules()] == modes
    assert all(torch.equal(value, state[name]) for name, value in setup.model.state_dict().items())


# The rest tests the checks: every bug of the list above gets its finding.


def check_all(loop, training_runner):
    loop.check(loop.train(training_runner.run))
    loop.check_accumulation(training_runner.assert_accumulation_equivalent)
    loop.check_resume(training_runner.assert_resume_equivalent)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_each_bug_gets_its_finding_first(bug, training_runner):
    """The first finding names the bug."""
    loop = with_bug(bug)
    with warnings.catch_warnings(record=True):  # torch warns of some of these bugs too, which is evidence
        warnings.simplefilter("always")
        with pytest.raises(CheckFailed) as caught:
            check_all(loop, training_runner)
    assert caught.value.findings[0].rule == bug.rule


def test_the_list_above_names_the_bugs():
    """What this file says to try is what is tried."""
    assert [line.removeprefix("- ") for line in __doc__.splitlines() if line.startswith("- ")] == [
        bug.title for bug in BUGS
    ]


def test_a_bug_whose_line_is_gone_is_seen():
    """A bug that no longer changes the loop is an error."""
    with pytest.raises(ValueError) as caught:
        with_bug(Bug("buy a new GPU", "no-gradient", "    model.to('hope')", ""))
    assert str(caught.value) == (
        "digits_loop.py must hold the line of the bug 'buy a new GPU' exactly once: \"    model.to('hope')\""
    )
