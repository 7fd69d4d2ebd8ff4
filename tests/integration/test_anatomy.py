"""Every package folder is built alike, so that one who knows one package knows all."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = Path(__file__).parents[2] / "packages"
TESTS = Path(__file__).parents[1]
NAMES = sorted(path.name for path in PACKAGES.glob("tl-*") if path.is_dir())
ENTRY_POINTS = {"tl-pytest": {"plugin.py"}}  # modules that are public because something outside names them
MAX_LINES = 400


def _project(folder: Path) -> dict[str, object]:
    return tomllib.loads((folder / "pyproject.toml").read_text())["project"]


def odd_files(folder: Path) -> list[str]:
    """List what a package folder lacks, and what it has that the others do not."""
    source = Path("src") / folder.name.replace("-", "_")
    wanted = {Path("README.md"), Path("pyproject.toml"), source / "__init__.py", source / "py.typed"}
    there = {
        path.relative_to(folder)
        for path in folder.rglob("*")
        if path.is_file() and not {"__pycache__", "dist"} & set(path.parts)
    }
    allowed = ENTRY_POINTS.get(folder.name, set())
    odd = [f"{path} is missing" for path in sorted(wanted - there)]
    for path in sorted(there - wanted):
        inside = path.relative_to(source).parts if path.is_relative_to(source) else ("",)
        private = inside[0].startswith("_") and path.suffix == ".py"  # a module, or one of a private subpackage
        if not private and "/".join(inside) not in allowed:
            odd.append(f"{path} is not part of the anatomy")
    for path in sorted(there):
        if path.suffix == ".py" and (lines := len((folder / path).read_text().splitlines())) > MAX_LINES:
            odd.append(f"{path} has {lines} lines, more than {MAX_LINES}")
    return odd


@pytest.mark.parametrize("name", NAMES)
def test_every_package_folder_has_the_same_files(name):
    """A package has its pyproject, README, __init__ and py.typed, private modules, and nothing else."""
    assert odd_files(PACKAGES / name) == []


def test_odd_files_are_seen(tmp_path):
    """A missing py.typed, a public module, a stray file and a long module are each reported."""
    folder = tmp_path / "tl-odd"
    source = folder / "src" / "tl_odd"
    source.mkdir(parents=True)
    (folder / "README.md").touch()
    (folder / "pyproject.toml").touch()
    (folder / "setup.cfg").touch()
    (source / "__init__.py").touch()
    (source / "public.py").touch()
    (source / "_long.py").write_text("\n" * 401)
    assert odd_files(folder) == [
        "src/tl_odd/py.typed is missing",
        "setup.cfg is not part of the anatomy",
        "src/tl_odd/public.py is not part of the anatomy",
        "src/tl_odd/_long.py has 401 lines, more than 400",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_the_public_face_is_sorted_and_there(name):
    """`__all__` is sorted, names things that exist, and the module says in its docstring what it is for."""
    module = importlib.import_module(name.replace("-", "_"))
    # as ruff sorts it: constants, classes, the rest
    assert module.__all__ == sorted(set(module.__all__), key=lambda public: (not public.isupper(), public))
    assert [public for public in module.__all__ if not hasattr(module, public)] == []
    assert (module.__doc__ or "").strip()


@pytest.mark.parametrize("name", NAMES)
def test_public_things_are_documented_and_exceptions_carry_the_package_name(name):
    """Every public class and function has a docstring; tracebacks name an exception by its public place."""
    module = importlib.import_module(name.replace("-", "_"))
    for public in module.__all__:
        value = getattr(module, public)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), f"{name}: {public} has no docstring"
        if inspect.isclass(value) and issubclass(value, BaseException):
            assert "._" not in value.__module__, f"{name}: {public} is shown as {value.__module__}.{public}"


@pytest.mark.parametrize("name", NAMES)
def test_the_metadata_agree(name):
    """The packages share version, licence and supported Pythons, and each has its folder of tests."""
    project = _project(PACKAGES / name)
    shared = {"version": "0.1.0", "requires-python": ">=3.10", "license": "MIT", "readme": "README.md"}
    assert project["name"] == name
    assert {key: project.get(key) for key in shared} == shared
    assert project["description"]
    assert (TESTS / name.replace("-", "_")).is_dir()
