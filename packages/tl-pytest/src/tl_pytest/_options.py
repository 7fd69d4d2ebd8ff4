"""The options, and their twins in the project's pytest configuration."""

from __future__ import annotations

import pytest

GROUP = "training-loop checks (tl-pytest)"


def add_options(parser: pytest.Parser) -> None:
    """Add the group "tl" with its options, and the keys of the configuration file.

    Every option is None where it is not given, so that the file's key can stand in for it; values are texts or lists of
    texts, which pytest-xdist hands to its workers as they are.

    Args:
        parser: pytest's parser.
    """
    group = parser.getgroup("tl", GROUP)
    group.addoption(
        "--tl-device",
        dest="tl_device",
        metavar="DEVICES",
        default=None,
        help="Devices of the training_runner and torch_device fixtures: cpu, cuda, cuda:1, mps, ...; with several "
        "(cpu,cuda) each test runs once on each; auto for the CPU and the accelerator where there is one (default: "
        "tl_device of the configuration file, else cpu)",
    )
    group.addoption(
        "--tl-seed",
        dest="tl_seed",
        metavar="SEED",
        default=None,
        help="Seed of the training_runner and torch_seed fixtures (default: tl_seed of the configuration file, else 0)",
    )
    group.addoption(
        "--tl-deterministic",
        dest="tl_deterministic",
        action="store_true",
        default=None,
        help="Let torch use deterministic algorithms only in tests that use a fixture of tl-pytest",
    )
    group.addoption(
        "--tl-num-threads",
        dest="tl_num_threads",
        metavar="NUM",
        default=None,
        help="CPU threads of torch in tests that use a fixture of tl-pytest (default: tl_num_threads of the "
        "configuration file, else torch's own)",
    )
    group.addoption(
        "--tl-allow",
        dest="tl_allow",
        metavar="RULE",
        action="append",
        default=None,
        help="Rule that may be broken in all checks of training_runner; can be given several times, and adds to "
        "tl_allow of the configuration file",
    )
    group.addoption(
        "--tl-report",
        dest="tl_report",
        metavar="DIR",
        default=None,
        help="Write the verdicts and records of each test to a file in this folder (JSON Lines)",
    )
    group.addoption(
        "--tl-sarif",
        dest="tl_sarif",
        metavar="FILE",
        default=None,
        help="Write the findings that failed tests to this file (SARIF 2.1.0)",
    )
    parser.addini("tl_device", "Default of --tl-device", type="string", default=None)
    parser.addini("tl_seed", "Default of --tl-seed", type="int", default=None)
    parser.addini("tl_deterministic", "Default of --tl-deterministic", type="bool", default=False)
    parser.addini("tl_num_threads", "Default of --tl-num-threads", type="int", default=None)
    parser.addini("tl_allow", "Rules that may be broken in all checks of training_runner", type="linelist", default=[])
    parser.addini("tl_report", "Default of --tl-report, relative to the root", type="string", default=None)
    parser.addini("tl_sarif", "Default of --tl-sarif, relative to the root", type="string", default=None)
    parser.addini(
        "tl_tolerances",
        "Tolerances of the comparing checks, in lines such as training_resume: rtol=1e-4, cuda.rtol=1e-3",
        type="linelist",
        default=[],
    )
