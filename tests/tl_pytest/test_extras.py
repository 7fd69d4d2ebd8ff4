"""What the fixtures, the methods and the names for Lightning and transformers say where their extra is missing."""

from __future__ import annotations

import sys

import pytest

import tl_pytest
from tl_pytest._extras import EXTRAS, needed
from tl_pytest._runner import TrainingRunner

# the methods that need an extra, with as many arguments as each takes
METHODS = [
    ("lightning", "from_lightning", 1),
    ("lightning", "make_lightning_trainer", 0),
    ("lightning", "watch_lightning", 1),
    ("lightning", "assert_lightning_resume_equivalent", 1),
    ("lightning", "assert_lightning_accumulation_equivalent", 2),
    ("hf", "make_hf_trainer", 2),
    ("hf", "watch_hf", 1),
    ("hf", "assert_hf_resume_equivalent", 1),
    ("hf", "assert_hf_accumulation_equivalent", 1),
    ("hf", "assert_hf_optimizer_coverage", 1),
]


def missing(user: str, extra: str) -> str:
    return f'{user} needs tl-{extra}, which is not installed: pip install "tl-pytest[{extra}]"'


@pytest.fixture
def without(monkeypatch):
    """Give a function that makes imports of packages fail, as if they were not installed."""

    def hide(*packages: str) -> None:
        for package in packages:
            monkeypatch.setitem(sys.modules, package, None)

    return hide


@pytest.mark.parametrize(("fixture", "extra"), [("lightning_trainer", "lightning"), ("hf_trainer", "hf")])
def test_a_fixture_says_what_to_install(run_tests, without, fixture, extra):
    """A test that asks for the fixture is an error that ends with what to install; other tests run."""
    without(f"tl_{extra}")
    source = f"def test_it({fixture}):\n    pass\n\ndef test_other(training_runner):\n    pass\n"
    result = run_tests(source)
    result.assert_outcomes(errors=1, passed=1)
    (start,) = (number for number, line in enumerate(result.outlines) if "ERROR at setup of test_it" in line)
    end = next(number for number, line in enumerate(result.outlines) if number > start and line.startswith("===="))
    assert result.outlines[start + 1 : end] == [missing(fixture, extra)]


@pytest.mark.parametrize(("extra", "method", "num_arguments"), METHODS)
def test_a_method_says_what_to_install(without, extra, method, num_arguments):
    """Every method of the runner that needs an extra names itself and the extra."""
    without(f"tl_{extra}")
    with pytest.raises(ImportError) as caught:
        getattr(TrainingRunner("cpu", 0), method)(*["argument"] * num_arguments)
    assert str(caught.value) == missing(method, extra)


def test_no_method_is_left_out():
    """The list above is that of the methods that are named for a framework."""
    named = [name for name in vars(TrainingRunner) if {"lightning", "hf"} & set(name.split("_"))]
    assert named == [method for _, method, _ in METHODS]


@pytest.mark.parametrize(("extra", "name"), [("lightning", "watch_lightning"), ("hf", "check_hf_resume_equivalent")])
def test_a_name_says_what_to_install(without, monkeypatch, extra, name):
    """`from tl_pytest import` of an extra's name is an ImportError that says which; star imports do not ask for it."""
    without(f"tl_{extra}")
    monkeypatch.delitem(vars(tl_pytest), name, raising=False)
    with pytest.raises(ImportError) as caught:
        exec(f"from tl_pytest import {name}")
    assert str(caught.value) == missing(name, extra)
    namespace: dict[str, object] = {}
    exec("from tl_pytest import *", namespace)
    assert name not in namespace


@pytest.mark.parametrize(("extra", "package"), [(extra, one) for extra, all_ in EXTRAS.items() for one in sorted(all_)])
def test_what_an_extra_brings_counts_too(extra, package):
    """An adapter without its framework is as good as none: the message names what is missing, and the extra."""
    with pytest.raises(ImportError) as caught, needed(extra, "it"):
        raise ModuleNotFoundError(f"No module named '{package}'", name=package)
    said = f'it needs {package.replace("_", "-")}, which is not installed: pip install "tl-pytest[{extra}]"'
    assert (str(caught.value), caught.value.name) == (said, package)


def test_other_failing_imports_pass_on():
    """What fails inside of an adapter, for want of something else, is not told as a missing extra."""
    error = ModuleNotFoundError("No module named 'sentencepiece'", name="sentencepiece")
    with pytest.raises(ModuleNotFoundError) as caught, needed("hf", "it"):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("fixture", ["lightning_trainer", "hf_trainer"])
def test_trainers_are_made_on_each_device(run_tests, fixture):
    """Where --tl-device names several devices, a test that asks for a Trainer runs once on each."""
    result = run_tests(f"def test_it({fixture}):\n    pass\n", "--collect-only", "-q", "--tl-device=cpu,cuda")
    result.stdout.fnmatch_lines(["test_inner.py::test_it[[]cpu[]]", "test_inner.py::test_it[[]cuda[]]"])
