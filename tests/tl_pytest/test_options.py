"""The options, their twins in the configuration file, and what is said about values that make no sense."""

from __future__ import annotations

import pytest

DEVICES = "auto, cpu, or one of cuda, hpu, mps, mtia, npu, xpu with an optional index, as in cuda:1"
SEEDS = "an integer from 0 to 4294967295"


def show(seed: int) -> str:
    return f"def test_it(torch_seed, torch_device):\n    assert (torch_seed, torch_device.type) == ({seed}, 'cpu')\n"


def errors(result: pytest.RunResult) -> list[str]:
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    return [line for line in result.errlines if line.startswith("ERROR")]


def test_the_defaults_are_the_cpu_and_seed_0(run_tests):
    """Without options and configuration the device is the CPU, the seed 0, and the header says nothing."""
    result = run_tests(show(0))
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*tl-pytest:*")


def test_the_options_set_device_and_seed(run_tests):
    """--tl-device and --tl-seed reach the fixtures; the header shows what is not the default."""
    result = run_tests(show(7), "--tl-seed=7", "--tl-device=auto" if _no_accelerator() else "--tl-device=cpu")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["tl-pytest: device=auto, seed=7" if _no_accelerator() else "tl-pytest: seed=7"])


def test_the_header_leaves_out_defaults(run_tests):
    """The header names only the settings that differ from the defaults, however they were given."""
    result = run_tests(show(3), "--tl-seed", "3", "--tl-device", "cpu")
    result.stdout.fnmatch_lines(["tl-pytest: seed=3"])


def test_ini_twins(run_tests, pytester):
    """The keys of an INI file stand for the options, also where pytest is strict about keys."""
    pytester.makeini("[pytest]\ntl_seed = 11\ntl_device = cpu\nstrict_config = true\n")
    result = run_tests(show(11))
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["tl-pytest: seed=11"])


def test_toml_twins(run_tests, pytester):
    """The keys of a pytest.toml file are typed: an integer and a string."""
    if pytest.version_tuple < (9,):
        pytest.skip("pytest.toml is read by pytest 9 and later")
    pytester.makefile(".toml", pytest="[pytest]\nstrict = true\ntl_seed = 12\ntl_device = 'cpu'\n")
    run_tests(show(12)).assert_outcomes(passed=1)


def test_pyproject_twins(run_tests, pytester):
    """In the ini_options of a pyproject an integer may be written as such."""
    pytester.makepyprojecttoml("[tool.pytest.ini_options]\ntl_seed = 13\ntl_device = 'cpu'\n")
    run_tests(show(13)).assert_outcomes(passed=1)


def test_an_option_goes_before_the_file(run_tests, pytester):
    """The command line wins over the configuration file, -o over the file, and the option over -o."""
    pytester.makeini("[pytest]\ntl_seed = 1\ntl_device = cuda\n")
    run_tests(show(2), "--tl-seed=2", "--tl-device=cpu").assert_outcomes(passed=1)
    run_tests(show(3), "-o", "tl_seed=3", "-o", "tl_device=cpu").assert_outcomes(passed=1)
    run_tests(show(0), "-o", "tl_seed=3", "--tl-seed=0", "--tl-device=cpu").assert_outcomes(passed=1)


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cpu:0", "CUDA", "", "auto:1", "cuda:0 "])
def test_an_unknown_device_is_a_usage_error(run_tests, device):
    """A device that torch would not know stops the run before it collects, and the message says what is allowed."""
    result = run_tests(show(0), f"--tl-device={device}")
    assert errors(result) == [f"ERROR: --tl-device: unknown device {device!r}; allowed: {DEVICES}"]


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
    ],
    ids=["device", "seed", "no number"],
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


def test_help_shows_the_group(run_tests):
    """--help has a group of its own for the plugin, and the keys of the configuration file."""
    result = run_tests("", "--help", subprocess=True)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "training-loop checks (tl-pytest):",
            "  --tl-device=DEVICE *",
            "  --tl-seed=SEED *",
            "  tl_device (string): *Default of --tl-device",
            "  tl_seed (int): *Default of --tl-seed",
        ]
    )


def test_the_options_are_frozen(pytestconfig):
    """The plugin has these options and keys, and no others."""
    group = pytestconfig._parser.getgroup("tl")
    assert [option.names() for option in group.options] == [["--tl-device"], ["--tl-seed"]]
    assert sorted(key for key in pytestconfig._parser._inidict if key.startswith("tl_")) == ["tl_device", "tl_seed"]


def _no_accelerator() -> bool:
    import torch

    return not torch.accelerator.is_available()
