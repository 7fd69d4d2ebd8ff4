"""Checks composed without pytest: a program that trains ``one_long_main.py`` under watch and judges it.

The function under test owns its loop. ``SteppedLoop`` stops it after each step, which makes of it what every check
takes: a function that builds a setup, and a step. The verdicts are printed, written as JSON lines where a file is
named, and told by the exit status: 0 where all is well, 1 where something was found, 2 where something could not be
judged.

    python custom_harness.py --verdicts verdicts.jsonl --records records.jsonl
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import one_long_main
from torch import Tensor

from tl_core import Report, TrainingSetup
from tl_coverage import check_optimizer_coverage
from tl_resume import check_resume_equivalent
from tl_telemetry import SteppedLoop, TrainingRun, observe

PASSED, FAILED, NOT_JUDGED = 0, 1, 2
RESUME_AT = 4


class SteppedMain:
    """A main() that trains in a loop of its own, step by step; it saves and resumes by options of its own."""

    def __init__(self, main: Callable[..., Any], checkpoint: Path) -> None:
        self.main = main
        self.checkpoint = checkpoint
        self.loops: WeakKeyDictionary[TrainingSetup, SteppedLoop] = WeakKeyDictionary()

    def make_setup(self, *options: str) -> TrainingSetup:
        """Run main() until it has built what it trains."""
        arguments = ["--checkpoint", str(self.checkpoint), "--save-every", str(RESUME_AT), *options]
        loop = SteppedLoop(lambda pause: self.main(arguments, lambda *built: pause(built), pause))
        setup = TrainingSetup(*loop.advance())
        self.loops[setup] = loop
        return setup

    def step(self, setup: TrainingSetup, batch: Any = None) -> Tensor:
        """Let main() go on until it has done a step, with the batch that it makes itself; return its loss."""
        loss: Tensor = self.loops[setup].advance()
        return loss

    def save(self, setup: TrainingSetup, path: Path) -> None:
        """Keep what main() has saved after this step."""
        shutil.copy(self.checkpoint, path)

    def load(self, setup: TrainingSetup, path: Path) -> None:
        """Start main() anew with ``--resume``, and let the setup stand for what it trains now."""
        resumed = self.make_setup("--resume", str(path))
        self.loops.pop(setup).close()
        self.loops[setup] = self.loops.pop(resumed)
        setup.model = resumed.model
        setup.optimizers.update(resumed.optimizers)
        setup.schedulers.update(resumed.schedulers)


def watch(training: SteppedMain, steps: int) -> TrainingRun:
    """Train under watch, in a loop of the harness's own."""
    setup = training.make_setup()
    with observe(setup) as run:
        for _ in range(steps):
            with run.step() as current:
                current.loss = training.step(setup)
    return run


def judge(main: Callable[..., Any], steps: int) -> tuple[list[Report], TrainingRun]:
    """Make all checks, and return their reports and what was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        training = SteppedMain(main, Path(folder, "last.pt"))
        run = watch(training, steps)
        reports = [
            check_optimizer_coverage(run.setup.model, run.setup.optimizers),
            run.check(max_grad_norm=20.0, min_relative_decrease=0.1),
            check_resume_equivalent(
                training.make_setup,
                lambda index: index,  # main() makes its batches itself
                training.step,
                save=training.save,
                load=training.load,
                resume_at=RESUME_AT,
            ),
        ]
    return reports, run


def verdict(report: Report) -> dict[str, Any]:
    """Return a report as what can be written as JSON."""
    words = "failed" if report.findings else "passed" if report.judged else "could not judge"
    told = {
        name: [{key: value for key, value in asdict(one).items() if key != "evidence"} for one in ones]
        for name, ones in (("findings", report.findings), ("notes", report.notes))
    }
    return {"check": report.check, "verdict": words, **told}


def exit_status(reports: Iterable[Report]) -> int:
    """Tell all verdicts as one number; an empty list says that nothing was judged."""
    reports = list(reports)
    if any(report.findings for report in reports):
        return FAILED
    return PASSED if reports and all(report.judged for report in reports) else NOT_JUDGED


def show(reports: Iterable[Report]) -> None:
    """Print the reports, in colours where rich is installed and the output is a terminal."""
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        print(*reports, sep="\n\n")
        return
    console = Console(highlight=False)
    for report in reports:
        text = Text(str(report))
        text.stylize("bold green" if report.ok else "bold red", 0, str(report).find("\n"))
        console.print(text, soft_wrap=True)


def main(arguments: Sequence[str] | None = None, training: Callable[..., Any] = one_long_main.main) -> int:
    parser = argparse.ArgumentParser(description="Train one_long_main.py under watch, and judge it.")
    parser.add_argument("--steps", type=int, default=40, help="how many steps are watched")
    parser.add_argument("--verdicts", type=Path, help="write a line of JSON for each check")
    parser.add_argument("--records", type=Path, help="write a line of JSON for each step")
    options = parser.parse_args(arguments)
    reports, run = judge(training, options.steps)
    show(reports)
    if options.verdicts:
        options.verdicts.write_text("".join(json.dumps(verdict(report)) + "\n" for report in reports))
    if options.records:
        run.to_jsonl(options.records)
    return exit_status(reports)


if __name__ == "__main__":
    sys.exit(main())
