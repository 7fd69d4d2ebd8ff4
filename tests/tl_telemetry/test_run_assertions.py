from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from tl_core import CheckFailed, NotJudged, TrainingSetup
from tl_telemetry import TrainingRun, observe, run_training

DATA = torch.tensor([[1.0, 0.0]])
TABLE = """Telemetry:
  step  loss    grad norm  update  lr     opt steps
  0     1       2          0.25    0.125  1
  1     0.5625  1.5        0.1875  0.125  1
  2     0.3164  1.125      0.1406  0.125  1
  3     0.178   0.8438     0.1055  0.125  1"""
NO_RECORD = """Training run: could not judge

Notes:
[not-judged] no step was recorded: nothing could be judged"""
NO_UPDATE = """Training run: could not judge

Notes:
[not-judged] no optimizer stepped in 3 steps: what an update shows could not be judged
  fix: run at least one whole accumulation cycle"""


def make_setup():
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 2.0]]))
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.125))


def train(setup, batch):
    setup.optimizer.zero_grad()
    loss = setup.model(batch).pow(2).sum()
    loss.backward()
    setup.optimizer.step()
    return loss


def accumulate(setup, batch):
    loss = setup.model(batch).pow(2).sum()
    (loss / 4).backward()
    if setup.step_index % 4 == 3:
        setup.optimizer.step()
        setup.optimizer.zero_grad()
    return loss


def trained(step=train, steps=4):
    return run_training(make_setup, DATA, step, steps=steps)


@pytest.fixture(scope="module")
def run():
    return trained()


@pytest.fixture(scope="module")
def empty():
    with observe(make_setup()) as run:
        pass
    return run


def failure(function, *args, error=CheckFailed, **kwargs):
    with pytest.raises(error) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def test_assertions_chain(run):
    """Every assertion returns the run."""
    chained = (
        run.assert_healthy()
        .assert_finite()
        .assert_no_skipped_updates()
        .assert_no_skipped_updates(every=1)
        .assert_grad_norm_below(2.0)
        .assert_loss_decreases()
        .assert_loss_decreases(0.8)
        .assert_lr([0.125] * 4)
        .assert_lr(lambda step: 0.125, "optimizer", 0)
        .assert_num_updates(4)
        .assert_num_updates({"optimizer": 4})
    )
    assert chained is run
    assert isinstance(chained, TrainingRun)


def test_what_a_run_says_of_itself(run):
    """Losses, first and last loss, verdict and setup of a run."""
    assert run.losses == [1.0, 0.5625, 0.31640625, 0.177978515625]
    assert (run.initial, run.final) == (1.0, 0.177978515625)
    assert (run.ok, run.findings, run.notes) == (True, (), ())
    assert run.report is run.report
    assert run.setup.step_index == 3
    assert run.setup.model.weight[0, 0].item() == pytest.approx(0.75**4)
    assert run.summary().splitlines()[:-1] == [
        "4 steps, loss 1 to 0.178, updates: optimizer 4",
        "data: one batch (a Tensor), used in every step",
    ]


def test_a_verdict_asked_for_during_the_run_is_not_the_last_one():
    """What happens after the last record, before the block ends, is judged too."""
    setup = make_setup()
    with observe(setup) as run:
        for _ in range(4):
            with run.step(DATA) as step:
                step.loss = train(setup, DATA)
        assert run.ok
        with torch.no_grad():
            setup.model.weight.fill_(math.nan)
    assert [finding.rule for finding in run.findings] == ["non-finite"]


def test_an_empty_run_says_so(empty):
    """A run without a record has NaN for losses, no finding, and is not ok."""
    assert math.isnan(empty.initial)
    assert math.isnan(empty.final)
    assert (empty.ok, empty.findings, empty.losses, empty.rows()) == (False, (), [], [])
    assert empty.table() == "  (no step was recorded)"
    assert empty.summary() == "0 steps, updates: optimizer 0"


@pytest.mark.parametrize(
    "assertion",
    [
        lambda run: run.assert_healthy(),
        lambda run: run.assert_finite(),
        lambda run: run.assert_no_skipped_updates(),
        lambda run: run.assert_grad_norm_below(1.0),
        lambda run: run.assert_lr([]),
        lambda run: run.assert_num_updates(0),
        lambda run: run.assert_loss_decreases(),
    ],
    ids=["healthy", "finite", "no skipped updates", "grad norm", "lr", "num updates", "loss decreases"],
)
def test_no_assertion_passes_on_an_empty_run(assertion, empty):
    """Where nothing was recorded, nothing passes."""
    assert failure(assertion, empty, error=NotJudged) == NO_RECORD


@pytest.mark.parametrize(
    "assertion",
    [
        lambda run: run.assert_healthy(),
        lambda run: run.assert_no_skipped_updates(),
        lambda run: run.assert_grad_norm_below(1.0),
    ],
    ids=["healthy", "no skipped updates", "grad norm"],
)
def test_what_needs_updates_cannot_be_judged_without(assertion):
    """Three micro-batches of an accumulation cycle of four show no update: neither a pass nor a fail."""
    assert failure(assertion, trained(lambda setup, batch: 0.5, steps=3), error=NotJudged) == NO_UPDATE


def test_assert_healthy_names_every_finding_and_note():
    """The message has the verdict, the findings, the notes, and the table."""

    def step(setup, batch):
        loss = setup.model(batch).pow(2).sum()
        loss.backward()
        setup.optimizer.step()
        return loss

    message = failure(run_training(make_setup, DATA, step, steps=4, track_updates=False).assert_healthy)
    blocks = message.split("\n\n")
    assert blocks[0] == "Training run: failed, 1 finding"
    assert blocks[1].startswith("[missing-zero-grad] ")
    assert blocks[2] == (
        "Notes:\n"
        "[not-judged] updates were not tracked (track_updates=False): what the steps changed could not be judged"
    )
    assert blocks[3].splitlines()[:2] == ["Telemetry:", "  step  loss     grad norm  lr     opt steps"]


def test_allowed_rules_are_silent():
    """A rule that is allowed, when judging or when observing, is not found."""

    def step(setup, batch):
        setup.model(batch).pow(2).sum().backward()
        setup.optimizer.step()

    setup = make_setup()
    with observe(setup, allow=["missing-zero-grad"]) as run:
        for _ in range(4):
            step(setup, DATA)
    assert run.assert_healthy() is run
    with observe(setup) as run:
        for _ in range(4):
            step(setup, DATA)
    assert [finding.rule for finding in run.findings] == ["missing-zero-grad"]
    assert run.assert_healthy(allow=("missing-zero-grad",)) is run


def test_strict_turns_a_note_into_a_finding():
    """A rule whose notes count as findings fails the run."""
    run = run_training(make_setup, DATA, train, steps=4, track_updates=False)
    assert [note.rule for note in run.notes] == ["not-judged"]
    assert run.assert_healthy() is run
    assert failure(run.assert_healthy, strict=["not-judged"]).startswith(
        "Training run: failed, 1 finding\n\n[not-judged] updates were not tracked"
    )


def test_ignored_parameters_are_left_out():
    """A parameter that is ignored is not missed."""
    model = nn.ModuleDict({"used": nn.Linear(2, 1), "head": nn.Linear(2, 1)})
    setup = TrainingSetup(model, torch.optim.SGD(model["used"].parameters(), lr=0.125))
    with observe(setup) as run:
        for _ in range(3):
            with run.step():
                setup.optimizer.zero_grad()
                model["used"](DATA).sum().backward()
                setup.optimizer.step()
    assert [finding.rule for finding in run.findings] == ["uncovered-parameter"]
    assert run.assert_healthy(ignore=["head.*"]) is run


def test_assert_grad_norm_below(run):
    """The norm before clipping, the step where it was largest, and the bound."""
    assert failure(run.assert_grad_norm_below, 1.0) == (
        "Training run: failed, 1 finding\n\n"
        "[grad-norm-exceeded] the gradient norm of 'optimizer' before clipping was beyond 1 in 3 of 4 updates (steps "
        "0-2), the largest 2 in step 0\n"
        "  cause: undecided: targets or losses on an unusual scale, a learning rate that is too high, exploding "
        "activations, or a bound that is too low for this model\n"
        "  fix: compare the norms with those of a run that trained well: then normalise the targets, lower the "
        "learning rate, or raise max_grad_norm\n\n" + TABLE
    )


def test_assert_loss_decreases(run):
    """The means of the first and last quarter, and how much they should differ."""
    assert failure(run.assert_loss_decreases, 0.9) == (
        "Training run: failed, 1 finding\n\n"
        "[loss-not-decreasing] the loss went from 1 (mean of the first 1 step) to 0.178 (of the last 1): a decrease of "
        "82.2 %, a decrease of at least 90 % was expected\n"
        "  cause: undecided: the loss alone does not say why; if the report has other findings, those are likelier "
        "reasons\n"
        "  fix: run more steps, print run.table(), and check the learning rate, the data and the loss function\n\n"
        + TABLE
    )
    assert failure(trained(steps=1).assert_loss_decreases, error=NotJudged) == (
        "Training run: could not judge\n\n"
        "Notes:\n"
        "[not-judged] the run has 1 step with a loss, at least 2 are needed: whether the loss falls could not be "
        "judged\n"
        "  fix: run more steps, or return the loss from the step"
    )


def test_assert_num_updates(run):
    """How often each optimizer stepped, and how often it should have."""
    assert failure(run.assert_num_updates, 5) == (
        "Training run: failed, 1 finding\n\n"
        "[update-count] 'optimizer' stepped 4 times, not 5, in 4 steps\n"
        "  cause: undecided: accumulation over another number of micro-batches than expected, or a last group that is "
        "dropped or added\n"
        "  fix: compare with tl_telemetry.num_updates(...) for this data set, batch size and accumulation\n\n" + TABLE
    )


def test_assert_no_skipped_updates():
    """Accumulation is recognised by itself, and every= demands a rate."""
    run = trained(accumulate, steps=8)
    run.assert_no_skipped_updates().assert_no_skipped_updates(every=4).assert_no_skipped_updates(1, max_skipped=6)
    message = failure(run.assert_no_skipped_updates, 1, max_skipped=5)
    assert message.split("\n")[2] == (
        "[skipped-update] no optimizer stepped in 6 of the 8 steps in which an update was due (every=1; steps 0-2, "
        "4-6), 5 allowed"
    )
    assert failure(trained(accumulate, steps=3).assert_no_skipped_updates, 4, error=NotJudged) == (
        "Training run: could not judge\n\n"
        "Notes:\n"
        "[not-judged] the run ended after 3 steps, before the first update was due (every=4): skipped updates could "
        "not be judged\n"
        "  fix: run at least one whole accumulation cycle\n\n"
        "[not-judged] no optimizer stepped in 3 steps, and the gradients still hold all 3 backward passes: what an "
        "update shows could not be judged\n"
        "  fix: run at least one whole accumulation cycle"
    )


def test_assert_finite():
    """A loss that is not finite is named with its step."""

    def step(setup, batch):
        loss = train(setup, batch)
        return loss * (math.inf if setup.step_index == 2 else 1.0)

    message = failure(trained(step).assert_finite)
    assert message.split("\n")[2].startswith("[non-finite] the loss was not finite in step 2 (loss inf)")
    assert message.endswith(
        """Telemetry:
  step  loss    grad norm  update  lr     opt steps
  0     1       2          0.25    0.125  1
  1     0.5625  1.5        0.1875  0.125  1
  2     inf     1.125      0.1406  0.125  1
  3     0.178   0.8438     0.1055  0.125  1"""
    )


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda r: r.assert_grad_norm_below(0), ValueError, "max_norm must be positive, got 0"),
        (lambda r: r.assert_grad_norm_below(None), TypeError, "max_norm must be a number, got None"),
        (lambda r: r.assert_grad_norm_below("1"), TypeError, "max_norm must be a number, got '1'"),
        (lambda r: r.assert_grad_norm_below(math.nan), ValueError, "max_norm must not be NaN"),
        (lambda r: r.assert_loss_decreases(None), TypeError, "min_relative_decrease must be a number, got None"),
        (lambda r: r.assert_no_skipped_updates(0), ValueError, "every must be at least 1, got 0"),
        (lambda r: r.assert_no_skipped_updates(True), TypeError, "every must be an int, got True"),
        (lambda r: r.assert_no_skipped_updates(1, -1), ValueError, "max_skipped must be at least 0, got -1"),
        (lambda r: r.assert_no_skipped_updates(1, None), TypeError, "max_skipped must be an int, got None"),
        (
            lambda r: r.assert_num_updates(1.5),
            TypeError,
            "expected must be an int or a dict of ints by optimizer name, got 1.5",
        ),
        (
            lambda r: r.assert_num_updates({}),
            TypeError,
            "expected must be an int or a dict of ints by optimizer name, got {}",
        ),
        (
            lambda r: r.assert_num_updates({"a": 1}),
            ValueError,
            "expected names ['a'], the setup's optimizers are ['optimizer']",
        ),
        (lambda r: r.assert_healthy(max_grad_norm=-1), ValueError, "max_grad_norm must be positive, got -1"),
        (
            lambda r: r.assert_healthy(min_relative_decrease="a"),
            TypeError,
            "min_relative_decrease must be a number or None, got 'a'",
        ),
        (lambda r: r.assert_healthy(every=-2), ValueError, "every must be at least 1, got -2"),
        (
            lambda r: r.assert_healthy(ignore="head"),
            TypeError,
            "ignore must be a list of patterns, got 'head': write ['head']",
        ),
        (lambda r: r.assert_healthy(frozen=3), TypeError, "frozen must be a list of patterns, got 3"),
        (
            lambda r: r.assert_healthy(ignore=["head.*"]),
            ValueError,
            "ignore: the pattern 'head.*' matches nothing; names are for example weight",
        ),
        (
            lambda r: r.assert_healthy(frozen=["head.*"]),
            ValueError,
            "frozen: the pattern 'head.*' matches nothing; names are for example weight",
        ),
        (
            lambda r: r.assert_healthy(allow="lr-zero"),
            TypeError,
            "allow must be a list of rule ids, got 'lr-zero': write ['lr-zero']",
        ),
        (lambda r: r.assert_healthy(strict=7), TypeError, "strict must be a list of rule ids, got 7"),
        (lambda r: r.assert_healthy(allow=[3]), TypeError, "allow must hold rule ids (strings), got 3"),
        (
            lambda r: r.assert_healthy(allow=["missing-zerograd"]),
            ValueError,
            "allow names the rule 'missing-zerograd', which does not exist; did you mean missing-zero-grad?",
        ),
        (
            lambda r: r.assert_healthy(strict=["clip-every-updates"]),
            ValueError,
            "strict names the rule 'clip-every-updates', which does not exist; did you mean clip-every-update, "
            "ema-never-updated, skipped-update?",
        ),
    ],
)
def test_misuse_names_the_argument(call, error, message, run):
    """Wrong arguments of the assertions are errors that name the argument, what was got and what is allowed."""
    with pytest.raises(error) as caught:
        call(run)
    assert str(caught.value) == message


def test_a_rule_without_a_near_match_lists_all_rules(run):
    """A rule id that resembles none lists them all."""
    with pytest.raises(ValueError, match=r"which does not exist; there are backward-twice, .*, zeroed-before-step$"):
        run.assert_healthy(allow=["xyz"])
