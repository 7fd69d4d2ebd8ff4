"""What is said at the end of a run: lines by rule, annotations for GitHub, SARIF; knows no pytest."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tl_pytest._unjudged import NOT_JUDGED
from tl_pytest._verdicts import Plain, message

SHOWN_TESTS = 5  # in the line of a rule
SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/os/schemas/sarif-schema-2.1.0.json"
BASE = "%SRCROOT%"


@dataclass(frozen=True)
class Failure:
    """Hold the verdict that failed a test.

    Args:
        nodeid: The test's id.
        test: The test's name in its file.
        file: The test's file, relative to the root.
        line: The line of the test that asked for the verdict, from 1.
        verdict: The verdict, as ``describe`` gives it.
    """

    nodeid: str
    test: str
    file: str
    line: int
    verdict: Plain

    @property
    def judged(self) -> bool:
        """Whether there are findings; else nothing could be judged."""
        return bool(self.verdict["verdict"] != NOT_JUDGED)


class Summary:
    """Collects the verdicts that failed tests, in whichever order they come."""

    def __init__(self) -> None:
        self._failures: list[Failure] = []

    def add(self, failure: Failure) -> None:
        """Take down a failure."""
        self._failures.append(failure)

    @property
    def failures(self) -> list[Failure]:
        """All failures, in the order of the files; workers end in another order each time."""
        return sorted(self._failures, key=lambda one: (one.file, one.line, one.nodeid))

    def rule_lines(self) -> list[str]:
        """Give a line for each rule, the most frequent first, and one for what could not be judged."""
        tests: dict[str, list[str]] = {}
        for failure in self.failures:
            for finding in failure.verdict["findings"]:
                tests.setdefault(finding["rule"], []).append(failure.test)
        lines = [_line(rule, names) for rule, names in sorted(tests.items(), key=lambda pair: (-len(pair[1]), pair[0]))]
        unjudged = [failure.test for failure in self.failures if not failure.judged]
        return lines + ([_line(NOT_JUDGED, unjudged)] if unjudged else [])

    def annotations(self, root: Path) -> list[str]:
        """Give the workflow commands by which GitHub shows findings at the lines of the tests.

        Args:
            root: What the files of the failures are relative to.
        """
        workspace = Path(os.environ.get("GITHUB_WORKSPACE") or root)
        lines = []
        for failure in self.failures:
            file = root / failure.file
            shown = file.relative_to(workspace) if file.is_relative_to(workspace) else Path(failure.file)
            for rule, text, _ in _results(failure):
                place = f"file={_property(shown.as_posix())},line={failure.line}"
                title = _property(f"{failure.verdict['check']}: {rule}")
                lines.append(f"::error {place},title={title}::{_data(text)}")
        return lines

    def sarif(self, root: Path, version: str) -> Plain:
        """Give the findings as a SARIF 2.1.0 log.

        Args:
            root: What the files of the failures are relative to.
            version: The version of tl-pytest.
        """
        results = [_sarif_result(failure, *result) for failure in self.failures for result in _results(failure)]
        rules = sorted({result["ruleId"] for result in results})
        driver = {"name": "tl-pytest", "version": version, "rules": [{"id": rule} for rule in rules]}
        run = {
            "tool": {"driver": driver},
            "originalUriBaseIds": {BASE: {"uri": f"{root.as_uri()}/"}},
            "columnKind": "unicodeCodePoints",
            "results": results,
        }
        return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}

    def write_sarif(self, path: Path, root: Path, version: str) -> int:
        """Write the SARIF log.

        Args:
            path: The file.
            root: What the files of the failures are relative to.
            version: The version of tl-pytest.

        Returns:
            The number of results.
        """
        log = self.sarif(root, version)
        path.write_text(json.dumps(log, indent=2) + "\n", encoding="utf-8")
        return len(log["runs"][0]["results"])


def _line(what: str, tests: list[str]) -> str:
    names = list(dict.fromkeys(tests))
    shown = ", ".join(names[:SHOWN_TESTS])
    more = f", and {len(names) - SHOWN_TESTS} more" if len(names) > SHOWN_TESTS else ""
    return f"tl: {what} {len(tests)}x ({shown}{more})"


def _results(failure: Failure) -> list[tuple[str, str, Plain]]:
    """Give what a failure says: a rule, a text and where it comes from, for each finding."""
    if failure.judged:
        return [(one["rule"], message(one), one) for one in failure.verdict["findings"]]
    notes = [message(one) for one in failure.verdict["notes"]]
    text = "\n".join([f"{failure.verdict['check']}: {NOT_JUDGED}", *notes])
    return [("not-judged", text, {"steps": [], "parameters": [], "evidence": {}})]


def _sarif_result(failure: Failure, rule: str, text: str, finding: Plain) -> dict[str, Any]:
    place = {"artifactLocation": {"uri": failure.file, "uriBaseId": BASE}, "region": {"startLine": failure.line}}
    return {
        "ruleId": rule,
        # what could not be judged is open: a result of another kind than a failure has no level
        **({"level": "error"} if failure.judged else {"kind": "open", "level": "none"}),
        "message": {"text": f"{failure.verdict['check']}: {text}" if failure.judged else text},
        "locations": [
            {
                "physicalLocation": place,
                "logicalLocations": [{"fullyQualifiedName": failure.nodeid, "kind": "function"}],
            }
        ],
        "properties": {name: finding[name] for name in ("steps", "parameters", "evidence")},
    }


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
