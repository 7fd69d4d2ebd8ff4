import sys
import types

import pytest

from tl_telemetry._outside._reach import Place, places


def names(*functions):
    return [place.name for place in places(functions)]


def place(name, *functions) -> Place:
    (found,) = (one for one in places(functions) if one.name == name)
    return found


@pytest.fixture
def train_module(monkeypatch):
    """A module of the person's that is imported as ``train``."""
    module = types.ModuleType("train")
    module.__file__ = "/home/person/train.py"
    monkeypatch.setitem(sys.modules, "train", module)
    source = (
        "best = 1.0\ncalls = 0\nunused = 0\ndef helper():\n    global calls\n    calls += 1\nclass Meter:\n    n = 3\n"
    )
    exec(source, vars(module))
    return module


def test_attributes_of_own_modules_are_places_however_they_are_imported(train_module):
    """Only what is used of a module counts, followed into its functions and classes."""

    def imports(setup, batch):
        import train
        import train as alias
        from train import Meter, helper

        alias.best = min(train.best, batch)
        helper()
        return Meter.n

    assert names(imports) == ["train.best", "Meter.n", "train.calls"]
    place("train.best", imports).set(7.0)
    assert train_module.best == 7.0


def test_a_library_is_not_followed(train_module):
    """The same module in site-packages belongs to somebody else."""
    train_module.__file__ = "/usr/lib/python3/site-packages/train.py"

    def step(setup, batch):
        import train

        train.best = train.helper()

    assert names(step) == []


def test_relative_imports_are_resolved(train_module):
    """``from . import`` inside of a function gives the package's module; what is not imported yet is not looked at."""
    train_module.__name__ = "pack.train"
    namespace = {"__name__": "pack.step", "__package__": "pack"}
    source = "def step(s, b):\n    from . import train\n    from .later import x\n    train.best = train.helper()"
    exec(source, namespace)
    package = types.ModuleType("pack")
    package.train = train_module
    sys.modules["pack"] = package
    try:
        assert names(namespace["step"]) == ["pack.train.best", "pack.train.calls"]
        namespace["__package__"] = None
        assert names(namespace["step"]) == []
    finally:
        del sys.modules["pack"]
