"""Whether a loop decides by a value: compares it, branches on it, indexes with it. Told from the loop's source."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from tl_resume._check._own import is_own_namespace
from tl_telemetry import StateDifference

_MAX_FUNCTIONS = 200
# Calls whose result depends on what is handed in as a decision does; others (a logger, print) only show it.
_DECIDING_CALLS = frozenset({"range", "min", "max", "bool", "divmod"})


class Uses:
    """The names by which a loop decides.

    Args:
        functions: the functions of the loop; those of the person's code that they refer to are read too.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]]) -> None:
        self._functions = list(functions)

    def decides(self, difference: StateDifference) -> bool:
        """Tell whether the loop decides by the value that an earlier step left at a difference's place."""
        return self.site(difference) is not None

    def site(self, difference: StateDifference) -> str | None:
        """Return the line at which the loop decides by it (``train.py:42``); None where no line does."""
        return self._deciding.get(_last_name(difference))

    @cached_property
    def _deciding(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for function in _followed(self._functions):
            for name, line in _deciding_names(function):
                found.setdefault(name, f"{Path(function.__code__.co_filename).name}:{line}")
        return found


def _last_name(difference: StateDifference) -> str:
    names = [part for part in difference.path if isinstance(part, str) and part]
    return names[-1] if names else difference.piece.name.rpartition(".")[2].partition(" (")[0]


def _followed(functions: Iterable[Any]) -> Iterator[types.FunctionType]:
    """Yield the functions, and those of the person's code that they name."""
    waiting, seen = list(functions), set[types.FunctionType]()
    while waiting and len(seen) < _MAX_FUNCTIONS:
        value = waiting.pop(0)
        value = getattr(value, "func", value)  # partial
        if isinstance(value, types.MethodType):
            waiting += [m for m in vars(type(value.__self__)).values() if isinstance(m, types.FunctionType)]
            value = value.__func__
        if isinstance(value, type):
            waiting += [m for m in vars(value).values() if isinstance(m, types.FunctionType)]
            continue
        if not isinstance(value, types.FunctionType) and callable(value):
            value = vars(type(value)).get("__call__")
        if not isinstance(value, types.FunctionType) or value in seen or not is_own_namespace(value.__globals__):
            continue
        seen.add(value)
        yield value
        names = [name for code in _codes(value.__code__) for name in _globals(code)]
        cells = [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        waiting += [value.__globals__[name] for name in names if name in value.__globals__]
        waiting += cells
        if hasattr(value, "__wrapped__"):
            waiting.append(value.__wrapped__)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _globals(code: types.CodeType) -> Iterator[str]:
    """Yield the global names that code loads; ``co_names`` has those of attributes too (``optimizer.step``)."""
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            yield instruction.argval


def _filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  an empty cell raises
    except ValueError:
        return False
    return True


def _deciding_names(function: types.FunctionType) -> Iterator[tuple[str, int]]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # no source to be had, or a lambda in the middle of an expression
        return
    aliases, recomputed = _aliases(tree), _recomputed(tree)
    for node in ast.walk(tree):
        for part in _decisions(node):
            for name, line in _names(part):
                for alias in (name, *aliases.get(name, ())):
                    if line <= recomputed.get(alias, line):
                        yield alias, first + line - 1


def _decisions(node: ast.AST) -> list[ast.AST]:
    """Return the expressions by which a node decides."""
    if isinstance(node, ast.Compare):
        return [node]
    if isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        return [node.test]
    if isinstance(node, ast.BoolOp):
        return list(node.values)
    if isinstance(node, ast.Subscript):
        return [] if isinstance(node.slice, ast.Constant) else [node.slice]
    if isinstance(node, ast.Call):
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        return list(node.args) if called in _DECIDING_CALLS else []
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
        return [node.left]
    return []


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """Yield the last names of what an expression reads: ``setup.best``, ``state["best"]``, ``best``."""
    for part in ast.walk(node):
        if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load):
            yield part.attr, part.lineno
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load):
            yield part.id, part.lineno
        elif isinstance(part, ast.Subscript) and (key := _string_key(part)) is not None:
            yield key, part.lineno


def _recomputed(tree: ast.AST) -> dict[str, int]:
    """Return, for each name that a function sets anew whatever it was before, the first line that does so."""
    lines: dict[str, int] = {}
    waiting = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)][:1]
    statements: list[ast.stmt] = list(waiting[0].body) if waiting else []
    while statements:
        statement = statements.pop(0)
        if isinstance(statement, ast.With):
            statements = [*statement.body, *statements]
        elif isinstance(statement, ast.Assign):
            read = {name for name, _ in _names(statement.value)}
            for target in statement.targets:
                for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                    name = _set_name(part)
                    if name is not None and name not in read:
                        lines.setdefault(name, statement.lineno)
    return lines


def _set_name(target: ast.AST) -> str | None:
    if isinstance(target, ast.Attribute):
        return target.attr
    return target.id if isinstance(target, ast.Name) else _string_key(target)


def _string_key(node: ast.AST) -> str | None:
    """Return the key of ``x["key"]``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant) and isinstance(node.slice.value, str):
        return node.slice.value
    return None


def _aliases(tree: ast.AST) -> dict[str, set[str]]:
    """Return, for each local variable, the names that were read for its value."""
    read: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    read.setdefault(target.id, set()).update(name for name, _ in _names(node.value))
    for _ in range(3):  # a variable that was set from a variable
        for names in read.values():
            names.update(*(read[name] for name in list(names) if name in read))
    return read
