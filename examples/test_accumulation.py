"""The tests that the loop in ``accumulation_loop.py`` has, as they would stand in its own project.

Try: move the clip, the scheduler or the average out of the branch that updates, and see what ``hatch run test examples
-k accumulation`` says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType

import accumulation_loop
import pytest

from tl_accum import split_batch
from tl_core import CheckFailed
from tl_telemetry import num_updates


def check(training_runner, loop):
    return training_runner.assert_accumulation_equivalent(
        loop.make_setup,
        loop.full_batches(),
        loop.make_step,
        accumulation_steps=loop.ACCUMULATION_STEPS,
        epoch_length=loop.EPOCH_LENGTH,
        split=split_batch,  # the last full batch is as small as its group, and is split as it is
    )


def test_accumulation_makes_the_updates_of_the_full_batch(training_runner):
    """Whatever micro-batches do, an update is that of their full batch, the incomplete last one too."""
    report = check(training_runner, accumulation_loop)
    assert report.notes == ()


def test_the_number_of_updates_is_the_planned_one(training_runner):
    """The incomplete last group of an epoch makes an update, and the schedule is as long as the training."""
    loop = accumulation_loop
    batches = [batch for epoch in range(loop.EPOCHS) for group in loop.groups(epoch) for batch in group]
    run = training_runner.run(loop.make_setup, batches, loop.make_step(loop.ACCUMULATION_STEPS), steps=len(batches))
    run.assert_num_updates(
        num_updates(loop.NUM_EXAMPLES, loop.MICRO_BATCH_SIZE, loop.EPOCHS, accumulation_steps=loop.ACCUMULATION_STEPS)
    )
    assert not [note for note in run.report.notes if note.rule == "schedule-horizon"]


def test_the_script_trains(capsys):
    """Each epoch makes five updates, and the loss falls."""
    accumulation_loop.main()
    said = capsys.readouterr().out.splitlines()
    assert all(line.startswith(f"epoch {number}: 5 updates, loss ") for number, line in enumerate(said, 1))
    losses = [float(line.rpartition(" ")[2]) for line in said]
    assert len(losses) == accumulation_loop.EPOCHS
    assert losses[-1] < 0.8 * losses[0]


# The rest tests the check: every change of the loop gets its finding.


def changed(*changes: tuple[str, str]) -> ModuleType:
    """Load the loop with some of its lines written otherwise."""
    path = Path(accumulation_loop.__file__)
    source = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(f"{old}\n") == 1
        source = source.replace(f"{old}\n", f"{new}\n" if new else "")
    loop = ModuleType(path.stem)
    loop.__file__ = str(path)
    exec(compile(source, str(path), "exec"), loop.__dict__)
    return loop


def in_every_micro_batch(line: str, before: str) -> ModuleType:
    """Load the loop with a line of the branch that updates moved out of it, to stand before another line."""
    return changed((f"            {line}", ""), (before, f"        {line}\n{before}"))


UPDATE = "        if (place + 1) % accumulation_steps == 0 or place + 1 == EPOCH_LENGTH:"
RETURN = "        return loss.detach()"
BUGS = {
    "means over each micro-batch's own tokens": (
        "mean-of-means",
        lambda: changed(
            (
                '        loss = summed / batch["num_tokens"]',
                '        loss = summed / (batch["labels"] != IGNORED).sum() / accumulation_steps',
            )
        ),
    ),
    "the group's tokens, and k once more": (
        "wrong-loss-scale",
        lambda: changed(
            (
                '        loss = summed / batch["num_tokens"]',
                '        loss = summed / batch["num_tokens"] / accumulation_steps',
            )
        ),
    ),
    "a clip in every micro-batch": (
        "clip-per-micro-batch",
        lambda: in_every_micro_batch("nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)", UPDATE),
    ),
    "gradients cleared in every micro-batch": (
        "zeroed-per-micro-batch",
        lambda: in_every_micro_batch("setup.optimizer.zero_grad()", RETURN),
    ),
    "a scheduler that counts micro-batches": (
        "scheduler-steps",
        lambda: in_every_micro_batch("setup.scheduler.step()", RETURN),
    ),
    "an average of every micro-batch": (
        "state-per-micro-batch",
        lambda: in_every_micro_batch('setup.state["ema"].update_parameters(setup.model)', RETURN),
    ),
    "an incomplete last group that waits for the next epoch": (
        "last-group-leaks",
        lambda: changed((UPDATE, "        if (setup.step_index + 1) % accumulation_steps == 0:")),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_gets_its_finding_first(bug, training_runner):
    """The first finding names the bug."""
    rule, load = BUGS[bug]
    loop = load()
    with warnings.catch_warnings(record=True):  # torch warns of one of them too
        warnings.simplefilter("always")
        with pytest.raises(CheckFailed) as caught:
            check(training_runner, loop)
    assert caught.value.findings[0].rule == rule
