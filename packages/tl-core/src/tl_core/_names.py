"""Names of parameters and steps, as messages and patterns use them."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn

MAX_GROUPS = 12
# Components that wrappers insert anywhere in a name: torch.compile, activation checkpointing, FSDP.
_WRAPPER_COMPONENTS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def parameter_names(model: nn.Module, *, remove_duplicate: bool = True) -> dict[str, nn.Parameter]:
    """Name the parameters of a model as its author does, whatever it is wrapped in.

    A ``Parameter`` object appears once, under its first name, unless all names of tied weights are asked for. What
    ``torch.compile``, activation checkpointing, FSDP, ``DataParallel`` and ``DistributedDataParallel`` insert in names
    is cut out.

    Args:
        model: The model, wrapped or not.
        remove_duplicate: Give a tied parameter's first name only.

    Returns:
        The parameters by name, in the model's order.
    """
    prefix = _parallel_prefix(model)
    named: dict[str, nn.Parameter] = {}
    for raw, parameter in model.named_parameters(remove_duplicate=remove_duplicate):
        name = _clean_name(raw, prefix)
        named[raw if name in named else name] = parameter
    return named


def module_names(model: nn.Module) -> dict[str, nn.Module]:
    """Name the modules of a model as ``parameter_names`` names what they hold; of a wrapper, only what it wraps.

    Args:
        model: The model, wrapped or not; its own name is ``""``.

    Returns:
        The modules by name, in the model's order.
    """
    prefix = _parallel_prefix(model)
    # what is wrapped comes after its wrapper, under the same name
    return {_clean_name(raw, prefix): module for raw, module in model.named_modules()}


def _clean_name(raw: str, parallel_prefix: int) -> str:
    """Cut wrapper components, and the first ``parallel_prefix`` components named ``module``, out of a name."""
    kept = [part for part in raw.split(".") if part not in _WRAPPER_COMPONENTS]
    return ".".join(kept[parallel_prefix:])


def _parallel_prefix(model: nn.Module) -> int:
    """Count the leading ``module.`` components that data parallel wrappers put before every name."""
    count = 0
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            count += 1
            model = model.module
            continue
        inner = [model._modules[part] for part in _WRAPPER_COMPONENTS if part in model._modules]
        if len(inner) != 1 or inner[0] is None:
            return count
        model = inner[0]


def match_names(names: Iterable[str], patterns: Sequence[str], *, argument: str) -> list[str]:
    """Pick the names that match any of the patterns.

    Args:
        names: The names to choose from.
        patterns: ``fnmatch`` patterns, case-sensitive (``"encoder.*"``).
        argument: What the patterns were passed as, for messages.

    Returns:
        The matching names, in the order of ``names``.

    Raises:
        TypeError: ``patterns`` is a plain string or not a collection of strings.
        ValueError: A pattern matches nothing.
    """
    if isinstance(patterns, (str, bytes)):
        raise TypeError(f"{argument} must be a list of patterns, got the string {patterns!r}: write [{patterns!r}]")
    if not isinstance(patterns, Iterable):
        raise TypeError(f"{argument} must be a list of patterns, got {type(patterns).__name__}")
    names = list(names)
    matched: set[str] = set()
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument} must hold strings, got {type(pattern).__name__} {pattern!r}")
        hits = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not hits:
            near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.5) or names[:5]
            shown = f"names are for example {', '.join(near)}" if near else "there are no names"
            raise ValueError(f"{argument}: the pattern {pattern!r} matches nothing; {shown}")
        matched.update(hits)
    return [name for name in names if name in matched]


def group_names(names: Iterable[str], all_names: Iterable[str]) -> str:
    """Write many names shortly: a module prefix stands for all the names below it.

    Args:
        names: The names to write.
        all_names: All names there are; a prefix is used only when all of its names are in ``names``.

    Returns:
        Text such as ``"encoder.* (12 tensors), head.weight"``, at most 12 entries long.
    """
    wanted = list(dict.fromkeys(names))
    chosen = set(wanted)
    sizes: dict[str, int] = {}
    partial: set[str] = set()
    for name in dict.fromkeys([*all_names, *wanted]):
        for prefix in _prefixes(name):
            sizes[prefix] = sizes.get(prefix, 0) + 1
            if name not in chosen:
                partial.add(prefix)
    entries: dict[str, int] = {}
    for name in wanted:
        whole = [prefix for prefix in _prefixes(name) if prefix not in partial and sizes[prefix] > 1]
        entries[f"{whole[0]}.* ({sizes[whole[0]]} tensors)" if whole else name] = sizes[whole[0]] if whole else 1
    shown = list(entries)[:MAX_GROUPS]
    rest = list(entries.values())[MAX_GROUPS:]
    return ", ".join(shown) + (f", and {sum(rest)} more tensor{'' if sum(rest) == 1 else 's'}" if rest else "")


def _prefixes(name: str) -> list[str]:
    """List the module prefixes of a name, the shortest first."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(1, len(parts))]


def step_ranges(steps: Iterable[int]) -> str:
    """Write step indices as ranges.

    Args:
        steps: Step indices, in any order.

    Returns:
        Text such as ``"step 3"`` or ``"steps 0-4, 7"``; ``"no step"`` when there is none.
    """
    ordered = sorted(set(steps))
    if not ordered:
        return "no step"
    ranges: list[list[int]] = []
    for step in ordered:
        if ranges and ranges[-1][1] == step - 1:
            ranges[-1][1] = step
        else:
            ranges.append([step, step])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)
    return f"{'step' if len(ordered) == 1 else 'steps'} {text}"
