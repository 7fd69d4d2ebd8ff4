"""Whether a decision is only about output: a branch that prints or logs, and keeps nothing else."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType

# Calls that show something.
_SHOWING = frozenset(
    [
        *("print", "pprint", "log", "log_dict", "log_metric", "log_metrics", "debug", "info", "warning", "warn"),
        *("error", "critical", "exception", "add_scalar", "add_scalars", "add_histogram", "set_description"),
        *("set_postfix", "write", "flush", "report", "display", "secho", "echo"),
    ]
)
# Calls that put something aside, or begin it anew; beside one that shows, for what is shown next.
_KEEPING = frozenset(["append", "extend", "clear", "reset", "add", "pop", "popleft", "update"])


_CHOOSING = frozenset(["min", "max", "minimum", "maximum"])


def decides_about_output(code: CodeType, line: int, column: int | None, settable: frozenset[str]) -> bool | None:
    """Tell whether a decision at a place of some code is only about output.

    Args:
        code: the code.
        line: the line in its file.
        column: the column, in bytes; None where it is not known.
        settable: last names of attributes that it may set: the one that decides, and those by which nothing is decided.

    Returns:
        Whether it is; None where the source cannot be read.
    """
    read = _tree(code)
    if read is None:
        return None
    tree, indent = read
    at = line - code.co_firstlineno + 1
    statement, rest = _statement(tree, at, None if column is None else max(column - indent, 0))
    if statement is None:
        return None
    if isinstance(statement, ast.If):
        return _is_output_branch(tree, statement, rest, settable)
    if isinstance(statement, (ast.While, ast.Assert, ast.For)):
        return False
    if _is_show(statement) or _sets_itself(statement, settable):
        return True
    parts = list(ast.walk(statement))
    if any(isinstance(part, (ast.Compare, ast.IfExp, ast.BoolOp, ast.Mod, ast.FloorDiv)) for part in parts):
        return False
    # max(peak, loss) compares, and keeps one of the two
    return any(isinstance(part, ast.Call) and _called(part) in _CHOOSING for part in parts)


def _sets_itself(statement: ast.stmt, settable: frozenset[str]) -> bool:
    """Tell whether a statement only sets what it decides by: ``avg = x if avg is None else 0.9 * avg + 0.1 * x``."""
    if not isinstance(statement, (ast.Assign, ast.AugAssign)):
        return False
    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
    return all(_name(target) in settable for target in targets)


@lru_cache(maxsize=256)
def _tree(code: CodeType) -> tuple[ast.AST, int] | None:
    """Return the parsed source of some code, and by how many columns it is indented in its file."""
    try:
        lines, _ = inspect.getsourcelines(code)
        text = "".join(lines)
        dedented = textwrap.dedent(text)
        return ast.parse(dedented), len(text.split("\n", 1)[0]) - len(dedented.split("\n", 1)[0])
    except (OSError, TypeError, SyntaxError, IndentationError):  # no source to be had, or a lambda in an expression
        return None


def _statement(tree: ast.AST, line: int, column: int | None) -> tuple[ast.stmt | None, list[ast.stmt]]:
    """Return the innermost statement that begins, or decides, at a place, and what follows it in its block."""
    found: tuple[ast.stmt | None, list[ast.stmt]] = (None, [])
    place = (line, math.inf if column is None else column)
    for block in _blocks(tree):
        for index, statement in enumerate(block):
            head = getattr(statement, "test", getattr(statement, "iter", statement))
            if isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.With, ast.Try)):
                continue
            begin = (statement.lineno, statement.col_offset)
            end = (head.end_lineno, math.inf if column is None else head.end_col_offset)
            if begin <= place <= end:
                found = statement, block[index + 1 :]
    return found


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def _is_output_branch(tree: ast.AST, branch: ast.If, rest: list[ast.stmt], settable: frozenset[str]) -> bool:
    statements = [*branch.body, *branch.orelse]
    for block in (branch.body, branch.orelse):
        if block and isinstance(block[-1], (ast.Return, ast.Continue)):
            # ``if step % 50: return`` before what shows
            if not _is_bare(block[-1]):
                return False
            statements = [*block[:-1], *rest]
            break
    inside = {id(node) for statement in statements for node in ast.walk(statement)}
    outside = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and id(n) not in inside and _is_read(n)}
    return _Branch(settable, outside).is_output(statements)


def _is_read(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _is_bare(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Return):
        return statement.value is None or (isinstance(statement.value, ast.Constant) and statement.value.value is None)
    return isinstance(statement, ast.Continue)


@dataclass(frozen=True)
class _Branch:
    """What a branch may set without doing more than showing something.

    Attributes:
        settable: last names of the attribute by which it was taken (the step that was shown last) and of those by which
            nothing is decided.
        outside: variables that are read outside of it.
    """

    settable: frozenset[str]
    outside: set[str]

    def is_output(self, statements: list[ast.stmt]) -> bool:
        """Tell whether statements only show something, or set what leads to nothing."""
        waiting = list(statements)
        while waiting:
            statement = waiting.pop()
            if isinstance(statement, (ast.If, ast.For, ast.With)):
                waiting += [*statement.body, *getattr(statement, "orelse", ())]
            elif isinstance(statement, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                # a formatted text is made to be shown
                if not isinstance(statement.value, ast.JoinedStr) and not all(map(self._may_set, targets)):
                    return False
            elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and not _is_show(statement):
                receiver = getattr(statement.value.func, "value", None)
                if _called(statement.value) not in _KEEPING or receiver is None or not self._may_set(receiver):
                    return False
            elif not (isinstance(statement, (ast.Pass, ast.Delete)) or _is_show(statement) or _is_bare(statement)):
                return False
        return True

    def _may_set(self, target: ast.expr) -> bool:
        if isinstance(target, ast.Tuple):
            return all(map(self._may_set, target.elts))
        if isinstance(target, ast.Name):
            return target.id not in self.outside
        return _name(target) in self.settable


def _name(node: ast.expr) -> str | None:
    """Return the last name of an attribute, or the key of ``x["key"]``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.slice.value if isinstance(node.slice.value, str) else None
    return None


def _is_show(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and _called(statement.value) in _SHOWING
    )


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
