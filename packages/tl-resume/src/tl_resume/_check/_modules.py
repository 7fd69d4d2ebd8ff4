"""Names the first module whose output differs between two runs, by running both to the step at which they part."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume._check._content import content_digest
from tl_resume._check._ledger import Ledger
from tl_resume._check._loop import Session


@dataclass(frozen=True)
class _Call:
    name: str
    given: str  # the digest of what the module got
    output: str  # the digest of what it gave
    before: dict[str, str]  # digests of the states of the random generators, by their names
    after: dict[str, str]


@dataclass(frozen=True)
class FirstDifference:
    """Where the modules of two runs part.

    Attributes:
        seen: a sentence; empty where no module's output differs.
        module: the module that gives something else for the same input, since the generators that it draws from stand
            otherwise; empty where it is another matter.
        drawn_from: these generators, by their names.
    """

    seen: str = ""
    module: str = ""
    drawn_from: tuple[str, ...] = ()


def first_different_module(session: Session, resume_at: int, path: Path, step: int) -> FirstDifference:
    """Run the uninterrupted and the resumed run again up to a step, and compare its modules' outputs.

    Args:
        session: what the runs share.
        resume_at: the step that the resumed run goes on from.
        path: the checkpoint.
        step: the step at which the runs part.
    """
    loop = session.loop
    with session.fresh(loop.seed) as (setup, train_step, _, run), Ledger(setup) as run.ledger:
        expected = _outputs(session, setup, train_step, run, 0, step)
    with session.fresh((loop.seed + 1) % 2**32) as (setup, train_step, _, run):
        setup.step_index = 0 if loop.restores_step else resume_at
        with Ledger(setup) as run.ledger:
            loop.load(setup, path)
            try:
                got = _outputs(session, setup, train_step, run, resume_at, step)
            except Exception:  # noqa: BLE001  what the resumed run raises was told already
                return FirstDifference()
    for one, other in zip(expected, got, strict=False):
        if one.name != other.name:
            return FirstDifference(
                f"in step {step}, module {one.name} runs without interruption where {other.name} runs after resuming"
            )
        if one.given != other.given:
            return FirstDifference(f"in step {step}, what goes into module {one.name} is already different")
        if one.output != other.output:
            seen = f"in step {step}, module {one.name} is the first that gives something else for the same input"
            drawn = tuple(
                name
                for name, state in one.before.items()
                if state != one.after.get(name) and state != other.before.get(name)
            )
            return FirstDifference(seen, one.name if drawn else "", drawn)
    if expected and len(expected) == len(got):
        return FirstDifference(
            f"in step {step}, all modules give the same outputs: the difference comes after the forward pass"
        )
    return FirstDifference()


def _outputs(session: Session, setup: TrainingSetup, train_step: Any, run: Any, start: int, step: int) -> list[_Call]:
    session.train(setup, train_step, run, start, step, what="repeated run")
    outputs: list[_Call] = []
    with _watched(setup.model, outputs):
        session.train(setup, train_step, run, step, step + 1, what="repeated run")
    return outputs


@contextmanager
def _watched(model: nn.Module, outputs: list[_Call]) -> Iterator[None]:
    handles = []
    before: list[dict[str, str]] = [{}]  # no leaf runs inside of another
    for name, module in model.named_modules():
        if not list(module.children()) and "_orig_mod" not in name:
            handles.append(module.register_forward_pre_hook(_before(before)))
            handles.append(module.register_forward_hook(_after(name or type(module).__name__, before, outputs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _before(states: list[dict[str, str]]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any) -> None:
        if not torch.compiler.is_compiling():
            states[0] = _generators()

    return hook


def _after(name: str, before: list[dict[str, str]], outputs: list[_Call]) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            outputs.append(_Call(name, content_digest(args), content_digest(output), before[0], _generators()))

    return hook


def _generators() -> dict[str, str]:
    """Return the digests of the global generators' states, by the names that captures have for them."""
    states: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        states["numpy"] = sys.modules["numpy"].random.get_state()
    for kind in ("cuda", "xpu"):
        module = getattr(torch, kind, None)
        if module is not None and module.is_available() and module.is_initialized():
            states |= {f"{kind}:{index}": state for index, state in enumerate(module.get_rng_state_all())}
    return {name: content_digest(state) for name, state in states.items()}
