"""Whether a loop decides by a value: compares it, branches on it, indexes with it. Told from the loop's source.

What only goes into its output (a print, a logger) or into itself (a counter, a history that is cut) does not decide.
"""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from tl_resume._check._own import is_own_class, is_own_namespace
from tl_telemetry import StateCapture, StateDifference

_MAX_FUNCTIONS = 200
# Calls whose result depends on what is handed in as a decision does: it comes in steps.
_DECIDING_CALLS = frozenset({"range", "min", "max", "bool", "divmod", "int", "round", "floor", "ceil", "trunc"})
# Calls that show something, or put something aside for being shown.
_SHOWING_CALLS = frozenset(
    [
        "add",
        "add_scalar",
        "add_scalars",
        "append",
        "clear",
        "critical",
        "debug",
        "error",
        "exception",
        "extend",
        "flush",
        "format",
        "info",
        "log",
        "log_dict",
        "log_metric",
        "log_metrics",
        "print",
        "pprint",
        "pop",
        "popleft",
        "report",
        "reset",
        "set_description",
        "set_postfix",
        "update_meter",
        "warn",
        "warning",
        "write",
    ]
)


@dataclass(frozen=True)
class _Use:
    """One place at which a function decides by a name.

    Attributes:
        name: the last name of what is read: ``best`` of ``setup.best`` and of ``state["best"]``.
        is_attribute: whether it is an attribute or a key; else a global or a variable of an enclosing function.
        only_length: whether only its length decides.
        modulus: what it is taken modulo by, where only that decides; else None.
        site: the line, ``train.py:42``.
    """

    name: str
    is_attribute: bool
    only_length: bool
    modulus: ast.expr | None
    site: str


class Uses:
    """The values by which a loop decides.

    Args:
        functions: the functions of the loop; those of the person's code that they refer to are read too.
        saved: the state when saved; the methods of the person's objects in it are read too.
    """

    def __init__(self, functions: Iterable[Callable[..., Any]], saved: StateCapture) -> None:
        self._functions = list(functions)
        self._saved = saved

    def decides(self, difference: StateDifference) -> bool:
        """Tell whether the loop decides by the value that an earlier step left at a difference's place."""
        return self.site(difference) is not None

    def site(self, difference: StateDifference) -> str | None:
        """Return the line at which the loop decides by it (``train.py:42``); None where no line does."""
        name = _last_name(difference)
        for use in self._uses:
            if use.name != name or use.is_attribute is (difference.piece.kind == "outside" and not difference.path):
                continue
            if use.only_length and difference.kind == "other":
                continue  # a history that is cut, a buffer that is filled
            if use.modulus is not None and self._same_remainder(difference, use.modulus):
                continue
            return use.site
        return None

    def _same_remainder(self, difference: StateDifference, modulus: ast.expr) -> bool:
        """Tell whether a counter is at the same place of its cycle: ``if (step + 1) % 4 == 0`` at a multiple of 4."""
        a, b = difference.plain_a, difference.plain_b
        if not isinstance(a, int) or not isinstance(b, int):
            return False
        if isinstance(modulus, ast.Constant):
            candidates = [modulus.value]
        else:
            name = modulus.attr if isinstance(modulus, ast.Attribute) else getattr(modulus, "id", "")
            candidates = [*self._saved.plain(name), *self._constants.get(name, ())]
        numbers = {value for value in candidates if isinstance(value, int) and value > 0}
        return len(numbers) == 1 and a % min(numbers) == b % min(numbers)

    @cached_property
    def _code(self) -> list[types.FunctionType]:
        return list(_followed(self._functions, [cls for cls in self._saved.types() if is_own_class(cls)]))

    @cached_property
    def _constants(self) -> dict[str, list[Any]]:
        """The globals and variables of enclosing functions that the code reads, by name."""
        found: dict[str, list[Any]] = {}
        for function in self._code:
            closure = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
            cells = {name: cell.cell_contents for name, cell in closure if _filled(cell)}
            names = {name for code in _codes(function.__code__) for name in _globals(code)}
            for name, value in (*cells.items(), *((n, function.__globals__.get(n)) for n in names)):
                found.setdefault(name, []).append(value)
        return found

    @cached_property
    def _uses(self) -> list[_Use]:
        return [use for function in self._code for use in _uses_of(function)]


def _last_name(difference: StateDifference) -> str:
    names = [part for part in difference.path if isinstance(part, str) and part]
    return names[-1] if names else difference.piece.name.rpartition(".")[2].partition(" (")[0]


def _followed(functions: Iterable[Any], classes: Iterable[type]) -> Iterator[types.FunctionType]:
    """Yield the functions, those of the person's code that they name, and the methods of classes that they call."""
    waiting, seen = list(functions), set[types.FunctionType]()
    methods: dict[str, list[Any]] = {}
    for cls in classes:
        for name, member in vars(cls).items():
            methods.setdefault(name, []).append(member)
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
        waiting += [value.__globals__[name] for name in names if name in value.__globals__]
        waiting += [cell.cell_contents for cell in value.__closure__ or () if _filled(cell)]
        called = {name for code in _codes(value.__code__) for name in code.co_names} | {"__call__"}
        waiting += [member for name in sorted(called & methods.keys()) for member in methods.pop(name)]
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


def _uses_of(function: types.FunctionType) -> Iterator[_Use]:
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):  # no source to be had, or a lambda in the middle of an expression
        return
    own = {name for code in _codes(function.__code__) for name in code.co_varnames}
    aliases, recomputed = _aliases(tree), _recomputed(tree)
    file = Path(function.__code__.co_filename).name
    for decision in _decisions(tree):
        for name, is_attribute, only_length, line in _names(decision.expression):
            read = [(name, is_attribute)] if is_attribute or name not in own else list(aliases.get(name, ()))
            for origin, attribute in read:
                if line <= recomputed.get(origin, line):
                    yield _Use(origin, attribute, only_length, decision.modulus, f"{file}:{first + line - 1}")


@dataclass(frozen=True)
class _Decision:
    expression: ast.AST
    modulus: ast.expr | None = None


def _decisions(node: ast.AST) -> Iterator[_Decision]:
    """Yield the expressions by which code decides, those left out that only decide about output."""
    if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Call) and _called(node) in _SHOWING_CALLS):
        return
    if isinstance(node, ast.If) and _only_shows([*node.body, *node.orelse]):
        return
    yield from _own_decisions(node)
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Compare) and isinstance(child, ast.BinOp):
            continue  # told with its comparison
        yield from _decisions(child)


def _own_decisions(node: ast.AST) -> Iterator[_Decision]:
    if isinstance(node, ast.Compare):
        for part in (node.left, *node.comparators):
            is_modulo = isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)
            yield _Decision(part.left, part.right) if is_modulo else _Decision(part)  # type: ignore[attr-defined]
    elif isinstance(node, (ast.If, ast.While, ast.IfExp, ast.Assert)):
        if isinstance(node.test, (ast.Attribute, ast.Name, ast.Subscript, ast.Call, ast.UnaryOp)):
            yield _Decision(node.test)
        elif isinstance(node.test, ast.BinOp) and isinstance(node.test.op, ast.Mod):  # while step % 4:
            yield _Decision(node.test.left, node.test.right)
    elif isinstance(node, ast.BoolOp):
        yield from (_Decision(v) for v in node.values if isinstance(v, (ast.Attribute, ast.Name, ast.Subscript)))
    elif isinstance(node, ast.Subscript) and not isinstance(node.slice, (ast.Constant, ast.Slice)):
        yield _Decision(node.slice)
    elif isinstance(node, ast.Call) and _called(node) in _DECIDING_CALLS:
        yield from map(_Decision, node.args)
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mod, ast.FloorDiv)):
        yield _Decision(node.left, node.right if isinstance(node.op, ast.Mod) else None)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _only_shows(statements: list[ast.stmt]) -> bool:
    """Tell whether statements print, log, and begin what they show anew, and do nothing else."""
    inner: list[ast.stmt] = []
    shows = False
    for statement in statements:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            if _called(statement.value) not in _SHOWING_CALLS:
                return False
            shows = True
        elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
            if not _is_empty(statement.value) and not _is_text(statement.value):
                return False
            shows = shows or _is_text(statement.value)
        elif isinstance(statement, (ast.For, ast.If, ast.With)):
            inner += [*statement.body, *getattr(statement, "orelse", ())]
        elif not isinstance(statement, (ast.Pass, ast.Delete)):
            return False
    if inner:
        return _only_shows(inner)
    return shows or all(isinstance(statement, (ast.Pass, ast.Delete)) for statement in statements)


def _is_empty(value: ast.expr | None) -> bool:
    """Tell whether a value is 0 or an empty container: what a meter begins with."""
    if isinstance(value, ast.Tuple):
        return all(map(_is_empty, value.elts))
    if isinstance(value, ast.Constant):
        return type(value.value) in (int, float) and value.value == 0
    return isinstance(value, (ast.List, ast.Dict)) and not ast.dump(value).count("Constant")


def _is_text(value: ast.expr | None) -> bool:
    return isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Constant) and isinstance(value.value, str))


def _names(node: ast.AST, only_length: bool = False) -> Iterator[tuple[str, bool, bool, int]]:
    """Yield what an expression reads: the last name, whether that is an attribute or key, by length only, the line."""
    if isinstance(node, ast.Call) and _called(node) == "len":
        only_length = True
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr, True, only_length, node.lineno
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node.id, False, only_length, node.lineno
    elif isinstance(node, ast.Subscript) and (key := _string_key(node)) is not None:
        yield key, True, only_length, node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _names(child, only_length)


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
            read = {name for name, *_ in _names(statement.value)}
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


def _aliases(tree: ast.AST) -> dict[str, set[tuple[str, bool]]]:
    """Return, for each local variable, what was read for its value: the names, and whether they are attributes."""
    read: dict[str, set[tuple[str, bool]]] = {}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if isinstance(target, ast.Name):
                    named = {(name, attribute) for name, attribute, *_ in _names(node.value)}
                    read.setdefault(target.id, set()).update(named)
    for _ in range(3):  # a variable that was set from a variable
        for names in read.values():
            names.update(*(read[name] for name, attribute in list(names) if not attribute and name in read))
    return read
