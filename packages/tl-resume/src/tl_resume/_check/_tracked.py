"""Numbers and strings that notice when code decides by them, put in place of lost values for one run of the loop.

They are ``int``, ``float`` and ``str`` of the same value; what is computed from them notices too.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from types import CodeType, FrameType
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode

from tl_telemetry import is_own_namespace


@dataclass(frozen=True)
class Decision:
    """One decision that was seen.

    Attributes:
        label: whose value decided.
        code: the code that decided.
        line: its line.
        column: its column, in bytes; None where Python does not tell (before 3.11).
        modulus: what the value was taken modulo by before it was compared; None where it was not.
    """

    label: str
    code: CodeType
    line: int
    column: int | None
    modulus: int | None


class Decisions:
    """Collects the decisions of the person's code.

    Attributes:
        seen: the decisions.
        trains: whose value is computed with in what is trained.
        step: the step that runs; set by whoever runs it.
        outcomes: how each came out, by step; None where that is not known.
    """

    def __init__(self) -> None:
        self.seen: set[Decision] = set()
        self.trains: set[str] = set()
        self.step = 0
        self.outcomes: dict[Decision, dict[int, list[object]]] = {}

    def note(self, labels: frozenset[str], modulus: int | None, outcome: object = None) -> None:
        """Note a decision of the code that is running, unless that is a library's."""
        frame = sys._getframe(2)
        while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
            frame = frame.f_back
        if is_own_namespace(frame.f_globals):
            where = frame.f_code, frame.f_lineno, _column(frame)
            for label in labels:
                decision = Decision(label, *where, modulus)
                self.seen.add(decision)
                self.outcomes.setdefault(decision, {}).setdefault(self.step, []).append(outcome)


def _column(frame: FrameType) -> int | None:
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None:
        return None
    _, _, column, _ = next(islice(positions(), frame.f_lasti // 2, None))
    return column if isinstance(column, int) else None


class _Tracked:
    """What the three kinds of tracked values share."""

    decisions: Decisions
    labels: frozenset[str]
    modulus: int | None

    def _decides(self, outcome: object = None) -> None:
        self.decisions.note(self.labels, self.modulus, outcome)

    def __reduce__(self) -> Any:  # copies and files hold the plain value
        plain = _plain(self)
        return type(plain), (plain,)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        """Compute with numpy's numbers and arrays as the plain value does: they take a subclass for an array."""
        out = getattr(ufunc, method)(*map(_plain, inputs), **options)
        if getattr(out, "shape", None) == () and str(out.dtype) == "bool":
            self._decides()
        return out

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Let torch take the plain value; notice ``loss < best`` of a tensor of one element."""
        out = _call_plain(func, args, kwargs)
        if isinstance(out, Tensor) and out.requires_grad:
            for value in (value for value in args if isinstance(value, _Tracked)):
                value.decisions.trains |= value.labels
        if getattr(func, "__name__", "") in _COMPARED and isinstance(out, Tensor) and out.numel() == 1:
            for value in args:
                if isinstance(value, _Tracked):
                    value._decides()
        return out


_COMPARED = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal"])


def _call_plain(func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return func(*map(_bare, args), **{key: _bare(value) for key, value in (kwargs or {}).items()})


def _bare(value: Any) -> Any:
    """Return an argument of a function of torch without tracking: a number, or a shape of them."""
    if type(value) in (list, tuple):
        return type(value)(map(_bare, value))
    return _plain(value)


def _plain(value: Any) -> Any:
    """Return a value without its tracking."""
    if not isinstance(value, _Tracked):
        return value
    if isinstance(value, _Bool):
        return int.__bool__(value)
    exact: Any = next(exact for kind, exact in _EXACT.items() if isinstance(value, kind))
    return exact(value)


def track(value: Any, decisions: Decisions, labels: frozenset[str], modulus: int | None = None) -> Any:
    """Return a value that notices; one that is no number or string is returned as it is.

    Args:
        value: the value; one of numpy's numbers is followed as Python's number of the same value.
        decisions: where decisions are noted.
        labels: whose value it is, or is computed from.
        modulus: what it was taken modulo by.
    """
    value = _plain(value)
    kinds = {bool: _Bool, int: _Int, float: _Float, str: _Str}
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.number):
        value = value.item()  # numpy's own types cannot safely be derived from
    if type(value) not in kinds:
        return value
    made: Any = kinds[type(value)](value)
    made.decisions, made.labels, made.modulus = decisions, labels, modulus
    return made


def _binary(name: str, function: Callable[[Any, Any], Any], *, reflected: bool = False) -> Callable[..., Any]:
    def method(self: Any, other: Any, *more: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented  # tensors, arrays and the like take the number that it is
        labels = self.labels | (other.labels if isinstance(other, _Tracked) else frozenset())
        pair = (_plain(other), _plain(self)) if reflected else (_plain(self), _plain(other))
        modulus = self.modulus
        if name == "mod" and not reflected and isinstance(pair[1], int):
            modulus = pair[1]
        elif name not in ("add", "sub", "mod"):
            modulus = None
        if name == "floordiv":
            self._decides()
        return track(function(*pair, *map(_plain, more)), self.decisions, labels, modulus)

    return method


def _unary(function: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self: track(function(_plain(self)), self.decisions, self.labels)


def _comparison(function: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if isinstance(other, (int, float, str)) or other is None:
            outcome = function(_plain(self), _plain(other))
            self._decides(outcome)
            return outcome
        return NotImplemented

    return method


def _deciding(function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *arguments: Any) -> Any:
        outcome = function(_plain(self), *arguments)
        self._decides(outcome)
        return outcome

    return method


_COMPARISONS = {f"__{name}__": _comparison(getattr(operator, name)) for name in ("lt", "le", "gt", "ge", "eq", "ne")}
_OPERATORS = {name: getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod")}
_BITS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}
_ARITHMETIC, _BITWISE = (
    {
        f"__{'r' if reflected else ''}{name}__": _binary(name, function, reflected=reflected)
        for name, function in functions.items()
        for reflected in (False, True)
    }
    for functions in ({**_OPERATORS, "pow": pow}, _BITS)
)
_UNARY = {f"__{name}__": _unary(function) for name, function in (("neg", operator.neg), ("abs", abs))}
_ROUNDING = {
    f"__{name}__": _deciding(function)
    for name, function in (
        ("bool", bool),
        ("round", round),
        ("floor", math.floor),
        ("ceil", math.ceil),
        ("trunc", math.trunc),
    )
}
_NUMBER = {**_COMPARISONS, **_ARITHMETIC, **_UNARY, **_ROUNDING}

_Int: Any = type("int", (_Tracked, int), {**_NUMBER, **_BITWISE, "__hash__": int.__hash__})
_Float: Any = type("float", (_Tracked, float), {**_NUMBER, "__int__": _deciding(int), "__hash__": float.__hash__})
# bool cannot be derived from: a number that shows itself as one, and is one for isinstance()
_Bool: Any = type(
    "bool",
    (_Tracked, int),
    {
        **_NUMBER,
        **_BITWISE,
        "__class__": property(lambda self: bool),
        "__hash__": int.__hash__,
        "__repr__": lambda self: repr(_plain(self)),
    },
)
_Str: Any = type(
    "str",
    (_Tracked, str),
    {**_COMPARISONS, "__bool__": _deciding(bool), "__hash__": _deciding(hash)},
)


# how a value without its tracking is had
_EXACT: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}


class TrackedTensors(TorchFunctionMode):
    """Notices when code decides by tensors of one element, or by what is computed from them.

    Args:
        decisions: where decisions are noted.
    """

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self._decisions = decisions
        self._labels: dict[int, tuple[frozenset[str], Tensor]] = {}  # with the tensor, so that its id stays its own

    def watch(self, tensor: Tensor, label: str) -> None:
        """Follow a tensor."""
        self._labels[id(tensor)] = frozenset([label]), tensor

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        labels = frozenset().union(*map(self._labels_of, args))
        out = _call_plain(func, args, kwargs)
        if not labels:
            return out
        name = getattr(func, "__name__", "")
        if name in ("__bool__", "__int__", "__index__"):
            self._decisions.note(labels, None)
        elif name == "item":
            return track(out, self._decisions, labels)
        elif isinstance(out, Tensor) and out.numel() == 1 and id(out) not in self._labels:
            self._labels[id(out)] = labels, out
        return out

    def _labels_of(self, value: Any) -> frozenset[str]:
        if isinstance(value, _Tracked):
            return value.labels
        found = self._labels.get(id(value)) if isinstance(value, Tensor) else None
        return found[0] if found else frozenset()
