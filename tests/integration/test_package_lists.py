"""Wherever the packages are listed, all of them are, and each is tested beside what it declares and nothing else."""

from __future__ import annotations

import configparser
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tl_pytest import _frames

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TOP = Path(__file__).parents[2]
NAMES = sorted(path.name for path in (TOP / "packages").glob("tl-*") if path.is_dir())
WITHOUT_EXTRAS = {"tl-pytest"}  # what its fixtures say where an extra is missing is tested there


def _toml(path: Path) -> dict[str, object]:
    return tomllib.loads(path.read_text())


def of_ruff(text: str) -> list[str]:
    return tomllib.loads(text)["lint"]["isort"]["known-first-party"]


def of_coverage(text: str) -> list[str]:
    parser = configparser.ConfigParser()
    parser.read_string(text)
    return parser["run"]["source_pkgs"].split()


def of_hatch(text: str) -> list[str]:
    (matrix,) = tomllib.loads(text)["envs"]["alone"]["matrix"]
    return [f"tl-{name}" for name in matrix["package"]]


def of_ci(text: str) -> list[str]:
    (names,) = re.findall(r"^for package in (.+); do$", text, re.MULTILINE)
    return [f"tl-{name}" for name in names.split()]


def of_readme(text: str) -> list[str]:
    return re.findall(r"^\| \[(tl-\w+)\]\(packages/\1\) \|", text, re.MULTILINE)


@pytest.mark.parametrize(
    ("file", "read"),
    [
        (".ruff.toml", of_ruff),
        (".coveragerc", of_coverage),
        ("hatch.toml", of_hatch),
        (".ci/run", of_ci),
        ("README.md", of_readme),
    ],
)
def test_every_list_has_every_package(file: str, read: Callable[[str], list[str]]):
    """Lint, coverage, the environments, the continuous integration and the README know each package."""
    assert sorted(name.replace("_", "-") for name in read((TOP / file).read_text())) == NAMES


def test_frames_of_every_package_are_cut():
    """The plugin cuts the frames of each package from the traceback of a verdict."""
    assert sorted(name.replace("_", "-") for name in _frames._OWN) == NAMES


def needed(name: str, projects: dict[str, dict[str, object]], *, extras: bool) -> set[str]:
    """Return a package and the siblings that it declares, with what these declare."""
    project = projects[name]
    lines = list(project.get("dependencies", []))
    if extras:
        lines += [line for extra in project.get("optional-dependencies", {}).values() for line in extra]
    siblings = {sibling for sibling in (re.split(r"[^\w.-]", line)[0] for line in lines) if sibling in projects}
    return {name}.union(*(needed(sibling, projects, extras=False) for sibling in siblings))


@pytest.mark.parametrize("name", NAMES)
def test_a_package_alone_has_what_it_declares(name: str):
    """The environment of a package alone has the siblings of its pyproject, those of its extras too, and no others."""
    projects = {one: _toml(TOP / "packages" / one / "pyproject.toml")["project"] for one in NAMES}
    members = _toml(TOP / "hatch.toml")["envs"]["alone"]["overrides"]["matrix"]["package"]["workspace"]["members"]
    short = name.removeprefix("tl-")
    there = {Path(one["value"]).name for one in members if short in one.get("if", [short])}
    assert there == needed(name, projects, extras=name not in WITHOUT_EXTRAS)


def test_what_is_needed_is_followed():
    """Dependencies are followed to their end, extras of the package itself count where they are asked for."""
    projects: dict[str, dict[str, object]] = {
        "a": {},
        "b": {"dependencies": ["a>=1", "torch"], "optional-dependencies": {"d": ["d"]}},
        "c": {"dependencies": ["b[d]; python_version > '3'"], "optional-dependencies": {"e": ["e"]}},
        "d": {},
        "e": {},
    }
    assert needed("c", projects, extras=False) == {"a", "b", "c"}
    assert needed("c", projects, extras=True) == {"a", "b", "c", "e"}


def test_lists_are_read():
    """A list that lacks a name, or has it elsewhere, is read as it stands."""
    assert of_readme("| [tl-a](packages/tl-a) | x |\n| [tl-b](packages/tl-c) | y |\n") == ["tl-a"]
    assert of_ci("for package in a b; do\n") == ["tl-a", "tl-b"]
    assert of_coverage("[run]\nsource_pkgs =\n    tl_a\n    tl_b\n") == ["tl_a", "tl_b"]
    assert of_ruff('[lint.isort]\nknown-first-party = ["tl_a"]\n') == ["tl_a"]
    assert of_hatch('[[envs.alone.matrix]]\npackage = ["a"]\n') == ["tl-a"]
