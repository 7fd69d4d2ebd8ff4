"""The options, their twins in the configuration file, and what is said about values that make no sense."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest
import torch

from tl_pytest import plugin
from tl_pytest._rule_ids import RULES
from tl_pytest._settings import Settings

NAMES = "cpu, or one of cuda, hpu, mps, mtia, npu, xpu with an optional index, as in cuda:1"
DEVICES = f"auto, {NAMES}, or several with commas between them"
SEEDS = "an integer from 0 to 4294967295"


def show(seed: int) -> str:
    return f"def test_it(torch_seed, torch_device):\n    assert (torch_seed, torch_device.type) == ({seed}, 'cpu')\n"


def errors(result: pytest.RunResult) -> list[str]:
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    return [line for line in result.errlines if line.startswith("ERROR")]


def header(result: pytest.RunResult) -> str:
    (line,) = (line for line in result.outlines if line.startswith("tl-pytest: torch="))
    return line.partition(", ")[2]


def test_the_defaults_are_the_cpu_and_seed_0(run_tests):
    """Without options and configuration the device is the CPU and the seed 0; the header says so."""
    result = run_tests(show(0))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"tl-pytest: torch={torch.__version__}, device=cpu, seed=0"])


def test_the_options_set_device_and_seed(run_tests):
    """--tl-device and --tl-seed reach the fixtures."""
    result = run_tests(show(7), "--tl-seed=7", "--tl-device", "cpu")
    result.assert_outcomes(passed=1)
    assert header(result) == "device=cpu, seed=7"


def test_the_header_shows_what_else_is_set(run_tests):
    """The header names the other settings where they are not the defaults."""
    rules = ("--tl-allow=lr-zero", "--tl-allow=not-judged", "--tl-allow=lr-zero")
    result = run_tests(show(0), "--tl-deterministic", "--tl-num-threads=2", *rules)
    assert header(result) == "device=cpu, seed=0, deterministic, num_threads=2, allow=lr-zero,not-judged"


def test_the_header_does_without_torch(monkeypatch, run_tests):
    """Where torch is not imported the version comes from its metadata, and is left out where there are none."""

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    config = types.SimpleNamespace(stash={plugin._SETTINGS: Settings(("cpu",), "the default", 0)})
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr("importlib.metadata.version", lambda name: f"9.0 of {name}")
    assert plugin.pytest_report_header(config) == "tl-pytest: torch=9.0 of torch, device=cpu, seed=0"
    monkeypatch.setattr("importlib.metadata.version", version)
    assert plugin.pytest_report_header(config) == "tl-pytest: device=cpu, seed=0"


STATE = """
import pytest
import torch

def test_it(torch_seed):
    assert torch_seed == SEED
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 2

def test_another():
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.get_num_threads() == 1
"""


@pytest.fixture
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_one_thread")
def test_ini_twins(run_tests, pytester):
    """The keys of an INI file stand for the options, also where pytest is strict about keys."""
    keys = ["tl_seed = 11", "tl_device = cpu", "tl_deterministic = true", "tl_num_threads = 2"]
    lists = ["tl_allow =", "    lr-zero", "    not-judged", "tl_tolerances =", "    training_resume: rtol=1e-4"]
    pytester.makeini("\n".join(["[pytest]", *keys, *lists, "strict_config = true"]))
    result = run_tests(STATE.replace("SEED", "11"))
    result.assert_outcomes(passed=2)
    assert header(result) == "device=cpu, seed=11, deterministic, num_threads=2, allow=lr-zero,not-judged"


@pytest.mark.usefixtures("_one_thread")
def test_toml_twins(run_tests, pytester):
    """The keys of a pytest.toml file are typed: integers, strings, a boolean and lists of strings."""
    if pytest.version_tuple < (9,):
        pytest.skip("pytest.toml is read by pytest 9 and later")
    keys = "tl_seed = 12\ntl_device = 'cpu'\ntl_deterministic = true\ntl_num_threads = 2\n"
    lists = "tl_allow = ['lr-zero']\ntl_tolerances = ['training_resume: rtol=1e-4']\n"
    pytester.makefile(".toml", pytest=f"[pytest]\nstrict = true\n{keys}{lists}")
    result = run_tests(STATE.replace("SEED", "12"))
    result.assert_outcomes(passed=2)
    assert header(result) == "device=cpu, seed=12, deterministic, num_threads=2, allow=lr-zero"


def test_pyproject_twins(run_tests, pytester):
    """In the ini_options of a pyproject an integer may be written as such."""
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntl_seed = 13\ntl_device = 'cpu'\n")
    run_tests(show(13)).assert_outcomes(passed=1)


def test_rules_of_the_command_line_add_to_those_of_the_file(run_tests, pytester):
    """What the file allows stays allowed."""
    pytester.makeini("[pytest]\ntl_allow = lr-zero\n")
    assert header(run_tests(show(0), "--tl-allow=no-update")) == "device=cpu, seed=0, allow=lr-zero,no-update"


def test_an_option_goes_before_the_file(run_tests, pytester):
    """The command line wins over the configuration file, -o over the file, and the option over -o."""
    pytester.makeini("[pytest]\ntl_seed = 1\ntl_device = cuda\n")
    run_tests(show(2), "--tl-seed=2", "--tl-device=cpu").assert_outcomes(passed=1)
    run_tests(show(3), "-o", "tl_seed=3", "-o", "tl_device=cpu").assert_outcomes(passed=1)
    run_tests(show(0), "-o", "tl_seed=3", "--tl-seed=0", "--tl-device=cpu").assert_outcomes(passed=1)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "CUDA", "", "auto:1", "cpu,gpu"])
def test_an_unknown_device_is_a_usage_error(run_tests, device):
    """A device that torch would not know stops the run before it collects, and the message says what is allowed."""
    result = run_tests(show(0), f"--tl-device={device}")
    name = device.rpartition(",")[2]
    assert errors(result) == [f"ERROR: --tl-device: unknown device {name!r}; allowed: {DEVICES}"]


def test_auto_stands_alone(run_tests):
    """What auto stands for has the CPU in it: beside other names it would name a device twice."""
    result = run_tests(show(0), "--tl-device=cpu,auto")
    assert errors(result) == [f"ERROR: --tl-device: auto stands alone, got 'cpu,auto'; allowed: {DEVICES}"]


def test_a_device_named_twice_is_a_usage_error(run_tests):
    """Each test would run twice on the same device, under the same name."""
    result = run_tests(show(0), "--tl-device=cpu, cuda,cpu")
    assert errors(result) == [
        "ERROR: --tl-device: cpu is named twice in 'cpu, cuda,cpu'; each test would run twice on it"
    ]


@pytest.mark.parametrize("threads", ["0", "-1", "two", "1025", ""])
def test_a_number_of_threads_out_of_range_is_a_usage_error(run_tests, threads):
    """torch needs at least one thread."""
    result = run_tests(show(0), f"--tl-num-threads={threads}")
    assert errors(result) == [f"ERROR: --tl-num-threads: cannot use {threads!r}; allowed: an integer from 1 to 1024"]


def test_an_unknown_rule_is_a_usage_error(run_tests):
    """A misspelt rule is told with those of a like name, another with all rules of all checks."""
    result = run_tests(show(0), "--tl-allow=lr-zeros")
    assert errors(result) == ["ERROR: --tl-allow: there is no rule 'lr-zeros'; did you mean lr-zero, group-lr-zero?"]
    result = run_tests(show(0), "--tl-allow", "Q")
    every = dict.fromkeys(rule for rules in RULES.values() for rule in rules)
    assert errors(result) == [f"ERROR: --tl-allow: there is no rule 'Q'; allowed: {', '.join(every)}"]


@pytest.mark.parametrize("seed", ["-1", "4294967296", "one", "1.5", ""])
def test_a_seed_out_of_range_is_a_usage_error(run_tests, seed):
    """A seed that numpy would not take stops the run before it collects."""
    result = run_tests(show(0), f"--tl-seed={seed}")
    assert errors(result) == [f"ERROR: --tl-seed: cannot seed with {seed!r}; allowed: {SEEDS}"]


def test_the_largest_seed_is_allowed(run_tests):
    """The bound itself can be used, and seeds every generator."""
    run_tests(show(2**32 - 1), f"--tl-seed={2**32 - 1}").assert_outcomes(passed=1)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("tl_device = gpu", f"tl_device in tox.ini: unknown device 'gpu'; allowed: {DEVICES}"),
        ("tl_seed = -3", f"tl_seed in tox.ini: cannot seed with -3; allowed: {SEEDS}"),
        (
            "tl_seed = many",
            f"tl_seed in tox.ini: invalid literal for int() with base 10: 'many'; allowed: {SEEDS}",
        ),
        (
            "tl_deterministic = perhaps",
            "tl_deterministic in tox.ini: invalid truth value 'perhaps'; allowed: true or false",
        ),
        ("tl_num_threads = 0", "tl_num_threads in tox.ini: cannot use 0; allowed: an integer from 1 to 1024"),
        (
            "tl_allow = lr-zeros",
            "tl_allow in tox.ini: there is no rule 'lr-zeros'; did you mean lr-zero, group-lr-zero?",
        ),
        (
            "tl_tolerances = training: rtol=1",
            "tl_tolerances in tox.ini: 'training: rtol=1': there is no tolerance named 'training'; the names are "
            "grad_accumulation, training_resume",
        ),
    ],
    ids=["device", "seed", "no number", "no truth value", "threads", "rule", "tolerance"],
)
def test_a_wrong_value_in_the_file_is_named_by_its_key(run_tests, pytester, key, message):
    """A value of the configuration file that is not allowed is named with the key and the file."""
    pytester.makeini(f"[pytest]\n{key}\n")
    assert errors(run_tests(show(0))) == [f"ERROR: {message}"]


def test_a_wrong_type_in_toml_is_named_by_its_key(run_tests, pytester):
    """A value of the wrong TOML type is a usage error, not a traceback."""
    if pytest.version_tuple < (9,):
        pytest.skip("pytest.toml is read by pytest 9 and later")
    path = pytester.makefile(".toml", pytest="[pytest]\ntl_seed = '3'\n")
    expected = f"{path}: config option 'tl_seed' expects an int, got str: '3'"
    assert errors(run_tests(show(0))) == [f"ERROR: tl_seed in pytest.toml: {expected}; allowed: {SEEDS}"]


def test_a_wrong_override_is_named_as_such(run_tests):
    """Without a configuration file the value can only come from -o."""
    assert errors(run_tests(show(0), "-o", "tl_device=tpu")) == [
        f"ERROR: -o tl_device: unknown device 'tpu'; allowed: {DEVICES}"
    ]


OPTIONS = [
    "--tl-allow",
    "--tl-deterministic",
    "--tl-device",
    "--tl-num-threads",
    "--tl-report",
    "--tl-sarif",
    "--tl-seed",
]
KEYS = [*(option.lstrip("-").replace("-", "_") for option in OPTIONS), "tl_tolerances"]


def test_help_shows_the_group(run_tests):
    """--help has a group of its own for the plugin, and the keys of the configuration file."""
    result = run_tests("", "--help", subprocess=True)
    assert result.ret == 0
    start = result.outlines.index("training-loop checks (tl-pytest):")
    group = result.outlines[start : result.outlines.index("", start)]
    shown = [line.split()[0].partition("=")[0] for line in group if line.startswith("  --")]
    assert sorted(shown) == OPTIONS
    assert sorted(line.split()[0] for line in result.outlines if line.startswith("  tl_")) == KEYS


def test_the_options_are_frozen(pytestconfig):
    """The plugin has these options and keys, and no others."""
    group = pytestconfig._parser.getgroup("tl")
    assert sorted(name for option in group.options for name in option.names()) == OPTIONS
    assert sorted(key for key in pytestconfig._parser._inidict if key.startswith("tl_")) == KEYS


def test_markers_are_registered(run_tests):
    """--markers shows the marker with its arguments, so that --strict-markers knows it."""
    run_tests("", "--markers").stdout.fnmatch_lines(
        ["@pytest.mark.tl_tolerance(name, rtol=None, atol=None, device=None): tolerances of the checks of *"]
    )
