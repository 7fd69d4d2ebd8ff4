"""What all checks of a test have in common, from the command line, the configuration and the test's markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

from tl_core import Report
from tl_pytest._rule_ids import RULES
from tl_pytest._tolerances import ToleranceOverride, find_tolerance
from tl_telemetry import TrainingRun


@dataclass(frozen=True)
class Common:
    """Adds to the arguments of a check what holds for the whole test.

    Args:
        tolerances: Overrides of the tolerances, those that go before others first.
        allow: Rules that may be broken in all checks.
        keep: Called with each training run; None where nobody asks for them.
    """

    tolerances: tuple[ToleranceOverride, ...] = ()
    allow: tuple[str, ...] = ()
    keep: Callable[[TrainingRun], None] | None = None

    def allowed(self, check: str, given: Any = ()) -> Any:
        """Add the rules that may be broken in all checks to those of a call, as far as the check knows them.

        Args:
            check: The check's key in ``RULES``.
            given: What the call gave; what is no list of rules is left for the check to refuse.

        Returns:
            What to hand to the check.
        """
        rules = [rule for rule in self.allow if rule in RULES[check]]
        if not rules or isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
            return given
        return [*given, *rules]

    def without_allowed(self, check: str, report: Report) -> Report:
        """Take what may be broken in all checks out of a report, of a check that has no ``allow``.

        Args:
            check: The check's key in ``RULES``.
            report: Its report. The check has run nothing, so that what it found can be taken out afterwards.

        Returns:
            The report without these findings.
        """
        allowed = self.allowed(check)
        return replace(report, findings=tuple(one for one in report.findings if one.rule not in allowed))

    def tolerance(self, name: str, device: Any, rtol: float | None, atol: float | None) -> dict[str, float | None]:
        """Fill in the tolerances that a call did not give.

        Args:
            name: The tolerance's name.
            device: The device of the run.
            rtol: The call's relative tolerance.
            atol: The call's absolute tolerance.

        Returns:
            Both, None where the check's default holds.
        """
        set_rtol, set_atol = find_tolerance(self.tolerances, name, str(device).partition(":")[0])
        return {"rtol": set_rtol if rtol is None else rtol, "atol": set_atol if atol is None else atol}

    def kept(self, run: TrainingRun) -> TrainingRun:
        """Hand on a run to whoever collects them, and return it."""
        if self.keep is not None:
            self.keep(run)
        return run

    def watched(self, watch: AbstractContextManager[TrainingRun]) -> AbstractContextManager[TrainingRun]:
        """Return a context manager that yields the same run, and hands it on."""
        return watch if self.keep is None else _Watched(watch, self.kept)


class _Watched:
    """A context manager around another; unlike a generator it leaves no frame in the errors of the loop inside."""

    def __init__(self, watch: AbstractContextManager[TrainingRun], kept: Callable[[TrainingRun], TrainingRun]) -> None:
        self._watch = watch
        self._kept = kept

    def __enter__(self) -> TrainingRun:
        return self._kept(self._watch.__enter__())

    def __exit__(self, *error: Any) -> bool | None:
        return self._watch.__exit__(*error)
