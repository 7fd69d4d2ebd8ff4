"""Every public name of the checks can be imported from tl_pytest."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import tl_accum
import tl_amp
import tl_core
import tl_coverage
import tl_pytest
import tl_resume
import tl_telemetry
from tl_pytest._runner import TrainingRunner

OF_EXTRAS = {package: names for (_, package), names in tl_pytest._OF_EXTRAS.items()}
SIBLINGS = (tl_accum, tl_amp, tl_core, tl_coverage, tl_resume, tl_telemetry)


def test_all_names_of_the_checks_are_there():
    """tl_pytest has the public names of every package that it brings, and TrainingRunner."""
    expected = {"TrainingRunner"}.union(*(module.__all__ for module in SIBLINGS))
    assert sorted(expected) == sorted(tl_pytest.__all__)


def test_the_names_are_the_same_objects():
    """A name is the sibling's object, so that isinstance and except work across the packages."""
    for module in SIBLINGS:
        for name in module.__all__:
            assert getattr(tl_pytest, name) is getattr(module, name)
    assert tl_pytest.TrainingRunner is TrainingRunner


def test_type_checkers_are_told_the_same_names():
    """The imports under TYPE_CHECKING, which only type checkers and editors read, name each public name once."""
    tree = ast.parse(Path(inspect.getfile(tl_pytest)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    told = [alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(told) == sorted([*tl_pytest.__all__, *(name for names in OF_EXTRAS.values() for name in names)])


@pytest.mark.parametrize("package", OF_EXTRAS)
def test_the_names_of_an_extra_are_there_where_it_is(package):
    """Each public name of a package that an extra brings can be imported, is the package's own, and is not listed."""
    module = pytest.importorskip(package)
    assert sorted(module.__all__) == sorted(OF_EXTRAS[package])
    for name in module.__all__:
        assert getattr(tl_pytest, name) is getattr(module, name)
    assert not {*module.__all__} & {*tl_pytest.__all__}


def test_star_import_and_dir_show_the_names():
    """`from tl_pytest import *` and dir() offer every public name."""
    namespace: dict[str, object] = {}
    exec("from tl_pytest import *", namespace)
    assert set(tl_pytest.__all__) <= set(namespace)
    assert set(tl_pytest.__all__) <= set(dir(tl_pytest))


def test_an_unknown_name_is_an_attribute_error():
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError) as caught:
        tl_pytest.run_trainign
    assert str(caught.value) == "module 'tl_pytest' has no attribute 'run_trainign'"
    with pytest.raises(ImportError, match=r"^cannot import name 'nothing' from 'tl_pytest'"):
        from tl_pytest import nothing  # noqa: F401
