"""Imports between packages go one way: only to declared siblings, and only to their public face."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PACKAGES = Path(__file__).parents[2] / "packages"


def _declared(package: Path) -> set[str]:
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    extras = project.get("optional-dependencies", {}).values()
    requirements = [*project.get("dependencies", []), *(line for extra in extras for line in extra)]
    return {re.split(r"[^\w.-]", line)[0].replace("-", "_") for line in requirements}


def _imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield (line, dotted name) of all that a module imports, or reaches through an imported module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                yield node.lineno, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            yield node.lineno, f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
                yield node.lineno, node.args[0].value


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


def wrong_imports(packages: Path) -> list[str]:
    folders = sorted(path for path in packages.glob("tl-*") if path.is_dir())
    names = {folder.name.replace("-", "_") for folder in folders}
    wrong = []
    for folder in folders:
        own = folder.name.replace("-", "_")
        declared = _declared(folder)
        for file in sorted(folder.glob("src/**/*.py")):
            for line, dotted in sorted(set(_imports(ast.parse(file.read_text())))):
                sibling, *rest = dotted.split(".")
                if sibling not in names or sibling == own:
                    continue
                where = f"{file.relative_to(packages)}:{line}"
                if sibling not in declared:
                    wrong.append(f"{where}: {dotted}, but {folder.name} does not declare {sibling.replace('_', '-')}")
                if any(_is_private(part) for part in rest):
                    wrong.append(f"{where}: {dotted} is private to {sibling.replace('_', '-')}")
    return wrong


def test_packages_import_only_declared_siblings_and_public_names():
    """No package imports a sibling that it does not declare, nor anything private of one that it does."""
    assert wrong_imports(PACKAGES) == []


def _make_package(packages: Path, name: str, source: str, dependencies: str = "[]") -> None:
    folder = packages / name / "src" / name.replace("-", "_")
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(source)
    (packages / name / "pyproject.toml").write_text(f"[project]\nname = '{name}'\ndependencies = {dependencies}\n")


def test_an_undeclared_sibling_is_seen(tmp_path):
    """An import of a sibling that the pyproject does not declare is reported, also inside a function."""
    _make_package(tmp_path, "tl-low", "")
    _make_package(tmp_path, "tl-high", "def late():\n    import tl_low\n", "['torch>=2.6', 'tl-lower']")
    assert wrong_imports(tmp_path) == ["tl-high/src/tl_high/__init__.py:2: tl_low, but tl-high does not declare tl-low"]


def test_private_parts_of_a_sibling_are_seen(tmp_path):
    """A sibling's private module or name is reported however it is reached; dunder names and extras are fine."""
    _make_package(tmp_path, "tl-low", "")
    source = (
        "import tl_low\nfrom tl_low import _a\nfrom tl_low._b import c\nimport tl_low._d\n"
        "tl_low._e\nfrom importlib import import_module\nimport_module('tl_low._f')\ntl_low.__version__\n"
    )
    extra = "optional-dependencies.low = ['tl-low[fast]>=1; python_version>\"3\"']"
    _make_package(tmp_path, "tl-high", source, f"[]\n{extra}")
    start = "tl-high/src/tl_high/__init__.py"
    assert wrong_imports(tmp_path) == [
        f"{start}:2: tl_low._a is private to tl-low",
        f"{start}:3: tl_low._b.c is private to tl-low",
        f"{start}:4: tl_low._d is private to tl-low",
        f"{start}:5: tl_low._e is private to tl-low",
        f"{start}:7: tl_low._f is private to tl-low",
    ]


def test_a_package_may_use_its_own_private_modules(tmp_path):
    """What is private to the package itself is its own business."""
    _make_package(tmp_path, "tl-low", "from tl_low._a import b\nfrom ._c import d\n")
    assert wrong_imports(tmp_path) == []
