"""Runs the resumed half in a process of its own, as a real resume does."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import pickle
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tl_core import standard_step
from tl_resume._check._loop import Loop, Session
from tl_resume._check._runs import ResumedRun, resumed, whole_number
from tl_resume._check._store import Store
from tl_telemetry import StateCapture

_GUARD = 'call the check below `if __name__ == "__main__":`, which a spawned process leaves out'


@dataclass(frozen=True)
class Function:
    """A function by the name and the file of its module, as another process can find it."""

    module: str
    file: str | None
    name: str

    def find(self) -> Any:
        """Import the module and return the function."""
        value: Any = _module(self.module, self.file)
        for part in self.name.split("."):
            value = getattr(value, part)
        return value


@dataclass(frozen=True)
class _Task:
    functions: dict[str, Function]
    batches: list[Any]
    steps: int
    device: str
    seed: int
    restores_step: bool
    resume_at: int
    path: str
    folder: str
    saved: StateCapture
    num_threads: int


def check_importable(**functions: Callable[..., Any] | None) -> dict[str, Function]:
    """Name the functions of a loop so that a spawned process can import them.

    Args:
        functions: by the names of the arguments; those that are None are left out.

    Raises:
        ValueError: one is no plain function or class of an importable module, or this is the script that a spawned
            process imports.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise ValueError(f"fresh_process=True starts a process that imports this script anew: {_GUARD}")
    return {argument: _named(value, argument) for argument, value in functions.items() if value is not None}


def _named(value: Any, argument: str) -> Function:
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    found = sys.modules.get(module) if isinstance(module, str) else None
    reached: Any = found
    for part in name.split("."):
        reached = getattr(reached, part, None)
    if found is None or reached is not value:
        shown = name or type(value).__name__
        raise ValueError(
            "fresh_process=True needs functions at the top of a module, which a new process can import; "
            f"{argument} is {shown} (a local function, a lambda, a bound method or a partial cannot be imported)"
        )
    spec = getattr(found, "__spec__", None)
    public = spec.name if module == "__main__" and spec is not None else module
    file = getattr(found, "__file__", None)
    if module == "__main__" and file is None:
        raise ValueError(f"fresh_process=True needs functions of a file; {argument} was typed into an interpreter")
    return Function(str(public), file, name)


def _module(name: str, file: str | None) -> Any:
    if name in sys.modules and name != "__main__":
        return sys.modules[name]
    try:
        if name != "__main__":
            module = importlib.import_module(name)
            if file is None or Path(str(module.__file__)).samefile(file):
                return module
    except ImportError:  # a test file, which pytest imports by its path
        pass
    alias = "__tl_main__" if name == "__main__" else name
    if alias in sys.modules:
        return sys.modules[alias]
    spec = importlib.util.spec_from_file_location(alias, str(file))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[alias] = module
    sys.path.insert(0, str(Path(str(file)).parent))  # what a script imports from beside it
    spec.loader.exec_module(module)
    return module


def resumed_elsewhere(
    session: Session, functions: dict[str, Function], resume_at: int, path: Path, folder: Path, saved: StateCapture
) -> ResumedRun:
    """Run the resumed half in a spawned process.

    Args:
        session: what the runs share.
        functions: the functions of the loop, named by ``check_importable``.
        resume_at: the step to go on from.
        path: the checkpoint.
        folder: an empty folder for the tensors that come back.
        saved: the state when saved.

    Raises:
        ValueError: a batch cannot be sent to another process.
        RuntimeError: the process ended before it was done.
    """
    loop = session.loop
    task = _Task(
        functions=functions,
        batches=loop.batches,
        steps=loop.steps,
        device=str(loop.device),
        seed=loop.seed,
        restores_step=loop.restores_step,
        resume_at=resume_at,
        path=str(path),
        folder=str(folder),
        saved=saved.portable(),
        num_threads=torch.get_num_threads(),
    )
    try:
        pickle.dumps(task.batches)
    except Exception as error:  # noqa: BLE001  a batch of the person's own class may refuse in any way
        raise ValueError(f"fresh_process=True needs batches that can be sent to a process: {error}") from None
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            run = pool.submit(_run, task).result()
        except BrokenProcessPool:
            raise RuntimeError(
                "fresh_process=True: the process that resumes ended before it was done (killed, crashed or without "
                f"memory; what it printed says more). If this is a script: {_GUARD}"
            ) from None
    session.cost += (loop.steps - resume_at) / loop.steps
    return run


def _run(task: _Task) -> ResumedRun:
    torch.set_num_threads(task.num_threads)  # other numbers of threads add up in another order
    found = {argument: function.find() for argument, function in task.functions.items()}
    step = standard_step(found["loss_fn"]) if "loss_fn" in found else found.get("step")
    loop = Loop(
        make_setup=found["make_setup"],
        step=step,
        make_step=found.get("make_step"),
        save=found["save"],
        load=found["load"],
        batches=task.batches,
        steps=task.steps,
        device=task.device,
        seed=task.seed,
        restores_step=task.restores_step,
    )
    back = resumed(Session(loop, Store(Path(task.folder))), task.resume_at, Path(task.path), saved=task.saved)
    back.run.start, back.run.end = back.run.start.portable(), back.run.finished.portable()
    return replace(
        back, loaded=back.loaded.portable(), returned=_plain(back.returned), step_index=_plain(back.step_index)
    )


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    number = whole_number(value)
    return repr(value) if number is None else number
