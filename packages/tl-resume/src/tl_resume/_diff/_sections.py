"""The sections of a state: model, optimizers, schedulers, ..., each with the names that a person has for its parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tl_resume._diff._names import is_optimizer
from tl_resume._diff._stored import StoredTensor
from tl_resume._diff._tree import Path

_MODEL_KEYS = ("model", "model_state_dict", "state_dict", "module")
_SCHEDULER_KEYS = ("scheduler", "scheduler_state_dict", "lr_scheduler", "lr_scheduler_state_dict")
_SCALER_KEYS = ("scaler", "scaler_state_dict", "grad_scaler")


@dataclass(eq=False)
class Section:
    """One part of a state.

    Attributes:
        title: What messages call it; empty where the state has no parts.
        kind: ``"model"``, ``"optimizer"``, ``"scheduler"``, ``"scaler"``, ``"setup"`` (named after the setup's
            attributes) or ``""``.
        value: Its content.
        ordered: Whether the order of its entries is the one that the model gave, as safetensors files do not keep it.
    """

    title: str
    kind: str
    value: Any
    ordered: bool = True

    @property
    def file(self) -> str:
        """The file that it is from, where the state is a folder."""
        return self.title.partition(": ")[0]


@dataclass(frozen=True)
class Label:
    """The name of a leaf: ``text`` whole, and ``parts`` by which names are grouped below ``prefix``."""

    text: str
    prefix: str
    parts: tuple[str, ...]


def split(state: Any, *, ordered: bool = True) -> list[Section]:
    """Split a state into its sections.

    Args:
        state: A captured training state, a checkpoint's dict, a state dict, or any nested dict.
        ordered: Whether its entries are in the order that they were made in.
    """
    if not isinstance(state, Mapping):
        return [Section("", "", state, ordered)]
    if _is_training_state(state):
        return _training_sections(state, ordered)
    if is_optimizer(state):
        return [Section("", "optimizer", state, ordered)]
    sections: list[Section] = []
    loose: dict[Any, Any] = {}
    for key, value in state.items():
        several = value if isinstance(value, (list, tuple)) else ()
        if several and all(is_optimizer(item) for item in several):
            sections += [Section(f"{key}[{i}]", "optimizer", item, ordered) for i, item in enumerate(several)]
        elif isinstance(value, Mapping) and isinstance(key, str):
            sections.append(Section(key, _kind(key, value), value, ordered))
        else:
            loose[key] = value
    if loose or not sections:
        has_model = any(section.kind == "model" for section in sections)
        holds_tensors = any(is_tensor(value) for value in loose.values())
        sections.insert(0, Section("", "model" if holds_tensors and not has_model else "", loose, ordered))
    return sections


def is_tensor(value: Any) -> bool:
    """Say whether a value is a tensor, in memory or in a file."""
    return isinstance(value, (Tensor, StoredTensor))


def _is_training_state(state: Mapping[Any, Any]) -> bool:
    parts = ("model", "optimizers", "schedulers", "rng")
    return all(isinstance(state.get(part), Mapping) for part in parts)


def _training_sections(state: Mapping[str, Any], ordered: bool) -> list[Section]:
    sections = [Section("model", "model", state["model"], ordered)]
    for part, kind in (("optimizers", "optimizer"), ("schedulers", "scheduler")):
        sections += [Section(f"{kind} {name!r}", kind, value, ordered) for name, value in state[part].items()]
    if state.get("scaler") is not None:
        sections.append(Section("scaler", "scaler", state["scaler"], ordered))
    setup: dict[str, Any] = {"step_index": state["step_index"]} if "step_index" in state else {}
    setup.update(state.get("attributes") or {})
    if state.get("state"):
        setup["state"] = state["state"]
    if setup:
        sections.append(Section("setup", "setup", setup, ordered))
    known = {"model", "optimizers", "schedulers", "scaler", "step_index", "attributes", "state"}
    for part, value in state.items():
        if part not in known and value:
            sections.append(Section(part, "", value, ordered))
    return sections


def _kind(key: str, value: Mapping[Any, Any]) -> str:
    if is_optimizer(value):
        return "optimizer"
    if key in _MODEL_KEYS and value and any(is_tensor(item) for item in value.values()):
        return "model"
    if key in _SCHEDULER_KEYS:
        return "scheduler"
    return "scaler" if key in _SCALER_KEYS else ""


def label(path: Path, kind: str) -> Label:
    """Name a leaf of a section.

    Args:
        path: Its keys from the section on.
        kind: The section's kind.

    Returns:
        For an optimizer's state ``exp_avg of encoder.weight``, for others dotted keys with indices in brackets.
    """
    if kind == "optimizer" and len(path) > 1 and path[0] == "state":
        slot = _dotted(path[2:])
        prefix = f"{slot} of " if slot else ""
        return Label(f"{prefix}{path[1]}", prefix, tuple(str(path[1]).split(".")))
    if kind == "setup" and path and path[0] == "state":
        entry = "setup.state" + "".join(f"[{key!r}]" for key in path[1:2])
        return Label(entry + _tail(path[2:]), "", (entry, *_parts(path[2:])))
    if kind == "setup":
        return Label(f"setup.{_dotted(path)}", "", (f"setup.{_dotted(path[:1])}", *_parts(path[1:])))
    return Label(_dotted(path), "", _parts(path))


def _dotted(path: Path) -> str:
    text = ""
    for key in path:
        if isinstance(key, str):
            text += f"{'.' if text else ''}{key or repr(key)}"
        else:
            text += f"[{key!r}]"
    return text


def _tail(path: Path) -> str:
    text = _dotted(path)
    return f".{text}" if text and not text.startswith("[") else text


def _parts(path: Path) -> tuple[str, ...]:
    parts: list[str] = []
    for key in path:
        parts += key.split(".") if isinstance(key, str) else [f"[{key!r}]"]
    return tuple(parts)
