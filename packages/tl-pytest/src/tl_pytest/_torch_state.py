"""Settings of torch that hold for a test and are put back after it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def torch_settings(*, deterministic: bool, num_threads: int | None) -> Iterator[None]:
    """Let torch be deterministic and use so many threads inside; afterwards all is as it was.

    Args:
        deterministic: Whether operations that are not deterministic are an error. cuBLAS reads its part of this from
            the environment when CUDA is used first in the process.
        num_threads: CPU threads of torch, also of processes started inside; None leaves them.
    """
    with ExitStack() as stack:
        if num_threads is not None:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(num_threads)
            stack.enter_context(_environment("OMP_NUM_THREADS", str(num_threads)))
        if deterministic:
            stack.callback(
                torch.use_deterministic_algorithms,
                torch.are_deterministic_algorithms_enabled(),
                warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
            )
            torch.use_deterministic_algorithms(True)
            stack.callback(setattr, torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)
            torch.backends.cudnn.benchmark = False
            stack.enter_context(
                _environment("CUBLAS_WORKSPACE_CONFIG", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ":4096:8"))
            )
        yield


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = before
