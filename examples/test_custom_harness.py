"""The harness of ``custom_harness.py`` tells what it found by its output, its files and its exit status.

Try: break one line of ``one_long_main.py`` and see what ``python examples/custom_harness.py`` says.

- leave the last layer out of the optimizer
- forget zero_grad()
- clip after the step
- make the loss anew from its number
- forget the optimizer when loading
- forget the scheduler when loading
- start counting anew after loading
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import custom_harness
import one_long_main
import pytest
from one_line_bugs import Bug, with_bug

from tl_core import Report


def run_harness(folder, training=one_long_main.main, steps=20):
    """Return the exit status, the verdicts and the records."""
    verdicts, records = folder / "verdicts.jsonl", folder / "records.jsonl"
    arguments = ["--steps", str(steps), "--verdicts", str(verdicts), "--records", str(records)]
    status = custom_harness.main(arguments, training)
    return status, *([json.loads(line) for line in path.read_text().splitlines()] for path in (verdicts, records))


def test_all_checks_pass(tmp_path, capsys):
    """The script is judged by each check, and every step of it is recorded."""
    status, verdicts, records = run_harness(tmp_path)
    assert status == 0
    assert verdicts == [
        {"check": check, "verdict": "passed", "findings": [], "notes": []}
        for check in ("Optimizer coverage", "Training run", "Resume equivalence")
    ]
    assert [record["step"] for record in records] == list(range(20))
    assert records[-1]["loss"] < records[0]["loss"]
    assert capsys.readouterr().out == ("Optimizer coverage: passed\nTraining run: passed\nResume equivalence: passed\n")


def test_without_rich_the_verdicts_are_printed_plainly(monkeypatch, capsys):
    """Rich is a convenience."""
    monkeypatch.setitem(sys.modules, "rich.console", None)
    custom_harness.show([Report("One"), Report("Two")])
    assert capsys.readouterr().out == "One: passed\n\nTwo: passed\n"


def test_what_was_not_judged_does_not_pass():
    """A report of which nothing was judged has an exit status of its own, and a finding outweighs it."""
    passed, not_judged = Report("One"), Report("Two", judged=False)
    assert custom_harness.exit_status([passed]) == 0
    assert custom_harness.exit_status([passed, not_judged]) == custom_harness.exit_status([]) == 2
    assert custom_harness.verdict(not_judged)["verdict"] == "could not judge"


def test_the_script_resumes_itself(tmp_path, capsys):
    """Two calls, the second one with --resume, end as one call does."""
    path = str(tmp_path / "last.pt")
    one_long_main.main(["--steps", "12"])
    one_long_main.main(["--steps", "8", "--checkpoint", path, "--save-every", "4"])
    one_long_main.main(["--steps", "12", "--resume", path])
    whole, _, resumed = capsys.readouterr().out.splitlines()
    assert resumed == whole


# Every bug of the list above gets its finding.

BUGS = (
    Bug(
        "leave the last layer out of the optimizer",
        "uncovered-parameter",
        "    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)",
        "    optimizer = torch.optim.AdamW(model[:-1].parameters(), lr=1e-2, weight_decay=0.01)",
    ),
    Bug(
        "forget zero_grad()",
        "missing-zero-grad",
        "        optimizer.zero_grad()",
        "",
    ),
    Bug(
        "clip after the step",
        "clip-after-step",
        "        nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n        optimizer.step()",
        "        optimizer.step()\n        nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    ),
    Bug(
        "make the loss anew from its number",
        "loss-not-connected",
        "        loss = nn.functional.cross_entropy(model(points), arms)",
        "        loss = torch.tensor(nn.functional.cross_entropy(model(points), arms).item(), requires_grad=True)",
    ),
    Bug(
        "forget the optimizer when loading",
        "optimizer-state-not-restored",
        '        optimizer.load_state_dict(checkpoint["optimizer"])',
        "",
    ),
    Bug(
        "forget the scheduler when loading",
        "scheduler-not-restored",
        '        scheduler.load_state_dict(checkpoint["scheduler"])',
        "",
    ),
    Bug(
        "start counting anew after loading",
        "resume-diverges",  # the batches are made where no check can look
        '        step = checkpoint["step"]',
        "",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.title)
def test_each_bug_gets_its_finding_first(bug, tmp_path, capsys):
    """The first finding names the bug, in the output too, and the exit status is 1."""
    status, verdicts, _ = run_harness(tmp_path, with_bug(bug, Path(one_long_main.__file__)).main)
    assert status == 1
    first = next(one for verdict in verdicts for one in verdict["findings"])
    assert first["rule"] == bug.rule
    assert f"\n[{bug.rule}] {first['seen']}\n" in capsys.readouterr().out


def test_the_list_above_names_the_bugs():
    """What this file says to try is what is tried."""
    assert [line.removeprefix("- ") for line in __doc__.splitlines() if line.startswith("- ")] == [
        bug.title for bug in BUGS
    ]
