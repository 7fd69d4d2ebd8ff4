"""The harness of the plugin's tests: real pytest runs in folders made for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

# pytester's runs in this process drop the modules that they were the first to import, and torch cannot be imported
# twice in one process: import all of it here, before any of them, with the part that torch puts off until it is used.
import torch._dynamo  # noqa: F401

import tl_pytest._runner  # noqa: F401

RunTests = Callable[..., pytest.RunResult]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix what the outer run and the machine would change in the inner run's output."""
    monkeypatch.setenv("COLUMNS", "120")
    for name in (
        "FORCE_COLOR",
        "NO_COLOR",
        "PY_COLORS",
        "PYTEST_ADDOPTS",
        "PYTEST_XDIST_WORKER",
        "CI",
        "GITHUB_ACTIONS",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_tests(pytester: pytest.Pytester) -> RunTests:
    """Give a function that runs pytest on a test module with the given text, in this process or in one of its own."""

    def run(source: str, *arguments: str, subprocess: bool = False) -> pytest.RunResult:
        pytester.makepyfile(test_inner=source)
        start = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        # hypothesis' plugin imports all of hypothesis anew in each of these runs, which takes longer than the rest
        return start("-p", "no:cacheprovider", "-p", "no:hypothesispytest", *arguments)

    return run


LOOP = """
import torch
from tl_pytest import TrainingSetup

def make_setup():
    model = torch.nn.Linear(3, 1)
    return TrainingSetup(model, torch.optim.SGD(model.parameters(), lr=0.1))

def make_batch():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    return x, x.sum(1, keepdim=True)

def train_step(setup, batch):
    setup.optimizer.zero_grad()
    x, y = batch
    loss = torch.nn.functional.mse_loss(setup.model(x), y)
    loss.backward()
    setup.optimizer.step()
    return loss
"""


@pytest.fixture
def loop() -> str:
    """Text of a small loop without mistakes: make_setup, make_batch and train_step."""
    return LOOP
