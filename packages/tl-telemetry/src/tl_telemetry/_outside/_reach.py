"""Finds what a function keeps outside of its arguments: the globals, cells, defaults and attributes that it uses."""

from __future__ import annotations

import builtins
import enum
import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from tl_telemetry._outside._bytecode import NOTHING, Used, names_used
from tl_telemetry._outside._own import is_own_class, is_own_module, is_own_namespace
from tl_telemetry._outside._refill import is_immutable, refill

_WRAPPED_BY = ("__wrapped__", "_torchdynamo_orig_callable")
_METHODS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property)
_TOO_LONG = 100  # a container with more members holds data, not the parts of a loop
OWN_OBJECT = "'s own object ("  # in the name of a place: between a function's name and its object's type


@dataclass(frozen=True)
class Place:
    """A place outside of the setup, which outlives a run of the loop.

    Attributes:
        name: The place as the person would write it. Two functions of one name can give two places of one name.
        get: Returns the value that is there now. Raises ``LookupError`` when there is none.
        set: Puts a value there. An object that a method is bound to stays the same object and takes over what the
            given one holds.
        delete: Leaves the place without a value; a place without one is left as it is.
    """

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], None]
    delete: Callable[[], None]


def places(functions: Iterable[Callable[..., Any]]) -> list[Place]:
    """List the places outside of the setup that the code of some functions uses.

    The functions and classes of the person's own code that the functions refer to are followed; the libraries' code
    is not. Modules, functions and classes are places only where the code binds their names anew.

    Args:
        functions: Functions, bound methods, partial and other callable objects.

    Returns:
        Each place once, in the order in which they are found.
    """
    walk = _walked(functions)
    walk.inherited()
    return list(walk.found.values())


def caches(functions: Iterable[Callable[..., Any]]) -> list[Any]:
    """List the functions under ``functools.lru_cache`` that the code of some functions uses."""
    return [value for value in _walked(functions).seen() if isinstance(value, functools._lru_cache_wrapper)]


def _walked(functions: Iterable[Callable[..., Any]]) -> _Walk:
    walk = _Walk()
    given = list(functions)
    for function in given:
        for inner in _unwrapped(function):
            if isinstance(inner, types.FunctionType):
                walk.home.add(id(inner.__globals__))
    for function in given:
        walk.follow(function)
        if not _is_code(function):
            walk.own_object(f"{type(function).__name__}.__call__", function)
        walk.run()
    return walk


def _unwrapped(function: Any) -> Iterator[Any]:
    """Give a callable and what it stands for, from the outside in."""
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        yield function
        if isinstance(function, functools.partial):
            function = function.func
        elif isinstance(function, types.MethodType):
            function = function.__func__
        elif isinstance(function, (staticmethod, classmethod, functools._lru_cache_wrapper)):
            function = function.__wrapped__
        elif isinstance(function, types.FunctionType):
            function = next((vars(function)[key] for key in _WRAPPED_BY if key in vars(function)), None)
        else:
            function = type(function).__call__ if callable(function) else None


class _Walk:
    """Goes through the code that can be reached from functions, and collects places."""

    def __init__(self) -> None:
        self.found: dict[tuple[Any, ...], Place] = {}
        self.home: set[int] = set()
        self._classes: list[type] = []
        self._stored: dict[str, None] = {}
        self._waiting: deque[Any] = deque()
        # By id, and kept: a temporary object's id must not come back as another's while this lasts.
        self._seen: dict[int, Any] = {}

    def follow(self, value: Any) -> None:
        """Look at a function, a class or an object later, once."""
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            self._waiting.append(value)

    def seen(self) -> list[Any]:
        """Return everything that was looked at."""
        return list(self._seen.values())

    def run(self) -> None:
        """Look at everything that waits."""
        while self._waiting:
            value = self._waiting.popleft()
            if isinstance(value, types.FunctionType):
                self._function(value)
            elif isinstance(value, type):
                self._class(value)
            elif isinstance(value, types.MethodType):
                self._method(value)
            elif isinstance(value, functools.partial):
                self._partial(value)
            elif isinstance(value, types.BuiltinFunctionType):
                if isinstance(value.__self__, (list, dict, set, deque)):  # ``keep = losses.append``
                    self.own_object(value.__name__, value.__self__)
            elif isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
                self.follow(value.__wrapped__)
            elif isinstance(value, property):
                for function in (value.fget, value.fset, value.fdel):
                    self.follow(function)
            elif isinstance(value, functools.cached_property):
                self.follow(value.func)
            else:
                self._object(value)

    def inherited(self) -> None:
        """Add what a class inherits and code assigns: the first ``cls.count += 1`` gives it one of its own."""
        for cls in self._classes:
            for base in cls.__mro__[1:]:
                for name in self._stored:
                    if (type, id(base), name) in self.found and name not in vars(cls):
                        self._class_place(cls, name)

    def own_object(self, name: str, owner: Any) -> None:
        """Add the object that a callable keeps its state in."""
        key = (object, id(owner))
        text = f"{name}{OWN_OBJECT}{type(owner).__name__})"
        self._add(key, text, lambda: owner, lambda value: refill(owner, value), _cannot_delete(text))

    def _add(
        self,
        key: tuple[Any, ...],
        name: str,
        get: Callable[[], Any],
        put: Callable[[Any], None],
        delete: Callable[[], None],
    ) -> None:
        if key not in self.found:
            self.found[key] = Place(name, get, put, delete)

    def _value(self, value: Any, *, stored: bool = False) -> bool:
        """Follow a value; tells whether its place counts."""
        if isinstance(value, types.ModuleType):
            return stored
        self.follow(value)
        # a sentinel is compared by identity: a copy of it would be another one
        return stored or not (_is_code(value) or type(value) is object)

    def _method(self, method: types.MethodType) -> None:
        function, owner = method.__func__, method.__self__
        self.follow(function)
        if not isinstance(owner, type):
            self.own_object(getattr(function, "__name__", type(function).__name__), owner)
        self.follow(owner)

    def _function(self, function: types.FunctionType) -> None:
        own = is_own_namespace(function.__globals__)
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        if not own:  # a library's decorator around a function of the person
            for key in _WRAPPED_BY:
                self.follow(vars(function).get(key))
            for cell in cells.values():
                content = _content(cell)
                if isinstance(content, (types.FunctionType, functools.partial)) or _is_own_method(content):
                    self.follow(content)
            return
        for used in names_used(function.__code__, function.__globals__, cells):
            self._used(function, used)
        for variable, cell in cells.items():
            self._cell(function, variable, cell, stored=False)
        self._defaults(function)
        for key, value in list(vars(function).items()):
            if key in _WRAPPED_BY:
                self.follow(value)
            elif not key.startswith(("__", "_torchdynamo")) and key != "pytestmark":
                self._attribute_of_function(function, key, stored=False)

    def _used(self, function: types.FunctionType, used: Used) -> None:
        owner, name = used.owner, used.name
        if used.kind == "cell":
            self._cell(function, name, owner, stored=True)
        elif used.kind == "global":
            self._global(owner, name, stored=used.stored)
        elif isinstance(owner, types.ModuleType):
            if is_own_module(owner) and (used.stored or name in vars(owner)):
                self._global(vars(owner), name, stored=used.stored)
        elif isinstance(owner, types.FunctionType):
            if is_own_namespace(owner.__globals__) and (used.stored or name in vars(owner)):
                self._attribute_of_function(owner, name, stored=used.stored)
        elif isinstance(owner, type) and used.stored and is_own_class(owner):
            self._class_place(owner, name)
        if used.kind == "attribute" and used.stored:
            self._stored[name] = None

    def _global(self, namespace: dict[str, Any], name: str, *, stored: bool) -> None:
        if name.startswith("__") and name.endswith("__"):
            return
        if name not in namespace:
            if hasattr(builtins, name) and not stored:
                return
        elif not self._value(namespace[name], stored=stored):
            return
        text = name if id(namespace) in self.home else f"{namespace.get('__name__', '?')}.{name}"
        self._in_dict(namespace, name, text)

    def _attribute_of_function(self, function: types.FunctionType, name: str, *, stored: bool) -> None:
        attributes = vars(function)
        if name not in attributes or self._value(attributes[name], stored=stored):
            self._in_dict(attributes, name, f"{_title(function)}.{name}")

    def _in_dict(self, namespace: dict[str, Any], name: str, text: str) -> None:
        self._add(
            (dict, id(namespace), name),
            text,
            lambda: namespace[name],
            lambda value: namespace.__setitem__(name, value),
            lambda: _drop(namespace, name),
        )

    def _cell(self, function: types.FunctionType, variable: str, cell: types.CellType, *, stored: bool) -> None:
        content = _content(cell)
        if content is not NOTHING and not self._value(content, stored=stored):
            return

        def get() -> Any:
            try:
                return cell.cell_contents
            except ValueError:
                raise LookupError(f"{variable} is unset") from None

        def put(value: Any) -> None:
            cell.cell_contents = value

        def delete() -> None:
            if _content(cell) is not NOTHING:
                del cell.cell_contents

        self._add((types.CellType, id(cell)), f"{variable} (closure of {_title(function)})", get, put, delete)

    def _defaults(self, function: types.FunctionType) -> None:
        code = function.__code__
        positional = code.co_varnames[: code.co_argcount]
        defaults = function.__defaults__ or ()
        for index, value in enumerate(defaults):
            if self._value(value) and not is_immutable(value):
                variable = positional[index - len(defaults)]
                self._default(function, variable, index)
        keywords = function.__kwdefaults__ or {}
        for variable, value in keywords.items():
            if self._value(value) and not is_immutable(value):
                self._in_dict(keywords, variable, f"{_title(function)}.{variable} (default)")

    def _default(self, function: types.FunctionType, variable: str, index: int) -> None:
        def get() -> Any:
            return (function.__defaults__ or ())[index]

        def put(value: Any) -> None:
            defaults = list(function.__defaults__ or ())
            defaults[index] = value
            function.__defaults__ = tuple(defaults)

        text = f"{_title(function)}.{variable} (default)"
        self._add((tuple, id(function), index), text, get, put, _cannot_delete(text))

    def _partial(self, partial: functools.partial[Any]) -> None:
        self.follow(partial.func)
        title = getattr(partial.func, "__name__", type(partial.func).__name__)
        for index, value in enumerate(partial.args):
            if self._value(value) and not is_immutable(value):
                self._partial_argument(partial, index, f"{title}'s argument {index} (partial)")
        for variable, value in partial.keywords.items():
            if self._value(value) and not is_immutable(value):
                self._in_dict(partial.keywords, variable, f"{title}.{variable} (partial)")

    def _partial_argument(self, partial: functools.partial[Any], index: int, text: str) -> None:
        def put(value: Any) -> None:
            args = (*partial.args[:index], value, *partial.args[index + 1 :])
            # the attributes of a partial are read-only, its state is not
            partial.__setstate__((partial.func, args, partial.keywords, vars(partial)))  # type: ignore[attr-defined]

        self._add((functools.partial, id(partial), index), text, lambda: partial.args[index], put, _cannot_delete(text))

    def _class(self, cls: type) -> None:
        if not is_own_class(cls):
            return
        self._classes.append(cls)
        for base in (*cls.__bases__, type(cls)):
            self.follow(base)
        for name, value in list(vars(cls).items()):
            if isinstance(value, _METHODS):
                if not _is_generated(cls, value):
                    self.follow(value)
            elif not (name.startswith("__") and name.endswith("__")) and name != "_abc_impl":
                is_data = not hasattr(type(value), "__get__") and not issubclass(cls, enum.Enum)
                if self._value(value) and is_data:
                    self._class_place(cls, name)

    def _class_place(self, cls: type, name: str) -> None:
        def delete() -> None:
            if name in vars(cls):
                type.__delattr__(cls, name)

        self._add(
            (type, id(cls), name),
            f"{cls.__qualname__.rpartition('<locals>.')[2]}.{name}",
            lambda: vars(cls)[name],
            lambda value: type.__setattr__(cls, name, value),
            delete,
        )

    def _object(self, value: Any) -> None:
        """Follow the code that an object brings: its class, and the functions and objects that it holds."""
        if isinstance(value, (list, tuple, dict)):
            inside = list(value.values() if isinstance(value, dict) else value)
            held = inside if len(inside) <= _TOO_LONG else []
        elif is_own_class(type(value)):
            self.follow(type(value))
            held = list(getattr(value, "__dict__", {}).values())
        else:
            held = []
        for one in held:
            if not isinstance(one, types.ModuleType) and not is_immutable(one):
                self.follow(one)


def _is_code(value: Any) -> bool:
    kinds = (types.ModuleType, type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
    return isinstance(value, (*kinds, functools.partial, functools._lru_cache_wrapper))


def _is_generated(cls: type, method: Any) -> bool:
    """Tell whether dataclasses or attrs wrote a method: its defaults are sentinels and factories of theirs."""
    if not isinstance(method, types.FunctionType) or not {"__dataclass_fields__", "__attrs_attrs__"} & set(vars(cls)):
        return False
    file = method.__code__.co_filename
    return method.__name__.startswith("__") and (file == "<string>" or file.startswith("<attrs generated"))


def _is_own_method(value: Any) -> bool:
    function = value.__func__ if isinstance(value, types.MethodType) else None
    return isinstance(function, types.FunctionType) and is_own_namespace(function.__globals__)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return NOTHING


def _title(function: types.FunctionType) -> str:
    return function.__qualname__.rpartition("<locals>.")[2]


def _drop(namespace: dict[str, Any], name: str) -> None:
    namespace.pop(name, None)


def _cannot_delete(text: str) -> Callable[[], None]:
    def delete() -> None:
        raise TypeError(f"{text} always has a value: it can be replaced, not deleted")

    return delete
