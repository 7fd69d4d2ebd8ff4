"""Reads in a function's code which globals, attributes of modules and cells it uses."""

from __future__ import annotations

import dis
import importlib.util
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

NOTHING: Final = object()

# Instructions between the load of an object and the use of its attribute (Python 3.10 to 3.14).
_TRANSPARENT = frozenset({"COPY", "DUP_TOP", "PUSH_NULL", "NOP", "EXTENDED_ARG", "CACHE"})
_LOAD_CELL = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_WRITE_CELL = frozenset({"STORE_DEREF", "DELETE_DEREF"})
_CONSTANTS = frozenset({"LOAD_CONST", "LOAD_SMALL_INT"})


@dataclass(frozen=True)
class Used:
    """A name that code uses.

    Attributes:
        kind: ``"global"`` (``owner`` is the namespace), ``"attribute"`` (``owner`` is the module, class, function or
            other object, or ``NOTHING`` where it is not known) or ``"cell"`` (``owner`` is a cell that is written to).
        owner: What the name belongs to.
        name: The name.
        stored: Whether the code writes it.
    """

    kind: str
    owner: Any
    name: str
    stored: bool


def names_used(code: types.CodeType, namespace: dict[str, Any], cells: dict[str, types.CellType]) -> Iterator[Used]:
    """Give the names that code uses, that of nested functions and classes included.

    Args:
        code: The code.
        namespace: The globals that it runs with.
        cells: The cells of its free variables by name.
    """
    yield from _Reader(namespace, cells).read(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            # a free variable of the nested code is either one of this code too or lives for one call only
            yield from names_used(constant, namespace, {k: v for k, v in cells.items() if k in constant.co_freevars})


class _Reader:
    """Follows which known object was loaded last."""

    def __init__(self, namespace: dict[str, Any], cells: dict[str, types.CellType]) -> None:
        self.namespace = namespace
        self.cells = cells
        self.imported: dict[str, Any] = {}  # local names of modules

    def read(self, code: types.CodeType) -> Iterator[Used]:
        current: Any = NOTHING
        fresh: Any = NOTHING  # what the last import statement puts on the stack
        source: Any = NOTHING  # the module that it takes names from
        constants: list[Any] = [None, None]
        for instruction in dis.get_instructions(code):
            op, name = instruction.opname, instruction.argval
            if op in _TRANSPARENT:
                continue
            if op in _CONSTANTS:
                constants = [constants[1], name]
            before, current = current, NOTHING
            if op == "LOAD_GLOBAL" or (op == "LOAD_NAME" and name in self.namespace):
                yield Used("global", self.namespace, name, stored=False)
                current = self.namespace.get(name, NOTHING)
            elif op in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                yield Used("global", self.namespace, name, stored=True)
            elif op in _LOAD_CELL:
                current = self._cell_content(name)
            elif op in _WRITE_CELL and name in self.cells:
                yield Used("cell", self.cells[name], name, stored=True)
            elif op in ("LOAD_ATTR", "LOAD_METHOD"):
                if before is not NOTHING:
                    yield Used("attribute", before, name, stored=False)
                    current = _attribute(before, name)
            elif op in ("STORE_ATTR", "DELETE_ATTR"):
                yield Used("attribute", before, name, stored=True)
            elif op == "IMPORT_NAME":
                fresh = source = self._module(name, *constants)
            elif op == "IMPORT_FROM" and source is not NOTHING:
                yield Used("attribute", source, name, stored=False)
                fresh = _attribute(source, name)
            elif op.startswith("STORE_FAST") or op == "STORE_DEREF":
                names = name if isinstance(name, tuple) else (name,)
                if fresh is not NOTHING:
                    self.imported[names[0]] = fresh
                    fresh = NOTHING
                if op == "STORE_FAST_LOAD_FAST":
                    current = self.imported.get(names[1], NOTHING)
            elif op.startswith("LOAD_FAST"):
                current = self.imported.get(name[-1] if isinstance(name, tuple) else name, NOTHING)

    def _cell_content(self, name: str) -> Any:
        if name not in self.cells:
            return self.imported.get(name, NOTHING)
        try:
            return self.cells[name].cell_contents
        except ValueError:
            return NOTHING

    def _module(self, name: str, level: Any, wanted: Any) -> Any:
        """Find the module that an import statement gives, if it has been imported already."""
        if level:
            try:
                name = importlib.util.resolve_name("." * level + name, self.namespace.get("__package__") or "")
            except ImportError:
                return NOTHING
        return sys.modules.get(name if wanted else name.partition(".")[0], NOTHING)


def _attribute(owner: Any, name: str) -> Any:
    """Look up an attribute without running code of the owner."""
    if isinstance(owner, (types.ModuleType, type, types.FunctionType)):
        return vars(owner).get(name, NOTHING)
    return NOTHING
