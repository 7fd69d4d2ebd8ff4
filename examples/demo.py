"""Train a small classifier under watch, then the same loop with each of its one-line bugs, and print the verdicts."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
import time
import warnings
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.status import Status
from rich.text import Text

console = Console(highlight=False)
STYLES = {"-": "red", "+": "green", " ": "dim"}  # of the lines of a difference


def main() -> int:
    argparse.ArgumentParser(prog="demo", description=__doc__).parse_args()
    start = time.perf_counter()
    with Status("importing torch", console=console):
        import digits_loop
        import one_line_bugs

    console.rule("[bold]the loop as it is", align="left")
    healthy = watch(digits_loop)
    console.rule("[bold]the same loop with one line changed", align="left")
    console.print(
        "some break what check() in digits_loop.py demands (rates, decay, a norm); most need no demand", style="dim"
    )
    surprises = 0
    with progress_bar() as progress:
        for number, bug in enumerate(progress.track(one_line_bugs.BUGS, description="one-line bugs"), 1):
            finding = first_finding(one_line_bugs.with_bug(bug))
            as_said = finding is not None and finding.rule == bug.rule
            surprises += not as_said
            progress.console.print(shown(number, bug, finding), soft_wrap=True)
            if not as_said:
                progress.console.print(f"    expected: {bug.rule}\n", style="bold red")
    count = len(one_line_bugs.BUGS)
    seconds = time.perf_counter() - start
    console.print(f"{count - surprises} of {count} bugs got the finding that they should, in {seconds:.0f} s.")
    console.print("Your own loop next: docs/getting-started.md")
    return 0 if healthy and not surprises else 1


def watch(loop: Any) -> bool:
    """Train the loop, print the table and the verdict, and tell whether it passed."""
    with progress_bar() as progress:
        steps = 2 * loop.EVALUATE_EVERY
        task = progress.add_task("training", total=steps)

        def run_with_progress(make_setup: Any, data: Any, step: Callable[..., Any], *, steps: int) -> Any:
            def advance(setup: Any, batch: Any) -> Any:
                progress.advance(task)
                return step(setup, batch)

            return loop.run_training(make_setup, data, advance, steps=steps)

        run = loop.train(run_with_progress, steps=steps)
    console.print(run.table(width=console.width), soft_wrap=True)
    accuracies = ", ".join(f"{100 * accuracy:.1f} %" for accuracy in run.setup.accuracies)
    console.print(f"\n{run.summary()}\naccuracy on held-out digits after each epoch: {accuracies}")
    try:
        loop.check(run)
        equivalence = loop.check_accumulation(), loop.check_resume()
    except AssertionError as error:
        console.print(Text(f"\n{error}\n", style="red"), soft_wrap=True)
        return False
    for report in (run.report, *equivalence):
        console.print(Text(str(report), style="bold green"), soft_wrap=True)
    console.print()
    return True


def first_finding(loop: Any) -> Any:
    """Train a loop with a bug in it and return the first finding, or None."""
    with warnings.catch_warnings(record=True):  # torch's warnings are evidence in the finding: once is enough
        warnings.simplefilter("always")
        try:
            loop.check(loop.train())
            loop.check_accumulation()
            loop.check_resume()
        except AssertionError as error:
            return next(iter(error.report.findings), None)
    return None


def shown(number: int, bug: Any, finding: Any) -> Text:
    """Lay out a bug as a difference of the loop, and below it the finding that it got."""
    text = Text.assemble((f"{number:2}  {bug.title}\n", "bold"))
    for line in difflib.ndiff(bug.old.splitlines(), bug.new.splitlines()):
        if line[0] in STYLES:
            text.append(f"    {line[:2]}{line[2:].strip()}\n", STYLES[line[0]])
    if finding is None:
        return text.append("    passed\n", "bold red")
    rule, cause, fix = f"[{finding.rule}]", "  cause:", "  fix:"
    text.append(wrapped(f"{rule} {finding.seen}"))
    text.append(wrapped(f"{cause} {finding.cause}"))
    text.append(wrapped(f"{fix} {finding.fix}"))
    text.highlight_words([rule], "bold magenta")
    text.highlight_words([f"    {cause}", f"    {fix}"], "dim")
    return text


def wrapped(line: str) -> str:
    hanging = " " * (8 if line.startswith(" ") else 6)
    return textwrap.fill(line, min(console.width, 110), initial_indent="    ", subsequent_indent=hanging) + "\n"


def progress_bar() -> Progress:
    """Return a bar that is gone when it is full; where there is no terminal, there is none."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    sys.exit(main())
