"""What tl-pytest adds to a run of pytest that does not use it: ``pytest --collect-only`` on an empty folder.

Run it with ``python tests/benchmarks/pytest_startup.py``. Runs with the plugin and without it take turns, so that
whatever else the machine does falls on all; other installed plugins are left out of all of them. Given are medians of
wall time and of processor time, and what is added as the median over the rounds; the processor's is the steadier one on
a busy machine. The row ``control`` sets runs without the plugin beside others of the same kind: how far it is from 0 is
what noise makes of no difference.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
from time import perf_counter

import pytest

NUM_ROUNDS = 20
WAYS = {"without": (), "control": (), "with": ("-p", "tl_pytest.plugin")}


def measure(folder: str, arguments: tuple[str, ...]) -> tuple[float, float]:
    """Run pytest once and return its wall time and its processor time in milliseconds."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", *arguments]
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), perf_counter()
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, check=False)
    wall_s, after = perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != pytest.ExitCode.NO_TESTS_COLLECTED:
        raise RuntimeError(f"pytest ended with {done.returncode}: {done.stderr.decode()}")
    processor_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 1e3 * wall_s, 1e3 * processor_s


def main() -> None:
    """Print the medians, and by how much they differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help=f"runs of each way (default {NUM_ROUNDS})")
    rounds = parser.parse_args().rounds
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        ways = list(WAYS.items())
        for _ in range(rounds + 1):  # the first round fills the caches
            ways.append(ways.pop(0))  # each way is first in turn
            for name, arguments in ways:
                times[name].append(measure(folder, arguments))
    print(f"pytest {pytest.__version__}, Python {platform.python_version()}, {rounds} rounds, medians in ms")
    print(f"{'':<10}{'wall':>8}{'added':>8}{'processor':>12}{'added':>8}")
    for name, runs in times.items():
        columns = []
        for which in (0, 1):
            pairs = zip(runs[1:], times["without"][1:], strict=True)
            added = statistics.median(one[which] - other[which] for one, other in pairs)
            columns += [statistics.median(one[which] for one in runs[1:]), added]
        print(f"{name:<10}{columns[0]:>8.0f}{columns[1]:>8.0f}{columns[2]:>12.0f}{columns[3]:>8.0f}")


if __name__ == "__main__":
    main()
