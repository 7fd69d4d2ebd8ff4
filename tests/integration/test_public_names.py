"""The public surface is frozen in public_names.json, so that it grows only on purpose.

`python tests/integration/test_public_names.py` (or `hatch run names`) writes the file anew.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"
NAMES = sorted(path.name.replace("-", "_") for path in PACKAGES.glob("tl-*") if path.is_dir())
FROZEN = Path(__file__).with_name("public_names.json")


def _signature(function: object) -> str:
    """Write parameters with kinds and defaults; annotations are mypy's business and their text varies by Python."""
    try:
        signature = inspect.signature(function)  # type: ignore[arg-type]
    except ValueError:  # an exception without a constructor of its own
        return ""
    bare = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    text = str(signature.replace(parameters=bare, return_annotation=inspect.Signature.empty))
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def _members(name: str, value: type) -> dict[str, str]:
    found = {}
    for base in reversed(value.__mro__):
        if not base.__module__.startswith("tl_"):
            continue
        for member, thing in vars(base).items():
            if member.startswith("_"):
                continue
            if isinstance(thing, property):
                found[f"{name}.{member}"] = "property"
            elif isinstance(thing, (staticmethod, classmethod)) or inspect.isfunction(thing):
                found[f"{name}.{member}"] = _signature(getattr(value, member))
    return found


def surface(module: ModuleType) -> dict[str, str]:
    """Describe each public name of a module; a class with its constructor, public methods and properties."""
    found = {}
    for name in module.__all__:
        value = getattr(module, name)
        home = str(getattr(value, "__module__", module.__name__)).partition(".")[0]
        if home.startswith("tl_") and home != module.__name__:
            found[name] = f"from {home}"
        elif inspect.isclass(value):
            found[name] = f"class{_signature(value)}"
            found.update(_members(name, value))
        elif callable(value):
            found[name] = _signature(value)
        else:
            found[name] = type(value).__name__
    return dict(sorted(found.items()))


@pytest.mark.parametrize("name", NAMES)
def test_the_public_surface_is_as_frozen(name):
    """Public names and signatures are those of public_names.json; `hatch run names` accepts a change."""
    frozen = json.loads(FROZEN.read_text())
    assert surface(importlib.import_module(name)) == frozen.get(name, {})


def test_no_package_is_left_in_the_file_that_is_gone():
    """The file names the packages that there are."""
    assert sorted(json.loads(FROZEN.read_text())) == NAMES


def test_a_changed_signature_and_a_new_name_are_seen():
    """A default, a keyword, a method, a property and a constant each show in the surface."""
    module = ModuleType("tl_made_up")
    exec(
        "class Thing:\n"
        "    def __init__(self, a, *, b=1): ...\n"
        "    def act(self, c: int = 2) -> None: ...\n"
        "    def _hidden(self): ...\n"
        "    @property\n"
        "    def size(self): ...\n"
        "    @classmethod\n"
        "    def make(cls, d): ...\n"
        "def run(x: str, /, *, y=None) -> int: ...\n"
        "LIMIT = 3\n"
        "__all__ = ['LIMIT', 'Thing', 'run']\n",
        vars(module),
    )
    assert surface(module) == {
        "LIMIT": "int",
        "Thing": "class(a, *, b=1)",
        "Thing.act": "(self, c=2)",
        "Thing.make": "(d)",
        "Thing.size": "property",
        "run": "(x, /, *, y=None)",
    }


if __name__ == "__main__":
    surfaces = {name: surface(importlib.import_module(name)) for name in NAMES}
    FROZEN.write_text(json.dumps(surfaces, indent=2) + "\n")
    print(f"wrote {FROZEN}")
