"""The tests that the loop in ``mixed_precision_loop.py`` has, as they would stand in its own project.

Try: leave a line of its ``train_step`` out, or move one, and see what ``hatch run test examples -k mixed_precision``
says.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType

import mixed_precision_loop
import pytest

from tl_core import CheckFailed

STEPS = 20  # ten updates, some of the first ones skipped


def check(training_runner, loop):
    return training_runner.assert_mixed_precision_training(loop.make_setup, loop.batch_at, loop.train_step, steps=STEPS)


def test_mixed_precision_is_used_right(training_runner):
    """Nothing is found, nothing is noted, and there were skipped updates in which something could have been."""
    run = check(training_runner, mixed_precision_loop)
    assert run.report.notes == ()
    made = [record.step for record in run.records if not record.skipped]
    due = list(range(mixed_precision_loop.ACCUMULATION_STEPS - 1, STEPS, mixed_precision_loop.ACCUMULATION_STEPS))
    assert set(made) < set(due)


def test_the_script_trains(capsys):
    """Some updates are skipped at first, then the scale stays and the loss falls."""
    mixed_precision_loop.main([])
    said = capsys.readouterr().out.splitlines()
    made = [line for line in said if not line.endswith(", update skipped")]
    assert len(said) > len(made) == mixed_precision_loop.UPDATES
    losses = [float(line.split()[1].rstrip(",")) for line in made]
    assert losses[-1] < 0.5 * losses[0]


# The rest tests the check: every change of the loop gets its finding.


def changed(*changes: tuple[str, str]) -> ModuleType:
    """Load the loop with some of its lines written otherwise, or left out."""
    path = Path(mixed_precision_loop.__file__)
    source = path.read_text(encoding="utf-8")
    for old, new in changes:
        assert source.count(f"{old}\n") == 1
        source = source.replace(f"{old}\n", f"{new}\n" if new else "")
    loop = ModuleType(path.stem)
    loop.__file__ = str(path)
    exec(compile(source, str(path), "exec"), loop.__dict__)
    return loop


UNSCALE = "        setup.scaler.unscale_(setup.optimizer)"
CLIP = "        nn.utils.clip_grad_norm_(setup.model.parameters(), MAX_NORM)"
STEP = "        setup.scaler.step(setup.optimizer)"
UPDATE = "        setup.scaler.update()"
GUARD = "        if setup.scaler.get_scale() >= scale:  # it falls where the update was skipped"
LOSS = "    loss = functional.cross_entropy(logits.float(), labels)"
BACKWARD = "    setup.scaler.scale(loss / ACCUMULATION_STEPS).backward()"
BRANCH = "    if (setup.step_index + 1) % ACCUMULATION_STEPS == 0:"
RETURN = "    return loss.detach()"
BUGS = {
    "a loss that is not scaled": (
        "loss-not-scaled",
        ((BACKWARD, "    setup.scaler.scale(loss)\n    (loss / ACCUMULATION_STEPS).backward()"),),
    ),
    "a loss that is scaled by its number as well": (
        "scaled-twice",
        ((BACKWARD, BACKWARD.replace("loss /", "setup.scaler.get_scale() * loss /")),),
    ),
    "a step past the scaler": ("stepped-past-scaler", ((STEP, "        setup.optimizer.step()"),)),
    "no unscale_ before the clip": ("clip-before-unscale", ((UNSCALE, ""),)),
    "a clip before unscale_": ("clip-before-unscale", ((UNSCALE, ""), (CLIP, f"{CLIP}\n{UNSCALE}"))),
    "unscale_ in every micro-batch": ("unscaled-again", ((UNSCALE, ""), (BRANCH, f"{UNSCALE[4:]}\n{BRANCH}"))),
    "unscale_ twice": ("unscaled-twice", ((UNSCALE, f"{UNSCALE}\n{UNSCALE}"),)),
    "update() left out": ("missing-update", ((UPDATE, ""),)),
    "update() in every micro-batch": ("extra-update", ((UPDATE, ""), (RETURN, f"{UPDATE[4:]}\n{RETURN}"))),
    "gradients that are cleared too early": (
        "zeroed-before-step",
        (("        setup.optimizer.zero_grad()", ""), (STEP, f"        setup.optimizer.zero_grad()\n{STEP}")),
    ),
    "a second step": ("stepped-twice", ((STEP, f"{STEP}\n{STEP}"),)),
    "a schedule and an average that do not wait": ("ahead-of-updates", ((GUARD, "        if True:"),)),
    "a guard the wrong way round": ("moves-only-on-skipped", ((GUARD, GUARD.replace(">= scale", "< scale")),)),
    "recordings as they are": (
        "float16-overflow",
        (("    waves = recordings.float() / 32768", "    waves = recordings.float()"),),
    ),
    "a loss in float16": (
        "low-precision-loss",
        ((LOSS, LOSS.replace(".float()", "")),),
    ),
    "weights in float16": (
        "scaler-refuses",
        (("    model = WaveClassifier().to(device)", "    model = WaveClassifier().to(device).half()"),),
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_each_bug_gets_its_finding_first(bug, training_runner):
    """The first finding names the bug."""
    rule, changes = BUGS[bug]
    loop = changed(*changes)
    with warnings.catch_warnings(record=True):  # torch warns of some of them too
        warnings.simplefilter("always")
        with pytest.raises(CheckFailed) as caught:
            check(training_runner, loop)
    assert caught.value.findings[0].rule == rule
