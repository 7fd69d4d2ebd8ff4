"""Whether a file fits a setup, found out before anything of the setup is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tl_core import TrainingSetup, group_names
from tl_resume._format import TensorEntry
from tl_resume._generators import find_generators, is_generator
from tl_resume._iterators import is_loader_iterator, is_stateful, made_iterators, own_entries, stateful_loaders
from tl_resume._model_names import attributes, clean_keys, stray_tensors, trained_tensors
from tl_resume._state import (
    SECTIONS,
    has_torch_layout,
    is_plain,
    optimizer_state,
    setup_modules,
    stateful_objects,
)

_DICTS = tuple(section for section in SECTIONS if section not in ("model", "scaler", "step_index"))


def misfits(setup: TrainingSetup, saved: Any) -> list[str]:
    """List, a line a section, what keeps a saved state from being restored into a setup.

    Args:
        setup: The setup, which is only looked at.
        saved: The skeleton of the file, with an entry in place of each tensor.
    """
    if not isinstance(saved, dict) or set(saved) != set(SECTIONS):
        return [f"it holds no training state: that has the sections {', '.join(SECTIONS)}"]
    if wrong := [section for section in _DICTS if not isinstance(saved[section], dict)]:
        return [f"its section {wrong[0]} is no dict"]
    if wrong := [section for section in _DICTS if not _has_names(saved[section])]:
        return [f"its section {wrong[0]} has a key that is no name"]
    trained = trained_tensors(setup)
    lines = [
        _line("model", _module(setup.model, saved["model"])),
        _line("optimizers", _names(setup.optimizers, saved["optimizers"])),
        *_optimizers(setup, saved["optimizers"], trained),
        _line("schedulers", _names(setup.schedulers, saved["schedulers"])),
        *_classes(setup, saved["classes"]),
        _line("scaler", _scaler(setup.scaler, saved["scaler"])),
        *_entries(setup, saved),
        _line("iterators", _iterators(setup, saved["iterators"])),
        _line("parameters", [*_names(strays := stray_tensors(setup), saved["parameters"]),
                             *_tensors(strays, saved["parameters"])]),
        _line("generators", _generators(setup, saved["generators"])),
        _line("modes", _names(setup_modules(setup), saved["modes"])),
        _line("gradients", _gradients(trained, saved["gradients"])),
    ]  # fmt: skip
    if not all(type(mode) is bool for mode in saved["modes"].values()):
        lines.append("modes: a mode is no bool")
    if type(saved["step_index"]) is not int or saved["step_index"] < 0:
        lines.append(f"step_index: {saved['step_index']!r:.80} is no index of a step")
    return [line for line in lines if line]


def _has_names(saved: Any) -> bool:
    return isinstance(saved, dict) and all(isinstance(name, str) for name in saved)


def _line(section: str, problems: Iterable[str]) -> str:
    text = "; ".join(problems)
    return f"{section}: {text}" if text else ""


def _names(live: Iterable[str], saved: Iterable[Any]) -> list[str]:
    """Say which names the file lacks and which it has too many."""
    mine, theirs = list(live), [str(name) for name in saved]
    problems = []
    if missing := [name for name in mine if name not in set(theirs)]:
        problems.append(f"missing {_listed(missing, mine)}")
    if unexpected := [name for name in theirs if name not in set(mine)]:
        problems.append(f"unexpected {_listed(unexpected, theirs)}")
    return problems


def _listed(names: list[str], all_names: list[str]) -> str:
    return group_names(
        [name or "the model itself" for name in names], [name or "the model itself" for name in all_names]
    )


def _tensors(live: Mapping[str, Any], saved: Mapping[str, Any]) -> list[str]:
    """Say which tensors have another shape or dtype in the file."""
    problems = []
    for name, tensor in live.items():
        if name not in saved or not isinstance(tensor, Tensor):
            continue
        entry = saved[name]
        if not isinstance(entry, TensorEntry) or entry.kind != "tensor":
            problems.append(f"{name} is a tensor, the file has something else")
            continue
        if not is_lazy(tensor) and tuple(tensor.shape) != entry.shape:
            problems.append(f"shape of {name} is {tuple(tensor.shape)}, the file has {entry.shape}")
        if tensor.dtype != entry.dtype:
            problems.append(f"dtype of {name} is {_dtype(tensor.dtype)}, the file has {_dtype(entry.dtype)}")
    return problems


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def is_lazy(tensor: Tensor) -> bool:
    """Tell whether a tensor is one of a lazy module that has not run yet."""
    return isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer))


def live_module_state(module: nn.Module) -> dict[str, Any]:
    """List what a module's ``state_dict()`` has, the parameters and buffers themselves, under the author's names."""
    state = module.state_dict(keep_vars=True)
    return {name: state[key] for name, key in clean_keys(module, list(state)).items()}


def _module(module: nn.Module, saved: Any) -> list[str]:
    if not has_torch_layout(module):
        return []  # only its own load_state_dict knows what fits
    if not _has_names(saved):
        return ["the file has no state_dict"]
    live = live_module_state(module)
    return [*_names(live, saved), *_tensors(live, saved)]


def _optimizers(setup: TrainingSetup, saved: dict[str, Any], trained: dict[str, Tensor]) -> list[str]:
    names = {id(tensor): name for name, tensor in trained.items()}
    lines = []
    for name, optimizer in setup.optimizers.items():
        if name in saved:
            live = optimizer_state(optimizer, names)
            lines.append(_line(f"optimizers[{name!r}]", optimizer_misfits(live, saved[name])))
    return lines


def optimizer_misfits(live: Any, saved: Any) -> list[str]:
    """Compare the groups of an optimizer's state with those of a file's, parameters by name in any order."""
    if not has_named_groups(live):
        return [] if not has_named_groups(saved) else ["the file has parameter groups by name, the optimizer has not"]
    if not has_named_groups(saved):
        return ["the file has no parameter groups by name"]
    mine, theirs = live["param_groups"], saved["param_groups"]
    if len(mine) != len(theirs):
        return [f"{len(mine)} parameter groups, the file has {len(theirs)}"]
    problems = []
    for index, (group, other) in enumerate(zip(mine, theirs, strict=True)):
        problems += [f"group {index}: {problem}" for problem in _names(group["params"], other["params"])]
        if len(set(other["params"])) < len(other["params"]):
            problems.append(f"group {index}: the file has a parameter twice")
    known = {name for group in theirs for name in group["params"]}
    if strays := [name for name in saved["state"] if isinstance(name, str) and name not in known]:
        problems.append(f"the file has a state for {strays[0]!r:.80}, which is in none of its groups")
    return problems


def has_named_groups(state: Any) -> bool:
    """Tell whether an optimizer's state has the layout that ``training_state`` gives to torch's optimizers."""
    if not isinstance(state, dict) or not isinstance(state.get("state"), dict):
        return False
    groups = state.get("param_groups")
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in groups
    )


def _classes(setup: TrainingSetup, saved: dict[str, Any]) -> list[str]:
    lines = []
    for place, value in stateful_objects(setup).items():
        kind, other = type(value).__name__, saved.get(place)
        if place.startswith(("optimizers", "schedulers")) and other not in (None, kind):
            lines.append(f"{place}: it is a {kind}, the file has a {other!s:.80}")
    return lines


def _scaler(scaler: Any, saved: Any) -> list[str]:
    if (scaler is None) != (saved is None):
        return ["the setup has none, the file has one" if scaler is None else "the setup has one, the file has none"]
    if scaler is not None and not isinstance(saved, dict):
        return ["the file has no state_dict"]
    if scaler is not None and scaler.state_dict() and not saved:
        return ["it is enabled, the file's was not"]
    return []


def _entries(setup: TrainingSetup, saved: dict[str, Any]) -> list[str]:
    """Compare ``setup.state`` and the attributes: what has a state must be there, plain data may come and go."""
    lines: list[str] = []
    made = made_iterators(setup).get("attributes", {})
    for section, live, write in (
        ("state", own_entries(setup), "state[{!r}]"),
        ("attributes", attributes(setup), "setup.{}"),
    ):
        mine = {name: value for name, value in live.items() if not is_generator(value)}
        if section == "attributes":
            mine = {name: value for name, value in mine.items() if is_stateful(value) or is_plain(value)}
        problems = []
        again = saved["iterators"].get(section, {})
        if missing := [name for name in mine if name not in saved[section] and name not in again]:
            problems.append(f"missing {', '.join(missing)}")
        stateful = {name for name in saved[section] if write.format(name) in saved["classes"]}
        lost = {name for name in stateful if name not in mine}
        if section == "attributes":
            lost |= {name for name in saved[section] if name not in {*live, *made} and _is_taken(setup, name)}
        if lost:
            problems.append(f"unexpected {', '.join(sorted(map(str, lost)))}")
        alone = {name for name in mine if is_loader_iterator(mine[name])}
        alone |= {name for name in stateful if str(saved["classes"][write.format(name)]).endswith("DataLoaderIter")}
        if strays := sorted(alone.intersection([*missing, *lost])):
            problems.append(f"{', '.join(strays)}: {_LONE_ITERATOR}")
        lines.append(_line(section, problems))
        for name, value in mine.items():
            if name in saved[section]:
                problems = _entry(value, saved[section][name], name in stateful)
                problems += [_LONE_ITERATOR] if problems and name in alone else []
                lines.append(_line(write.format(name), problems))
    return lines


_LONE_ITERATOR = "the iterator of a loader; keep the loader too in setup.state, and it is made anew at its position"


def _iterators(setup: TrainingSetup, saved: dict[str, Any]) -> list[str]:
    loaders, made, problems = stateful_loaders(setup), made_iterators(setup), []
    for section, live in (("state", own_entries(setup)), ("attributes", attributes(setup))):
        names = saved.get(section, {})
        if not _has_names(names):
            return ["a name in it is no name"]
        for name, place in names.items():
            taken = section == "attributes" and name not in live and _is_taken(setup, name)
            if not isinstance(place, str) or place not in loaders:
                problems.append(f"{name} was made by {place!s:.80}, which is no loader with a state here")
            elif is_stateful(live.get(name)) or (taken and name not in made.get(section, {})):
                problems.append(f"{name} is another part of the setup, the file has an iterator of {place}")
    return problems


def _is_taken(setup: TrainingSetup, name: Any) -> bool:
    """Tell whether no attribute can be set under a name without losing what is there: ``model``, ``state``, ..."""
    return not isinstance(name, str) or name in vars(setup) or hasattr(TrainingSetup, name)


def _entry(value: Any, saved: Any, was_stateful: bool) -> list[str]:
    if is_stateful(value) != was_stateful:
        is_, was = ("has a state_dict()", "plain data") if not was_stateful else ("plain data", "a state_dict()")
        return [f"it {'is ' if is_ == 'plain data' else ''}{is_}, the file has {was}"]
    if isinstance(value, nn.Module):
        return _module(value, saved)
    containers = (dict, list, tuple, set)
    if not was_stateful and isinstance(value, containers) and saved is not None and type(value) is not type(saved):
        return [f"it is a {type(value).__name__}, the file has a {type(saved).__name__}"]
    return []


def _generators(setup: TrainingSetup, saved: dict[str, Any]) -> list[str]:
    # what objects keep to themselves (an iterator's generator) comes and goes with them
    live = [place for place in find_generators(setup) if "._" not in place or place in saved]
    return _names(live, [place for place in saved if "._" not in str(place) or place in live])


def _gradients(trained: dict[str, Tensor], saved: dict[str, Any]) -> list[str]:
    problems = []
    if unexpected := [str(name) for name in saved if name not in trained]:
        problems.append(f"unexpected {_listed(unexpected, list(map(str, saved)))}")
    for name, entry in saved.items():
        if name not in trained or is_lazy(trained[name]):
            continue
        shape, values = None, entry
        if isinstance(entry, dict):  # the parts of a sparse one
            shape, values = entry.get("size"), entry.get("values")
        if not isinstance(values, TensorEntry):
            problems.append(f"the file's {name} is no tensor")
            continue
        shape = values.shape if shape is None else shape
        if tuple(shape) != tuple(trained[name].shape):
            problems.append(f"shape of {name} is {tuple(trained[name].shape)}, the file has {tuple(shape)}")
        if values.dtype != trained[name].dtype:
            problems.append(f"dtype of {name} is {_dtype(trained[name].dtype)}, the file has {_dtype(values.dtype)}")
    return problems
