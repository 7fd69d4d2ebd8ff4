"""Names the first module whose output differs between two runs, by running both to the step at which they part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tl_core import TrainingSetup
from tl_resume._check._content import content_digest
from tl_resume._check._ledger import Ledger
from tl_resume._check._loop import Session

Outputs = list[tuple[str, str, str]]  # a module's name, the digest of what it got, the digest of what it gave


def first_different_module(session: Session, resume_at: int, path: Path, step: int) -> str:
    """Run the uninterrupted and the resumed run again up to a step, and compare its modules' outputs.

    Args:
        session: what the runs share.
        resume_at: the step that the resumed run goes on from.
        path: the checkpoint.
        step: the step at which the runs part.

    Returns:
        A sentence; empty where no module's output differs.
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
                return ""
    for (name, given, output), (other, other_given, other_output) in zip(expected, got, strict=False):
        if name != other:
            return f"in step {step}, module {name} runs without interruption where {other} runs after resuming"
        if given != other_given:
            return f"in step {step}, what goes into module {name} is already different"
        if output != other_output:
            return f"in step {step}, module {name} is the first that gives something else for the same input"
    if expected == got and expected:
        return f"in step {step}, all modules give the same outputs: the difference comes after the forward pass"
    return ""


def _outputs(session: Session, setup: TrainingSetup, train_step: Any, run: Any, start: int, step: int) -> Outputs:
    session.train(setup, train_step, run, start, step, what="repeated run")
    outputs: Outputs = []
    with _watched(setup.model, outputs):
        session.train(setup, train_step, run, step, step + 1, what="repeated run")
    return outputs


@contextmanager
def _watched(model: nn.Module, outputs: Outputs) -> Iterator[None]:
    handles = []
    for name, module in model.named_modules():
        if not list(module.children()) and "_orig_mod" not in name:
            handles.append(module.register_forward_hook(_hook(name or type(module).__name__, outputs)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hook(name: str, outputs: Outputs) -> Callable[..., None]:
    def hook(module: nn.Module, args: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            outputs.append((name, content_digest(args), content_digest(output)))

    return hook
