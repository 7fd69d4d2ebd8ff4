"""The tests that the script in ``resume_loop.py`` has, as they would stand in its own project.

Try: take a line out of its ``load`` and see what ``hatch run test examples -k resume`` says.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import digits_loop
import pytest
import resume_loop

from tl_core import CheckFailed
from tl_resume import diff_states


def check(training_runner, loop, **options):
    return training_runner.assert_resume_equivalent(
        loop.make_setup, loop.batch_at, loop.train_step, save=loop.save, load=loop.load, restores_step=True, **options
    )


def test_a_resumed_run_is_the_uninterrupted_one(training_runner):
    """What save() writes and load() restores is all that the loop needs."""
    report = check(training_runner, resume_loop, steps=12)
    assert report.continuous[report.resume_at :] == report.resumed


def test_a_run_resumed_in_a_new_process_is_the_uninterrupted_one(training_runner):
    """Nothing of the loop lives as long as the process only."""
    check(training_runner, resume_loop, fresh_process=True)


def test_no_crash_loses_the_checkpoint(training_runner):
    """A save that is killed, or meets a full disk, leaves a checkpoint that loads."""
    loop = resume_loop
    training_runner.assert_checkpoint_crash_safe(
        loop.make_setup, loop.batch_at, loop.train_step, save=loop.save, load=loop.load
    )


def test_the_script_goes_on_where_it_was_stopped(tmp_path, capsys):
    """Two calls, the second one with --resume, leave the checkpoint of one call."""
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    resume_loop.main(["--checkpoint", str(whole), "--steps", "20"])
    resume_loop.main(["--checkpoint", str(parts), "--steps", "13"])  # the last three steps are lost
    resume_loop.main(["--checkpoint", str(parts), "--steps", "20", "--resume"])
    assert diff_states(whole, parts).same
    said = capsys.readouterr().out.splitlines()
    assert said == [*said[:4], *said[:2], "resumed at step 10", *said[2:4]]


def test_a_resume_without_a_checkpoint_starts_anew(tmp_path, capsys):
    """A job that may be preempted can always be started with --resume."""
    resume_loop.main(["--checkpoint", str(tmp_path / "last.pt"), "--steps", "5", "--resume"])
    assert capsys.readouterr().out.startswith("5 steps, loss ")


def test_the_defaults_resume_a_loop_with_dropout_and_an_average(training_runner):
    """Without a save and a load of one's own, the whole training state is saved: the loop of ``digits_loop.py``."""
    batches, _ = digits_loop.load_data()
    training_runner.assert_resume_equivalent(digits_loop.make_setup, batches, digits_loop.train_step)


# The rest tests the check: every line that is taken out of load() gets its finding.


def without(line: str) -> ModuleType:
    """Load the script without a line."""
    path = Path(resume_loop.__file__)
    source = path.read_text(encoding="utf-8")
    assert source.count(f"\n{line}\n") == 1
    loop = ModuleType(path.stem)
    loop.__file__ = str(path)
    exec(compile(source.replace(f"\n{line}\n", "\n\n"), str(path), "exec"), loop.__dict__)
    return loop


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ('    setup.model.load_state_dict(checkpoint["model"])', "model-not-restored"),
        ('    setup.optimizer.load_state_dict(checkpoint["optimizer"])', "optimizer-state-not-restored"),
        ('    setup.scheduler.load_state_dict(checkpoint["scheduler"])', "scheduler-not-restored"),
        ('    return checkpoint["step"]', "step-not-restored"),
    ],
    ids=["model", "optimizer", "scheduler", "step"],
)
def test_each_line_that_is_left_out_gets_its_finding_first(line, rule, training_runner):
    """The first finding names what was not restored."""
    with pytest.raises(CheckFailed) as caught:
        check(training_runner, without(line))
    assert caught.value.findings[0].rule == rule
