"""What is known of one test: its verdicts and its runs; knows no pytest."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tl_pytest._verdicts import Plain, describe

if TYPE_CHECKING:
    from tl_core import Report
    from tl_telemetry import TrainingRun

MAX_NAME = 100  # characters of a test's name in the name of its file


class TestLog:
    """Collects the verdicts and the runs of one test.

    Args:
        keeps_runs: Whether runs are wanted after the test; else they live as long as the test itself keeps them.
    """

    __test__ = False  # pytest collects what is named Test...

    def __init__(self, *, keeps_runs: bool) -> None:
        self.verdicts: list[Plain] = []
        self.outcome = "passed"
        self._keeps_runs = keeps_runs
        self._kept: list[TrainingRun] = []
        self._seen: list[weakref.ref[TrainingRun]] = []

    def heard(self, report: Report) -> None:
        """Take down a verdict."""
        self.verdicts.append(describe(report))

    def keep(self, run: TrainingRun) -> None:
        """Take down a run."""
        self._seen.append(weakref.ref(run))
        if self._keeps_runs:
            self._kept.append(run)

    def unasked(self) -> list[Plain]:
        """Judge the runs of a test that failed before it asked for any verdict.

        Returns:
            The verdicts of the runs that are still there.
        """
        if self.verdicts:
            return []
        from tl_core import NotJudged

        found = []
        for run in (reference() for reference in self._seen):
            try:
                if run is not None and run.records:
                    found.append(describe(run.report))
                    found[-1]["check"] += ", of which nothing was asserted"
            except (NotJudged, RuntimeError):  # no training began in it; or the device is what failed
                continue
        return found

    def write(self, folder: Path, head: Plain) -> None:
        """Write the test's file, or remove that of an earlier run when there is nothing to tell.

        Args:
            folder: Where the file goes; it is made where it is missing.
            head: What the first line says of the test, ``nodeid`` among it.
        """
        path = folder / file_name(head["nodeid"])
        if not (self.verdicts or self._kept):
            path.unlink(missing_ok=True)
            return
        lines = [{"kind": "test", **head, "outcome": self.outcome}, *self._verdict_lines(), *self._run_lines()]
        folder.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines)
        path.write_text(text, encoding="utf-8")

    def _verdict_lines(self) -> Iterator[Plain]:
        for number, verdict in enumerate(self.verdicts):
            yield {"kind": "verdict", "verdict": number, "check": verdict["check"], "outcome": verdict["verdict"]}
            for kind in ("finding", "note"):
                for one in verdict[f"{kind}s"]:
                    yield {"kind": kind, "verdict": number, "check": verdict["check"], **one}

    def _run_lines(self) -> Iterator[Plain]:
        from tl_core import NotJudged

        for number, run in enumerate(self._kept):
            try:
                rows = _rows(run)
            except (NotJudged, RuntimeError) as error:  # as above
                yield {"kind": "run", "run": number, "error": str(error)}
                continue
            yield {"kind": "run", "run": number, "steps": len(rows), "summary": run.summary()}
            for row in rows:
                yield {"kind": "step", "run": number, **row}


def _rows(run: TrainingRun) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="tl-pytest-") as name:
        path = Path(name) / "records.jsonl"
        run.to_jsonl(path)
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def file_name(nodeid: str) -> str:
    """Name the file of a test: readable, short, and another one for each test."""
    readable = re.sub(r"[^A-Za-z0-9_.\[\]-]+", "_", nodeid)[-MAX_NAME:]
    return f"{readable}-{hashlib.sha256(nodeid.encode()).hexdigest()[:8]}.jsonl"
