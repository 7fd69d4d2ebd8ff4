"""The part of the plugin that hears of verdicts and reports them; one object for a run of pytest.

What deals with verdicts is imported where there is one: a run without checks does not pay for it.
"""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Generator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tl_pytest import _markers
from tl_pytest._settings import Settings
from tl_pytest._unjudged import ATTRIBUTE, NOT_JUDGED, PROPERTIES, is_unjudged

if TYPE_CHECKING:
    from tl_pytest._log import TestLog
    from tl_pytest._summary import Summary

_LOG = pytest.StashKey["TestLog"]()
_STILL = pytest.StashKey[ExitStack]()


def log_of(item: pytest.Item) -> TestLog:
    """Return what is known of the test that runs."""
    if _LOG not in item.stash:
        from tl_pytest._log import TestLog

        item.stash[_LOG] = TestLog(keeps_runs=item.config.getoption("tl_report") is not None)
    return item.stash[_LOG]


class Reporter:
    """Hears of verdicts where tests run, and reports them where pytest does: with pytest-xdist in two processes.

    Args:
        settings: The plugin's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._summary: Summary | None = None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Refuse markers that make no sense, also of tests that do not use the runner."""
        # what is left of an earlier attempt, where another plugin repeats tests that failed
        item.user_properties[:] = [one for one in item.user_properties if one[0] not in PROPERTIES]
        _markers.tolerances_of(item)
        with _hearing(item):
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, None, None]:
        """Hold the generators still, for a test with a seed, until its own first line."""
        with _hearing(item), ExitStack() as still:
            if "torch_seed" in _arguments(item):
                from tl_core import preserve_rng

                item.stash[_STILL] = still
                still.enter_context(preserve_rng())
            yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, object, object]:
        """Put the generators back to where the set-up left them: other plugins reseed them before each test."""
        if still := pyfuncitem.stash.get(_STILL, None):
            still.close()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Hear of the verdicts that fixtures ask for at their end."""
        with _hearing(item):
            yield

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Cut the frames of the checks from tracebacks, which ``--full-trace`` shows, and attach what they said."""
        if "tl_core" not in sys.modules:
            return (yield)
        if call.excinfo is not None and not item.config.getoption("fulltrace"):
            from tl_pytest._frames import without_own_frames

            call.excinfo.traceback = type(call.excinfo.traceback)(without_own_frames(call.excinfo))
        report = yield
        from tl_pytest._report import attach_verdicts

        log = log_of(item)
        attach_verdicts(item, call, report, log)
        if call.when == "teardown":
            if self._settings.report is not None:
                log.write(self._settings.report, _head(item))
            del item.stash[_LOG]  # and with it the runs
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take down what failed a test; the reports of workers arrive here."""
        if report.failed and hasattr(report, ATTRIBUTE):
            from tl_pytest._report import failure_of

            self._failures().add(failure_of(report))

    def pytest_report_teststatus(
        self, report: pytest.TestReport | pytest.CollectReport
    ) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Tell a test in which nothing could be judged from one that failed."""
        return (NOT_JUDGED, "?", ("NOT JUDGED", {"yellow": True})) if is_unjudged(report) else None

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the findings of the whole run, once."""
        config = session.config
        if self._settings.sarif is not None and not config.option.collectonly and not hasattr(config, "workerinput"):
            version = importlib.metadata.version("tl-pytest")
            self._failures().write_sarif(self._settings.sarif, config.rootpath, version)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Show what could not be judged, and a line for each rule."""
        if self._summary is not None or self._settings.sarif is not None or self._settings.report is not None:
            from tl_pytest._report import show_summary

            show_summary(terminalreporter, self._failures(), self._settings)

    def _failures(self) -> Summary:
        if self._summary is None:
            from tl_pytest._summary import Summary

            self._summary = Summary()
        return self._summary


def _arguments(item: pytest.Item) -> dict[str, object]:
    return getattr(item, "funcargs", None) or {}


def _head(item: pytest.Item) -> dict[str, object]:
    file, line, test = item.location
    device, seed = (_arguments(item).get(name) for name in ("torch_device", "torch_seed"))
    place = {"nodeid": item.nodeid, "file": Path(file).as_posix(), "line": (line or 0) + 1, "test": test}
    return {**place, "device": None if device is None else str(device), "seed": seed}


def _hearing(item: pytest.Item) -> AbstractContextManager[None]:
    if "tl_core" not in sys.modules:
        return nullcontext()
    from tl_pytest._verdicts import listening

    return listening(log_of(item).heard)
